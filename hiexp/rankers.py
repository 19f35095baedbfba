"""Rows of a corpus in order of relevance: BM25, nearest vectors (faiss, or torch on GPUs), both, and a second look.

A ranker knows rows, not passages; search.py puts the two together. Equal scores are in corpus order.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import bm25s
import numpy as np

from hiexp.config import ConfigError
from hiexp.encoder import Encoder, unit_rows
from hiexp.raw_text import mended
from hiexp.search_cache import counters
from hiexp.search_types import ScoredDocument, ScoredSearch, check_top_k
from hiexp.trajectory import Document

WORD = re.compile(r"\w+")
RECIPROCAL = 60
"""the constant of reciprocal rank fusion (Cormack et al., SIGIR 2009)"""
FUSED = 100
"""places of each ranker that the fusion looks at, at least"""
BLOCK = 1 << 20
"""rows whose scores a GPU holds at once"""

Ranking = list[tuple[float, int]]
"""(score, row), best first"""


class Ranker(Protocol):
    def rank(self, queries: Sequence[str], top_k: int) -> list[Ranking]:
        """For each query at most `top_k` different rows."""
        ...


def words(text: str) -> list[str]:
    """The lower-cased runs of letters, digits and underscores: what BM25 counts."""
    return WORD.findall(text.lower())


def searched_text(document: Document) -> str:
    """What is matched of a passage, by words and by vectors."""
    return f"{document.title}\n{document.text}"


class BM25Ranker:
    """Lucene's BM25 (k1 1.2, b 0.75); ties in corpus order, no shared word: no row. Scoring is bm25s'.

    Every word counts: no stop words and no stemming, because years, initials and other short words decide multi-hop
    questions.
    """

    def __init__(self, index: bm25s.BM25) -> None:
        self._index = index

    @classmethod
    def build(cls, texts: Iterable[str]) -> "BM25Ranker":
        """Count the words of the texts. They are numbered by first appearance, so that equal texts give equal files."""
        vocabulary: dict[str, int] = {}
        ids = [[vocabulary.setdefault(word, len(vocabulary)) for word in words(text)] for text in texts]
        index = bm25s.BM25(method="lucene", k1=1.2, b=0.75)
        index.index((ids, vocabulary or {"": 0}), show_progress=False)
        return cls(index)

    def save(self, folder: Path) -> None:
        self._index.save(folder, show_progress=False)

    @classmethod
    def load(cls, folder: Path, mmap: bool) -> "BM25Ranker":
        """OSError or ValueError where a file is missing or damaged."""
        return cls(bm25s.BM25.load(folder, mmap=mmap, show_progress=False))

    def rank(self, queries: Sequence[str], top_k: int) -> list[Ranking]:
        check_top_k(top_k)
        return [self._rank_one(words(query), top_k) for query in queries]

    def _rank_one(self, query: list[str], top_k: int) -> Ranking:
        if not query:
            return []
        scores = self._index.get_scores(query)
        found = np.flatnonzero(scores > 0)
        if len(found) > top_k:  # keep every tie with the last place: the stable sort below decides
            found = found[scores[found] >= np.partition(scores[found], -top_k)[-top_k]]
        best = found[np.argsort(-scores[found], kind="stable")][:top_k]
        return list(zip(scores[best].tolist(), best.tolist(), strict=True))


class DenseRanker:
    """Cosine between unit vectors of queries and rows, through an index with faiss' `search`.

    Query vectors are normalised here, whatever the encoder returns, so that length never ranks. A query that is blank
    or means nothing to the encoder finds nothing.
    """

    def __init__(self, index: Any, encoder: Encoder, threads: int = 1) -> None:
        self.index, self.encoder, self.threads = index, encoder, threads

    def rank(self, queries: Sequence[str], top_k: int) -> list[Ranking]:
        check_top_k(top_k)
        return self.rank_vectors(unit_rows(self.encoder.encode(queries, "query")), top_k)

    def rank_vectors(self, vectors: np.ndarray, top_k: int) -> list[Ranking]:
        """The same for query vectors [N, D] float32 of length 1, or 0 for a query of which nothing is known."""
        import faiss

        faiss.omp_set_num_threads(self.threads)  # it holds for the calling thread alone
        rankings: list[Ranking] = [[] for _ in vectors]
        told = np.flatnonzero(vectors.any(axis=1))
        if len(told):
            scores, rows = self.index.search(vectors[told], min(top_k, self.index.ntotal))
            order = np.lexsort((rows, -scores))
            scores = np.minimum(np.take_along_axis(scores, order, 1), 1.0).tolist()
            rows = np.take_along_axis(rows, order, 1).tolist()
            for i, row_scores, row in zip(told, scores, rows, strict=True):
                # faiss fills up with -1 where the lists that it read hold fewer
                rankings[i] = [pair for pair in zip(row_scores, row, strict=True) if pair[1] >= 0]
        return rankings


class HybridRanker:
    """Reciprocal rank fusion: a row counts 1 / (60 + place) for each ranker that has it; scores play no part."""

    def __init__(self, rankers: Sequence[Ranker]) -> None:
        self.rankers = rankers

    def rank(self, queries: Sequence[str], top_k: int) -> list[Ranking]:
        check_top_k(top_k)
        rankings = [ranker.rank(queries, max(top_k, FUSED)) for ranker in self.rankers]
        return [self._fuse(of_query, top_k) for of_query in zip(*rankings, strict=True)]

    def _fuse(self, rankings: Sequence[Ranking], top_k: int) -> Ranking:
        scores: dict[int, float] = {}
        for ranking in rankings:
            for place, (_, row) in enumerate(ranking, 1):
                scores[row] = scores.get(row, 0.0) + 1 / (RECIPROCAL + place)
        return [(score, row) for row, score in sorted(scores.items(), key=lambda item: (-item[1], item[0]))[:top_k]]


class Reranked(ScoredSearch):
    """The best of another backend, ordered anew by a cross-encoder that reads query and passage together."""

    def __init__(self, backend: ScoredSearch, score: Callable[[list[tuple[str, str]]], np.ndarray], depth: int) -> None:
        self.backend, self.score, self.depth = backend, score, depth

    def counters(self) -> dict[str, float]:
        return counters(self.backend)

    def search_scored(self, queries: list[str], top_k: int) -> list[list[ScoredDocument]]:
        """Scores are the cross-encoder's; equal ones keep the order of the other backend."""
        rows = self.backend.search_scored(queries, max(top_k, self.depth))
        pairs = [
            (mended(query), mended(searched_text(found.document)))
            for query, row in zip(queries, rows, strict=True)
            for found in row
        ]
        scores = iter(self.score(pairs).tolist() if pairs else [])
        anew = [[ScoredDocument(found.id, next(scores), found.document) for found in row] for row in rows]
        return [sorted(row, key=lambda found: -found.score)[:top_k] for row in anew]


