"""The arms of evaluations, read back from run folders for tables, figures and the leaderboard page.

An arm is one method on one benchmark, with experience or without, with one decoding. What it is stands in
evaluation.json; every number is computed from the lines of its samples_<arm>.jsonl.
"""

import hashlib
import json
import statistics
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hiexp.config import ConfigError
from hiexp.evaluation import compare_settings, file_name
from hiexp.metrics import bootstrap_interval
from hiexp.records import Attempt, read_attempts
from hiexp.resume import file_hash

SUFFIX = " + HiExp"
"""What a label has where experience was shown."""
NEEDED = ("benchmark", "method", "hek", "decoding", "label", "model")
ON, OFF = "hek_on", "hek_off"


@dataclass(frozen=True)
class Arm:
    name: str
    run: Path
    """the folder that it is from"""
    benchmark: str
    method: str
    hek: bool
    decoding: str
    """greedy or sampled"""
    label: str
    """row of a table"""
    model: str
    setting: Mapping[str, Any]
    attempts: tuple[Attempt, ...]
    """without their calls, which `full_attempts` reads"""

    @property
    def file(self) -> Path:
        return self.run / f"samples_{file_name(self.name)}.jsonl"

    @property
    def where(self) -> str:
        return f"arm {self.name} of {self.run}"

    @property
    def ids(self) -> frozenset[str]:
        return frozenset(attempt.id for attempt in self.attempts)

    @property
    def questions(self) -> str:
        """A digest of what was asked and which answers count, whatever the order."""
        asked = sorted({(a.id, a.question, a.answers) for a in self.attempts})
        return hashlib.sha256(repr(asked).encode("utf-8", "backslashreplace")).hexdigest()[:12]

    def full_attempts(self) -> list[Attempt]:
        return read_attempts(self.file)


@dataclass(frozen=True)
class Spread:
    """A mean over questions, with its 95% bootstrap interval over questions."""

    mean: float
    low: float
    high: float


def read_arms(runs: Sequence[str | Path], keep_all: bool = False) -> list[Arm]:
    """The arms of every evaluation in the folders, also nested ones; each once.

    ConfigError for a folder without an evaluation, a missing or damaged file, and the same arm twice with settings or
    questions that differ; with equal settings the first counts, and a warning says so. `keep_all`: arms of different
    runs are different arms.
    """
    found: dict[tuple[Any, ...], Arm] = {}
    for folder in _evaluations(runs):
        for arm in _read_run(folder):
            key = (arm.benchmark, arm.method, arm.hek, arm.decoding, arm.label, arm.model, arm.run if keep_all else "")
            former = found.setdefault(key, arm)
            if former is not arm:
                _refuse_other(former, arm)
    return list(found.values())


def question_scores(attempts: Iterable[Attempt], metric: str) -> dict[str, float]:
    """Mean over the attempts at each question; a question that has no such score is not there."""
    values: dict[str, list[float]] = {}
    for attempt in attempts:
        if metric in attempt.scores:
            values.setdefault(attempt.id, []).append(attempt.scores[metric])
    return {question: statistics.fmean(scores) for question, scores in values.items()}


def spread(values: Sequence[float], seed: int) -> Spread:
    """Of one value per question."""
    return Spread(statistics.fmean(values), *bootstrap_interval(values, seed))


