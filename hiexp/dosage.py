"""How much experience a step of training gives: which groups get any, and how long it may be.

A policy that always has hints learns to lean on them. It is weaned by leaving whole groups without experience
(`dropout`) and by shortening what the others get (`tokens`), both held or moved over the steps of a run. Never part of
a group: siblings without hints would fare worse than the others, and GRPO would train against answering unaided.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hiexp.config import ConfigError
from hiexp.data import Sample


@dataclass(frozen=True)
class DosageConfig:
    """How often training rollouts get experience, and how much. Evaluation and validation always give all."""

    dropout: float = 0.0
    """share of the groups that get no experience, when training begins"""
    dropout_end: float | None = None
    """the same once the schedule is over; null = as at the beginning"""
    tokens: float = 1.0
    """share of rollout.strategy_tokens and rollout.case_tokens that may be used, when training begins"""
    tokens_end: float | None = None
    """the same once the schedule is over; null = as at the beginning"""
    start: int = 0
    """first step that moves away from the beginning"""
    steps: int = 0
    """steps that the schedule takes; 0 = all that are left of train.steps"""
    shape: Literal["linear", "cosine"] = "linear"
    """cosine moves slowly at both ends"""

    @property
    def follows_training(self) -> bool:
        """Whether train.steps changes the schedule."""
        return not self.steps and not (self.dropout_end is None and self.tokens_end is None)

    def __post_init__(self) -> None:
        for name in ("dropout", "dropout_end", "tokens", "tokens_end"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ConfigError(f"{name}={value} is a share; set it in [0, 1]")
        for name in ("start", "steps"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} must not be negative")
        if (self.start or self.steps) and self.dropout_end is None and self.tokens_end is None:
            raise ConfigError(
                f"start={self.start}, steps={self.steps}: nothing is scheduled; set dropout_end or tokens_end"
            )


@dataclass(frozen=True)
class Dose:
    """What one step gives."""

    withheld: float
    """share of the groups without experience"""
    tokens: float
    """share of the token budgets"""

    def hinted(self, samples: Sequence[Sample], seed: int, step: int) -> list[bool]:
        """Per question, whether its group gets experience: a hash of (seed, step, id), the same on every rank."""
        return [_draw(seed, step, sample.id) >= self.withheld for sample in samples]

    def budgets(self, strategy_tokens: int, case_tokens: int) -> dict[str, int]:
        """The two budgets of RolloutConfig, shortened."""
        return {
            "strategy_tokens": round(self.tokens * strategy_tokens),
            "case_tokens": round(self.tokens * case_tokens),
        }


def dose(cfg: DosageConfig, step: int, total_steps: int, control: float = 0.0) -> Dose:
    """The dose of a step of `total_steps`; at least the share `control` of the groups goes without experience."""
    length = cfg.steps or max(total_steps - cfg.start, 1)
    done = min(max((step - cfg.start) / max(length - 1, 1), 0.0), 1.0)  # the last step of the schedule has its end
    if cfg.shape == "cosine":
        done = (1 - math.cos(math.pi * done)) / 2
    return Dose(max(control, _between(cfg.dropout, cfg.dropout_end, done)), _between(cfg.tokens, cfg.tokens_end, done))


def _between(first: float, last: float | None, done: float) -> float:
    return first if last is None else first + (last - first) * done


def _draw(seed: int, step: int, sample_id: str) -> float:
    """In [0, 1), even over ids and steps."""
    digest = hashlib.blake2b(f"{seed} {step} {sample_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) / 2**64
