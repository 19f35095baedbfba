"""Stop a run that has collapsed, while its last good checkpoint is still there.

Search agents are known to fall to reward zero after some hundred steps, with gibberish for answers, and to stay there
(Search-R1 issues 186 and 89). A rule is a logged metric and a limit; a new one is a field of `WatchConfig` and a line
of LIMITS.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hiexp.config import ConfigError


class Collapse(ConfigError):
    """The run is stopped: a metric stayed beyond its limit. The message says which, since when, and what to do."""


@dataclass(frozen=True)
class WatchConfig:
    patience: int = 50
    """stop after so many steps in a row beyond a limit; 0 = never stop"""
    window: int = 10
    """a limit is compared with the mean of the last so many steps"""
    reward_fraction: float = 0.2
    """limit: the mean reward is below this share of its best so far; 0 = none"""
    min_entropy: float | None = None
    """limit on the policy's entropy, nats per token: below it, siblings are copies of each other"""
    max_entropy: float | None = None
    """limit on the same: above it, the policy writes noise"""
    max_grad_norm: float | None = None
    """limit on the gradient norm before clipping"""
    min_response_tokens: float | None = None
    """limit on the policy's tokens per trajectory"""
    max_response_tokens: float | None = None
    """limit on the same"""
    max_malformed_frac: float | None = None
    """limit on the share of turns with neither query nor answer"""
    max_mismatch_kl: float | None = None
    """limit on KL(engine || trainer) about the same weights"""

    def __post_init__(self) -> None:
        if self.patience < 0 or self.window < 1:
            raise ConfigError(f"patience={self.patience} must be 0 or above, window={self.window} at least 1")
        for name in LIMITS:
            if not math.isfinite(getattr(self, name) or 0.0):
                raise ConfigError(f"{name}={getattr(self, name)} must be a number, or null for no limit")
        if not 0 <= self.reward_fraction < 1:
            raise ConfigError(f"reward_fraction={self.reward_fraction} must lie in [0, 1); 0 switches it off")


LIMITS = {
    "min_entropy": "loss/entropy",
    "max_entropy": "loss/entropy",
    "max_grad_norm": "optim/grad_norm",
    "min_response_tokens": "rollout/response_tokens",
    "max_response_tokens": "rollout/response_tokens",
    "max_malformed_frac": "rollout/malformed_frac",
    "max_mismatch_kl": "rollout/mismatch_kl",
}
"""field of WatchConfig, which begins with min_ or max_ -> logged metric"""
_REWARD = "reward/mean"


class CollapseWatch:
    """Sees the metrics of every step; `state_dict` goes into a checkpoint, so that a resumed run goes on counting."""

    def __init__(self, cfg: WatchConfig) -> None:
        self.cfg = cfg
        self._limits = {name: getattr(cfg, name) for name in LIMITS if getattr(cfg, name) is not None}
        self._recent: dict[str, list[float]] = {}
        self._beyond: dict[str, int] = {}
        self._best, self._best_step = -math.inf, 0

    @property
    def is_suspect(self) -> bool:
        """A metric is beyond its limit now: what is saved in such a step must not push a good checkpoint out."""
        return any(self._beyond.values())

    def check(self, step: int, metrics: Mapping[str, float]) -> None:
        """Raises Collapse if this step is the `patience`-th in a row beyond a limit.

        A value that is absent (no row had a signal) or not finite leaves the mean of the others as it is.
        """
        if not self.cfg.patience:
            return
        for key in {_REWARD, *(LIMITS[name] for name in self._limits)}:
            value, recent = metrics.get(key, math.nan), self._recent.setdefault(key, [])
            recent += [float(value)] if math.isfinite(value) else []
            del recent[: -self.cfg.window]
        for name in ("reward_fraction", *self._limits):
            self._judge(step, name)

    def state_dict(self) -> dict[str, Any]:
        """Plain lists and numbers."""
        best = [self._best, self._best_step] if math.isfinite(self._best) else None
        return {"recent": {k: list(v) for k, v in self._recent.items()}, "beyond": dict(self._beyond), "best": best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._recent = {key: list(values) for key, values in state["recent"].items()}
        self._beyond = dict(state["beyond"])
        self._best, self._best_step = state["best"] or (-math.inf, 0)

    def _judge(self, step: int, name: str) -> None:
        key = LIMITS.get(name, _REWARD)
        recent = self._recent[key]
        if len(recent) < self.cfg.window:
            return
        mean = sum(recent) / len(recent)
        if name == "reward_fraction":
            if mean > self._best:
                self._best, self._best_step = mean, step
            limit = self.cfg.reward_fraction * self._best if self._best > 0 else -math.inf
        else:
            limit = self._limits[name]
        is_beyond = mean > limit if name.startswith("max_") else mean < limit
        self._beyond[name] = self._beyond.get(name, 0) + 1 if is_beyond else 0
        if self._beyond[name] >= self.cfg.patience:
            raise Collapse(self._message(step, name, key, mean, limit))

    def _message(self, step: int, name: str, key: str, mean: float, limit: float) -> str:
        side = "above" if name.startswith("max_") else "below"
        best = f" (a share of {self.cfg.reward_fraction:g} of its best, {self._best:.3g} at step {self._best_step})"
        return (
            f"step {step}: the run has collapsed: {key}, mean of {self.cfg.window} steps, is {mean:.3g}, {side} "
            f"{limit:.3g}{best if name == 'reward_fraction' else ''} since step {step - self.cfg.patience + 1}. The "
            f"run folder keeps the last checkpoint from before; go on from it with other settings (optim.lr), or "
            f"change watch.{name} or watch.patience (0 never stops)"
        )
