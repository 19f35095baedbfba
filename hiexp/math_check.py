r"""Whether an answer to a problem is right, by math-verify, with a time limit that holds.

The package compares symbolically, and some answers (a tower of powers) keep it busy for ever inside one multiplication,
where neither a signal handler nor a thread can stop it. So it runs in worker processes (math_worker.py) that talk over
pipes: one that takes too long is killed and replaced, its answer counts as wrong and as "timeout", and the others go
on. Safe from any thread, after a fork, and in a process of torchrun: workers share nothing with the caller, import no
torch and no __main__, ignore Ctrl-C, and end with the process that started them.

Besides, every verdict holds the opinion of a second, simple grader (notation.py) on the same answer, so that the gaps
of either can be counted. Known ones of math-verify 0.9.0: (1,2) as a gold is an open interval and no pair, and 2516_8
is equal to 2516.
"""

import atexit
import contextlib
import importlib.util
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hiexp.config import ConfigError
from hiexp.notation import equals, last_boxed

TIMEOUT = 10.0
"""seconds for one answer and all its golds"""
START_TIMEOUT = 120.0
"""seconds for a worker to import its packages"""
LONGEST = 4000
"""characters of an answer; a longer one is no answer, and wrong"""
MOST_KEPT = 1 << 16
"""verdicts that are kept, so that a benchmark's 32 samples with one answer are compared once"""
WORKER = Path(__file__).with_name("math_worker.py")
INSTALL = "math-verify is not installed; pip install -r requirements-eval.txt"


@dataclass(frozen=True)
class Verdict:
    """What was found about one answer."""

    correct: bool
    reason: str = ""
    """why nothing was compared: no answer, too long, unparsable, timeout, or crashed; empty = it was"""
    second: bool = False
    """what the second grader says; logged, never the score"""


def check_all(
    pairs: Sequence[tuple[str, Sequence[str]]], timeout: float = TIMEOUT, workers: int | None = None
) -> list[Verdict]:
    r"""A verdict for each (prediction, golds), in order; equal pairs are compared once.

    A prediction is a whole response, whose last complete `\boxed{}` counts, or without any box an answer itself; a box
    that was cut off gives no answer. Golds may be numbers, LaTeX with or without its delimiters, several answers with
    commas between them, or option letters. `workers` compare at once (None: one per core of this process's share).
    Takes at most timeout * answers / workers, and starts workers that stay for the next call. ConfigError where
    math-verify is missing.
    """
    if any(isinstance(golds, str) for _, golds in pairs):
        raise ValueError("golds must be a sequence of texts, not one text")
    answers = [(_answer_of(prediction), tuple(str(gold) for gold in golds)) for prediction, golds in pairs]
    todo = [pair for pair in dict.fromkeys(answers) if not _refused(pair[0])]
    compared = shared_pool().check(todo, timeout, workers or default_workers()) if todo else {}
    verdicts = []
    for answer, golds in answers:
        correct, reason = compared.get((answer, golds), (False, _refused(answer)))
        verdicts.append(Verdict(correct, reason, bool(answer) and equals(answer, golds)))
    return verdicts


def math_equal(prediction: str, golds: Sequence[str]) -> bool:
    """Whether a response or an answer equals one of the golds; False too where that cannot be found out in time."""
    return check_all([(prediction, golds)], workers=1)[0].correct


def count_reasons(verdicts: Sequence[Verdict]) -> dict[str, int]:
    """How many are correct, how many were not compared by reason, and on how many the second grader disagrees."""
    counts = Counter(verdict.reason for verdict in verdicts if verdict.reason)
    disagreed = sum(verdict.correct != verdict.second for verdict in verdicts)
    return {"correct": sum(v.correct for v in verdicts), "disagreed": disagreed, **dict(sorted(counts.items()))}


def require() -> None:
    """ConfigError where math-verify is missing: for scripts, before they begin."""
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError(INSTALL)


