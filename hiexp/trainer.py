"""From trajectories and rewards to new weights: `update_policy` is the learning half of a training step.

The trainer scores every token itself: the sampler's log-probs are compared with its own and never trained on.
`sft_step` trains on written traces through the same batches. An optimiser is any torch optimiser, or a list of
them that share out the parameters (Muon for matrices and AdamW for the rest, say).
"""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from hiexp.batching import Batch, Row, micro_batches, pack
from hiexp.config import ConfigError
from hiexp.loss import LossConfig, group_advantages, policy_loss
from hiexp.model import kept_logprobs
from hiexp.step_metrics import StepTotals, sampler_metrics, signal_metrics
from hiexp.trajectory import Trajectory

Optimizers = Optimizer | Sequence[Optimizer]


@dataclass(frozen=True)
class OptimConfig:
    lr: float = 1e-6
    "learning rate, constant"
    betas: tuple[float, float] = (0.9, 0.999)
    "AdamW's moment decay rates"
    weight_decay: float = 0.01
    "AdamW's decoupled weight decay"
    max_grad_norm: float = 1.0
    "gradients are scaled down to this norm"
    mini_batches: int = 2
    "optimiser steps per training step; groups are never split between them"
    tokens_per_micro_batch: int = 1024
    "padded positions in one forward-backward: memory and speed, never the result (1024: a CPU's cache)"

    def __post_init__(self) -> None:
        for name in ("lr", "max_grad_norm", "mini_batches", "tokens_per_micro_batch"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be above 0")
        if not math.isfinite(self.lr):
            raise ConfigError(f"lr={self.lr} must be finite")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"betas={list(self.betas)} must be in [0, 1)")
        if not 0 <= self.weight_decay < math.inf:
            raise ConfigError(f"weight_decay={self.weight_decay} must be 0 or above")


