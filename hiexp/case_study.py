"""Table 9: one question that went otherwise with experience, from our own traces.

Choosing a question because it went well proves nothing, so the count of questions that went the other way stands
above it, and `--kind hurt` shows one of those.
"""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hiexp import pictures
from hiexp.arms import Arm, pairs, read_arms
from hiexp.config import ConfigError
from hiexp.metrics import METRICS, explain
from hiexp.paper_rows import benchmark_of
from hiexp.records import Attempt
from hiexp.sheets import Block, Result, Sheet, number, printable
from hiexp.tables import finish, parser_of

KINDS = {
    "helped": (False, True),
    "hurt": (True, False),
    "both_right": (True, True),
    "both_wrong": (False, False),
}
"""name -> (right without experience, right with it)"""
RIGHT = 0.5
"""a score of at least this counts as right"""
WIDTH = 84
"""letters in a line of the picture"""


@dataclass(frozen=True)
class Case:
    """The first attempt at a question in both arms, with their traces."""

    off: Attempt
    on: Attempt


@dataclass(frozen=True)
class Shown:
    """A piece of experience in a trace."""

    level: str
    place: str
    text: str


def table9(command: str, argv: Sequence[str]) -> None:
    parser = parser_of(command, "A question that went otherwise with experience, from the traces of a run.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders that evaluate.py wrote, with HEK off and on")
    parser.add_argument("--kind", choices=KINDS, default="helped", help="helped: wrong without, right with it")
    parser.add_argument("--count", type=int, default=1, metavar="N", help="how many questions to show")
    parser.add_argument("--question", metavar="ID", help="this question, whatever became of it")
    parser.add_argument("--benchmark", help="only arms of this one")
    parser.add_argument("--label", help="only the arm without experience of this label")
    parser.add_argument("--metric", default="cem", help="what decides right or wrong (default cem; math has its own)")
    parser.add_argument("--chars", type=int, default=1200, metavar="N", help="letters of a document that are shown")
    found = parser.parse_args(argv)
    if found.count < 1 or found.chars < 1:
        raise ConfigError("--count and --chars must be at least 1")
    pictures.check()
    off, on = choose_pair(read_arms(found.runs), found.benchmark, found.label)
    result, first = study(off, on, found.metric, found.kind, found.count, found.question, found.chars)
    finish(found.out, result, lambda files: _draw(first, files, found.chars))


def choose_pair(arms: Sequence[Arm], benchmark: str | None = None, label: str | None = None) -> tuple[Arm, Arm]:
    """The arms to compare; ConfigError where there is none, or more than one and nothing says which."""
    found = [
        (off, on)
        for off, on in pairs(arms)
        if benchmark in (None, off.benchmark) or (benchmark and benchmark_of(benchmark) == benchmark_of(off.benchmark))
        if label in (None, off.label)
    ]
    names = "; ".join(f"{off.label} on {off.benchmark or 'data.test'} ({off.decoding})" for off, _ in found)
    greedy = [(off, on) for off, on in found if off.decoding == "greedy"] or found
    if not found:
        raise ConfigError("no arm was run with and without experience there; evaluate with hek.path set")
    if len(greedy) > 1:
        raise ConfigError(f"several arms were run with and without experience: {names}; set --benchmark and --label")
    off, on = greedy[0]
    if off.questions != on.questions:
        raise ConfigError(f"{off.where} and {on.where} are of different questions; evaluate both on the same file")
    return off, on


def count_kinds(off: Sequence[Attempt], on: Sequence[Attempt], metric: str) -> dict[str, list[str]]:
    """Question ids by what became of the first attempt; ConfigError without the score."""
    one, other = _first(off), _first(on)
    ids: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for question, attempt in one.items():
        verdict = (is_right(attempt, metric), is_right(other[question], metric))
        ids[next(kind for kind, wanted in KINDS.items() if wanted == verdict)].append(question)
    return ids


def is_right(attempt: Attempt, metric: str) -> bool:
    if metric not in attempt.scores:
        has = ", ".join(attempt.scores) or "none"
        raise ConfigError(f"question {attempt.id} has no score {metric}; there are: {has} (--metric)")
    return attempt.scores[metric] >= RIGHT


def experience_in(attempt: Attempt) -> list[Shown]:
    """What was shown, each text once, and where first: a strategy (E2, E3) before anything was found or written in its
    context, a case (E1) after that."""
    shown: dict[str, Shown] = {}
    searches = 0
    for number_of_call, call in enumerate(attempt.calls, 1):
        opened, last = False, ""
        for source, text in call.pieces:
            searches += source == "document" and last != "document"  # what a search finds is several pieces
            last = last if source == "notice" else source
            opened = opened or source in ("policy", "document")
            if source == "experience" and text.strip():
                place = f"request {number_of_call}" if len(attempt.calls) > 1 else "in the prompt"
                place = f"{place}, after search {searches}" if searches and opened else place
                level = "case (E1)" if opened else "strategy (E2 or E3)"
                shown.setdefault(text.strip(), Shown(level, place.removeprefix("in the prompt, "), text.strip()))
    return list(shown.values())


