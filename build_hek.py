"""Build hierarchical experience knowledge (HEK) from a model's own rollouts, offline.

    python build_hek.py configs/lab.yaml out=runs/hek        # the store is then runs/hek/hek
    python build_hek.py --help

Sample rollouts of training questions without experience, contrast a success with a failure of each question, let the
model write the lesson (level 1), cluster the lessons, abstract each cluster into a pattern (level 2) and the patterns
into strategies (level 3): paper section 3.1, Algorithm 1. train.py and evaluate.py read the result as hek.path.
"""

import sys

from hiexp.assemble import Config, engine_only, open_agent, open_samples, start_engine
from hiexp.config import ConfigError, run_script
from hiexp.data import subset
from hiexp.encoder import load_encoder
from hiexp.hek import HEK
from hiexp.hek_build import build_hek
from hiexp.rewards import score
from hiexp.tracking import finish_run, open_run_folder, progress, timed, write_trajectories
from hiexp.trajectory import groups_of


def main(cfg: Config) -> None:
    samples = open_samples(cfg.data, "train")
    if cfg.rollout.temperature <= 0:
        raise ConfigError("rollout.temperature=0: greedy attempts are all alike, none to contrast; set it above 0")
    if cfg.build.questions > len(samples):
        there = f"{cfg.data.train} has {len(samples)} questions"
        raise ConfigError(f"build.questions={cfg.build.questions}, but {there}; lower it, or set 0 for all")
    samples = subset(samples, cfg.build.questions, cfg.seed)
    agent = open_agent(cfg)
    encoder = agent.encoder or load_encoder(cfg.encoder)
    out = open_run_folder(cfg.out, cfg)
    engine = start_engine(agent, cfg, *engine_only(cfg))

    times: dict[str, float] = {}
    size = cfg.build.rollouts_per_question
    with timed(times, "rollout"):
        trajectories = agent.rollout_all(samples, cfg.seed, "rollouts", HEK.empty(), group_size=size)
    score(trajectories, samples, cfg.reward, size)
    write_trajectories(out / "trajectories.jsonl", trajectories)

    groups = groups_of(trajectories, size)
    with timed(times, "build"):
        hek, report = build_hek(
            engine, agent.tokenizer, encoder, groups, samples, cfg.build, cfg.seed, progress, cfg.model.path
        )
    hek.save(out / "hek")
    (out / "report.md").write_text(report.to_markdown(), encoding="utf-8")
    finish_run(out, {"hek": str(out / "hek"), **report.to_json(), **times})
    print(report.to_markdown())


if __name__ == "__main__":
    sys.exit(run_script(main, Config, sys.argv[1:], __doc__))
