"""A table of the paper, filled with what was measured: means over questions, intervals, differences, what it all took.

Nothing is invented: a cell without its scores is empty and an average is only formed of all its columns. Arms that
answered different questions do not share a column, unless `mixed` says so; then a note tells it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hiexp.arms import (
    Arm,
    Spread,
    notes_on_settings,
    pairs,
    question_scores,
    samples_per_question,
    spread_of_means,
    took,
)
from hiexp.config import ConfigError
from hiexp.paper_rows import (
    TITLES,
    Column,
    PaperCell,
    PaperRow,
    TableSpec,
    benchmark_of,
    find_row,
    paper,
    paper_cell,
    paper_rows,
)
from hiexp.significance import holm, sign_flip_test

SHARED = ("corpus", "encoder", "search", "thresholds")
"""settings that rows of one column should have in common; where they differ, a note says so"""
NOT_IN_PAPER = "Not in the paper"


@dataclass(frozen=True)
class Options:
    """How a table is filled."""

    with_paper: bool = False
    decoding: str = "auto"
    """auto: the table's own, and the other where an arm has only that"""
    cem: str = "cem"
    """which Cover-EM stands in the CEM columns"""
    mixed: bool = False
    """put results on different questions into one column, with a note"""
    seed: int = 0


@dataclass(frozen=True)
class Cell:
    """Percent; None where it was not measured, or the paper has no number."""

    ours: Spread | None = None
    paper: PaperCell | None = None
    questions: int = 0
    unscored: int = 0
    """attempts without the score: a judge failed"""

    @property
    def difference(self) -> float | None:
        return self.ours.mean - self.paper.value if self.ours and self.paper else None


@dataclass
class Row:
    """A label and a model; `arms` by benchmark."""

    label: str
    model: str
    section: str
    paper: PaperRow | None = None
    arms: dict[str, Arm] = field(default_factory=dict)
    cells: dict[str, Cell] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.label} ({self.model})" if self.model else self.label


@dataclass(frozen=True)
class Gain:
    """How much higher one row scores than another on the same questions, in points."""

    row: str
    over: str
    cells: Mapping[str, Spread]
    p: Mapping[str, float]
    """two-sided sign-flip permutation test"""
    p_holm: Mapping[str, float] = field(default_factory=dict)
    """the same, corrected for all cells of all gains of the table"""
    note: str = ""


@dataclass
class Table:
    spec: TableSpec
    options: Options
    rows: list[Row]
    gains: list[Gain]
    notes: list[str]

    @property
    def columns(self) -> tuple[Column, ...]:
        return self.spec.columns


def build_table(spec: TableSpec, arms: Sequence[Arm], options: Options) -> Table:
    """ConfigError where none of the arms belongs to the table, or arms of one column answered different questions."""
    spec = _with_metric(spec, options.cem)
    arms = [replace(arm, benchmark=benchmark_of(arm.benchmark)) for arm in arms]
    used = [arm for arm in arms if arm.benchmark in spec.benchmarks]
    if not used:
        has = ", ".join(sorted({arm.benchmark or "(unnamed: data.test)" for arm in arms}))
        raise ConfigError(f"{spec.name} is of {', '.join(spec.benchmarks)}; the runs have {has}")
    notes = [*spec.notes, *_left_out(spec, arms)]
    used = _one_decoding(used, spec, options, notes)
    notes += _check_questions(used, options.mixed)
    rows = _rows(spec, used, options, notes)
    for row in rows:
        row.cells = {column.key: _cell(spec, row, column, options) for column in spec.columns}
    notes += [f"{TITLES[b]}: {note}" for b in spec.benchmarks for note in _settings(used, b)]
    notes += _model_notes(rows, options) + _judge_notes(rows, spec) + _attempt_notes(rows, spec)
    notes += [f"Paper: {note}" for note in paper()["notes"].get(spec.name, ())] if options.with_paper else []
    return Table(spec, options, rows, _gains(spec, rows, used, options), notes)


def footnotes(table: Table) -> dict[str, str]:
    """Mark -> what is wrong with the paper's numbers that bear it; for --paper alone."""
    texts = [
        text
        for row in table.rows
        for column in table.columns
        for text in marked(row.cells[column.key])
        if table.options.with_paper
    ]
    return {chr(ord("a") + place): text for place, text in enumerate(dict.fromkeys(texts))}


def marked(cell: Cell) -> list[str]:
    """What a footnote says of the paper's number in this cell."""
    return [f"{flag.id}: {flag.text}" for flag in cell.paper.flags] if cell.paper else []


