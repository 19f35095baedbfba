"""Train a search agent with GRPO (or GSPO), with experience in its rollouts or without.

    python train.py configs/lab.yaml out=runs/grpo                             # no experience
    python train.py configs/lab.yaml out=runs/hiexp hek.path=runs/lab/hek/hek  # HiExp
    python train.py --help                                                     # every key

`main` is one run, read from top to bottom; the loop's body is one training step: prompts -> rollouts with experience ->
rewards -> update -> new weights for the engine. The loss is hiexp/loss.py.
"""

import sys
import warnings
from collections.abc import Sequence

from hiexp.assemble import Agent, Config, load_models, open_agent, open_samples
from hiexp.checkpoint import save_policy
from hiexp.config import ConfigError, run_script
from hiexp.data import PromptSampler, Sample
from hiexp.evaluation import EvalConfig, evaluate
from hiexp.model import full_parameters
from hiexp.rewards import rollout_metrics, score
from hiexp.tracking import RunLog, finish_run, open_run_folder, progress, timed, write_trajectories
from hiexp.trainer import make_optimizer, update_policy


def main(cfg: Config) -> None:
    samples = open_samples(cfg.data, "train")
    check(cfg, len(samples))
    dev = open_samples(cfg.data, "dev") if cfg.train.dev_every else []
    agent = open_agent(cfg)
    out = open_run_folder(cfg.out, cfg)
    policy, engine_copy, reference = load_models(cfg, with_reference=cfg.loss.kl_coef > 0)
    engine = agent.start(engine_copy)
    optimizer = make_optimizer(policy, cfg.optim)
    sampler = PromptSampler(samples, cfg.seed)
    shown = []

    with RunLog(out) as log:
        for step in progress(range(cfg.train.steps), label=f"train {out.name}", unit="step"):
            metrics: dict[str, float] = {}
            prompts = sampler.next(cfg.train.prompts_per_step)
            with timed(metrics, "rollout"):
                trajectories = agent.rollout(prompts, seed=cfg.seed * 1_000_003 + step)
            rewards = score(trajectories, prompts, cfg.reward, cfg.rollout.group_size)  # [N, G]
            with timed(metrics, "update"):
                temperature = cfg.rollout.temperature
                metrics |= update_policy(
                    policy, reference, optimizer, trajectories, rewards, cfg.loss, cfg.optim, temperature, out, step
                )
                engine.load_weights(full_parameters(policy), version=step + 1)

            metrics |= rollout_metrics(trajectories) | {"reward/mean": rewards.mean().item()}
            is_last = step + 1 == cfg.train.steps
            if cfg.train.dev_every and (is_last or (step + 1) % cfg.train.dev_every == 0):
                metrics |= validate(agent, dev)
            if cfg.train.show_every and step % cfg.train.show_every == 0:
                shown += trajectories
                write_trajectories(out / "trajectories.jsonl", shown)
            if is_last or (cfg.train.save_every and (step + 1) % cfg.train.save_every == 0):
                save_policy(policy, agent.tokenizer, out / "policy")
            log.log(step, metrics)
    finish_run(out, {"steps": cfg.train.steps, "hek": cfg.hek.path})


def check(cfg: Config, num_samples: int) -> None:
    """What would make training pointless, told before any work."""
    if cfg.rollout.temperature <= 0:
        raise ConfigError("rollout.temperature=0: greedy siblings are all alike and teach nothing; set it above 0")
    if cfg.rollout.group_size == 1:
        warnings.warn("rollout.group_size=1: nothing to compare with, the advantage is the reward itself", stacklevel=2)
    if cfg.train.prompts_per_step > num_samples:
        size = f"train.prompts_per_step={cfg.train.prompts_per_step}"
        warnings.warn(f"{size} is more than the {num_samples} questions: a step repeats some of them", stacklevel=2)


def validate(agent: Agent, dev: Sequence[Sample]) -> dict[str, float]:
    """Greedy scores on the dev questions, with the experience that training uses."""
    attempts = agent.rollout(dev, seed=0, group_size=1, temperature=0.0)
    scores = evaluate(attempts, dev, EvalConfig()).overall.scores
    return {f"dev/{name}": interval.mean for name, interval in scores.items()}


if __name__ == "__main__":
    sys.exit(run_script(main, Config, sys.argv[1:], __doc__))
