"""Tables and figures of the paper from what evaluate.py, train.py and build_hek.py left behind.

    python evaluate.py table1 runs/eval_base runs/eval_hiexp --paper     # table1 ... table6
    python evaluate.py table9 runs/eval --kind helped                    # a case, from our own traces
    python evaluate.py figure3 --without runs/grpo_s* --with runs/hiexp_s*
    python evaluate.py figure4 hotpotqa=FILE musique=FILE --paper
    python evaluate.py cost runs/hek runs/hiexp_s0 runs/eval
    python evaluate.py page runs/eval_* --out leaderboard.html

Each writes JSON, Markdown, LaTeX and a picture into --out and prints the Markdown; page writes one HTML file.
`python evaluate.py COMMAND --help` tells the options of one.
"""

import argparse
import importlib
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from hiexp import pictures
from hiexp.arms import read_arms
from hiexp.config import ConfigError, lookup
from hiexp.paper_rows import TABLES, TITLES
from hiexp.redact import redact
from hiexp.sheets import Result, Sheet, interval, number, write_result
from hiexp.table_build import Cell, Options, Row, Table, build_table, costs, footnotes, marked

OUT = "runs/tables"
TESTED = (
    "p of a difference: two-sided sign-flip test over questions, corrected for all differences of the table (Holm)."
)
CEM = ("cem", "cem_tokens", "cem_bound")


class Parser(argparse.ArgumentParser):
    """Tells what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; {self.prog} --help lists the options")


def main(argv: Sequence[str]) -> int:
    """`argv` begins with the name of a command; 2 for a mistake of the user's."""
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    try:
        module, function = lookup(COMMANDS, argv[0], "command")
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            getattr(importlib.import_module(module), function)(argv[0], argv[1:])
    except ConfigError as error:
        print(redact(f"error: {error}"), file=sys.stderr)
        return 2
    return 0


def parser_of(command: str, about: str) -> Parser:
    parser = Parser(f"python evaluate.py {command}", description=about)
    parser.add_argument("--out", default=OUT, metavar="FOLDER", help=f"where the files go (default {OUT})")
    return parser


def finish(folder: str | Path, result: Result, draw: Callable[[Sequence[Path]], None]) -> None:
    """Write the files of a command and print its Markdown."""
    print(write_result(folder, result, draw))


def table(command: str, argv: Sequence[str]) -> None:
    """table1 ... table6."""
    spec = TABLES[command]
    parser = parser_of(command, f"{spec.title}: what was measured, in percent, with 95%% intervals over questions.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders that evaluate.py wrote, also nested ones")
    parser.add_argument("--paper", action="store_true", help="the paper's numbers and the differences beside ours")
    parser.add_argument(
        "--decoding", choices=("auto", "greedy", "sampled"), default="auto",
        help=f"attempts that count; auto: {spec.decoding}, and the other where there are no such",
    )  # fmt: skip
    parser.add_argument("--cem", choices=CEM, default="cem", help="the Cover-EM of the CEM columns")
    parser.add_argument("--mixed", action="store_true", help="let rows of different questions share a column")
    parser.add_argument("--seed", type=int, default=0, help="of the draws behind the intervals")
    found = parser.parse_args(argv)
    if found.seed < 0:
        raise ConfigError(f"--seed {found.seed} must not be negative")
    pictures.check()
    arms = read_arms(found.runs)
    built = build_table(spec, arms, Options(found.paper, found.decoding, found.cem, found.mixed, found.seed))
    finish(found.out, table_result(built, found.runs), lambda files: _draw(built, files))


def table_result(built: Table, runs: Sequence[str] = ()) -> Result:
    """A filled table as text and data."""
    marks = {text: mark for mark, text in footnotes(built).items()}
    body = [_score_sheet(built, marks), *_gain_sheet(built), _cost_sheet(built)]
    name, title = built.spec.name, f"Table {built.spec.name.removeprefix('table')}: {built.spec.title}"
    notes = ["Percent; in brackets the 95% bootstrap interval over questions.", *([TESTED] if built.gains else [])]
    notes += built.notes
    return Result(name, title, _data(built, runs), body, notes, {mark: text for text, mark in marks.items()})


def _score_sheet(built: Table, marks: dict[str, str]) -> Sheet:
    header = [("", "method"), ("", "model"), *([("", "")] if built.options.with_paper else [])]
    lead, section, lines = len(header), "", []
    for row in built.rows:
        if row.section and row.section != section:
            section = row.section
            lines.append(section)
        lines += _lines(built, row, marks)
    return Sheet("Scores", [*header, *((c.group, c.title) for c in built.columns)], lines, lead)


def _lines(built: Table, row: Row, marks: dict[str, str]) -> list[list[str]]:
    cells = [row.cells[column.key] for column in built.columns]
    label = row.label if row.arms else f"{row.label} (missing)"
    ours = [f"{number(c.ours.mean)} {interval(c.ours.low, c.ours.high)}" if c.ours else "" for c in cells]
    if not built.options.with_paper:
        return [[label, row.model, *ours]]
    lines = [[label, row.model, "ours", *ours]] if row.arms else []
    if row.paper:
        names = ["", ""] if row.arms else [label, row.paper.model]
        lines.append([*names, "paper", *(_paper_text(cell, marks) for cell in cells)])
        if row.arms:
            lines.append(["", "", "difference", *(number(cell.difference, sign=True) for cell in cells)])
    return lines


