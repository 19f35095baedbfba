"""Vectors of a corpus: encoded shard by shard on disk, then put into one faiss index.

Rows depend on which texts are encoded together, so shards are always the same ones: an interrupted encoding that goes
on gives the bytes of an uninterrupted one.
"""

import json
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hiexp.config import ConfigError
from hiexp.encoder import Encoder, NotFinite, describe_encoder, unit_rows
from hiexp.passages import PassageStore
from hiexp.rankers import searched_text, set_breadth
from hiexp.search_types import KINDS, STORAGES, IndexConfig
from hiexp.tracking import progress

BREADTH = {"flat": 0, "ivf": 64, "hnsw": 512}
TRAINING_ROWS = 1 << 16
"""vectors that quantisers are fitted to, at least; ivf takes 64 for each list if that is more"""
CHUNK = 512
"""passages between two updates of the progress bar"""
BLOCK = 1 << 14
"""vectors taken at once out of another index"""
SAMPLE = 512
"""passages whose mean cosine the manifest tells"""
CROWDED = 0.6
"""mean cosine that only models trained at a very low temperature reach"""

Blocks = Callable[[], Iterator[np.ndarray]]


def build_vectors(
    folder: Path, corpus: str, store: PassageStore, cfg: IndexConfig, encoder: Encoder | None
) -> dict[str, Any]:
    """Write index.faiss; what the manifest says of it. Nothing is encoded twice."""
    source = _Other(cfg.vectors_from, corpus) if cfg.vectors_from else None
    if source is None:
        assert encoder is not None
        source = _Shards(folder / "vectors", corpus, store, cfg, encoder)
    if encoder is not None and source.facts["encoder"] != encoder.fingerprint:
        found = source.facts["encoder"]
        raise ConfigError(f"{cfg.vectors_from} holds vectors of {found}, but the encoder is {encoder.fingerprint}")
    index_rows(folder / "index.faiss", source.blocks, source.facts["dimension"], len(store), cfg)
    cosine = _mean_cosine(source, len(store))
    if cosine > CROWDED and source.facts["prefix"] == "none":
        warnings.warn(
            f"the mean cosine of two passages is {cosine}, as e5 models have it, but encoder.prefix is none; look at "
            "the model's card: with prefixes missing it finds less",
            stacklevel=2,
        )
    layout = layout_of(cfg, source.facts["dimension"], len(store))
    return source.facts | {"kind": cfg.kind, "storage": cfg.storage} | layout | {"mean_cosine": cosine}


