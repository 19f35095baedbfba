"""Build hierarchical experience knowledge (HEK) from a model's own rollouts, offline.

    python build_hek.py configs/lab.yaml out=runs/hek                       # the store is then runs/hek/hek
    python build_hek.py configs/lab.yaml out=runs/hek build.dry_run=true    # what that will take
    python build_hek.py configs/logs.yaml out=runs/hek build.logs=FILE      # from what another agent did
    python build_hek.py --help

Sample rollouts of training questions without experience, contrast a success with a failure of each question, let a
model write the lesson (level 1), cluster the lessons, abstract each cluster into a pattern (level 2) and the patterns
into strategies (level 3): paper section 3.1, Algorithm 1. train.py and evaluate.py read the result as hek.path.

The policy writes its own lessons; build.reflector names another model folder or an OpenAI-compatible endpoint. What was
sampled and answered is kept: after a crash, or at a cap (exit code 3), the same command goes on where it was.
"""

import sys
from dataclasses import replace

from hiexp.api_client import BudgetReached
from hiexp.assemble import Config, reward_judge
from hiexp.config import run_script
from hiexp.encoder import load_encoder
from hiexp.hek_build import build_hek
from hiexp.hek_page import write_build_page
from hiexp.hek_stages import (
    Models,
    check_writers,
    estimate,
    forget_rollouts,
    judge_of,
    open_parts,
    open_questions,
    open_reflectors,
    open_stages,
    roll_out,
    tried_without,
)
from hiexp.redact import redact
from hiexp.rewards import score
from hiexp.tracking import finish_run, open_run_folder, timed, write_trajectories
from hiexp.trajectory import groups_of


def main(cfg: Config) -> int:
    samples, logs = open_questions(cfg)
    if cfg.build.dry_run:
        print(estimate(cfg, samples, logs))
        return 0
    check_writers(cfg)
    agent, judge = open_parts(cfg, logs), reward_judge(cfg)
    encoder = agent.encoder or load_encoder(cfg.encoder)
    out = open_run_folder(cfg.out, cfg, resumable=True)
    models, size = Models(agent, cfg), cfg.build.rollouts_per_question

    times: dict[str, float] = {}
    build = cfg.build
    if logs:
        groups, build = logs.attempts(), replace(build, logs=logs.digest)  # so the store names a content, not a place
    else:
        with timed(times, "rollout"):
            trajectories = roll_out(models, samples, out, size)
        score(trajectories, samples, cfg.reward, size, judge=judge)
        write_trajectories(out / "trajectories.jsonl", trajectories)
        groups = groups_of(trajectories, size)

    reflector, abstractor = open_reflectors(models, encoder, out)
    try:
        with timed(times, "build"):
            parts = (abstractor, open_stages(out), judge_of(cfg, logs))
            hek, report = build_hek(reflector, groups, samples, build, cfg.seed, *parts)
            hek = hek.with_asked(tried_without(groups, samples))
    except BudgetReached as stop:
        print(redact(f"stopped: {stop}"), file=sys.stderr)
        return 3
    hek.save(out / "hek", overwrite=True)  # a run that was killed before its summary has one already
    (out / "report.md").write_text(report.to_markdown(), encoding="utf-8")
    write_build_page(out / "report.html", report, out / "hek")
    finish_run(out, {"hek": str(out / "hek"), **report.to_json(), **times})
    forget_rollouts(out)
    print(report.to_markdown())
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main, Config, sys.argv[1:], __doc__))
