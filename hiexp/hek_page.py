"""The page that build_hek.py leaves behind: how many questions gave how many lessons, what was dropped, the tree.

`python -m hiexp.hek show STORE --html FILE` shows a store alone; this page has the account of its making too.
"""

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from hiexp.hek_report import BuildReport
from hiexp.report import write_page
from hiexp.report_views import experience_tree

REASONS = {
    "accepted": "taken",
    "no_object": "no JSON object in the reply",
    "prompt_too_long": "the attempts do not fit the window, so nothing was asked",
    "gold_leak": "tells the answer of its question",
    "entity_name": "the title names somebody or something of its question",
    "wrong_language": "not in the language that was asked for",
    "title_unknown_to_encoder": "no word of the title is known to the encoder",
}
"""What an outcome means, where its name does not say it."""


def write_build_page(path: str | Path, report: BuildReport, store: str | Path) -> None:
    """Write the page; ConfigError if the file cannot be written."""
    counts = (report.questions, report.all_right, report.all_wrong, report.pairs)
    stages = ("questions", "always right", "never right", "pairs of right and wrong")
    replies = [
        (str(level), reason, str(count), REASONS.get(reason, reason.replace("_", " ")))
        for level, outcomes in sorted(report.replies.items())
        for reason, count in outcomes.most_common()
    ]
    given_up = [f"level {level}: {count}" for level, count in sorted(report.given_up.items()) if count]
    clusters = {one.level: one for one in report.levels}
    levels = [
        (str(level), str(count), *((f"{one.threshold:.3f}", one.how) if (one := clusters.get(level)) else ("-", "-")))
        for level, count in sorted(report.entries.items())
    ]
    parts = [
        *(f'<p class="notes"><b>Warning: {escape(warning)}</b></p>' for warning in report.warnings),
        f'<p class="soft">Written by {escape(report.source_model)}; prompts: {escape(report.prompts)}; linkage: '
        f"{escape(report.linkage)}.</p>",
        _table("From questions to pairs", stages, [tuple(map(str, counts))]),
        _table("Replies, taken and dropped", ("level", "outcome", "replies", "meaning"), replies),
        f'<p class="soft">Given up after all attempts: {", ".join(given_up) or "none"}. Near duplicates merged at '
        f"level 1: {report.merged}. Stopped: {escape(report.stop)}.</p>",
        _table("Levels", ("level", "entries", "threshold of clusters", "how"), levels),
        "<h2>Experience</h2>",
        experience_tree(store),
    ]
    write_page(path, "How this HEK was made", parts)


def _table(heading: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f'<th class="name">{escape(name)}</th>' for name in columns)
    body = "".join("<tr>" + "".join(f'<td class="name">{escape(cell)}</td>' for cell in row) + "</tr>" for row in rows)
    return f'<h3>{escape(heading)}</h3><div class="scroll"><table><tr>{head}</tr>{body}</table></div>'