def cross_encoder(folder: str | Path) -> Callable[[list[tuple[str, str]]], np.ndarray]:
    """[N] scores of (query, passage) pairs by the sentence-transformers cross-encoder in a local folder.

    ConfigError where the folder has none, or a model whose scoring head was never trained.
    """
    if not (Path(folder) / "config.json").is_file():
        raise ConfigError(f"search.rerank={str(folder)!r} is not a cross-encoder's folder (no config.json in it)")
    try:
        from sentence_transformers import CrossEncoder

        model = CrossEncoder(str(folder), local_files_only=True, num_labels=1)
        missing = _missing_weights(model, str(folder))
    except ImportError as error:
        raise ConfigError(
            "search.rerank needs sentence-transformers; install it, or leave search.rerank empty"
        ) from error
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"search.rerank={folder} cannot be loaded: {' '.join(str(error).split())[:200]}") from error
    if missing:
        raise ConfigError(
            f"search.rerank={folder} is not a cross-encoder: the folder has no weights for {', '.join(missing[:3])}, "
            "which would be drawn at random; name a model trained to score pairs, or leave search.rerank empty"
        )
    return lambda pairs: np.asarray(model.predict(pairs, batch_size=32, show_progress_bar=False), np.float64)


def _missing_weights(model: Any, folder: str) -> list[str]:
    """Names of the model's weights that its folder does not have, which loading fills at random with a mere note."""
    from transformers.utils import logging

    inner: Any = getattr(model[0], "model", None) or getattr(model[0], "auto_model", None)
    known = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        _, info = type(inner).from_pretrained(
            folder, config=inner.config, local_files_only=True, output_loading_info=True
        )
    finally:
        logging.set_verbosity(known)
    return sorted(map(str, info["missing_keys"]))


