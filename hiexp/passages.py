"""One corpus out of many files: long texts cut at sentence ends, repetitions left out, in memory or on disk.

    passages.jsonl      {id, title, text} a line, each title and text once
    offsets.npy         int64 [N + 1]: where in the file the lines begin
    repeated.jsonl      {id, of}: a passage that was left out, and the id of its equal

`of` keeps every id of the source files traceable; a piece of a cut text is called <id>#<number>.
"""

import hashlib
import json
import mmap
import os
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hiexp.config import ConfigError
from hiexp.corpora import Passage, read_file
from hiexp.data import DataError
from hiexp.trajectory import Document

LONG = 1.5
"""a text is cut from so many times the wanted length on, so that passages of about that length stay whole"""
LETTERS_PER_WORD = 10
"""scripts without spaces: so many characters count as one word"""
REACH = 0.4
"""a cut moves at most so many lengths of a part to a sentence end"""
SENTENCE_END = re.compile(  # once a run, and possessive: no text makes this slow
    r"(?:(?<![.!?])[.!?]++[\"')\]\u201d\u2019]*+(?=\s++[^\sa-z])|[\u3002\uff01\uff1f]|\n)"
)
ABBREVIATION = re.compile(
    r"(?:\b(?:Mr|Mrs|Ms|Dr|Prof|Sr|Jr|St|Mt|Gen|Col|Capt|Lt|Sgt|Rev|Hon|vs|etc|No|Vol|Ph|Inc|Ltd|Co|Corp|ca|c|b|d|r)"
    r"|\b[A-Z]|\b[A-Za-z]\.[A-Za-z])\.$"
)
ABBREVIATED = 8
"""characters that hold the longest abbreviation, its stop and a line end"""

Pair = tuple[str, Document]


@dataclass
class Tally:
    """What reading a corpus came to."""

    records: int = 0
    """texts in the files"""
    cut: int = 0
    """of them, cut into several passages"""
    passages: int = 0
    """different passages that are kept"""
    repeated: int = 0
    """passages left out because an equal one (title and text) came before"""
    digest: Any = field(default_factory=hashlib.sha256, repr=False)

    @property
    def corpus(self) -> str:
        """SHA-256 of titles and texts in order."""
        return self.digest.hexdigest()

    def counts(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("records", "cut", "passages", "repeated")}


class Uniques:
    """Tells a repeated passage from a new one; holds every id and the digest of its passage (about 300 bytes)."""

    def __init__(self, tally: Tally) -> None:
        self.tally = tally
        self._first: dict[bytes, str] = {}  # passage -> its first id
        self._passage_of: dict[str, bytes] = {}
        self._files: list[tuple[int, str]] = []  # (ids before it, file)

    def first(self, key: str, document: Document, where: str = "") -> str | None:
        """None for a new passage, else the id of the equal one; KeyError when the id is another passage's.

        `where`: file:line, of which the file is remembered for messages.
        """
        line = _line(document)
        content = _content(line)
        file = where.rpartition(":")[0]
        if not self._files or self._files[-1][1] != file:
            self._files.append((len(self._passage_of), file))
        if self._passage_of.setdefault(key, content) != content:
            raise KeyError(key)
        if content in self._first:
            self.tally.repeated += 1
            return self._first[content]
        self._first[content] = key
        self.tally.passages += 1
        self.tally.digest.update(line)
        return None

    def clashes(self, key: str, document: Document) -> bool:
        """Whether the id is another passage's."""
        known = self._passage_of.get(key)
        return known is not None and known != _content(_line(document))

    def place_of(self, key: str) -> str:
        """The file of the passage that has the id."""
        position = next(number for number, known in enumerate(self._passage_of) if known == key)
        return next(file for start, file in reversed(self._files) if start <= position)


def _line(document: Document) -> bytes:
    return json.dumps([document.title, document.text]).encode()


def _content(line: bytes) -> bytes:
    return hashlib.blake2b(line, digest_size=16).digest()


def read_corpus(paths: Sequence[str | Path], words: int = 0, tally: Tally | None = None) -> list[Pair]:
    """The different passages of all files, in order; texts longer than about `words` are cut (0 = never)."""
    return [pair for pair, first in stream_corpus(paths, words, tally or Tally()) if first is None]


def stream_corpus(paths: Sequence[str | Path], words: int, tally: Tally) -> Iterator[tuple[Pair, str | None]]:
    """((id, passage), id of the equal passage before it or None) of all files; `tally` counts along.

    Raises ConfigError without a path, DataError for an id that two different passages have.
    """
    if not paths:
        raise ConfigError("search.corpus is empty; list the passage files, or set search.backend=none")
    uniques = Uniques(tally)
    for path in paths:
        for passage in read_file(path):
            for key, document in pieces(passage, words, tally):
                try:
                    first = uniques.first(key, document, passage.where)
                except KeyError:
                    raise DataError(
                        f"{passage.where}: passage id {key!r} is also in {uniques.place_of(key)}, with another text; "
                        "`python -m hiexp.search corpus ids=file whole=[...]` makes one file of files with equal ids"
                    ) from None
                yield (key, document), first


def pieces(passage: Passage, words: int, tally: Tally | None = None) -> list[Pair]:
    """The passage as it is, or cut, with ids <id>#0, <id>#1, ..."""
    texts = cut(passage.text, words)
    if tally:
        tally.records += 1
        tally.cut += len(texts) > 1
    if len(texts) == 1:
        return [(passage.id, Document(passage.title, passage.text))]
    return [(f"{passage.id}#{n}", Document(passage.title, text)) for n, text in enumerate(texts)]


