"""Search over a corpus: queries in, ranked passages out. `python -m hiexp.search` makes corpora and indexes.

A new backend is a class with the one method of `SearchBackend`, a function that opens it from `SearchConfig`,
and an entry in BACKENDS. Every backend answers each query with a list (possibly empty), shows a passage once,
and is deterministic.
"""

import importlib
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hiexp.config import ConfigError, lookup
from hiexp.encoder import Encoder, NotFinite, describe_encoder, folder_digest, unit_rows
from hiexp.indexes import IndexConfig, build_index, is_begun, is_whole, open_index, read_manifest
from hiexp.passages import Pair, Passages, corpus_digest, read_corpus, unique_passages
from hiexp.rankers import BM25Ranker, DenseRanker, HybridRanker, Ranker, Reranked, cross_encoder, searched_text
from hiexp.search_types import ScoredDocument, ScoredSearch, SearchConfig
from hiexp.tracking import progress

ENCODE_CHUNK = 512
"""passages between two updates of the progress bar"""
NEEDS_ENCODER = frozenset({"dense", "hybrid"})


def open_search(cfg: SearchConfig, encoder: Encoder | None = None) -> ScoredSearch:
    """The configured backend; dense and hybrid need `encoder`. ConfigError for what is missing or stale."""
    opened = lookup(BACKENDS, cfg.backend, "search backend")(cfg, encoder)
    return Reranked(opened, cross_encoder(cfg.rerank), cfg.rerank_depth) if cfg.rerank else opened


def corpus_hash(paths: Sequence[str | Path]) -> str:
    """SHA-256 of what can be found in the files: titles and texts in order, repeated passages once."""
    return corpus_digest(document for _, document in read_corpus(paths))


def corpus_of(cfg: SearchConfig) -> str:
    """`corpus_hash` of the passages of the settings, from the index where there is one; "none" without any."""
    if cfg.index and is_begun(cfg.index):
        return str(read_manifest(cfg.index)["corpus"])
    return corpus_hash(cfg.corpus) if cfg.corpus else "none"


def describe_search(cfg: SearchConfig, encoder: Encoder | None = None) -> dict[str, Any]:
    """What the passages depend on: `backend`, `corpus`, the index, the reranker; of a server, what it says of itself.

    `encoder`: also names the encoder of the vectors, for a server: who asks it has none to name.
    `corpus` is "unknown" for a server that does not say it, and the kind and day of the answers for the web.
    """
    facts: dict[str, Any] = {"backend": cfg.backend}
    if cfg.backend == "http":
        from hiexp.search_clients import described_by_servers

        facts |= described_by_servers(cfg.http)
    elif cfg.backend == "tavily":
        from hiexp.search_tavily import describe_web

        facts |= describe_web(cfg.tavily)
    else:
        facts |= {"corpus": corpus_of(cfg)} | _describe_vectors(cfg)
        if cfg.backend in NEEDS_ENCODER and encoder is not None:
            facts |= describe_encoder(encoder)
    if cfg.rerank:
        content = folder_digest(Path(cfg.rerank))
        facts |= {"rerank": f"{Path(cfg.rerank).name}:{content}", "rerank_depth": cfg.rerank_depth}
    return facts


def _describe_vectors(cfg: SearchConfig) -> dict[str, Any]:
    if cfg.backend not in NEEDS_ENCODER:
        return {}
    if not (cfg.index and is_whole(cfg.index, cfg.backend)):
        return {"kind": "flat", "storage": "float32", "breadth": 0}
    part = read_manifest(cfg.index)["dense"]
    return {"kind": part["kind"], "storage": part["storage"], "breadth": cfg.breadth or part["breadth"]}


class LocalSearch(ScoredSearch):
    """The passages of a corpus by the rows that a ranker gives."""

    def __init__(self, passages: Passages, ranker: Ranker) -> None:
        self.passages, self.ranker = passages, ranker

    def search_scored(self, queries: list[str], top_k: int) -> list[list[ScoredDocument]]:
        return [self.found(ranking) for ranking in self.ranker.rank(queries, top_k)]

    def found(self, ranking: Iterable[tuple[float, int]]) -> list[ScoredDocument]:
        """The passages of (score, row) pairs."""
        return [ScoredDocument(key, score, document) for score, (key, document) in self._passages_of(ranking)]

    def _passages_of(self, ranking: Iterable[tuple[float, int]]) -> Iterable[tuple[float, Pair]]:
        return ((score, self.passages[row]) for score, row in ranking)


