"""Line charts as inline SVG: numbers in, markup out, no drawing library. Colours are CSS classes of report.css."""

import math
from collections.abc import Mapping, Sequence
from html import escape

Point = tuple[float, float]

WIDTH, HEIGHT = 560, 250
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 12, 40
MAX_COLUMNS = 240
"""Strips with a tooltip per chart; a longer run shares one among neighbouring steps."""


def line_chart(series: Mapping[str, Sequence[Point]], x_label: str, y_label: str, styles: Mapping[str, int]) -> str:
    """One line per named series, thin as measured and thick as trailing mean; `styles` numbers the colours.

    Points that are not finite are left out and split the line. Returns "" when nothing is left to draw.
    """
    finite = {name: [p for p in points if _is_finite(p)] for name, points in series.items()}
    points = [p for run in finite.values() for p in run]
    if not points:
        return ""
    xs, ys = nice_ticks([x for x, _ in points], 8, whole=True), nice_ticks([y for _, y in points])
    frame = _Frame(min(x for x, _ in points), max(x for x, _ in points), ys[0], ys[-1])
    parts = [f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(y_label)}">']
    parts += _axes(frame, xs, ys, x_label, y_label)
    for name, run in series.items():
        parts += _lines(frame, run, styles[name])
    parts += _columns(frame, finite)
    return "".join(parts) + "</svg>"


def trailing_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of the last `window` values at each place, of fewer at the start."""
    return [sum(part) / len(part) for i in range(len(values)) if (part := values[max(0, i - window + 1) : i + 1])]


def smoothing_window(count: int) -> int:
    return max(1, count // 12)


def nice_ticks(values: Sequence[float], count: int = 5, whole: bool = False) -> list[float]:
    """Round numbers (1, 2, 5 times a power of ten) from at or below the least value to at or above the greatest."""
    low, high = min(values), max(values)
    if low >= 0 and low < 0.6 * high:
        low = 0.0  # a chart that could start at zero does
    if high == low:
        high, low = (high + abs(high) * 0.5 + (not high), low - abs(low) * 0.5)
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    step = max(step, 1.0) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, max(last, first + 1) + 1)]


class _Frame:
    """Maps data to pixels."""

    def __init__(self, left: float, right: float, bottom: float, top: float) -> None:
        self.left, self.right, self.bottom, self.top = left, right, bottom, top

    def x(self, value: float) -> float:
        share = (value - self.left) / (self.right - self.left) if self.right > self.left else 0.5
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.bottom) / (self.top - self.bottom) * (HEIGHT - TOP - BOTTOM)


def _axes(frame: _Frame, xs: list[float], ys: list[float], x_label: str, y_label: str) -> list[str]:
    parts = []
    for value in ys:
        y = frame.y(value)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.4g}</text>')
    for value in xs:
        if frame.left <= value <= frame.right:
            place = f'x="{frame.x(value):.1f}" y="{HEIGHT - BOTTOM + 17}"'
            parts.append(f'<text class="tick" {place} text-anchor="middle">{value:.6g}</text>')
    middle_x, middle_y = (LEFT + WIDTH - RIGHT) / 2, (TOP + HEIGHT - BOTTOM) / 2
    parts.append(f'<path class="axis" d="M{LEFT} {HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>')
    parts.append(f'<text class="label" x="{middle_x}" y="{HEIGHT - 5}" text-anchor="middle">{escape(x_label)}</text>')
    place = f'transform="translate(13 {middle_y}) rotate(-90)"'
    parts.append(f'<text class="label" {place} text-anchor="middle">{escape(y_label)}</text>')
    return parts


def _lines(frame: _Frame, points: Sequence[Point], style: int) -> list[str]:
    window = smoothing_window(len(points))
    parts = []
    for run in _runs(points):
        smooth = list(zip([x for x, _ in run], trailing_mean([y for _, y in run], window), strict=True))
        if len(run) == 1:
            x, y = run[0]
            parts.append(f'<circle class="dot s{style}" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="4"/>')
        elif window > 1:
            parts.append(f'<path class="raw s{style}" d="{_path(frame, run)}"/>')
            parts.append(f'<path class="line s{style}" d="{_path(frame, smooth)}"/>')
        else:
            parts.append(f'<path class="line s{style}" d="{_path(frame, run)}"/>')
    return parts


def _runs(points: Sequence[Point]) -> list[list[Point]]:
    runs: list[list[Point]] = [[]]
    for point in points:
        if _is_finite(point):
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _path(frame: _Frame, points: Sequence[Point]) -> str:
    return "M" + "L".join(f"{frame.x(x):.1f} {frame.y(y):.1f}" for x, y in points)


def _columns(frame: _Frame, series: Mapping[str, Sequence[Point]]) -> list[str]:
    """Invisible strips that show the values of one step when the pointer rests on them."""
    values = {name: dict(points) for name, points in series.items()}
    steps = sorted({x for points in series.values() for x, _ in points})
    steps = steps[:: math.ceil(len(steps) / MAX_COLUMNS)]
    width = (WIDTH - LEFT - RIGHT) / max(len(steps), 1)
    parts = []
    for step in steps:
        lines = [f"step {step:g}", *(f"{name}: {by[step]:.4g}" for name, by in values.items() if step in by)]
        parts.append(
            f'<rect class="hit" x="{frame.x(step) - width / 2:.1f}" y="{TOP}" width="{width:.1f}" '
            f'height="{HEIGHT - TOP - BOTTOM}"><title>{escape(chr(10).join(lines))}</title></rect>'
        )
    return parts


def _is_finite(point: Point) -> bool:
    return all(value is not None and math.isfinite(value) for value in point)
