"""How much of what the answers rest on a search finds.

    python -m hiexp.search recall search.index=runs/wiki search.backend=hybrid encoder.path=... questions=[q.jsonl]
    python -m hiexp.search recall search.index=runs/wiki_ivf against=runs/wiki_flat ...   # what it loses

A question brings its supporting passages as `supporting_ids`, ids of the corpus, or with its own paragraphs (HotpotQA,
2Wiki, MuSiQue, ...), which are then looked up by title and text. A passage that was cut is found with any of its parts.
Recall@k of a question is the share of its supporting passages among the first k; the table has means over questions
and 95% bootstrap intervals.
"""

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hiexp.config import ConfigError, run_script
from hiexp.corpora import question_passages, unnamed
from hiexp.data import QUESTION_KEYS, DataError
from hiexp.encoder import EncoderConfig, load_encoder
from hiexp.indexes import read_manifest
from hiexp.metrics import bootstrap_interval
from hiexp.passages import Passages, PassageStore, Tally, pieces, stream_corpus
from hiexp.raw_text import question_records
from hiexp.search import NEEDS_ENCODER, open_search
from hiexp.search_types import ScoredSearch, SearchConfig
from hiexp.tracking import progress
from hiexp.trajectory import Document

AT_ONCE = 64
"""queries that are searched together"""


@dataclass(frozen=True)
class RecallConfig:
    questions: tuple[str, ...]
    """files of questions with supporting_ids, or with their paragraphs"""
    search: SearchConfig = field(default_factory=SearchConfig)
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    k: tuple[int, ...] = (2, 5, 10)
    """places that are looked at"""
    limit: int = 0
    """use only the first so many questions of each file; 0 = all"""
    against: str = ""
    """folder of an exact index of the same passages: also tells the share of its first k that this search finds"""
    json: str = ""
    """file for the figures; empty = only the table"""

    def __post_init__(self) -> None:
        if not self.questions:
            raise ConfigError("questions is empty; list files of questions with their supporting passages")
        if not self.k or min(self.k) < 1:
            raise ConfigError(f"k={list(self.k)} must be places from 1 on")


@dataclass
class Question:
    """A query and, for each supporting passage, what it is known by: an id of the corpus, or its passages' contents."""

    text: str
    supporting: list[str | tuple[Document, ...]]


def read_questions(path: str | Path, words: int, limit: int = 0) -> list[Question]:
    """The questions of a file that name supporting passages; `words` as the corpus was cut."""
    found: list[Question] = []
    for number, (where, record) in enumerate(question_records(path)):
        text, ids = next((record[key] for key in QUESTION_KEYS if key in record), None), record.get("supporting_ids")
        if not isinstance(ids or [], list):
            raise DataError(f"{where}: supporting_ids must be a list, not {type(ids).__name__}")
        supporting: list[str | tuple[Document, ...]] = list(map(str, ids or ()))
        if text and not supporting:
            own = [p for p in question_passages(record, where, unnamed(Path(path), number)) if p.supporting]
            supporting = [tuple(document for _, document in pieces(passage, words)) for passage in own]
        if text and supporting:
            found.append(Question(str(text), supporting))
        if len(found) == limit > 0:
            break
    if not found:
        raise ConfigError(f"{path}: no question names its supporting passages (supporting_ids, or marked paragraphs)")
    return found


class Targets:
    """Which ids of the corpus stand for a supporting passage; `missing` are those that the corpus does not have."""

    def __init__(self, questions: Sequence[Question], passages: Passages, aliases: dict[str, str]) -> None:
        wanted = {item for question in questions for item in question.supporting}
        documents = {document for item in wanted if not isinstance(item, str) for document in item}
        names = {item for item in wanted if isinstance(item, str)}
        self._ids: dict[str | Document, set[str]] = {}
        for key, document in passages:
            for known in ({key, _whole(key)} & names) | ({document} & documents):
                self._ids.setdefault(known, set()).add(key)
        for left_out, kept in aliases.items():
            for known in {left_out, _whole(left_out)} & names:
                self._ids.setdefault(known, set()).add(kept)
        self.missing = sum(not self.ids(item) for question in questions for item in question.supporting)

    def ids(self, item: str | tuple[Document, ...]) -> set[str]:
        """Ids under which the supporting passage, or a part of it, is found."""
        return set().union(*(self._ids.get(known, ()) for known in ((item,) if isinstance(item, str) else item)))

    def recall(self, question: Question, found: Sequence[str]) -> float:
        """The share of the question's supporting passages among `found`."""
        return sum(not self.ids(item).isdisjoint(found) for item in question.supporting) / len(question.supporting)


