"""One file of passages out of many sources, as the paper has it: what the answers rest on, and a sample of Wikipedia.

    python -m hiexp.search corpus out=data/corpus.jsonl supporting=[hotpot.json,2wiki.json,musique.jsonl,morehopqa.json]
        whole=[frames_articles.jsonl] dump=[psgs_w100.tsv] sample=1000000 seed=42

Passages are written in the order supporting, whole, dump; each title and text once, under its first id. Beside the
file, <out>.manifest.json tells counts, settings and hashes. Equal inputs and settings give equal bytes; with one seed a
larger sample of a dump holds every smaller one. Files that number their passages alike need `ids=file`.
"""

import fcntl
import hashlib
import json
import os
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

from hiexp.config import ConfigError, run_script
from hiexp.corpora import Passage, question_passages, read_file, unnamed
from hiexp.data import DataError
from hiexp.passages import Pair, Tally, Uniques, passage_line, pieces
from hiexp.raw_text import question_records
from hiexp.tracking import progress
from hiexp.trajectory import Document


@dataclass(frozen=True)
class CorpusConfig:
    out: str
    """file of passages, {id, title, text} as JSON lines"""
    supporting: tuple[str, ...] = ()
    """files of questions: the paragraphs that are marked as supporting, or the passages of `pool` by supporting_ids"""
    pool: tuple[str, ...] = ()
    """files of passages that supporting_ids refer to"""
    whole: tuple[str, ...] = ()
    """files that are taken whole"""
    dump: tuple[str, ...] = ()
    """files, of Wikipedia say, that `sample` passages are drawn from"""
    sample: int = 1_000_000
    """passages drawn at random from the dump (paper: 1,000,000); 0 = all"""
    seed: int = 42
    """of the draw"""
    words: int = 100
    """texts longer than one and a half times so many words are cut into passages of about that length; 0 = never"""
    ids: Literal["own", "file"] = "own"
    """own, or file: `whole` and `dump` get the file's name before each id (psgs_w100:7), so that no two clash"""

    def __post_init__(self) -> None:
        if not (self.supporting or self.whole or self.dump):
            raise ConfigError("nothing to take passages from; set supporting, whole or dump")
        for name in ("sample", "seed", "words"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} must not be negative")


def build_corpus(cfg: CorpusConfig) -> dict[str, Any]:
    """Write the file and its manifest; returns the manifest. ConfigError or DataError before anything is replaced."""
    out = Path(cfg.out)
    tally, digest, parts = Tally(), hashlib.sha256(), []
    try:
        with _claimed(out) as file, progress(label="write corpus", unit="passage") as bar:
            uniques = Uniques(tally)
            for name, path, source in _sources(cfg, tally, uniques):
                before = tally.passages, tally.repeated
                for passage, (key, document) in source:
                    if _is_new(uniques, passage, key, document):
                        line = passage_line(key, document)
                        digest.update(line)
                        file.write(line)
                        bar.update(1)
                counts = {"passages": tally.passages - before[0], "repeated": tally.repeated - before[1]}
                parts.append({"as": name, "file": str(path), **counts})
            if not tally.passages:
                raise ConfigError("the files give no passage; see supporting, whole and dump")
            file.flush()
            os.fsync(file.fileno())
            manifest = {"corpus": tally.corpus, "sha256": digest.hexdigest(), **tally.counts(), "parts": parts}
            manifest["settings"] = {key: value for key, value in asdict(cfg).items() if key != "out"}
            text = json.dumps(manifest, indent=1) + "\n"
            out.with_name(f"{out.name}.manifest.json").write_text(text, encoding="utf-8")
            _part_of(out).replace(out)
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error}; choose a writable folder with enough space") from error
    return manifest


@contextmanager
def _claimed(out: Path) -> Iterator[BinaryIO]:
    """The unfinished file, for this process alone; gone at the end unless it got its name."""
    if out.exists():
        raise ConfigError(f"{out} already exists and is left as it is; remove it or choose another out=...")
    out.parent.mkdir(parents=True, exist_ok=True)
    part = _part_of(out)
    with part.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = os.path.samestat(os.fstat(file.fileno()), part.stat())
        except (BlockingIOError, FileNotFoundError):
            is_ours = False
        if not is_ours or out.exists():  # taken, or another process has just given it its name
            raise ConfigError(f"another process is writing {out}; wait for it, or choose another out=...")
        try:
            file.truncate(0)
            yield file
        finally:
            if part.exists() and os.path.samestat(os.fstat(file.fileno()), part.stat()):
                part.unlink()


def _part_of(out: Path) -> Path:
    return out.with_name(f"{out.name}.part")


def main(argv: Sequence[str]) -> int:
    return run_script(_run, CorpusConfig, argv, __doc__)


def _run(cfg: CorpusConfig) -> None:
    manifest = build_corpus(cfg)
    for part in manifest["parts"]:
        print(f"{part['as']:<11} {part['passages']:>9} passages, {part['repeated']} repeated: {part['file']}")
    print(f"{cfg.out}: {manifest['passages']} passages, {manifest['cut']} texts cut, corpus {manifest['corpus'][:16]}")


Source = Iterator[tuple[Passage, Pair]]


