"""Scoring rules, and reported faults by number. Must fail when a rule is dropped or aliases are ignored."""

import numpy as np
import pytest

from hiexp.metrics import METRICS, bootstrap_interval, boxes, normalise


def scores(prediction, *answers):
    return {name: metric(prediction, answers) for name, metric in METRICS.items()}


def test_B14_normalisation_order():
    assert normalise("  the  LOUVRE. ") == "louvre"
    assert normalise("th.e") == ""  # punctuation goes before articles
    assert normalise("a-b theory") == "ab theory"  # deleted, not replaced by a space
    assert normalise("rome\u2013the\u2013oslo") == "rome\u2013 \u2013oslo"  # an article leaves a space
    louvre = scores("  the  LOUVRE. ", "Louvre")
    assert louvre["em"] == louvre["f1"] == 1
    assert scores("Rome Rome", "Rome")["f1"] == pytest.approx(2 / 3)
    assert scores("Rome Rome", "Rome")["em"] == 0


def test_B16_yes_no_rule_and_its_switch():
    got = scores("no, it is newer", "no")
    assert (got["em"], got["f1"], got["cem"]) == (0, 0, 1)
    assert got["f1_musique"] == pytest.approx(2 * 0.25 * 1 / 1.25)
    assert scores("yes", "yes it is")["f1"] == 0  # the rule looks at both sides
    assert scores("No.", "no")["f1"] == 1


def test_B17_each_metric_is_its_own_maximum_over_aliases():
    assert scores("United Nations", "UN", "United Nations")["em"] == 1
    got = scores("x y cat z", "cat", "x y q z")
    assert got["cem"] == 1 and got["f1"] == pytest.approx(0.75)  # from different aliases


def test_B19_numbers_get_no_special_treatment():
    assert scores("(2.50)", "2.50")["em"] == 1
    got = scores("7\n\nNext", "7")
    assert (got["em"], got["cem"], got["cem_bound"]) == (0, 1, 1)
    assert scores("3,500", "3500")["em"] == 1
    assert scores("2.50", "250")["em"] == 1  # the documented artefact
    assert scores("two", "2")["em"] == 0


def test_B20_three_readings_of_cover_match():
    def covers(prediction, answer):
        got = scores(prediction, answer)
        return got["cem"], got["cem_bound"], got["cem_tokset"]

    assert covers("education", "cat") == (1, 0, 0)
    assert covers("Bern Oslo Lima", "Oslo") == (1, 1, 1)
    assert covers("Oslo", "Oslo, Norway") == (0, 0, 0)
    assert covers("Norway has Oslo", "Oslo Norway") == (0, 0, 1)


@pytest.mark.parametrize("prediction", ["", "  \n"])
def test_B06_empty_prediction_scores_zero_everywhere(prediction):
    assert set(scores(prediction, "Oslo").values()) == {0}
    assert set(scores(prediction, "a").values()) == {0}
    assert set(scores(prediction, "").values()) == {0}


def test_a_gold_that_normalises_to_nothing_must_match_as_text():
    assert set(scores(" A", "a").values()) == {1}
    assert set(scores("the", "a").values()) == {0}
    assert set(scores("a banana", "a").values()) == {0}


def test_answers_must_be_a_sequence_of_strings():
    with pytest.raises(ValueError, match="non-empty sequence"):
        METRICS["em"]("x", [])
    with pytest.raises(ValueError, match="'Oslo'"):
        METRICS["em"]("O", "Oslo")  # a bare string would be scored letter by letter


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{Oslo}.", "Oslo"),
        (r"\boxed{Oslo} no, \boxed{ Bern }", "Bern"),  # B02: the last complete one
        (r"\boxed{\text{Lake {Tana}}}", r"\text{Lake {Tana}}"),
        (r"\boxed{\text{Lake Tana}}", "Lake Tana"),
        (r"\boxed{\textbf{\text{K2}}}", "K2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{a\}", ""),  # the only closing brace is escaped
        (r"\boxed{Oslo} and \boxed{Ber", "Oslo"),
        (r"\boxed{Lis", ""),  # B04
        ("no box", ""),
        ("", ""),
        (r"\boxed{}", ""),
    ],
)
def test_the_last_complete_box(text, answer):
    found = boxes(text)
    assert (found[-1][1] if found else "") == answer
    assert all(text[end - 1] == "}" for end, _ in found)


def test_bootstrap_interval_agrees_with_theory_and_is_seeded():
    values = np.random.default_rng(0).random(400)
    low, high = bootstrap_interval(values, seed=3)
    half = 1.96 * values.std() / np.sqrt(len(values))
    assert low == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert high == pytest.approx(values.mean() + half, abs=0.1 * half)
    assert (low, high) == bootstrap_interval(list(values), seed=3) != bootstrap_interval(values, seed=4)
    assert bootstrap_interval([1.0, 1.0], seed=0) == (1.0, 1.0)
    with pytest.raises(ValueError, match="one value per question"):
        bootstrap_interval([], seed=0)
