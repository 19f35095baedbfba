"""Evaluate a model on questions, with experience and without; make tables and figures of such evaluations.

    python evaluate.py configs/lab.yaml out=runs/eval model.path=runs/lab/grpo/policy hek.path=runs/lab/hek/hek
    python evaluate.py configs/x.yaml out=runs/eval "eval.benchmarks={hotpotqa: hotpot_dev_distractor_v1.json}" \\
                       "eval.methods=[vanilla_rag, ircot, search_o1]"
    torchrun --nproc-per-node 8 evaluate.py configs/x.yaml ...      each process takes a share of the questions
    python evaluate.py table1 runs/a runs/b --paper                 table2-6, table9, figure3, figure4, cost, page
    python evaluate.py --help

An arm is a benchmark, a method (methods.py), HEK off or, where hek.path is set, on, and a decoding: greedy
(eval.greedy) or sampled (eval.samples_per_question). Writes evaluation.json, evaluation.md, one line per attempt in
samples_<arm>.jsonl, the first attempt of an agent at each question in trajectories_<arm>.jsonl, and report.html. The
same command goes on where it was interrupted.
"""

import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from hiexp.api_client import read_key
from hiexp.askers import EndpointAsker, LocalAsker
from hiexp.assemble import Agent, Config, engine_only, open_agent, start_engine
from hiexp.config import run_script
from hiexp.distributed import Context, close, init
from hiexp.eval_run import (
    Arm,
    Ledger,
    check_prompts,
    open_benches,
    plan,
    record_hashes,
    run_arm,
    setting_of,
)
from hiexp.evaluation import EvalResult, file_name, overall_table, summarise, write_results
from hiexp.hek import refuse_evaluation_questions
from hiexp.hek_stages import Models
from hiexp.journal import Journal
from hiexp.judge import RULE, Judges, agreement, as_scores, mean_score
from hiexp.leaderboard import write_leaderboard
from hiexp.records import write_attempts
from hiexp.resume import file_hash
from hiexp.significance import verbosity
from hiexp.tables import COMMANDS
from hiexp.tables import main as make_tables
from hiexp.tracking import Timer, finish_run, open_run_folder, write_trajectories

DAY = 86400.0


def main(cfg: Config) -> None:
    ctx = init(timeout_s=DAY)  # a rank may have the long questions
    if not ctx.is_main:
        warnings.simplefilter("ignore")  # rank 0 has said it
    benches = open_benches(cfg)
    arms = plan(cfg, benches)
    agent = open_agent(cfg)
    check_prompts(arms, cfg, agent.tokenizer)
    for bench in benches:
        refuse_evaluation_questions(agent.hek, bench.samples)
    judges = open_judges(cfg, agent) if cfg.eval.judged and ctx.is_main else None
    if cfg.eval.endpoint.api_key_env:
        read_key(cfg.eval.endpoint.api_key_env, "eval.endpoint.api_key_env")
    out = ctx.on_main(lambda: open_run_folder(cfg.out, cfg))
    ctx.on_main(lambda: record_hashes(out, cfg, benches))

    if cfg.eval.endpoint.url:
        journal = Journal(out / "parts" / f"replies.{ctx.rank}.jsonl")
        asker = EndpointAsker(cfg.eval.endpoint, agent.tokenizer, journal, "eval.endpoint")
    else:
        asker = LocalAsker(start_engine(agent, cfg, *engine_only(cfg, ctx)), agent.tokenizer)
    made = 0
    with Timer() as timer:
        for arm in arms:
            made += run_arm(arm, cfg, agent, asker, Ledger(out, arm, cfg, ctx), ctx)
        ctx.barrier("evaluation")
    # of a run that went on from an earlier start nobody knows what it took as a whole
    is_whole = ctx.sum([made])[0] == sum(len(arm.bench.samples) * arm.decoding.samples for arm in arms)
    times = {"time/evaluate": timer.wall} if is_whole else {}
    if agent.engine:
        agent.engine.close()
        agent.engine = None  # a local judge may need its memory
    close(ctx)
    if ctx.is_main:
        report(out, arms, cfg, agent, judges, times)


def open_judges(cfg: Config, agent: Agent) -> Judges:
    """Before any question is asked, so that a missing key is known; a local model is loaded when it is asked."""
    folders = {who.model for who in cfg.judge.judges().values() if not who.url} - {RULE}
    models, local = Models(agent, cfg), {}
    for folder in folders:
        tokenizer, engine = models.local(folder)
        local[folder] = (engine, tokenizer)
    return Judges(cfg.judge, cfg.judge.cache or Path(cfg.out) / "verdicts", local=local)


def report(
    out: Path, arms: Sequence[Arm], cfg: Config, agent: Agent, judges: Judges | None, times: Mapping[str, float]
) -> None:
    """Judge, sum up and write what the ledgers hold."""
    results: dict[str, EvalResult] = {}
    about = {arm.name: arm.about(cfg) for arm in arms}
    for arm in arms:
        attempts, trajectories = [], []
        for attempt, trajectory in Ledger(out, arm, cfg, Context()).attempts():
            attempts.append(attempt)
            trajectories += [trajectory] if trajectory else []
        if judges:
            verdicts = judges.grade([(one.question, one.answers, one.prediction) for one in attempts])
            pairs = zip(attempts, verdicts, strict=True)
            attempts = [replace(one, scores=one.scores | as_scores(verdict)) for one, verdict in pairs]
            slope = verbosity([mean_score(verdict) for verdict in verdicts], [one.answer_words for one in attempts])
            about[arm.name]["judges"] = agreement(verdicts) | {"verbosity": slope and asdict(slope)}
        result = summarise(attempts, arm.bench.samples, cfg.eval)
        lines = out / f"samples_{file_name(arm.name)}.jsonl"
        write_attempts(lines, attempts)
        about[arm.name]["samples_sha256"] = file_hash(lines)
        if trajectories:
            write_trajectories(out / f"trajectories_{file_name(arm.name)}.jsonl", trajectories)
        results[arm.name] = replace(result, attempts=())
    write_results(out, results, {arm.name: setting_of(arm, cfg, agent) for arm in arms}, about)
    write_leaderboard(out / "report.html", [out])
    arms_of = {arm: {"scores": asdict(result.overall)["scores"]} for arm, result in results.items()}
    finish_run(out, {"arms": arms_of, **times})
    print(overall_table(results))


def is_command(word: str) -> bool:
    """Whether a first argument can only be meant as the name of a table: no setting, no option, no file."""
    return word.isalnum() and not Path(word).exists()


if __name__ == "__main__":
    if sys.argv[1:] and (sys.argv[1] in COMMANDS or is_command(sys.argv[1])):
        sys.exit(make_tables(sys.argv[1:]))
    sys.exit(run_script(main, Config, sys.argv[1:], __doc__))
