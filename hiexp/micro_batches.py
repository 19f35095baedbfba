"""Requests of many clients to one backend: those that come while a search runs are searched together next."""

import asyncio
import queue
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar, TypeVar

from hiexp.search_types import ScoredDocument, ScoredSearch

Results = list[list[ScoredDocument]]
T = TypeVar("T")


class Busy(Exception):
    """So much waits that no more is taken."""


@dataclass
class _Job:
    queries: list[str]
    top_k: int
    answer: "asyncio.Future[Results]"


class _Thread:
    """Calls functions one after the other; as a daemon, so that a search that never ends keeps no process alive."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="search", daemon=True).start()

    def _run(self) -> None:
        while call := self._calls.get():
            call()

    async def call(self, function: Callable[[], T]) -> T:
        """The result of a function that raises nothing."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def deliver(result: T) -> None:
            if not done.done():
                done.set_result(result)

        def work() -> None:
            result = function()
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(deliver, result)

        self._calls.put(work)
        return await done

    def end(self) -> None:
        self._calls.put(None)


class MicroBatcher:
    """One worker thread and a queue in front of it.

    An idle worker begins at once; only after a batch of several requests, which means that several clients are asking,
    it waits `gather` seconds for more of them. Queries with different numbers of passages are searched apart, as a
    ranking may depend on its length. When a batch fails, its requests are searched one by one, so that an error
    reaches the request that caused it and no other.
    """

    COUNTS: ClassVar[dict[str, str]] = {
        "waiting": "queries that wait",
        "batches": "searches so far",
        "batched": "queries searched so far, repetitions inside a batch once",
        "largest": "queries in the largest batch",
        "dropped": "requests that were given up before they were searched",
    }

    def __init__(self, backend: ScoredSearch, size: int, gather: float, max_waiting: int) -> None:
        """`size`: queries searched together; a request with more is searched alone."""
        self._backend, self._size, self._gather, self._max_waiting = backend, size, gather, max_waiting
        self._jobs: deque[_Job] = deque()  # those that wait
        self._taken: list[_Job] = []  # those that are searched now
        self._news = asyncio.Event()
        self.waiting = self.batches = self.batched = self.largest = self.dropped = 0

    async def search(self, queries: list[str], top_k: int) -> Results:
        """What the backend finds, in order; Busy if too much waits. Cancelling gives up what is not yet begun."""
        if self.waiting and self.waiting + len(queries) > self._max_waiting:
            raise Busy(f"{self.waiting} queries are waiting, {len(queries)} more are too many; try again later")
        job = _Job(queries, top_k, asyncio.get_running_loop().create_future())
        self._jobs.append(job)
        self.waiting += len(queries)
        self._news.set()
        return await job.answer

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The worker works in this block; what waits or is searched at its end is answered first."""
        thread = _Thread()
        worker = asyncio.create_task(self._work(thread))
        try:
            yield
            while any(not job.answer.done() for job in (*self._jobs, *self._taken)):
                await asyncio.sleep(0.01)
        finally:
            worker.cancel()
            thread.end()

    async def _work(self, thread: "_Thread") -> None:
        is_shared = False
        while True:
            await self._news.wait()
            if is_shared and self.waiting < self._size:
                await asyncio.sleep(self._gather)
            jobs = self._taken = self._take()
            is_shared = len(jobs) > 1
            if not jobs:
                continue
            answers = await thread.call(lambda jobs=jobs: self._search_jobs(jobs))
            for job, answer in zip(jobs, answers, strict=True):
                if job.answer.done():  # given up meanwhile
                    continue
                if isinstance(answer, Exception):
                    job.answer.set_exception(answer)
                else:
                    job.answer.set_result(answer)

    def _take(self) -> list[_Job]:
        """The next jobs, up to `size` queries, at least one job."""
        jobs, count = [], 0
        while self._jobs and (not jobs or count + len(self._jobs[0].queries) <= self._size):
            job = self._jobs.popleft()
            self.waiting -= len(job.queries)
            if job.answer.done():
                self.dropped += 1
                continue
            jobs.append(job)
            count += len(job.queries)
        if not self._jobs:
            self._news.clear()
        return jobs

    def _search_jobs(self, jobs: Sequence[_Job]) -> list[Results | Exception]:
        answers: dict[int, Results | Exception] = {}
        for top_k, same in groupby(sorted(jobs, key=lambda job: job.top_k), key=lambda job: job.top_k):
            together = list(same)
            queries = list(dict.fromkeys(query for job in together for query in job.queries))
            found = self._search(queries, top_k)
            for job in together:
                if not isinstance(found, Exception):
                    answers[id(job)] = [found[query] for query in job.queries]
                elif len(together) == 1:
                    answers[id(job)] = found
                else:
                    alone = self._search(job.queries, top_k)
                    is_error = isinstance(alone, Exception)
                    answers[id(job)] = alone if is_error else [alone[query] for query in job.queries]
        return [answers[id(job)] for job in jobs]

    def _search(self, queries: list[str], top_k: int) -> dict[str, list[ScoredDocument]] | Any:
        """Each query's passages, or the exception; in the worker thread."""
        self.batches, self.batched = self.batches + 1, self.batched + len(queries)
        self.largest = max(self.largest, len(queries))
        try:
            results = self._backend.search_scored(queries, top_k) if queries else []
            if len(results) != len(queries):
                raise RuntimeError(f"the backend gave {len(results)} results for {len(queries)} queries")
        except Exception as error:
            return error
        return dict(zip(queries, results, strict=True))
