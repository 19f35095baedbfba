"""Must fail when a question is dropped or counted twice, intervals ignore questions, or settings go unrecorded."""

import json
import warnings
from dataclasses import replace

import numpy as np
import pytest

from hiexp.config import ConfigError
from hiexp.data import Sample
from hiexp.eval_config import EvalConfig
from hiexp.evaluation import (
    compare_settings,
    describe_setting,
    difference,
    evaluate,
    summarise,
    to_markdown,
    write_results,
)
from hiexp.records import read_attempts, write_attempts
from hiexp.trajectory import Segment, Source, Status, Trajectory, Turn

SAMPLED = EvalConfig(samples_per_question=2, greedy=False)


def sample(i, family="bridge"):
    return Sample(f"q{i}", f"question {i} ?", (f"gold {i}",), family, "held_back" if family == "bridge" else "taught")


def attempt(i, answer, status=Status.ANSWERED, member=0):
    trajectory = Trajectory(f"q{i}", member)
    trajectory.append(Segment(Source.PROMPT, (1, 2, 3)))
    trajectory.append(Segment(Source.POLICY, (4, 5), (-0.1, -0.2)))
    trajectory.turns.append(Turn("", "search", "x"))
    trajectory.answer, trajectory.status = answer, status
    return trajectory


def test_means_by_question_and_family_against_numpy():
    samples = [sample(0), sample(1), sample(2, "compare")]
    answers = ["gold 0", "gold 9", "gold 1", "gold 1", "it is gold 2", ""]
    trajectories = [attempt(i // 2, a, member=i % 2) for i, a in enumerate(answers)]
    trajectories[5].status = Status.TRUNCATED
    result = evaluate(trajectories, samples, SAMPLED, group_size=2)
    em = np.array([[1, 0], [1, 1], [0, 0]], float)
    assert result.overall.scores["em"].mean == pytest.approx(em.mean())
    assert result.by_family["bridge"].scores["em"].mean == pytest.approx(em[:2].mean())
    assert result.by_family_group["taught"].scores["cem"].mean == pytest.approx(0.5)
    assert result.overall.scores["f1"].mean == pytest.approx(np.mean([1, 0.5, 1, 1, 2 * 0.5 / 1.5, 0]))
    assert (result.overall.num_questions, result.overall.num_samples) == (3, 6)
    assert result.overall.answer_words == pytest.approx((2 + 2 + 2 + 2 + 4) / 5)
    assert result.overall.no_answer_frac == pytest.approx(1 / 6)
    assert result.overall.statuses == pytest.approx({"answered": 5 / 6, "truncated": 1 / 6})
    assert (result.overall.searches, result.overall.tokens, result.overall.policy_tokens) == (1, 5, 2)


def test_the_interval_draws_questions_not_samples():
    """Eight equal samples of a question are one observation: the interval must not shrink."""
    samples = [sample(i) for i in range(40)]
    answers = [f"gold {i}" if i % 2 else "wrong" for i in range(40)]
    once = evaluate([attempt(i, a) for i, a in enumerate(answers)], samples, EvalConfig())
    eight = [attempt(i, a, member=m) for i, a in enumerate(answers) for m in range(8)]
    often = evaluate(eight, samples, EvalConfig(), group_size=8)
    assert once.overall.scores["em"] == often.overall.scores["em"]
    half = 1.96 * 0.5 / np.sqrt(40)
    assert once.overall.scores["em"].high - 0.5 == pytest.approx(half, rel=0.2)


@pytest.mark.parametrize("count", [10, 2])
def test_B102_each_question_is_counted_exactly_once(count):
    samples = [sample(i) for i in range(count)]
    trajectories = [attempt(i, f"gold {i}") for i in range(count)]
    assert evaluate(trajectories, samples, EvalConfig()).overall.num_questions == count
    bad = {
        "dropped last": (trajectories[:-1], samples),
        "padded by repetition": ([*trajectories, trajectories[0]], samples),
        "one twice": ([trajectories[0], *trajectories[:-1]], samples),
        "misplaced": (trajectories[::-1], samples),
        "same sample twice": ([*trajectories, trajectories[0]], [*samples, samples[0]]),
    }
    for given, wanted in bad.values():
        with pytest.raises(ValueError, match=r"q\d|order"):
            evaluate(given, wanted, EvalConfig())
    with pytest.raises(ValueError, match="siblings"):
        evaluate(trajectories, samples, EvalConfig(), group_size=count + 1)
    with pytest.raises(ValueError, match="no samples"):
        evaluate([], [], EvalConfig())


def test_an_unfinished_trajectory_has_no_prediction():
    result = evaluate([attempt(0, "gold 0", Status.OUT_OF_TURNS)], [sample(0)], EvalConfig())
    assert result.attempts[0].prediction == "" and result.overall.scores["cem"].mean == 0


def test_paired_difference_is_tighter_than_two_intervals():
    samples = [sample(i) for i in range(60)]
    before = evaluate([attempt(i, f"gold {i}" if i < 30 else "x") for i in range(60)], samples, EvalConfig())
    after = evaluate([attempt(i, f"gold {i}" if i < 36 else "x") for i in range(60)], samples, EvalConfig())
    gain = difference(before.attempts, after.attempts, "em")
    assert gain.mean == pytest.approx(0.1) and 0 < gain.low < gain.mean < gain.high < 0.2
    with pytest.raises(ValueError, match="different questions"):
        difference(before.attempts, evaluate([attempt(0, "x")], samples[:1], EvalConfig()).attempts, "em")


def setting(**changes):
    arguments = {
        "model": "tiny", "hek": None, "protocol": "compact", "template": "question : x",
        "corpus": "c0", "encoder": "bm25", "search": {"kind": "flat"}, "pipeline": {}, "top_k": 3,
        "samples": [sample(0)],
        "decoding": EvalConfig().decodings()[0], "seed": 0,
        "rollout": {"top_k": 3}, "thresholds": {"case": 0.8},
    }  # fmt: skip
    return describe_setting(**(arguments | changes))


def test_B95_every_setting_is_recorded_and_differences_are_named(tmp_path):
    changes = {
        "protocol": {"protocol": "search_r1"},
        "template": {"template": "other"},
        "corpus": {"corpus": "c1"},
        "encoder": {"encoder": "e5"},
        "search": {"search": {"kind": "ivf", "breadth": 16}},
        "pipeline": {"pipeline": {"iterations": 2}},
        "top_k": {"top_k": 5},
        "questions": {"samples": [sample(0), sample(1)]},
        "decoding": {"decoding": SAMPLED.decodings()[0]},
        "rollout": {"rollout": {"top_k": 3, "strategy_level": 3}},
        "thresholds": {"thresholds": {"case": 0.9}},
    }
    for key, change in changes.items():
        lines = compare_settings(setting(), setting(**change))
        assert len(lines) == 1 and lines[0].startswith(f"{key}:"), key
    assert compare_settings(setting(), setting(model="big")) == []
    assert len(compare_settings(setting(), setting(model="big"), ignore=())) == 1
    assert compare_settings({}, setting())[0].startswith("protocol: not stated versus")
    (tmp_path / "header.json").write_text("{}")
    (tmp_path / "level1.jsonl").write_text("a")
    first = setting(hek=tmp_path)
    (tmp_path / "level1.jsonl").write_text("b")
    assert len({first["hek"], setting(hek=tmp_path)["hek"], setting()["hek"]}) == 3
    assert json.loads(json.dumps(first)) == first


def test_written_results_hold_settings_scores_and_every_sample(tmp_path):
    samples = [sample(0), sample(1, "compare | odd")]
    result = evaluate([attempt(0, "gold 0"), attempt(1, "n\u00e9e <b>")], samples, EvalConfig())
    about = {"benchmark": "hotpotqa", "method": "agent"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        two = {"base": setting(), "base/hek": setting()}
        write_results(tmp_path, {"base": result, "base/hek": result}, two, dict.fromkeys(two, about))
        other = {"a": about, "b": about | {"method": "ircot"}}
        write_results(tmp_path / "x", {"a": result, "b": result}, {"a": setting(), "b": setting(top_k=5)}, other)
    whole = json.loads((tmp_path / "evaluation.json").read_text())["arms"]
    assert whole["base"]["setting"]["scorer"] and whole["base"]["overall"]["scores"]["em"]["mean"] == 0.5
    assert whole["base"]["benchmark"] == "hotpotqa" and "attempts" not in whole["base"]
    write_attempts(tmp_path / "samples.jsonl", result.attempts)
    lines = read_attempts(tmp_path / "samples.jsonl")
    assert lines == list(result.attempts)
    assert [(r.id, r.prediction, r.scores["em"]) for r in lines] == [("q0", "gold 0", 1), ("q1", "n\u00e9e <b>", 0)]
    with pytest.warns(UserWarning, match="cannot be compared: top_k: 3 versus 5"):
        both = {"a": setting(), "b": setting(top_k=5)}
        write_results(tmp_path, {"a": result, "b": result}, both, {"a": about, "b": about})


def test_a_score_that_a_judge_did_not_give_is_left_out_and_counted():
    samples = [sample(0), sample(1)]
    result = evaluate([attempt(0, "gold 0"), attempt(1, "x")], samples, EvalConfig())
    first, second = result.attempts
    judged = [replace(first, scores=first.scores | {"lasj": 0.8}), second]
    overall = summarise(judged, samples, EvalConfig()).overall
    assert overall.scores["lasj"].mean == 0.8 and overall.num_scored == {"lasj": 1} | dict.fromkeys(first.scores, 2)
    with pytest.raises(ValueError, match="order"):
        summarise(judged[::-1], samples, EvalConfig())
    with pytest.raises(ValueError, match="no question has the score lasj"):
        difference(judged[1:], judged[1:], "lasj")


def test_markdown_tables_are_rectangular_and_in_percent():
    samples = [sample(0), sample(1, "compare | odd")]
    text = to_markdown({"base": evaluate([attempt(0, "gold 0"), attempt(1, "x")], samples, EvalConfig())})
    assert "50.0 [0.0, 100.0]" in text and "compare \\| odd" in text and "By family group" in text
    for block in text.split("\n\n"):
        widths = {line.replace("\\|", "").count("|") for line in block.splitlines() if line.startswith("|")}
        assert len(widths) <= 1
    plain = evaluate([attempt(0, "x")], [Sample("q0", "?", ("y",))], EvalConfig())
    assert "By family" not in to_markdown({"base": plain})


def test_bad_settings_are_told_in_one_line():
    for changes, message in [
        ({"metrics": ("emm",)}, "did you mean 'em'"),
        ({"metrics": ()}, "metrics is empty"),
        ({"greedy": False}, "at least 1"),
        ({"samples_per_question": -1}, "at least 1"),
        ({"temperature": 0.0}, "greedy=true"),
    ]:
        with pytest.raises(ConfigError, match=message):
            EvalConfig(**changes)
    assert [d.name for d in EvalConfig(samples_per_question=4).decodings()] == ["greedy", "sampled"]
    assert EvalConfig().decodings()[0].temperature == 0 and SAMPLED.decodings()[0].top_p == 0.95