def _sources(cfg: CorpusConfig, tally: Tally, uniques: Uniques) -> Iterator[tuple[str, str, Source]]:
    for path in cfg.supporting:
        yield "supporting", path, _pairs(_supporting(path, cfg.pool), cfg.words, tally)
    for path in cfg.whole:
        yield "whole", path, _pairs(_named(path, cfg.ids), cfg.words, tally)
    if cfg.dump:
        chosen = _draw(cfg, uniques)
        start = 0
        for path in cfg.dump:
            # positions count passages, so the draw does not depend on how many of them one text was cut into
            source = _Drawn(cfg, path, chosen, start, tally)
            yield "dump", path, iter(source)
            start = source.position


def _named(path: str, ids: str) -> Iterator[Passage]:
    """The passages of a file, under the ids that they get."""
    before = f"{unnamed(Path(path), 0).removesuffix(':0')}:"
    for passage in read_file(path):
        is_named = ids == "own" or passage.id.startswith(before)
        yield passage if is_named else replace(passage, id=before + passage.id)


def _pairs(passages: Iterator[Passage], words: int, tally: Tally | None = None) -> Source:
    return ((passage, pair) for passage in passages for pair in pieces(passage, words, tally))


class _Drawn:
    """The chosen passages of one file of the dump; `position` counts on from `start`."""

    def __init__(self, cfg: CorpusConfig, path: str, chosen: np.ndarray, start: int, tally: Tally) -> None:
        self.cfg, self.path, self.chosen, self.position, self.tally = cfg, path, chosen, start, tally

    def __iter__(self) -> Source:
        """The tally counts the texts of which anything is drawn."""
        for passage in _named(self.path, self.cfg.ids):
            parts = pieces(passage, self.cfg.words)
            drawn = self.chosen[self.position : self.position + len(parts)]
            self.position += len(parts)
            self.tally.records += bool(drawn.any())
            self.tally.cut += bool(drawn.any()) and len(parts) > 1
            yield from ((passage, pair) for pair, is_drawn in zip(parts, drawn, strict=True) if is_drawn)


def _draw(cfg: CorpusConfig, uniques: Uniques) -> np.ndarray:
    """Which passages of the dump are taken, by position [N] bool: a first pass counts them.

    DataError where an id is another passage's, whether it would be drawn or not: the seed decides nothing of this.
    """
    keys, contents = array("q"), array("q")  # hashes: of ids, and of ids with what they stand for
    with progress(label="count the dump", unit="passage") as bar:
        for path in cfg.dump:
            for passage, (key, document) in _pairs(_named(path, cfg.ids), cfg.words):
                if uniques.clashes(key, document):
                    raise _clash(passage, key, uniques.place_of(key))
                keys.append(hash(key))
                contents.append(hash((key, document)))
                bar.update(1)
    if len(np.unique(np.frombuffer(keys, np.int64))) < len(np.unique(np.frombuffer(contents, np.int64))):
        _find_clash(cfg, np.frombuffer(keys, np.int64))
    count = len(keys)
    if cfg.sample > count:
        raise ConfigError(f"sample={cfg.sample}, but the dump has {count} passages; lower it, or 0 takes all of them")
    chosen = np.zeros(count, bool)
    chosen[np.random.default_rng(cfg.seed).permutation(count)[: cfg.sample or count]] = True
    return chosen


def _find_clash(cfg: CorpusConfig, keys: np.ndarray) -> None:
    """DataError for the first two passages of the dump that have one id; `keys`: hashes of all ids."""
    values, counts = np.unique(keys, return_counts=True)
    suspects, seen = set(values[counts > 1].tolist()), Uniques(Tally())
    for passage, (key, document) in chain.from_iterable(_pairs(_named(path, cfg.ids), cfg.words) for path in cfg.dump):
        if hash(key) in suspects:
            _is_new(seen, passage, key, document)


def _supporting(path: str, pool: Sequence[str]) -> Iterator[Passage]:
    """What a file of questions marks as supporting: its own paragraphs, or passages of the pool by id."""
    wanted, count = dict[str, str](), 0
    for number, (where, record) in enumerate(question_records(path)):
        ids = record.get("supporting_ids") or []
        if not isinstance(ids, list):
            raise DataError(f"{where}: supporting_ids must be a list, not {type(ids).__name__}")
        wanted |= {str(key): where for key in ids}
        if not ids:
            for passage in question_passages(record, where, unnamed(Path(path), number)):
                if passage.supporting:
                    count += 1
                    yield passage
    if not wanted and not count:
        raise ConfigError(
            f"{path} marks nothing as supporting (supporting_facts, is_supporting or supporting_ids); give a file of "
            "passages as whole or dump"
        )
    for file in pool if wanted else ():
        for passage in read_file(file):
            if wanted.pop(passage.id, None):
                yield passage
    if wanted:
        key, where = next(iter(wanted.items()))
        raise DataError(f"{where}: supporting passage {key!r} is in no file of pool={list(pool)}; add its corpus there")


def _is_new(uniques: Uniques, passage: Passage, key: str, document: Document) -> bool:
    try:
        return uniques.first(key, document, passage.where) is None
    except KeyError:
        raise _clash(passage, key, uniques.place_of(key)) from None


def _clash(passage: Passage, key: str, first: str) -> DataError:
    return DataError(
        f"{passage.where}: passage id {key!r} is used before, with another text, in {first}; ids=file puts the file's "
        "name before each id"
    )
