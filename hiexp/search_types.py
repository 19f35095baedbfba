"""What every search backend promises, and the settings that choose one.

A backend answers each query with a list, in the order of the queries: at most `top_k` different passages, best first,
empty only where nothing was found. A failure is raised, never an empty list. Equal queries get equal answers.
"""

from dataclasses import dataclass, field
from typing import Protocol

from hiexp.config import ConfigError, lookup
from hiexp.encoder import EncoderConfig
from hiexp.search_remote_config import HttpConfig, TavilyConfig
from hiexp.trajectory import Document


@dataclass(frozen=True)
class SearchConfig:
    backend: str = "bm25"
    """bm25, dense, hybrid (both, by reciprocal ranks), http (a server), tavily (the web), or none (never searches)"""
    corpus: tuple[str, ...] = ()
    """files of passages in any layout of docs/search.md; together they are one corpus"""
    index: str = ""
    """folder made by `python -m hiexp.search index`, or from corpus when absent; empty: in memory, at each start"""
    mmap: bool = True
    """leave the index on disk and let the system keep what is used; processes on one machine share it"""
    device: str = "cpu"
    """cpu, or cuda: the vectors lie on all visible GPUs, a share on each"""
    threads: int = 1
    """CPU threads of one dense search; more than there are free cores slow it down badly"""
    breadth: int = 0
    """lists that an IVF index reads (nprobe), or candidates that HNSW keeps (efSearch); 0 = as the index was made"""
    rerank: str = ""
    """folder of a cross-encoder that orders the best rerank_depth passages anew; empty = no reranking"""
    rerank_depth: int = 50
    """passages that the cross-encoder sees"""
    cache: int = 4096
    """queries whose passages a run remembers, so that a repeated one is not searched again; 0 = none"""
    http: HttpConfig = field(default_factory=HttpConfig)
    tavily: TavilyConfig = field(default_factory=TavilyConfig)

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise ConfigError(f"search.device={self.device!r} must be cpu or cuda")
        for name, least in (("threads", 1), ("breadth", 0), ("rerank_depth", 1), ("cache", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"search.{name}={getattr(self, name)} must be at least {least}")


KINDS = {"flat": "{code}", "ivf": "IVF{lists},{code}", "hnsw": "HNSW{neighbours},{code}"}
"""of a vector index, as faiss' factory spells them"""
STORAGES = {"float32": "Flat", "float16": "SQfp16", "int8": "SQ8", "pq": "PQ{pq_bytes}"}
PARTS = {"bm25": ("bm25",), "dense": ("dense",), "hybrid": ("bm25", "dense")}
"""what of an index folder a backend reads"""


@dataclass(frozen=True)
class IndexConfig:
    out: str
    """folder of the index; one that was begun is finished, and a finished one gets the part that it lacks"""
    corpus: tuple[str, ...] = ()
    """files of passages in any layout of docs/search.md; together they are one corpus"""
    words: int = 100
    """texts longer than one and a half times so many words are cut into passages of about that length; 0 = never"""
    backend: str = "dense"
    """dense (vectors), bm25 (words) or hybrid (both)"""
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    kind: str = "flat"
    """flat (exact), ivf (reads some of many lists) or hnsw (walks a graph; largest, and slow to make)"""
    storage: str = "float16"
    """of a vector: float32, float16, int8, or pq (product quantisation, the smallest and least exact)"""
    lists: int = 0
    """ivf: lists; 0 = four times the root of the number of passages"""
    neighbours: int = 32
    """hnsw: links of a passage"""
    pq_bytes: int = 0
    """pq: bytes of a vector, which must divide its dimension; 0 = an eighth of the dimension"""
    breadth: int = 0
    """lists that a query reads (ivf, 0 = 64), or candidates that it keeps (hnsw, 0 = 512)"""
    vectors_from: str = ""
    """folder of a flat index of the same corpus, whose vectors are taken instead of encoding"""
    shard_rows: int = 4096
    """passages that are encoded and put on disk at a time"""
    threads: int = 0
    """CPU threads that make the vector index; 0 = all; hnsw repeats exactly with 1 alone"""

    def __post_init__(self) -> None:
        lookup(PARTS, self.backend, "backend")
        lookup(KINDS, self.kind, "kind")
        lookup(STORAGES, self.storage, "storage")
        for name, least in (
            ("words", 0), ("lists", 0), ("neighbours", 2), ("pq_bytes", 0), ("breadth", 0), ("shard_rows", 1),
            ("threads", 0),
        ):  # fmt: skip
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least {least}")


@dataclass(frozen=True)
class ScoredDocument:
    """A passage that was found. Scores are compared within one answer of one backend only."""

    id: str
    score: float
    document: Document


class SearchBackend(Protocol):
    def search(self, queries: list[str], top_k: int) -> list[list[Document]]:
        """For each query, in order, at most `top_k` different passages, best first."""
        ...


class ScoredSearch:
    """A backend that knows ids and scores; `search` leaves them out."""

    def search_scored(self, queries: list[str], top_k: int) -> list[list[ScoredDocument]]:
        """As `search`, with ids and scores, highest score first; ValueError for top_k below 1."""
        raise NotImplementedError

    def search(self, queries: list[str], top_k: int) -> list[list[Document]]:
        return [[found.document for found in row] for row in self.search_scored(queries, top_k)]


def check_top_k(top_k: int) -> None:
    """ValueError unless at least one passage is asked for."""
    if top_k < 1:
        raise ValueError(f"top_k={top_k}: at least one passage must be asked for")
