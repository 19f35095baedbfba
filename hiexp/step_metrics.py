"""The numbers that one training step logs about itself; run_panel.py reads them over a whole run.

`StepTotals` collects what the updates see and how well engine and trainer agree, `signal_metrics` what the rewards
say. A new number is a line here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hiexp.batching import Batch
from hiexp.distributed import Context


@dataclass
class StepTotals:
    """Sums over the micro-batches and mini-batches of one training step, on this rank until `metrics` joins them."""

    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)
    weight: float = 0.0
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    cosines: list[float] = field(default_factory=list)
    skipped: int = 0
    nonfinite: int = 0
    out_of_memory: int = 0
    gradient: Tensor | None = None
    gaps: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    """tokens with a log-prob of the engine, sum of k3 between engine and trainer, trained tokens"""

    def add(self, values: dict[str, Tensor], batch: Batch) -> None:
        """One micro-batch: metrics [K], `*_max` by maximum, else weighted by the token weights."""
        weights = batch.token_weights
        self.weight += float(weights.sum())
        for name, value in values.items():
            if name.endswith("_max"):
                top = float(value.where(weights > 0, -math.inf).max())  # a row that only fills up a rank has weight 0
                self.maxima[name] = max(self.maxima.get(name, -math.inf), top)
            else:
                self.sums[name] = self.sums.get(name, 0.0) + float((weights * value).sum())
        assert batch.old_logprobs is not None
        gap = (batch.old_logprobs - batch.rollout_logprobs)[weights > 0]
        known = gap[gap.isfinite()]
        for index, value in enumerate((len(known), float((known.exp() - known - 1).sum()), len(gap))):
            self.gaps[index] += value
        largest = float(known.abs().max()) if len(known) else 0.0
        self.maxima["rollout/mismatch_max"] = max(self.maxima.get("rollout/mismatch_max", 0.0), largest)

    def add_update(self, policy: nn.Module, loss: float, norm: float, ctx: Context) -> None:
        """A mini-batch whose gradient is in the policy; cosines between those of one step are kept.

        A large gradient is compared on the same part of each parameter, as it has to be kept until the next one.
        """
        self.losses.append(loss)
        self.norms.append(norm)
        gradients = [_local(parameter.grad) for parameter in policy.parameters() if parameter.grad is not None]
        share = min(1.0, COSINE_ELEMENTS / max(1, sum(gradient.numel() for gradient in gradients)))
        flat = torch.cat([gradient.flatten()[: math.ceil(gradient.numel() * share)] for gradient in gradients])
        if self.gradient is not None:
            pairs = ((flat, self.gradient), (flat, flat), (self.gradient, self.gradient))
            dot, one, other = ctx.sum([float(a @ b) for a, b in pairs])
            self.cosines.append(dot / max(math.sqrt(one * other), 1e-30))
        self.gradient = flat

    def metrics(self, max_grad_norm: float, ctx: Context) -> dict[str, float]:
        """What all ranks saw together; every rank calls it."""
        names, tops = sorted(self.sums), sorted(self.maxima)
        weight, known, divergence, trained, *sums = ctx.sum([self.weight, *self.gaps, *(self.sums[n] for n in names)])
        maxima = ctx.max([self.maxima[name] for name in tops])
        result = {name: total / weight for name, total in zip(names, sums, strict=True)}
        result |= dict(zip(tops, maxima, strict=True))
        square = result.pop("loss/is_weight_sq", 0.0)
        if square:
            result["loss/is_ess"] = result["loss/is_weight"] ** 2 / square
        result["rollout/mismatch_kl"] = divergence / max(known, 1.0)
        result.setdefault("rollout/mismatch_max", 0.0)
        result["rollout/trained_tokens"] = trained
        result["rollout/unknown_logprobs"] = trained - known
        result["loss/total"] = _mean(self.losses)
        result["optim/grad_norm"] = _mean(self.norms)
        result |= {f"optim/grad_norm_{index}": norm for index, norm in enumerate(self.norms)}
        result["optim/clip_frac"] = _mean([float(norm > max_grad_norm) for norm in self.norms])
        result["optim/skipped_mini_batches"] = float(self.skipped)
        result["optim/nonfinite"] = float(self.nonfinite)
        result["optim/out_of_memory"] = float(self.out_of_memory)
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
        "reward/within_group_std": float(rewards.std(dim=1, correction=0).mean()),
        "advantage/var": float(advantages.var(correction=0)),
        "group/zero_std_frac": float(identical.float().mean()),
        "group/all_right_frac": float(right.float().mean()),
        "group/all_wrong_frac": float((identical & ~right).float().mean()),
    }


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


COSINE_ELEMENTS = 100_000_000
"""of the gradient on a rank; the cosine keeps them a second time"""
