"""Train a search agent with GRPO (or GSPO, DAPO, ...), with experience in its rollouts or without.

    python train.py configs/lab.yaml out=runs/grpo                             # no experience
    python train.py configs/lab.yaml out=runs/hiexp hek.path=runs/lab/hek/hek  # HiExp
    torchrun --nproc-per-node 8 train.py configs/train_qwen2.5-7b.yaml         # the GPUs of a node
    python train.py --help                                                     # every key

`main` is one run, read from top to bottom; the loop's body is one training step: prompts -> rollouts with experience ->
rewards -> update -> new weights for the engine. The loss is hiexp/loss.py. A run that was stopped goes on where it was
when the same command is given again; told to stop (SIGTERM, Ctrl-C) it saves and exits with 143 or 130.
"""

import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hiexp import math_check
from hiexp.advantages import group_advantages
from hiexp.assemble import Agent, Config, load_models, open_agent, open_samples, reward_judge, start_engine
from hiexp.checkpoint import Checkpoints, save_policy
from hiexp.config import ConfigError, run_script
from hiexp.data import PromptSampler, Sample
from hiexp.distributed import Context, close, init
from hiexp.dosage import dose
from hiexp.engine import Engine
from hiexp.eval_config import EvalConfig
from hiexp.evaluation import evaluate
from hiexp.hek import HEK, refuse_evaluation_questions
from hiexp.hek_stages import check_writers
from hiexp.model import full_parameters
from hiexp.refresh import ClosedLoop
from hiexp.resume import StopRequested, StopSignal, folder_hash, rng_state, seed_everything
from hiexp.rewards import rollout_metrics, score
from hiexp.run_log import RunLog, rollout_histograms
from hiexp.speed import speed_metrics
from hiexp.tracking import finish_run, open_run_folder, progress, timed
from hiexp.trainer import make_optimizer, set_learning_rate, update_policy
from hiexp.trajectory import Trajectory, groups_of
from hiexp.watch import CollapseWatch