def unique_passages(pairs: Iterable[Pair]) -> list[Pair]:
    """Each title and text once, under its first id, in order of first appearance."""
    first: dict[Document, str] = {}
    for key, document in pairs:
        first.setdefault(document, key)
    return [(key, document) for document, key in first.items()]


def corpus_digest(documents: Iterable[Document]) -> str:
    """SHA-256 of titles and texts in order."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(_line(document))
    return digest.hexdigest()


def sentence_ends(text: str) -> list[int]:
    """Offsets just behind each sentence, the last one included; initials and common short forms end none."""
    found = (match.end() for match in SENTENCE_END.finditer(text))
    ends = [end for end in found if not ABBREVIATION.search(text, max(end - ABBREVIATED, 0), end)]
    return [end for end in ends if end < len(text)] + [len(text)]


def size(text: str) -> int:
    """Words; for scripts without spaces, characters by LETTERS_PER_WORD."""
    return max(len(text.split()), len(text) // LETTERS_PER_WORD)


def cut(text: str, words: int) -> list[str]:
    """Parts of about `words` that make up the text in order (white space at the cuts apart); 0 = the text.

    Parts are nearly equal. Each cut is at the sentence end nearest its place, at white space where none is near, in
    the middle of a word only if that is longer than half a part.
    """
    length = size(text)
    if not words or length <= LONG * words:
        return [text]
    count = -(-length // words)
    step = len(text) / count
    ends = np.array(sentence_ends(text)[:-1])
    spaces = np.array([match.start() for match in re.finditer(r"\s+", text)])
    cuts = [0, *(_cut_near(n * step, step, ends, spaces) for n in range(1, count)), len(text)]
    parts = [text[a:b].strip() for a, b in pairwise(cuts)]
    return [part for part in parts if part]


def _cut_near(place: float, step: float, *choices: np.ndarray) -> int:
    """`choices`: sorted places, the better ones first."""
    for places in choices:
        at = int(np.searchsorted(places, place))
        around = [int(near) for near in places[max(at - 1, 0) : at + 1] if abs(near - place) <= REACH * step]
        if around:
            return min(around, key=lambda near: abs(near - place))
    return round(place)


class Passages(Protocol):
    """(id, passage) by row, in a list or on disk."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> Pair: ...

    def __iter__(self) -> Iterator[Pair]: ...


class PassageStore:
    """Passages on disk, read where they are: `store[i]` is (id, passage)."""

    def __init__(self, folder: str | Path) -> None:
        """ConfigError unless both files are there and fit together."""
        self.folder = Path(folder)
        try:
            self._offsets = np.load(self.folder / "offsets.npy", mmap_mode="r")
            self._file = (self.folder / "passages.jsonl").open("rb")
            self._lines = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError, EOFError) as error:
            raise ConfigError(
                f"{folder} has no whole passages.jsonl and offsets.npy ({error}); make it again"
            ) from error
        if self._offsets.ndim != 1 or self._offsets[-1] != len(self._lines):
            raise ConfigError(f"{folder}/passages.jsonl is cut off or changed; make the index again")

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, row: int) -> Pair:
        if not 0 <= row < len(self):
            raise IndexError(row)
        try:
            record = json.loads(self._lines[self._offsets[row] : self._offsets[row + 1]])
            return record["id"], Document(record["title"], record["text"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(
                f"{self.folder}: passages.jsonl or offsets.npy is damaged (passage {row} is no record); make the index "
                "again in another folder"
            ) from error

    def __iter__(self) -> Iterator[Pair]:
        return (self[row] for row in range(len(self)))

    def aliases(self) -> dict[str, str]:
        """Id of a passage that was left out -> id of its equal."""
        try:
            with (self.folder / "repeated.jsonl").open(encoding="utf-8") as lines:
                return {record["id"]: record["of"] for record in map(json.loads, lines)}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{self.folder}/repeated.jsonl is missing or damaged ({error}); make the index again in another folder"
            ) from error


def write_store(folder: Path, paths: Sequence[str | Path], words: int, advance: Callable[[int], Any]) -> Tally:
    """Write the passages of all files as a `PassageStore`; no file has its name before all of it is on disk."""
    tally, offsets = Tally(), array("q", [0])
    parts = [folder / f"{name}.part" for name in ("passages.jsonl", "repeated.jsonl", "offsets.npy")]
    with parts[0].open("wb") as kept, parts[1].open("wb") as repeated:
        for (key, document), first in stream_corpus(paths, words, tally):
            if first is None:
                offsets.append(offsets[-1] + kept.write(passage_line(key, document)))
                advance(1)
            elif first != key:
                repeated.write(json.dumps({"id": key, "of": first}).encode() + b"\n")
        with parts[2].open("wb") as table:
            np.save(table, np.frombuffer(offsets, np.int64))
            for file in (kept, repeated, table):
                file.flush()
                os.fsync(file.fileno())
    for part in parts:
        part.replace(part.with_suffix(""))
    return tally


def passage_line(key: str, document: Document) -> bytes:
    """A line of a corpus file."""
    return json.dumps({"id": key, "title": document.title, "text": document.text}, ensure_ascii=False).encode() + b"\n"
