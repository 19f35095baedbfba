"""The lab study: many arms, several worlds and warm starts, one process per job. `python -m hiexp.lab study out=...`.

Starts the jobs of study_plan.py as far as their needs are met, a given number at a time. A job whose done.json is there
is never run again: after a stop the same command goes on. A job that fails takes down those that need it and nothing
else. The report (results.jsonl, claims.md, report.html ...) is of all that has finished in the folder, whichever arms
were asked for last. size, config and overrides belong to the folder and need not be said again.
"""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from hiexp.assemble import Config
from hiexp.config import ConfigError, dump, load
from hiexp.study_arms import chosen_arms
from hiexp.study_plan import TUNING_SEED, Job, StudyConfig, plan
from hiexp.study_report import write_study
from hiexp.tracking import write_json

ROOT = Path(__file__).resolve().parents[1]
GRACE = 60.0
"""seconds that a job has to save when the study is stopped"""
POLL = 0.2
STUDY = "HIEXP_STUDY_PID"
"""variable that names the process which a job belongs to"""
KEPT = "study.yaml"
"""what belongs to the folder: size, config and overrides"""
SETTINGS = "settings.yaml"
"""configs/lab.yaml, or what stands in its place, as it was resolved when the folder was made"""
OWNED = {
    "optim.lr": "size.lrs", "loss.clip_low": "size.clips", "loss.clip_high": "size.clips",
    "rollout.group_size": "size.group", "build.questions": "size.build_questions",
    "train.steps": "size.steps", "train.prompts_per_step": "size.prompts",
}  # fmt: skip
"""settings that the study sets itself -> what decides them"""
PLACES = (
    "out", "seed", "threads", "eval.seed", "model.path", "hek.path", "encoder.path", "search.corpus", "sft.train",
    "data.train", "data.dev", "data.test", "train.dev_every", "train.show_every", "train.save_every",
    "checkpoint.every",
)  # fmt: skip
"""settings that it sets and that nothing decides"""


def run_study(cfg: StudyConfig) -> int:
    """0 when every job has finished, 1 when some failed, 143 (129, 130) when it was stopped."""
    out = Path(cfg.out)
    _check(cfg, out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write to out={out}: {error.strerror}") from error
    if not cfg.jobs:
        _keep(cfg, out)
        _report(cfg, out)
        return 0
    with (out / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"out={out}: another study is running there; wait for it, or choose another") from error
        _keep(cfg, out)
        code = Runner(out, plan(cfg), cfg.jobs).run()
        _report(cfg, out)
    return code


def of_folder(arguments: Sequence[str]) -> list[str]:
    """The command line, after what the folder's study.yaml says."""
    named = [argument.partition("=")[2] for argument in arguments if argument.startswith("out=")]
    written = Path(named[-1]) / KEPT if named else None
    return [*([str(written)] if written and written.is_file() else ()), *arguments]


def _report(cfg: StudyConfig, out: Path) -> None:
    """Of every arm and every world that the folder has; with jobs=0, of the worlds that are named."""
    there = (path.name[1:] for path in out.glob("s*") if path.name[1:].isdigit() and path.name != f"s{TUNING_SEED}")
    named = () if cfg.jobs else cfg.worlds
    worlds = named or tuple(sorted({*cfg.seeds, *map(int, there)}))
    everything = replace(cfg, set="full", arms=(), worlds=worlds)
    write_study(out, everything, {job.name for job in plan(everything) if is_done(out, job)})


def is_done(out: Path, job: Job) -> bool:
    """Whether it has finished with what it is told now."""
    return _told(out / job.name / "done.json") == job.told


@dataclass
class Runner:
    """Processes for jobs. A slot is given to the first job of the plan that is ready."""

    out: Path
    jobs: Sequence[Job]
    slots: int
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    stopped: int = 0

    def __post_init__(self) -> None:
        self.finished = {job.name for job in self.jobs if is_done(self.out, job)}
        self.by_name = {job.name: job for job in self.jobs}
        self.began = time.monotonic()

    def run(self) -> int:
        told = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        heard = [number for number in told if signal.getsignal(number) is not signal.SIG_IGN]  # nohup ignores one
        former = {number: signal.signal(number, self._note) for number in heard}
        say(f"{len(self.jobs)} jobs, {len(self.finished)} of them finished before; {self.slots} at a time")
        try:
            while not self.stopped:
                for job in self._ready()[: self.slots - len(self.running)]:
                    self._start(job)
                if not self.running:
                    break
                time.sleep(POLL)
                self._collect()
        finally:
            self._end()
            for number, handler in former.items():
                signal.signal(number, handler)
        left = [job.name for job in self.jobs if job.name not in self.finished]
        for name, why in self.failed.items():
            say(f"{name} failed: {why} (all of it: {self.out / name / 'log.txt'})")
        if left:
            tries = "tries the failed ones again and goes on" if self.failed else "goes on with them"
            waiting = f", {len(left) - len(self.failed)} of them not begun or stopped" if self.failed else ""
            say(f"{len(left)} jobs are not finished{waiting}, first {left[0]}; the same command {tries}")
        return 128 + self.stopped if self.stopped else int(bool(left))

    def _ready(self) -> list[Job]:
        taken = self.finished | set(self.running) | set(self.failed)
        return [job for job in self.jobs if job.name not in taken and self.finished.issuperset(job.needs)]

    def _start(self, job: Job) -> None:
        folder = self.out / job.name
        if folder.exists() and _told(folder / "job.json") != job.told:
            with alone(folder):  # a run of other settings has left files there that would be taken for its own
                shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "job.json", asdict(job))
        if job.kind == "warm":
            say(f"{job.name} begins and takes minutes (log: {folder / 'log.txt'})")
        command = self.command(folder)
        threads = {
            STUDY: str(os.getpid()),
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": str(ROOT),
        }
        with (folder / "log.txt").open("ab") as log:
            log.write((" ".join(command) + "\n").encode())
            log.flush()
            # a group of its own: Ctrl-C reaches this process alone, which then tells the jobs in its own way; not a
            # session of its own, for Linux shares the CPU among sessions first and `nice` would count for nothing
            self.running[job.name] = subprocess.Popen(
                command, stdout=log, stderr=log, env=os.environ | threads, process_group=0
            )

    def command(self, folder: Path) -> list[str]:
        return [sys.executable, "-m", "hiexp.study_job", str(folder)]

    def _collect(self) -> None:
        for name, process in list(self.running.items()):
            if (code := process.poll()) is None:
                continue
            del self.running[name]
            if code == 0 and is_done(self.out, self.by_name[name]):
                self.finished.add(name)
                minutes = (time.monotonic() - self.began) / 60
                say(f"[{minutes:5.1f} min] {len(self.finished)}/{len(self.jobs)} {name}")
            elif not self.stopped:
                how = f"exit code {code}" if code >= 0 else f"killed by signal {-code}"
                self.failed[name] = f"{how}: {_last_line(self.out / name / 'log.txt')}"
                say(f"{name} failed: {self.failed[name]}")

    def _note(self, number: int, _: Any) -> None:
        self.stopped = number

    def _end(self) -> None:
        """Told to stop: training runs save and exit; what does not end in time is killed."""
        for process in self.running.values():
            process.terminate()
        deadline = time.monotonic() + GRACE
        for process in self.running.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._collect()


