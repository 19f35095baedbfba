"""Answer metrics: a prediction and every gold answer in, a score in [0, 1] out. Pure functions, no torch.

A new metric is a function `(prediction, answers) -> float` and one line of METRICS;
configurations name it by its key. What any input gives, for all metrics alike:

    prediction   a blank one (or None) scores 0, whatever the golds are
    golds        at least one text or number, else ValueError; each metric is its own maximum over them
    a gold that normalises to nothing ("a", "!!!") must equal the prediction as lower-cased text
    anything else, control characters and a megabyte of braces included: a score, and no exception

Dates and number words get no special treatment: deleting punctuation makes "2.50" equal "250". R1-Searcher's own
scorer differs: it turns punctuation (quotation marks beyond ASCII too) and underscores into spaces, so that "U.S." is
two tokens there and one here, and it reads true and false as yes and no; its published predictions score up to 0.8
points higher with it.
"""

import json
import math
import re
import string
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from hiexp.config import lookup
from hiexp.math_check import check_all, math_equal
from hiexp.notation import boxes, last_boxed

__all__ = ["METRICS", "boxes", "explain", "last_boxed", "normalise", "parse_judge_score"]

SCORER_VERSION = "2"
"""Stored with every result; raise it when a change here can change a score."""

BEST_VERDICT = 5
"""A judge grades from 0 to this."""

_DELETE_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_CLOSED_ANSWERS = {"yes", "no", "noanswer"}
_MOST_KEPT = 1000
"""characters of a text whose normal form is kept: six metrics want that of one prediction"""


def normalise(text: str) -> str:
    """Lower-case, delete ASCII punctuation, drop the words a, an, the, collapse white space: in this order.

    The common normaliser of the SQuAD, HotpotQA, 2WikiMultihopQA and MuSiQue scorers.
    """
    return _kept_normal_form(text) if len(text) <= _MOST_KEPT else _normal_form(text)