def spread_of_means(columns: Sequence[Sequence[float]], seed: int, draws: int = 1000) -> Spread:
    """Of the unweighted mean over columns: the questions of each are drawn anew, independently of the others."""
    if len(columns) == 1:
        return spread(columns[0], seed)
    total = np.zeros(draws)
    for place, column in enumerate(columns):
        scores, generator = np.asarray(column, dtype=np.float64), np.random.default_rng([seed, place])
        at_once = max(1, 1_000_000 // len(scores))
        for start in range(0, draws, at_once):
            size = min(at_once, draws - start)
            drawn = generator.integers(0, len(scores), (size, len(scores)))
            total[start : start + size] += scores[drawn].mean(axis=1)
    low, high = np.percentile(total / len(columns), [2.5, 97.5])
    return Spread(statistics.fmean(map(statistics.fmean, columns)), float(low), float(high))


def pairs(arms: Sequence[Arm]) -> list[tuple[Arm, Arm]]:
    """(without experience, with it) for every arm that has a counterpart: of the same run, else by its label."""
    by_name = {(arm.run, arm.name): arm for arm in arms}
    off = {(arm.benchmark, arm.decoding, arm.model, arm.label): arm for arm in arms if not arm.hek}
    found = []
    for arm in arms:
        if arm.hek:
            other = by_name.get((arm.run, arm.name.replace(ON, OFF)))
            if other is None and arm.label.endswith(SUFFIX):
                other = off.get((arm.benchmark, arm.decoding, arm.model, arm.label.removesuffix(SUFFIX)))
            if other is not None and not other.hek:
                found.append((other, arm))
    return found


def took(arm: Arm) -> dict[str, float | int | None]:
    """What the attempts of an arm cost: means per attempt, and the number of questions and attempts.

    `cost` is None where no attempt has one, `seconds` where none was measured.
    """
    attempts = arm.attempts
    mean = lambda value: statistics.fmean(map(value, attempts))  # noqa: E731
    answered = [a.answer_words for a in attempts if a.prediction]
    costs = [a.cost for a in attempts if a.cost is not None]
    return {
        "questions": len(arm.ids),
        "attempts": len(attempts),
        "searches": mean(lambda a: a.searches),
        "requests": mean(lambda a: a.requests),
        "tokens": mean(lambda a: a.tokens),
        "tokens_written": mean(lambda a: a.policy_tokens),
        "answer_words": statistics.fmean(answered) if answered else None,
        "no_answer": mean(lambda a: float(not a.prediction)),
        "cost": statistics.fmean(costs) if costs else None,
        "seconds": mean(lambda a: a.seconds) or None,
    }


def samples_per_question(arm: Arm) -> float:
    return len(arm.attempts) / len(arm.ids)


def _evaluations(runs: Sequence[str | Path]) -> list[Path]:
    if not runs:
        raise ConfigError("no run is named; give the folders that evaluate.py wrote")
    folders: dict[Path, None] = {}
    for run in map(Path, runs):
        if not run.exists():
            raise ConfigError(f"no such folder: {run}; give a folder that evaluate.py wrote")
        files = [run] if run.name == "evaluation.json" else sorted(run.rglob("evaluation.json"))
        if not files:
            raise ConfigError(f"{run} holds no evaluation.json; give a folder in which evaluate.py has finished")
        folders |= {file.parent.resolve(): None for file in files}
    return [_short(folder) for folder in folders]


def _short(folder: Path) -> Path:
    """Relative where it lies below the working folder: what is printed names no machine."""
    return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder


def _read_run(folder: Path) -> Iterable[Arm]:
    path = folder / "evaluation.json"
    try:
        arms = json.loads(path.read_text(encoding="utf-8"))["arms"]
        items = [(str(name), dict(about)) for name, about in arms.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is no result of an evaluation ({error!r}); run evaluate.py again") from error
    if not items:
        raise ConfigError(f"{path} names no arm; run evaluate.py again")
    for name, about in items:
        if lacking := [key for key in NEEDED if key not in about]:
            raise ConfigError(
                f"{path}: arm {name} does not say its {', '.join(lacking)} (an older evaluate.py wrote it); "
                "evaluate again"
            )
        values = {key: about[key] for key in NEEDED}
        arm = Arm(name, folder, setting=about.get("setting") or {}, attempts=(), **values)
        if not arm.file.is_file():
            raise ConfigError(f"{path} names arm {name}, but {arm.file} is not there; bring it back or evaluate again")
        if about.get("samples_sha256", found := file_hash(arm.file)) != found:
            raise ConfigError(f"{arm.file} was changed after the evaluation wrote it; bring it back or evaluate again")
        attempts = tuple(replace(attempt, calls=()) for attempt in arm.full_attempts())
        yield replace(arm, attempts=_checked(attempts, arm))


def _checked(attempts: tuple[Attempt, ...], arm: Arm) -> tuple[Attempt, ...]:
    if not attempts:
        raise ConfigError(f"{arm.file} is empty; evaluate again")
    seen = {(attempt.id, attempt.member) for attempt in attempts}
    if len(seen) != len(attempts):
        raise ConfigError(f"{arm.file} has {len(attempts) - len(seen)} attempts twice; evaluate again")
    if uneven := uneven_questions(attempts):
        raise ConfigError(f"{arm.file} has not as many attempts at each question, for example {uneven}; evaluate again")
    return attempts


def uneven_questions(attempts: Sequence[Attempt]) -> str:
    """A question with fewer attempts than another has, or ""."""
    counts: dict[str, int] = {}
    for attempt in attempts:
        counts[attempt.id] = counts.get(attempt.id, 0) + 1
    most = max(counts.values())
    return next((question for question, count in counts.items() if count < most), "")


def _refuse_other(former: Arm, arm: Arm) -> None:
    differences = compare_settings(former.setting, arm.setting, ignore=())
    if former.questions != arm.questions:
        differences.append("questions: other ids, texts or answers")
    if differences:
        raise ConfigError(
            f"{former.where} and {arm.where} are the same row, but differ: {'; '.join(map(_cut, differences))}; give "
            "them other labels (eval.label), or leave one out"
        )
    warnings.warn(f"{arm.where} repeats {former.where} with equal settings; the first counts", stacklevel=3)


def _cut(text: str, length: int = 160) -> str:
    return text if len(text) <= length else f"{text[: length - 3]}..."


def notes_on_settings(arms: Sequence[Arm], keys: Sequence[str], name: Callable[[Arm], str]) -> list[str]:
    """One line per key of the settings in which arms differ that stand in one column."""
    notes = []
    for key in keys:
        values: dict[str, list[str]] = {}
        for arm in arms:
            if key in arm.setting:
                values.setdefault(json.dumps(arm.setting[key], sort_keys=True, default=str), []).append(name(arm))
        if len(values) > 1:
            groups = "; ".join(f"{_cut(value, 60)}: {', '.join(names)}" for value, names in values.items())
            notes.append(f"{key} differs: {groups}")
    return notes
