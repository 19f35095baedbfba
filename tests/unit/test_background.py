"""Work beside the caller. Must fail when: two batches are under way at once; a batch waits for the next call although
the runner is free; an exception is lost; a thread outlives the block."""

import threading
import time

import pytest

from hiexp.background import Background, Inline, one_thread


def search_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("search")]


class Held:
    """A runner whose work is done when the test says so."""

    def __init__(self):
        self.calls, self.ended = [], 0

    def submit(self, call):
        self.calls.append(call)
        return HeldFuture(self, len(self.calls))


class HeldFuture:
    def __init__(self, runner, number):
        self.runner, self.number = runner, number

    def done(self):
        return self.runner.ended >= self.number

    def result(self):
        self.runner.ended = max(self.runner.ended, self.number)
        return self.runner.calls[self.number - 1]()


def test_what_comes_meanwhile_is_the_next_batch():
    runner = Held()
    work = Background(lambda items: [2 * item for item in items], runner)
    assert work.advance([], wait=True) is None and not work.is_busy
    assert work.advance([1], wait=False) is None
    assert work.advance([2], wait=False) is None and work.advance([3, 4], wait=False) is None
    assert work.is_busy and len(runner.calls) == 1, "one batch at a time"
    runner.ended = 1
    assert work.advance([], wait=False) == ([1], [2])
    assert len(runner.calls) == 2, "the next is under way at once"
    assert work.advance([5], wait=True) == ([2, 3, 4], [4, 6, 8])
    assert work.advance([], wait=True) == ([5], [10])
    assert work.advance([], wait=True) is None and not work.is_busy


def test_inline_is_done_at_once_in_the_callers_thread():
    seen = []
    work = Background(lambda items: seen.append(threading.current_thread()) or items, Inline())
    assert work.advance(["a", "b"], wait=False) == (["a", "b"], ["a", "b"])
    assert seen == [threading.current_thread()]
    with pytest.raises(ZeroDivisionError):
        Background(lambda items: 1 / 0, Inline()).advance([1], wait=False)


def test_seconds_of_work_and_of_waiting():
    with one_thread("search") as runner:
        work = Background(lambda items: time.sleep(0.05), runner)
        work.advance([1], wait=False)
        time.sleep(0.08)
        work.advance([2], wait=False)
        waited = work.waited
        assert waited < 0.04 < work.worked
        work.advance([], wait=True)
    assert work.waited - waited > 0.02 and 0.1 <= work.worked < 1


@pytest.mark.parametrize("error", [OSError("the server is gone"), SystemExit(3), KeyboardInterrupt()])
def test_what_the_work_raises_is_raised_and_no_thread_stays(error):
    def work(items):
        raise error

    with pytest.raises(type(error)) as caught, one_thread("search") as runner:
        Background(work, runner).advance([1], wait=True)
    assert caught.value is error and not search_threads()


def test_leaving_waits_for_what_is_under_way():
    ended = []

    def work(items):
        time.sleep(0.1)
        ended.append(True)

    with pytest.raises(KeyboardInterrupt), one_thread("search") as runner:
        Background(work, runner).advance([1], wait=False)
        assert search_threads()
        raise KeyboardInterrupt
    assert ended and not search_threads()
