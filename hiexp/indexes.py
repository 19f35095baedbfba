"""A corpus made searchable once, in a folder of its own: passages, words (BM25), vectors (faiss), and what they are.

    passages.jsonl offsets.npy repeated.jsonl     the corpus (passages.py); the files it came from are needed no more
    bm25/                                         what bm25s stores
    index.faiss                                   the vectors, in the layout that IndexConfig names
    manifest.json                                 written anew after each part: counts, corpus hash, encoder, file sizes
    vectors/                                      while encoding: finished shards, so that a crash costs one of them

`build_index` goes on where it was interrupted and then writes the same bytes. `open_index` refuses what was cut off,
another encoder (which includes its prefixes) and another corpus. Files of passages are known by name, size and time of
change; where those differ, by what is in them.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hiexp.config import ConfigError
from hiexp.encoder import Encoder
from hiexp.passages import Passages, PassageStore, Tally, stream_corpus, write_store
from hiexp.rankers import BM25Ranker, DenseRanker, HybridRanker, Ranker, on_gpus, searched_text, set_breadth
from hiexp.search_types import PARTS, IndexConfig, SearchConfig
from hiexp.tracking import progress
from hiexp.vectors import build_vectors, layout_of

FORMAT = 1


def build_index(cfg: IndexConfig, encoder: Encoder | None = None, wait: bool = False) -> dict[str, Any]:
    """Make what of the index is not there yet; its manifest. `encoder` is needed for vectors that nobody has yet.

    While another process writes the folder, this one waits for it or raises ConfigError.

    ConfigError for a folder of other files or settings, another encoder, an unwritable place.
    """
    if "dense" in PARTS[cfg.backend] and encoder is None and not cfg.vectors_from:
        raise ConfigError(f"backend={cfg.backend} needs an encoder; set encoder.path, or backend=bm25")
    folder = Path(cfg.out)
    try:
        _check_folder(folder)
        with _claimed(folder, wait):
            manifest = _passages_part(folder, cfg)
            store = PassageStore(folder)
            if "bm25" in PARTS[cfg.backend] and "bm25" not in manifest:
                manifest = _add_part(folder, manifest, "bm25", _bm25_part(folder, store))
            if "dense" in PARTS[cfg.backend]:
                if "dense" in manifest:
                    _same_vectors(folder, manifest["dense"], len(store), cfg, encoder)
                else:
                    manifest = _add_part(folder, manifest, "dense", _dense_part(folder, manifest, store, cfg, encoder))
                shutil.rmtree(folder / "vectors", ignore_errors=True)
    except OSError as error:
        raise ConfigError(f"cannot write {folder}: {error}; choose a writable folder with enough space") from error
    return manifest


def open_index(cfg: SearchConfig, encoder: Encoder | None) -> tuple[Passages, Ranker]:
    """Passages of cfg.index and what ranks them; ConfigError for what is missing, cut off, or of something else."""
    folder = Path(cfg.index)
    manifest, remedy = read_manifest(folder), f"remove {folder} or set search.index to another folder"
    if cfg.corpus and (now := _other_corpus(manifest, cfg.corpus)):
        raise ConfigError(f"{folder}/manifest.json: corpus is {manifest['corpus']}, now {now}; {remedy}")
    store = PassageStore(folder)
    if len(store) != manifest["passages"]:
        raise ConfigError(f"{folder} holds {len(store)} passages, not {manifest['passages']}: not whole; {remedy}")
    rankers: list[Ranker] = []
    for name in PARTS[cfg.backend]:
        part = manifest.get(name)
        if part is None:
            raise ConfigError(
                f"{folder} has no {name} part; run `python -m hiexp.search index out={folder} backend={cfg.backend}` "
                "with the settings that it was begun with"
            )
        try:
            _check_sizes(folder, part["files"], remedy)
            ranker = _bm25(folder, cfg, remedy) if name == "bm25" else _dense(folder, part, cfg, encoder, remedy)
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{folder}/manifest.json: its part {name} is damaged ({error}); {remedy}") from error
        if isinstance(ranker, DenseRanker) and ranker.index.ntotal != len(store):
            told = f"{ranker.index.ntotal} vectors for {len(store)} passages"
            raise ConfigError(f"{folder}/index.faiss has {told}: not whole; {remedy}")
        rankers.append(ranker)
    return store, rankers[0] if len(rankers) == 1 else HybridRanker(rankers)


def is_begun(folder: str | Path) -> bool:
    """Whether the folder is there and holds anything."""
    return Path(folder).is_dir() and any(Path(folder).iterdir())


def is_whole(folder: str | Path, backend: str) -> bool:
    """Whether it is an index with all that the backend reads; ConfigError for a folder with an unreadable manifest."""
    if not (Path(folder) / "manifest.json").is_file():
        return False
    return all(part in read_manifest(folder) for part in PARTS[backend])


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """What the index is; ConfigError where it is not whole."""
    file = Path(folder) / "manifest.json"
    if not file.is_file():  # not ours: nothing of it may be removed on our word
        found = "it is a file" if Path(folder).is_file() else "no manifest.json in it"
        raise ConfigError(
            f"{folder} is not a search index ({found}); set search.index to the folder of one or, with search.corpus, "
            "to a new folder"
        )
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise ValueError(f"format {manifest['format']}, expected {FORMAT}")
        _ = manifest["corpus"], manifest["sources"], manifest["words"], manifest["passages"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else error
        raise ConfigError(
            f"{folder} is not a search index ({reason}); remove {folder} or set search.index to another folder, "
            "and it is built anew"
        ) from error
    return manifest


def _bm25(folder: Path, cfg: SearchConfig, remedy: str) -> BM25Ranker:
    try:
        return BM25Ranker.load(folder / "bm25", cfg.mmap)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder}/bm25 is damaged ({error}); {remedy}") from error


def _dense(folder: Path, part: dict[str, Any], cfg: SearchConfig, encoder: Encoder | None, remedy: str) -> DenseRanker:
    import faiss

    if encoder is None:
        raise ConfigError(f"search.backend={cfg.backend} needs an encoder; set encoder.path, or search.backend=bm25")
    if part["encoder"] != encoder.fingerprint:
        raise ConfigError(
            f"{folder}/manifest.json: encoder is {part['encoder']!r}, now {encoder.fingerprint!r}; {remedy}, or set "
            f"encoder.path and encoder.prefix={part['prefix']} to what made it"
        )
    try:
        index = faiss.read_index(str(folder / "index.faiss"), faiss.IO_FLAG_MMAP_IFC if cfg.mmap else 0)
    except RuntimeError as error:
        raise ConfigError(f"{folder}/index.faiss is damaged ({str(error)[-120:]}); {remedy}") from error
    set_breadth(index, cfg.breadth or part["breadth"])
    if cfg.device == "cuda":
        index = on_gpus(index, part["kind"])
    return DenseRanker(index, encoder, cfg.threads)


def _passages_part(folder: Path, cfg: IndexConfig) -> dict[str, Any]:
    """The manifest of a folder with its passages; they are written where they are not there yet."""
    if not (folder / "manifest.json").is_file():
        _check_folder(folder)
        sources = _sources(cfg.corpus)
        with progress(label="read passages", unit="passage") as bar:
            tally = write_store(folder, cfg.corpus, cfg.words, bar.update)
        counts = {"corpus": tally.corpus, "words": cfg.words, **tally.counts(), "sources": sources}
        return _write_manifest(folder, {"format": FORMAT, **counts})
    manifest = read_manifest(folder)
    if manifest["words"] != cfg.words:
        raise ConfigError(f"{folder} was made with words={manifest['words']}, now {cfg.words}; choose another out=...")
    if cfg.corpus and _other_corpus(manifest, cfg.corpus):
        raise ConfigError(
            f"{folder} was made of other files, or they have changed; remove it or choose another out=..."
        )
    return manifest


def _bm25_part(folder: Path, store: PassageStore) -> dict[str, Any]:
    part = folder / "bm25.part"
    shutil.rmtree(part, ignore_errors=True)
    texts = (searched_text(document) for _, document in store)
    BM25Ranker.build(progress(texts, len(store), "count words", "passage")).save(part)
    shutil.rmtree(folder / "bm25", ignore_errors=True)
    part.replace(folder / "bm25")
    return {"k1": 1.2, "b": 0.75, "files": _sizes(folder, "bm25")}


def _dense_part(
    folder: Path, manifest: dict[str, Any], store: PassageStore, cfg: IndexConfig, encoder: Encoder | None
) -> dict[str, Any]:
    facts = build_vectors(folder, manifest["corpus"], store, cfg, encoder)
    return facts | {"files": _sizes(folder, "index.faiss")}


def _same_vectors(folder: Path, part: dict[str, Any], count: int, cfg: IndexConfig, encoder: Encoder | None) -> None:
    """ConfigError where the settings ask for other vectors than there are."""
    now: dict[str, Any] = {"kind": cfg.kind, "storage": cfg.storage}
    now |= {"encoder": encoder.fingerprint} if encoder else {}
    if cfg.kind == part["kind"]:
        now |= layout_of(cfg, part["dimension"], count)
    # 0 leaves a number to the program, which may choose another one in another version
    open_ = {name for name in ("lists", "neighbours", "pq_bytes", "breadth") if not getattr(cfg, name)}
    for name, value in now.items():
        if name not in open_ and part.get(name, value) != value:
            told = f"{folder} has vectors with {name}={part[name]}, now {value}; choose another out=..."
            if name == "breadth":
                told += ", or leave it and set search.breadth where it is searched"
            elif name != "encoder" and part["kind"] == "flat":
                told += f", with vectors_from={folder}"
            raise ConfigError(told)


def _add_part(folder: Path, manifest: dict[str, Any], name: str, part: dict[str, Any]) -> dict[str, Any]:
    return _write_manifest(folder, manifest | {name: part})


def _write_manifest(folder: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    new = folder / "manifest.json.new"
    with new.open("w", encoding="utf-8") as file:
        file.write(json.dumps(manifest, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    new.replace(folder / "manifest.json")
    return manifest


@contextmanager
def _claimed(folder: Path, wait: bool) -> Iterator[None]:
    """The folder for this process alone."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"another process is writing {folder}; wait for it, or choose another out=...") from error
        yield