def measure(cfg: RecallConfig, backend: ScoredSearch, exact: ScoredSearch | None = None) -> dict[str, Any]:
    """{file: {questions, missing, queries_per_second, recall: {k: [mean, low, high]}, exact: {k: share}}}."""
    words, passages, aliases = _corpus(cfg.search, backend)
    figures: dict[str, Any] = {}
    for path in cfg.questions:
        questions = read_questions(path, words, cfg.limit)
        targets = Targets(questions, passages, aliases)
        seconds = time.perf_counter()
        found = list(_search(backend, questions, max(cfg.k), f"search {Path(path).name}"))
        seconds = time.perf_counter() - seconds
        of_file: dict[str, Any] = {"questions": len(questions), "missing": targets.missing}
        of_file["queries_per_second"] = round(len(questions) / seconds, 1)
        of_file["recall"] = {
            str(k): _mean([targets.recall(q, ids[:k]) for q, ids in zip(questions, found, strict=True)]) for k in cfg.k
        }
        if exact is not None:
            truth = list(_search(exact, questions, max(cfg.k), "search exactly"))
            of_file["exact"] = {
                str(k): _mean([_share(ids[:k], best[:k]) for ids, best in zip(found, truth, strict=True)])
                for k in cfg.k
            }
        figures[str(path)] = of_file
    return figures


def table(figures: dict[str, Any]) -> str:
    """The figures as Markdown."""
    ks = list(next(iter(figures.values()))["recall"])
    has_exact = "exact" in next(iter(figures.values()))
    head = ["questions", *(f"recall@{k}" for k in ks), *(f"of exact@{k}" for k in ks if has_exact), "queries/s"]
    lines = ["| file | " + " | ".join(head) + " |", "|---" * (len(head) + 1) + "|"]
    for path, of_file in figures.items():
        cells = [str(of_file["questions"])]
        for name in ("recall", "exact") if has_exact else ("recall",):
            cells += ["{:.3f} [{:.3f}, {:.3f}]".format(*of_file[name][k]) for k in ks]
        lines.append(f"| {Path(path).name} | " + " | ".join([*cells, str(of_file["queries_per_second"])]) + " |")
    lines += [
        f"{path}: {of_file['missing']} supporting passages are not in the corpus and count as not found"
        for path, of_file in figures.items()
        if of_file["missing"]
    ]
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    return run_script(_run, RecallConfig, argv, __doc__)


def _run(cfg: RecallConfig) -> None:
    _check_writable(cfg.json)
    encoder = load_encoder(cfg.encoder) if cfg.search.backend in NEEDS_ENCODER or cfg.against else None
    exact = None
    if cfg.against:
        exact = open_search(replace(cfg.search, index=cfg.against, backend="dense", rerank="", breadth=0), encoder)
    backend = open_search(cfg.search, encoder)
    figures = measure(cfg, backend, exact)
    print(table(figures))
    if cfg.json:
        try:
            Path(cfg.json).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"json={cfg.json} cannot be written: {error}") from error


def _check_writable(path: str) -> None:
    """ConfigError, before hours of work, for a file that cannot be written."""
    folder = Path(path).parent
    if path and (Path(path).is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK)):
        raise ConfigError(f"json={path} cannot be written; name a file in a folder that is there and writable")


def _corpus(cfg: SearchConfig, backend: ScoredSearch) -> tuple[int, Passages, dict[str, str]]:
    """How it was cut, its passages, and the ids of those that were left out as repetitions."""
    if cfg.index:
        store = PassageStore(cfg.index)
        return int(read_manifest(cfg.index)["words"]), store, store.aliases()
    if not cfg.corpus:
        raise ConfigError("recall looks ids up in the corpus; set search.index or search.corpus")
    pairs, aliases = [], {}
    for (key, document), first in stream_corpus(cfg.corpus, 0, Tally()):
        if first is None:
            pairs.append((key, document))
        else:
            aliases[key] = first
    return 0, pairs, aliases


def _search(backend: ScoredSearch, questions: Sequence[Question], top_k: int, label: str) -> Iterator[list[str]]:
    with progress(total=len(questions), label=label, unit="query") as bar:
        for start in range(0, len(questions), AT_ONCE):
            texts = [question.text for question in questions[start : start + AT_ONCE]]
            yield from ([found.id for found in row] for row in backend.search_scored(texts, top_k))
            bar.update(len(texts))


def _whole(key: str) -> str:
    """Id of the text that a passage was cut from."""
    whole, mark, number = key.rpartition("#")
    return whole if mark and number.isdigit() else key


def _share(found: Sequence[str], best: Sequence[str]) -> float:
    return len(set(found) & set(best)) / len(best) if best else 1.0


def _mean(values: Sequence[float]) -> list[float]:
    return [round(value, 4) for value in (sum(values) / len(values), *bootstrap_interval(values, 0))]
