"""Outcome reward of a finished trajectory: the training scalar, as opposed to an evaluation score
(metrics.py).

Only `Trajectory.answer` and `.status` are read. Both come from text that the policy wrote, so an answer that
stands in a document, in an experience or in the prompt can never score.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hiexp.config import ConfigError, lookup
from hiexp.data import Sample
from hiexp.math_check import check_all
from hiexp.metrics import METRICS
from hiexp.trajectory import Source, Status, Trajectory, groups_of

Judge = Callable[[Sequence[tuple[str, tuple[str, ...], str]]], list[float]]
"""(question, gold answers, answer) of each attempt -> how good it is, in [0, 1]: judge.Judges.reward"""
JUDGE = "judge"
"""the metric that a language model gives"""
RIGHT = 0.8
"""a verdict from which an answer counts as right: 4 of 5"""


@dataclass(frozen=True)
class RewardConfig:
    """The reward is the metric where it is positive, else a floor for a given answer, else 0."""

    metric: str = "f1"
    """name of a metric (metrics.py) with values in [0, 1], or judge: the grade that the models of judge.* give; the
    paper states only "outcome reward" """
    judged: Literal["graded", "right"] = "graded"
    """with metric=judge: the grade itself, or 1 for a right answer (4 of 5 or more) and 0 for any other"""
    format_floor: float = 0.1
    """reward of an answer that is well formed and wrong; 0 switches it off"""
    overlong_tokens: int = 0
    """take up to 1 off, linearly over the last so many tokens of rollout.max_response_tokens (DAPO); 0 = off"""

    def __post_init__(self) -> None:
        lookup({**METRICS, JUDGE: None}, self.metric, "metric")
        if self.judged not in ("graded", "right"):
            raise ConfigError(f"judged={self.judged!r} must be graded or right")
        if not 0 <= self.format_floor < 1:
            raise ConfigError(f"format_floor must lie in [0, 1), got {self.format_floor}; 0 switches it off")
        if self.overlong_tokens < 0:
            raise ConfigError(f"overlong_tokens={self.overlong_tokens} must be 0 (off) or above")


def score(
    trajectories: Sequence[Trajectory],
    samples: Sequence[Sample],
    cfg: RewardConfig,
    group_size: int,
    max_response_tokens: int = 0,
    judge: Judge | None = None,
) -> Tensor:
    """Rewards as [N, G] float32 on the CPU; also sets `trajectory.reward`. `max_response_tokens` is for
    overlong_tokens, `judge` for metric=judge: it is asked once, for all attempts that have an answer.

    Siblings are adjacent and groups are in the order of `samples`. Raises ValueError for anything else and
    for a reward that is not finite; warns once if most trajectories have no answer (a prompt that asks for no
    tag trains on noise).
    """
    pairs: list[tuple[Trajectory, Sample]] = []
    for group, sample in zip(groups_of(trajectories, group_size), samples, strict=True):
        if group[0].sample_id != sample.id:
            raise ValueError(f"trajectories of {group[0].sample_id} stand where those of {sample.id} belong")
        pairs += [(trajectory, sample) for trajectory in group]
    answered = [(trajectory, sample) for trajectory, sample in pairs if has_answer(trajectory)]
    values = iter(_values(answered, cfg, judge))
    for trajectory, sample in pairs:
        reward = _floored(next(values), trajectory, sample, cfg) if has_answer(trajectory) else 0.0
        trajectory.reward = reward - _overlong(trajectory, cfg, max_response_tokens)
    if no_answer_frac(trajectories) > 0.5:
        warnings.warn(
            "more than half of the trajectories have no answer; read some, check the protocol and the limits",
            stacklevel=2,
        )
    rewards = [trajectory.reward for trajectory in trajectories]
    return torch.tensor(rewards, dtype=torch.float32).reshape(len(samples), group_size)


def rollout_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """What to log about a step's trajectories; answer_words is a mean over those that have an answer, case_frac
    one over executed queries."""
    words = [len(t.answer.split()) for t in trajectories if has_answer(t)]
    metrics = {
        "rollout/no_answer_frac": no_answer_frac(trajectories),
        "rollout/answer_words": sum(words) / len(words) if words else 0.0,
        "rollout/turns": _mean(len(t.turns) for t in trajectories),
        "rollout/searches": _mean(t.num_searches for t in trajectories),
        "rollout/tokens": _mean(t.num_tokens for t in trajectories),
        "rollout/response_tokens": _mean(t.num_response_tokens for t in trajectories),
        "rollout/strategy_frac": _mean(bool(t.strategies) for t in trajectories),
        "rollout/case_frac": _mean(
            bool(turn.cases) for t in trajectories for turn in t.turns if turn.action == "search" and not turn.notice
        ),
        "rollout/experience_tokens": _mean(
            sum(len(s.token_ids) for s in t.segments if s.source is Source.EXPERIENCE) for t in trajectories
        ),
        "rollout/malformed_frac": _mean(turn.action == "malformed" for t in trajectories for turn in t.turns),
    }
    for status in (Status.OUT_OF_TURNS, Status.TRUNCATED, Status.BROKEN):
        metrics[f"rollout/{status.value}_frac"] = _mean(t.status is status for t in trajectories)
    return metrics


def has_answer(trajectory: Trajectory) -> bool:
    """Well formed: it ended with an answer, and the answer is not blank."""
    return trajectory.status is Status.ANSWERED and bool(trajectory.answer.strip())


def no_answer_frac(trajectories: Sequence[Trajectory]) -> float:
    return _mean(not has_answer(t) for t in trajectories)


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / max(len(numbers), 1)


def _overlong(trajectory: Trajectory, cfg: RewardConfig, limit: int) -> float:
    """Soft overlong punishment (DAPO, Eq. 13): 0 up to limit - overlong_tokens, 1 at the limit."""
    if not (cfg.overlong_tokens and limit):
        return 0.0
    sources = [segment.source for segment in trajectory.segments]
    begin = sources.index(Source.POLICY) if Source.POLICY in sources else len(sources)
    length = sum(len(segment.token_ids) for segment in trajectory.segments[begin:])
    over = length - (limit - cfg.overlong_tokens)
    return min(1.0, max(0.0, over / cfg.overlong_tokens))


def _values(answered: Sequence[tuple[Trajectory, Sample]], cfg: RewardConfig, judge: Judge | None) -> list[float]:
    """The metric of each attempt."""
    if cfg.metric == JUDGE:
        if judge is None:
            raise ConfigError("reward.metric=judge needs a judge here; set judge.first.model, or another reward.metric")
        grades = judge([(sample.question, sample.answers, t.answer) for t, sample in answered]) if answered else []
        return grades if cfg.judged == "graded" else [float(grade >= RIGHT) for grade in grades]
    if cfg.metric == "math":  # at once, for as many worker processes as there are
        return [float(v.correct) for v in check_all([(t.answer, sample.answers) for t, sample in answered])]
    return [METRICS[cfg.metric](t.answer, sample.answers) for t, sample in answered]


def _floored(value: float, trajectory: Trajectory, sample: Sample, cfg: RewardConfig) -> float:
    if not math.isfinite(value):
        raise ValueError(f"sample {sample.id}: metric {cfg.metric} is {value} for {trajectory.answer!r}")
    return value if value > 0 else cfg.format_floor