def main(cfg: Config) -> int:
    ctx = init()
    if not ctx.is_main:
        warnings.simplefilter("ignore")  # rank 0 has said it
    seed_everything(cfg.seed, ctx.rank)
    samples = open_samples(cfg.data, "train")
    check(cfg, ctx, len(samples))
    dev = open_samples(cfg.data, "dev") if cfg.train.dev_every else []
    agent = open_agent(cfg)
    agent.judge = reward_judge(cfg, ctx)
    refuse_evaluation_questions(agent.hek, dev)
    closed_loop = ClosedLoop(agent, cfg, samples, ctx)
    out = ctx.on_main(lambda: open_run_folder(cfg.out, cfg, resumable=True))
    policy, engine_copy, reference = load_models(cfg, bool(cfg.loss.kl_coef), ctx)
    optimizer = make_optimizer(policy, cfg.optim)
    sampler = PromptSampler(closed_loop.trained, cfg.seed)
    loop = Loop(sampler, CollapseWatch(cfg.watch), closed_loop, folder_hash(cfg.hek.path))
    checkpoints = Checkpoints(out, cfg.checkpoint, ctx)
    start = loop.resume(checkpoints.load_latest(policy, optimizer), cfg)
    engine = start_engine(agent, cfg, policy, engine_copy, version=start)
    check_engine(cfg, engine)
    loss_cfg = replace(cfg.loss, constant_tokens=cfg.loss.constant_tokens or cfg.rollout.max_response_tokens)

    with RunLog(out, start - 1, ctx.is_main, cfg.log) as log, StopSignal() as stop:
        steps = range(start, cfg.train.steps)
        for step in progress(steps, label=f"train {out.name}", unit="step") if ctx.is_main else steps:
            began, before = time.perf_counter(), (loop.state(), rng_state())
            metrics = {"optim/lr": set_learning_rate(optimizer, cfg.optim, step, cfg.train.steps)}
            with timed(metrics, "rollout"):
                groups = collect(agent, loop.sampler, cfg, ctx, step, metrics, stop)
            if groups is None:  # told to stop: this step is dropped, and drawn again when the run goes on
                checkpoints.save(step, policy, optimizer, *before)
                break
            trajectories, rewards, drawn = groups
            engine.sleep()
            with timed(metrics, "update"):
                metrics |= update_policy(
                    policy, reference, optimizer, trajectories, rewards,
                    loss_cfg, cfg.optim, cfg.rollout.temperature, out, step, ctx,
                )  # fmt: skip
            with timed(metrics, "sync"):
                engine.load_weights(full_parameters(policy), version=step + 1)

            metrics |= rollout_metrics(trajectories) | {"reward/mean": rewards.mean().item()}
            metrics |= speed(trajectories, metrics, time.perf_counter() - began, ctx)
            metrics |= closed_loop.after_step(step, drawn)
            is_last = step + 1 == cfg.train.steps
            if cfg.train.dev_every and (is_last or (step + 1) % cfg.train.dev_every == 0):
                metrics |= validate(agent, dev, cfg, ctx)
            advantages = group_advantages(rewards, loss_cfg.advantage or "").flatten().tolist()
            log.log(step, metrics, rollout_histograms(trajectories, advantages))
            if cfg.train.show_every and step % cfg.train.show_every == 0:
                log.show(step, trajectories, agent.tokenizer)
            loop.judge(step, metrics, cfg.optim.max_nonfinite)
            is_stopped = stop.requested(ctx)
            is_due = checkpoints.is_due(step + 1) and loop.is_sound  # else it would push a good one out
            if is_last or is_stopped or is_due:
                checkpoints.save(step + 1, policy, optimizer, loop.state())
            checkpoints.poll()
            if cfg.train.save_every and (step + 1) % cfg.train.save_every == 0:
                save_policy(policy, agent.tokenizer, out / "policy", ctx)
            if is_stopped:
                break
        checkpoints.finish()
        is_stopped = stop.requested(ctx)
    if not is_stopped:
        save_policy(policy, agent.tokenizer, out / "policy", ctx)
        if ctx.is_main:
            finish_run(out, {"steps": cfg.train.steps, "hek": closed_loop.path})
    engine.close()
    close(ctx)
    return stop.exit_code if is_stopped else 0


@dataclass
class Loop:
    """What a run carries from step to step besides weights and optimiser; a checkpoint holds it."""

    sampler: PromptSampler
    watch: CollapseWatch
    closed_loop: ClosedLoop
    hek_hash: str
    """of the store that the run began with"""
    bad_steps: int = 0
    """steps in a row with a mini-batch whose loss or gradient was not finite"""

    def state(self) -> dict[str, Any]:
        return {
            "sampler": self.sampler.state_dict(),
            "watch": self.watch.state_dict(),
            "hek": self.hek_hash,
            "closed_loop": self.closed_loop.state(),
            "bad_steps": self.bad_steps,
        }

    def resume(self, found: tuple[int, dict[str, Any]] | None, cfg: Config) -> int:
        """Take up a checkpoint, if there is one; returns the first step to do. ConfigError if the HEK changed since."""
        if found is None:
            self.closed_loop.open()
            return 0
        step, state = found
        if state["hek"] != self.hek_hash and not cfg.resume_changed:
            raise ConfigError(
                f"hek.path={cfg.hek.path} has changed since step {step}; bring back the HEK that the run began "
                "with, choose another out=..., or set resume_changed=true"
            )
        try:
            self.sampler.load_state_dict(state["sampler"])
        except ConfigError as error:
            if not cfg.resume_changed:
                remedy = "bring back data.train as it was, choose another out=..., or set resume_changed=true"
                raise ConfigError(f"{error}; {remedy}") from None
            warnings.warn(f"{error}; questions are drawn anew from here on", stacklevel=2)
        self.watch.load_state_dict(state["watch"])
        self.closed_loop.load_state(state["closed_loop"])
        self.bad_steps = state["bad_steps"]
        return step

    @property
    def is_sound(self) -> bool:
        """Nothing is wrong with the newest step."""
        return not self.bad_steps and not self.watch.is_suspect

    def judge(self, step: int, metrics: dict[str, float], max_nonfinite: int) -> None:
        """Stop a run that is lost: too many steps in a row that could not be applied, or a collapse (watch.*)."""
        self.bad_steps = self.bad_steps + 1 if metrics["optim/nonfinite"] else 0
        if self.bad_steps > max_nonfinite:
            raise FloatingPointError(
                f"a loss or gradient was not finite in {self.bad_steps} steps in a row, the last of them step {step}; "
                "their mini-batches are in nonfinite_step*.pt in the run folder: lower optim.lr, or look at their data"
            )
        self.watch.check(step, metrics)


