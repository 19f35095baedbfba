"""Repeated queries of a run are searched once: the siblings of a group often begin with the same one."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from hiexp.search_types import SearchBackend, SearchConfig
from hiexp.trajectory import Document

Key = tuple[str, int]
"""the query, to the letter (an encoder may hear the difference of a comma), and the number of passages"""


class CachedSearch:
    """A backend that remembers what it found for the `size` queries that were used last.

    Safe to share between threads; a batch goes on to `backend` without its repetitions, in order. What fails is
    not remembered. A passage that is found again is the same object.
    """

    def __init__(self, backend: SearchBackend, size: int) -> None:
        """`size`: queries, at least 1."""
        self.backend, self.size = backend, size
        self._found: OrderedDict[Key, tuple[Document, ...]] = OrderedDict()
        self._lock = threading.Lock()
        self.asked = self.repeated = self.empty = 0

    def search(self, queries: list[str], top_k: int) -> list[list[Document]]:
        known: dict[str, tuple[Document, ...]] = {}
        with self._lock:
            for query in dict.fromkeys(queries):
                if (key := (query, top_k)) in self._found:
                    self._found.move_to_end(key)
                    known[query] = self._found[key]
        missing = [query for query in dict.fromkeys(queries) if query not in known]
        if missing:
            results = checked(self.backend.search(missing, top_k), missing)
            known |= {query: tuple(found) for query, found in zip(missing, results, strict=True)}
        with self._lock:
            self.asked, self.repeated = self.asked + len(queries), self.repeated + len(queries) - len(missing)
            self.empty += sum(not known[query] for query in queries)
            for query in missing:
                self._found[query, top_k] = known[query]
                self._found.move_to_end((query, top_k))
            while len(self._found) > self.size:
                self._found.popitem(last=False)
        return [list(known[query]) for query in queries]

    def counters(self) -> dict[str, float]:
        """Queries so far, those that never reached the backend, that found nothing, and what the backend counts."""
        own = {"search/queries": self.asked, "search/repeated": self.repeated, "search/empty": self.empty}
        return own | counters(self.backend)


def remembering(search: SearchBackend, cfg: SearchConfig) -> SearchBackend:
    """The backend with the cache that the settings ask for."""
    return CachedSearch(search, cfg.cache) if cfg.cache else search


def counters(search: Any) -> dict[str, float]:
    """What a backend has counted so far (cost, repetitions, ...), by the name of the metric; most count nothing."""
    return search.counters() if hasattr(search, "counters") else {}


def add_counters(metrics: dict[str, float], search: Any, before: dict[str, float]) -> None:
    """Raise the metrics by what the backend counted since `before`."""
    for name, now in counters(search).items():
        metrics[name] = metrics.get(name, 0.0) + now - before.get(name, 0.0)
    if metrics.get("search/queries"):
        metrics["search/repeated_frac"] = metrics["search/repeated"] / metrics["search/queries"]


def checked(results: Any, queries: Sequence[str]) -> list[list[Document]]:
    """What a backend returned; ValueError where it does not fit, as evidence for another query must not pass."""
    if not isinstance(results, list) or len(results) != len(queries):
        what = f"{len(results)} results" if isinstance(results, list) else f"{str(results)[:80]!r}"
        raise ValueError(f"search returned {what} for {len(queries)} queries")
    for query, found in zip(queries, results, strict=True):
        if not isinstance(found, list) or not all(isinstance(document, Document) for document in found):
            raise ValueError(f"search returned {str(found)[:80]!r} for {query!r}; a list of documents is needed")
    return results
