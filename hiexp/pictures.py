"""Pictures of tables and figures by matplotlib, each as SVG and PNG. Numbers and text in, files out.

No text is read as a formula, whatever a label holds. Without matplotlib: ConfigError, before any work (`check`).
"""

import importlib
import importlib.util
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hiexp.config import ConfigError
from hiexp.sheets import printable

COLOURS = ("#2563c9", "#c8571b", "#1d8a5f", "#8a4fb0", "#a57c00", "#b3336a")
SOURCES = {
    "prompt": "#eceef1",
    "experience": "#fdeab8",
    "policy": "#dbe8fd",
    "document": "#d9f0e2",
    "notice": "#f1e3f5",
}
"""background of a trace by author, as on the pages"""
MARKS = ("o", "s", "^", "D")
MAX_LINES = 110
"""of a trace in a picture; what is cut off is said there"""


@dataclass(frozen=True)
class Dot:
    """A score with its interval, and the paper's."""

    value: float | None = None
    low: float = 0.0
    high: float = 0.0
    paper: float | None = None


@dataclass(frozen=True)
class Band:
    """A curve with a band around it; low and high may be None where a single run was seen."""

    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float | None]
    high: Sequence[float | None]


def check() -> None:
    """ConfigError if matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("matplotlib is not installed; pip install -r requirements-eval.txt")


def dots(
    files: Sequence[Path], title: str, rows: Sequence[str], panels: Mapping[str, Mapping[str, Sequence[Dot]]]
) -> None:
    """One panel per name, one mark per series, one line per row: panels[panel][series][row]."""
    figure = _figure(1.8 + 2.3 * len(panels), 1.4 + 0.32 * max(len(rows), 3))
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for place, (name, series) in enumerate(panels.items()):
        axis = axes[place]
        for index, (label, points) in enumerate(series.items()):
            shift = 0.16 * (index - (len(series) - 1) / 2)
            colour, mark = COLOURS[index % len(COLOURS)], MARKS[index % len(MARKS)]
            for row, dot in enumerate(points):
                if dot.value is not None:
                    axis.plot([dot.low, dot.high], [row + shift] * 2, color=colour, linewidth=1.2)
                    axis.plot(dot.value, row + shift, mark, color=colour, markersize=4)
                if dot.paper is not None:
                    axis.plot(dot.paper, row + shift, mark, color=colour, markersize=5, fillstyle="none")
            axis.plot([], [], mark, color=colour, label=printable(label), markersize=4)
        axis.set_title(printable(name), fontsize=9)
        axis.grid(axis="x", alpha=0.3)
    axes[0].set_yticks(range(len(rows)), [printable(row)[:48] for row in rows], fontsize=8)
    axes[0].set_ylim(len(rows) - 0.5, -0.5)
    if any(dot.paper is not None for series in panels.values() for points in series.values() for dot in points):
        axes[0].plot([], [], "o", color="#555", fillstyle="none", label="paper", markersize=5)
    if panels:
        axes[0].legend(fontsize=7, loc="best")
    figure.suptitle(printable(title), fontsize=10)
    _save(figure, files)


def curves(files: Sequence[Path], title: str, panels: Mapping[str, Mapping[str, Band]], x_label: str) -> None:
    """Panels two in a row; a series whose name ends in "(expected)" is dashed."""
    count = max(len(panels), 1)
    figure = _figure(10, 3.1 * ((count + 1) // 2) + 0.4)
    axes = figure.subplots((count + 1) // 2, 2, squeeze=False).flatten()
    for axis, (name, series) in zip(axes, panels.items(), strict=False):
        for index, (label, band) in enumerate(series.items()):
            is_expected = label.endswith("(expected)")
            colour = COLOURS[index % 2 if is_expected else index % len(COLOURS)]
            axis.plot(
                band.x, band.y, linestyle=":" if is_expected else "-", color=colour, label=printable(label),
                linewidth=1.4, marker="" if len(band.x) > 1 else "o",
            )  # fmt: skip
            known = [i for i, low in enumerate(band.low) if low is not None]
            if known:
                lows, highs = [band.low[i] for i in known], [band.high[i] for i in known]
                axis.fill_between([band.x[i] for i in known], lows, highs, color=colour, alpha=0.18, linewidth=0)
        _limit(axis, [value for band in series.values() for value in band.y])
        axis.set_title(printable(name), fontsize=9)
        axis.set_xlabel(x_label, fontsize=8)
        axis.grid(alpha=0.3)
        if series:
            axis.legend(fontsize=7)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    figure.suptitle(printable(title), fontsize=10)
    _save(figure, files)


def shares(
    files: Sequence[Path], title: str, panels: Mapping[str, Mapping[str, Mapping[str, float]]], buckets: Sequence[str]
) -> None:
    """Stacked bars: panels[panel][bar][bucket] in percent."""
    longest = max((len(bars) for bars in panels.values()), default=1)
    figure = _figure(9, 1.6 + 0.42 * longest * len(panels))
    axes = figure.subplots(max(len(panels), 1), 1, squeeze=False).flatten()
    for axis, (name, bars) in zip(axes, panels.items(), strict=False):
        for row, shown in enumerate(bars.values()):
            left = 0.0
            for index, bucket in enumerate(buckets):
                width = shown.get(bucket, 0.0)
                axis.barh(row, width, left=left, color=COLOURS[index % len(COLOURS)], height=0.7, alpha=0.85)
                if width >= 5:
                    axis.text(left + width / 2, row, f"{width:.1f}", ha="center", va="center", fontsize=7, color="w")
                left += width
        axis.set_yticks(range(len(bars)), [printable(bar) for bar in bars], fontsize=8)
        axis.invert_yaxis()
        axis.set_xlim(0, 100)
        axis.set_title(printable(name), fontsize=9)
    for index, bucket in enumerate(buckets):
        axes[0].bar(0, 0, color=COLOURS[index % len(COLOURS)], label=printable(bucket))
    axes[0].legend(fontsize=7, ncols=len(buckets), loc="lower right", bbox_to_anchor=(1, 1.12))
    figure.suptitle(printable(title), fontsize=10)
    _save(figure, files)


def traces(files: Sequence[Path], title: str, columns: Mapping[str, Sequence[tuple[str, str]]]) -> None:
    """Attempts side by side, each a list of (source, lines of text), coloured by source."""
    fitted = {name: _fit(pieces) for name, pieces in columns.items()}
    height = max((sum(text.count("\n") + 1 for _, text in pieces) for pieces in fitted.values()), default=1)
    figure = _figure(6.2 * max(len(columns), 1), 1.0 + 0.145 * height)
    axes = figure.subplots(1, max(len(columns), 1), squeeze=False)[0]
    for axis, (name, pieces) in zip(axes, fitted.items(), strict=False):
        axis.set_axis_off()
        axis.set_xlim(0, 1)
        axis.set_ylim(height, 0)
        axis.set_title(printable(name), fontsize=9, loc="left")
        row = 0
        for source, text in pieces:
            lines = text.count("\n") + 1
            axis.add_patch(_rectangle((0, row), 1, lines, SOURCES.get(source, "#fff")))
            axis.text(0.01, row + lines / 2, text, fontsize=7, family="monospace", va="center", linespacing=1.15)
            row += lines
    figure.suptitle(printable(title), fontsize=10)
    _save(figure, files)


def _fit(pieces: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    shown, room = [], MAX_LINES
    for source, text in pieces:
        lines = text.split("\n")
        if room <= 1:
            shown.append(("notice", "[more, see the Markdown]"))
            break
        shown.append((source, "\n".join(lines[: room - 1])))
        room -= len(lines)
    return shown


def _limit(axis: Any, values: Sequence[float]) -> None:
    """Keep the curves readable: a band is cut off where it is wider than all of them."""
    if values:
        low, high = min(values), max(values)
        room = (high - low) or abs(high) or 1.0
        bottom, top = axis.get_ylim()
        axis.set_ylim(max(bottom, low - room), min(top, high + room))


def _figure(width: float, height: float) -> Any:
    check()
    module = importlib.import_module("matplotlib.figure")
    return module.Figure(figsize=(width, height), layout="constrained")


def _rectangle(place: tuple[float, float], width: float, height: float, colour: str) -> Any:
    patches = importlib.import_module("matplotlib.patches")
    return patches.Rectangle(place, width, height, facecolor=colour, edgecolor="#ffffff", linewidth=1.0)


def _save(figure: Any, files: Sequence[Path]) -> None:
    """Without a date and with fixed ids: equal numbers give equal files."""
    matplotlib = importlib.import_module("matplotlib")
    for text in figure.findobj(importlib.import_module("matplotlib.text").Text):
        text.set_parse_math(False)
    with matplotlib.rc_context({"svg.hashsalt": "hiexp"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        for file in files:
            is_svg = file.suffix == ".svg"
            figure.savefig(file, format=file.suffix[1:], dpi=110, metadata={"Date": None} if is_svg else None)