def collect(
    agent: Agent,
    sampler: PromptSampler,
    cfg: Config,
    ctx: Context,
    step: int,
    metrics: dict[str, float],
    stop: StopSignal,
) -> tuple[list[Trajectory], Tensor, list[Trajectory]] | None:
    """The trajectories of one step, from all ranks, their rewards [N, G], and all that were drawn; None if any rank was
    told to stop.

    Each rank answers a part of the questions. With train.refill, a group of equal rewards gives way to that of another
    question while there are rounds left (DAPO's dynamic sampling); where all are equal, the last ones are kept.
    """
    tensor_parallel, size = cfg.engine.tensor_parallel, cfg.rollout.group_size
    given = dose(cfg.dosage, step, cfg.train.steps, cfg.refresh.control if cfg.refresh.every else 0.0)
    budgets = given.budgets(cfg.rollout.strategy_tokens, cfg.rollout.case_tokens)
    kept: list[list[Trajectory]] = []
    fresh: list[list[Trajectory]] = []
    drawn: list[Trajectory] = []
    for attempt in range(cfg.train.refill + 1):
        prompts = sampler.next(cfg.train.prompts_per_step - len(kept))
        first, last = ctx.share(len(prompts), tensor_parallel)
        seed = (cfg.seed * 1_000_003 + step) * 1_009 + attempt
        more: dict[str, Any] = {"first": first, "hinted": given.hinted(prompts, cfg.seed, step)[first:last], **budgets}
        try:
            mine = agent.rollout(prompts[first:last], seed, progress=stop.check, metrics=metrics, **more)
        except StopRequested:
            mine = None
        parts = ctx.gather(mine if mine is None or ctx.leads(tensor_parallel) else [], "rollout")
        if any(part is None for part in parts):
            return None
        trajectories = [trajectory for part in parts for trajectory in part]
        score(trajectories, prompts, cfg.reward, size, cfg.rollout.max_response_tokens, agent.judge)
        drawn += trajectories
        fresh = list(groups_of(trajectories, size))
        kept += [group for group in fresh if not cfg.train.refill or len({one.reward for one in group}) > 1]
        if len(kept) == cfg.train.prompts_per_step:
            break
    metrics["group/drawn"] = len(drawn) / size
    groups = kept or fresh
    rewards = torch.tensor([[one.reward for one in group] for group in groups])
    return [one for group in groups for one in group], rewards, drawn


def speed(
    trajectories: Sequence[Trajectory], metrics: dict[str, float], seconds: float, ctx: Context
) -> dict[str, float]:
    """Tokens per second over all ranks and, on a GPU that is known, model FLOP/s utilisation."""
    name = torch.cuda.get_device_name() if ctx.device.type == "cuda" else "cpu"
    trained, tokens = int(metrics["rollout/trained_tokens"]), sum(one.num_tokens for one in trajectories)
    return speed_metrics(metrics, seconds, 1e12 * metrics["optim/tflops"], trained, tokens, ctx.world_size, name)