def _normal_form(text: str) -> str:
    text = text.lower().translate(_DELETE_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", text).split())


_kept_normal_form = lru_cache(maxsize=1 << 14)(_normal_form)


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


def math_correct(prediction: str, answers: Sequence[str]) -> float:
    r"""1 when math-verify finds an answer equal to the last complete box of the prediction, or to all of one that has
    none (math_check.py). ConfigError where the package is missing."""
    golds, prediction = _texts(answers), _said(prediction)
    return float(bool(prediction.strip()) and math_equal(prediction, golds))


def explain(metric: str, prediction: str, golds: Sequence[str]) -> str:
    """One line on why `METRICS[metric]` gives what it gives: the score, what was compared, and the rule that acted."""
    score, answers = lookup(METRICS, metric, "metric")(prediction, golds), _texts(golds)
    told, prediction = f"{score:.2f}".rstrip("0").rstrip("."), _said(prediction)
    if not prediction.strip():
        return f"{told}: no answer"
    if metric == "math":
        verdict = check_all([(prediction, answers)])[0]
        doubt = "" if verdict.second == verdict.correct else ", though a comparison of notation says otherwise"
        boxed = last_boxed(prediction)
        what = _cut(prediction.strip() if boxed is None else boxed)
        if verdict.reason:
            return f"{told}: {what} could not be compared ({verdict.reason}){doubt}"
        return f"{told}: {what} {'equals' if score else 'is not'} {_cut(' | '.join(answers))} by math-verify{doubt}"
    gold = max(answers, key=lambda answer: METRICS[metric](prediction, [answer]))
    predicted, wanted = normalise(prediction), normalise(gold)
    if not wanted:
        return f"{told}: gold {_cut(gold)} normalises to nothing, so it was compared with {_cut(prediction)} as text"
    if metric == "f1" and predicted != wanted and {predicted, wanted} & _CLOSED_ANSWERS:
        return f"{told}: {_cut(predicted)} is not {_cut(wanted)}, and yes or no are given no part of a score"
    rule = {
        "em": "equals" if score else "is not",
        "cem": "covers" if score else "does not cover",
        "cem_bound": "covers, word by word," if score else "does not hold, word by word,",
        "cem_tokens": "has all words of" if score else "lacks a word of",
    }
    shared = sum((Counter(predicted.split()) & Counter(wanted.split())).values())
    return f"{told}: {_cut(predicted)} {rule.get(metric, f'shares {shared} words with')} {_cut(wanted)}"


def parse_judge_score(reply: str) -> float | None:
    """The 0-5 score in a judge's reply, or None where there is none that can be trusted. Never raises.

    Only a labelled number counts (score, rating or grade, also as a JSON field, in bold, with /5 or "out of 5"), or a
    reply that is a number and nothing else; the last one in the reply decides, also if it is out of range or on another
    scale (4/10, 80%, 3-4), which is None. What stands in <think> or in double quotes is not the verdict: a judge may
    quote a response that claims a score of its own.
    """
    text = _without_thinking(_said(reply)).strip()[-_MOST_OF_A_REPLY:]
    if bare := _VALUE.fullmatch(text.strip("*_`#. \n")):
        return _on_scale(bare)
    anchors: list[tuple[int, float | None]] = []
    for start, end, value in _json_objects(text):
        anchors += [(start, score) for score in _json_scores(value)]
        text = text[:start] + " " * (end - start) + text[end:]
    text = _QUOTED.sub(lambda quote: " " * len(quote[0]), text)
    anchors += [(label.start(), _on_scale(label)) for label in _ANCHOR.finditer(text)]
    return max(anchors, key=lambda anchor: anchor[0])[1] if anchors else None


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


def _best(prediction: str, answers: Sequence[str], compare: Callable[[str, str], float]) -> float:
    """Maximum over the answers of `compare(normalised prediction, normalised answer)`; an empty prediction
    scores 0.

    An answer that normalises to nothing (the option letter "A") would be a substring of everything and equal
    to an empty prediction; there the lower-cased, stripped strings must be equal instead.
    """
    golds = _texts(answers)
    prediction = _said(prediction)
    if not prediction.strip():
        return 0.0
    predicted, scores = normalise(prediction), []
    for answer in golds:
        gold = normalise(answer)
        same_text = prediction.lower().strip() == answer.lower().strip()
        scores.append(compare(predicted, gold) if gold else float(same_text))
    return max(scores)


def _texts(answers: Sequence[str]) -> list[str]:
    """The gold answers; numbers become the texts that data.read_samples makes of them (142.0 is "142")."""
    if isinstance(answers, str) or not answers or not all(map(_is_gold, answers)):
        raise ValueError(f"answers must be a non-empty sequence of strings or numbers, got {answers!r}")
    return [str(int(a)) if isinstance(a, float) and a.is_integer() else str(a) for a in answers]


def _is_gold(answer: Any) -> bool:
    if isinstance(answer, (int, float)):
        return not isinstance(answer, bool) and math.isfinite(answer)
    return isinstance(answer, str)


def _said(prediction: Any) -> str:
    """A prediction as text: none is an empty one, a number is what it reads as."""
    return "" if prediction is None else prediction if isinstance(prediction, str) else str(prediction)


def _overlap(prediction: str, answer: str) -> float:
    predicted, gold = prediction.split(), answer.split()
    common = sum((Counter(predicted) & Counter(gold)).values())
    if not common:
        return 0.0
    precision, recall = common / len(predicted), common / len(gold)
    return 2 * precision * recall / (precision + recall)


def _cut(text: str, most: int = 60) -> str:
    text = " ".join(text.split())
    return repr(text if len(text) <= most else text[: most - 3] + "...")


def _without_thinking(text: str) -> str:
    """`text` but for <think>...</think>; one that never closes hides the rest, one that never opened all before it."""
    kept, depth, position = "", 0, 0
    for tag in _THINKING.finditer(text):
        if not tag[1]:
            kept += text[position : tag.start()] if depth == 0 else ""
            depth += 1
        elif depth:
            depth -= 1
        else:
            kept = ""
        position = tag.end()
    return kept + (text[position:] if depth == 0 else "")


def _json_objects(text: str) -> Iterator[tuple[int, int, Any]]:
    """(start, end, value) of every outermost JSON object."""
    decoder, position = json.JSONDecoder(), 0
    while (start := text.find("{", position)) >= 0:
        try:
            value, position = decoder.raw_decode(text, start)
            yield start, position, value
        except (ValueError, RecursionError):
            position = start + 1


def _json_scores(value: Any) -> Iterator[float | None]:
    if isinstance(value, dict):
        for key, item in value.items():
            if key.strip().lower() not in ("score", "rating", "grade"):
                yield from _json_scores(item)
            elif isinstance(item, str):
                found = _VALUE.fullmatch(item.strip())
                yield _on_scale(found) if found else None
            else:
                is_score = isinstance(item, (int, float)) and not isinstance(item, bool) and 0 <= item <= BEST_VERDICT
                yield float(item) if is_score else None


def _on_scale(found: re.Match[str]) -> float | None:
    value, scale, more = float(found["value"]), found["scale"], found["more"]
    fits = 0 <= value <= BEST_VERDICT and not more and (scale is None or float(scale) == BEST_VERDICT)
    return abs(value) if fits else None


_MOST_OF_A_REPLY = 20_000
"""characters, from the end"""
_THINKING = re.compile(r"<(/?)think(?:ing)?>", re.IGNORECASE)
_QUOTED = re.compile(
    r'"(?=[^"\n]*[A-Za-z])(?:[^"\\\n]|\\.)*+(?:"(?!\s*:)|$)|\u201c[^\u201d\n]{0,400}\u201d', re.MULTILINE
)
_NUMBER = r"""
(?P<value>[-+]?[0-9]{1,9}(?:\.[0-9]{1,9})?)
(?:[*_`"'\])\ ]{0,6}(?:/|\bout\ of\b|\bof\b)[*_`"'\[(\ ]{0,6}(?P<scale>[0-9]{1,9}(?:\.[0-9]{1,9})?))?
(?P<more>[ ]?%|[ ]?[-\u2013\u2014/][ ]?[0-9]|[ ](?:to|or)[ ][0-9]|[.,][0-9]|\w)?
"""
_VALUE = re.compile(_NUMBER, re.VERBOSE)
_ANCHOR = re.compile(
    r"""(?<![A-Za-z])(?:score|rating|grade)["'*_`\s]{0,6}(?:\([^()\n]{0,40}\))?["'*_`\s]{0,6}"""
    rf"""(?:[:=\uff1a]|\bis\b|\bof\b)["'*_`\s\[(]{{0,8}}{_NUMBER}""",
    re.VERBOSE | re.IGNORECASE,
)

METRICS: dict[str, Callable[[str, Sequence[str]], float]] = {
    "em": exact_match,
    "f1": token_f1,
    "f1_musique": token_f1_musique,
    "cem": cover_match,
    "cem_tokens": cover_match_token_set,
    "cem_bound": cover_match_words,
    "math": math_correct,
}
