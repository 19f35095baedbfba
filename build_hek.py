"""Build hierarchical experience knowledge (HEK) from a model's own rollouts, offline.

    python build_hek.py configs/lab.yaml out=runs/hek                       # the store is then runs/hek/hek
    python build_hek.py configs/lab.yaml out=runs/hek build.dry_run=true    # what that will take
    python build_hek.py --help

Sample rollouts of training questions without experience, contrast a success with a failure of each question, let a
model write the lesson (level 1), cluster the lessons, abstract each cluster into a pattern (level 2) and the patterns
into strategies (level 3): paper section 3.1, Algorithm 1. train.py and evaluate.py read the result as hek.path.

The policy writes its own lessons; build.reflector names another model folder or an OpenAI-compatible endpoint. What was
sampled and answered is kept: after a crash, or at a cap (exit code 3), the same command goes on where it was.
"""

import sys

from hiexp.api_client import BudgetReached
from hiexp.assemble import Config, open_agent, open_samples
from hiexp.config import ConfigError, run_script
from hiexp.data import subset
from hiexp.encoder import load_encoder
from hiexp.hek_build import build_hek
from hiexp.hek_stages import Models, check_writers, estimate, forget_rollouts, open_reflectors, open_stages, roll_out
from hiexp.redact import redact
from hiexp.rewards import score
from hiexp.tracking import finish_run, open_run_folder, timed, write_trajectories
from hiexp.trajectory import groups_of


def main(cfg: Config) -> int:
    samples = open_samples(cfg.data, "train")
    if cfg.rollout.temperature <= 0:
        raise ConfigError("rollout.temperature=0: greedy attempts are all alike, none to contrast; set it above 0")
    if cfg.build.questions > len(samples):
        there = f"{cfg.data.train} has {len(samples)} questions"
        raise ConfigError(f"build.questions={cfg.build.questions}, but {there}; lower it, or set 0 for all")
    samples = subset(samples, cfg.build.questions, cfg.seed)
    if cfg.build.dry_run:
        print(estimate(cfg, samples))
        return 0
    check_writers(cfg)
    agent = open_agent(cfg)
    encoder = agent.encoder or load_encoder(cfg.encoder)
    out = open_run_folder(cfg.out, cfg, resumable=True)
    models = Models(agent, cfg)

    times: dict[str, float] = {}
    with timed(times, "rollout"):
        trajectories = roll_out(models, samples, out)
    size = cfg.build.rollouts_per_question
    score(trajectories, samples, cfg.reward, size)
    write_trajectories(out / "trajectories.jsonl", trajectories)

    reflector, abstractor = open_reflectors(models, encoder, out)
    groups = groups_of(trajectories, size)
    try:
        with timed(times, "build"):
            hek, report = build_hek(reflector, groups, samples, cfg.build, cfg.seed, abstractor, open_stages(out))
    except BudgetReached as stop:
        print(redact(f"stopped: {stop}"), file=sys.stderr)
        return 3
    hek.save(out / "hek", overwrite=True)  # a run that was killed before its summary has one already
    (out / "report.md").write_text(report.to_markdown(), encoding="utf-8")
    finish_run(out, {"hek": str(out / "hek"), **report.to_json(), **times})
    forget_rollouts(out)
    print(report.to_markdown())
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main, Config, sys.argv[1:], __doc__))
