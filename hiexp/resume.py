"""Taking up an interrupted run: whose folder it is, which settings may have changed, what to cut off, when to stop.

A run that is asked to stop (SIGTERM, SIGINT) saves once and exits with 128 + signal: 143 or 130. The same command then
goes on where it was; so it does after SIGKILL or a power cut, from the last checkpoint.
"""

import dataclasses
import fcntl
import fnmatch
import hashlib
import json
import os
import random
import signal
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch

from hiexp.config import ConfigError, dump, load
from hiexp.distributed import Context
from hiexp.redact import redact_values

HARMLESS = (
    "out", "threads", "resume_changed", "data.dev", "data.test", "eval.*", "build.*", "checkpoint.*", "log.*",
    "watch.*", "judge.*", "sft.dev", "sft.dev_every",
    "train.save_every", "train.show_every", "train.dev_every", "optim.tokens_per_micro_batch", "optim.max_nonfinite",
    "engine.gpu_memory_fraction", "shard.checkpoint_layers", "shard.cpu_offload", "shard.replicas",
)  # fmt: skip
"""Settings that may differ on resuming, as they do not change what is learned. train.steps may be raised too, where
neither the learning rate nor the dosage depends on it."""
WRITERS = tuple(f"build.*.{name}" for name in ("concurrency", "timeout", "max_retries", "max_calls", "max_tokens"))
"""What may still differ of build.* where a refresh writes lessons during training."""
REMEDY = "choose another out=... or delete that folder"
SAME_REQUEST_SECONDS = 1.0
"""A scheduler signals the launcher and the workers, and the launcher the workers again: that is one request."""


class StopRequested(Exception):
    """Raised by `StopSignal.check` inside a rollout that need not be finished."""


class StopSignal:
    """`with StopSignal() as stop`: the first SIGTERM or SIGINT only sets a flag, a second one exits at once.

    Signals within a second of the first count as the same. torchrun hands the signal to its workers, kills them 30 s
    later and itself exits with 1: where an update takes longer, send the signal to the workers instead.
    """

    def __init__(self) -> None:
        self.number = 0
        self._first: float | None = None
        self._former: dict[int, Any] = {}

    def __enter__(self) -> "StopSignal":
        self._former = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def check(self, *_: Any) -> None:
        """StopRequested if this process has got a signal; a rollout calls it as its progress callback."""
        if self._first is not None:
            raise StopRequested

    def requested(self, ctx: Context) -> bool:
        """Whether any rank has got a signal; all ranks ask at the same place and get the same answer."""
        self.number = int(ctx.max([float(self.number)], "stop signal")[0])
        return self.number > 0

    @property
    def exit_code(self) -> int:
        return 128 + self.number

    def _note(self, number: int, _: Any) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first, self.number = now, number
            os.write(2, b"stopping: saving first; a second signal exits at once\n")
        elif now - self._first >= SAME_REQUEST_SECONDS:
            os._exit(128 + number)


def lock_run(folder: Path) -> None:
    """Hold `<folder>/.lock` until this process ends; ConfigError naming process and host if another one holds it.

    A lock of the operating system, which a killed process cannot leave behind. Where the file system has none, the
    process and host that the file names decide.
    """
    path = folder.resolve() / ".lock"
    if path in _HELD:
        return
    file = path.open("a+", encoding="utf-8")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        owner = _owner(file)
        file.close()
        raise _in_use(folder, owner) from None
    except OSError:
        owner = _owner(file)
        if owner and (owner.get("host") != socket.gethostname() or _is_alive(owner.get("pid", 0))):
            file.close()
            raise _in_use(folder, owner, f" (if it is not, delete {path})") from None
    _HELD[path] = file


def sign_lock(folder: Path, script: str) -> None:
    """Write into a lock that is held who holds it."""
    file = _HELD[folder.resolve() / ".lock"]
    file.seek(0)
    file.truncate()
    json.dump({"pid": os.getpid(), "host": socket.gethostname(), "script": script}, file)
    file.flush()


def unlock_run(folder: Path) -> None:
    """Let go of a lock, for a folder that turns out to be another run's."""
    file = _HELD.pop(folder.resolve() / ".lock", None)
    if file is not None:
        file.close()


_HELD: dict[Path, TextIO] = {}
"""Closing a locked file unlocks it, so these stay open for the life of the process."""


def claim(folder: Path, config: Any, script: str, resumable: bool) -> dict[str, tuple[Any, Any]]:
    """Make `folder` this process's own and write config.yaml; {key: (before, now)} where an interrupted run differs.

    A finished run, another script's, foreign files and a place that cannot be written are refused (ConfigError), and
    so is a run with other settings; if `resumable`, only with settings that matter, and not if `resume_changed` is set
    in them. A finished run whose train.steps is raised counts as interrupted.
    """
    _probe(folder)
    written, done = folder / "config.yaml", folder / "summary.json"
    content = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    if content and not written.exists():
        raise ConfigError(f"out={folder} holds files that are not of a run; {REMEDY}")
    lock_run(folder)
    changes: dict[str, tuple[Any, Any]] = {}
    try:
        if not content <= {"config.yaml", "run.json"}:  # else new, or a start that failed before it produced anything
            changes = _changes(folder, written, config, script, resumable)
            before, now = changes.get("train.steps", (0, 0))
            if done.exists() and not (resumable and now > before):
                raise ConfigError(f"out={folder} holds a finished run of these settings; {REMEDY}")
    except ConfigError:
        unlock_run(folder)
        raise
    sign_lock(folder, script)
    new = folder / ".config.yaml.new"
    try:
        dump(config, new)
        new.replace(written)
    finally:
        new.unlink(missing_ok=True)
    done.unlink(missing_ok=True)
    return changes


