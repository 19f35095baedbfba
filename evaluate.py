"""Evaluate a model on questions, with experience and without.

    python evaluate.py configs/lab.yaml out=runs/eval model.path=runs/lab/grpo/policy hek.path=runs/lab/hek/hek
    python evaluate.py --help

The arms are HEK off and, where hek.path is set, HEK on; each greedy (eval.greedy) and sampled
(eval.samples_per_question). Writes evaluation.json, evaluation.md, one line per attempt in samples_<arm>.jsonl,
the first attempt at each question in trajectories_<arm>.jsonl, and report.html.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hiexp.assemble import Agent, Config, engine_only, open_agent, open_samples, start_engine
from hiexp.config import run_script
from hiexp.data import Sample
from hiexp.evaluation import Decoding, describe_setting, evaluate, to_markdown, write_results
from hiexp.hek import HEK, HEKConfig, refuse_evaluation_questions
from hiexp.report import write_report
from hiexp.rewards import score
from hiexp.search import describe_search
from hiexp.tracking import finish_run, open_run_folder, write_trajectories

SHOWN = 12
"""trajectories of each arm on the page"""


def main(cfg: Config) -> None:
    samples = open_samples(cfg.data, "test")
    agent = open_agent(cfg)
    refuse_evaluation_questions(agent.hek, samples)
    out = open_run_folder(cfg.out, cfg)
    start_engine(agent, cfg, *engine_only(cfg))

    search = describe_search(cfg.search)
    stores = {"hek_off": HEK.empty()} | ({"hek_on": agent.hek} if cfg.hek.path else {})
    results, settings, shown = {}, {}, {}
    for name, hek in stores.items():
        for decoding in cfg.eval.decodings:
            arm = f"{name}_{decoding.name}"
            draw = {"group_size": decoding.samples, "temperature": decoding.temperature, "top_p": decoding.top_p}
            attempts = agent.rollout_all(samples, cfg.eval.seed, f"evaluate {arm}", hek, **draw)
            score(attempts, samples, cfg.reward, decoding.samples)  # what the page shows beside each trajectory
            results[arm] = evaluate(attempts, samples, cfg.eval, decoding.samples)
            settings[arm] = setting_of(cfg, agent, samples, decoding, hek, search)
            shown[arm] = attempts[:: decoding.samples]
            write_trajectories(out / f"trajectories_{arm}.jsonl", shown[arm])

    write_results(out, results, settings)
    summary = {"arms": {arm: {"scores": asdict(result.overall)["scores"]} for arm, result in results.items()}}
    few = {arm: attempts[:SHOWN] for arm, attempts in shown.items()}
    page = out / "report.html"
    write_report(page, f"Evaluation {out}", summary, {}, cfg.hek.path or None, few, samples, agent.tokenizer)
    finish_run(out, summary)
    print(to_markdown(results))


def setting_of(
    cfg: Config, agent: Agent, samples: Sequence[Sample], decoding: Decoding, hek: HEK, search: dict[str, Any]
) -> dict[str, Any]:
    """What this arm's numbers depend on; stored with them."""
    template = "".join(text for _, text in agent.protocol.prompt("?", "", agent.tokenizer))
    return describe_setting(
        model=cfg.model.path,
        hek=cfg.hek.path if hek is agent.hek and cfg.hek.path else None,
        protocol=cfg.rollout.protocol,
        template=template,
        corpus=search["corpus"],
        search={name: value for name, value in search.items() if name != "corpus"},
        encoder=f"{cfg.search.backend} {agent.encoder.fingerprint if agent.encoder else ''}".strip(),
        top_k=cfg.rollout.top_k,
        samples=samples,
        decoding=decoding,
        seed=cfg.eval.seed,
        rollout=asdict(cfg.rollout),
        thresholds=acceptance(cfg.hek),
    )


def acceptance(cfg: HEKConfig) -> dict[str, Any]:
    """What decides when an entry is shown; a gate by its content."""
    keys = {name: value for name, value in asdict(cfg).items() if name != "path"}
    return keys | ({"gate": Path(cfg.gate).read_text(encoding="utf-8")} if cfg.gate else {})


if __name__ == "__main__":
    sys.exit(run_script(main, Config, sys.argv[1:], __doc__))
