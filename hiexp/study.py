"""The lab study: many arms, several worlds and warm starts, one process per job. `python -m hiexp.lab study out=...`.

Starts the jobs of study_plan.py as far as their needs are met, a given number at a time, and writes what is known
so far as results.jsonl, summary.json and report.html. A job whose done.json is there is never run again: after a stop
the same command goes on. A job that fails takes down those that need it and nothing else.
"""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hiexp.assemble import Config
from hiexp.config import ConfigError, dump, load
from hiexp.study_arms import chosen_arms
from hiexp.study_plan import Job, StudyConfig, plan
from hiexp.study_report import write_study
from hiexp.tracking import write_json

ROOT = Path(__file__).resolve().parents[1]
GRACE = 60.0
"""seconds that a job has to save when the study is stopped"""
POLL = 0.2


def run_study(cfg: StudyConfig) -> int:
    """0 when every job has finished, 1 when some failed, 143 or 130 when it was stopped."""
    out = Path(cfg.out)
    _open(cfg, out)
    jobs = plan(cfg)
    if not cfg.jobs:
        write_study(out, cfg, {job.name for job in jobs if is_done(out, job)})
        return 0
    with (out / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"out={out}: another study is running there; wait for it, or choose another") from error
        runner = Runner(out, jobs, cfg.jobs)
        code = runner.run()
        write_study(out, cfg, runner.finished)
    return code


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
        former = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
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
            say(f"{len(left)} jobs are not finished, first {left[0]}; the same command goes on with them")
        return 128 + self.stopped if self.stopped else int(bool(left))

    def _ready(self) -> list[Job]:
        taken = self.finished | set(self.running) | set(self.failed)
        return [job for job in self.jobs if job.name not in taken and self.finished.issuperset(job.needs)]

    def _start(self, job: Job) -> None:
        folder = self.out / job.name
        if folder.exists() and _told(folder / "job.json") != job.told:
            shutil.rmtree(folder)  # a run of other settings has left files there that would be taken for its own
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "job.json", asdict(job))
        command = self.command(folder)
        threads = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT)}
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
                self.failed[name] = f"exit code {code}: {_last_line(self.out / name / 'log.txt')}"
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


def _open(cfg: StudyConfig, out: Path) -> None:
    """Make or take up the folder; ConfigError for one of other sizes or with other things in it."""
    config = cfg.config if Path(cfg.config).is_file() else str(ROOT / cfg.config)
    for arm in chosen_arms(cfg.arms, cfg.set).values():  # a wrong setting is told before anything runs
        load(Config, [config, f"out={out}", *cfg.overrides, *arm.overrides])
    written = out / "study.yaml"
    if out.exists() and any(out.iterdir()) and not written.is_file():
        raise ConfigError(f"out={out} holds something that is not a study; choose another out=...")
    if written.is_file():
        before = load(StudyConfig, [str(written)])
        for name in ("size", "overrides", "config"):
            if getattr(before, name) != getattr(cfg, name):
                changed = _difference(getattr(before, name), getattr(cfg, name), name)
                raise ConfigError(f"out={out} holds a study with other settings ({changed}); choose another out=...")
    out.mkdir(parents=True, exist_ok=True)
    dump(replace(cfg, out=str(out)), written)


def _difference(before: Any, now: Any, name: str) -> str:
    if not hasattr(before, "__dataclass_fields__"):
        return f"{name}: {before} there, {now} asked for"
    pairs = ((f"{name}.{key}", value, getattr(now, key)) for key, value in vars(before).items())
    return ", ".join(f"{key}: {old} there, {new} asked for" for key, old, new in pairs if old != new)


def _told(path: Path) -> Any:
    """What a job's file says that it was told; None without a whole file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))["told"]
    except (OSError, ValueError, KeyError):
        return None


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n").split("\n") if log.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
