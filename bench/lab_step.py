"""CPU seconds of one lab GRPO step of 96 rollouts, split into rollout and update.

    python bench/lab_step.py runs/lab [--quick] [--json] [key=value ...]

Needs the folder of a finished `make demo`. Steps are real ones: the policy learns while it is measured. CPU seconds of
one thread are reported, because wall time on a shared machine says little.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from hiexp.assemble import Config, load_models, open_agent, open_samples, start_engine  # noqa: E402
from hiexp.config import load  # noqa: E402
from hiexp.data import PromptSampler  # noqa: E402
from hiexp.model import full_parameters  # noqa: E402
from hiexp.rewards import score  # noqa: E402
from hiexp.tracking import timed  # noqa: E402
from hiexp.trainer import make_optimizer, update_policy  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder of a finished demo")
    parser.add_argument("--quick", action="store_true", help="2 steps instead of 10")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--hek", action="store_true", help="with the demo's HEK in the rollouts")
    arguments, overrides = parser.parse_known_args()
    world = arguments.folder / "world"
    settings = [
        str(ROOT / "configs/lab.yaml"),
        f"model.path={arguments.folder / 'policy'}",
        f"data.train={world / 'train.jsonl'}",
        f"encoder.path={world / 'encoder.json'}",
        f"search.corpus=[{world / 'corpus.jsonl'}]",
        f"hek.path={arguments.folder / 'hek' / 'hek' if arguments.hek else ''}",
    ]
    result = measure(load(Config, [*settings, *overrides]), 2 if arguments.quick else 10)
    print(json.dumps(result) if arguments.json else "\n".join(f"{k:<20} {v}" for k, v in result.items()))


def measure(cfg: Config, steps: int) -> dict[str, float]:
    """Medians over `steps` steps, after one that warms up."""
    agent = open_agent(cfg)
    policy, engine_copy, reference = load_models(cfg, with_reference=True)
    engine, optimizer = start_engine(agent, cfg, policy, engine_copy), make_optimizer(policy, cfg.optim)
    sampler, times = PromptSampler(open_samples(cfg.data, "train"), cfg.seed), []
    for step in range(steps + 1):
        metrics: dict[str, float] = {}
        prompts = sampler.next(cfg.train.prompts_per_step)
        with timed(metrics, "rollout"):
            trajectories = agent.rollout(prompts, seed=step)
        rewards = score(trajectories, prompts, cfg.reward, cfg.rollout.group_size)
        with timed(metrics, "update"):
            update_policy(policy, reference, optimizer, trajectories, rewards, cfg.loss, cfg.optim, 1.0, Path(), step)
            engine.load_weights(full_parameters(policy), version=step + 1)
        times.append(metrics)
    rollout = statistics.median(line["time/rollout_cpu"] for line in times[1:])
    update = statistics.median(line["time/update_cpu"] for line in times[1:])
    return {
        "parameters": sum(parameter.numel() for parameter in policy.parameters()),
        "rollouts": cfg.train.prompts_per_step * cfg.rollout.group_size,
        "rollout_cpu_s": round(rollout, 3),
        "update_cpu_s": round(update, 3),
        "step_cpu_s": round(rollout + update, 3),
    }


if __name__ == "__main__":
    main()
