"""From trajectories and rewards to new weights: `update_policy` is the learning half of a training step.

The trainer scores every token itself: the engine's log-probs are compared with its own and never trained on. Every rank
is given the trajectories of all ranks, plans for all and takes its part, so that nothing here depends on how many there
are. `sft_step` trains on written traces through the same batches. An optimiser is any torch optimiser, or a list of
them that share out the parameters (Muon for matrices and AdamW for the rest, say).
"""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from hiexp.advantages import group_advantages
from hiexp.batching import Batch, Layout, Row, halves, micro_batches, trajectory_row, weigh
from hiexp.config import ConfigError, lookup
from hiexp.distributed import Context
from hiexp.fused import fused_loss
from hiexp.loss import LossConfig, policy_loss
from hiexp.model import head_weight, hidden_states, kept_logprobs, release
from hiexp.speed import cost_model
from hiexp.step_metrics import StepTotals, signal_metrics
from hiexp.tracking import timed
from hiexp.trajectory import Trajectory

Optimizers = Optimizer | Sequence[Optimizer]
ALONE = Context()


@dataclass(frozen=True)
class OptimConfig:
    lr: float = 1e-6
    "peak learning rate"
    schedule: str = "constant"
    "what the learning rate does after the warm-up: constant, or linear or cosine, which would be 0 after the last step"
    warmup_steps: int = 0
    "training steps over which the learning rate rises linearly to its peak"
    betas: tuple[float, float] = (0.9, 0.999)
    "AdamW's moment decay rates"
    weight_decay: float = 0.01
    "AdamW's decoupled weight decay"
    max_grad_norm: float = 1.0
    "gradients are scaled down to this norm"
    mini_batches: int = 2
    "optimiser steps per training step; groups are never split between them"
    tokens_per_micro_batch: int = 1024
    "positions in one forward-backward, padding included: memory and speed, never the result (1024: a CPU's cache)"
    packed: bool = False
    "rows end to end without padding; pays with model.attention=varlen or flash_attention_2"
    max_nonfinite: int = 2
    "steps in a row with a mini-batch whose loss or gradient is not finite (never applied) before the run stops"

    def __post_init__(self) -> None:
        for name in ("lr", "max_grad_norm", "mini_batches", "tokens_per_micro_batch"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be above 0")
        if not math.isfinite(self.lr):
            raise ConfigError(f"lr={self.lr} must be finite")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"betas={list(self.betas)} must be in [0, 1)")
        for name in ("weight_decay", "warmup_steps", "max_nonfinite"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name}={getattr(self, name)} must be 0 or above")
        lookup(SCHEDULES, self.schedule, "schedule")


SCHEDULES = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: (1.0 + math.cos(math.pi * done)) / 2,
}
"""share of the steps after the warm-up that are done, 0..1 -> factor of the learning rate"""


def set_learning_rate(optimizer: Optimizer, cfg: OptimConfig, step: int, steps: int) -> float:
    """Set and return the learning rate of step `step` of `steps`: a function of the step alone, so nothing is saved."""
    rise = min(1.0, (step + 1) / (cfg.warmup_steps + 1))
    done = max(0, step - cfg.warmup_steps) / max(1, steps - cfg.warmup_steps)
    rate = cfg.lr * rise * SCHEDULES[cfg.schedule](done)
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate


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
    rewards: Tensor,  # [N, G], trajectories are its rows one after the other; the same on every rank
    loss_cfg: LossConfig,
    optim_cfg: OptimConfig,
    temperature: float,
    dump_dir: str | Path,
    step: int,
    ctx: Context = ALONE,
) -> dict[str, float]:
    """Change the policy in place by `mini_batches` optimiser steps; returns this step's metrics.

    `step` is also the policy version that must have sampled every trajectory (ValueError: a stale engine). A mini-batch
    whose loss or gradient is not finite is written to `dump_dir`, for torch.load(..., weights_only=True), and not
    applied, on no rank: FloatingPointError if max_nonfinite is 0, else counted in optim/nonfinite. `reference` may be
    None if kl_coef is 0.
    """
    _check(trajectories, rewards, step, temperature, reference, loss_cfg)
    advantages = group_advantages(rewards.float(), loss_cfg.advantage or "")
    scoring = _Scoring(policy, reference, loss_cfg, optim_cfg, temperature, ctx)
    mini_batches, flops = _split(trajectories, advantages, scoring)
    totals = StepTotals()
    metrics: dict[str, float] = {}
    with timed(metrics, "logprobs"):
        for position, batches in enumerate(mini_batches):
            # The first mini-batch meets the old policy itself: its own forward pass yields its old log-probs.
            annotate_logprobs(policy if position else None, reference, batches, temperature)
    for position, batches in enumerate(mini_batches):
        if not batches:
            totals.skipped += 1
            continue
        loss, seen = _accumulate(scoring, batches, totals)
        norm = _clip(policy, optim_cfg)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            policy.zero_grad()
            message = _dump(Path(dump_dir), step, position, loss, norm, [batch for _, batch in seen], ctx)
            if optim_cfg.max_nonfinite == 0:
                raise FloatingPointError(message)
            totals.nonfinite += 1
            continue
        for values, batch in seen:
            totals.add(values, batch)
        totals.add_update(policy, loss, norm, ctx)
        _step(optimizer)
    policy.zero_grad()
    metrics |= totals.metrics(optim_cfg.max_grad_norm, ctx)
    metrics["optim/tflops"] = flops / 1e12
    metrics["rollout/empty_sequences"] = float(sum(not any(one.response_mask) for one in trajectories))
    return metrics | signal_metrics(rewards.float(), advantages)


