"""Samples, the files they come from, and the order in which training draws them.

A file may be the one that its publisher gives: layouts.py reads the containers, sample_fields.py the records. What is
written here is JSON lines (`write_samples`).
"""

import hashlib
import json
import os
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hiexp import sample_fields as fields
from hiexp.config import ConfigError
from hiexp.layouts import DataError, records
from hiexp.layouts import require_file as require_file  # other modules look for it beside read_samples
from hiexp.sample_fields import GOLD_KEYS, ID_KEYS, QUESTION_KEYS

YES_NO = {"yes", "no", "true", "false"}
ON_BAD_ROW = ("error", "skip")


@dataclass(frozen=True)
class Sample:
    """One question of a dataset with every answer that counts as right."""

    id: str
    question: str
    answers: tuple[str, ...]
    family: str = ""
    """what kind of question it is (a dataset's own `type`, or a lab family); tables have a row for each"""
    family_group: str = ""
    """a coarser grouping of families, for example taught and held_back in the lab"""
    hops: int = 0
    """as the data set labels it; 0 = not stated"""
    facts: int = 0
    """number of supporting facts; 0 = not stated"""


def read_samples(
    path: str | Path,
    limit: int = 0,
    on_bad_row: str = "error",
    *,
    aliases: str | Path = "",
    keep: Callable[[Mapping[str, Any]], bool] = lambda record: True,
) -> list[Sample]:
    """The samples of a file in file order, at most `limit` of them (0 = all); any layout that layouts.records reads.

    Golds keep their spelling; numbers become text (142.0 is "142"). Where no row has an id, the id is the 1-based row
    ("row-17"). A file that repeats its questions k times for Avg@k gives each once; rows marked unanswerable are left
    out; both with a warning that counts them. `aliases` is 2Wiki's `id_aliases.json`: its names of a row's `answer_id`
    become golds too. Rows that `keep` refuses do not count as read.

    Raises ConfigError for a missing or empty file and DataError for a record without question or gold answer, without
    an id where others have one, or with the id of another question. `on_bad_row="skip"` leaves such rows out and warns
    with their number and the first of them.
    """
    if on_bad_row not in ON_BAD_ROW:
        raise ConfigError(f"on_bad_row must be one of {', '.join(ON_BAD_ROW)}; got {on_bad_row!r}")
    reader = _Reader(path, limit, on_bad_row == "skip", read_aliases(aliases) if aliases else {})
    for where, record in records(path, reader.leave_out):
        reader.take(where, record, keep)
        if reader.is_full:
            break
    return reader.finish()


