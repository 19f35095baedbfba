"""Supervised fine-tuning: a cold start before RL, the SFT row of a table, rejection sampling on one's own rollouts.

    python -m hiexp.sft configs/sft_lab.yaml
    python -m hiexp.sft configs/x.yaml out=runs/sft sft.train=pairs.jsonl optim.lr=1e-5
    torchrun --nproc-per-node 8 -m hiexp.sft configs/x.yaml ...                # the GPUs of a node
    python -m hiexp.sft --help                                                 # every key

Read are the sections model, sft, optim (without mini_batches), shard, lora, checkpoint and log, and rollout.protocol
where sft.prompt=protocol. Batches, masks and loss are those of RL; demonstrations.py says what is learned. The loss is
the mean over the learned tokens of a step. `<out>/policy` is the result, for train.py and evaluate.py; stopping and
going on are as in train.py.
"""

import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, GenerationConfig, PreTrainedModel

from hiexp.assemble import Config
from hiexp.batching import Row, micro_batches, weigh
from hiexp.checkpoint import Checkpoints, save_policy
from hiexp.config import ConfigError, run_script
from hiexp.demonstrations import Demonstration, Demonstrations, read_demonstrations
from hiexp.distributed import Context, close, init
from hiexp.engine import Endings
from hiexp.fsdp import load_sharded
from hiexp.model import kept_logprobs, load_tokenizer, model_folder, release
from hiexp.protocols import open_protocol
from hiexp.resume import StopSignal, seed_everything
from hiexp.run_log import RunLog
from hiexp.speed import cost_model, speed_metrics
from hiexp.tracking import finish_run, open_run_folder, progress, timed
from hiexp.trainer import OptimConfig, layout, make_optimizer, set_learning_rate, sft_step


def main(cfg: Config) -> int:
    ctx = init()
    if not ctx.is_main:
        warnings.simplefilter("ignore")  # rank 0 has said it
    seed_everything(cfg.seed, ctx.rank)
    if cfg.threads:
        torch.set_num_threads(cfg.threads)
    tokenizer = load_tokenizer(cfg.model.path)
    train, dev = open_demonstrations(cfg, tokenizer, ctx)
    order = EpochOrder(len(train.rows), cfg.sft.rows_per_step, cfg.seed)
    steps = cfg.sft.epochs * order.steps_per_epoch
    cfg.log.check()
    out = ctx.on_main(lambda: open_run_folder(cfg.out, cfg, resumable=True))
    model = load_sharded(cfg.model, cfg.shard, ctx, cfg.lora, cfg.seed)
    optimizer = make_optimizer(model, cfg.optim)
    loop, checkpoints = Loop(train.fingerprint()), Checkpoints(out, cfg.checkpoint, ctx)
    start = loop.resume(checkpoints.load_latest(model, optimizer), cfg)

    with RunLog(out, start - 1, ctx.is_main, cfg.log) as log, StopSignal() as stop:
        numbers = range(start, steps)
        for step in progress(numbers, label=f"sft {out.name}", unit="step") if ctx.is_main else numbers:
            began, rows = time.perf_counter(), [train.rows[index] for index in order.rows(step)]
            metrics = {"optim/lr": set_learning_rate(optimizer, cfg.optim, step, steps)}
            metrics["sft/epoch"] = (step + 1) / order.steps_per_epoch
            with timed(metrics, "update"):
                metrics |= loop.update(model, optimizer, rows, cfg.optim, step, ctx)
            metrics |= speed(model, rows, metrics, time.perf_counter() - began, ctx)
            is_last = step + 1 == steps
            if cfg.sft.dev_every and (is_last or (step + 1) % cfg.sft.dev_every == 0):
                metrics["dev/loss"] = mean_loss(model, dev, cfg.sft.rows_per_step, cfg.optim, ctx)
            log.log(step, metrics)
            is_stopped = stop.requested(ctx)
            if is_last or is_stopped or checkpoints.is_due(step + 1):
                checkpoints.save(step + 1, model, optimizer, loop.state())
            checkpoints.poll()
            if is_stopped:
                break
        checkpoints.finish()
        is_stopped = stop.requested(ctx)
    if not is_stopped:
        save_policy(model, tokenizer, out / "policy", ctx)
        if ctx.is_main:
            finish_run(out, {"steps": steps, "rows": len(train.rows), "demonstrations": cfg.sft.train})
    close(ctx)
    return stop.exit_code if is_stopped else 0


@dataclass(frozen=True)
class EpochOrder:
    """Which rows each step takes: a function of the step alone, so a run that goes on needs no saved position.

    Every epoch has its own order and takes each row once; its last step takes what is left, however little.
    """

    count: int
    per_step: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.count // self.per_step)

    def rows(self, step: int) -> list[int]:
        epoch, position = divmod(step, self.steps_per_epoch)
        order = np.random.default_rng([self.seed, epoch]).permutation(self.count)
        return order[position * self.per_step : (position + 1) * self.per_step].tolist()


