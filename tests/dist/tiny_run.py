"""A training run in miniature over the real checkpoints, sampler, log and stop signal: what a test kills and resumes.

A step draws from all random number generators, so that a forgotten one shows; its gradient is the same on every rank,
so that the number of ranks does not.
"""

import hashlib
import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support import build_tiny_model

from hiexp import resume, shards
from hiexp.checkpoint import CheckpointConfig, Checkpoints
from hiexp.data import PromptSampler, Sample
from hiexp.distributed import Context
from hiexp.fsdp import ShardConfig, shard
from hiexp.model import run_body
from hiexp.tracking import cut_after

SAMPLES = [Sample(f"q{number}", f"question {number}", ("a",)) for number in range(6)]
"""Two steps an epoch, since a step draws three."""


def build(ctx: Context, **sharding: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = shard(build_tiny_model(), ShardConfig(**sharding), ctx)
    return model, torch.optim.AdamW(model.parameters(), 0.01, fused=True)


def step_once(model: Any, optimizer: Any, sampler: PromptSampler) -> str:
    """One update from the sampler's questions and from noise; returns what it was made of."""
    ids = [int(sample.id[1:]) for sample in sampler.next(3)]
    noise = [random.random(), float(np.random.random()), float(torch.rand(()))]
    rows = torch.tensor([[one + 1, int(100 * noise[0]), int(100 * noise[1]), int(100 * noise[2])] for one in ids])
    body = getattr(model, "run_body", None) or (lambda **inputs: run_body(model, **inputs))
    hidden = body(input_ids=rows, use_cache=False)
    (hidden[:, -1] @ model.get_output_embeddings().weight.T).logsumexp(-1).sum().backward()
    optimizer.step()
    model.zero_grad()
    return json.dumps([ids, noise])


def train(
    ctx: Context,
    out: Path,
    steps: int,
    cfg: CheckpointConfig,
    before: Callable[[int], None] = lambda step: None,
    after: Callable[[int], None] = lambda step: None,
) -> int:
    """Train to `steps`, going on from what is in `out`; the exit code. The hooks run before and after the update."""
    random.seed(ctx.rank), np.random.seed(ctx.rank), torch.manual_seed(0)
    if ctx.world_size > 1:  # one noise for all ranks, as rollouts are gathered
        random.seed(0), np.random.seed(0)
    model, optimizer = build(ctx)
    sampler, checkpoints = PromptSampler(SAMPLES, 0), Checkpoints(out, cfg, ctx)
    done = 0
    if found := checkpoints.load_latest(model, optimizer):
        done, state = found
        sampler.load_state_dict(state["sampler"])
    if ctx.is_main:
        cut_after(out / "metrics.jsonl", done - 1)
    with resume.StopSignal() as stop:
        for step in range(done, steps):
            before(step)
            line = step_once(model, optimizer, sampler)
            after(step)
            if ctx.is_main:
                with (out / "metrics.jsonl").open("a") as log:
                    log.write(json.dumps({"step": step, "line": line}) + "\n")
            checkpoints.poll()
            stopped = stop.requested(ctx)
            if stopped or checkpoints.is_due(step + 1) or step + 1 == steps:
                checkpoints.save(step + 1, model, optimizer, {"sampler": sampler.state_dict()})
            if stopped:
                checkpoints.finish()
                return stop.exit_code
        checkpoints.finish()
    return 0


def kill_at(target: str, number: int) -> None:
    """Let the process die by SIGKILL instead of entering the `number`-th call of `target` from now on."""
    owner, name = {"fsync": (os, "fsync"), "replace": (os, "replace"), "tensor": (shards, "_bytes")}[target]
    call, left = getattr(owner, name), [number]

    def counted(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **kwargs)

    setattr(owner, name, counted)


def count_calls(targets: tuple[str, ...], call: Callable[[], Any]) -> dict[str, int]:
    counts = dict.fromkeys(targets, 0)
    for target in targets:
        owner, name = {"fsync": (os, "fsync"), "replace": (os, "replace"), "tensor": (shards, "_bytes")}[target]
        original = getattr(owner, name)

        def counted(*args: Any, original: Any = original, target: str = target, **kwargs: Any) -> Any:
            counts[target] += 1
            return original(*args, **kwargs)

        setattr(owner, name, counted)
    call()
    return counts


def fingerprint(ctx: Context, model: Any, optimizer: Any) -> str:
    """sha256 of the whole weights and AdamW state, the same for any number of ranks."""
    tensors, _, _ = shards.optimizer_tensors([optimizer], model)
    digest = hashlib.sha256()
    for name, tensor in sorted((shards.model_tensors(model) | tensors).items()):
        full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        digest.update(name.encode() + full.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def outcome(ctx: Context, out: Path) -> dict[str, Any]:
    """What must not depend on interruptions: weights and optimiser, sampler, random numbers, metrics."""
    model, optimizer = build(ctx)
    step, state = Checkpoints(out, CheckpointConfig(), ctx).load_latest(model, optimizer)  # type: ignore[misc]
    left = sorted(path.name for path in (out / "checkpoints").iterdir() if ".tmp" in path.name or ".new" in path.name)
    return {
        "step": step,
        "state": state,
        "rng": resume.rng_state(),
        "tensors": fingerprint(ctx, model, optimizer),
        "metrics": (out / "metrics.jsonl").read_text(),
        "left": left,
    }