def _with_metric(spec: TableSpec, cem: str) -> TableSpec:
    columns = tuple(
        replace(c, metric=cem, source=c.paper_key) if c.metric == "cem" and cem != "cem" else c for c in spec.columns
    )
    return replace(spec, columns=columns)


def _left_out(spec: TableSpec, arms: Sequence[Arm]) -> list[str]:
    others = Counter(arm.benchmark or "data.test" for arm in arms if arm.benchmark not in spec.benchmarks)
    return [f"Arms of {name} have no column here: {count}." for name, count in others.items()]


def _one_decoding(arms: Sequence[Arm], spec: TableSpec, options: Options, notes: list[str]) -> list[Arm]:
    """Of arms that differ in the decoding alone, the wanted one."""
    wanted = spec.decoding if options.decoding == "auto" else options.decoding
    chosen: dict[tuple[Any, ...], Arm] = {}
    for arm in arms:
        if options.decoding not in ("auto", arm.decoding):
            continue
        key = (arm.benchmark, arm.method, arm.hek, arm.label, arm.model)
        if key not in chosen or arm.decoding == wanted:
            chosen[key] = arm
    if not chosen:
        raise ConfigError(f"no arm was decoded {options.decoding}; leave out --decoding")
    other = sorted({f"{a.label} on {TITLES[a.benchmark]}" for a in chosen.values() if a.decoding != wanted})
    if other:
        notes.append(f"Not {wanted}, for want of such attempts: {', '.join(other)}.")
    return list(chosen.values())


def _check_questions(arms: Sequence[Arm], mixed: bool) -> list[str]:
    """Notes on columns whose arms answered different questions; ConfigError unless `mixed`."""
    notes = []
    for benchmark in dict.fromkeys(arm.benchmark for arm in arms):
        groups: dict[str, list[Arm]] = {}
        for arm in arms:
            if arm.benchmark == benchmark:
                groups.setdefault(arm.questions, []).append(arm)
        if len(groups) > 1:
            told = "; ".join(
                f"{len(group[0].ids)} questions ({digest}) in {', '.join(a.label for a in group)}"
                for digest, group in groups.items()
            )
            shared = len(frozenset.intersection(*(group[0].ids for group in groups.values())))
            note = f"{benchmark}: rows are of different questions: {told}; {shared} ids are common to all"
            if not mixed:
                raise ConfigError(f"{note}. Evaluate on the same file, leave some out, or give --mixed to show them so")
            notes.append(f"Not comparable. {note}.")
    return notes


def _rows(spec: TableSpec, arms: Sequence[Arm], options: Options, notes: list[str]) -> list[Row]:
    """In the paper's order, then those it does not have; with the paper, also its rows for which there is nothing."""
    ours: dict[tuple[str, str, bool], Row] = {}
    both = Counter((arm.label, arm.model, arm.hek) for arm in arms)
    for arm in arms:
        match = find_row(spec, arm.label, arm.model, arm.method)
        twice = (arm.label, arm.model, not arm.hek) in both
        label = f"{arm.label} (HEK {'on' if arm.hek else 'off'})" if twice else arm.label
        row = Row(label, arm.model, match.section if match else NOT_IN_PAPER, match)
        row = ours.setdefault((arm.label, arm.model, arm.hek), row)
        former = row.arms.setdefault(arm.benchmark, arm)
        if former is not arm:
            raise ConfigError(
                f"{former.where} and {arm.where} (methods {former.method} and {arm.method}) are both {arm.label!r} on "
                f"{arm.benchmark}; give them labels of their own (eval.label)"
            )
    rows: list[Row] = []
    for printed in paper_rows(spec.name):
        found = [row for row in ours.values() if row.paper is printed]
        if not found and options.with_paper:
            found = [Row(printed.label, printed.model, printed.section, printed)]
        rows += found
    rows += [row for row in ours.values() if row.paper is None]
    for row in rows:
        if row.arms and (lacking := [b for b in spec.benchmarks if b not in row.arms]):
            notes.append(f"{row.name}: nothing on {', '.join(TITLES[b] for b in lacking)}.")
    return rows


def _cell(spec: TableSpec, row: Row, column: Column, options: Options) -> Cell:
    printed = paper_cell(spec, row.paper, column) if row.paper and options.with_paper else None
    arms = [row.arms.get(name) for name in column.benchmarks]
    scored = [question_scores(arm.attempts, column.metric) if arm else {} for arm in arms]
    if not all(scored):
        return Cell(paper=printed)
    ours = _percent(spread_of_means([list(scores.values()) for scores in scored], options.seed))
    unscored = sum(column.metric not in a.scores for arm in arms if arm for a in arm.attempts)
    return Cell(ours, printed, sum(map(len, scored)), unscored)


