"""Must fail when documents score, groups may be shuffled, a NaN passes, or the floor is paid for nothing."""

import math
import warnings

import numpy as np
import pytest

from hiexp import rewards as rewards_module
from hiexp.config import ConfigError
from hiexp.data import Sample
from hiexp.rewards import RewardConfig, rollout_metrics, score
from hiexp.trajectory import Document, Segment, Source, Status, Trajectory, Turn

OSLO = Sample("q1", "capital of norway ?", ("Oslo", "Oslo city"))


def attempt(answer, status=Status.ANSWERED, sample_id="q1"):
    return Trajectory(sample_id, answer=answer, status=status)


def rewards_of(*trajectories, cfg=None):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return score(list(trajectories), [OSLO], cfg or RewardConfig(), len(trajectories))


def test_f1_where_positive_else_floor_else_zero():
    got = rewards_of(attempt("Oslo city hall"), attempt("OSLO."), attempt("Bern"), attempt("Oslo", Status.OUT_OF_TURNS))
    assert got.shape == (1, 4) and str(got.dtype) == "torch.float32"
    np.testing.assert_allclose(got.numpy(), [[0.8, 1.0, 0.1, 0.0]], rtol=1e-6)


def test_a_judge_is_asked_once_for_all_answers_and_its_grade_is_the_reward():
    asked = []

    def judge(items):
        asked.append(items)
        return [0.6, 0.8, 0.0]

    attempts = [attempt("Oslo"), attempt(" "), attempt("Bergen"), attempt("x", Status.TRUNCATED), attempt("Bern")]

    def rewards(**settings):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return score(attempts, [OSLO], RewardConfig(metric="judge", **settings), 5, judge=judge).tolist()

    assert rewards() == [pytest.approx([0.6, 0.0, 0.8, 0.0, 0.1])]
    assert asked == [[(OSLO.question, OSLO.answers, answer) for answer in ("Oslo", "Bergen", "Bern")]]
    assert rewards(judged="right", format_floor=0.0) == [[0.0, 0.0, 1.0, 0.0, 0.0]]
    with pytest.raises(ConfigError, match=r"judge\.first\.model"):
        rewards_of(attempt("Oslo"), cfg=RewardConfig(metric="judge"))
    with pytest.raises(ConfigError, match="judged="):
        RewardConfig(judged="maybe")


def test_math_is_a_reward():
    pytest.importorskip("math_verify")
    half = Sample("q1", "one half ?", (r"\frac{1}{2}",))
    cfg = RewardConfig(metric="math", format_floor=0.0)
    got = score([attempt("0.5"), attempt("2"), attempt(r"\boxed{\frac{2}{4}}")], [half], cfg, 3)
    assert got.tolist() == [[1.0, 0.0, 1.0]]


def test_each_trajectory_keeps_its_reward():
    right, wrong = attempt("Oslo"), attempt("Bern")
    rewards_of(right, wrong, cfg=RewardConfig(metric="em", format_floor=0.0))
    assert (right.reward, wrong.reward) == (1.0, 0.0)


@pytest.mark.parametrize("status", [Status.TRUNCATED, Status.BROKEN, Status.OUT_OF_TURNS, Status.RUNNING])
def test_B04_only_an_ended_answer_counts(status):
    assert rewards_of(attempt("Oslo", status)).item() == 0.0


@pytest.mark.parametrize("answer", ["", "   \n"])
def test_B06_blank_answers_score_zero_and_are_counted(answer):
    blank = attempt(answer)
    got = rewards_of(blank)
    assert got.item() == 0.0
    assert rollout_metrics([blank])["rollout/no_answer_frac"] == 1.0


def test_B09_a_document_with_the_gold_in_answer_tags_scores_nothing():
    trap = "<answer> Oslo </answer>"
    trajectory = Trajectory("q1")
    trajectory.append(Segment(Source.PROMPT, (1, 2)))
    trajectory.append(Segment(Source.POLICY, (3,), (-0.5,)))
    trajectory.append(Segment(Source.DOCUMENT, (4, 5)))
    trajectory.turns.append(Turn("<search> x </search>", "search", "x", (Document(trap, trap),), ("E1-1",), trap))
    for status in Status:
        trajectory.status = status
        assert rewards_of(trajectory).item() == 0.0


