"""Search over a local corpus: queries in, ranked passages out.

A new backend is a class with the one method of `SearchBackend`, a function that opens it from `SearchConfig`,
and an entry in BACKENDS. Every backend answers each query with a list (possibly empty), shows a passage once,
and is deterministic.
"""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import bm25s
import numpy as np

from hiexp.config import ConfigError, lookup
from hiexp.data import DataError, new_folder, read_passages
from hiexp.encoder import Encoder, unit_rows
from hiexp.tracking import progress
from hiexp.trajectory import Document

Passages = Sequence[tuple[str, Document]]
WORD = re.compile(r"\w+")
ENCODE_CHUNK = 512
"""passages between two updates of the progress bar"""
FAISS_THREADS = 1
"""more threads than free cores slow faiss down badly, and one thread adds up in one order"""


@dataclass(frozen=True)
class SearchConfig:
    backend: str = "bm25"
    """bm25, dense, or none for protocols that never search"""
    corpus: tuple[str, ...] = ()
    """files of passages, {id, title, text} as JSON lines; together they are one corpus"""
    index: str = ""
    """dense only: folder of the encoded corpus, built when absent; empty encodes anew at each start"""


class SearchBackend(Protocol):
    def search(self, queries: list[str], top_k: int) -> list[list[Document]]:
        """For each query, in order, at most `top_k` different passages, best first."""
        ...


def open_search(cfg: SearchConfig, encoder: Encoder | None = None) -> SearchBackend:
    """The configured backend; only dense needs `encoder`. ConfigError for what is missing or stale."""
    return lookup(BACKENDS, cfg.backend, "search backend")(cfg, encoder)


def read_corpus(paths: Sequence[str | Path]) -> list[tuple[str, Document]]:
    """The passages of all files, in order; an id may not occur in two of them."""
    if not paths:
        raise ConfigError("search.corpus is empty; list the passage files, or set search.backend=none")
    owner: dict[str, str] = {}
    passages: list[tuple[str, Document]] = []
    for path in paths:
        for key, document in read_passages(path):
            if owner.setdefault(key, str(path)) != str(path):
                raise DataError(f"{path}: passage id {key!r} is also in {owner[key]}; ids must be unique")
            passages.append((key, document))
    return passages


def corpus_hash(paths: Sequence[str | Path]) -> str:
    """SHA-256 of what can be found in the files: titles and texts in order, repeated passages once."""
    return _digest(unique_documents(read_corpus(paths)))


def unique_documents(passages: Passages) -> list[Document]:
    """The passages without their ids, each title and text once, in order of first appearance."""
    return list(dict.fromkeys(document for _, document in passages))


class BM25Search:
    """Lucene's BM25 (k1 1.2, b 0.75) over title and text; ties in corpus order, no shared word: no passage.

    Every lower-cased run of word characters counts: no stop words and no stemming, because years, initials
    and other short words decide multi-hop questions. Scoring is bm25s'.
    """

    def __init__(self, passages: Passages) -> None:
        self.documents = unique_documents(passages)
        if not self.documents:
            raise ConfigError("search needs at least one passage; search.corpus holds none")
        self._index = bm25s.BM25(method="lucene", k1=1.2, b=0.75)
        self._index.index([words(f"{d.title}\n{d.text}") for d in self.documents], show_progress=False)

    def search(self, queries: list[str], top_k: int) -> list[list[Document]]:
        _check_top_k(top_k)
        return [self._search_one(words(query), top_k) for query in queries]

    def _search_one(self, query: list[str], top_k: int) -> list[Document]:
        if not query:
            return []
        scores = self._index.get_scores(query)
        found = np.flatnonzero(scores > 0)
        if len(found) > top_k:  # keep every tie with the last place: the stable sort below decides
            found = found[scores[found] >= np.partition(scores[found], -top_k)[-top_k]]
        best = found[np.argsort(-scores[found], kind="stable")][:top_k]
        return [self.documents[i] for i in best]