class BM25Search(LocalSearch):
    """BM25 over titles and texts, in memory."""

    ranker: BM25Ranker

    def __init__(self, passages: Iterable[Pair]) -> None:
        kept = _some(unique_passages(passages))
        super().__init__(kept, BM25Ranker.build(searched_text(document) for _, document in kept))


class DenseSearch(LocalSearch):
    """Exact cosine between vectors of passages and queries, in memory."""

    ranker: DenseRanker

    def __init__(self, passages: Iterable[Pair], encoder: Encoder, threads: int = 1) -> None:
        import faiss

        kept = _some(unique_passages(passages))
        try:
            self.vectors = encode_passages(encoder, [searched_text(document) for _, document in kept])
        except NotFinite as error:
            key = kept[error.row][0]
            raise ConfigError(f"passage {key!r}: the encoder gave a vector that is not finite; look at both") from error
        index: Any = faiss.IndexFlatIP(self.vectors.shape[1])
        index.add(self.vectors)
        super().__init__(kept, DenseRanker(index, encoder, threads))


class NoSearch(ScoredSearch):
    """For protocols that answer from the model alone: being asked is a mistake in the configuration."""

    def search_scored(self, queries: list[str], top_k: int) -> list[list[ScoredDocument]]:
        raise ConfigError(
            f"the policy searched ({queries[:1]}), but search.backend is none; set it to bm25 or dense, "
            "or choose a protocol that never searches"
        )


def encode_passages(encoder: Encoder, texts: Sequence[str]) -> np.ndarray:
    """Unit vectors [N, D]; prefixes are the encoder's own affair. NotFinite names the first text without one."""
    rows = []
    with progress(total=len(texts), label="encode passages", unit="passage") as bar:
        for start in range(0, len(texts), ENCODE_CHUNK):
            chunk = texts[start : start + ENCODE_CHUNK]
            try:
                rows.append(unit_rows(encoder.encode(chunk, "passage")))
            except NotFinite as error:
                raise NotFinite(start + error.row) from error
            bar.update(len(chunk))
    return np.concatenate(rows)


def _some(passages: list[Pair]) -> list[Pair]:
    if not passages:
        raise ConfigError("search needs at least one passage; search.corpus holds none")
    return passages


def _open_local(cfg: SearchConfig, encoder: Encoder | None) -> ScoredSearch:
    """From cfg.index, which is made first where only cfg.corpus is there; without it in memory."""
    if cfg.backend in NEEDS_ENCODER and encoder is None:
        raise ConfigError(f"search.backend={cfg.backend} needs an encoder; set encoder.path, or search.backend=bm25")
    if not cfg.index:
        return _in_memory(cfg, encoder)
    if not is_whole(cfg.index, cfg.backend) and cfg.corpus:  # other ranks wait for the first one and find it made
        made = IndexConfig(out=cfg.index, backend=cfg.backend, corpus=cfg.corpus, words=0, storage="float32")
        build_index(made, encoder, wait=True)
    passages, ranker = open_index(cfg, encoder)
    return LocalSearch(passages, ranker)


def _in_memory(cfg: SearchConfig, encoder: Encoder | None) -> LocalSearch:
    if cfg.device != "cpu":
        raise ConfigError("search.device=cuda needs search.index, the folder of an index")
    passages = read_corpus(cfg.corpus)
    if cfg.backend == "bm25" or encoder is None:
        return BM25Search(passages)
    dense = DenseSearch(passages, encoder, cfg.threads)
    if cfg.backend == "dense":
        return dense
    return LocalSearch(dense.passages, HybridRanker([BM25Search(passages).ranker, dense.ranker]))


def _open_http(cfg: SearchConfig, encoder: Encoder | None) -> ScoredSearch:
    from hiexp.search_clients import HttpSearch

    return HttpSearch(cfg.http)


def _open_tavily(cfg: SearchConfig, encoder: Encoder | None) -> ScoredSearch:
    from hiexp.search_tavily import TavilySearch

    return TavilySearch(cfg.tavily)


def _open_none(cfg: SearchConfig, encoder: Encoder | None) -> ScoredSearch:
    return NoSearch()


BACKENDS: dict[str, Callable[[SearchConfig, Encoder | None], ScoredSearch]] = {
    "bm25": _open_local,
    "dense": _open_local,
    "hybrid": _open_local,
    "http": _open_http,
    "tavily": _open_tavily,
    "none": _open_none,
}

if __name__ == "__main__":
    # by name: the commands stand in a higher layer than this file
    sys.exit(importlib.import_module("hiexp.search_cli").main(sys.argv[1:]))
