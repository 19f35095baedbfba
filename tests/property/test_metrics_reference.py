"""Metrics equal the independent derivation in tests/golden on arbitrary text, and keep their algebra.

Must fail when: the normaliser's steps change order, punctuation becomes a space, the yes/no rule or the
empty-gold rule goes.
"""

import importlib.util
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hiexp.metrics import METRICS, boxes, explain, last_boxed, normalise, parse_judge_score


def last_box(text):
    found = boxes(text)
    return found[-1][1] if found else ""


spec = importlib.util.spec_from_file_location(
    "reference_metrics", Path(__file__).parents[1] / "golden" / "reference_metrics.py"
)
reference = importlib.util.module_from_spec(spec)
spec.loader.exec_module(reference)

WORDS = [
    "a",
    "an",
    "The",
    "yes",
    "No",
    "noanswer",
    "Rome",
    "rome.",
    "U.S.",
    "2.50",
    "3,500",
    "na\u00efve",
    "-",
    "_a_",
    "at",
]
SPACES = [" ", "  ", "\n", "\t", "", "\u00a0"]
phrase = st.lists(st.tuples(st.sampled_from(WORDS), st.sampled_from(SPACES)), max_size=6).map(
    lambda parts: "".join(word + space for word, space in parts)
)
text = st.one_of(phrase, st.text(max_size=12))
golds = st.lists(text, min_size=1, max_size=3)


@settings(deadline=None, max_examples=400)
@given(text, golds)
def test_every_metric_equals_the_independent_derivation(prediction, answers):
    assert set(METRICS) == {*reference.REFERENCE, "math"}
    for name, rule in reference.REFERENCE.items():
        expected = reference.best(rule, prediction, answers)
        assert METRICS[name](prediction, answers) == pytest.approx(expected, abs=1e-12), name


@settings(deadline=None, max_examples=200)
@given(text)
def test_normalisation_is_idempotent_and_equals_the_walked_tokens(value):
    once = normalise(value)
    assert normalise(once) == once == " ".join(reference.tokens_of(value))


@settings(deadline=None, max_examples=200)
@given(text, golds)
def test_bounds_and_order_of_the_metrics(prediction, answers):
    scores = {name: METRICS[name](prediction, answers) for name in reference.REFERENCE}
    assert all(0.0 <= value <= 1.0 for value in scores.values())
    assert scores["em"] <= scores["f1"] <= scores["f1_musique"]
    assert scores["em"] <= scores["cem_bound"] <= min(scores["cem"], scores["cem_tokens"])


@settings(deadline=None, max_examples=300)
@given(text, golds)
def test_the_official_scripts_agree_wherever_both_sides_have_tokens(prediction, answers):
    """HotpotQA's and MuSiQue's own rules; they differ from ours only for texts that normalise to nothing."""
    answers = [answer for answer in answers if normalise(answer)]
    if not (answers and normalise(prediction)):
        return
    for answer in answers:
        em, f1 = reference.hotpotqa_official(prediction, answer)
        assert METRICS["em"](prediction, [answer]) == em
        assert METRICS["f1"](prediction, [answer]) == pytest.approx(f1, abs=1e-12)
    em, f1 = reference.musique_official(prediction, answers)
    assert METRICS["em"](prediction, answers) == em
    assert METRICS["f1_musique"](prediction, answers) == pytest.approx(f1, abs=1e-12)


anything = st.text(alphabet=st.characters(exclude_categories=()), max_size=30)
hostile = st.one_of(
    anything,
    st.sampled_from(["{", '{"score": ', "\\boxed{", "}", "<think>", "</think>", "Score: ", "9" * 40, '"', "\\", "\x00"])
    .flatmap(lambda part: st.lists(st.one_of(st.just(part), anything), max_size=6))
    .map("".join),
)


@settings(deadline=None, max_examples=300)
@given(
    hostile,
    st.lists(
        st.one_of(hostile, st.integers(), st.floats(allow_nan=False, allow_infinity=False)), min_size=1, max_size=3
    ),
)
def test_hostile_input_has_a_result_and_the_same_one_twice(prediction, answers):
    for name in reference.REFERENCE:
        value = METRICS[name](prediction, answers)
        assert 0.0 <= value <= 1.0 and value == METRICS[name](prediction, answers)
        line = explain(name, prediction, answers)
        assert "\n" not in line and len(line) < 300
    grade = parse_judge_score(prediction)
    assert grade is None or 0 <= grade <= 5
    assert last_boxed(prediction) == last_boxed(prediction)


@settings(deadline=None, max_examples=200)
@given(text, text)
def test_em_and_f1_are_symmetric(left, right):
    if normalise(left) and normalise(right):
        for name in ("em", "f1", "f1_musique"):
            assert METRICS[name](left, [right]) == pytest.approx(METRICS[name](right, [left]))


balanced = st.recursive(
    st.sampled_from(["", "x", "1 ", "\\{", "\\}"]),
    lambda inner: st.one_of(st.tuples(inner, inner).map("".join), inner.map(lambda s: "{" + s + "}")),
    max_leaves=8,
)


@settings(deadline=None, max_examples=200)
@given(
    balanced,
    st.sampled_from(["", "so ", "\\boxed{old} then "]),
    st.sampled_from(["", " done", " \\boxed{cut {"]),
)
def test_the_last_complete_box_is_read_and_a_cut_one_never_leaks(content, before, after):
    assert last_box(f"{before}\\boxed{{{content}}}{after}") == content.strip()
