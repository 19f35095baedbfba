"""The demo: runs the stages of the lab as processes, two at a time, and puts their results on one page.

Every stage is a command that a user could type; it is printed before it runs and its output is kept in logs/. Nothing
is computed here that the scripts do not compute: this file starts them, waits and collects.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hiexp.assemble import Config
from hiexp.config import ConfigError, load
from hiexp.data import read_samples
from hiexp.evaluation import difference
from hiexp.model import load_tokenizer
from hiexp.records import read_attempts
from hiexp.report import write_report
from hiexp.run_panel import stability_panel, step_cost
from hiexp.tracking import finish_run, read_metrics, read_trajectories, write_json

ROOT = Path(__file__).resolve().parents[1]
ARMS = {"base": "eval_base", "base_hek": "eval_base", "grpo": "eval_grpo", "grpo_hiexp": "eval_grpo_hiexp",
        "attempts_grpo": "eval_attempts_grpo"}  # fmt: skip
"""arm of the summary -> the evaluation it is read from"""
TRAINED = ("grpo", "grpo_hiexp", "attempts_grpo")
WITHOUT = ("base", "grpo", "attempts_grpo")
"""shown on the page as they are without experience"""
RATE = "optim.lr=1.5e-4"
"""of GRPO after the attempts, chosen in the lab study: at the lab's 3e-4 one run of twenty collapsed"""
SHOWN_QUESTIONS = 12
REFLECTOR = "self (the policy writes its own lessons)"


