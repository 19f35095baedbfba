"""One HTML page over any set of evaluations: a table of arms to sort and filter, and every question with its traces.

Whatever models, documents and users wrote is packed (gzip, base64) and enters the page as text when a question is
opened; the page's own script is the only one that its policy lets run, and it loads nothing. The packed traces are
bounded by a limit; questions beyond it keep their scores, and the page says how many they are.
"""

import base64
import gzip
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import zip_longest
from pathlib import Path
from typing import Any

from hiexp.arms import Arm, Spread, question_scores, read_arms, spread, took
from hiexp.config import ConfigError
from hiexp.metrics import METRICS, explain
from hiexp.paper_rows import TITLES, benchmark_of
from hiexp.records import Attempt
from hiexp.report_views import legend_of_sources
from hiexp.sheets import printable
from hiexp.tables import Parser

LIMIT_MB = 24
"""of packed traces on a page, about five times as much text"""
PER_CHUNK, PER_ARM, MAX_CHARACTERS = 20, 4, 20_000
"""Questions unpacked together; attempts of an arm at a question; letters of one piece of a trace."""
LEADING = ("math", "lasj", "em", "f1", "cem")
"""metrics that come first, in this order"""
TOOK = ("questions", "attempts", "searches", "requests", "tokens", "tokens_written", "answer_words", "no_answer",
        "cost", "seconds")  # fmt: skip


@dataclass(frozen=True)
class Question:
    id: str
    text: str
    golds: tuple[str, ...]


def page(command: str, argv: Sequence[str]) -> None:
    parser = Parser("python evaluate.py page", description="A leaderboard page over any set of evaluations.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders that evaluate.py wrote, also nested ones")
    parser.add_argument("--out", default="leaderboard.html", metavar="FILE", help="default leaderboard.html")
    parser.add_argument("--limit", type=float, default=LIMIT_MB, metavar="MB", help="of packed traces")
    found = parser.parse_args(argv)
    if not found.limit >= 0:
        raise ConfigError(f"--limit {found.limit} must be 0 (no traces) or above")
    left_out = write_leaderboard(found.out, found.runs, found.limit)
    told = f"; the traces of {left_out} questions are left out (--limit {found.limit:g} MB)" if left_out else ""
    print(f"wrote {found.out}, {Path(found.out).stat().st_size / 1e6:.1f} MB{told}")


def write_leaderboard(path: str | Path, runs: Sequence[str | Path], limit_mb: float = LIMIT_MB) -> int:
    """Write the page; returns how many questions have no traces there. ConfigError as in `read_arms`."""
    arms = read_arms(runs, keep_all=True)
    sets = _sets(arms)
    packed, left_out = _pack_traces(sets, int(limit_mb * 1e6))
    index = _pack([one.index() for one in sets])
    script, style = _beside("leaderboard.js"), _beside("report.css") + _beside("leaderboard.css")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'"
    data = "".join(f'<script type="text/plain" id="{name}">{text}</script>' for name, text in packed.items())
    html = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Leaderboard</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width"><style>{style}</style></head><body><main>'
        f"<h1>Leaderboard</h1>{_arm_table(arms)}{_controls(left_out, limit_mb)}</main>"
        f'<script type="text/plain" id="index">{index}</script>{data}<script>{script}</script></body></html>\n'
    )
    target = Path(path)
    part = target.with_name(f".{target.name}.new")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(html, encoding="utf-8")
        part.replace(target)
    except OSError as error:
        raise ConfigError(f"cannot write {path} ({error.strerror}); choose another --out") from error
    finally:
        part.unlink(missing_ok=True)
    return left_out