def make_optimizer(model: PreTrainedModel, cfg: OptimConfig) -> Optimizer:
    """AdamW over the trainable parameters, which must be float32."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if any(parameter.dtype != torch.float32 for parameter in parameters):
        raise ConfigError(f"a {parameters[0].dtype} policy rounds small updates away; set its dtype to float32")
    return torch.optim.AdamW(parameters, cfg.lr, cfg.betas, weight_decay=cfg.weight_decay, fused=True)


def update_policy(
    policy: PreTrainedModel,
    reference: PreTrainedModel | None,
    optimizer: Optimizers,
    trajectories: Sequence[Trajectory],
    rewards: Tensor,  # [N, G], trajectories are its rows one after the other
    loss_cfg: LossConfig,
    optim_cfg: OptimConfig,
    temperature: float,
    dump_dir: str | Path,
    step: int,
) -> dict[str, float]:
    """Change the policy in place by `mini_batches` optimiser steps; returns this step's metrics.

    `step` is also the policy version that must have sampled every trajectory (ValueError: a stale engine).
    A loss or gradient that is not finite raises FloatingPointError before it reaches the weights; the mini-batch
    is then in a file under `dump_dir`, for torch.load(..., weights_only=True). `reference` may be None if
    kl_coef is 0.
    """
    _check(trajectories, rewards, step, temperature, reference is not None or loss_cfg.kl_coef == 0)
    advantages = group_advantages(rewards.float(), loss_cfg.advantage)
    mini_batches = _split(trajectories, advantages, loss_cfg, optim_cfg, policy.device)
    for position, batches in enumerate(mini_batches):
        # The first mini-batch meets the old policy itself: its own forward pass yields its old log-probs.
        annotate_logprobs(policy if position else None, reference, batches, temperature)
    totals = StepTotals()
    for position, batches in enumerate(mini_batches):
        if not batches:
            totals.skipped += 1
            continue
        policy.zero_grad()
        loss = sum(_backward(policy, batch, loss_cfg, temperature, totals) for batch in batches)
        norm = _clip(policy, optim_cfg)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            policy.zero_grad()
            raise FloatingPointError(_dump(Path(dump_dir), step, position, loss, norm, batches))
        totals.add_update(policy, loss, norm)
        _step(optimizer)
    policy.zero_grad()
    metrics = totals.metrics(optim_cfg.max_grad_norm)
    return metrics | signal_metrics(rewards.float(), advantages) | sampler_metrics(trajectories, mini_batches)


def annotate_logprobs(
    policy: PreTrainedModel | None,
    reference: PreTrainedModel | None,
    batches: Sequence[Batch],
    temperature: float,
) -> None:
    """Fill `old_logprobs` from the policy and `ref_logprobs` from the reference, where a model is given."""
    with torch.no_grad():
        for batch in batches:
            if policy is not None:
                batch.old_logprobs = kept_logprobs(policy, batch, temperature)[0]
            if reference is not None:
                batch.ref_logprobs = kept_logprobs(reference, batch, temperature)[0]


def sft_step(
    model: PreTrainedModel,
    optimizer: Optimizers,
    rows: Sequence[tuple[list[int], list[bool]]],
    optim_cfg: OptimConfig,
) -> dict[str, float]:
    """One optimiser step on token ids and a mask of the tokens to learn: their mean negative log-prob.

    Returns sft/loss, sft/tokens, optim/grad_norm; FloatingPointError and unchanged weights if not finite.
    """
    named = []
    for index, (ids, mask) in enumerate(rows):
        trained = [position for position, (_, on) in enumerate(zip(ids, mask, strict=True)) if on]
        named.append(Row(f"row {index}", ids, trained))
    batches = pack(named, optim_cfg.tokens_per_micro_batch, "token", device=model.device)
    if not batches:
        raise ValueError(f"none of the {len(named)} rows has a token to learn; the masks are all False")
    model.zero_grad()
    total = 0.0
    for batch in batches:
        loss = -(batch.token_weights * kept_logprobs(model, batch, 1.0)[0]).sum()
        loss.backward()
        total += float(loss.detach())
    norm = _clip(model, optim_cfg)
    if not (math.isfinite(total) and math.isfinite(norm)):
        model.zero_grad()
        raise FloatingPointError(f"supervised step: loss {total}, gradient norm {norm}; weights unchanged")
    _step(optimizer)
    tokens = sum(len(batch.kept) for batch in batches)
    return {"sft/loss": total, "sft/tokens": float(tokens), "optim/grad_norm": norm}


def _check(
    trajectories: Sequence[Trajectory], rewards: Tensor, step: int, temperature: float, has_reference: bool
) -> None:
    groups, size = rewards.shape
    if len(trajectories) != groups * size:
        raise ValueError(f"{len(trajectories)} trajectories do not fill rewards of shape {groups} x {size}")
    if not has_reference:
        raise ConfigError("kl_coef is above 0 but there is no reference model; load one or set kl_coef=0")
    if temperature <= 0:
        raise ConfigError(f"temperature={temperature}: a greedy rollout cannot be trained on; set it above 0")
    for index, trajectory in enumerate(trajectories):
        name, first = trajectory.sample_id, trajectories[index - index % size].sample_id
        if name != first:
            raise ValueError(f"siblings must be adjacent: {name} stands in the group of {first}")
        if trajectory.policy_version != step:
            version = trajectory.policy_version
            raise ValueError(f"stale engine: step {step} got {name} of policy version {version}")
    bad = (~rewards.isfinite()).flatten().nonzero().flatten().tolist()
    if bad:
        raise ValueError(f"the reward of {trajectories[bad[0]].sample_id} is not finite")


def _split(
    trajectories: Sequence[Trajectory],
    advantages: Tensor,
    loss_cfg: LossConfig,
    cfg: OptimConfig,
    device: torch.device,
) -> list[list[Batch]]:
    """Group n goes to mini-batch n modulo their count, so that a block of like questions is spread over all."""
    groups, size = advantages.shape
    count = min(cfg.mini_batches, groups)
    flat = advantages.flatten().tolist()
    result = []
    for position in range(count):
        members = [index for index in range(groups * size) if index // size % count == position]
        result.append(
            micro_batches(
                [trajectories[index] for index in members],
                [flat[index] for index in members],
                cfg.tokens_per_micro_batch,
                loss_cfg.weighting,
                skip_zero_advantage=loss_cfg.kl_coef == 0,
                device=device,
            )
        )
    return result


def _backward(policy: PreTrainedModel, batch: Batch, cfg: LossConfig, temperature: float, totals: StepTotals) -> float:
    logprobs, entropy = kept_logprobs(policy, batch, temperature)
    if batch.old_logprobs is None:
        batch.old_logprobs = logprobs.detach()
    per_token, values = policy_loss(cfg, logprobs, batch)
    loss = (batch.token_weights * per_token).sum()
    loss.backward()
    totals.add(values | {"loss/entropy": entropy}, batch.token_weights)
    # The loss clamps its exponents, which would hide an infinite log-prob from the check of the caller.
    return float(loss.detach()) if bool(logprobs.isfinite().all()) else math.nan


def _clip(model: PreTrainedModel, cfg: OptimConfig) -> float:
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    return float(torch.nn.utils.clip_grad_norm_(parameters, cfg.max_grad_norm))


def _step(optimizer: Optimizers) -> None:
    for one in [optimizer] if isinstance(optimizer, Optimizer) else optimizer:
        one.step()


def _dump(folder: Path, step: int, position: int, loss: float, norm: float, batches: Sequence[Batch]) -> str:
    """Write the mini-batch; returns the message that names step and file."""
    path, buffer = folder / f"nonfinite_step{step:06d}.pt", io.BytesIO()
    tensors = [{name: value.cpu() for name, value in batch.tensors().items()} for batch in batches]
    values = {"step": step, "mini_batch": position, "loss": loss, "grad_norm": norm}
    torch.save(values | {"batches": tensors}, buffer)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(buffer.getvalue())
        where = f"the batch is in {path}"
    except OSError as error:
        where = f"the batch could not be written to {path}: {error.strerror}"
    return f"step {step}, mini-batch {position}: loss {loss}, gradient norm {norm}, not applied; {where}"
