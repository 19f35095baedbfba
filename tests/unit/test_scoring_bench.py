"""bench/scoring.py measures what it says: planted answers are stopped, and a target can be missed."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("math_verify")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import scoring


def test_text_is_scored_for_real_and_a_missed_target_is_told(monkeypatch):
    found = scoring.text(200)
    assert found["ok"] and 0 < found["em"] < found["cem_bound"] <= found["cem"] < 1
    monkeypatch.setattr(scoring, "TEXT_TARGET", 1e-6)
    assert not scoring.text(200)["ok"]


def test_planted_answers_are_stopped_and_the_others_are_as_they_should_be():
    found = scoring.problems(60, 2)
    assert (found["planted"], found["stopped"], found["as_they_should"]) == (1, 1, 59)
    pairs, truths = scoring.math_rows(100)
    assert len({pair for pair, _ in pairs}) == 100 and 40 < truths.count(True) < 60 and truths.count(None) == 1
