"""Rows may finish in any order, and searches take any time: every trajectory is what the synchronous loop makes of it.

Must fail when: seeds depend on the order of submission; a result reaches another row; a row is submitted twice or
never again; a batch under way keeps other rows from the engine; the tokenizer is used in the search's thread.
"""

import threading
import time
from random import Random
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import ScriptedEngine, ToySearch, build_byte_tokenizer

from bench.rollout import Clock, VirtualRunner, VirtualSearch, makespan
from hiexp.data import Sample
from hiexp.encoder import HashEncoder
from hiexp.hek import HEK, Experience, HEKConfig
from hiexp.protocols import PROTOCOLS
from hiexp.rollout import RolloutConfig, run_rollouts
from hiexp.trajectory import Document, Status

TOKENIZER = build_byte_tokenizer()
TURNS = [
    *(f"<search> {word} </search>" for word in ("alpha", "beta", "alpha beta", "gone")),
    *("<answer> Oslo </answer>", "I do not know", "<search>  </search>"),
]
SAMPLES = [Sample(f"s{i}", f"question {i}", ("Oslo",)) for i in range(3)]
KEYS = [(i, member) for i in range(len(SAMPLES)) for member in range(2)]
HEK_ENTRIES = [
    Experience("E1-1", 1, "mixed", "alpha", "look at beta", qa_groups=(("other", "q"),)),
    Experience("E1-2", 1, "mixed", "beta", "look at alpha", qa_groups=(("s1", "q"),)),
    Experience("E2-1", 2, "mixed", "question", "plan", qa_groups=(("other", "q"), ("more", "q"))),
]
STORE = HEK(HEK_ENTRIES, HashEncoder(64), HEKConfig(case_threshold=0.5))
DOCUMENTS = {"gone": [], "beta": [Document("b", "of beta"), Document("b2", "more")]}
CHANGES = {"group_size": 2, "max_turns": 4, "max_searches": 2, "protocol": "compact"}


class Polled:
    """A runner whose future is done after so many looks at it, or when it is waited for."""

    def __init__(self, looks):
        self.looks = iter(looks)

    def submit(self, call):
        result, left = call(), [next(self.looks, 0)]

        def done():
            left[0] -= 1
            return left[0] < 0

        return SimpleNamespace(done=done, result=lambda: result)


def play(script, pick=None, runner=None, search=None, samples=SAMPLES, first=0, **changes):
    played: dict = {}

    def turn(key, prompt_ids):
        played[key] = played.get(key, -1) + 1
        return script[key][played[key]]

    engine = ScriptedEngine(TOKENIZER, turn, pick=pick)
    search = search or ToySearch(DOCUMENTS)
    cfg = RolloutConfig(**(CHANGES | changes))
    protocol = PROTOCOLS[cfg.protocol]
    made = run_rollouts(engine, TOKENIZER, protocol, search, STORE, samples, cfg, 5, first=first, search_runner=runner)
    asked: dict = {}
    for key, *request in engine.requests:
        asked.setdefault(key, []).append(request)
    assert not engine.pending and set(engine.forgotten) == set(script)
    return [trajectory.to_json() for trajectory in made], asked


scripts = st.lists(st.lists(st.sampled_from(TURNS), min_size=4, max_size=4), min_size=6, max_size=6).map(
    lambda turns: dict(zip(KEYS, turns, strict=True))
)


@settings(deadline=None, max_examples=150)
@given(scripts, st.data(), st.lists(st.integers(0, 4), max_size=12), st.sampled_from([2000, 60, 25]))
def test_any_order_of_rows_and_searches_gives_the_same_trajectories(script, data, looks, budget):
    def pick(pending):
        chosen = data.draw(st.lists(st.sampled_from(pending), unique=True)) if pending else []
        return data.draw(st.permutations(chosen))

    def patient(pending):
        """Now and then nothing finishes, but not for ever."""
        idle[0] = 0 if (chosen := pick(pending)) else idle[0] + 1
        return chosen if idle[0] < 3 else pending

    idle = [0]
    whole, asked = play(script, max_response_tokens=budget)
    streamed, asked_too = play(script, pick=patient, runner=Polled(looks), max_response_tokens=budget)
    assert streamed == whole
    assert asked_too == asked, "every row sends the same prompts with the same budgets and seeds"


