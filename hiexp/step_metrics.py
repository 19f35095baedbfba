"""The numbers that one training step logs about itself; run_panel.py reads them over a whole run.

`StepTotals` collects what the updates see, `signal_metrics` what the rewards say, `sampler_metrics` what was trained
and how well engine and trainer agree. A new number is a line here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hiexp.batching import Batch
from hiexp.trajectory import Trajectory


@dataclass
class StepTotals:
    """Sums over the micro-batches and mini-batches of one training step."""

    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)
    weight: float = 0.0
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    cosines: list[float] = field(default_factory=list)
    skipped: int = 0
    gradient: Tensor | None = None

    def add(self, values: dict[str, Tensor], weights: Tensor) -> None:
        self.weight += float(weights.sum())
        for name, value in values.items():
            if name.endswith("_max"):
                self.maxima[name] = max(self.maxima.get(name, -math.inf), float(value.max()))
            else:
                self.sums[name] = self.sums.get(name, 0.0) + float((weights * value).sum())

    def add_update(self, policy: nn.Module, loss: float, norm: float) -> None:
        self.losses.append(loss)
        self.norms.append(norm)
        gradients = [parameter.grad for parameter in policy.parameters() if parameter.grad is not None]
        if sum(gradient.numel() for gradient in gradients) > _COSINE_LIMIT:
            return
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        if self.gradient is not None:
            self.cosines.append(float(torch.cosine_similarity(flat, self.gradient, dim=0)))
        self.gradient = flat

    def metrics(self, max_grad_norm: float) -> dict[str, float]:
        result = {name: total / self.weight for name, total in self.sums.items()} | self.maxima
        result["loss/total"] = _mean(self.losses)
        result["optim/grad_norm"] = _mean(self.norms)
        result |= {f"optim/grad_norm_{index}": norm for index, norm in enumerate(self.norms)}
        result["optim/clip_frac"] = _mean([float(norm > max_grad_norm) for norm in self.norms])
        result["optim/skipped_mini_batches"] = float(self.skipped)
        if self.cosines:
            result["optim/grad_cosine"] = _mean(self.cosines)
        return result


def signal_metrics(rewards: Tensor, advantages: Tensor) -> dict[str, float]:
    """How much the groups have to say; variances are population variances over the whole step.

    A group of identical rewards counts as all right from a reward of one half on, as all wrong below.
    """
    identical = (rewards == rewards[:, :1]).all(dim=1)
    right = identical & (rewards[:, 0] >= 0.5)
    return {
        "reward/within_group_var": float(rewards.var(dim=1, correction=0).mean()),
        "advantage/var": float(advantages.var(correction=0)),
        "group/zero_std_frac": float(identical.float().mean()),
        "group/all_right_frac": float(right.float().mean()),
        "group/all_wrong_frac": float((identical & ~right).float().mean()),
    }


def sampler_metrics(trajectories: Sequence[Trajectory], mini_batches: Sequence[Sequence[Batch]]) -> dict[str, float]:
    """What was trained, and k3 of KL(sampler || trainer): how far the two disagree about the same weights."""
    gaps = [
        batch.old_logprobs - batch.rollout_logprobs
        for batches in mini_batches
        for batch in batches
        if batch.old_logprobs is not None
    ]
    gap = torch.cat(gaps) if gaps else torch.zeros(1)
    return {
        "rollout/empty_sequences": float(sum(not any(one.response_mask) for one in trajectories)),
        "rollout/trained_tokens": float(sum(len(one) for one in gaps)),
        "rollout/mismatch_kl": float((gap.exp() - gap - 1).mean()),
        "rollout/mismatch_max": float(gap.abs().max()),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


_COSINE_LIMIT = 100_000_000  # parameters; the cosine keeps a second copy of the gradient
