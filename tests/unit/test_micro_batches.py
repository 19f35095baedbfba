"""Many clients, one worker.

Must fail when: requests get each other's answers; those that come during a search are searched one by one; an error
reaches others than its cause; a request that was given up is searched; what waits at the end is lost; too much taken.
"""

import asyncio
import threading
import time

import pytest

from hiexp.micro_batches import Busy, MicroBatcher
from hiexp.search_types import ScoredDocument, ScoredSearch
from hiexp.trajectory import Document


class Slow(ScoredSearch):
    """Passages that name query and top_k; a query with `bad` in it fails. Can be held by clearing `go`."""

    def __init__(self):
        self.batches, self.go = [], threading.Event()
        self.go.set()

    def search_scored(self, queries, top_k):
        self.batches.append((list(queries), top_k))
        assert self.go.wait(10)
        if bad := [query for query in queries if "bad" in query]:
            raise ValueError(f"cannot search {bad[0]}")
        return [
            [ScoredDocument(f"{query}/{top_k}/{i}", 1.0, Document("", query)) for i in range(top_k)]
            for query in queries
        ]


def play(scene, backend=None, size=8, gather=0.0, max_waiting=100):
    backend = backend or Slow()

    async def run():
        batcher = MicroBatcher(backend, size, gather, max_waiting)
        async with batcher.running():
            return await scene(batcher, backend)

    return asyncio.run(asyncio.wait_for(run(), 20))


def ids(results):
    return [[one.id for one in row] for row in results]


async def held(batcher, backend):
    """The worker busy with a first request."""
    backend.go.clear()
    first = asyncio.create_task(batcher.search(["first"], 1))
    while not backend.batches:
        await asyncio.sleep(0.001)
    return first


def test_what_comes_during_a_search_is_searched_together():
    async def scene(batcher, backend):
        first = await held(batcher, backend)
        tasks = [asyncio.create_task(batcher.search([f"q{i}", "same"], 2)) for i in range(3)]
        await asyncio.sleep(0.01)
        backend.go.set()
        answers = await asyncio.gather(first, *tasks)
        assert ids(answers[0]) == [["first/1/0"]]
        for i, answer in enumerate(answers[1:]):
            assert ids(answer) == [[f"q{i}/2/0", f"q{i}/2/1"], ["same/2/0", "same/2/1"]]
        assert backend.batches == [(["first"], 1), (["q0", "same", "q1", "q2"], 2)]  # a repetition is searched once
        assert (batcher.batches, batcher.batched, batcher.largest, batcher.waiting) == (2, 5, 4, 0)

    play(scene)


def test_numbers_of_passages_are_searched_apart_and_batches_are_bounded():
    async def scene(batcher, backend):
        first = await held(batcher, backend)
        asked = [(["a", "b"], 1), (["c"], 2), (["d"], 1), (["e", "f"], 1), ([f"l{i}" for i in range(9)], 1)]
        tasks = [asyncio.create_task(batcher.search(*one)) for one in asked]
        await asyncio.sleep(0.01)
        backend.go.set()
        answers = await asyncio.gather(first, *tasks)
        for (queries, top_k), answer in zip(asked, answers[1:], strict=True):
            assert ids(answer) == [[f"{query}/{top_k}/{i}" for i in range(top_k)] for query in queries]
        sizes = [len(queries) for queries, _ in backend.batches[1:]]
        assert sizes == [3, 1, 2, 9]  # at most 4 together, except for a request that is larger by itself

    play(scene, size=4)


def test_an_error_reaches_its_cause_alone():
    async def scene(batcher, backend):
        first = await held(batcher, backend)
        tasks = [asyncio.create_task(batcher.search([query], 1)) for query in ("a", "bad", "b")]
        await asyncio.sleep(0.01)
        backend.go.set()
        answers = await asyncio.gather(first, *tasks, return_exceptions=True)
        assert ids(answers[1]) == [["a/1/0"]] and ids(answers[3]) == [["b/1/0"]]
        assert isinstance(answers[2], ValueError) and "cannot search bad" in str(answers[2])

    play(scene)


def test_a_wrong_count_of_the_backend_is_an_error():
    class Short(Slow):
        def search_scored(self, queries, top_k):
            return super().search_scored(queries, top_k)[:-1]

    async def scene(batcher, backend):
        with pytest.raises(RuntimeError, match="1 results for 2 queries"):
            await batcher.search(["a", "b"], 1)

    play(scene, Short())


def test_what_was_given_up_is_not_searched():
    async def scene(batcher, backend):
        first = await held(batcher, backend)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await batcher.search(["late"], 1)
        backend.go.set()
        await first
        assert ids(await batcher.search(["next"], 1)) == [["next/1/0"]]
        assert (["late"], 1) not in backend.batches and batcher.dropped == 1 and batcher.waiting == 0

    play(scene)


def test_too_much_is_refused_and_later_taken_again():
    async def scene(batcher, backend):
        first = await held(batcher, backend)
        waiting = [asyncio.create_task(batcher.search([f"q{i}"], 1)) for i in range(3)]
        await asyncio.sleep(0.01)
        with pytest.raises(Busy, match="3 queries are waiting"):
            await batcher.search(["one more"], 1)
        backend.go.set()
        await asyncio.gather(first, *waiting)
        assert ids(await batcher.search(["one more"], 1)) == [["one more/1/0"]]

    play(scene, max_waiting=3)


class Delayed(Slow):
    """Every search takes longer than the pause in which an ending batcher looks whether it is done."""

    def search_scored(self, queries, top_k):
        time.sleep(0.05)
        return super().search_scored(queries, top_k)


def test_what_waits_or_is_searched_at_the_end_is_answered():
    async def run():
        backend = Delayed()
        batcher = MicroBatcher(backend, 1, 0.0, 100)
        async with batcher.running():
            first = await held(batcher, backend)
            tasks = [asyncio.create_task(batcher.search([f"q{i}"], 1)) for i in range(5)]
            await asyncio.sleep(0.01)
            threading.Timer(0.05, backend.go.set).start()
        return await asyncio.gather(first, *tasks)

    assert [row[0][0].id for row in asyncio.run(asyncio.wait_for(run(), 20))] == [
        "first/1/0",
        *(f"q{i}/1/0" for i in range(5)),
    ]


def test_a_single_client_never_waits_for_others():
    async def scene(batcher, backend):
        began = time.perf_counter()
        for i in range(20):
            await batcher.search([f"q{i}"], 1)
        assert time.perf_counter() - began < 5.0  # the first of 20 pauses would not be over yet

    play(scene, gather=5.0)


def test_several_clients_are_waited_for():
    async def scene(batcher, backend):
        for _ in range(2):  # the first round shows that clients come together
            await asyncio.gather(*(batcher.search([f"q{i}"], 1) for i in range(4)))

        async def late(i):
            await asyncio.sleep(0.02 * i)
            return await batcher.search([f"late{i}"], 1)

        before = len(backend.batches)
        await asyncio.gather(*(late(i) for i in range(4)))
        assert len(backend.batches) == before + 1

    play(scene, gather=0.2)