def say(text: str) -> None:
    print(text, flush=True)


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Wait for a job that a study which was killed has left in this folder: it stops by itself, and saves first."""
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _check(cfg: StudyConfig, out: Path) -> None:
    """ConfigError for a setting that no job could run with, and for a folder of other settings or other things."""
    for override in cfg.overrides:
        key, equals, text = (part.strip() for part in override.partition("="))
        if not equals or text.startswith("{"):
            raise ConfigError(f"overrides: {override!r} must be one key=value, like optim.mini_batches=1")
        if key in OWNED or key in PLACES:
            remedy = f"set {OWNED[key]}" if key in OWNED else "leave it out"
            raise ConfigError(f"overrides: the study sets {key} itself; {remedy}")
    resolved = _resolved(cfg)
    for arm in chosen_arms(cfg.arms, cfg.set).values():  # a wrong setting is told before anything runs
        _resolved(cfg, arm.overrides)
    if out.exists() and not out.is_dir():
        raise ConfigError(f"out={out} is a file; name a folder")
    written = out / KEPT
    if not written.is_file():
        if out.is_dir() and any(out.iterdir()):
            raise ConfigError(f"out={out} holds something that is not a study; choose another out=...")
        return
    before = load(StudyConfig, [str(written)])
    changed = _differences(before.size, cfg.size, "size.") + _differences(before.overrides, cfg.overrides, "overrides")
    if (out / SETTINGS).is_file():
        changed += _differences(load(Config, [str(out / SETTINGS)]), resolved, "")
    if changed:
        raise ConfigError(f"out={out} holds a study with other settings ({', '.join(changed)}); choose another out=...")


def _resolved(cfg: StudyConfig, more: Sequence[str] = ()) -> Config:
    config = cfg.config if Path(cfg.config).is_file() else str(ROOT / cfg.config)
    return load(Config, [config, "out=.", *cfg.overrides, *more])


def _keep(cfg: StudyConfig, out: Path) -> None:
    """What the folder is for, written once."""
    if not (out / KEPT).is_file():
        dump(StudyConfig(str(out), config=cfg.config, overrides=cfg.overrides, size=cfg.size), out / KEPT)
        dump(_resolved(cfg), out / SETTINGS)


def _differences(before: Any, now: Any, name: str) -> list[str]:
    if not is_dataclass(before):
        return [] if before == now else [f"{name}: {before} there, {now} asked for"]
    dot = "" if not name or name.endswith(".") else "."
    return [
        line
        for one in fields(before)
        for line in _differences(getattr(before, one.name), getattr(now, one.name), f"{name}{dot}{one.name}")
    ]


def _told(path: Path) -> Any:
    """What a job's file says that it was told; None without a whole file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))["told"]
    except (OSError, ValueError, KeyError):
        return None


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n").split("\n") if log.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