@dataclass
class Loop:
    """What a run carries from step to step besides weights and optimiser; a checkpoint holds it."""

    data: str
    """fingerprint of the demonstrations"""
    bad_steps: int = 0
    """steps in a row whose loss or gradient was not finite"""

    def state(self) -> dict[str, Any]:
        return {"data": self.data, "bad_steps": self.bad_steps}

    def resume(self, found: tuple[int, dict[str, Any]] | None, cfg: Config) -> int:
        """Take up a checkpoint, if there is one; the first step to do. ConfigError if the demonstrations changed."""
        if found is None:
            return 0
        step, state = found
        if state["data"] != self.data and not cfg.resume_changed:
            raise ConfigError(
                f"sft.train={cfg.sft.train} gives other rows than before step {step} (file, tokenizer or template "
                "changed); bring back the old ones, choose another out=..., or set resume_changed=true"
            )
        self.bad_steps = state["bad_steps"]
        return step

    def update(
        self,
        model: PreTrainedModel,
        optimizer: torch.optim.Optimizer,
        rows: Sequence[Demonstration],
        optim_cfg: OptimConfig,
        step: int,
        ctx: Context,
    ) -> dict[str, float]:
        """One optimiser step. One that is not finite is not applied; FloatingPointError after max_nonfinite of them."""
        try:
            metrics = sft_step(model, optimizer, [row.row() for row in rows], optim_cfg, ctx)
        except FloatingPointError as error:
            self.bad_steps += 1
            if self.bad_steps > optim_cfg.max_nonfinite:
                named = ", ".join(row.where for row in rows[:3])
                raise FloatingPointError(
                    f"step {step}: {error}; so were {self.bad_steps} steps in a row: lower optim.lr, or look at its "
                    f"{len(rows)} rows ({named}, ...)"
                ) from error
            return {"optim/nonfinite": 1.0}
        self.bad_steps = 0
        return {"optim/nonfinite": 0.0, "loss/total": metrics.pop("sft/loss")} | metrics


def open_demonstrations(cfg: Config, tokenizer: Any, ctx: Context) -> tuple[Demonstrations, list[Demonstration]]:
    """(sft.train, rows of sft.dev); rank 0 says what they hold. ConfigError before any model is loaded."""
    if not cfg.sft.train:
        raise ConfigError("sft.train is not set; name a file of trajectories, prompt/target pairs or chats")
    window = AutoConfig.from_pretrained(model_folder(cfg.model.path), local_files_only=True, trust_remote_code=False)
    window = window.max_position_embeddings
    if cfg.sft.max_tokens > window:
        raise ConfigError(f"sft.max_tokens={cfg.sft.max_tokens} is beyond the model's window of {window}; lower it")
    protocol = open_protocol(cfg.rollout) if cfg.sft.prompt == "protocol" else None
    paths = [cfg.sft.train] + ([cfg.sft.dev] if cfg.sft.dev_every else [])
    found = [read_demonstrations(path, tokenizer, cfg.sft, window, protocol) for path in paths]
    if (cfg.sft.min_reward is not None or cfg.sft.per_question) and "trajectories" not in found[0].layouts:
        keys = f"sft.min_reward={cfg.sft.min_reward} and sft.per_question={cfg.sft.per_question}"
        raise ConfigError(f"{cfg.sft.train} holds no trajectories for {keys}; set them to null and 0")
    for one in found if ctx.is_main else []:
        print(one.summary(), file=sys.stderr)
    endless = found[0].ends - Endings(tokenizer, _generation_config(cfg.model.path)).eos
    if endless and ctx.is_main:
        mark = tokenizer.convert_ids_to_tokens(min(endless))
        warnings.warn(
            f"answers end with {mark}, at which sampling does not stop: add id {min(endless)} to eos_token_id in "
            f"generation_config.json of {cfg.model.path}",
            stacklevel=2,
        )
    return found[0], [row for one in found[1:] for row in one.rows]


def mean_loss(
    model: PreTrainedModel, rows: Sequence[Demonstration], at_once: int, optim_cfg: OptimConfig, ctx: Context
) -> float:
    """Mean negative log-prob of all learned tokens of the rows, each counted once; the same on every rank."""
    weighed = weigh([_row(one) for one in rows], "token")
    total, plan = 0.0, layout(model, optim_cfg, ctx)
    for start in range(0, len(weighed), at_once):
        for batch in micro_batches(weighed[start : start + at_once], plan):
            total -= float((batch.token_weights * kept_logprobs(model, batch, 1.0)[0]).sum())
    release(model)
    return ctx.sum([total])[0]


def speed(
    model: Any, rows: Sequence[Demonstration], metrics: dict[str, float], seconds: float, ctx: Context
) -> dict[str, float]:
    """Tokens per second over all ranks and, on a GPU that is known, model FLOP/s utilisation."""
    cost, sizes = cost_model(model.config).cost, [(len(row.token_ids), row.trained) for row in rows]
    flops, trained = sum(cost(*size) for size in sizes), sum(kept for _, kept in sizes)
    name = torch.cuda.get_device_name() if ctx.device.type == "cuda" else "cpu"
    return speed_metrics(metrics, seconds, flops, trained, sum(length for length, _ in sizes), ctx.world_size, name)


def _row(one: Demonstration) -> Row:
    trained = [position for position, learned in enumerate(one.mask) if learned]
    return Row(one.where, one.token_ids.tolist(), trained, rollout_logprobs=[0.0] * len(trained))


def _generation_config(path: str) -> GenerationConfig | None:
    try:
        return GenerationConfig.from_pretrained(path, local_files_only=True)
    except OSError:
        return None


if __name__ == "__main__":
    sys.exit(run_script(main, Config, sys.argv[1:], __doc__))