def layout_of(cfg: IndexConfig, dimension: int, count: int) -> dict[str, int]:
    """The numbers that lay out an index of `count` vectors: lists, neighbours, pq_bytes, breadth; 0 where it has none.

    ConfigError for pq_bytes that do not divide the dimension.
    """
    lists = min(cfg.lists or max(1, round(4 * count**0.5)), count) if cfg.kind == "ivf" else 0
    pq_bytes = cfg.pq_bytes or next(n for n in range(max(dimension // 8, 1), 0, -1) if dimension % n == 0)
    if cfg.storage == "pq" and dimension % pq_bytes:
        raise ConfigError(f"pq_bytes={pq_bytes} must divide the dimension {dimension}")
    breadth = cfg.breadth or BREADTH[cfg.kind]
    return {
        "lists": lists,
        "neighbours": cfg.neighbours if cfg.kind == "hnsw" else 0,
        "pq_bytes": pq_bytes if cfg.storage == "pq" else 0,
        "breadth": min(breadth, lists) if lists else breadth,
    }


def index_rows(path: Path, blocks: Blocks, dimension: int, count: int, cfg: IndexConfig) -> tuple[int, int]:
    """Write the faiss index of `count` rows [R, D] float32 that `blocks()` gives; its number of lists, and breadth."""
    import faiss

    faiss.omp_set_num_threads(cfg.threads or os.cpu_count() or 1)
    layout = layout_of(cfg, dimension, count)
    lists, breadth = layout["lists"], layout["breadth"]
    index = _empty_index(cfg, dimension, count, layout)
    _train(index, blocks, lists, count)
    with progress(total=count, label="index vectors", unit="passage") as bar:
        for rows in blocks():
            index.add(rows)
            bar.update(len(rows))
    set_breadth(index, breadth)
    part = path.with_name(f"{path.name}.part")
    try:
        faiss.write_index(index, str(part))
    except RuntimeError as error:  # faiss' own, a full disk among them
        raise ConfigError(f"cannot write {part}: {str(error)[-120:]}; free some space and run it again") from error
    with part.open("rb") as file:
        os.fsync(file.fileno())
    part.replace(path)
    return lists, breadth


class _Shards:
    """The encoder's rows, in files of `shard_rows`; those that are there already are taken as they are."""

    def __init__(self, folder: Path, corpus: str, store: PassageStore, cfg: IndexConfig, encoder: Encoder) -> None:
        self.folder, self.store, self.shard_rows = folder, store, cfg.shard_rows
        self.dtype = np.float32 if cfg.storage == "float32" else np.float16
        self.facts = {**describe_encoder(encoder), "dimension": encoder.dim, "normalised": True}
        _claim_vectors(folder, {"corpus": corpus, "encoder": encoder.fingerprint, "dtype": self.dtype.__name__,
                                "shard_rows": self.shard_rows})  # fmt: skip
        self._encode(encoder)

    def _encode(self, encoder: Encoder) -> None:
        starts = range(0, len(self.store), self.shard_rows)
        missing = [start for start in starts if self._read(start) is None]
        with progress(total=len(self.store), label="encode passages", unit="passage") as bar:
            bar.n = bar.initial = len(self.store) - sum(self._count(start) for start in missing)
            for start in missing:
                count = self._count(start)
                texts = [searched_text(self.store[row][1]) for row in range(start, start + count)]
                rows = []
                for at in range(0, count, CHUNK):
                    try:
                        rows.append(unit_rows(encoder.encode(texts[at : at + CHUNK], "passage")))
                    except NotFinite as error:
                        key = self.store[start + at + error.row][0]
                        told = f"passage {key!r}: the encoder gave a vector that is not finite"
                        raise ConfigError(f"{told}; look at the passage, and at the model's files") from error
                    bar.update(len(rows[-1]))
                _write(self._file(start), np.concatenate(rows).astype(self.dtype))

    def blocks(self) -> Iterator[np.ndarray]:
        """[R, D] float32, in order."""
        for start in range(0, len(self.store), self.shard_rows):
            yield self._whole(start).astype(np.float32)

    def rows(self, positions: Sequence[int]) -> np.ndarray:
        """[P, D] float32: those of some passages."""
        parts = (self._whole(at - at % self.shard_rows)[at % self.shard_rows] for at in positions)
        return np.stack([row.astype(np.float32) for row in parts])

    def _whole(self, start: int) -> np.ndarray:
        rows = self._read(start)
        if rows is None:
            raise ConfigError(f"{self._file(start)} was damaged after it was written; run the same command again")
        return rows

    def _count(self, start: int) -> int:
        return min(self.shard_rows, len(self.store) - start)

    def _file(self, start: int) -> Path:
        return self.folder / f"{start // self.shard_rows:06d}.npy"

    def _read(self, start: int) -> np.ndarray | None:
        """The rows of a shard, or None where they are missing or not whole."""
        try:
            rows = np.load(self._file(start), mmap_mode="r")
        except (OSError, ValueError, EOFError):
            return None
        fits = rows.shape == (self._count(start), self.facts["dimension"]) and rows.dtype == self.dtype
        return rows if fits else None


class _Other:
    """The rows of a finished flat index of the same corpus."""

    def __init__(self, folder: str, corpus: str) -> None:
        import faiss

        try:
            manifest = json.loads((Path(folder) / "manifest.json").read_text(encoding="utf-8"))
            part = manifest["dense"]
            is_same, is_flat = manifest["corpus"] == corpus, part["kind"] == "flat" and part["storage"] != "pq"
            names = ("encoder", "prefix", "pooling", "dimension", "normalised")
            self.facts: dict[str, Any] = {name: part[name] for name in names} | {"taken_from": part["storage"]}
            self._index = faiss.read_index(str(Path(folder) / "index.faiss"), faiss.IO_FLAG_MMAP_IFC)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise ConfigError(
                f"vectors_from={folder} is not a whole index with vectors ({str(error)[:120]})"
            ) from error
        if not is_same or not is_flat:
            what = "of another kind; only a flat one gives its vectors back" if is_same else "of another corpus"
            raise ConfigError(f"vectors_from={folder} is {what}; leave it empty to encode anew")

    def blocks(self) -> Iterator[np.ndarray]:
        count = self._index.ntotal
        return (self._index.reconstruct_n(start, min(BLOCK, count - start)) for start in range(0, count, BLOCK))

    def rows(self, positions: Sequence[int]) -> np.ndarray:
        return np.stack([self._index.reconstruct(at) for at in positions])


def _empty_index(cfg: IndexConfig, dimension: int, count: int, layout: dict[str, int]) -> Any:
    """An untrained index."""
    import faiss

    if cfg.storage == "pq" and count < 256:
        raise ConfigError(f"storage=pq learns from 256 passages at least, there are {count}; use float16")
    code = STORAGES[cfg.storage].format(**layout)
    return faiss.index_factory(dimension, KINDS[cfg.kind].format(code=code, **layout), faiss.METRIC_INNER_PRODUCT)


def _train(index: Any, blocks: Blocks, lists: int, count: int) -> None:
    """Fit centroids and quantisers to rows drawn evenly over the corpus, the same ones every time."""
    import faiss

    if index.is_trained:
        return
    wanted = min(count, max(TRAINING_ROWS, 64 * lists))
    chosen = np.zeros(count, bool)
    chosen[np.random.default_rng(0).permutation(count)[:wanted]] = True
    start, kept = 0, []
    for rows in blocks():
        kept.append(rows[chosen[start : start + len(rows)]])
        start += len(rows)
    if lists and getattr(faiss, "get_num_gpus", lambda: 0)():
        index.clustering_index = faiss.index_cpu_to_all_gpus(faiss.IndexFlatIP(index.d))
    index.train(np.concatenate(kept))


def _mean_cosine(source: "_Shards | _Other", count: int) -> float:
    """Of pairs of passages drawn from all of the corpus: what a threshold on cosines has to stand out from."""
    rows = source.rows(sorted(np.random.default_rng(0).permutation(count)[:SAMPLE].tolist()))
    total = rows.sum(0)
    pairs = float(total @ total - np.square(rows).sum())
    return round(pairs / (len(rows) * (len(rows) - 1)), 4) if len(rows) > 1 else 0.0


def _claim_vectors(folder: Path, settings: dict[str, Any]) -> None:
    """Refuse shards that something else has made."""
    file = folder / "of.json"
    if file.is_file():
        known = json.loads(file.read_text(encoding="utf-8"))
        for name, value in settings.items():
            if known.get(name) != value:
                raise ConfigError(f"{folder} was begun with {name}={known.get(name)}, now {value}; remove {folder}")
        return
    folder.mkdir(exist_ok=True)
    new = file.with_suffix(".new")
    new.write_text(json.dumps(settings), encoding="utf-8")
    new.replace(file)


def _write(path: Path, rows: np.ndarray) -> None:
    """The rows are on disk, whole, before the file has its name."""
    new = path.with_suffix(".new")
    with new.open("wb") as file:
        np.save(file, rows)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