class Stages:
    """Starts commands as processes and tells what they are doing; one thread may call it for each core."""

    def __init__(self, out: Path, config: str, seed: int, overrides: Sequence[str]) -> None:
        self.out, self.started = out, time.perf_counter()
        self.logs: dict[str, Path] = {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        world = out / "world"
        self.settings = [
            config if Path(config).is_file() else str(ROOT / config),
            f"seed={seed}",
            f"eval.seed={seed}",
            f"model.path={_quoted(out / 'policy')}",
            *(f"data.{split}={_quoted(world / f'{split}.jsonl')}" for split in ("train", "dev", "test")),
            f"encoder.path={_quoted(world / 'encoder.json')}",
            f"search.corpus=[{_quoted(world / 'corpus.jsonl')}]",
            *overrides,
        ]
        load(Config, [*self.settings, f"out={out}"])  # a wrong setting is told before anything runs

    def script(self, name: str, script: str, *settings: str) -> None:
        """Run a script or a module; ConfigError with the last line of its log if it fails."""
        called = [str(ROOT / script)] if script.endswith(".py") else ["-m", script]
        command = [sys.executable, *called, *self.settings, f"out={self.out / name}", *settings]
        log = self.out / "logs" / f"{name}.log"
        log.parent.mkdir(exist_ok=True)
        self.say(f"{name}: {script} {' '.join(settings)}")
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        more = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": paths}
        with log.open("w", encoding="utf-8") as stream:
            stream.write(" ".join(command) + "\n")
            stream.flush()
            process = subprocess.Popen(command, stdout=stream, stderr=stream, env=os.environ | more)
            self.logs[name], self.processes[name] = log, process
            code = process.wait()
        del self.logs[name], self.processes[name]
        if code:
            raise ConfigError(f"{name} failed: {_last_line(log)} (all of it: {log})")
        self.say(f"{name}: done")

    def say(self, text: str) -> None:
        """One line with the seconds since the start, on top of whatever the status line shows."""
        print(f"\r\033[K{self.clock()} {text}" if sys.stdout.isatty() else f"{self.clock()} {text}", flush=True)

    def watch(self, futures: Sequence[Future[None]]) -> None:
        """Wait for all, showing what the running stages say; the first failure ends the others and is raised."""
        pending = set(futures)
        try:
            while pending:
                done, pending = wait(pending, timeout=1, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
                if sys.stdout.isatty():
                    status = " | ".join(_last_line(log)[:60] for log in list(self.logs.values()))
                    print(f"\r\033[K{self.clock()} {status}", end="", flush=True)
        except BaseException:
            for future in pending:
                future.cancel()
            for process in list(self.processes.values()):
                process.terminate()
            raise

    def clock(self) -> str:
        return f"[{time.perf_counter() - self.started:4.0f} s]"


def run_demo(
    out: Path,
    config: str,
    seed: int,
    overrides: Sequence[str],
    write_world: Callable[[Path], None],
    write_policy: Callable[[Path], dict[str, float]],
) -> None:
    """World, policy, HEK, three training arms, four evaluations, summary.json and report.html under `out`."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `watch` ends the stages, as for Ctrl-C
    stages = Stages(out, config, seed, overrides)
    _keep_old(out, stages)
    out.mkdir(parents=True, exist_ok=True)
    stages.say("world: a fictional encyclopedia and its questions")
    write_world(out / "world")
    stages.say("policy: warm start of a tiny transformer on practice traces")
    write_policy(out / "policy")
    hek = f"hek.path={out / 'hek' / 'hek'}"
    with ThreadPoolExecutor(max_workers=2) as pool:
        build = pool.submit(stages.script, "hek", "build_hek.py")
        grpo = pool.submit(stages.script, "grpo", "train.py")
        # each waits only for what was submitted before it, so two workers cannot block each other
        hiexp = pool.submit(_after, build, stages.script, "grpo_hiexp", "train.py", hek)
        attempts = pool.submit(
            _after, build, stages.script, "attempts", "hiexp.sft", f"sft.train={out / 'hek' / 'trajectories.jsonl'}"
        )
        start = f"model.path={out / 'attempts' / 'policy'}"
        rate = () if any(one.startswith("optim.lr=") for one in overrides) else (RATE,)
        after = pool.submit(_after, attempts, stages.script, "attempts_grpo", "train.py", start, *rate)
        evaluations = [
            pool.submit(_after, before, stages.script, f"eval_{name}", "evaluate.py", hek, *model)
            for name, before, model in (
                ("base", build, ()),
                ("grpo", grpo, (f"model.path={out / 'grpo' / 'policy'}",)),
                ("grpo_hiexp", hiexp, (f"model.path={out / 'grpo_hiexp' / 'policy'}",)),
                ("attempts_grpo", after, (f"model.path={out / 'attempts_grpo' / 'policy'}",)),
            )
        ]
        stages.watch([build, grpo, hiexp, attempts, after, *evaluations])
    _collect(out, seed, stages)


def _after(before: Future[None], call: Callable[..., None], *arguments: str) -> None:
    before.result()
    call(*arguments)


def _keep_old(out: Path, stages: Stages) -> None:
    """Nothing is ever overwritten: an earlier demo is moved aside, anything else is refused."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not (out / "world").is_dir():
        raise ConfigError(f"out={out} holds something that is not a demo; choose another out=...")
    place = out.absolute()
    free = next(name for n in range(1, 10_000) if not (name := place.with_name(f"{place.name}-{n}")).exists())
    place.rename(free)
    stages.say(f"{out} held an earlier demo; it is now {free.name}")


def _collect(out: Path, seed: int, stages: Stages) -> None:
    """summary.json, timing.json and report.html from what the stages wrote."""
    evaluations = {name: json.loads((out / name / "evaluation.json").read_text()) for name in set(ARMS.values())}
    scores = {arm: _scores_of_arm(evaluations[name]) for arm, name in ARMS.items()}
    curves = {arm: read_metrics(out / arm) for arm in TRAINED}
    seconds = round(time.perf_counter() - stages.started, 1)
    # apart from `seconds`, the summary is the same whenever the demo is repeated; what varies is in timing.json
    summary = {
        "seconds": seconds,
        "seed": seed,
        "reflector": REFLECTOR,
        "arms": {arm: _means(stores) for arm, stores in scores.items()},
        "differences": _differences(out),
        "stability": {arm: stability_panel(lines) for arm, lines in curves.items()},
        "hek": {f"level {n}": k for n, k in json.loads((out / "hek/summary.json").read_text())["entries"].items()},
    }
    cost = {arm: step_cost(lines) for arm, lines in curves.items()}
    write_json(out / "timing.json", {"seconds": seconds, "median_cpu_seconds_per_step": cost})
    _write_page(out, summary | {"arms": {arm: stores for arm, stores in scores.items() if arm != "base_hek"}}, curves)
    finish_run(out, summary)
    stages.say(f"finished: {out / 'report.html'}, {out / 'summary.json'}")
    print(_table(summary["arms"]))
    for name, gain in summary["differences"].items():
        mean, low, high = (100 * gain["em"][key] for key in ("mean", "low", "high"))
        print(f"{name}: {mean:+.1f} points of sampled EM, 95% interval [{low:.1f}, {high:.1f}]")
    for arm, spent in cost.items():
        parts = f"rollouts {spent['rollout']:.2f}, update {spent['update']:.2f}"
        print(f"{arm}: median CPU seconds of a step: {parts}")


def _write_page(out: Path, summary: dict[str, Any], curves: dict[str, list[dict[str, float | None]]]) -> None:
    samples = read_samples(out / "world" / "test.jsonl")
    shown = {sample.id for sample in samples[:: max(1, len(samples) // SHOWN_QUESTIONS)]}
    trajectories = {}
    for arm, name in ARMS.items():
        store = "hek_off" if arm in WITHOUT else "hek_on"
        attempts = read_trajectories(out / name / f"trajectories_{store}_sampled.jsonl")
        trajectories[arm] = [t for t in attempts if t.sample_id in shown]
    tokenizer, hek = load_tokenizer(str(out / "policy")), out / "hek" / "hek"
    page = out / "report.html"
    write_report(page, "HiExp on a CPU", summary, curves, hek, trajectories, samples, tokenizer, NOTES)


def _differences(out: Path) -> dict[str, Any]:
    """Paired by question, in sampled EM: what experience changes before and after training."""
    pairs = {
        "base: HEK on - off": ("eval_base/samples_hek_off", "eval_base/samples_hek_on"),
        "GRPO: with HiExp (HEK on) - without": ("eval_grpo/samples_hek_off", "eval_grpo_hiexp/samples_hek_on"),
        "GRPO from the attempts of the HEK - GRPO": (
            "eval_grpo/samples_hek_off",
            "eval_attempts_grpo/samples_hek_off",
        ),
        "GRPO with HiExp: HEK on - off": ("eval_grpo_hiexp/samples_hek_off", "eval_grpo_hiexp/samples_hek_on"),
    }
    gains = {}
    for name, files in pairs.items():
        first, second = (read_attempts(out / f"{file}_sampled.jsonl") for file in files)
        gains[name] = {"em": asdict(difference(first, second, "em"))}
    return gains


def _scores_of_arm(evaluation: dict[str, Any]) -> dict[str, Any]:
    """{"hek_off": {em_sampled, em_greedy, f1, cem, by_family_group}, "hek_on": ...} with intervals."""
    arm: dict[str, Any] = {}
    for store in ("hek_off", "hek_on"):
        sampled, greedy = evaluation["arms"][f"{store}_sampled"], evaluation["arms"][f"{store}_greedy"]
        groups = {
            group: _scores(sampled["by_family_group"][group], greedy["by_family_group"][group])
            for group in sampled["by_family_group"]
        }
        arm[store] = _scores(sampled["overall"], greedy["overall"]) | {"by_family_group": groups}
    return arm


def _scores(sampled: dict[str, Any], greedy: dict[str, Any]) -> dict[str, Any]:
    """F1 and Cover-EM are those of the sampled attempts."""
    scores = sampled["scores"]
    return {"em_sampled": scores["em"], "em_greedy": greedy["scores"]["em"], "f1": scores["f1"], "cem": scores["cem"]}


def _means(node: dict[str, Any]) -> dict[str, Any]:
    """The same nesting with each interval's mean, and for sampled EM its bounds beside it."""
    means: dict[str, Any] = {}
    for name, value in node.items():
        if isinstance(value, dict) and set(value) == {"mean", "low", "high"}:
            means[name] = value["mean"]
            if name == "em_sampled":
                means["em_sampled_interval"] = [value["low"], value["high"]]
        else:
            means[name] = _means(value)
    return means


def _table(arms: dict[str, Any]) -> str:
    """One line for each policy and store; base_hek is base with HEK on, so it has none of its own."""
    lines = [f"{'policy':<13} {'HEK':<4} {'EM sampled':>10} {'EM greedy':>10}   sampled EM by family group"]
    for arm, stores in arms.items():
        for store, scores in stores.items() if arm != "base_hek" else ():
            groups = "  ".join(f"{name} {value['em_sampled']:.2f}" for name, value in scores["by_family_group"].items())
            means = f"{scores['em_sampled']:>10.3f} {scores['em_greedy']:>10.3f}"
            lines.append(f"{arm:<13} {store.removeprefix('hek_'):<4} {means}   {groups}")
    return "\n".join(lines)


def _quoted(path: Path) -> str:
    """A path as a value of a setting, whatever is in it."""
    return json.dumps(str(path))


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n").split("\n") if log.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


NOTES = (
    "The policy learned the protocol from practice traces. Some of these teach it to follow a hint that fits, so a "
    "part of what experience does here is by construction; the right plan of a held-back family came up only as rarely "
    "as any other detour.",
    "Lessons were written by the policy itself (reflector: self).",
    "attempts_grpo first learns from the right attempts behind the HEK, which takes some CPU time more, and is then "
    f"trained without experience at a learning rate of its own ({RATE}, unless one was asked for).",
    "One seed. The differences are paired by question: their intervals say nothing about another seed.",
)