@settings(deadline=None, max_examples=15)
@given(scripts, st.integers(0, 10**6))
def test_the_same_with_a_real_thread(script, seed):
    random = Random(seed)  # not hypothesis's: how often it is asked depends on the threads

    class SlowSearch(ToySearch):
        def search(self, queries, top_k):
            time.sleep(random.choice([0, 0, 0.002]))
            return super().search(queries, top_k)

    whole, asked = play(script)
    streamed, asked_too = play(
        script, lambda pending: random.sample(pending, min(1, len(pending))), search=SlowSearch(DOCUMENTS)
    )
    assert (streamed, asked_too) == (whole, asked)


@settings(deadline=None, max_examples=40)
@given(scripts, st.integers(1, 2))
def test_ranks_that_share_the_questions_ask_for_what_one_rank_asks_for(script, cut):
    """`first` is where a rank's questions begin: keys, and with them seeds, are those of the whole step."""
    whole, asked = play(script)
    parts = [(SAMPLES[:cut], 0), (SAMPLES[cut:], cut)]
    own = [{key: script[key] for key in KEYS if lo <= key[0] < lo + len(part)} for part, lo in parts]
    halves = [play(mine, samples=part, first=lo) for mine, (part, lo) in zip(own, parts, strict=True)]
    assert halves[0][0] + halves[1][0] == whole
    assert halves[0][1] | halves[1][1] == asked
    shifted = play({(i + 7, m): turns for (i, m), turns in script.items()}, first=7)
    seeds = [{request[2].seed for requests in rows.values() for request in requests} for rows in (asked, shifted[1])]
    assert not seeds[0] & seeds[1], "other positions, other draws"


def test_no_row_waits_for_a_search_of_another():
    """A token takes 1 s. Row 0 writes 1, searches 5 s, writes 1; row 1 writes 6: 7 s by hand, and 12 in lock-step.

    The same when row 1 writes 1 that asks for nothing, and 5 after the notice.
    """
    steps = []

    def pick(pending):
        steps.append((clock.now, list(pending)))
        clock.now += 1 if pending else 0
        for key in pending:
            left[key][0] -= 1
        return [key for key in pending if left[key][0] == 0 and (left[key].pop(0), True)]

    searching, answer = ["<search> alpha </search>", "<answer> a </answer>"], "<answer> b </answer>"
    for own, lengths, overlapped, seconds in (
        ([answer], [6], True, 7),
        ([answer], [6], False, 12),
        (["hm", answer], [1, 5], True, 7),
    ):
        clock, steps[:], left = Clock(), [], {(0, 0): [1, 1], (1, 0): lengths}
        search = VirtualSearch(lambda query: 5.0)
        kind, script = pick if overlapped else wait_for_all(pick), {(0, 0): searching, (1, 0): own}
        play(script, kind, VirtualRunner(clock, search), search, SAMPLES[:2], group_size=1)
        assert clock.now == seconds
        assert ((6.0, [(0, 0)]) in steps) is overlapped, "ready at 6 s, submitted at 6 s"


def wait_for_all(pick):
    def until_none_is_left(pending):
        left = list(pending)
        while left:
            gone = pick(left)
            left = [key for key in left if key not in gone]
        return pending

    return until_none_is_left


def test_the_benchs_makespans_are_those_computed_by_hand(monkeypatch):
    """Two rows of 2 turns, 10 and 1 tokens, then 1 and 10; searches of 3 and 0.1 s; steps of 1 s whatever runs."""
    for name, value in (("STEP_SECONDS", 1.0), ("ROW_SECONDS", 0.0), ("JOIN_SECONDS", 0.0)):
        monkeypatch.setattr(f"bench.rollout.{name}", value)
    plan = {(0, 0): [10, 1], (0, 1): [1, 10]}
    latency = {"(0, 0) 1": 0.1, "(0, 1) 1": 3.0}.__getitem__
    assert makespan(plan, latency, lock_step=True) == pytest.approx(10 + 3 + 10)
    # row 1 searches from 1 to 4 and writes until 14; row 0 writes until 10, its result is seen at 11, writes until 12
    assert makespan(plan, latency, lock_step=False) == pytest.approx(14)


