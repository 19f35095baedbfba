"""What the tables of the paper are made of: columns, rows and the names they go by; its numbers, with their errors.

A new table is an entry of TABLES and its numbers in paper_tables.json. Rows are found by label (eval.label), whatever
the case and with or without the size of the model; a column is a metric on one benchmark, or its mean over several.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

HOTPOTQA, WIKI, MUSIQUE, BAMBOOGLE = "hotpotqa", "2wiki", "musique", "bamboogle"
FRAMES, MOREHOPQA = "frames", "morehopqa"
IN_DOMAIN = (HOTPOTQA, WIKI, MUSIQUE)
MATH = ("aime24", "aime25", "amc", "math500", "minerva", "olympiadbench")

TITLES = {
    HOTPOTQA: "HotpotQA", WIKI: "2Wiki", MUSIQUE: "MuSiQue", BAMBOOGLE: "Bamboogle", FRAMES: "FRAMES",
    MOREHOPQA: "MoreHopQA", "aime24": "AIME24", "aime25": "AIME25", "amc": "AMC", "math500": "MATH-500",
    "minerva": "Minerva", "olympiadbench": "OlympiadBench",
    "f1": "F1", "cem": "CEM", "em": "EM", "lasj": "LasJ", "math": "Pass@1", "cem_tokens": "CEM (tokens)",
    "cem_bound": "CEM (words)",
}  # fmt: skip
"""How a benchmark or a metric is called in print."""
OTHER_NAMES = {
    "hotpot": HOTPOTQA, "2wikimultihopqa": WIKI, "2wikimultihop": WIKI, "bam": BAMBOOGLE, "morehqa": MOREHOPQA,
    "aime2024": "aime24", "aime2025": "aime25", "minervamath": "minerva", "olympiad": "olympiadbench",
}  # fmt: skip
TOLERANCE = 0.06
"""in points: an average recomputed from rounded cells may differ from the printed one by so much"""


@dataclass(frozen=True)
class Column:
    """A score: its mean over the questions of a benchmark, or the mean of that over several benchmarks."""

    name: str
    """a benchmark, or what the mean over several is called"""
    benchmarks: tuple[str, ...]
    metric: str
    group: str
    """what stands above it"""
    source: str = ""
    """key in the paper's numbers, where it is another"""

    @property
    def key(self) -> str:
        return f"{self.name}.{self.metric}"

    @property
    def paper_key(self) -> str:
        return self.source or self.key

    @property
    def title(self) -> str:
        return TITLES.get(self.metric, self.metric)


@dataclass(frozen=True)
class TableSpec:
    name: str
    title: str
    columns: tuple[Column, ...]
    aliases: Mapping[str, tuple[str, ...]]
    """label of a row of the paper -> other labels that mean it"""
    decoding: str = "greedy"
    """which attempts count where there are both"""
    gains: tuple[tuple[str, str], ...] = ()
    """(row, row to compare it with): differences shown besides those of experience on and off"""
    notes: tuple[str, ...] = ()

    @property
    def benchmarks(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for column in self.columns for name in column.benchmarks))


@dataclass(frozen=True)
class PaperRow:
    """A row as printed; `scores` are in percent, by column key."""

    label: str
    section: str
    model: str
    scores: Mapping[str, float]
    gain: float | None = None
    gain_over: str = ""


@dataclass(frozen=True)
class Flag:
    """What is wrong with, or unsaid about, numbers of the paper."""

    id: str
    table: str
    rows: tuple[str, ...]
    """labels; empty = every row"""
    model: str
    """empty = every model"""
    cells: tuple[str, ...]
    text: str
    corrected: Mapping[str, float]

    def covers(self, row: PaperRow, cell: str) -> bool:
        is_row = (not self.rows or row.label in self.rows) and self.model in ("", row.model)
        return is_row and cell in self.cells


@dataclass(frozen=True)
class PaperCell:
    """A number of the paper as it is to be compared with: mended where it is known to be wrong."""

    value: float
    printed: float
    flags: tuple[Flag, ...]


@cache
def paper() -> Mapping[str, Any]:
    """The content of paper_tables.json."""
    return json.loads(Path(__file__).with_name("paper_tables.json").read_text(encoding="utf-8"))


@cache
def paper_rows(table: str) -> tuple[PaperRow, ...]:
    return tuple(PaperRow(**row) for row in paper()["tables"][table])