class _Reader:
    """What read_samples knows of the rows before the one it reads."""

    def __init__(self, path: str | Path, limit: int, skips: bool, aliases: Mapping[str, Sequence[str]]) -> None:
        self.path, self.limit, self.skips, self.aliases = path, limit, skips, aliases
        self.samples: list[Sample] = []
        self.bad: list[DataError] = []
        self.places: dict[str, tuple[str, Sample]] = {}
        self.times: Counter[str] = Counter()
        self.nameless: list[tuple[str, int]] = []
        self.rows = self.unanswerable = self.aliased = 0

    @property
    def is_full(self) -> bool:
        """Whether `limit` is reached; a file without ids is read whole, since its repeats show only then."""
        return 0 < self.limit <= len(self.samples) and not self.nameless

    def leave_out(self, error: DataError) -> None:
        """A row that the container could not give."""
        self.rows += 1
        self._leave_out(error)

    def take(self, where: str, record: Mapping[str, Any], keep: Callable[[Mapping[str, Any]], bool]) -> None:
        self.rows += 1
        if not keep(record):
            return
        if fields.is_unanswerable(record):
            self.unanswerable += 1
            return
        answer_id = str(record.get("answer_id"))
        try:
            sample = _sample(record, where, self.aliases.get(answer_id, ()))
            if sample.id in self.places:
                self._again(sample, where)
                return
        except DataError as error:
            self._leave_out(error)
            return
        if sample.id:
            self.places[sample.id] = (where, sample)
            self.times[sample.id] += 1
        else:
            self.nameless.append((where, len(self.samples)))
            sample = replace(sample, id=f"row-{self.rows}")
        self.aliased += answer_id in self.aliases
        self.samples.append(sample)

    def _leave_out(self, error: DataError) -> None:
        if not self.skips:
            raise error
        self.bad.append(error)

    def _again(self, sample: Sample, where: str) -> None:
        there, known = self.places[sample.id]
        if (sample.question, sample.answers) != (known.question, known.answers):
            what = "with another question" if sample.question != known.question else "with other answers"
            raise DataError(f"{where}: id {sample.id!r} was already used at {there} {what}; ids must be unique")
        self.times[sample.id] += 1

    def finish(self) -> list[Sample]:
        """The samples, after what is known of the whole file: rows without id, repeats, what was left out."""
        samples, times = self.samples, set(self.times.values())
        if self.nameless and len(self.nameless) < len(samples):
            samples = self._without_nameless()
        elif self.nameless:
            samples, k = once_each(samples)
            times = {k}
        if times - {1} and samples:
            often = f"each of {len(samples)} problems stands {max(times)} times"
            if len(times) > 1:
                several = sum(n > 1 for n in self.times.values())
                often = f"{several} of {len(samples)} problems stand up to {max(times)} times"
            self._warn(f"{often} in the file; each is read once (Avg@k draws its own samples)")
        if self.unanswerable:
            self._warn(f"{self.unanswerable} of {self.rows} rows are marked unanswerable and were left out")
        if self.bad:
            self._warn(f"{len(self.bad)} rows cannot be used and were left out; the first: {self.bad[0]}")
        if self.aliases and not self.aliased:
            self._warn("no row has an answer_id that the alias file knows; the golds are as they were")
        if not samples:
            raise DataError(f"{self.path}: none of its rows can be used{f'; {self.bad[0]}' if self.bad else ''}")
        return samples[: self.limit] if self.limit else samples

    def _without_nameless(self) -> list[Sample]:
        for where, _ in self.nameless:
            must = f"one of {', '.join(ID_KEYS)} must hold it"
            self._leave_out(DataError(f"{where}: no id, which other rows have; {must}"))
        left_out = {position for _, position in self.nameless}
        return [sample for position, sample in enumerate(self.samples) if position not in left_out]

    def _warn(self, message: str) -> None:
        warnings.warn(f"{self.path}: {message}", stacklevel=4)


def once_each(samples: Sequence[Sample]) -> tuple[list[Sample], int]:
    """(the first of each question, k) where every question stands k > 1 times with the same golds; else (all, 1)."""
    counts = Counter((sample.question, sample.answers) for sample in samples)
    times = set(counts.values())
    if len(times) != 1 or times == {1}:
        return list(samples), 1
    return list({(sample.question, sample.answers): sample for sample in reversed(samples)}.values())[::-1], times.pop()


def read_aliases(path: str | Path) -> dict[str, list[str]]:
    """2Wiki's `id_aliases.json`: Q_id -> aliases and demonyms, the golds of its scorer beside the answer itself."""
    found = {}
    for where, record in records(path):
        if not isinstance(record.get("Q_id"), str):
            raise DataError(f"{where}: no Q_id; expected lines of Q_id, aliases, demonyms")
        found[record["Q_id"]] = fields.listed(record.get("aliases")) + fields.listed(record.get("demonyms"))
    return found


