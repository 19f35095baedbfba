"""One self-contained HTML page about a run: tables, curves, the HEK as a tree, trajectories coloured by author.

Nothing is loaded and nothing is run by the page (no scripts), and every text of a model or a document is escaped. The
parts are functions that return markup; a new section is such a function and one line in `write_report`.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from hiexp.charts import line_chart, smoothing_window
from hiexp.config import ConfigError
from hiexp.data import Sample
from hiexp.metrics import METRICS
from hiexp.report_views import experience_tree, legend_of_sources, trajectory_view
from hiexp.trajectory import Trajectory

Metrics = Mapping[str, float | None]
Table = list[tuple[str, str, dict[str, Any]]]
"""rows of (group, row name, cells by column)"""

PANELS = {
    "reward/mean": ("Reward", "mean reward", "of the rollouts of a step; 1 = every one right"),
    "dev/em": ("Exact match on held-out questions", "exact match", "greedy, on the dev questions"),
    "reward/within_group_var": ("Variance within a group", "variance of reward", "what a group teaches; 0 = no signal"),
    "optim/grad_norm": ("Gradient norm", "norm before clipping", "its spread is what the optimiser has to live with"),
    "group/all_right_frac": ("Groups that are all right", "fraction of groups", "no signal: nothing left to learn"),
    "group/all_wrong_frac": ("Groups that are all wrong", "fraction of groups", "no signal: no success to learn from"),
    "loss/entropy": ("Entropy", "nats per token", "of the policy, on the tokens it wrote"),
    "loss/kl": ("Distance from the start", "KL estimate (k3)", "to the frozen reference policy"),
}
"""Curves that are always shown, in this order: metric -> title, y axis, what it says. The rest is folded away."""


def write_report(
    out_html: str | Path,
    title: str,
    summary: Mapping[str, Any],
    curves: Mapping[str, Sequence[Metrics]],
    hek_folder: str | Path | None,
    trajectories: Mapping[str, Sequence[Trajectory]],
    samples: Iterable[Sample],
    tokenizer: Any,
    notes: Sequence[str] = (),
) -> None:
    """Write the page.

    `summary`: plain values become figures at the top, mappings become tables (`summary_tables` says how). `curves` has
    the lines of metrics.jsonl for each arm, `trajectories` what to show of each arm; questions that several arms tried
    are put side by side. Raises ConfigError if the file cannot be written.
    """
    styles = {arm: i % 6 for i, arm in enumerate(dict.fromkeys([*curves, *trajectories]))}
    sections = {
        "Results": _results(summary),
        "Training curves": _curves(curves, styles),
        "Experience": experience_tree(hek_folder),
        "Trajectories": legend_of_sources() + trajectory_view(trajectories, samples, tokenizer),
    }
    anchors = {name: name.lower().replace(" ", "-") for name in sections}
    parts = [
        "<nav>" + "".join(f'<a href="#{anchors[name]}">{name}</a>' for name in sections) + "</nav>",
        _tiles(summary),
        _notes(notes),
        *(f'<section id="{anchors[name]}"><h2>{name}</h2>{body}</section>' for name, body in sections.items()),
    ]
    write_page(out_html, title, parts)


def write_page(path: str | Path, title: str, parts: Iterable[str], style: str = "") -> None:
    """A page of markup in the look of the report; `style` is added to it. ConfigError if it cannot be written."""
    look = Path(__file__).with_name("report.css").read_text(encoding="utf-8") + style
    head = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{look}</style></head><body><main>'
        f"<h1>{escape(title)}</h1>"
    )
    try:
        Path(path).write_text("".join([head, *parts, "</main></body></html>\n"]), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write the report {path}: {error.strerror}; choose another place") from error


def summary_tables(summary: Mapping[str, Any]) -> dict[str, Table]:
    """Tables in a nested mapping.

    {"arms": {"grpo": {"em": 0.4, "hek_on": {"em": 0.5}, "by_family": {"bridge": {"em": 0.3}}}}} has a table "arms" with
    rows "grpo" and "grpo / hek_on", and a table "by family" with a row "grpo" in the group "bridge". A cell is a value
    or an interval {"mean", "low", "high"}; an entry named "scores" or "overall" belongs to the row around it.
    """
    tables: dict[str, Table] = {}
    for name, node in summary.items():
        if not isinstance(node, Mapping) or _is_interval(node):
            continue
        if all(_is_row(value) for value in node.values()):
            for row, value in node.items():
                _collect(tables, name, "", row, value)
        else:
            _collect(tables, name, "", "", node)
    return tables


def _collect(tables: dict[str, Table], name: str, group: str, row: str, node: Mapping[str, Any]) -> None:
    cells: dict[str, Any] = {}
    below: dict[str, Mapping[str, Any]] = {}
    queue = list(node.items())
    while queue:
        key, value = queue.pop(0)
        if not _is_row(value):
            cells[key] = value
        elif key in ("scores", "overall"):
            queue[:0] = value.items()
        else:
            below[key] = value
    if cells:
        tables.setdefault(name, []).append((group, row, cells))
    for key, value in below.items():
        if key.startswith("by_"):
            for member, entry in value.items():
                _collect(tables, key, member, row, entry if _is_row(entry) else {"value": entry})
        else:
            _collect(tables, name, group, f"{row} / {key}" if row else key, value)


def _is_interval(value: Any) -> bool:
    return isinstance(value, Mapping) and {"mean", "low", "high"} == set(value)


def _is_row(value: Any) -> bool:
    return isinstance(value, Mapping) and not _is_interval(value)


def _results(summary: Mapping[str, Any]) -> str:
    tables = summary_tables(summary)
    if not tables:
        return '<p class="soft">There are no results to show.</p>'
    hint = "EM, F1 and Cover-EM in percent, with the 95% bootstrap interval over questions where it is known. "
    parts = [f'<p class="soft">{hint}Bold: the highest score of its column or group.</p>']
    for name, rows in tables.items():
        ordered = sorted(rows, key=lambda row: row[0]) if name.startswith("by_") else rows
        heading = escape(_words(name).capitalize())
        if len(rows) > 24:
            parts.append(f"<details><summary>{heading} ({len(rows)} rows)</summary>{_table(ordered)}</details>")
        else:
            parts.append(f"<h3>{heading}</h3>{_table(ordered)}")
    return "".join(parts)


def _table(rows: Table) -> str:
    columns = list(dict.fromkeys(column for *_, cells in rows for column in cells))
    has_group, has_row = any(group for group, _, _ in rows), any(row for _, row, _ in rows)
    lead = ['<th class="name"></th>'] * (has_group + has_row)
    lines = ["<tr>" + "".join(lead) + "".join(f"<th>{escape(_words(column))}</th>" for column in columns) + "</tr>"]
    previous: str | None = None
    for group, row, cells in rows:
        peers = [other for name, _, other in rows if name == group]
        first = has_group and group != previous
        names = [escape(group) if first else ""] * has_group + [escape(row)] * has_row
        line = "".join(f'<td class="name">{name}</td>' for name in names)
        line += "".join(_cell(column, cells.get(column), peers) for column in columns)
        lines.append(f'<tr class="first">{line}</tr>' if first and previous is not None else f"<tr>{line}</tr>")
        previous = group
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>'


def _cell(column: str, value: Any, peers: Sequence[Mapping[str, Any]]) -> str:
    if value is None:
        return "<td>-</td>"
    is_score = _is_score(column)
    text = _number(_mean(value), is_score)
    if _is_interval(value):
        text += f"<small>{_number(value['low'], is_score)} to {_number(value['high'], is_score)}</small>"
    means = [_mean(peer[column]) for peer in peers if isinstance(_mean(peer.get(column)), float | int)]
    best = is_score and len(set(means)) > 1 and _mean(value) == max(means)
    return f'<td class="best">{text}</td>' if best else f"<td>{text}</td>"


def _mean(value: Any) -> Any:
    return value["mean"] if _is_interval(value) else value


def _is_score(column: str) -> bool:
    """em, em_greedy, f1, ... : METRICS names, with or without a suffix."""
    return column in METRICS or column.split("_")[0] in METRICS


def _number(value: Any, is_score: bool = False) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and not is_score:
        return f"{value:,}"
    if isinstance(value, float | int):
        return f"{100 * value:.1f}" if is_score else f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.3g}"
    return escape(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))


def _words(name: str) -> str:
    return name.replace("_", " ")


def _tiles(summary: Mapping[str, Any]) -> str:
    plain = {key: value for key, value in summary.items() if isinstance(value, str | int | float | bool)}
    items = "".join(
        f"<li><b>{_number(value, _is_score(key))}</b><span>{escape(_words(key))}</span></li>"
        for key, value in plain.items()
    )
    return f'<ul class="tiles">{items}</ul>' if items else ""


def _notes(notes: Sequence[str]) -> str:
    return f'<ul class="notes">{"".join(f"<li>{escape(note)}</li>" for note in notes)}</ul>' if notes else ""


def _curves(curves: Mapping[str, Sequence[Metrics]], styles: Mapping[str, int]) -> str:
    keys = {key for rows in curves.values() for row in rows for key in row if key != "step"}
    shown = [_figure(key, curves, styles, *PANELS[key]) for key in PANELS if key in keys]
    others = [_figure(key, curves, styles, key, key.rsplit("/", 1)[-1], "") for key in sorted(keys - set(PANELS))]
    if not any(shown + others):
        return '<p class="soft">No training steps were logged.</p>'
    window = smoothing_window(max(len(rows) for rows in curves.values()))
    how = f"Thin: each step. Thick: mean of the last {window} steps. " if window > 1 else ""
    html = f'<p class="soft">{how}Rest the pointer on a chart to read its values.</p>'
    html += f'<div class="grid">{"".join(shown)}</div>'
    if any(others):
        html += f'<details><summary>All other metrics</summary><div class="grid">{"".join(others)}</div></details>'
    return html


def _figure(
    key: str, curves: Mapping[str, Sequence[Metrics]], styles: Mapping[str, int], title: str, y_label: str, meaning: str
) -> str:
    series: dict[str, list[tuple[float, float]]] = {}
    for arm, rows in curves.items():
        points = [(row["step"], row[key]) for row in rows if key in row]
        series[arm] = [(float(x or 0), float("nan") if y is None else float(y)) for x, y in points]
    chart = line_chart(series, "training step", y_label, styles)
    if not chart:
        return ""
    legend = "".join(
        f'<li class="s{styles[arm]}"><i></i><span>{escape(arm)}</span></li>' for arm in curves if series[arm]
    )
    caption = f"<figcaption>{escape(title)}<span>{escape(meaning)}</span></figcaption>"
    return f'<figure>{caption}<ul class="legend">{legend}</ul>{chart}</figure>'