def _percent(value: Spread) -> Spread:
    return Spread(100 * value.mean, 100 * value.low, 100 * value.high)


def _settings(arms: Sequence[Arm], benchmark: str) -> list[str]:
    return notes_on_settings([arm for arm in arms if arm.benchmark == benchmark], SHARED, lambda arm: arm.label)


def _model_notes(rows: Sequence[Row], options: Options) -> list[str]:
    others = [row for row in rows if row.arms and row.paper and row.paper.model.lower() not in row.model.lower()]
    if not others or not options.with_paper:
        return []
    told = "; ".join(f"{row.label}: {row.model} here, {row.paper.model} there" for row in others if row.paper)
    return [f"Not the paper's models: {told}."]


def _judge_notes(rows: Sequence[Row], spec: TableSpec) -> list[str]:
    return [
        f"{row.label}, {column.group} {column.title}: {cell.unscored} attempts have no verdict and are left out."
        for row in rows
        for column in spec.columns
        if (cell := row.cells[column.key]).unscored and len(column.benchmarks) == 1
    ]


def _attempt_notes(rows: Sequence[Row], spec: TableSpec) -> list[str]:
    """How many attempts a score is the mean of, where it is not one: Avg@k."""
    notes = []
    for benchmark in spec.benchmarks:
        counts: dict[float, list[str]] = {}
        for row in rows:
            if arm := row.arms.get(benchmark):
                counts.setdefault(samples_per_question(arm), []).append(row.label)
        if set(counts) - {1.0}:
            told = "; ".join(f"Avg@{count:g}" + (f" ({', '.join(names)})" if len(counts) > 1 else "")
                             for count, names in counts.items())  # fmt: skip
            notes.append(f"{TITLES[benchmark]}: mean over the attempts at each question: {told}.")
    return notes


def _gains(spec: TableSpec, rows: Sequence[Row], arms: Sequence[Arm], options: Options) -> list[Gain]:
    """Experience on against off, then the table's own comparisons (of rows with the same model first)."""
    home = {id(arm): row for row in rows for arm in row.arms.values()}
    wanted = {(id(home[id(off)]), id(home[id(on)])): (home[id(off)], home[id(on)]) for off, on in pairs(arms)}
    by_label: dict[str, list[Row]] = {}
    for row in rows:
        if row.paper and row.arms:
            by_label.setdefault(row.paper.label, []).append(row)
    for name, over in spec.gains:
        for row in by_label.get(name, []):
            others = by_label.get(over, [])
            other = next((one for one in others if one.model == row.model), others[0] if others else None)
            if other:
                wanted.setdefault((id(other), id(row)), (other, row))
    return _corrected([_gain(spec, before, after, options) for before, after in wanted.values()])


def _gain(spec: TableSpec, before: Row, after: Row, options: Options) -> Gain:
    cells, p, others = {}, {}, []
    for column in spec.columns:
        gains = [_per_question(before, after, name, column.metric) for name in column.benchmarks]
        if all(gains):
            parts = [part for part in gains if part]
            cells[column.key] = _percent(spread_of_means(parts, options.seed))
            weighed = [gain / len(part) for part in parts for gain in part]  # so that every benchmark counts the same
            p[column.key] = sign_flip_test(weighed, options.seed)
        others += [TITLES[name] for name, one in zip(column.benchmarks, gains, strict=True) if one == []]
    note = f"not of the same questions: {', '.join(dict.fromkeys(others))}" if others else ""
    return Gain(after.name, before.name, cells, p, note=note)


def _corrected(gains: Sequence[Gain]) -> list[Gain]:
    places = [(index, key) for index, gain in enumerate(gains) for key in gain.p]
    values = dict(zip(places, holm([gains[index].p[key] for index, key in places]), strict=True))
    return [replace(gain, p_holm={key: values[index, key] for key in gain.p}) for index, gain in enumerate(gains)]


def _per_question(before: Row, after: Row, benchmark: str, metric: str) -> list[float] | None:
    """Differences by question; None without scores, an empty list where the questions are not the same."""
    first, second = before.arms.get(benchmark), after.arms.get(benchmark)
    if not first or not second:
        return None
    if first.questions != second.questions:
        return []
    one, other = question_scores(first.attempts, metric), question_scores(second.attempts, metric)
    return [other[question] - one[question] for question in one if question in other] or None


def costs(table: Table) -> list[dict[str, Any]]:
    """What every arm in the table took: one entry per row and benchmark."""
    return [
        {"label": row.label, "model": row.model, "benchmark": benchmark} | took(row.arms[benchmark])
        for row in table.rows
        for benchmark in table.spec.benchmarks
        if benchmark in row.arms
    ]