def _check_folder(folder: Path) -> None:
    """ConfigError for a folder that holds anything but an index, begun or finished; it is left as it is."""
    if folder.is_file():
        raise ConfigError(f"{folder} is a file, not the folder of an index; choose another folder")
    if not folder.is_dir() or (folder / "manifest.json").is_file():
        return
    known = {"lock", "passages.jsonl", "offsets.npy", "repeated.jsonl", "manifest.json.new"}
    names = {path.name.removesuffix(".part") for path in folder.iterdir()}
    is_theirs = (folder / "lock").is_dir() or ((folder / "lock").is_file() and (folder / "lock").stat().st_size)
    foreign = names - known | ({"lock"} if is_theirs else set())
    if foreign:
        raise ConfigError(f"{folder} holds other files ({sorted(foreign)[0]}); choose another out=...")


def _other_corpus(manifest: dict[str, Any], paths: Sequence[str]) -> str:
    """The hash of the files' passages where it is not the manifest's; empty where they are the same."""
    if manifest["sources"] == _sources(paths):
        return ""
    tally = Tally()
    for _ in stream_corpus(paths, manifest["words"], tally):
        pass
    return "" if tally.corpus == manifest["corpus"] else tally.corpus


def _sources(paths: Sequence[str]) -> list[list[Any]]:
    """Name, size and time of change of each file: enough to tell that nothing was written since."""
    found = [[str(path), *_size_and_time(path)] for path in paths]
    if not found:
        raise ConfigError("corpus is empty; list the passage files")
    return found


def _size_and_time(path: str) -> tuple[int, int]:
    try:
        status = Path(path).stat()
    except OSError:
        return 0, 0  # the reader says what is wrong; a finished index does without its sources
    return status.st_size, status.st_mtime_ns


def _sizes(folder: Path, name: str) -> dict[str, int]:
    place = folder / name
    files = sorted(place.iterdir()) if place.is_dir() else [place]
    return {str(file.relative_to(folder)): file.stat().st_size for file in files}


def _check_sizes(folder: Path, files: dict[str, int], remedy: str) -> None:
    """Before anything is mapped into memory: a file cut off under a mapping kills the process."""
    for name, size in files.items():
        path = folder / name
        now = path.stat().st_size if path.is_file() else "missing"
        if now != size:
            raise ConfigError(f"{path} is {now}, not {size} bytes: not whole; {remedy}")