def _changes(folder: Path, written: Path, config: Any, script: str, resumable: bool) -> dict[str, tuple[Any, Any]]:
    owner = _script_of(folder)
    if owner != script:
        raise ConfigError(f"out={folder} holds a run of {owner or 'something else'}; {REMEDY}")
    changes = changed_settings(written, config)
    wrong = refused(changes, config) if resumable else {key: pair for key, pair in changes.items() if key != "out"}
    if wrong and not (resumable and getattr(config, "resume_changed", False)):
        more = ", set resume_changed=true to go on with the new ones" if resumable else ""
        raise ConfigError(f"out={folder} holds a run with other settings ({show_changes(wrong)}){more}; {REMEDY}")
    return changes


def changed_settings(saved: Path, config: Any) -> dict[str, tuple[Any, Any]]:
    """{key: (in the run's config.yaml, now)} of what differs. A key that the file lacks has its default there.

    ConfigError if the file does not fit the schema.
    """
    before = load(type(config), [str(saved)])
    old, new = (_flatten(redact_values(dataclasses.asdict(one))) for one in (before, config))
    return {key: (old.get(key), value) for key, value in new.items() if old.get(key) != value}


def refused(changes: dict[str, tuple[Any, Any]], config: Any) -> dict[str, tuple[Any, Any]]:
    """Those of the changes that would make it another experiment."""
    is_constant = getattr(getattr(config, "optim", None), "schedule", "constant") == "constant"
    is_constant &= not getattr(getattr(config, "dosage", None), "follows_training", False)
    is_refreshed = getattr(getattr(config, "refresh", None), "every", 0) > 0
    is_judged = getattr(getattr(config, "reward", None), "metric", "") == "judge"
    matters = {"build.*"} if is_refreshed else set()
    matters |= {"judge.*"} if is_judged else set()
    harmless = (*(one for one in HARMLESS if one not in matters), *(WRITERS if is_refreshed else ()))
    return {
        key: (old, new)
        for key, (old, new) in changes.items()
        if not any(fnmatch.fnmatchcase(key, pattern) for pattern in harmless)
        and not (key == "train.steps" and new > old and is_constant)
    }


def show_changes(changes: dict[str, tuple[Any, Any]]) -> str:
    return ", ".join(f"{key} {_show(old)} -> {_show(new)}" for key, (old, new) in changes.items())


def seed_everything(seed: int, rank: int) -> None:
    """Python's, numpy's and torch's own generators, differently on each rank.

    The loop draws from none of them (its seeds derive from run, step and row); an extension that does repeats itself.
    """
    random.seed(seed * 1_000_003 + rank)
    np.random.seed((seed * 1_000_003 + rank) % 2**32)
    torch.manual_seed(seed * 1_000_003 + rank)


def rng_state() -> dict[str, Any]:
    """The state of Python's, numpy's and torch's random numbers in this process, as JSON."""
    version, numbers, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state()
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "cuda": torch.cuda.get_rng_state().numpy().tobytes().hex() if torch.cuda.is_available() else None,
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Continue from `rng_state`; a GPU's part is for the current device, and passed over without one."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(_bytes(state["torch"]))
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(_bytes(state["cuda"]))


def folder_hash(path: str | Path) -> str:
    """sha256 over the names and contents of a folder's files (a HEK, say), hidden ones aside; "" for no path."""
    digest = hashlib.sha256()
    for file in sorted(Path(path).rglob("*") if str(path) else []):
        if file.is_file() and not file.name.startswith("."):
            digest.update(f"{file.relative_to(path)}\0{file_hash(file)}\0".encode())
    return digest.hexdigest() if str(path) else ""


def file_hash(path: str | Path) -> str:
    """sha256 of a file's content."""
    with Path(path).open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


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


def _script_of(folder: Path) -> str:
    try:
        return str(json.loads((folder / "run.json").read_text(encoding="utf-8"))["script"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def _owner(file: TextIO) -> dict[str, Any]:
    file.seek(0)
    try:
        return dict(json.loads(file.read()))
    except (ValueError, TypeError):
        return {}


def _in_use(folder: Path, owner: dict[str, Any], more: str = "") -> ConfigError:
    who = f"process {owner.get('pid', '?')} on {owner.get('host', '?')} ({owner.get('script', '?')})"
    return ConfigError(f"out={folder} is in use by {who}; wait for it, or choose another out=...{more}")


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return pid > 0


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def _show(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