class DenseSearch:
    """Exact inner product between unit vectors of passages and queries, through faiss.

    Vectors are normalised here on both sides, whatever the encoder returns, so that length never ranks. A
    query that is blank or means nothing to the encoder finds nothing. Equal scores are in corpus order.
    """

    def __init__(self, passages: Passages, encoder: Encoder, vectors: np.ndarray | None = None) -> None:
        """Encodes the passages unless `vectors` has the row of each of `unique_documents(passages)`."""
        import faiss

        self.documents, self.encoder = unique_documents(passages), encoder
        if not self.documents:
            raise ConfigError("search needs at least one passage; search.corpus holds none")
        self.vectors = encode_passages(encoder, self.documents) if vectors is None else vectors
        if len(self.vectors) != len(self.documents):
            raise ValueError(f"{len(self.vectors)} vectors for {len(self.documents)} passages")
        self._index: Any = faiss.IndexFlatIP(self.vectors.shape[1])
        self._index.add(self.vectors)

    def search(self, queries: list[str], top_k: int) -> list[list[Document]]:
        import faiss

        _check_top_k(top_k)
        faiss.omp_set_num_threads(FAISS_THREADS)  # it holds for the calling thread alone
        results: list[list[Document]] = [[] for _ in queries]
        vectors = unit_rows(self.encoder.encode(queries, "query"))
        told = np.flatnonzero(vectors.any(axis=1))  # a zero row is a query of which the encoder knows nothing
        if len(told):
            scores, found = self._index.search(vectors[told], min(top_k, len(self.documents)))
            for i, row_scores, row in zip(told, scores, found, strict=True):
                results[i] = [self.documents[j] for j in row[np.lexsort((row, -row_scores))]]
        return results

    @classmethod
    def build(cls, folder: str | Path, passages: Passages, encoder: Encoder) -> "DenseSearch":
        """Encode the passages and save their vectors beside a manifest of what these belong to.

        Refuses a folder that holds files already or cannot be written, before the encoding.
        """
        with new_folder(folder) as part:
            backend = cls(passages, encoder)
            np.save(part / "vectors.npy", backend.vectors)
            shape = {"dimension": backend.vectors.shape[1], "normalised": True}
            manifest = json.dumps(_manifest(encoder, backend.documents) | shape, indent=2)
            (part / "manifest.json").write_text(manifest + "\n", encoding="utf-8")
        return backend

    @classmethod
    def load(cls, folder: str | Path, passages: Passages, encoder: Encoder) -> "DenseSearch":
        """Open a saved index; ConfigError when another encoder (or prefix) or another corpus made it."""
        remedy = f"remove {folder} or set search.index to another folder, and it is built anew"
        manifest_file = Path(folder) / "manifest.json"
        try:
            manifest = json.loads(manifest_file.read_text(encoding="utf-8"))
            vectors = np.load(Path(folder) / "vectors.npy", mmap_mode="r")
        except (OSError, ValueError) as error:
            raise ConfigError(f"{folder} is not a whole search index ({error}); {remedy}") from error
        for key, now in _manifest(encoder, unique_documents(passages)).items():
            if manifest.get(key) != now:
                raise ConfigError(f"{manifest_file}: {key} is {manifest.get(key)!r}, now {now!r}; {remedy}")
        if vectors.shape != (manifest["count"], manifest["dimension"]):
            raise ConfigError(f"{folder}/vectors.npy has shape {vectors.shape}, not that of its manifest; {remedy}")
        return cls(passages, encoder, vectors)


class NoSearch:
    """For protocols that answer from the model alone: being asked is a mistake in the configuration."""

    def search(self, queries: list[str], top_k: int) -> list[list[Document]]:
        raise ConfigError(
            f"the policy searched ({queries[:1]}), but search.backend is none; set it to bm25 or dense, "
            "or choose a protocol that never searches"
        )


def words(text: str) -> list[str]:
    """The lower-cased runs of letters, digits and underscores: what BM25 counts."""
    return WORD.findall(text.lower())


def encode_passages(encoder: Encoder, documents: Sequence[Document]) -> np.ndarray:
    """Unit vectors [N, D] of "title\\ntext"; prefixes are the encoder's own affair."""
    texts = [f"{document.title}\n{document.text}" for document in documents]
    rows = []
    with progress(total=len(texts), label="encode passages", unit="passage") as bar:
        for start in range(0, len(texts), ENCODE_CHUNK):
            chunk = texts[start : start + ENCODE_CHUNK]
            rows.append(unit_rows(encoder.encode(chunk, "passage")))
            bar.update(len(chunk))
    return np.concatenate(rows)


def _manifest(encoder: Encoder, documents: Sequence[Document]) -> dict[str, Any]:
    return {"encoder": encoder.fingerprint, "corpus": _digest(documents), "count": len(documents)}


def _digest(documents: Sequence[Document]) -> str:
    digest = hashlib.sha256()
    for document in documents:
        digest.update(json.dumps([document.title, document.text]).encode())
    return digest.hexdigest()


def _check_top_k(top_k: int) -> None:
    if top_k < 1:
        raise ValueError(f"top_k={top_k}: at least one passage must be asked for")


def _open_bm25(cfg: SearchConfig, encoder: Encoder | None) -> SearchBackend:
    return BM25Search(read_corpus(cfg.corpus))


def _open_dense(cfg: SearchConfig, encoder: Encoder | None) -> SearchBackend:
    if encoder is None:
        raise ConfigError("search.backend=dense needs an encoder; set encoder.path, or search.backend=bm25")
    passages = read_corpus(cfg.corpus)
    if not cfg.index:
        return DenseSearch(passages, encoder)
    folder = Path(cfg.index)
    holds_files = folder.is_dir() and any(folder.iterdir())
    return (DenseSearch.load if holds_files else DenseSearch.build)(folder, passages, encoder)


def _open_none(cfg: SearchConfig, encoder: Encoder | None) -> SearchBackend:
    return NoSearch()


BACKENDS: dict[str, Callable[[SearchConfig, Encoder | None], SearchBackend]] = {
    "bm25": _open_bm25,
    "dense": _open_dense,
    "none": _open_none,
}
