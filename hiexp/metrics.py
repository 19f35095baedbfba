"""Answer metrics: a prediction and every gold answer in, a score in [0, 1] out. Pure functions, no torch.

A new metric is a function `(prediction, answers) -> float` and one line of METRICS;
configurations name it by its key. Dates and number words get no special treatment: deleting punctuation makes
"2.50" equal "250".
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

SCORER_VERSION = "1"
"""Stored with every result; raise it when a change here can change a score."""

_DELETE_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_CLOSED_ANSWERS = {"yes", "no", "noanswer"}
_BOXED = re.compile(r"\\boxed\s*\{")
_TEXT = re.compile(r"\\text(?:bf|it|rm)?\s*\{([^{}]*)\}")


def normalise(text: str) -> str:
    """Lower-case, delete ASCII punctuation, drop the words a, an, the, collapse white space: in this order.

    The common normaliser of the SQuAD, HotpotQA, 2WikiMultihopQA and MuSiQue scorers.
    """
    text = text.lower().translate(_DELETE_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", text).split())


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """1 when a normalised answer equals the normalised prediction."""
    return _best(prediction, answers, lambda p, a: float(p == a))


def token_f1(prediction: str, answers: Sequence[str]) -> float:
    """F1 of token multisets; 0 if one side is yes, no or noanswer and the sides differ (HotpotQA's rule)."""
    return _best(prediction, answers, lambda p, a: 0.0 if p != a and {p, a} & _CLOSED_ANSWERS else _overlap(p, a))


def token_f1_musique(prediction: str, answers: Sequence[str]) -> float:
    """F1 without the yes/no rule, as MuSiQue's scorer has it: a check, not the default."""
    return _best(prediction, answers, _overlap)


def cover_match(prediction: str, answers: Sequence[str]) -> float:
    """1 when a normalised answer is a substring of the normalised prediction ("cat" is in "education").

    Long predictions profit from it: read it next to the mean number of answer words.
    """
    return _best(prediction, answers, lambda p, a: float(a in p))


def cover_match_words(prediction: str, answers: Sequence[str]) -> float:
    """Cover match at word boundaries: the answer's tokens occur next to each other in the prediction."""
    return _best(prediction, answers, lambda p, a: float(f" {a} " in f" {p} "))


def cover_match_token_set(prediction: str, answers: Sequence[str]) -> float:
    """1 when every token of an answer occurs in the prediction, in any order (R1-Searcher's Cover-EM)."""
    return _best(prediction, answers, lambda p, a: float(set(a.split()) <= set(p.split())))


def bootstrap_interval(values: Sequence[float], seed: int, n: int = 1000) -> tuple[float, float]:
    """95% percentile interval of the mean, by drawing questions with replacement.

    `values` has one number per question (the mean over its samples), since samples of one question are not
    independent.
    """
    scores = np.asarray(values, dtype=np.float64)
    if scores.ndim != 1 or not len(scores):
        raise ValueError(f"bootstrap_interval needs one value per question, got shape {scores.shape}")
    generator, means = np.random.default_rng(seed), []
    at_once = max(1, 1_000_000 // len(scores))  # draws per call, to bound the memory
    for start in range(0, n, at_once):
        drawn = generator.integers(0, len(scores), (min(at_once, n - start), len(scores)))
        means.extend(scores[drawn].mean(axis=1))
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def boxes(text: str) -> list[tuple[int, str]]:
    r"""Every complete `\boxed{...}`, in order: where it ends, and its content with `\text{}` unwrapped.

    Braces are counted, so an answer may hold braces; a box that a length limit cut off is no answer at all.
    """
    found = []
    for match in _BOXED.finditer(text):
        end = _closing_brace(text, match.end())
        if end is not None:
            content, changed = text[match.end() : end], 1
            while changed:
                content, changed = _TEXT.subn(r"\1", content)
            found.append((end + 1, content.strip()))
    return sorted(found)


def _best(prediction: str, answers: Sequence[str], compare: Callable[[str, str], float]) -> float:
    """Maximum over the answers of `compare(normalised prediction, normalised answer)`; an empty prediction
    scores 0.

    An answer that normalises to nothing (the option letter "A") would be a substring of everything and equal
    to an empty prediction; there the lower-cased, stripped strings must be equal instead.
    """
    if isinstance(answers, str) or not answers:
        raise ValueError(f"answers must be a non-empty sequence of strings, got {answers!r}")
    if not prediction.strip():
        return 0.0
    predicted, scores = normalise(prediction), []
    for answer in answers:
        gold = normalise(answer)
        same_text = prediction.lower().strip() == answer.lower().strip()
        scores.append(compare(predicted, gold) if gold else float(same_text))
    return max(scores)


def _overlap(prediction: str, answer: str) -> float:
    predicted, gold = prediction.split(), answer.split()
    common = sum((Counter(predicted) & Counter(gold)).values())
    if not common:
        return 0.0
    precision, recall = common / len(predicted), common / len(gold)
    return 2 * precision * recall / (precision + recall)


def _closing_brace(text: str, start: int) -> int | None:
    """Index of the brace that closes the one before `start`; escaped braces do not count."""
    depth, i = 1, start
    while i < len(text):
        if text[i] == "\\":
            i += 1
        elif text[i] == "{":
            depth += 1
        elif text[i] == "}":
            depth -= 1
            if depth == 0:
                return i
        i += 1
    return None


METRICS: dict[str, Callable[[str, Sequence[str]], float]] = {
    "em": exact_match,
    "f1": token_f1,
    "f1_musique": token_f1_musique,
    "cem": cover_match,
    "cem_bound": cover_match_words,
    "cem_tokset": cover_match_token_set,
}