def write_samples(path: str | Path, samples: Iterable[Sample]) -> None:
    """Write samples as JSON lines that `read_samples` reads back as they were; never leaves half a file."""
    target = Path(path)
    part = target.with_name(target.name + ".tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with part.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(_stated(sample), ensure_ascii=False) + "\n" for sample in samples)
        part.replace(target)
    except OSError as error:
        if part.is_file():
            part.unlink()
        raise ConfigError(f"cannot write {target}: {error}; choose a writable folder with space") from error


def _stated(sample: Sample) -> dict[str, Any]:
    """The fields of a sample without counts that are not stated."""
    return {name: value for name, value in asdict(sample).items() if value != 0}


def subset(samples: Sequence[Sample], n: int, seed: int) -> list[Sample]:
    """`n` random samples in file order (0 = all); with one seed a larger subset holds every smaller one."""
    if n > len(samples):
        raise ConfigError(f"{n} samples asked for, the data has {len(samples)}; lower the number or use 0 for all")
    if n == 0:
        return list(samples)
    chosen = np.random.default_rng(seed).permutation(len(samples))[:n]
    return [samples[i] for i in sorted(chosen)]


def shared_questions(samples: Sequence[Sample], others: Sequence[Sample]) -> list[str]:
    """Ids of `samples` whose question (words, case folded) is also one of `others`: train/test overlap."""
    known = {_words(other.question) for other in others}
    return [sample.id for sample in samples if _words(sample.question) in known]


def is_row_number(sample_id: str) -> bool:
    """Whether an id only counts (7, row-7, dev_7), as the ids of many sets do: it says nothing across files."""
    return bool(re.fullmatch(r"(?:(?:row|train|dev|test|val|validation)[-_])?\d+", sample_id))


def golds_in_questions(samples: Sequence[Sample]) -> list[str]:
    """Ids of samples whose question holds a gold answer (whole words, yes/no aside): leaked, or "A or B?"."""

    def leaks(sample: Sample) -> bool:
        golds = {_words(answer) for answer in sample.answers} - YES_NO - {""}
        return any(f" {gold} " in f" {_words(sample.question)} " for gold in golds)

    return [sample.id for sample in samples if leaks(sample)]


class PromptSampler:
    """Draws training samples without replacement, epoch after epoch, each epoch in its own order.

    A batch that the epoch cannot fill continues into the next one, so every sample is drawn once per epoch
    whatever the batch size. Orders depend on (seed, epoch) alone: a restored sampler continues where it was.
    """

    def __init__(self, samples: Sequence[Sample], seed: int) -> None:
        if not samples:
            raise ConfigError("no training samples; check data.train and its limit")
        self.samples, self.seed = list(samples), seed
        self.epoch, self.position = 0, 0
        self._order = self._epoch_order()

    def next(self, n: int) -> list[Sample]:
        """The next `n` samples."""
        if n < 1:
            raise ValueError(f"next({n}): a batch holds at least one sample")
        batch: list[Sample] = []
        while len(batch) < n:
            if self.position == len(self.samples):
                self.epoch, self.position = self.epoch + 1, 0
                self._order = self._epoch_order()
            taken = self._order[self.position : self.position + n - len(batch)]
            self.position += len(taken)
            batch += [self.samples[i] for i in taken]
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "position": self.position,
            "seed": self.seed,
            "samples": self._fingerprint(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state; ConfigError when it belongs to other data or another seed."""
        for name, now in (("seed", self.seed), ("samples", self._fingerprint())):
            if state[name] != now:
                raise ConfigError(f"cannot resume: the {name} of the saved run differ ({state[name]}, now {now})")
        self.epoch, self.position = state["epoch"], state["position"]
        self._order = self._epoch_order()

    def _epoch_order(self) -> list[int]:
        return np.random.default_rng([self.seed, self.epoch]).permutation(len(self.samples)).tolist()

    def _fingerprint(self) -> str:
        rows = ((sample.id, sample.question, sample.answers) for sample in self.samples)
        return hashlib.sha256("\n".join(map(repr, rows)).encode()).hexdigest()[:16]


@contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """A temporary sibling of `path` to fill; it becomes `path` at the end, or vanishes on an error.

    Refuses a `path` that holds files already, and turns a full or read-only disk into a ConfigError. Enter it
    before the expensive work, so that an unwritable place is known first.
    """
    target = Path(path)
    part = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} already exists and is left as it is; remove it or choose another folder")
    try:
        part.mkdir(parents=True)
        yield part
        part.replace(target)
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error}; choose a writable folder with enough space") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _sample(record: Mapping[str, Any], where: str, aliases: Sequence[str] = ()) -> Sample:
    key = fields.id_of(record)
    name = f"sample {key!r}" if key else "the row"
    question = fields.question_of(record)
    if not question:
        raise DataError(f"{where}: {name} has no question; one of {', '.join(QUESTION_KEYS)} must hold it")
    answers: list[str] = []
    for gold in [*fields.golds_of(record), *aliases]:
        try:
            answers.append(fields.answer_text(gold))
        except TypeError as error:
            raise DataError(f"{where}: {name} has {error}: {gold!r}") from None
    answers = list(dict.fromkeys(filter(None, answers)))
    if not answers:
        raise DataError(f"{where}: {name} has no gold answer; one of {', '.join(GOLD_KEYS)} must hold it")
    return Sample(
        id=key,
        question=question,
        answers=tuple(answers),
        family=fields.family_of(record),
        family_group=fields.text_of(record.get("family_group")),
        hops=fields.hops_of(record),
        facts=fields.facts_of(record),
    )


def _words(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.casefold()))