def annotate_logprobs(
    policy: PreTrainedModel | None,
    reference: PreTrainedModel | None,
    batches: Sequence[Batch],
    temperature: float,
) -> None:
    """Fill `old_logprobs` from the policy and `ref_logprobs` from the reference, where a model is given."""
    for batch in batches:
        if policy is not None:
            batch.old_logprobs = kept_logprobs(policy, batch, temperature)[0]
        if reference is not None:
            batch.ref_logprobs = kept_logprobs(reference, batch, temperature)[0]
    for model in (policy, reference):
        if model is not None:
            release(model)


def sft_step(
    model: PreTrainedModel,
    optimizer: Optimizers,
    rows: Sequence[tuple[list[int], list[bool]]],
    optim_cfg: OptimConfig,
    ctx: Context = ALONE,
) -> dict[str, float]:
    """One optimiser step on token ids and a mask of the tokens to learn: their mean negative log-prob.

    The rows are those of all ranks. Returns sft/loss, sft/tokens, optim/grad_norm; FloatingPointError and unchanged
    weights if not finite.
    """
    named = []
    for index, (ids, mask) in enumerate(rows):
        trained = [position for position, (_, on) in enumerate(zip(ids, mask, strict=True)) if on]
        named.append(Row(f"row {index}", ids, trained, rollout_logprobs=[0.0] * len(trained)))
    weighed = weigh(named, "token")
    if not weighed:
        raise ValueError(f"none of the {len(named)} rows has a token to learn; the masks are all False")
    model.zero_grad()
    total = 0.0
    for batch in micro_batches(weighed, layout(model, optim_cfg, ctx)):
        weights = batch.token_weights
        output = fused_loss(
            hidden_states(model, batch), head_weight(model), batch.kept, batch.targets,
            lambda logprobs, _, at, weights=weights: (-weights[at] * logprobs, {}),
        )  # fmt: skip
        (output.loss * ctx.world_size).backward()  # sharding averages gradients over the ranks
        total += float(output.loss.detach())
    total, norm = ctx.sum([total])[0], _clip(model, optim_cfg)
    if not (math.isfinite(total) and math.isfinite(norm)):
        model.zero_grad()
        raise FloatingPointError(f"supervised step: loss {total}, gradient norm {norm}; weights unchanged")
    _step(optimizer)
    tokens = sum(len(row.trained) for row in weighed)
    return {"sft/loss": total, "sft/tokens": float(tokens), "optim/grad_norm": norm}


def layout(model: PreTrainedModel, cfg: OptimConfig, ctx: Context) -> Layout:
    """How this rank's rows become micro-batches, weighed by what they cost this model."""
    cost = cost_model(model.config).cost
    return Layout(cfg.tokens_per_micro_batch, cfg.packed, ctx.rank, ctx.world_size, ctx.device, cost)


@dataclass(frozen=True)
class _Scoring:
    """What turns a micro-batch into a loss."""

    policy: PreTrainedModel
    reference: PreTrainedModel | None
    loss_cfg: LossConfig
    optim_cfg: OptimConfig
    temperature: float
    ctx: Context


def _check(
    trajectories: Sequence[Trajectory],
    rewards: Tensor,
    step: int,
    temperature: float,
    reference: PreTrainedModel | None,
    loss_cfg: LossConfig,
) -> None:
    groups, size = rewards.shape
    if len(trajectories) != groups * size:
        raise ValueError(f"{len(trajectories)} trajectories do not fill rewards of shape {groups} x {size}")
    if loss_cfg.kl_coef and reference is None:
        raise ConfigError("kl_coef is above 0 but there is no reference model; load one or set kl_coef=0")
    if loss_cfg.weighting == "constant" and not loss_cfg.constant_tokens:
        raise ConfigError("weighting=constant needs constant_tokens: what each trajectory's sum is divided by")
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


