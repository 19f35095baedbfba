"""Statistics over seeds against integration and counting; must fail if pairs are lost or a side of a test."""

import itertools
import math
import statistics

import numpy as np
import pytest

from hiexp.paired import paired, ratio_interval, sign_test, t_quantile


def t_probability(limit, degrees):
    """P(T < limit) by integrating the density."""
    x = np.linspace(0, limit, 200_001)
    scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(degrees * math.pi)
    density = scale * (1 + x * x / degrees) ** (-(degrees + 1) / 2)
    return 0.5 + float(((density[1:] + density[:-1]) / 2).sum() * (x[1] - x[0]))


@pytest.mark.parametrize("degrees", [1, 2, 3, 7, 12, 23, 30, 31, 60, 500])
def test_quantiles_of_t(degrees):
    assert t_probability(t_quantile(degrees), degrees) == pytest.approx(0.975, abs=4e-5)


def test_paired_difference_by_hand():
    found = paired([1.0, 2.0, 4.0], [2.0, 2.5, 6.0])
    gains = [1.0, 0.5, 2.0]
    half = 4.303 * statistics.stdev(gains) / math.sqrt(3)
    assert (found.pairs, found.first, found.second) == (3, pytest.approx(7 / 3), 3.5)
    assert found.difference == pytest.approx(3.5 / 3)
    assert (found.low, found.high) == (pytest.approx(3.5 / 3 - half), pytest.approx(3.5 / 3 + half))
    assert found.sign_p == 0.25, "three of three: 2 / 2**3"
    one = paired([1.0], [2.0])
    assert one.difference == 1.0 and math.isnan(one.low) and math.isnan(one.high) and one.sign_p == 1.0
    with pytest.raises(ValueError, match="shorter"):
        paired([1.0, 2.0], [1.0])


@pytest.mark.parametrize("gains", [[1, 1, 1, -1, 1], [0, 0, -1, -2], [1, -1], [0, 0], [3] * 8])
def test_sign_test_counts_all_sequences_of_signs(gains):
    signs = [1 if gain > 0 else -1 for gain in gains if gain]
    outcomes = [abs(sum(flips)) >= abs(sum(signs)) for flips in itertools.product((1, -1), repeat=len(signs))]
    assert sign_test(gains) == pytest.approx(sum(outcomes) / len(outcomes))


def test_ratio_is_of_means_and_its_interval_of_pairs():
    first, second = [1.0, 2.0, 4.0], [0.5, 1.0, 8.0]
    ratio, low, high = ratio_interval(first, second)
    assert ratio == pytest.approx(9.5 / 7)
    draws = [
        sum(second[i] for i in drawn) / sum(first[i] for i in drawn) for drawn in itertools.product(range(3), repeat=3)
    ]
    assert low == pytest.approx(min(draws)) and high == pytest.approx(max(draws)), "all alike in 1 of 27 draws each"
    assert ratio_interval(first, second) == (ratio, low, high), "it repeats"
    many = ratio_interval([1.0, 3.0] * 20, [2.0, 6.0] * 20)
    assert many == pytest.approx((2.0, 2.0, 2.0)), "pairs stay together"
    with pytest.raises(ValueError, match="above 0"):
        ratio_interval([0.0, 1.0], [1.0, 1.0])
