"""Paired tests against scipy and scikit-learn. Must fail if a tail is dropped, ties are lost or Holm's order is."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn.metrics import cohen_kappa_score

from hiexp.significance import compare, compare_all, holm, kappa, mcnemar_test, sign_flip_test, verbosity

RNG = np.random.default_rng(0)


def by_scipy(gains, **how):
    return stats.permutation_test(
        (gains,), lambda x, axis: x.sum(axis=axis), permutation_type="samples", vectorized=True, **how
    ).pvalue


@pytest.mark.parametrize("count", [1, 2, 5, 9])
def test_the_sign_flip_test_is_exact_for_few_questions(count):
    gains = RNG.choice([-1.0, -0.5, 0.25, 0.5, 1.0], count)
    sums = [abs(np.dot(signs, gains)) for signs in itertools.product((-1, 1), repeat=count)]
    expected = np.mean([total >= abs(gains.sum()) - 1e-12 for total in sums])
    assert sign_flip_test([*gains, 0.0, 0.0]) == pytest.approx(expected)
    if count > 1:
        assert sign_flip_test(gains) == pytest.approx(by_scipy(gains, n_resamples=10**6))


@pytest.mark.parametrize("shift", [0.0, 0.05, 0.15])
def test_the_sign_flip_test_of_many_questions_agrees_with_scipy(shift):
    gains = np.random.default_rng(3).normal(shift, 0.5, 120)
    found = sign_flip_test(gains, seed=1)
    expected = by_scipy(gains, n_resamples=20_000, rng=np.random.default_rng(2))
    assert found == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / 10_000) + 2e-4)
    assert found == sign_flip_test(list(gains), seed=1) > 0
    assert found == sign_flip_test(-gains, seed=1)


def test_no_difference_is_no_evidence():
    assert sign_flip_test([0.0, 0.0]) == sign_flip_test([]) == 1
    assert mcnemar_test([1, 0], [1, 0]) == 1
    assert sign_flip_test([1.0] * 200) == pytest.approx(1 / 10_001)


@pytest.mark.parametrize(("better", "worse"), [(0, 1), (3, 3), (10, 2), (1, 9), (40, 20)])
def test_mcnemar_is_an_exact_binomial_test_on_what_one_arm_alone_got_right(better, worse):
    first = [0] * better + [1] * worse + [0, 1, 1]
    second = [1] * better + [0] * worse + [0, 1, 1]
    assert mcnemar_test(first, second) == pytest.approx(stats.binomtest(better, better + worse).pvalue)
    with pytest.raises(ValueError, match="0 and 1"):
        mcnemar_test([0.5], [1])


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), max_size=8), st.floats(0.001, 0.999))
def test_holm_rejects_what_the_step_down_procedure_rejects(p_values, alpha):
    corrected = holm(p_values)
    rejected, order = set(), sorted(range(len(p_values)), key=lambda i: p_values[i])
    for rank, i in enumerate(order):
        if p_values[i] * (len(p_values) - rank) > alpha:
            break
        rejected.add(i)
    assert {i for i, p in enumerate(corrected) if p <= alpha} == rejected
    assert all(p <= q <= 1 for p, q in zip(p_values, corrected, strict=True))


def test_a_comparison_and_several_at_once():
    first, better = [0.0] * 30 + [1.0] * 10, [1.0] * 12 + [0.0] * 18 + [1.0] * 10
    found = compare(first, better)
    assert (found.questions, found.better, found.worse) == (40, 12, 0)
    assert found.difference == pytest.approx(0.3) and found.low < 0.3 < found.high
    assert found.p == found.p_mcnemar == pytest.approx(2 / 2**12) and found.p_holm is None
    several = compare_all(first, {"better": better, "same": first, "mixed": [0.5] * 40})
    assert several["better"].p_holm == pytest.approx(3 * several["better"].p)
    assert several["same"].p == several["same"].p_holm == 1
    assert several["mixed"].p_mcnemar is None
    with pytest.raises(ValueError):
        compare([1.0], [1.0, 0.0])
    with pytest.raises(ValueError, match="at least one"):
        compare([], [])


grades = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=30)


@settings(deadline=None, max_examples=60)
@given(grades)
def test_kappa_equals_scikit_learns(pairs):
    first, second = zip(*pairs, strict=True)
    for quadratic in (False, True):
        found = kappa(first, second, quadratic)
        if set(first) == set(second) and len(set(first)) == 1:
            assert found is None
        else:
            weights = "quadratic" if quadratic else None
            expected = cohen_kappa_score(first, second, labels=range(6), weights=weights)
            assert found == pytest.approx(expected, abs=1e-12)


def test_kappa_of_half_grades_and_of_nothing():
    assert kappa([4.5, 1, 0], [5, 1, 0]) == 1.0
    assert kappa([], []) is None


def test_verbosity_is_the_regression_of_grades_on_words():
    words = RNG.integers(1, 60, 50)
    scores = 2 + 0.03 * words + RNG.normal(0, 0.5, 50)
    expected = stats.linregress(words, scores)
    half = stats.t.ppf(0.975, 48) * expected.stderr
    found = verbosity([*scores, None], [*words, 1000])
    assert found.slope == pytest.approx(expected.slope) and found.answers == 50
    assert (found.low, found.high) == pytest.approx((expected.slope - half, expected.slope + half), rel=1e-3)
    assert verbosity([1, 2, 3], [4, 4, 4]) is None and verbosity([1, None, None], [1, 2, 3]) is None