@cache
def flags(table: str) -> tuple[Flag, ...]:
    return tuple(
        Flag(
            one["id"], table, () if one["rows"] == "all" else tuple(one["rows"]), one.get("model", ""),
            tuple(one["cells"]), one["text"], one.get("corrected", {}),
        )
        for one in paper()["flags"]
        if one["table"] == table
    )  # fmt: skip


def paper_cell(spec: TableSpec, row: PaperRow, column: Column) -> PaperCell | None:
    """The paper's number; an average is recomputed where it does not follow from its columns. None if it has none."""
    printed = row.scores.get(column.paper_key)
    if printed is None:
        return None
    found = tuple(flag for flag in flags(spec.name) if flag.covers(row, column.paper_key))
    value = next((f.corrected[column.paper_key] for f in found if column.paper_key in f.corrected), printed)
    mean = recomputed(spec, row, column)
    if mean is not None and abs(mean - value) > TOLERANCE:
        value = mean
    return PaperCell(value, printed, found)


def recomputed(spec: TableSpec, row: PaperRow, column: Column) -> float | None:
    """The mean of the paper's columns that a column averages; None where the paper does not print them all."""
    if len(column.benchmarks) < 2:
        return None
    parts = []
    for benchmark in column.benchmarks:
        key = f"{benchmark}.{column.paper_key.split('.')[1]}"
        mended = [f.corrected[key] for f in flags(spec.name) if f.covers(row, key) and key in f.corrected]
        parts.append((mended or [row.scores.get(key)])[0])
    return fmean(parts) if all(part is not None for part in parts) else None


def find_row(spec: TableSpec, label: str, model: str, method: str) -> PaperRow | None:
    """The row of the paper that a label means; among rows of one label that of the same model size, else the first.

    A frontier model with plain retrieval may bear the method's label: its model's name decides then.
    """
    rows = paper_rows(spec.name)
    if method == "vanilla_rag":
        for row in rows:
            if row.section == "Frontier LLMs" and _is_version_of(model, row.label):
                return row
    wanted = _sizeless(label)
    same = [
        row for row in rows if wanted in {_sizeless(name) for name in (row.label, *spec.aliases.get(row.label, ()))}
    ]
    size = size_of(label) or size_of(model)
    return next((row for row in same if size_of(row.model) == size), same[0] if same else None)


def benchmark_of(name: str) -> str:
    """The name that the columns use, of whatever a run calls it."""
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    return OTHER_NAMES.get(plain, plain)


def size_of(model: str) -> str:
    """7B of Qwen2.5-7B-Instruct; "" where no size is named."""
    found = _SIZE.search(model)
    return f"{float(found[1]):g}{found[2].upper()}" if found else ""


def _sizeless(label: str) -> str:
    """A label to compare by: without case, stars, brackets and the size of the model."""
    text = re.sub(r"(?:(?<=[-\s(])|^)\d+(?:\.\d+)?[bm]\b", " ", label.lower())
    return " ".join(re.sub(r"[*()]", " ", text).replace("+", " + ").split()).rstrip("- ")


def _is_version_of(model: str, name: str) -> bool:
    """gpt-4.1-2025-04-14 is one of GPT-4.1, gpt-4.1-mini is none."""
    last = model.lower().rsplit("/", 1)[-1]
    return bool(re.fullmatch(re.escape(name.lower()) + r"(?:[-_ ](?:\d[\d-]*|preview[\w-]*))?", last))


def _each(benchmarks: Sequence[str], metrics: Sequence[str]) -> tuple[Column, ...]:
    return tuple(Column(name, (name,), metric, TITLES[name]) for name in benchmarks for metric in metrics)


def _mean(name: str, benchmarks: Sequence[str], metrics: Sequence[str], group: str, source: str = "") -> list[Column]:
    return [Column(name, tuple(benchmarks), m, group, f"{source}.{m}" if source else "") for m in metrics]


_SIZE = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)([bBmM])(?![a-zA-Z])")
_HIEXP = ("HiExp-Searcher", "HiExp", "Ours", "GRPO + HiExp", "GRPO + E2+E1", "7B -> 7B (Self)")
_SEARCH_O1 = ("Search-o1", "Doc Search only")
_SEARCH_O1_HIEXP = ("Search-o1 + HiExp", "Search-o1 + E2+E1", "Doc Search + E2+E1", "Doc Search only + HiExp")
_OUT = (BAMBOOGLE, FRAMES, MOREHOPQA)

