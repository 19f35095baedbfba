"""The hierarchical experience knowledge store (HEK): retrieval by cosine over titles.

Titles are embedded as queries, because what they are compared with are questions and search queries. Level 1
holds cases (asked with each search query), 2 patterns and 3 strategies (asked once, with the question). The
record and its files are in experience.py, the making of a store in hek_build.py.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hiexp.config import ConfigError
from hiexp.encoder import Encoder, cosine
from hiexp.experience import LEVELS, Experience, check_lineage, read_store, write_store

__all__ = ["HEK", "Experience", "HEKConfig", "Hit", "fill"]

Block = tuple[str, tuple[str, ...]]
"""Lines to show and the ids of the experiences in them; ("", ()) when there is nothing to say."""
SLACK = 1e-6
"""A float32 cosine that should equal the threshold may miss it by this much."""


@dataclass(frozen=True)
class Hit:
    """A retrieved experience, its cosine to the query, and whether that reached the level's threshold."""

    experience: Experience
    score: float
    accepted: bool


@dataclass(frozen=True)
class HEKConfig:
    """Which store, and when its entries are shown."""

    path: str = ""
    """folder that build_hek.py wrote; empty = no experience"""
    case_threshold: float = 0.8
    """least cosine (inclusive) of a search query and a level-1 title; a good value depends on the encoder"""
    strategy_threshold: float = 0.0
    """least cosine (inclusive) of the question and a level-2 or level-3 title; below it nothing is shown"""
    case_top_k: int = 1
    """cases beside the documents of one query, at most"""
    strategy_top_k: int = 5
    """lines in the strategy block, at most"""
    exclude_self: bool = True
    """hide what was distilled from the very question that is asked (its writer saw the gold answer)"""

    def __post_init__(self) -> None:
        for name in ("case_threshold", "strategy_threshold"):
            if not -1 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name}={getattr(self, name)} is compared with a cosine; set it in [-1, 1]")
        for name in ("case_top_k", "strategy_top_k"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")


class HEK:
    """An immutable store. Rows of `vectors[level]` belong to `levels[level]`, both in order of id."""

    def __init__(
        self,
        experiences: Iterable[Experience],
        encoder: Encoder | None,
        cfg: HEKConfig | None = None,
        vectors: Mapping[int, np.ndarray] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.cfg, self.encoder, self.settings = cfg or HEKConfig(), encoder, dict(settings or {})
        given = sorted(experiences, key=lambda entry: entry.id)
        check_lineage(given)
        self.by_id = {entry.id: entry for entry in given}
        self.levels = {level: [entry for entry in given if entry.level == level] for level in LEVELS}
        if vectors is None:
            vectors = {level: self._encode([e.title for e in entries]) for level, entries in self.levels.items()}
        self.vectors = dict(vectors)
        for level, entries in self.levels.items():
            if len(self.vectors[level]) != len(entries):
                raise ValueError(f"level {level}: {len(self.vectors[level])} vectors, {len(entries)} experiences")
        # a matrix product need not give equal columns equal last bits; equal titles must tie
        self._distinct = {level: _distinct_rows(rows) for level, rows in self.vectors.items()}
        self._hidden = {level: _hidden_rows(entries) for level, entries in self.levels.items()}

    @classmethod
    def empty(cls) -> "HEK":
        """No experience at all; answers every call with nothing, so callers need no special case."""
        return cls((), None)

    @classmethod
    def load(cls, folder: str | Path, encoder: Encoder, cfg: HEKConfig | None = None) -> "HEK":
        """Read a saved store; ConfigError naming file and line if it is damaged or of another encoder."""
        entries, vectors, settings = read_store(folder, encoder.fingerprint, encoder.dim)
        return cls(entries, encoder, cfg, vectors, settings)

    def save(self, folder: str | Path, overwrite: bool = False) -> None:
        """Write the store whole or not at all; ConfigError if the folder is in use or cannot be written."""
        if self.encoder is None:
            raise ValueError("HEK.empty() stands for no experience and is not saved")
        header = {"encoder": self.encoder.fingerprint, "dim": self.encoder.dim, "settings": self.settings}
        write_store(folder, self.levels, self.vectors, header, overwrite)

    def retrieve(
        self,
        queries: Sequence[str],
        level: int,
        top_k: int,
        exclude: Sequence[str] | None = None,
        include_rejected: bool = False,
    ) -> list[list[Hit]]:
        """Per query at most `top_k` hits that reach the level's threshold, best first, ties by id (Eq. 2).

        `exclude` names each query's own sample: level 1 hides every entry that stems from it, levels 2 and 3
        those that stem from nothing else. A query that encodes to zero finds nothing.
        """
        if exclude is not None and len(exclude) != len(queries):
            raise ValueError(f"{len(exclude)} samples to exclude for {len(queries)} queries")
        entries = self.levels[level]
        if not entries or not queries:
            return [[] for _ in queries]
        keys = self._encode(queries)
        distinct, copy_of = self._distinct[level]
        scores = cosine(keys, distinct)[:, copy_of]
        least = (self.cfg.case_threshold if level == 1 else self.cfg.strategy_threshold) - SLACK
        found = []
        for i, row in enumerate(scores):
            hidden = self._hidden[level].get(exclude[i], set()) if exclude and self.cfg.exclude_self else set()
            hits: list[Hit] = []
            for j in np.argsort(-row, kind="stable").tolist() if keys[i].any() else []:
                accepted = bool(row[j] >= least)
                if len(hits) == top_k or not (accepted or include_rejected):
                    break
                if j not in hidden:
                    hits.append(Hit(entries[j], float(row[j]), accepted))
            found.append(hits)
        return found

    def strategy_block(
        self,
        questions: Sequence[str],
        sample_ids: Sequence[str],
        level: int,
        count_tokens: Callable[[str], int],
        budget: int,
    ) -> list[Block]:
        """Per question, what its prompt shows of `level` (2 or 3; 0 = nothing) within `budget` tokens."""
        if level == 0:
            return [("", ()) for _ in questions]
        hits = self.retrieve(questions, level, self.cfg.strategy_top_k, sample_ids)
        return [fill(row, count_tokens, budget) for row in hits]

    def cases(
        self, queries: Sequence[str], sample_ids: Sequence[str], shown: Sequence[Collection[str]]
    ) -> list[list[Hit]]:
        """Per search query, its best cases, without those that say what an entry among `shown` (ids of any level) said.

        A case that was shown is not replaced by the next best, which is further from the query. `fill` makes the block
        of them: it counts tokens, this does not, and so may run in another thread than the policy's tokenizer.
        """
        hits = self.retrieve(queries, 1, self.cfg.case_top_k, sample_ids)
        said = [{self.by_id[name].line() for name in names} for names in shown]
        return [[hit for hit in row if hit.experience.line() not in old] for row, old in zip(hits, said, strict=True)]

    def __len__(self) -> int:
        return len(self.by_id)

    def _encode(self, texts: Sequence[str]) -> np.ndarray:
        if self.encoder is None:
            if texts:
                raise ValueError("a HEK with experiences needs an encoder")
            return np.zeros((0, 0), np.float32)
        return self.encoder.encode(list(texts), "query")


def fill(hits: Sequence[Hit], count_tokens: Callable[[str], int], budget: int, cut: bool = False) -> Block:
    """Lines in rank order while they fit, passing over those that do not; `cut` shortens the first."""
    lines: list[str] = []
    ids: list[str] = []
    for hit in hits:
        line = hit.experience.line()
        while cut and not lines and count_tokens(line) > budget and " " in line:
            line = line.rsplit(" ", 1)[0]
        if line != "-" and count_tokens("\n".join([*lines, line])) <= budget:
            lines.append(line)
            ids.append(hit.experience.id)
    return "\n".join(lines), tuple(ids)


def _distinct_rows(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rows without repetitions, and for each row which of them it is."""
    distinct, copy_of = np.unique(rows, axis=0, return_inverse=True)
    return distinct, copy_of.reshape(-1)


def _hidden_rows(entries: Sequence[Experience]) -> dict[str, set[int]]:
    """Sample id -> rows that are hidden from that sample."""
    rows: dict[str, set[int]] = {}
    for i, entry in enumerate(entries):
        if entry.level == 1 or len(entry.sample_ids) == 1:
            for sample_id in entry.sample_ids:
                rows.setdefault(sample_id, set()).add(i)
    return rows