def _paper_text(cell: Cell, marks: dict[str, str]) -> str:
    if cell.paper is None:
        return ""
    raised = "".join(marks[text] for text in marked(cell))
    return number(cell.paper.value) + (f" ^{raised}" if raised else "")


def _gain_sheet(built: Table) -> list[Sheet]:
    """How much a row is above another, question by question."""
    if not built.gains:
        return []
    lines = []
    for gain in built.gains:
        cells = []
        for column in built.columns:
            found, p = gain.cells.get(column.key), gain.p_holm.get(column.key)
            text = f"{number(found.mean, sign=True)} {interval(found.low, found.high)}" if found else ""
            cells.append(text + (f" p={p:.2g}" if p is not None else ""))
        lines.append([gain.row, gain.over, *cells])
        if gain.note:
            lines.append(gain.note)
    header = [("", "row"), ("", "minus"), *((c.group, c.title) for c in built.columns)]
    return [Sheet("Differences, paired by question (points)", header, lines, 2)]


def _cost_sheet(built: Table) -> Sheet:
    names = list(TOOK)
    lines = []
    for entry in costs(built):
        cells = [_amount(name, entry[name]) for name in names]
        lines.append([entry["label"], entry["model"], TITLES[entry["benchmark"]], *cells])
    header = [("", "method"), ("", "model"), ("", "benchmark"), *(("", TOOK[name]) for name in names)]
    return Sheet("What it took, per attempt", header, lines, 3)


def _amount(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name == "no_answer":
        return f"{100 * value:.1f}%"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}" if name == "cost" else f"{value:,.1f}"


def _data(built: Table, runs: Sequence[str]) -> dict[str, Any]:
    rows = []
    for row in built.rows:
        cells = {column.key: _cell_data(row.cells[column.key]) for column in built.columns}
        entry = {"label": row.label, "model": row.model, "section": row.section}
        known = {"in_paper": row.paper is not None, "missing": not row.arms}
        arms = {benchmark: {"run": str(arm.run), "arm": arm.name} for benchmark, arm in row.arms.items()}
        rows.append(entry | known | {"arms": arms, "cells": cells})
    return {
        "table": built.spec.name,
        "title": built.spec.title,
        "unit": "percent",
        "runs": list(map(str, runs)),
        "options": asdict(built.options),
        "columns": [
            {"key": c.key, "benchmarks": list(c.benchmarks), "metric": c.metric, "title": f"{c.group} {c.title}"}
            for c in built.columns
        ],
        "rows": rows,
        "differences": [
            {"row": g.row, "over": g.over, "cells": {key: asdict(value) for key, value in g.cells.items()}}
            | {"p": dict(g.p), "p_holm": dict(g.p_holm), "note": g.note}
            for g in built.gains
        ],
        "took": costs(built),
        "footnotes": footnotes(built),
        "notes": built.notes,
    }


def _cell_data(cell: Cell) -> dict[str, Any]:
    data: dict[str, Any] = {"ours": asdict(cell.ours) if cell.ours else None}
    if cell.ours:
        data |= {"questions": cell.questions, "unscored_attempts": cell.unscored}
    if cell.paper:
        flags = [flag.id for flag in cell.paper.flags]
        data |= {"paper": cell.paper.value, "paper_printed": cell.paper.printed, "paper_flags": flags}
        data |= {"difference": cell.difference}
    return data


def _draw(built: Table, files: Sequence[Path]) -> None:
    rows = [row for row in built.rows if row.arms or row.paper]
    panels: dict[str, dict[str, list[pictures.Dot]]] = {}
    for column in built.columns:
        points = []
        for row in rows:
            cell = row.cells[column.key]
            paper = cell.paper.value if cell.paper else None
            points.append(pictures.Dot(cell.ours.mean, cell.ours.low, cell.ours.high, paper) if cell.ours
                          else pictures.Dot(paper=paper))  # fmt: skip
        panels.setdefault(column.group, {})[column.title] = points
    pictures.dots(files, built.spec.title, [row.name for row in rows], panels)


def _warn(message: Warning | str, *_: Any, **__: Any) -> None:
    print(redact(f"warning: {message}"), file=sys.stderr)


TOOK = {
    "questions": "questions", "attempts": "attempts", "searches": "searches", "requests": "requests",
    "tokens": "tokens", "tokens_written": "written", "answer_words": "answer words", "no_answer": "no answer",
    "cost": "cost", "seconds": "seconds",
}  # fmt: skip
"""What is told beside the scores: name -> heading."""
COMMANDS = {
    **dict.fromkeys(TABLES, ("hiexp.tables", "table")),
    "table9": ("hiexp.case_study", "table9"),
    "figure3": ("hiexp.figures", "figure3"),
    "figure4": ("hiexp.figures", "figure4"),
    "cost": ("hiexp.costs", "cost"),
    "page": ("hiexp.leaderboard", "page"),
}
"""command -> module and function(command, arguments); a module is loaded when it is asked for"""
