"""Whether one arm is better than another on the same questions. Numbers in, numbers out.

Values are one per question (the mean over its samples, since samples of one question are not independent), pair i
being question i in both arms. Three views of one difference: its bootstrap interval, a sign-flip permutation test that
assumes nothing but exchangeable arms, and for scores of 0 and 1 the exact McNemar test. Whoever compares several arms
reads the p-values that `holm` has corrected.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hiexp.metrics import BEST_VERDICT, bootstrap_interval
from hiexp.paired import sign_test, t_quantile

DRAWS = 10_000
"""sign patterns of the permutation test, where there are too many to try them all"""
EXACT_UP_TO = 16
"""questions on which the arms differ, up to which all patterns are tried"""


@dataclass(frozen=True)
class Comparison:
    """How much higher the second arm scores than the first."""

    questions: int
    first: float
    second: float
    difference: float
    low: float
    high: float
    """95% bootstrap interval of the difference"""
    better: int
    worse: int
    """questions on which the second arm scores higher, and lower"""
    p: float
    """two-sided sign-flip permutation test"""
    p_mcnemar: float | None
    """exact McNemar test; None where a value is neither 0 nor 1"""
    p_holm: float | None = None
    """p corrected for all arms that were compared at once; None for one comparison"""


def compare(first: Sequence[float], second: Sequence[float], seed: int = 0) -> Comparison:
    """Compare two arms question by question; ValueError if they are not as many, or none."""
    gains = [after - before for before, after in zip(first, second, strict=True)]
    if not gains:
        raise ValueError("a comparison needs at least one question")
    low, high = bootstrap_interval(gains, seed)
    is_binary = set(first) | set(second) <= {0, 1}
    return Comparison(
        questions=len(gains),
        first=math.fsum(first) / len(gains),
        second=math.fsum(second) / len(gains),
        difference=math.fsum(gains) / len(gains),
        low=low,
        high=high,
        better=sum(gain > 0 for gain in gains),
        worse=sum(gain < 0 for gain in gains),
        p=sign_flip_test(gains, seed),
        p_mcnemar=mcnemar_test(first, second) if is_binary else None,
    )


def compare_all(baseline: Sequence[float], arms: Mapping[str, Sequence[float]], seed: int = 0) -> dict[str, Comparison]:
    """Each arm against the baseline, with p-values that hold for all of them together."""
    found = {name: compare(baseline, values, seed) for name, values in arms.items()}
    corrected = holm([comparison.p for comparison in found.values()])
    pairs = zip(found.items(), corrected, strict=True)
    return {name: replace(comparison, p_holm=p) for (name, comparison), p in pairs}


def sign_flip_test(gains: Sequence[float], seed: int = 0, draws: int = DRAWS) -> float:
    """Two-sided p: how often a sum of the gains with random signs is as far from 0 as theirs.

    Exact for few gains that are not 0; else (k + 1) / (draws + 1) with k of the draws as far, so it is never 0. 1
    where all gains are 0.
    """
    values = np.array([gain for gain in gains if gain], dtype=np.float64)
    count = len(values)
    if not count:
        return 1.0
    least = abs(values.sum()) * (1 - 1e-12) - 1e-15  # the same sum in another order is as far
    if count <= EXACT_UP_TO:
        patterns = (np.arange(1 << count)[:, None] >> np.arange(count)) & 1
        return float(np.mean(np.abs((2 * patterns - 1) @ values) >= least))
    generator, as_far = np.random.default_rng(seed), 0
    at_once = max(1, 1_000_000 // count)
    for start in range(0, draws, at_once):
        signs = 2 * generator.integers(0, 2, (min(at_once, draws - start), count), dtype=np.int8) - 1
        as_far += int(np.sum(np.abs(signs @ values) >= least))
    return (as_far + 1) / (draws + 1)


def mcnemar_test(first: Sequence[float], second: Sequence[float]) -> float:
    """Exact two-sided p for scores of 0 and 1: a sign test on the questions that one arm alone got right."""
    if not set(first) | set(second) <= {0, 1}:
        raise ValueError("McNemar's test is for scores of 0 and 1")
    return sign_test([after - before for before, after in zip(first, second, strict=True)])


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction, in the order given: each is at most alpha iff it is rejected at level alpha."""
    corrected, least = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = least
    return corrected


def kappa(first: Sequence[float], second: Sequence[float], quadratic: bool = False) -> float | None:
    """Cohen's kappa of two graders on a scale from 0 to 5, grades rounded to whole ones (halves up).

    `quadratic`: a disagreement weighs the square of its size, as grades are ordered. None where both gave one and the
    same grade throughout, or nothing: agreement by chance is then complete.
    """
    grades = np.floor(np.array([first, second], dtype=np.float64) + 0.5).astype(int)
    seen = np.zeros((BEST_VERDICT + 1, BEST_VERDICT + 1))
    np.add.at(seen, (grades[0], grades[1]), 1)
    steps = np.abs(np.subtract.outer(np.arange(len(seen)), np.arange(len(seen))))
    weights = steps**2 if quadratic else (steps > 0).astype(int)
    by_chance = np.outer(seen.sum(1), seen.sum(0)) / max(seen.sum(), 1)
    expected = float((weights * by_chance).sum())
    return 1 - float((weights * seen).sum()) / expected if expected else None


@dataclass(frozen=True)
class Slope:
    """How a grade changes with one more word, by least squares, with a 95% t-interval."""

    slope: float
    low: float
    high: float
    answers: int


def verbosity(scores: Sequence[float | None], words: Sequence[int]) -> Slope | None:
    """Regress grades on the length of the answers: a judge that pays for words has a slope above 0.

    Answers without a grade are left out. None with fewer than three, or all of one length.
    """
    rows = [(length, score) for score, length in zip(scores, words, strict=True) if score is not None]
    if len(rows) < 3 or len({length for length, _ in rows}) == 1:
        return None
    x, y = np.array(rows, dtype=np.float64).T
    spread = float(((x - x.mean()) ** 2).sum())
    slope = float(((x - x.mean()) * (y - y.mean())).sum()) / spread
    left = y - y.mean() - slope * (x - x.mean())
    half = t_quantile(len(rows) - 2) * math.sqrt(float((left**2).sum()) / (len(rows) - 2) / spread)
    return Slope(slope, slope - half, slope + half, len(rows))