def _split(trajectories: Sequence[Trajectory], advantages: Tensor, to: _Scoring) -> tuple[list[list[Batch]], float]:
    """Group n goes to mini-batch n modulo their count, so that a block of like questions is spread over all.

    Rows that cannot move the policy are left out, but keep their share in the denominators. Also returns what forward
    and backward over the rows cost all ranks together, in FLOPs.
    """
    groups, size = advantages.shape
    flat, cfg = advantages.flatten().tolist(), to.loss_cfg
    moved_by_advantage_only = not cfg.kl_coef and not cfg.entropy_coef
    count, how = min(to.optim_cfg.mini_batches, groups), layout(to.policy, to.optim_cfg, to.ctx)
    result, flops = [], 0.0
    for position in range(count):
        members = [index for index in range(groups * size) if index // size % count == position]
        rows = [trajectory_row(trajectories[index], flat[index]) for index in members]
        rows = weigh(rows, cfg.weighting or "", cfg.constant_tokens)
        if moved_by_advantage_only:
            rows = [row for row in rows if row.advantage != 0.0]
        result.append(micro_batches(rows, how))
        flops += sum(how.cost(row.length, len(row.trained)) for row in rows)
    return result, flops


Seen = list[tuple[dict[str, Tensor], Batch]]
"""metrics [K] and batch of each micro-batch"""


def _accumulate(to: _Scoring, batches: list[Batch], totals: StepTotals) -> tuple[float, Seen]:
    """The gradient of a mini-batch, left in the policy; its loss over all ranks, and what was seen on this one.

    Out of memory, alone: once more with each micro-batch halved. Several ranks stop, as one of them cannot go back
    while the others wait for it.
    """
    advice = f"lower optim.tokens_per_micro_batch={to.optim_cfg.tokens_per_micro_batch}"
    try:
        return _backward(to, batches)
    except torch.OutOfMemoryError as error:
        smaller = [half for batch in batches for half in halves(batch)]
        if to.ctx.world_size > 1 or len(smaller) == len(batches):
            raise RuntimeError(f"out of memory in a micro-batch; {advice}") from error
    totals.out_of_memory += 1
    if to.policy.device.type == "cuda":
        torch.cuda.empty_cache()
    try:
        return _backward(to, smaller)
    except torch.OutOfMemoryError as error:
        raise RuntimeError(f"out of memory in half a micro-batch too; {advice}") from error


def _backward(to: _Scoring, batches: Sequence[Batch]) -> tuple[float, Seen]:
    to.policy.zero_grad()
    cfg, losses, seen = to.loss_cfg, [], []
    for batch in batches:

        def objective(logprobs: Tensor, entropy: Tensor, at: slice, batch: Batch = batch) -> tuple[Tensor, dict]:
            losses, values = policy_loss(cfg, logprobs, entropy, batch.tokens(at))
            return batch.token_weights[at] * losses, values

        hidden, whole = hidden_states(to.policy, batch), batch.sequence if cfg.whole_sequences else None
        output = fused_loss(hidden, head_weight(to.policy), batch.kept, batch.targets, objective, to.temperature, whole)
        (output.loss * to.ctx.world_size).backward()  # sharding averages gradients over the ranks
        if batch.old_logprobs is None:
            batch.old_logprobs = output.logprobs
        # The loss clamps its exponents, which would hide an infinite log-prob from the check of the caller.
        is_sound = bool(output.logprobs.isfinite().all())
        losses.append(float(output.loss.detach()) if is_sound else math.nan)
        seen.append((output.metrics, batch))
    return to.ctx.sum([sum(losses)])[0], seen


def _clip(model: PreTrainedModel, cfg: OptimConfig) -> float:
    """Scale the gradient down to max_grad_norm; its norm before, over all ranks."""
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    norm = torch.nn.utils.clip_grad_norm_(parameters, cfg.max_grad_norm)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def _step(optimizer: Optimizers) -> None:
    for one in [optimizer] if isinstance(optimizer, Optimizer) else optimizer:
        one.step()


def _dump(
    folder: Path, step: int, position: int, loss: float, norm: float, batches: Sequence[Batch], ctx: Context
) -> str:
    """Write the mini-batch; returns the message that names step and file."""
    rank = f"_rank{ctx.rank}" if ctx.world_size > 1 else ""
    path, buffer = folder / f"nonfinite_step{step:06d}{rank}.pt", io.BytesIO()
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