def set_breadth(index: Any, breadth: int) -> None:
    """How much of an approximate index a query looks at; nothing for an exact one."""
    if hasattr(index, "nprobe"):
        index.nprobe = min(breadth, index.nlist)
    elif hasattr(index, "hnsw"):
        index.hnsw.efSearch = breadth


def on_gpus(index: Any, kind: str) -> Any:
    """The index on all visible GPUs, a share of the rows on each, float16. ConfigError where that cannot be."""
    import faiss
    import torch

    if kind == "flat":
        if not torch.cuda.is_available():
            raise ConfigError("search.device=cuda, but torch sees no GPU; set search.device=cpu")
        return TorchFlat(index, [torch.device("cuda", n) for n in range(torch.cuda.device_count())], torch.float16)
    if kind != "ivf":
        raise ConfigError(f"search.device=cuda cannot hold an index of kind={kind}; make one of kind=flat or ivf")
    if not getattr(faiss, "get_num_gpus", lambda: 0)():
        raise ConfigError("search.device=cuda with kind=ivf needs faiss-gpu in place of faiss-cpu; or use kind=flat")
    options = faiss.GpuMultipleClonerOptions()
    options.shard, options.useFloat16 = True, True
    return faiss.index_cpu_to_all_gpus(index, options)


class TorchFlat:
    """Exact search with torch: the rows of a flat faiss index in `dtype`, shared out over devices.

    A product of float16 vectors is rounded to 11 bits, too few to order cosines of 0.8, so more rows than asked for
    are taken and scored again in float32.
    """

    def __init__(self, index: Any, devices: Sequence[Any], dtype: Any, block: int = BLOCK) -> None:
        import torch

        self.ntotal, self._dtype = index.ntotal, dtype
        share = max(1, min(block, -(-self.ntotal // len(devices))))
        self._blocks = []
        for number, start in enumerate(range(0, self.ntotal, share)):
            rows = torch.from_numpy(index.reconstruct_n(start, min(share, self.ntotal - start)))
            self._blocks.append((start, rows.to(device=devices[number % len(devices)], dtype=dtype)))

    def search(self, queries: np.ndarray, top_k: int) -> tuple[np.ndarray, np.ndarray]:
        """(scores [N, k] float32, rows [N, k] int64), best first, as faiss has it."""
        import torch

        found = [self._best(torch.from_numpy(queries), start, rows, top_k) for start, rows in self._blocks]
        scores, rows = (torch.cat([part[i].cpu() for part in found], 1) for i in (0, 1))
        best = torch.topk(scores, min(top_k, scores.shape[1]), dim=1)
        return best.values.numpy(), torch.gather(rows, 1, best.indices).numpy()

    def _best(self, queries: Any, start: int, rows: Any, top_k: int) -> tuple[Any, Any]:
        import torch

        queries = queries.to(rows.device)
        close = torch.topk(queries.to(self._dtype) @ rows.T, min(4 * top_k + 64, len(rows)), dim=1).indices
        exact = torch.einsum("nd,nkd->nk", queries, rows[close].float())
        best = torch.topk(exact, min(top_k, exact.shape[1]), dim=1)
        return best.values, torch.gather(close, 1, best.indices) + start
