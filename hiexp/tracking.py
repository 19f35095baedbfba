"""What a run leaves behind and shows while it lasts: its folder, metrics, trajectories, timers, progress
bars.

    config.yaml run.json            what was run: settings, command line, commit, package versions
    metrics.jsonl tb/               one line per step; the same for TensorBoard
    summary.json                    written last: the folder holds a finished run

Files are plain JSON lines, so that any tool reads them. A folder is claimed before any expensive work and
never reused for other settings.
"""

import json
import math
import os
import shlex
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from hiexp.config import ConfigError, dump
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
)
QUIET_SECONDS = 15.0
"""Without a terminal (a log file, a CI job) a progress bar becomes one line per so many seconds."""


def open_run_folder(path: str | Path, config: Any) -> Path:
    """Claim a folder for one run and write config.yaml and run.json into it.

    A folder that an interrupted run of equal settings left behind is taken over (the run starts anew).
    ConfigError for a finished run, a run with other settings, foreign files, or a place that cannot be
    written.
    """
    folder = Path(path)
    _probe(folder)
    wanted, found = folder / ".config.yaml.new", folder / "config.yaml"
    dump(config, wanted)
    try:
        _refuse_other_run(folder, found, wanted)
        wanted.replace(found)
    finally:
        wanted.unlink(missing_ok=True)
    record = {
        "script": _script(),
        "pid": os.getpid(),
        "command": shlex.join(sys.argv),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "commit": _git("rev-parse", "HEAD"),
        "changed_files": (_git("status", "--porcelain", "--untracked-files=no") or "").splitlines(),
        "python": sys.version.split()[0],
        "packages": dict(_package_versions()),
    }
    write_json(folder / "run.json", record)
    return folder


def finish_run(folder: str | Path, summary: Mapping[str, Any]) -> None:
    """Write summary.json, which also marks the run as finished."""
    write_json(Path(folder) / "summary.json", summary)


class RunLog:
    """metrics.jsonl and TensorBoard of one run, a line per step, on disk as soon as `log` returns.

    Starts both anew. Values that are not finite are null in the file, since JSON has no word for them.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file = (self.folder / "metrics.jsonl").open("w", encoding="utf-8")
        self._tensorboard = self._guard(self._open_tensorboard)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = {key: float(value) for key, value in metrics.items()}
        line = {key: value if math.isfinite(value) else None for key, value in values.items()}
        self._file.write(json.dumps({"step": step, **line}) + "\n")
        self._file.flush()
        writer = self._tensorboard
        if writer is not None:
            self._guard(lambda: [writer.add_scalar(key, value, step) for key, value in values.items()])

    def close(self) -> None:
        self._file.close()
        if self._tensorboard is not None:
            self._guard(self._tensorboard.close)

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_tensorboard(self) -> Any:
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        # steps of an interrupted run in the same folder are hidden, not drawn twice
        return SummaryWriter(str(self.folder / "tb"), purge_step=0, flush_secs=10)

    def _guard(self, call: Callable[[], Any]) -> Any:
        """TensorBoard is a view: if it fails, say so once and go on without it."""
        try:
            return call()
        except Exception as error:
            self._tensorboard = None
            warnings.warn(f"no TensorBoard logs from here on ({error}); metrics.jsonl goes on", stacklevel=3)
            return None


def read_metrics(folder: str | Path) -> list[dict[str, float | None]]:
    """The lines of a run's metrics.jsonl."""
    text = (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def write_trajectories(path: str | Path, trajectories: Iterable[Trajectory]) -> None:
    """One JSON object per line (`Trajectory.to_json`); the file is replaced when all of it is written."""
    _write_whole(Path(path), (json.dumps(t.to_json(), ensure_ascii=False) + "\n" for t in trajectories))


def read_trajectories(path: str | Path) -> list[Trajectory]:
    with Path(path).open(encoding="utf-8") as lines:
        return [Trajectory.from_json(json.loads(line)) for line in lines]


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


def progress(
    iterable: Iterable[Any] | None = None, total: int | None = None, label: str = "", unit: str = "it"
) -> tqdm:
    """A progress bar on stderr: iterate over it, or use it as a context manager and call `.update(n)`."""
    if sys.stderr.isatty():
        return tqdm(iterable, desc=label, total=total, unit=unit, dynamic_ncols=True)
    every = QUIET_SECONDS
    lines: Any = _Lines(sys.stderr)
    return tqdm(
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


def _probe(folder: Path) -> None:
    """Create the folder and write 64 KB into it, so that a full or read-only disk is known at once."""
    first_missing = next((p for p in reversed(folder.absolute().parents) if not p.exists()), None)
    if first_missing is not None and first_missing.parent == Path(first_missing.anchor):
        raise ConfigError(f"out={folder}: {first_missing} does not exist; create it or choose another out=...")
    probe = folder / ".probe"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with probe.open("wb") as file:
                file.write(bytes(1 << 16))
                file.flush()
                os.fsync(file.fileno())
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ConfigError(
            f"cannot write to out={folder} ({reason}); free some space or choose another out=..."
        ) from error


def _refuse_other_run(folder: Path, found: Path, wanted: Path) -> None:
    remedy = "choose another out=... or delete that folder"
    script, pid = _claimed_by(folder)
    if pid != os.getpid() and not (folder / "summary.json").exists() and _is_alive(pid):
        raise ConfigError(f"out={folder} is in use by process {pid} ({script}); wait for it, or choose another out=...")
    content = {p.name for p in folder.iterdir() if not p.name.startswith(".")}
    if content <= {"config.yaml", "run.json"}:
        return  # new, or claimed by a start that failed before it produced anything
    if not found.exists():
        raise ConfigError(f"out={folder} holds files that are not of a run; {remedy}")
    if script != _script():
        raise ConfigError(f"out={folder} holds a run of {script or 'something else'}; {remedy}")
    if found.read_bytes() != wanted.read_bytes():
        raise ConfigError(f"out={folder} holds a run with other settings (see its config.yaml); {remedy}")
    if (folder / "summary.json").exists():
        raise ConfigError(f"out={folder} holds a finished run of these settings; {remedy}")


def _script() -> str:
    return Path(sys.argv[0]).name


def _claimed_by(folder: Path) -> tuple[str, int]:
    """Script and process that claimed a folder; ("", 0) when nobody did."""
    try:
        record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        return str(record["script"]), int(record["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return "", 0


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return pid > 0


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
