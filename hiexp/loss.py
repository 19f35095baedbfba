"""What is optimised: the page to edit. Tensors in, tensors out; no model, no batch building, no files.

Everything is flat over K tokens that the policy wrote; prompt, documents, experience and notices are not here. The
caller minimises sum(token_weights * loss): never take a mean in this file. `policy_loss` sees a part of a micro-batch
at a time (fused.py); autograd finds its slope in `logprobs` and `entropy`, so plain PyTorch is all it takes. A new
algorithm is a function and a line in ALGORITHMS; a new metric is a [K] tensor in `policy_loss`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hiexp.advantages import ADVANTAGES
from hiexp.config import ConfigError, lookup


@dataclass(frozen=True)
class LossConfig:
    algorithm: str = "grpo"
    "grpo, gspo, dr_grpo, dapo, cispo or reinforce_pp; it also sets every key below that is null"
    advantage: str | None = None
    "group_std: (r - mean) / std of siblings; group_mean: r - mean; batch_std: over the std of all; batch: no groups"
    weighting: str | None = None
    "token: each trained token of a mini-batch counts alike; sequence: each trajectory; constant: see constant_tokens"
    clip_low: float | None = None
    "the ratio is clipped to [1 - clip_low, 1 + clip_high]"
    clip_high: float | None = None
    "see clip_low"
    dual_clip: float | None = None
    "bound on the loss of a token with a negative advantage, in advantages; 0 = off"
    kl_coef: float | None = None
    "weight of the estimate of KL(policy || reference)"
    kl_estimator: str = "k3"
    "k3: exp(ref - logp) - (ref - logp) - 1; k2: half of (logp - ref) squared; k1: logp - ref, whose slope is noise"
    entropy_coef: float = 0.0
    "weight of the entropy bonus"
    constant_tokens: int = 0
    "what a trajectory's sum is divided by with weighting=constant; 0 = rollout.max_response_tokens (Dr.GRPO)"
    mismatch: str = "none"
    "correction where engine and trainer disagree: none, truncate (TIS), mask (tokens out of range), sequence (whole)"
    mismatch_low: float = 0.5
    "mask, sequence: smallest trainer / engine probability ratio (sequence: geometric mean) that is trained"
    mismatch_high: float = 2.0
    "truncate: the ratio's cap; mask, sequence: its largest value that is trained"

    def __post_init__(self) -> None:
        algorithm = lookup(ALGORITHMS, self.algorithm, "algorithm")
        for name in ("advantage", "weighting", "clip_low", "clip_high", "dual_clip", "kl_coef"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, getattr(algorithm, name))
        for name, table in (("advantage", ADVANTAGES), ("kl_estimator", KL), ("mismatch", MISMATCH)):
            lookup(dict.fromkeys(table), getattr(self, name), name)
        lookup(dict.fromkeys(("token", "sequence", "constant")), self.weighting or "", "weighting")
        if self.algorithm == "gspo" and self.weighting != "sequence":
            raise ConfigError(f"gspo weighs sequences, not weighting={self.weighting}; leave loss.weighting out")
        if not 0 <= self.clip[0] < 1 < self.clip[1] < math.inf:
            raise ConfigError(f"clip_low={self.clip_low} must be in (0, 1], clip_high={self.clip_high} positive")
        if not 0 < self.mismatch_low < 1 < self.mismatch_high < math.inf:
            raise ConfigError(
                f"mismatch_low={self.mismatch_low} must be in (0, 1), mismatch_high={self.mismatch_high} above 1"
            )
        if self.dual_clip and not 1 < self.dual_clip < math.inf:
            raise ConfigError(f"dual_clip={self.dual_clip} must be above 1, or 0 to turn it off")
        for name in ("kl_coef", "entropy_coef", "constant_tokens"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name}={getattr(self, name)} must be 0 or above")

    @property
    def clip(self) -> tuple[float, float]:
        """The smallest and the largest ratio."""
        assert self.clip_low is not None and self.clip_high is not None
        return 1 - self.clip_low, 1 + self.clip_high

    @property
    def whole_sequences(self) -> bool:
        """Whether a token's loss depends on the other tokens of its trajectory, which must then come together."""
        return ALGORITHMS[self.algorithm].whole_sequences or self.mismatch == "sequence"


class LossInputs(Protocol):
    """The part of a `batching.Batch` that a loss reads."""

    advantages: Tensor  # [K] of the token's trajectory
    sequence: Tensor  # [K] which trajectory
    rollout_logprobs: Tensor  # [K] the engine's
    old_logprobs: Tensor | None  # [K] trainer's, before the step's first update: the ratio's denominator; None: now
    ref_logprobs: Tensor | None  # [K] frozen reference's; None where nobody asked for a KL term


