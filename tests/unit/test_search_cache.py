"""Repeated queries reach the backend once.

Must fail when: a repetition is searched; another top_k or spelling is taken for the same; a failure or a wrong number
of answers is remembered; the cache grows beyond its size; threads get each other's answers; the hit rate is wrong.
"""

import threading

import pytest
from support import ToySearch

from hiexp.data import Sample
from hiexp.hek import HEK
from hiexp.protocols import PROTOCOLS
from hiexp.rollout import RolloutConfig, run_rollouts
from hiexp.search_cache import CachedSearch, add_counters, counters, remembering
from hiexp.search_types import SearchConfig
from hiexp.trajectory import Document


def test_repetitions_are_answered_from_memory_in_order():
    toy = ToySearch()
    cached = CachedSearch(toy, 10)
    plain = ToySearch()
    for batch in (["a", "b", "a"], ["b", "c"], ["a"], []):
        assert cached.search(batch, 2) == plain.search(batch, 2)
    assert toy.batches == [["a", "b"], ["c"]]
    assert cached.counters() == {"search/queries": 6, "search/repeated": 3, "search/empty": 0}


def test_another_number_or_spelling_is_another_query():
    toy = ToySearch()
    cached = CachedSearch(toy, 10)
    for query, top_k in (("a", 1), ("a", 2), ("A", 1), ("a ", 1), ("a", 1)):
        cached.search([query], top_k)
    assert [batch[0] for batch in toy.batches] == ["a", "a", "A", "a "]


def test_the_least_recently_used_goes_first():
    toy = ToySearch()
    cached = CachedSearch(toy, 2)
    for query in ("a", "b", "a", "c", "a", "b"):
        cached.search([query], 1)
    assert [batch[0] for batch in toy.batches] == ["a", "b", "c", "b"]
    assert len(cached._found) == 2
    cached.search(list("defgh"), 1)  # a batch larger than the cache
    assert len(cached._found) == 2


def test_failures_and_wrong_counts_are_not_remembered():
    class Failing(ToySearch):
        def search(self, queries, top_k):
            found = super().search(queries, top_k)
            if len(self.batches) == 1:
                raise OSError("down")
            return found[:-1] if len(self.batches) == 2 else found

    cached = CachedSearch(Failing(), 10)
    with pytest.raises(OSError, match="down"):
        cached.search(["a"], 1)
    with pytest.raises(ValueError, match="1 results for 2 queries"):
        cached.search(["a", "b"], 1)
    assert [d.title for (d,) in cached.search(["a", "b"], 1)] == ["About a", "About b"]


def test_the_caller_may_change_its_answer():
    cached = CachedSearch(ToySearch(), 10)
    cached.search(["a"], 1)[0].clear()
    assert len(cached.search(["a"], 1)[0]) == 1


def test_many_threads_get_their_own_answers():
    cached, wrong = CachedSearch(ToySearch(), 5), []

    def ask(seed):
        for i in range(200):
            query = f"q{(i * seed) % 11}"
            if cached.search([query, "q0"], 1)[0] != [Document(f"About {query}", f"All that is known of {query}.")]:
                wrong.append(query)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(cached._found) <= 5
    assert cached.counters()["search/queries"] == 6 * 200 * 2


def test_the_hit_rate_is_among_the_metrics_of_a_rollout(scripted_engine):
    cached = CachedSearch(ToySearch(), 10)
    metrics: dict[str, float] = {}
    for _ in range(2):
        engine = scripted_engine(["<search> a </search>", "<search> b </search>", "<answer> x </answer>"])
        cfg = RolloutConfig(protocol="compact", group_size=4)
        samples = [Sample("s", "?", ("x",))]
        parts = (engine, engine.tokenizer, PROTOCOLS["compact"], cached, HEK.empty(), samples, cfg, 0)
        run_rollouts(*parts, metrics=metrics)
    assert cached.backend.batches == [["a"], ["b"]]
    assert (metrics["search/queries"], metrics["search/repeated"]) == (16, 14)
    assert metrics["search/repeated_frac"] == 14 / 16


def test_counters_of_the_backend_come_along():
    class Paid(ToySearch):
        def counters(self):
            return {"search/credits": float(len(self.batches))}

    cached = CachedSearch(Paid(), 10)
    cached.search(["a"], 1)
    before, metrics = counters(cached), {}
    cached.search(["b", "a"], 1)
    add_counters(metrics, cached, before)
    expected = {"search/queries": 2.0, "search/repeated": 1.0, "search/credits": 1.0, "search/repeated_frac": 0.5}
    assert metrics == expected | {"search/empty": 0.0}
    assert counters(ToySearch()) == {}


def test_B40_what_found_nothing_is_counted():
    class Sparse(ToySearch):
        def search(self, queries, top_k):
            return [
                found if query == "a" else []
                for query, found in zip(queries, super().search(queries, top_k), strict=True)
            ]

    cached = CachedSearch(Sparse(), 10)
    cached.search(["a", "b", "b"], 1)
    cached.search(["b", "a"], 1)
    assert cached.counters()["search/empty"] == 3


def test_zero_means_no_cache():
    toy = ToySearch()
    assert remembering(toy, SearchConfig(cache=0)) is toy
    assert isinstance(remembering(toy, SearchConfig()), CachedSearch)
