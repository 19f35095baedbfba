"""What a run leaves behind: its folder, metrics, trajectories; and timers and progress bars.

    config.yaml run.json            what was run: settings, command line, commit, package versions
    metrics.jsonl tb/               one line per step (run_log.py); the same for TensorBoard
    trajectories.jsonl              `python -m hiexp.tracking show RUN` pages through them
    summary.json                    written last: the folder holds a finished run

Files are plain JSON lines, so that any tool reads them. A folder is claimed before any expensive work and
never reused for other settings. No file holds a secret (redact.py).
"""

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from hiexp.redact import redact_values
from hiexp.resume import claim
from hiexp.trajectory import Trajectory

PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "numpy",
    "scikit-learn",
    "faiss-cpu",
    "bm25s",
    "sentence-transformers",
    "vllm",
    "flash-attn",
    "math-verify",
    "pyarrow",
)
QUIET_SECONDS = 15.0
"""Without a terminal (a log file, a CI job) a progress bar becomes one line per so many seconds."""


def open_run_folder(path: str | Path, config: Any, resumable: bool = False) -> Path:
    """Claim a folder for one run (until this process ends) and write config.yaml and run.json into it.

    A folder that an interrupted run of equal settings left behind is taken over. `resumable` says that the script then
    goes on from its checkpoints, even with settings that differ where it does not matter (resume.py), and from a
    finished run whose train.steps was raised; `former` in run.json tells who wrote the folder before. ConfigError for
    a finished run, one with other settings, foreign files, or a place that cannot be written.
    """
    folder = Path(path)
    changes = claim(folder, config, _script(), resumable)
    record = {
        "script": _script(),
        "pid": os.getpid(),
        "command": shlex.join(sys.argv),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "commit": _git("rev-parse", "HEAD"),
        "changed_files": (_git("status", "--porcelain", "--untracked-files=no") or "").splitlines(),
        "python": sys.version.split()[0],
        "packages": dict(_package_versions()),
        "former": _former(folder, changes),
    }
    write_json(folder / "run.json", redact_values(record))
    return folder


def finish_run(folder: str | Path, summary: Mapping[str, Any]) -> None:
    """Write summary.json, which also marks the run as finished."""
    write_json(Path(folder) / "summary.json", summary)


def read_metrics(folder: str | Path) -> list[dict[str, float | None]]:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in _whole_lines(Path(folder) / "metrics.jsonl")]


def write_trajectories(path: str | Path, trajectories: Iterable[Trajectory]) -> None:
    """One JSON object per line (`Trajectory.to_json`); the file is replaced when all of it is written."""
    _write_whole(Path(path), (json.dumps(t.to_json(), ensure_ascii=False) + "\n" for t in trajectories))


def append_trajectories(path: str | Path, trajectories: Iterable[Trajectory], step: int) -> None:
    """Add the trajectories of a step, each line with the step before its other keys.

    All of them are on disk on return; if that fails (OSError), the file is as it was.
    """
    lines = "".join(json.dumps({"step": step} | t.to_json(), ensure_ascii=False) + "\n" for t in trajectories)
    with Path(path).open("ab") as file:
        end = file.tell()
        try:
            file.write(lines.encode())
            file.flush()
            os.fsync(file.fileno())
        except OSError:
            os.truncate(path, end)
            raise


def read_trajectories(path: str | Path) -> list[Trajectory]:
    return [trajectory for _, trajectory in iter_trajectories(path)]


def iter_trajectories(path: str | Path) -> Iterator[tuple[int, Trajectory]]:
    """(step, trajectory) of every line; a file without steps counts by policy version."""
    for line in _whole_lines(Path(path)):
        record = json.loads(line)
        yield record.get("step", record["policy_version"]), Trajectory.from_json(record)


def cut_after(path: str | Path, step: int) -> None:
    """Cut a file of JSON lines that begin with their step (in order) behind the last line of `step` or before.

    So does a last line that was only half written; no file is no failure.
    """
    end = 0
    try:
        with Path(path).open("rb") as lines:
            for line in lines:
                found = _STEP.match(line)
                if not found or int(found[1]) > step or not line.endswith(b"\n"):
                    break
                end += len(line)
        os.truncate(path, end)
    except FileNotFoundError:
        return


