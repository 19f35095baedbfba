"""What is optimised: the page to edit. Tensors in, tensors out; no model, no batch building, no files.

Everything is flat over the K tokens that the policy wrote; prompt, documents, experience and notices are not
here. The caller minimises sum(token_weights * loss). The weights sum to 1 over one optimiser step, so that
micro-batches simply add: never take a mean in this file. A new algorithm is a function of (cfg, log_ratio,
batch) and a line in ALGORITHMS; a new metric is a [K] tensor in the dict of `policy_loss`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hiexp.config import ConfigError, lookup


@dataclass(frozen=True)
class LossConfig:
    algorithm: str = "grpo"
    "grpo (a ratio per token) or gspo (one ratio per sequence)"
    advantage: str = "group_std"
    "group_std: (r - mean) / std of the siblings; group_mean: r - mean"
    clip_low: float = 0.2
    "the ratio is clipped to [1 - clip_low, 1 + clip_high]; the GSPO paper has 3e-4 and 4e-4"
    clip_high: float = 0.2
    "see clip_low"
    dual_clip: float = 3.0
    "bound on the loss of a token with a negative advantage, in advantages; 0 = off"
    kl_coef: float = 1e-3
    "weight of the k3 estimate of KL(policy || reference)"
    weighting: str = "token"
    "token: every trained token of a mini-batch counts the same; sequence: every trajectory does"

    def __post_init__(self) -> None:
        lookup(ALGORITHMS, self.algorithm, "algorithm")
        lookup(dict.fromkeys(("group_std", "group_mean")), self.advantage, "advantage")
        lookup(dict.fromkeys(("token", "sequence")), self.weighting, "weighting")
        if self.algorithm == "gspo" and self.weighting != "sequence":
            raise ConfigError("gspo needs weighting=sequence (and its own clip range: clip_low=3e-4, clip_high=4e-4)")
        if not (0 < self.clip_low < 1 and 0 < self.clip_high < math.inf):
            raise ConfigError(f"clip_low={self.clip_low} must be in (0, 1), clip_high={self.clip_high} positive")
        if self.dual_clip and not 1 < self.dual_clip < math.inf:
            raise ConfigError(f"dual_clip={self.dual_clip} must be above 1, or 0 to turn it off")
        if not 0 <= self.kl_coef < math.inf:
            raise ConfigError(f"kl_coef={self.kl_coef} must be 0 or above")


class LossInputs(Protocol):
    """The part of a `batching.Batch` that a loss reads."""

    advantages: Tensor  # [K] of the token's trajectory
    sequence: Tensor  # [K] which trajectory, 0..S-1; a trajectory is never split over two batches
    old_logprobs: Tensor | None  # [K] trainer's, before the step's first update: the ratio's denominator
    ref_logprobs: Tensor | None  # [K] frozen reference's; None where nobody asked for a KL term


def group_advantages(rewards: Tensor, mode: str) -> Tensor:
    """Rewards [N, G] -> advantages [N, G], each row compared with itself (DeepSeekMath; the std is unbiased).

    Identical rewards give exactly 0. A group of one has nothing to compare with: its advantage is its reward.
    """
    if rewards.shape[1] == 1:
        return rewards.clone()
    advantages = rewards - rewards.mean(dim=1, keepdim=True)
    if mode == "group_std":
        advantages = advantages / (rewards.std(dim=1, keepdim=True) + 1e-6)
    identical = (rewards == rewards[:, :1]).all(dim=1, keepdim=True)  # the mean is rounded
    return advantages.masked_fill(identical, 0.0)


def policy_loss(cfg: LossConfig, logprobs: Tensor, batch: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss [K] of every trained token, and metrics [K] (the caller reduces `*_max` by max, else by mean)."""
    assert batch.old_logprobs is not None
    log_ratio = logprobs - batch.old_logprobs
    loss, clipped = ALGORITHMS[cfg.algorithm](cfg, log_ratio, batch)
    ratio = log_ratio.clamp(-20, 20).exp()
    metrics = {"loss/policy": loss, "loss/clip_frac": clipped.float(), "loss/ratio_max": ratio}
    if batch.ref_logprobs is not None:
        difference = (batch.ref_logprobs - logprobs).clamp(-20, 20)
        kl = (difference.exp() - difference - 1).clamp(max=10)  # k3, bounded as verl's low_var_kl
        loss = loss + cfg.kl_coef * kl
        metrics["loss/kl"] = kl
    return loss, {name: value.detach() for name, value in metrics.items()}


def grpo(cfg: LossConfig, log_ratio: Tensor, batch: LossInputs) -> tuple[Tensor, Tensor]:
    """PPO-clip with a ratio per token (Eq. 3)."""
    return _clipped(cfg, log_ratio, batch.advantages)


def gspo(cfg: LossConfig, log_ratio: Tensor, batch: LossInputs) -> tuple[Tensor, Tensor]:
    """PPO-clip with one ratio per sequence, the geometric mean of its tokens' (token form of GSPO)."""
    detached = log_ratio.detach()
    count = torch.bincount(batch.sequence)  # [S]
    total = detached.new_zeros(len(count)).index_add(0, batch.sequence, detached)
    mean = (total / count.clamp(min=1))[batch.sequence]
    return _clipped(cfg, mean + (log_ratio - detached), batch.advantages)


def _clipped(cfg: LossConfig, log_ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    ratio = log_ratio.clamp(-20, 20).exp()
    plain = ratio * advantages
    objective = torch.minimum(plain, ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high) * advantages)
    if cfg.dual_clip:
        bounded = torch.maximum(objective, cfg.dual_clip * advantages)
        objective = torch.where(advantages < 0, bounded, objective)
    return -objective, objective != plain


Algorithm = Callable[[LossConfig, Tensor, LossInputs], tuple[Tensor, Tensor]]
ALGORITHMS: dict[str, Algorithm] = {"grpo": grpo, "gspo": gspo}