TABLES: dict[str, TableSpec] = {
    spec.name: spec
    for spec in (
        TableSpec(
            "table1",
            "Main results, local retrieval",
            (
                *_each((*IN_DOMAIN, BAMBOOGLE), ("f1", "cem", "em")),
                *_mean("average", (*IN_DOMAIN, BAMBOOGLE), ("cem",), "Average"),
            ),
            {
                "Search-o1*": _SEARCH_O1,
                "Search-o1* + HiExp": _SEARCH_O1_HIEXP,
                "HiExp-Searcher": _HIEXP,
                "DeepSeek-R1": ("DeepSeek-R1-0528",),
                "Search-R1-v0.3": ("Search-R1",),
            },
            notes=("HotpotQA, 2Wiki and MuSiQue are in domain for the trained agents, Bamboogle is not.",),
        ),
        TableSpec(
            "table2",
            "Which levels of experience help",
            (
                *_mean("in_domain", IN_DOMAIN, ("f1", "cem"), "In domain"),
                *_each(_OUT, ("f1", "cem")),
                *_mean("out_of_domain_3", _OUT, ("f1", "cem"), "Out of domain (3)", "out_of_domain"),
                *_mean("out_of_domain_2", _OUT[1:], ("f1", "cem"), "Out of domain (2)", "out_of_domain"),
            ),
            {
                "Doc Search only": _SEARCH_O1,
                "Doc Search + E2+E1": _SEARCH_O1_HIEXP,
                "Doc Search + E3+E1": ("Search-o1 + E3+E1",),
                "GRPO": ("Baseline GRPO",),
                "GRPO + E2+E1": _HIEXP,
            },
            gains=(
                ("Doc Search + E3+E1", "Doc Search only"),
                *((f"GRPO + {levels}", "GRPO") for levels in ("E2", "E3", "E2+E1", "E3+E1")),
            ),
            notes=(
                "In domain: mean of HotpotQA, 2Wiki, MuSiQue. Out of domain: mean of Bamboogle, FRAMES and MoreHopQA "
                "(3), and of FRAMES and MoreHopQA alone (2).",
            ),
        ),
        TableSpec(
            "table3",
            "Out of domain, online search",
            (*_each(_OUT, ("f1", "lasj")), *_mean("average", _OUT, ("lasj",), "Average")),
            {"Search-o1": _SEARCH_O1, "Ours": _HIEXP},
            notes=("LasJ: mean grade of the judges, 0 to 5, times 20.",),
        ),
        TableSpec(
            "table4",
            "Mathematics",
            (*_each(MATH, ("math",)), *_mean("average", MATH, ("math",), "Average")),
            {
                "Base Model": ("Math", "Base", "Qwen2.5-Math", "Direct"),
                "Base Model + HiExp": ("Math + HiExp", "+ HiExp", "Base + HiExp", "Direct + HiExp"),
                "GRPO + HiExp": ("HiExp",),
            },
            decoding="sampled",
            gains=(("SFT", "Base Model"), ("GRPO", "Base Model"), ("GRPO + HiExp", "GRPO")),
        ),
        TableSpec(
            "table5",
            "Algorithms of reinforcement learning",
            (*_each(IN_DOMAIN, ("f1", "cem")), *_mean("average", IN_DOMAIN, ("cem",), "Average")),
            {"Search-o1*": _SEARCH_O1, "Search-o1* + HiExp": _SEARCH_O1_HIEXP, "GRPO + HiExp": _HIEXP},
            gains=(("GRPO + HiExp", "GRPO"), ("GSPO + HiExp", "GSPO")),
        ),
        TableSpec(
            "table6",
            "Who wrote the experience",
            (*_each(IN_DOMAIN, ("cem",)), *_mean("average", IN_DOMAIN, ("cem",), "Average")),
            {
                "Max -> 7B": ("HiExp-Searcher (teacher)", "Teacher"),
                "7B -> 7B (Self)": (*_HIEXP, "Self"),
            },
            gains=(("7B -> 7B (Self)", "Max -> 7B"),),
            notes=("Gains are differences in points.",),
        ),
    )
}