def study(
    off: Arm, on: Arm, metric: str, kind: str, count: int, question: str | None, chars: int
) -> tuple[Result, Case]:
    """What table9 shows, and the first case for its picture."""
    before, after = off.full_attempts(), on.full_attempts()
    if metric == "cem" and "math" in before[0].scores:
        metric = "math"
    kinds = count_kinds(before, after, metric)
    one, other = _first(before), _first(after)
    if question is not None and question not in one:
        raise ConfigError(f"--question {question} is not among the {len(one)} questions of {off.where}")
    chosen = [question] if question is not None else _best(kinds[kind], other)[:count]
    counts = {name: len(ids) for name, ids in kinds.items()}
    if not chosen:
        told = ", ".join(f"{name.replace('_', ' ')} {number}" for name, number in counts.items())
        raise ConfigError(f"no question is of the kind {kind} ({told}); choose another --kind")
    cases = [Case(one[name], other[name]) for name in chosen]
    title = f"Table 9: {off.label} without experience and with it ({on.label})"
    body: list[Sheet | Block] = [_counts(counts, metric, off)]
    for case in cases:
        body += _case(case, metric, off, on, chars)
    notes = [
        f"Right: {metric} of the first attempt is at least {RIGHT}. Questions: {len(one)}.",
        "A question is chosen for what became of it: it shows how experience can work, not how often it does.",
    ]
    if off.decoding != "greedy":
        notes.append("The attempts were drawn at random; another draw may end otherwise.")
    data = {
        "table": "table9", "benchmark": off.benchmark, "metric": metric, "kind": kind, "counts": counts,
        "arms": {"off": _about(off), "on": _about(on)},
        "cases": [{"id": c.off.id, "off": c.off.to_json(), "on": c.on.to_json()} for c in cases],
    }  # fmt: skip
    return Result("table9", title, data, body, notes), cases[0]


def _first(attempts: Sequence[Attempt]) -> dict[str, Attempt]:
    first: dict[str, Attempt] = {}
    for attempt in attempts:
        if attempt.id not in first or attempt.member < first[attempt.id].member:
            first[attempt.id] = attempt
    return first


def _best(ids: Sequence[str], on: Mapping[str, Attempt]) -> list[str]:
    """Those that were shown experience of both kinds first, then the shorter traces: they are easier to read."""

    def rank(question: str) -> tuple[int, int]:
        kinds = {shown.level for shown in experience_in(on[question])}
        return -len(kinds), sum(len(text) for call in on[question].calls for _, text in call.pieces)

    return sorted(ids, key=rank)


def _about(arm: Arm) -> dict[str, Any]:
    return {"run": str(arm.run), "arm": arm.name, "label": arm.label, "model": arm.model}


def _counts(counts: Mapping[str, int], metric: str, off: Arm) -> Sheet:
    total = sum(counts.values())
    lines = [
        ["wrong without, right with experience (helped)", str(counts["helped"])],
        ["right without, wrong with experience (hurt)", str(counts["hurt"])],
        ["right both times", str(counts["both_right"])],
        ["wrong both times", str(counts["both_wrong"])],
    ]
    shares = [[*line, f"{number(100 * int(line[1]) / total)}%"] for line in lines]
    name = f"{off.benchmark or 'data.test'}, by {metric}"
    return Sheet(f"What became of the questions ({name})", [("", ""), ("", "questions"), ("", "share")], shares)


def _case(case: Case, metric: str, off: Arm, on: Arm, chars: int) -> list[Sheet | Block]:
    facts = [
        ["question", case.off.question],
        ["gold answers", " | ".join(case.off.answers)],
        ["without experience", f"{case.off.prediction or 'no answer'} ({why(case.off, metric)})"],
        ["with experience", f"{case.on.prediction or 'no answer'} ({why(case.on, metric)})"],
    ]
    shown = experience_in(case.on)
    facts += [[f"{one.level}, {one.place}", one.text] for one in shown] or [["experience", "none was shown"]]
    sheet = Sheet(f"Question {case.off.id}", [("", ""), ("", "text")], facts, 2)
    return [
        sheet,
        Block(f"Trace without experience ({off.label})", trace(case.off, chars)),
        Block(f"Trace with experience ({on.label})", trace(case.on, chars)),
    ]


def why(attempt: Attempt, metric: str) -> str:
    """Why the prediction was scored so."""
    if metric in METRICS:
        return explain(metric, attempt.prediction, attempt.answers)
    return f"{metric} {attempt.scores[metric]:.2f}" if metric in attempt.scores else f"no {metric}"


def trace(attempt: Attempt, chars: int) -> list[tuple[str, str]]:
    """(source, text) of every piece; documents and prompts are cut."""
    pieces = []
    for place, call in enumerate(attempt.calls, 1):
        request = f", request {place} ({call.purpose})" if len(attempt.calls) > 1 else ""
        for source, text in ((source, text) for source, text in call.pieces if text.strip()):
            whole = source in ("policy", "experience") or len(text) <= chars
            pieces.append(
                (f"{source}{request}", text if whole else f"{text[:chars]} [{len(text) - chars} letters cut]")
            )
    return pieces or [("notice", "the trace was not kept")]


def _draw(case: Case, files: Sequence[Path], chars: int) -> None:
    columns = {}
    for name, attempt in (("without experience", case.off), ("with experience", case.on)):
        title = f"{name}: {attempt.prediction or 'no answer'}"
        wrapped = []
        for label, text in trace(attempt, min(chars, 400)):
            lines = [part for line in printable(text).split("\n") for part in textwrap.wrap(line, WIDTH) or [""]]
            wrapped.append((label.split(",")[0], "\n".join(lines).strip("\n")))
        columns[title[:90]] = wrapped
    pictures.traces(files, f"{case.off.question} ({' | '.join(case.off.answers)})"[:160], columns)