def _beside(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


class Set:
    """The questions of one benchmark, the arms that answered them, and where their traces are packed."""

    def __init__(self, name: str, arms: Sequence[Arm]) -> None:
        self.name, self.arms = name, arms
        self.metrics = _metrics(arms)
        self._lines = [_line_starts(arm) for arm in arms]
        self._at: list[dict[Question, list[int]]] = []
        for arm in arms:
            at: dict[Question, list[int]] = {}
            for place, attempt in enumerate(arm.attempts):
                at.setdefault(_question(attempt), []).append(place)
            self._at.append(at)
        self.questions = list(dict.fromkeys(question for at in self._at for question in at))
        self.chunk: dict[Question, tuple[str, int]] = {}

    def index(self) -> dict[str, Any]:
        """What the page knows of every question before it is opened."""
        scores = [[self._scores(place, metric) for place in range(len(self.arms))] for metric in self.metrics]
        return {
            "name": printable(self.name),
            "metrics": [TITLES.get(metric, metric) for metric in self.metrics],
            "arms": [{"name": name} for name in _names(self.arms)],
            "questions": [
                {
                    "id": printable(question.id),
                    "text": printable(question.text or question.id),
                    "golds": [printable(gold) for gold in question.golds],
                    "scores": [[of_arm.get(question) for of_arm in of_metric] for of_metric in scores],
                    "chunk": self.chunk.get(question, ("", 0))[0],
                    "place": self.chunk.get(question, ("", 0))[1],
                }
                for question in self.questions
            ],
        }

    def traces(self, question: Question) -> list[Any]:
        """[arm, attempts, number of attempts left out] for each arm that answered the question."""
        found = []
        for place, arm in enumerate(self.arms):
            lines = self._at[place].get(question, [])
            if lines:
                with arm.file.open("rb") as file:
                    shown = [_attempt_at(file, self._lines[place][line]) for line in lines[:PER_ARM]]
                found.append([place, [_view(attempt, self.metrics) for attempt in shown], len(lines) - len(shown)])
        return found

    def _scores(self, place: int, metric: str) -> dict[Question, float]:
        by_id = question_scores(self.arms[place].attempts, metric)
        return {question: round(by_id[question.id], 4) for question in self._at[place] if question.id in by_id}


def _sets(arms: Sequence[Arm]) -> list[Set]:
    by_benchmark: dict[str, list[Arm]] = {}
    for arm in arms:
        by_benchmark.setdefault(_benchmark(arm), []).append(arm)
    return [Set(name, members) for name, members in by_benchmark.items()]


def _pack_traces(sets: Sequence[Set], limit: int) -> tuple[dict[str, str], int]:
    """Packed chunks by name, benchmarks in turn so that none is left out as a whole; and the questions left out."""
    packed: dict[str, str] = {}
    size, is_full = 0, False
    for one, questions in _in_turn(sets):
        if is_full:
            break
        text = _pack([one.traces(question) for question in questions])
        is_full = size + len(text) > limit
        if not is_full:
            name = f"c{len(packed)}"
            packed[name], size = text, size + len(text)
            one.chunk |= {question: (name, place) for place, question in enumerate(questions)}
    return packed, sum(len(one.questions) - len(one.chunk) for one in sets)


def _in_turn(sets: Sequence[Set]) -> Iterator[tuple[Set, list[Question]]]:
    parts = [
        [(one, one.questions[start : start + PER_CHUNK]) for start in range(0, len(one.questions), PER_CHUNK)]
        for one in sets
    ]
    yield from (part for row in zip_longest(*parts) for part in row if part is not None)


def _pack(value: Any) -> str:
    """Letters, digits, +, / and = alone, whatever the value holds; equal values give equal text."""
    data = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")
    return base64.b64encode(gzip.compress(data, 6, mtime=0)).decode()


def _line_starts(arm: Arm) -> list[int]:
    """Byte offsets of the lines of an arm's file: a trace is read when its chunk is packed, never all at once."""
    starts, place = [], 0
    with arm.file.open("rb") as file:
        for line in file:
            starts.append(place)
            place += len(line)
    return starts


def _attempt_at(file: Any, start: int) -> Attempt:
    file.seek(start)
    return Attempt.from_json(json.loads(file.readline()))


def _question(attempt: Attempt) -> Question:
    return Question(attempt.id, attempt.question, attempt.answers)


def _view(attempt: Attempt, metrics: Sequence[str]) -> dict[str, Any]:
    facts = [
        attempt.status.replace("_", " "), f"{attempt.searches} searches", f"{attempt.requests} requests",
        f"{attempt.policy_tokens} of {attempt.tokens} tokens written",
        *([f"cost {attempt.cost:.3g}"] if attempt.cost is not None else []),
        *([f"{attempt.seconds:.1f} s"] if attempt.seconds else []),
    ]  # fmt: skip
    several = len(attempt.calls) > 1
    calls = []
    for number, call in enumerate(attempt.calls, 1):
        pieces = [[printable(source), _shown(text)] for source, text in call.pieces if text.strip()]
        calls.append([f"request {number}: {printable(call.purpose)}" if several else "", pieces])
    experience = dict.fromkeys([*attempt.strategies, *attempt.cases])
    return {
        "prediction": printable(attempt.prediction),
        "status": printable(attempt.status),
        "facts": printable(", ".join(facts)),
        "scores": [[name, attempt.scores[name]] for name in metrics if name in attempt.scores],
        "why": [printable(line) for line in why_lines(attempt, metrics)],
        "experience": printable(", ".join(experience)),
        "calls": [call for call in calls if call[1]],
    }


def why_lines(attempt: Attempt, metrics: Sequence[str]) -> list[str]:
    """Per metric its score and the reason; a line says so where the scorer of today would score otherwise."""
    lines = []
    for name in metrics:
        if name not in attempt.scores:
            continue
        score, title = attempt.scores[name], TITLES.get(name, name)
        if name == "math":  # asking math-verify again takes a process for each
            lines.append(f"{title} {score:.2f}: {attempt.prediction or 'no answer'} against {attempt.answers[0]}")
        elif name in METRICS:
            lines.append(f"{title} {explain(name, attempt.prediction, attempt.answers)}")
            if abs(METRICS[name](attempt.prediction, attempt.answers) - score) > 0.005:
                lines[-1] += f" (but {score:.2f} is on record, by another version of the scorer)"
        else:
            lines.append(f"{title} {score:.2f}")
    return lines


def _shown(text: str) -> str:
    text = text.strip("\n")
    left = len(text) - MAX_CHARACTERS
    return printable(text if left <= 0 else f"{text[:MAX_CHARACTERS]} [{left} letters left out]")


def _benchmark(arm: Arm) -> str:
    name = benchmark_of(arm.benchmark)
    return TITLES.get(name, arm.benchmark) or "data.test"


def _metrics(arms: Sequence[Arm]) -> list[str]:
    names = dict.fromkeys(name for arm in arms for attempt in arm.attempts for name in attempt.scores)
    return sorted(names, key=lambda name: (LEADING.index(name) if name in LEADING else len(LEADING), name))


def _names(arms: Sequence[Arm]) -> list[str]:
    """Label, model and decoding, and the run where those do not tell arms apart."""
    short = [f"{arm.label}, {arm.model}, {arm.decoding}" for arm in arms]
    count = Counter(short)
    return [
        printable(name if count[name] == 1 else f"{name}, HEK {'on' if arm.hek else 'off'}, {arm.run}")
        for name, arm in zip(short, arms, strict=True)
    ]


def _arm_table(arms: Sequence[Arm]) -> str:
    metrics = _metrics(arms)
    words = ("method", "model", "benchmark", "HEK", "decoding")
    numbers = [*(TITLES.get(name, name) for name in metrics), *(name.replace("_", " ") for name in TOOK)]
    head = "".join(f'<th class="name" data-kind="text">{escape(name)}</th>' for name in words)
    head += "".join(f'<th data-kind="number">{escape(name)}</th>' for name in numbers)
    head += '<th class="name" data-kind="text">question set</th><th class="name" data-kind="text">run</th>'
    rows = "".join(f"<tr>{_arm_row(arm, metrics)}</tr>" for arm in arms)
    sets = Counter(name for name, _ in {(_benchmark(arm), arm.questions) for arm in arms})
    several = [f"{name} ({count})" for name, count in sets.items() if count > 1]
    warning = f"Arms with different question sets cannot be compared: {', '.join(several)}." if several else ""
    return (
        '<div class="controls"><label>Filter <input id="filter" type="search" placeholder="words of a row"></label>'
        '<span id="count" class="soft"></span></div>'
        '<p class="soft">Percent, with the 95% bootstrap interval over questions; the rest is per attempt. A click on '
        f"a heading sorts. {escape(printable(warning))}</p>"
        f'<div class="scroll"><table id="arms"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _arm_row(arm: Arm, metrics: Sequence[str]) -> str:
    words = [arm.label, arm.model, _benchmark(arm), "on" if arm.hek else "off", arm.decoding]
    cells = [_word(word) for word in words]
    for metric in metrics:
        values = list(question_scores(arm.attempts, metric).values())
        cells.append(_score(spread(values, 0)) if values else '<td data-v="">-</td>')
    facts = took(arm)
    cells += [_fact(name, facts[name]) for name in TOOK]
    return "".join([*cells, _word(arm.questions), _word(str(arm.run))])


def _word(text: str) -> str:
    shown = escape(printable(text))
    return f'<td class="name" data-v="{shown}">{shown}</td>'


def _score(value: Spread) -> str:
    interval = f"<small>{100 * value.low:.1f} to {100 * value.high:.1f}</small>"
    return f'<td data-v="{100 * value.mean:.4f}">{100 * value.mean:.1f}{interval}</td>'


def _fact(name: str, value: float | int | None) -> str:
    if value is None:
        return '<td data-v="">-</td>'
    text = f"{100 * value:.1f}%" if name == "no_answer" else f"{value:.3g}" if name == "cost" else f"{value:,.1f}"
    return f'<td data-v="{value}">{f"{value:,}" if isinstance(value, int) else text}</td>'


def _controls(left_out: int, limit_mb: float) -> str:
    told = f"The traces of {left_out:,} questions are left out (limit: {limit_mb:g} MB packed). " if left_out else ""
    selects: Mapping[str, str] = {"set": "Benchmark", "metric": "Score", "wrong": "Wrong in", "right": "Right in"}
    return (
        f'<h2>Questions</h2><p class="soft">{told}Right: a score of at least 50%. At most {PER_ARM} attempts of an arm '
        "at a question are shown. Control characters are spelled out.</p>"
        '<div class="controls">'
        + "".join(f'<label>{name} <select id="{key}"></select></label>' for key, name in selects.items())
        + '<label>Words <input id="words" type="search"></label><button id="before">before</button>'
        '<button id="after">after</button>'
        '<span id="found" class="soft">The questions need a browser with scripts.</span>'
        f'</div><ol id="legend"></ol>{legend_of_sources()}<div id="list"></div>'
    )