def policy_loss(
    cfg: LossConfig, logprobs: Tensor, entropy: Tensor, batch: LossInputs
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss [K] of every trained token, and metrics [K] (the caller reduces `*_max` by max, else by weighted mean)."""
    old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    loss, clipped = ALGORITHMS[cfg.algorithm].objective(cfg, logprobs, old, batch)
    ratio = (logprobs - old).clamp(-20, 20).exp()
    metrics = {"loss/policy": loss, "loss/clip_frac": clipped.float(), "loss/ratio_max": ratio, "loss/entropy": entropy}
    if cfg.mismatch != "none":
        gap = old - batch.rollout_logprobs
        known = gap.isfinite()
        weight = MISMATCH[cfg.mismatch](cfg, gap.where(known, 0.0).clamp(-20, 20), batch) * known
        loss = loss * weight
        metrics |= {"loss/is_weight": weight, "loss/is_weight_max": weight, "loss/is_weight_sq": weight**2}
        metrics["loss/is_dropped_frac"] = (weight == 0).float()
    if batch.ref_logprobs is not None and cfg.kl_coef:
        metrics["loss/kl"] = KL[cfg.kl_estimator](logprobs, batch.ref_logprobs)
        loss = loss + cfg.kl_coef * metrics["loss/kl"]
    if cfg.entropy_coef:
        loss = loss - cfg.entropy_coef * entropy
    return loss, {name: value.detach() for name, value in metrics.items()}


def clipped_ratio(cfg: LossConfig, logprobs: Tensor, old: Tensor, batch: LossInputs) -> tuple[Tensor, Tensor]:
    """PPO-clip with a ratio per token (Eq. 3)."""
    return _clip(cfg, (logprobs - old).clamp(-20, 20).exp(), batch.advantages)


def sequence_ratio(cfg: LossConfig, logprobs: Tensor, old: Tensor, batch: LossInputs) -> tuple[Tensor, Tensor]:
    """PPO-clip with one ratio per sequence, the geometric mean of its tokens' (GSPO in its token form)."""
    log_ratio = _sequence_mean((logprobs - old).detach(), batch.sequence) + (logprobs - logprobs.detach())
    return _clip(cfg, log_ratio.clamp(-20, 20).exp(), batch.advantages)


def cispo(cfg: LossConfig, logprobs: Tensor, old: Tensor, batch: LossInputs) -> tuple[Tensor, Tensor]:
    """REINFORCE weighted by the clipped ratio, itself without gradient (MiniMax-M1): no token is ever dropped."""
    ratio = (logprobs - old).clamp(-20, 20).exp().detach()
    weight = ratio.clamp(*cfg.clip)
    return -weight * batch.advantages * logprobs, weight != ratio


def _clip(cfg: LossConfig, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    plain = ratio * advantages
    objective = torch.minimum(plain, ratio.clamp(*cfg.clip) * advantages)
    if cfg.dual_clip:
        bounded = torch.maximum(objective, cfg.dual_clip * advantages)
        objective = torch.where(advantages < 0, bounded, objective)
    return -objective, objective != plain


def _sequence_mean(values: Tensor, sequence: Tensor) -> Tensor:
    count = torch.bincount(sequence)
    total = values.new_zeros(len(count)).index_add(0, sequence, values)
    return (total / count.clamp(min=1))[sequence]


def _within(cfg: LossConfig, log_ratio: Tensor) -> Tensor:
    return (log_ratio >= math.log(cfg.mismatch_low)) & (log_ratio <= math.log(cfg.mismatch_high))


def _k3(logprobs: Tensor, ref: Tensor) -> Tensor:
    difference = (ref - logprobs).clamp(-20, 20)
    return (difference.exp() - difference - 1).clamp(max=10)  # bounded as verl's low_var_kl


@dataclass(frozen=True)
class Algorithm:
    """An objective and the settings that go with it (from the papers of their names)."""

    objective: Callable[[LossConfig, Tensor, Tensor, LossInputs], tuple[Tensor, Tensor]]
    advantage: str = "group_std"
    weighting: str = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 0.0
    kl_coef: float = 0.0
    whole_sequences: bool = False


ALGORITHMS: dict[str, Algorithm] = {
    "grpo": Algorithm(clipped_ratio, dual_clip=3.0, kl_coef=1e-3),
    "gspo": Algorithm(sequence_ratio, weighting="sequence", clip_low=3e-4, clip_high=4e-4, whole_sequences=True),
    "dr_grpo": Algorithm(clipped_ratio, advantage="group_mean", weighting="constant"),
    "dapo": Algorithm(clipped_ratio, clip_high=0.28),
    "cispo": Algorithm(cispo, clip_low=1.0, clip_high=4.0),
    "reinforce_pp": Algorithm(clipped_ratio, advantage="batch", kl_coef=1e-3),
}
KL: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": lambda logprobs, ref: logprobs - ref,
    "k2": lambda logprobs, ref: (logprobs - ref).clamp(-20, 20).square() / 2,
    "k3": _k3,
}
MISMATCH: dict[str, Callable[[LossConfig, Tensor, LossInputs], Tensor]] = {
    "none": lambda cfg, gap, batch: torch.ones_like(gap),
    "truncate": lambda cfg, gap, batch: gap.exp().clamp(max=cfg.mismatch_high),
    "mask": lambda cfg, gap, batch: gap.exp() * _within(cfg, gap),
    "sequence": lambda cfg, gap, batch: _within(cfg, _sequence_mean(gap, batch.sequence)).float(),
}