def test_the_tokenizer_stays_in_the_callers_thread_and_the_search_in_its_own():
    seen: dict[str, set[str]] = {"tokenizer": set(), "search": set(), "encoder": set()}

    def note(kind):
        seen[kind].add(threading.current_thread().name)

    class Tokenizer(type(TOKENIZER)):
        def __call__(self, *args, **kwargs):
            note("tokenizer")
            return super().__call__(*args, **kwargs)

        def decode(self, *args, **kwargs):
            note("tokenizer")
            return super().decode(*args, **kwargs)

    tokenizer = build_byte_tokenizer()
    tokenizer.__class__ = Tokenizer
    store = HEK(HEK_ENTRIES, HashEncoder(64), HEKConfig(case_threshold=0.5))
    encode = store.encoder.encode
    store.encoder.encode = lambda *args: note("encoder") or encode(*args)
    search = SimpleNamespace(search=lambda queries, _: note("search") or [[Document("t", q)] for q in queries])
    script = {key: [TURNS[0], TURNS[2], TURNS[4]] for key in KEYS}
    played: dict = {}

    def turn(key, prompt_ids):
        played[key] = played.get(key, -1) + 1
        return script[key][played[key]]

    engine = ScriptedEngine(tokenizer, turn, pick=lambda pending: pending[:1])
    cfg = RolloutConfig(**CHANGES | {"strategy_level": 0})
    made = run_rollouts(engine, tokenizer, PROTOCOLS["compact"], search, store, SAMPLES, cfg, 5)
    assert all(trajectory.status is Status.ANSWERED for trajectory in made)
    main = {threading.current_thread().name}
    assert seen["tokenizer"] == main and seen["search"] == seen["encoder"] and not seen["search"] & main


def search_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("search")]


class Failing:
    def __init__(self, error, delay=0.0):
        self.error, self.delay = error, delay

    def search(self, queries, top_k):
        time.sleep(self.delay)
        raise self.error


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("error", [OSError("refused"), KeyboardInterrupt()])
def test_a_failed_search_is_raised_with_its_queries_and_no_thread_stays(streams, error):
    script = {key: [f"<search> number {key[0]} {key[1]} </search>"] for key in KEYS}
    with pytest.raises(type(error)) as caught:
        play(script, (lambda pending: pending) if streams else None, search=Failing(error))
    assert caught.value is error
    (note,) = error.__notes__
    assert note == "raised by the search for 'number 0 0', 'number 0 1', 'number 1 0' and 3 more"
    error.__notes__.clear()
    assert not search_threads()


def test_an_interrupt_in_the_engine_leaves_no_thread_and_no_pending_row():
    def pick(pending):
        if len(pending) < len(KEYS):  # the search is under way
            assert search_threads()
            raise KeyboardInterrupt
        return pending[:1]

    class Slow(ToySearch):
        def search(self, queries, top_k):
            time.sleep(0.05)
            return super().search(queries, top_k)

    engine = ScriptedEngine(TOKENIZER, lambda key, prompt: TURNS[0], pick=pick)
    cfg = RolloutConfig(**CHANGES)
    with pytest.raises(KeyboardInterrupt):
        run_rollouts(engine, TOKENIZER, PROTOCOLS["compact"], Slow(), STORE, SAMPLES, cfg, 5)
    assert not search_threads() and not engine.pending and set(engine.forgotten) == set(KEYS)


def test_a_streaming_engine_that_loses_a_row_is_an_error():
    engine = ScriptedEngine(TOKENIZER, lambda key, prompt: TURNS[4], pick=list)
    submit = engine.submit
    engine.submit = lambda key, *rest: None if key == (1, 0) else submit(key, *rest)
    with pytest.raises(RuntimeError, match="1 trajectories are running"):
        run_rollouts(engine, TOKENIZER, PROTOCOLS["compact"], ToySearch(), STORE, SAMPLES, RolloutConfig(**CHANGES), 5)


@pytest.mark.parametrize("streams", [True, False])
def test_seconds_of_searching_are_added_to_the_metrics(streams):
    class Slow(ToySearch):
        def search(self, queries, top_k):
            time.sleep(0.05)
            return super().search(queries, top_k)

    engine = ScriptedEngine(TOKENIZER, lambda key, prompt: TURNS[0], pick=list if streams else None)
    metrics = {"time/search": 1.0}
    cfg = RolloutConfig(**CHANGES | {"max_turns": 2, "group_size": 1})
    run_rollouts(engine, TOKENIZER, PROTOCOLS["compact"], Slow(), STORE, SAMPLES[:1], cfg, 5, metrics=metrics)
    assert set(metrics) == {"time/search", "time/search_wait", "search/neutralised"}
    assert 1.05 <= metrics["time/search"] < 1.5 and 0.05 <= metrics["time/search_wait"] < 0.5
