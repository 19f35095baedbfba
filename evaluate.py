"""Evaluate a model on questions, with experience and without.

    python evaluate.py configs/lab.yaml out=runs/eval model.path=runs/lab/grpo/policy hek.path=runs/lab/hek/hek
    python evaluate.py --help

The arms are HEK off and, where hek.path is set, HEK on; each greedy (eval.greedy) and sampled
(eval.samples_per_question). Writes evaluation.json, evaluation.md, one line per attempt in samples_<arm>.jsonl,
the first attempt at each question in trajectories_<arm>.jsonl, and report.html.
"""

import sys

from hiexp.assemble import Config, load_models, open_agent, open_samples
from hiexp.config import run_script
from hiexp.evaluation import describe_setting, evaluate, to_markdown, write_results
from hiexp.hek import HEK
from hiexp.report import write_report
from hiexp.search import read_corpus
from hiexp.tracking import finish_run, open_run_folder, progress, write_trajectories

QUESTIONS_PER_CALL = 64
SHOWN = 12


def main(cfg: Config) -> None:
    samples = open_samples(cfg.data, "test")
    agent = open_agent(cfg)
    out = open_run_folder(cfg.out, cfg)
    agent.start(load_models(cfg, with_reference=False)[1])
    stores = {"hek_off": HEK.empty()} | ({"hek_on": agent.hek} if cfg.hek.path else {})
    documents = [document for _, document in read_corpus(cfg.search.corpus)] if cfg.search.corpus else []
    template = agent.tokenizer.decode(agent.rollout(samples[:1], 0, HEK.empty(), group_size=1, max_turns=1)[0].token_ids)

    results, settings, shown = {}, {}, {}
    for store, hek in stores.items():
        for decoding in cfg.eval.decodings:
            arm, attempts = f"{store}_{decoding.name}", []
            with progress(total=len(samples), label=f"evaluate {arm}", unit="question") as bar:
                for start in range(0, len(samples), QUESTIONS_PER_CALL):
                    chunk = samples[start : start + QUESTIONS_PER_CALL]
                    attempts += agent.rollout(
                        chunk,
                        seed=cfg.eval.seed * 1_000_003 + start,
                        hek=hek,
                        group_size=decoding.samples,
                        temperature=decoding.temperature,
                        top_p=decoding.top_p,
                    )
                    bar.update(len(chunk))
            results[arm] = evaluate(attempts, samples, cfg.eval, decoding.samples)
            settings[arm] = describe_setting(
                model=cfg.model.path,
                hek=cfg.hek.path if hek is agent.hek else None,
                protocol=cfg.rollout.protocol,
                template=template,
                documents=documents,
                encoder=agent.encoder.fingerprint if agent.encoder else "none",
                top_k=cfg.rollout.top_k,
                samples=samples,
                decoding=decoding,
                seed=cfg.eval.seed,
            )
            shown[arm] = attempts[:: decoding.samples]
            write_trajectories(out / f"trajectories_{arm}.jsonl", shown[arm])
    write_results(out, results, settings)
    summary = {"arms": {arm: {name: vars(i) for name, i in r.overall.scores.items()} for arm, r in results.items()}}
    few = {arm: attempts[:SHOWN] for arm, attempts in shown.items()}
    write_report(out / "report.html", f"Evaluation {out}", summary, {}, cfg.hek.path or None, few, samples, agent.tokenizer)
    finish_run(out, summary)
    print(to_markdown(results))


if __name__ == "__main__":
    sys.exit(run_script(main, Config, sys.argv[1:], __doc__))
