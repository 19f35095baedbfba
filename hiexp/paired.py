"""Statistics over a handful of training runs, paired by seed: intervals, sign test, ratio. Numbers in, numbers out."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev


@dataclass(frozen=True)
class Paired:
    """How a number differs between two arms; nan where it takes more pairs to say."""

    pairs: int
    first: float
    second: float
    """means of the arms"""
    difference: float
    """second - first"""
    low: float
    high: float
    """95% t-interval of the difference"""
    sign_p: float
    """two-sided sign test: chance of so one-sided a result if either sign were as likely"""


def paired(first: Sequence[float], second: Sequence[float]) -> Paired:
    """Compare values of two arms, pair i being seed i; ValueError if they are not as many."""
    gains = [b - a for a, b in zip(first, second, strict=True)]
    mean, half = fmean(gains), math.nan
    if len(gains) > 1:
        half = t_quantile(len(gains) - 1) * stdev(gains) / math.sqrt(len(gains))
    return Paired(len(gains), fmean(first), fmean(second), mean, mean - half, mean + half, sign_test(gains))


def sign_test(gains: Sequence[float]) -> float:
    """Exact two-sided p of the signs; zeros have none and are left out, and without signs p is 1."""
    signs = [gain > 0 for gain in gains if gain]
    few = min(sum(signs), len(signs) - sum(signs))
    return min(1.0, 2 * sum(math.comb(len(signs), k) for k in range(few + 1)) / 2 ** len(signs))


def t_quantile(degrees: int) -> float:
    """97.5% quantile of Student's t; beyond the table its expansion in 1 / degrees (Abramowitz and Stegun 26.7.5)."""
    if degrees <= len(_T):
        return _T[degrees - 1]
    normal = NormalDist().inv_cdf(0.975)
    first, second = (normal**3 + normal) / 4, (5 * normal**5 + 16 * normal**3 + 3 * normal) / 96
    return normal + first / degrees + second / degrees**2


def ratio_interval(first: Sequence[float], second: Sequence[float], draws: int = 4000) -> tuple[float, float, float]:
    """mean(second) / mean(first) and its 95% bootstrap interval over pairs; the draws are always the same.

    With three pairs it is little more than their smallest and largest ratio. ValueError if a mean of `first` is not
    above 0.
    """
    if min(first) <= 0:
        raise ValueError("a ratio needs values above 0")
    count, chance = len(first), random.Random(0)
    ratios = []
    for _ in range(draws):
        drawn = [chance.randrange(count) for _ in range(count)]
        ratios.append(sum(second[i] for i in drawn) / sum(first[i] for i in drawn))
    ratios.sort()
    return fmean(second) / fmean(first), ratios[int(0.025 * draws)], ratios[int(0.975 * draws)]


_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""by degrees of freedom, from 1"""
