"""Samples, the files they come from, and the order in which training draws them.

A data file is JSON lines or one JSON list, told apart by content, never by suffix. A dataset that names its
fields differently needs its names in the key tuples below; one with nested records is converted first
(`write_samples`).
"""

import difflib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hiexp.config import ConfigError

QUESTION_KEYS = ("question", "Question", "question_text", "problem")
GOLD_KEYS = ("answers", "golden_answers", "answer", "Answer", "final_answer", "ground_truth")
ID_KEYS = ("id", "_id", "question_id", "qid", "idx")
YES_NO = {"yes", "no", "true", "false"}


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


class DataError(ConfigError, ValueError):
    """A record that cannot be used; the message names the file, the line (or list position) and the id."""


def read_samples(path: str | Path, limit: int = 0) -> list[Sample]:
    """The samples of a file in file order, at most `limit` of them (0 = all).

    Raises ConfigError for a missing or empty file and DataError for a record without id, question or gold
    answer, or with an id seen before. Golds keep their spelling; numbers become text (142.0 is "142").
    """
    samples: list[Sample] = []
    lines: dict[str, str] = {}
    for where, record in records(path):
        sample = _sample(record, where)
        if sample.id in lines:
            raise DataError(f"{where}: id {sample.id!r} was already used at {lines[sample.id]}; ids must be unique")
        lines[sample.id] = where
        samples.append(sample)
        if len(samples) == limit:
            break
    return samples


def write_samples(path: str | Path, samples: Iterable[Sample]) -> None:
    """Write samples as JSON lines that `read_samples` reads back as they were; never leaves half a file."""
    target = Path(path)
    part = target.with_name(target.name + ".tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with part.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(sample), ensure_ascii=False) + "\n" for sample in samples)
        part.replace(target)
    except OSError as error:
        if part.is_file():
            part.unlink()
        raise ConfigError(f"cannot write {target}: {error}; choose a writable folder with space") from error


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


def require_file(path: str | Path) -> Path:
    """The path, if it is a file; else a ConfigError that suggests the nearest name beside it."""
    file = Path(path)
    if file.is_file():
        return file
    if not str(path):
        raise ConfigError("a data file is needed, but its path is empty; set it in the configuration")
    if file.is_dir():
        raise ConfigError(f"{path} is a folder; name one of the files in it")
    if not file.parent.is_dir():
        raise ConfigError(f"no such file: {path} (there is no folder {file.parent})")
    names = sorted(p.name for p in file.parent.iterdir() if p.is_file())
    near = difflib.get_close_matches(file.name, names, 1)
    hint = f"did you mean {file.parent / near[0]}?" if near else f"files in {file.parent}: {', '.join(names[:5])}"
    raise ConfigError(f"no such file: {path}; {hint}")


def records(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """("file:line", record) of each record; a list's place is its 1-based position."""
    file = require_file(path)
    with file.open(encoding="utf-8-sig") as stream:  # some published files start with a byte order mark
        try:
            first = next((line for line in stream if line.strip()), "")
            if not first:
                raise ConfigError(f"{path} is empty; expected JSON lines or one JSON list")
            stream.seek(0)
            is_list = first.lstrip().startswith("[")
            source = _list_items(stream.read(), file) if is_list else _line_items(stream, file)
            count = 0
            for where, record in source:
                if not isinstance(record, dict):
                    raise DataError(f"{where}: expected a JSON object, got {type(record).__name__}")
                yield where, record
                count += 1
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from error
    if not count:
        raise ConfigError(f"{path} holds an empty list; expected records")


def _line_items(stream: Iterable[str], file: Path) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(stream, 1):
        if line.strip():
            try:
                record = json.loads(line)
                if "\\ud" in line.casefold():
                    json.dumps(record, ensure_ascii=False).encode()
                yield f"{file}:{number}", record
            except RecursionError:
                raise DataError(f"{file}:{number}: brackets nested too deeply to be a record; mend the line") from None
            except UnicodeEncodeError:
                raise DataError(f"{file}:{number}: holds half of a surrogate pair (\\ud...); mend the line") from None
            except json.JSONDecodeError as error:
                raise DataError(f"{file}:{number}: not JSON ({error.msg}, column {error.colno})") from error


def _list_items(text: str, file: Path) -> Iterator[tuple[str, Any]]:
    try:
        items = json.loads(text)
    except RecursionError:
        raise DataError(f"{file}: brackets nested too deeply to be records") from None
    except json.JSONDecodeError as error:
        raise DataError(f"{file}:{error.lineno}: not a JSON list ({error.msg}, column {error.colno})") from error
    for number, item in enumerate(items, 1):
        yield f"{file}[{number}]", item


def _sample(record: dict[str, Any], where: str) -> Sample:
    key = _text(_first(record, ID_KEYS))
    if not key:
        raise DataError(f"{where}: no id; one of {', '.join(ID_KEYS)} must hold it")
    question = _first(record, QUESTION_KEYS)
    if not isinstance(question, str) or not question.strip():
        raise DataError(f"{where}: sample {key!r} has no question; one of {', '.join(QUESTION_KEYS)} must hold it")
    golds = _as_list(_first(record, GOLD_KEYS)) + _as_list(record.get("answer_aliases"))
    for gold in golds:
        if isinstance(gold, (dict, list, bool)):
            raise DataError(f"{where}: sample {key!r} has a gold answer of type {type(gold).__name__}: {gold!r}")
    answers = tuple(dict.fromkeys(text for text in map(_text, golds) if text))
    if not answers:
        raise DataError(f"{where}: sample {key!r} has no gold answer; one of {', '.join(GOLD_KEYS)} must hold it")
    family = _text(record.get("family") or record.get("type"))
    return Sample(key, question.strip(), answers, family, _text(record.get("family_group")))


def _first(record: dict[str, Any], keys: Sequence[str]) -> Any:
    return next((record[key] for key in keys if key in record), None)


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [value]


def _text(value: Any) -> str:
    if value is None:
        return ""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value).strip()


def _words(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.casefold()))