def _whole_lines(path: Path) -> Iterator[str]:
    """Lines of a file that may be growing: one that does not end yet is left out."""
    with path.open(encoding="utf-8", newline="\n") as lines:
        yield from (line for line in lines if line.endswith("\n"))


def write_json(path: str | Path, value: Any) -> None:
    """Indented JSON, whole or not at all; ValueError for a number that is not finite."""
    _write_whole(Path(path), [json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n"])


class Timer:
    """`with Timer() as timer: ...`, then `timer.wall` and `timer.cpu` (all threads together), in seconds."""

    wall = cpu = 0.0

    def __enter__(self) -> "Timer":
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall, self.cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu


@contextmanager
def timed(metrics: dict[str, float], name: str) -> Iterator[Timer]:
    """Add the block's wall and CPU seconds to metrics["time/<name>"] and metrics["time/<name>_cpu"]."""
    with Timer() as timer:
        yield timer
    metrics[f"time/{name}"] = metrics.get(f"time/{name}", 0.0) + timer.wall
    metrics[f"time/{name}_cpu"] = metrics.get(f"time/{name}_cpu", 0.0) + timer.cpu


class _Bar(tqdm):
    """tqdm by a clock that never goes backwards: by time.time, a bar stands still for as long as it was set back."""

    monitor_interval = 0  # tqdm's watching thread reads time.time

    @property
    def _time(self) -> Callable[[], float]:
        return time.perf_counter

    @_time.setter
    def _time(self, _: Callable[[], float]) -> None:
        """tqdm sets time.time here."""


def progress(
    iterable: Iterable[Any] | None = None, total: int | None = None, label: str = "", unit: str = "it"
) -> tqdm:
    """A progress bar on stderr: iterate over it, or use it as a context manager and call `.update(n)`."""
    if sys.stderr.isatty():
        return _Bar(iterable, desc=label, total=total, unit=unit, dynamic_ncols=True)
    every = QUIET_SECONDS
    lines: Any = _Lines(sys.stderr)
    return _Bar(
        iterable, desc=label, total=total, unit=unit, file=lines, ncols=100, ascii=True,
        mininterval=every, maxinterval=every, miniters=1, delay=every,
    )  # fmt: skip


class _Lines:
    """Turns the carriage returns of a progress bar into lines, none twice in a row."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._last = stream, ""

    def write(self, text: str) -> int:
        line = text.strip()
        if line and line != self._last:
            self._stream.write(line + "\n")
        self._last = line or self._last
        return len(text)

    def flush(self) -> None:
        self._stream.flush()


def _script() -> str:
    return Path(sys.argv[0]).name


def _former(folder: Path, changes: Mapping[str, tuple[Any, Any]]) -> list[dict[str, Any]]:
    """The earlier starts of this run, each with the settings that its successor changed."""
    try:
        record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        start = {key: record[key] for key in ("started", "command", "commit")}
        return [
            *record.get("former", []),
            start | {"changed_after": {key: list(pair) for key, pair in changes.items()}},
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _git(*arguments: str) -> str | None:
    """Output of git in the checkout of this code, or None without git or without a repository."""
    command = ["git", "-C", str(Path(__file__).resolve().parents[1]), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _package_versions() -> Iterator[tuple[str, str]]:
    for name in PACKAGES:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue


def _write_whole(path: Path, chunks: Iterable[str]) -> None:
    new = path.with_name(f".{path.name}.new")
    try:
        with new.open("w", encoding="utf-8") as file:
            file.writelines(chunks)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


_STEP = re.compile(rb'\{"step": (\d+)[,}]')

if __name__ == "__main__":
    # by name: the viewer stands in a higher layer than this file
    sys.exit(importlib.import_module("hiexp.browse").main(sys.argv[1:]))