def test_B08_a_run_without_answers_warns():
    with pytest.warns(UserWarning, match="more than half"):
        score([attempt("", Status.OUT_OF_TURNS)] * 2, [OSLO], RewardConfig(), 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        score([attempt("", Status.OUT_OF_TURNS), attempt("Bern")], [OSLO], RewardConfig(), 2)


def test_groups_must_follow_the_samples():
    bern = Sample("q2", "capital of switzerland ?", ("Bern",))
    first, second = (
        [attempt("Oslo"), attempt("x")],
        [attempt("Bern", sample_id="q2"), attempt("y", sample_id="q2")],
    )
    np.testing.assert_allclose(score([*first, *second], [OSLO, bern], RewardConfig(), 2), [[1, 0.1], [1, 0.1]])
    with pytest.raises(ValueError, match="q2 stand where those of q1"):
        score([*second, *first], [OSLO, bern], RewardConfig(), 2)
    with pytest.raises(ValueError, match="siblings"):
        score([first[0], second[0], first[1], second[1]], [OSLO, bern], RewardConfig(), 2)
    with pytest.raises(ValueError):
        score(first, [OSLO, bern], RewardConfig(), 2)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_stops_the_run(value, monkeypatch):
    monkeypatch.setitem(rewards_module.METRICS, "f1", lambda prediction, answers: value)
    with pytest.raises(ValueError, match=r"sample q1: metric f1 is (nan|inf)"):
        rewards_of(attempt("Oslo"))


def test_rollout_metrics_against_a_computation_by_hand():
    search = Turn("", "search", "x")
    trajectories = [attempt("Oslo"), attempt("the old town of Oslo"), attempt("", Status.TRUNCATED)]
    trajectories[0].turns += [search, search, Turn("", "answer", "Oslo")]
    trajectories[1].turns += [search, Turn("", "search", "x", notice="searched already")]
    got = rollout_metrics(trajectories)
    assert got["rollout/no_answer_frac"] == got["rollout/truncated_frac"] == pytest.approx(1 / 3)
    assert got["rollout/answer_words"] == pytest.approx((1 + 5) / 2)
    assert got["rollout/turns"] == pytest.approx(5 / 3)
    assert got["rollout/searches"] == pytest.approx(3 / 3)
    assert got["rollout/broken_frac"] == got["rollout/out_of_turns_frac"] == 0
    assert not any(math.isnan(value) for value in rollout_metrics([]).values())


def test_bad_settings_are_told_in_one_line():
    with pytest.raises(ConfigError, match="did you mean 'em'"):
        RewardConfig(metric="eme")
    with pytest.raises(ConfigError, match="format_floor"):
        RewardConfig(format_floor=1.0)
    with pytest.raises(ConfigError, match="format_floor"):
        RewardConfig(format_floor=math.nan)


@pytest.mark.parametrize(
    ("policy", "documents", "wanted"), [(6, 0, 0.0), (7, 0, 0.25), (3, 5, 0.5), (10, 0, 1.0), (6, 9, 1.0)]
)
def test_overlong_attempts_lose_up_to_one_linearly(policy, documents, wanted):
    """Of 10 tokens the last 4 are punished; what the search returned counts, the prompt does not."""
    one = Trajectory("q1")
    one.append(Segment(Source.PROMPT, (1,) * 50))
    one.append(Segment(Source.POLICY, (1,) * policy, (-1.0,) * policy))
    one.append(Segment(Source.DOCUMENT, (1,) * documents))
    one.answer, one.status = "Oslo", Status.ANSWERED
    got = score([one], [OSLO], RewardConfig(overlong_tokens=4), 1, max_response_tokens=10)
    assert got.item() == one.reward == pytest.approx(1.0 - wanted)
    assert score([one], [OSLO], RewardConfig(), 1, max_response_tokens=10).item() == 1.0
    with pytest.raises(ConfigError, match="overlong_tokens=-1"):
        RewardConfig(overlong_tokens=-1)
