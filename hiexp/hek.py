"""The hierarchical experience knowledge store (HEK): retrieval by cosine over titles.

Titles are embedded as queries, because what they are compared with are questions and search queries. Level 1
holds cases (asked with each search query), 2 patterns and 3 strategies (asked once, with the question). The
record and its files are in experience.py, the making of a store in hek_build.py.
"""

import importlib
import math
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hiexp.acceptance import (
    BACKGROUND,
    FEATURES,
    QUESTIONS,
    Gate,
    Judge,
    Record,
    Standard,
    conformal_bound,
    fit_gate,
    known,
    mismatched_best,
    pick,
)
from hiexp.config import ConfigError
from hiexp.data import Sample, is_row_number, shared_questions
from hiexp.effects import Outlook
from hiexp.encoder import Encoder, require_unit
from hiexp.experience import LEVELS, Asked, Experience, check_lineage, read_asked, read_store, write_store
from hiexp.hits import Block, Hit, best_hits, fill
from hiexp.languages import Centring

__all__ = ["HEK", "Experience", "HEKConfig", "refuse_evaluation_questions"]


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
    accept: Literal["fixed", "zscore", "gate"] = "fixed"
    """fixed: the two thresholds above; zscore: calibrated on the store's own questions; gate: learned from uplift"""
    alpha: float = 0.05
    """zscore: share of the questions without a lesson in the store that may be shown something"""
    csls: bool = False
    """zscore and gate: take from each title's score how near it is to questions in general (hubness)"""
    margin: float = 0.0
    """least lead over the best entry of another cluster (cosine in fixed, else z); 0 = none is asked for"""
    gate: str = ""
    """file of a fitted gate (HEK.fit_gate)"""
    gate_probability: float = 0.5
    """gate: least probability (inclusive) that an entry helps"""
    back_off: bool = False
    """beside the documents of a query without a case, show the pattern (level 2) that is nearest to it"""
    max_success: float = 1.0
    """show nothing to a question whose expected reward without experience is above this (difficulty); 1 = no limit"""
    min_uplift: float | None = None
    """show nothing to a question whose expected uplift is below this; null = not asked"""
    centre: Literal["none", "language"] = "none"
    """language: take its language's mean from each vector, so that lessons are found across languages; the thresholds
    are then cosines of centred vectors; none: the paper"""
    centre_questions: str = ""
    """file of questions, as data.train, whose languages get a mean too; without it those of the store's questions"""

    def __post_init__(self) -> None:
        for name in ("case_threshold", "strategy_threshold"):
            if not -1 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name}={getattr(self, name)} is compared with a cosine; set it in [-1, 1]")
        for name in ("case_top_k", "strategy_top_k"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("alpha", "gate_probability"):
            if not 0 < getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must lie between 0 and 1")
        for name in ("max_success", "min_uplift"):
            if (value := getattr(self, name)) is not None and not -1 <= value <= 1:
                raise ConfigError(f"{name}={value} is compared with rewards; set it in [-1, 1]")
        if not 0 <= self.margin <= (2 if self.accept == "fixed" else math.inf):
            raise ConfigError(f"margin={self.margin} must be 0 (none) or above, and with accept=fixed at most 2")
        if self.csls and self.accept == "fixed":
            raise ConfigError("csls=true changes scores that accept=fixed compares as cosines; set accept=zscore")
        if self.centre_questions and self.centre == "none":
            raise ConfigError("centre_questions is read by centre=language; set that, or leave it out")
        if (self.accept == "gate") != bool(self.gate):
            raise ConfigError(f"gate={self.gate!r}, accept={self.accept}: a gate's file and accept=gate go together")


class HEK:
    """An immutable store. Rows of `vectors[level]` belong to `levels[level]`, both in order of id."""

    def __init__(
        self,
        experiences: Iterable[Experience],
        encoder: Encoder | None,
        cfg: HEKConfig | None = None,
        vectors: Mapping[int, np.ndarray] | None = None,
        settings: Mapping[str, Any] | None = None,
        asked: Sequence[Asked] = (),
        asked_vectors: np.ndarray | None = None,
    ) -> None:
        self.cfg, self.encoder, self.settings = cfg or HEKConfig(), encoder, dict(settings or {})
        given = sorted(experiences, key=lambda entry: entry.id)
        check_lineage(given)
        self.by_id = {entry.id: entry for entry in given}
        self.levels = {level: [entry for entry in given if entry.level == level] for level in LEVELS}
        if vectors is None:
            vectors = {level: self._encode([e.title for e in entries]) for level, entries in self.levels.items()}
        self.vectors = dict(vectors)
        self.asked = tuple(asked)
        self._asked_vectors = self._encode([a.question for a in asked]) if asked_vectors is None else asked_vectors
        for level, entries in self.levels.items():
            if len(self.vectors[level]) != len(entries):
                raise ValueError(f"level {level}: {len(self.vectors[level])} vectors, {len(entries)} experiences")
        self.centring, self._keys = None, self.vectors  # centred ones are not saved: an entry more moves them all
        if self.cfg.centre == "language" and given:
            self.centring = Centring(self.levels, self.vectors, self._encode, self.cfg.centre_questions)
            self._keys = self.centring.keys
        # a matrix product need not give equal columns equal last bits; equal titles must tie
        self._distinct = {level: _distinct_rows(rows) for level, rows in self._keys.items()}
        self._hidden = {level: _hidden_rows(entries) for level, entries in self.levels.items()}
        self._uncalibrated: dict[int, str] = {}
        self._judges = {level: self._judge(level, self.cfg.accept) for level, rows in self.levels.items() if rows}

    @classmethod
    def empty(cls) -> "HEK":
        """No experience at all; answers every call with nothing, so callers need no special case."""
        return cls((), None, settings={"version": -1})

    @classmethod
    def load(cls, folder: str | Path, encoder: Encoder, cfg: HEKConfig | None = None) -> "HEK":
        """Read a saved store; ConfigError naming file and line if it is damaged or of another encoder."""
        entries, vectors, settings = read_store(folder, encoder.fingerprint, encoder.dim)
        return cls(entries, encoder, cfg, vectors, settings, *read_asked(folder, encoder.dim))

    def save(self, folder: str | Path, overwrite: bool = False) -> None:
        """Write the store whole or not at all; ConfigError if the folder is in use or cannot be written."""
        if self.encoder is None:
            raise ValueError("HEK.empty() stands for no experience and is not saved")
        header = {"encoder": self.encoder.fingerprint, "dim": self.encoder.dim, "settings": self.settings}
        write_store(folder, self.levels, self.vectors, header, overwrite, self.asked, self._asked_vectors)

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
        if not self.levels[level] or not queries:
            return [[] for _ in queries]
        if level in self._uncalibrated:
            raise ConfigError(self._uncalibrated[level])
        keys = self.embed(queries)
        judge, cosines, values = self._judges[level], *self._scores(self._judges[level], level, keys)
        found = []
        for i, key in enumerate(keys):
            hidden = self._hidden[level].get(exclude[i], set()) if exclude and self.cfg.exclude_self else set()
            rows = (key, cosines[i], values[i])
            found.append(best_hits(judge, *rows, hidden, top_k, include_rejected) if key.any() else [])
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
        missed = [i for i, row in enumerate(hits) if not row]
        if self.cfg.back_off and missed:
            ids = [sample_ids[i] for i in missed]
            for i, row in zip(missed, self.retrieve([queries[i] for i in missed], 2, 1, ids), strict=True):
                hits[i] = row
        said = [{self.by_id[name].line() for name in names} for names in shown]
        return [[hit for hit in row if hit.experience.line() not in old] for row, old in zip(hits, said, strict=True)]

    def fit_gate(self, found: Sequence[Record]) -> Gate:
        """A gate for stores of this encoder (and hek.csls) from what entries did; ConfigError if all helped or none."""
        kept = known(found, self.by_id)
        rows = np.zeros((len(kept), len(FEATURES)))
        for level in LEVELS:
            mine = [i for i, record in enumerate(kept) if self.by_id[record.entry].level == level]
            if mine:
                judge, keys = self._judge(level, "features"), self.embed([kept[i].query for i in mine])
                place = {entry.id: j for j, entry in enumerate(self.levels[level])}
                for i, cosines, values in zip(mine, *self._scores(judge, level, keys), strict=True):
                    row, hidden = place[kept[i].entry], self._hidden[level].get(kept[i].sample_id, set())
                    leads = judge.leads(values, hidden - {row})
                    rows[i] = judge.features(cosines, values, leads, row)
        return fit_gate(rows, [record.uplift > 0 for record in kept], self._scored_by, self.cfg.csls)

    def with_not_when(self, mined: Mapping[str, Sequence[str]]) -> "HEK":
        """A store with queries added to the not_when of entries (`mine_not_when` finds them)."""
        entries = [
            replace(entry, not_when=tuple(dict.fromkeys([*entry.not_when, *mined.get(entry.id, ())])))
            for entry in self.by_id.values()
        ]
        return HEK(entries, self.encoder, self.cfg, self.vectors, self.settings, self.asked, self._asked_vectors)

    def with_entries(
        self, entries: Iterable[Experience], vectors: Mapping[int, np.ndarray], settings: Mapping[str, Any]
    ) -> "HEK":
        """A store of other entries for the same use, with the same table of questions."""
        return HEK(entries, self.encoder, self.cfg, vectors, settings, self.asked, self._asked_vectors)

    def with_asked(self, asked: Sequence[Asked]) -> "HEK":
        """A store with another table of questions; those that it knows already are not embedded again."""
        rows = {one.question: row for one, row in zip(self.asked, self._asked_vectors, strict=True)}
        new = list(dict.fromkeys(one.question for one in asked if one.question not in rows))
        rows |= dict(zip(new, self._encode(new), strict=True))
        stacked = np.stack([rows[one.question] for one in asked]) if asked else self._encode([])
        return HEK(self.by_id.values(), self.encoder, self.cfg, self.vectors, self.settings, asked, stacked)

    def wants(self, questions: Sequence[str], sample_ids: Sequence[str]) -> list[bool]:
        """Whether each question should be shown experience at all (max_success, min_uplift); its own record counts.

        That record holds the policy's own rewards and nothing of the gold answer; an evaluation question has none.
        """
        cfg = self.cfg
        if not self.asked or (cfg.max_success == 1 and cfg.min_uplift is None):
            return [True] * len(questions)
        names = list(zip(sample_ids, questions, strict=True))
        return self._outlook.wants(self._encode(questions), names, cfg.max_success, cfg.min_uplift)

    def __len__(self) -> int:
        return len(self.by_id)

    @property
    def version(self) -> int:
        """0 for a store as it was built, one more for each refresh that was accepted, -1 for `empty`."""
        return int(self.settings.get("version", 0))

    def _judge(self, level: int, mode: str) -> Judge:
        """What decides at this level; with zscore calibrated now."""
        entries = self.levels[level]
        told = sorted({text for entry in entries for text in entry.not_when})
        place, vectors = {text: i for i, text in enumerate(told)}, self.embed(told)
        negatives = {
            i: vectors[[place[text] for text in entry.not_when]] for i, entry in enumerate(entries) if entry.not_when
        }
        if mode == "fixed":
            threshold = self.cfg.case_threshold if level == 1 else self.cfg.strategy_threshold
            return Judge(entries, threshold, mode, self.cfg.margin, negatives=negatives)
        gate = None
        if mode == "gate":
            gate = Gate.load(self.cfg.gate, self._scored_by, self.cfg.csls)
        distinct = self._distinct[level][0]
        standard = Standard(self._background, distinct, self._questions[1], self.cfg.csls)
        judge = Judge(entries, self.cfg.gate_probability, mode, self.cfg.margin, standard, gate, negatives)
        if mode == "zscore":
            judge = replace(judge, threshold=self._bound(judge, level))
        return judge

    def _bound(self, judge: Judge, level: int) -> float:
        """z* of a level; inf, and a refusal when it is asked for, where nothing can be calibrated."""
        ids, keys = self._questions
        blocks: dict[int, np.ndarray] = {}

        def values(i: int) -> np.ndarray:
            at = i // 64
            if at not in blocks:
                blocks.clear()
                blocks[at] = self._scores(judge, level, keys[at * 64 : at * 64 + 64])[1]
            return blocks[at][i % 64]

        try:
            return conformal_bound(
                mismatched_best(self.levels[level], self.by_id.values(), ids, values), self.cfg.alpha
            )
        except ValueError as error:
            remedy = "raise hek.alpha or use hek.accept=fixed"
            self._uncalibrated[level] = f"hek.accept=zscore cannot be calibrated for level {level}: {error}; {remedy}"
            return math.inf

    @cached_property
    def _outlook(self) -> Outlook:
        return Outlook(self.asked, self._asked_vectors)

    @cached_property
    def _questions(self) -> tuple[list[str], np.ndarray]:
        """Source questions: ids and [Q, D] vectors of those that the encoder knows something of."""
        asked = sorted({pair for entry in self.by_id.values() for pair in entry.qa_groups})
        asked = [asked[i] for i in pick(len(asked), QUESTIONS)]
        keys = self.embed([question for _, question in asked])
        told = [i for i in range(len(asked)) if keys[i].any()]
        return [asked[i][0] for i in told], keys[told]

    @cached_property
    def _background(self) -> np.ndarray:
        """[B, D] titles of any level, no two alike."""
        rows = np.unique(np.concatenate([rows for rows in self._keys.values() if len(rows)]), axis=0)
        rows = rows[rows.any(axis=1)]
        return rows[pick(len(rows), BACKGROUND)]

    def _scores(self, judge: Judge, level: int, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[Q, N] cosines, and what the entries are ranked by."""
        distinct, copy_of = self._distinct[level]
        require_unit(keys)
        cosines = keys @ distinct.T
        values = judge.values(keys, np.clip(cosines, -1.0, 1.0, out=cosines))
        if copy_of is None:
            return cosines, values
        return cosines[:, copy_of], values[:, copy_of]

    @property
    def _scored_by(self) -> str:
        """What a gate is fitted for: the encoder, and whether its vectors are centred."""
        return (self.encoder.fingerprint if self.encoder else "") + (" centred by language" if self.centring else "")

    def embed(self, queries: Sequence[str]) -> np.ndarray:
        """[Q, D] vectors of queries as they are compared with titles: centred where hek.centre says so."""
        rows = self._encode(queries)
        return self.centring.centre(rows, queries) if self.centring else rows

    def _encode(self, texts: Sequence[str]) -> np.ndarray:
        if self.encoder is None:
            if texts:
                raise ValueError("a HEK with experiences needs an encoder")
            return np.zeros((0, 0), np.float32)
        return self.encoder.encode(list(texts), "query")


def refuse_evaluation_questions(hek: HEK, samples: Sequence[Sample]) -> None:
    """ConfigError if an entry stems from one of `samples`, or its rewards are kept; by id or by its words."""
    sources = {pair for entry in hek.by_id.values() for pair in entry.qa_groups}
    sources |= {(asked.id, asked.question) for asked in hek.asked}
    ids = {sample_id for sample_id, _ in sources if not is_row_number(sample_id)}
    same_words = set(shared_questions(samples, [Sample(sample_id, text, ()) for sample_id, text in sorted(sources)]))
    if seen := [sample for sample in samples if sample.id in ids or sample.id in same_words]:
        first = seen[0]
        how = "words of the question" if first.id in same_words else "id; ids must tell questions apart"
        raise ConfigError(
            f"the HEK was distilled from {len(seen)} of the {len(samples)} evaluation questions, first {first.id!r} "
            f"(same {how}); evaluate on other questions, or build the HEK without them"
        )


def _distinct_rows(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """The rows without repetitions, and for each row which of them it is; None if there are none. Checked once."""
    require_unit(rows)
    distinct, copy_of = np.unique(rows, axis=0, return_inverse=True)
    return (rows, None) if len(distinct) == len(rows) else (distinct, copy_of.reshape(-1))


def _hidden_rows(entries: Sequence[Experience]) -> dict[str, set[int]]:
    """Sample id -> rows that are hidden from that sample."""
    rows: dict[str, set[int]] = {}
    for i, entry in enumerate(entries):
        if entry.level == 1 or len(entry.sample_ids) == 1:
            for sample_id in entry.sample_ids:
                rows.setdefault(sample_id, set()).add(i)
    return rows


if __name__ == "__main__":
    # by name: the viewer stands in a higher layer than this file
    sys.exit(importlib.import_module("hiexp.hek_view").main(sys.argv[1:]))
