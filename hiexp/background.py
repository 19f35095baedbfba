"""Work in batches beside the caller: what is ready goes out as one batch while the caller works on; one at a time."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

from hiexp.tracking import Timer

Item = TypeVar("Item")
Result = TypeVar("Result")


class Runner(Protocol):
    """Where a batch is worked on; any `concurrent.futures.Executor` will do.

    Of what `submit` returns, `done()` and `result()` are asked: a simulation can let them read and advance a clock.
    """

    def submit(self, call: Callable[[], Any], /) -> Any: ...


class Inline:
    """Works at once, in the caller's thread."""

    def submit(self, call: Callable[[], Any], /) -> Any:
        future: Future[Any] = Future()
        future.set_result(call())
        return future


@contextmanager
def one_thread(name: str) -> Iterator[Runner]:
    """A runner with one worker thread, which is gone after the block however it ends: running work is awaited."""
    with ThreadPoolExecutor(1, thread_name_prefix=name) as pool:
        yield pool


class Background(Generic[Item, Result]):
    """Items go in as they come, batches come out with what `work` made of them; at most one batch is under way."""

    def __init__(self, work: Callable[[list[Item]], Result], runner: Runner) -> None:
        self._work, self._runner = work, runner
        self._ready: list[Item] = []
        self._batch: list[Item] = []
        self._future: Any = None
        self.worked = self.waited = 0.0
        """seconds of work done, and seconds for which `advance` kept its caller"""

    @property
    def is_busy(self) -> bool:
        return self._future is not None

    def advance(self, items: list[Item], wait: bool) -> tuple[list[Item], Result] | None:
        """Take in `items`; give out the batch that is done, if one is. `wait` for it when there is nothing else to do.

        What the work raised is raised here.
        """
        self._ready += items
        with Timer() as timer:
            self._start()
            done = None
            if self._future is not None and (wait or self._future.done()):
                done, self._future = (self._batch, self._future.result()), None
                self._start()  # the next batch is under way while the caller deals with this one
        self.waited += timer.wall
        return done

    def _start(self) -> None:
        if self._ready and self._future is None:
            batch, self._ready = self._ready, []
            self._batch, self._future = batch, self._runner.submit(lambda: self._timed(batch))

    def _timed(self, batch: list[Item]) -> Result:
        with Timer() as timer:
            result = self._work(batch)
        self.worked += timer.wall
        return result
