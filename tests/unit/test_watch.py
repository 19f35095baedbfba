"""Must fail if a collapse goes unnoticed, noise or a slow start stops a run, or a resumed run counts anew."""

import json
import math
import random

import pytest

from hiexp.config import ConfigError, load
from hiexp.watch import LIMITS, Collapse, CollapseWatch, WatchConfig

DEFAULT = WatchConfig()


def watch_through(watch, rewards, first=0, **others):
    """(step at which the watch stopped the run, its message), or None."""
    for step, reward in enumerate(rewards, first):
        try:
            watch.check(step, {"reward/mean": reward} | {key: column[step] for key, column in others.items()})
        except Collapse as collapse:
            return step, str(collapse)
    return None


def noisy(means, seed=0):
    """Rewards of a synthetic run: the mean of 96 attempts that are right with the given chance."""
    draws = random.Random(seed)
    return [sum(draws.random() < p for _ in range(96)) / 96 for p in means]


def test_bug_87_a_run_that_falls_to_nothing_is_stopped_and_told_why():
    rise = [0.1 + 0.5 * min(step / 100, 1) for step in range(200)]
    stopped = watch_through(CollapseWatch(DEFAULT), noisy([*rise, *[0.0] * 200]))
    assert stopped
    step, message = stopped
    # the mean of ten falls below 0.2 x 0.6 after nine steps; fifty of those in a row
    assert 200 + 7 + 49 <= step <= 200 + 9 + 49
    assert "reward/mean" in message and "0.2 of its best, 0.6" in message and f"since step {step - 49}" in message
    assert "watch.reward_fraction" in message and "last checkpoint" in message


@pytest.mark.parametrize("seed", range(5))
def test_ordinary_runs_are_left_alone(seed):
    rise = [0.02 + 0.6 * min(step / 300, 1) for step in range(600)]
    assert watch_through(CollapseWatch(DEFAULT), noisy(rise, seed)) is None
    dip = [*rise, *[0.0] * 40, *[0.6] * 100]
    assert watch_through(CollapseWatch(DEFAULT), noisy(dip, seed)) is None, "it recovered within the patience"
    hopeless = [0.004] * 400  # one in 250: there is nothing to fall from but noise
    assert watch_through(CollapseWatch(DEFAULT), noisy(hopeless, seed)) is None
    assert watch_through(CollapseWatch(DEFAULT), [0.0] * 300) is None
    assert watch_through(CollapseWatch(DEFAULT), [-0.5] * 300) is None, "with a penalty for length, say"


def test_the_step_is_the_one_that_a_hand_count_gives():
    cfg = WatchConfig(patience=3, window=2, reward_fraction=0.5)
    # means of two: 1.0 .75 .25 .0 .5 .25 .0 .0 against 0.5: below at steps 3 4, not at 5, below at 6 7 8
    rewards = [1.0, 1.0, 0.5, 0.0, 0.0, 1.0, -0.5, 0.5, -0.5]
    assert watch_through(CollapseWatch(cfg), rewards)[0] == 8


@pytest.mark.parametrize("name", LIMITS)
def test_every_limit_watches_its_metric_on_its_side(name):
    key, beyond, within = LIMITS[name], *((3.0, 1.0) if name.startswith("max_") else (1.0, 3.0))
    cfg = WatchConfig(patience=4, window=2, **{name: 2.0})
    fine = {key: [within] * 30}
    assert watch_through(CollapseWatch(cfg), [0.5] * 30, **fine) is None
    assert watch_through(CollapseWatch(cfg), [0.5] * 30, **{key: [2.0] * 30}) is None, "at the limit is not beyond it"
    step, message = watch_through(CollapseWatch(cfg), [0.5] * 30, **{key: [within] * 10 + [beyond] * 20})
    assert step == 14 and key in message and f"watch.{name}" in message  # the mean of two is beyond from step 11 on
    watch = CollapseWatch(cfg)
    for step in range(30):  # a step in which no row has a signal logs no loss
        watch.check(step, {"reward/mean": 0.5})
    assert not watch.is_suspect
    for value in (float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=name):
            WatchConfig(**{name: value})


@pytest.mark.parametrize("cut", [1, 7, 40, 70, 77])
def test_a_resumed_run_stops_at_the_same_step(cut):
    cfg = WatchConfig(patience=20, window=5, min_entropy=0.1)
    rewards = noisy([0.5] * 60 + [0.0] * 60)
    entropy = {"loss/entropy": [1.0] * 120}
    whole = watch_through(CollapseWatch(cfg), rewards, **entropy)
    first, second = CollapseWatch(cfg), CollapseWatch(cfg)
    assert watch_through(first, rewards[:cut], **entropy) is None
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    assert watch_through(second, rewards[cut:], first=cut, **entropy) == whole and whole
    assert second.state_dict()["recent"] and first.state_dict() != second.state_dict()


def test_a_step_beyond_a_limit_is_suspect_and_values_that_are_not_finite_are_passed_over():
    watch = CollapseWatch(WatchConfig(patience=5, window=1))
    watch.check(0, {"reward/mean": 1.0})
    watch.check(1, {"reward/mean": math.nan})
    assert not watch.is_suspect
    watch.check(2, {"reward/mean": 0.0})
    assert watch.is_suspect
    watch.check(3, {"reward/mean": 0.9})
    assert not watch.is_suspect


def test_off_and_wrong_settings():
    assert watch_through(CollapseWatch(WatchConfig(patience=0)), [1.0] * 50 + [0.0] * 500) is None
    assert watch_through(CollapseWatch(WatchConfig(reward_fraction=0)), [1.0] * 50 + [0.0] * 500) is None
    for wrong in ({"patience": -1}, {"window": 0}, {"reward_fraction": 1.0}):
        with pytest.raises(ConfigError):
            WatchConfig(**wrong)
    assert load(WatchConfig, ["min_entropy=1e-2"]).min_entropy == 0.01
