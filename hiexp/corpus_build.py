"""One file of passages out of many sources, as the paper has it: what the answers rest on, and a sample of Wikipedia.

    python -m hiexp.search corpus out=data/corpus.jsonl supporting=[hotpot.json,2wiki.json,musique.jsonl,morehopqa.json]
        whole=[frames_articles.jsonl] dump=[psgs_w100.tsv] sample=1000000 seed=42

Passages are written in the order supporting, whole, dump; each title and text once, under its first id. Beside the
file, <out>.manifest.json tells counts, settings and hashes. Equal inputs and settings give equal bytes; with one seed a
larger sample of a dump holds every smaller one.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hiexp.config import ConfigError, run_script
from hiexp.corpora import Passage, read_file
from hiexp.data import DataError, records
from hiexp.passages import Pair, Tally, Uniques, passage_line, pieces
from hiexp.tracking import progress


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

    def __post_init__(self) -> None:
        if not (self.supporting or self.whole or self.dump):
            raise ConfigError("nothing to take passages from; set supporting, whole or dump")
        for name in ("sample", "seed", "words"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} must not be negative")


def build_corpus(cfg: CorpusConfig) -> dict[str, Any]:
    """Write the file and its manifest; returns the manifest. ConfigError or DataError before anything is replaced."""
    out = Path(cfg.out)
    if out.exists():
        raise ConfigError(f"{out} already exists and is left as it is; remove it or choose another out=...")
    tally, digest, parts = Tally(), hashlib.sha256(), []
    part = out.with_name(f"{out.name}.part")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file, progress(label="write corpus", unit="passage") as bar:
            uniques = Uniques(tally)
            for name, path, source in _sources(cfg, tally):
                before = tally.passages, tally.repeated
                for passage, (key, document) in source:
                    if _is_new(uniques, passage, key, document):
                        line = passage_line(key, document)
                        digest.update(line)
                        file.write(line)
                        bar.update(1)
                counts = {"passages": tally.passages - before[0], "repeated": tally.repeated - before[1]}
                parts.append({"as": name, "file": str(path), **counts})
            file.flush()
            os.fsync(file.fileno())
        manifest = {"corpus": tally.corpus, "sha256": digest.hexdigest(), **tally.counts(), "parts": parts}
        manifest["settings"] = {key: value for key, value in asdict(cfg).items() if key != "out"}
        out.with_name(f"{out.name}.manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        part.replace(out)
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error}; choose a writable folder with enough space") from error
    finally:
        part.unlink(missing_ok=True)
    return manifest


def main(argv: Sequence[str]) -> int:
    return run_script(_run, CorpusConfig, argv, __doc__)


def _run(cfg: CorpusConfig) -> None:
    manifest = build_corpus(cfg)
    for part in manifest["parts"]:
        print(f"{part['as']:<11} {part['passages']:>9} passages, {part['repeated']} repeated: {part['file']}")
    print(f"{cfg.out}: {manifest['passages']} passages, {manifest['cut']} texts cut, corpus {manifest['corpus'][:16]}")


Source = Iterator[tuple[Passage, Pair]]


def _sources(cfg: CorpusConfig, tally: Tally) -> Iterator[tuple[str, str, Source]]:
    for path in cfg.supporting:
        yield "supporting", path, _cut(_supporting(path, cfg.pool), cfg.words, tally)
    for path in cfg.whole:
        yield "whole", path, _cut(read_file(path), cfg.words, tally)
    if cfg.dump:
        chosen = _draw(cfg)
        start = 0
        for path in cfg.dump:
            # positions count passages, so the draw does not depend on how many of them one text was cut into
            source = _Drawn(_cut(read_file(path), cfg.words, Tally()), chosen, start)
            yield "dump", path, iter(source)
            start = source.position


def _cut(passages: Iterator[Passage], words: int, tally: Tally) -> Source:
    return ((passage, pair) for passage in passages for pair in pieces(passage, words, tally))


class _Drawn:
    """The chosen of a stream of passages; `position` counts on from `start`."""

    def __init__(self, source: Source, chosen: np.ndarray, start: int) -> None:
        self.source, self.chosen, self.position = source, chosen, start

    def __iter__(self) -> Source:
        for item in self.source:
            is_chosen = self.chosen[self.position]
            self.position += 1
            if is_chosen:
                yield item


def _draw(cfg: CorpusConfig) -> np.ndarray:
    """Which passages of the dump are taken, by position [N] bool: a first pass counts them."""
    count = 0
    with progress(label="count the dump", unit="passage") as bar:
        for path in cfg.dump:
            for _ in _cut(read_file(path), cfg.words, Tally()):
                count += 1
                bar.update(1)
    if cfg.sample > count:
        raise ConfigError(f"sample={cfg.sample}, but the dump has {count} passages; lower it, or 0 takes all of them")
    chosen = np.zeros(count, bool)
    chosen[np.random.default_rng(cfg.seed).permutation(count)[: cfg.sample or count]] = True
    return chosen


def _supporting(path: str, pool: Sequence[str]) -> Iterator[Passage]:
    """What a file of questions marks as supporting: its own paragraphs, or passages of the pool by id."""
    wanted = {str(key): where for where, record in records(path) for key in record.get("supporting_ids") or ()}
    if not wanted:
        yield from (passage for passage in read_file(path) if passage.supporting)
        return
    for file in pool:
        for passage in read_file(file):
            if wanted.pop(passage.id, None):
                yield passage
    if wanted:
        key, where = next(iter(wanted.items()))
        raise DataError(f"{where}: supporting passage {key!r} is in no file of pool={list(pool)}; add its corpus there")


def _is_new(uniques: Uniques, passage: Passage, key: str, document: Any) -> bool:
    try:
        return uniques.first(key, document) is None
    except KeyError as error:
        raise DataError(f"{passage.where}: passage id {key!r} is used before, with another text") from error