def check_engine(cfg: Config, engine: Engine) -> None:
    """What only the engine that was started can tell."""
    if cfg.loss.mismatch != "none" and not engine.exact_logprobs:
        sampling = f"rollout.temperature={cfg.rollout.temperature}, rollout.top_p={cfg.rollout.top_p}"
        raise ConfigError(
            f"loss.mismatch={cfg.loss.mismatch} needs exact log-probs; with {sampling} vLLM has none: set one to 1"
        )


def check_refresh(cfg: Config) -> None:
    """What a refresh of the HEK needs."""
    if not cfg.refresh.every:
        return
    if not cfg.hek.path and cfg.hek.accept != "fixed":
        raise ConfigError(f"hek.accept={cfg.hek.accept} is calibrated on a store; without hek.path set it to fixed")
    if cfg.engine.tensor_parallel > 1 and not (cfg.build.reflector.url and cfg.build.abstractor.url):
        raise ConfigError(
            f"refresh.every={cfg.refresh.every}: rank 0 alone writes lessons, which engine.tensor_parallel="
            f"{cfg.engine.tensor_parallel} does not allow; set build.reflector.url and build.abstractor.url"
        )
    check_writers(cfg)


def check(cfg: Config, ctx: Context, num_samples: int) -> None:
    """What would make training pointless, told before any work."""
    check_refresh(cfg)
    if cfg.reward.metric == "math":
        math_check.require()
    if cfg.rollout.temperature <= 0:
        raise ConfigError("rollout.temperature=0: greedy siblings are all alike and teach nothing; set it above 0")
    if cfg.train.refill and cfg.rollout.group_size == 1:
        raise ConfigError(
            f"train.refill={cfg.train.refill}: rollout.group_size=1 has no unequal groups; set refill to 0"
        )
    if ctx.world_size % cfg.shard.replicas:
        raise ConfigError(f"shard.replicas={cfg.shard.replicas} does not divide the {ctx.world_size} processes; set 1")
    cfg.log.check()
    if ctx.world_size % cfg.engine.tensor_parallel:
        engines = f"engine.tensor_parallel={cfg.engine.tensor_parallel}"
        raise ConfigError(f"{engines} does not divide the {ctx.world_size} processes; start a multiple of it")
    if not ctx.is_main:
        return
    if cfg.rollout.group_size == 1 and cfg.loss.advantage != "batch":
        warnings.warn("rollout.group_size=1: nothing to compare with, the advantage is the reward itself", stacklevel=2)
    if cfg.train.prompts_per_step > num_samples:
        size = f"train.prompts_per_step={cfg.train.prompts_per_step}"
        warnings.warn(f"{size} is more than the {num_samples} questions: a step repeats some of them", stacklevel=2)
    if cfg.loss.mismatch != "none" and cfg.rollout.top_p < 1:
        warnings.warn(
            f"rollout.top_p={cfg.rollout.top_p}: loss.mismatch={cfg.loss.mismatch} corrects for an engine that "
            "computes other probabilities, not for the tokens that top-p never samples; set top_p=1 for an exact one",
            stacklevel=2,
        )


def validate(agent: Agent, dev: Sequence[Sample], cfg: Config, ctx: Context) -> dict[str, float]:
    """Greedy scores on the dev questions, with the experience of training (dev/...) and, if there is any, without
    (dev_off/...); every rank answers a part.
    """
    first, last = ctx.share(len(dev), cfg.engine.tensor_parallel)
    metrics: dict[str, float] = {}
    for name, hek in {"dev": agent.hek, **({"dev_off": HEK.empty()} if len(agent.hek) else {})}.items():
        mine = agent.rollout(dev[first:last], seed=0, hek=hek, first=first, group_size=1, temperature=0.0)
        parts = ctx.gather(mine if ctx.leads(cfg.engine.tensor_parallel) else [], "validation")
        scores = evaluate([one for part in parts for one in part], dev, EvalConfig()).overall.scores
        metrics |= {f"{name}/{metric}": interval.mean for metric, interval in scores.items()}
    return metrics


if __name__ == "__main__":
    sys.exit(run_script(main, Config, sys.argv[1:], __doc__))