def default_workers() -> int:
    """Cores of this process, shared with the others that torchrun started on the machine; 8 at most."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(8, max(1, cores // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))))


Pair = tuple[str, tuple[str, ...]]
Found = tuple[bool, str]
"""correct, reason"""


class MathPool:
    """Worker processes that grow to as many as were ever asked for, each lent to one call at a time."""

    def __init__(self) -> None:
        require()
        self._free: list[_Worker] = []
        self._lent: set[_Worker] = set()
        self._size = self._waiting = 0
        self._is_closed = False
        self._changed = threading.Condition()
        self._kept: dict[tuple[Pair, float], Found] = {}

    @property
    def pids(self) -> list[int]:
        """Of the workers that there are."""
        with self._changed:
            return sorted(worker.process.pid for worker in (*self._free, *self._lent))

    def check(self, pairs: Sequence[Pair], timeout: float, workers: int) -> dict[Pair, Found]:
        """What was found about each pair. Whatever is raised, no worker is left busy."""
        with self._changed:
            self._size = max(self._size, workers)
            found = {pair: self._kept[pair, timeout] for pair in pairs if (pair, timeout) in self._kept}
        todo = [pair for pair in pairs if pair not in found][::-1]
        busy: set[_Worker] = set()
        with selectors.DefaultSelector() as selector:
            try:
                while todo or busy:
                    while todo and len(busy) < workers and (worker := self._take(wait=not busy)):
                        busy.add(worker)
                        selector.register(worker.fileno(), selectors.EVENT_READ, worker)
                        worker.ask(todo.pop(), timeout)
                    now = time.monotonic()
                    selector.select(max(0.0, min(worker.deadline for worker in busy) - now))
                    for worker in list(busy):
                        if (outcome := worker.poll()) is None:
                            continue
                        found[worker.pair] = outcome
                        selector.unregister(worker.fileno())
                        busy.discard(worker)
                        self._give_back(worker)
            finally:
                for worker in busy:  # an exception, such as Ctrl-C: their replies will never be read
                    worker.kill()
                    selector.unregister(worker.fileno())
                    self._give_back(worker)
        with self._changed:
            self._kept |= {(pair, timeout): outcome for pair, outcome in found.items()}
            while len(self._kept) > MOST_KEPT:
                del self._kept[next(iter(self._kept))]
        return found

    def close(self) -> None:
        """End all workers; those of calls in progress too."""
        with self._changed:
            self._is_closed = True
            for worker in self._lent:
                worker.kill()
            while self._free:
                self._free.pop().dispose()
            self._changed.notify_all()

    def _take(self, wait: bool) -> "_Worker | None":
        """A worker that nobody uses, or a new one; without `wait` none if another thread has been waiting for one."""
        with self._changed:
            if not wait and (self._waiting or not (self._free or len(self._lent) < self._size)):
                return None
            self._waiting += 1
            try:
                self._changed.wait_for(lambda: self._free or len(self._lent) < self._size or self._is_closed)
                if self._is_closed:
                    raise RuntimeError("the pool of math-verify is closed")
                worker = self._free.pop() if self._free else _Worker()
            finally:
                self._waiting -= 1
            self._lent.add(worker)
            return worker

    def _give_back(self, worker: "_Worker") -> None:
        """A dead one is replaced at once: the next call then finds a worker that has begun to start."""
        with self._changed:
            self._lent.discard(worker)
            if self._is_closed or not worker.is_alive:
                worker.dispose()
            if not self._is_closed:
                self._free.append(worker if worker.is_alive else _Worker())
            self._changed.notify()


class _Worker:
    """One process, and the pair it is comparing."""

    def __init__(self) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        assert self.process.stdin and self.process.stdout
        self._input, self._output = self.process.stdin, self.process.stdout
        os.set_blocking(self._output.fileno(), False)
        self.pair: Pair = ("", ())
        self.is_alive = True
        self._is_ready, self._rest, self._number, self._timeout = False, b"", 0, TIMEOUT
        self.deadline = 0.0

    def fileno(self) -> int:
        return self._output.fileno()

    def ask(self, pair: Pair, timeout: float) -> None:
        self.pair, self._timeout, self._number = pair, timeout, self._number + 1
        self.deadline = time.monotonic() + (timeout if self._is_ready else START_TIMEOUT)
        item = {"id": self._number, "seconds": timeout, "prediction": pair[0], "golds": pair[1]}
        with contextlib.suppress(OSError):  # it has died, which poll will see
            self._input.write(json.dumps(item).encode() + b"\n")
            self._input.flush()

    def poll(self) -> Found | None:
        """The outcome, or None while there is time left."""
        for reply in self._replies():
            if "failed" in reply:
                self.kill()
                raise ConfigError(f"math-verify does not run ({reply['failed']}); {INSTALL.split('; ')[1]}")
            if "ready" in reply:
                self._is_ready, self.deadline = True, time.monotonic() + self._timeout
            elif reply["id"] == self._number:
                return reply["correct"], reply["reason"]
        if not self.is_alive:
            if not self._is_ready:
                raise ConfigError(f"a worker of math-verify ended at its start: exit status {self.process.returncode}")
            return False, "timeout" if self.process.returncode == -signal.SIGALRM else "crashed"
        if time.monotonic() < self.deadline:
            return None
        self.kill()
        if not self._is_ready:
            raise ConfigError(f"a worker of math-verify was not up within {START_TIMEOUT:.0f} s; free some cores")
        return False, "timeout"

    def kill(self) -> None:
        self.is_alive = False
        self.process.kill()
        self.process.wait()

    def dispose(self) -> None:
        """End it and close its pipes."""
        self.kill()
        with contextlib.suppress(OSError):
            self._input.close()
        self._output.close()

    def _replies(self) -> list[dict[str, Any]]:
        try:
            while data := os.read(self.fileno(), 1 << 16):
                self._rest += data
        except BlockingIOError:
            pass
        else:
            self.kill()  # the end of its output is the end of it
        *lines, self._rest = self._rest.split(b"\n")
        return [json.loads(line) for line in lines]


_shared: MathPool | None = None
_lock = threading.Lock()


def shared_pool() -> MathPool:
    """The pool of this process."""
    global _shared
    with _lock:
        if _shared is None:
            _shared = MathPool()
            atexit.register(_shared.close)
        return _shared


def _forget() -> None:
    """In a forked child: the workers are the parent's."""
    global _shared, _lock
    if _shared is not None:
        atexit.unregister(_shared.close)
    _shared, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)


def _answer_of(prediction: str) -> str:
    boxed = last_boxed(prediction or "", keep_text=True)
    if boxed is None:
        return "" if "\\boxed" in (prediction or "") else (prediction or "").strip()
    return boxed


def _refused(answer: str) -> str:
    """Why an answer is not even compared."""
    if not answer:
        return "no answer"
    return "too long" if len(answer) > LONGEST else ""
