"""Curves of several runs of an arm as a mean with its 95% interval: the paper's figure 3, redrawn, as one SVG file.

The file stands alone (colours inside, no style sheet), so that a page of Markdown can show it.
"""

import math
from collections.abc import Mapping, Sequence
from html import escape

from hiexp.charts import nice_ticks, trailing_mean
from hiexp.run_panel import Metrics, rolling_variance
from hiexp.study_stats import mean_over

Point = tuple[float, float, float, float]
"""step, mean, low, high"""
COLOURS = ("#2563c9", "#c8571b", "#1d8a5f", "#8a4fb0", "#a57c00", "#b3372f")
WIDTH, HEIGHT, COLUMNS = 330, 220, 3
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 30, 34
SMOOTH = 3
"""steps of a trailing mean, taken in each run before runs are averaged"""
ROLLING = 8
"""steps of the rolling variance of the gradient norm"""
PANELS = (
    ("reward/mean", "training reward"),
    ("dev/em", "validation EM (greedy)"),
    ("advantage/var", "variance of advantages"),
    ("reward/within_group_var", "variance of reward within a group"),
    ("optim/grad_norm", "gradient norm"),
    ("rolling", f"its variance over {ROLLING} steps"),
)
"""logged metric -> title"""


def figure(runs: Mapping[str, Sequence[Metrics]]) -> str:
    """SVG of six panels; `runs` has the metrics of every run of each arm. "" without any run."""
    arms = [name for name, found in runs.items() if found]
    if not arms:
        return ""
    rows = math.ceil(len(PANELS) / COLUMNS)
    width, height = COLUMNS * WIDTH, rows * HEIGHT + 26
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="11"><rect width="{width}" height="{height}" fill="#ffffff"/>'
    ]
    for place, (key, title) in enumerate(PANELS):
        curves = {arm: curve(runs[arm], key) for arm in arms}
        x, y = place % COLUMNS * WIDTH, place // COLUMNS * HEIGHT
        parts.append(f'<g transform="translate({x} {y})">{_panel(curves, title, arms)}</g>')
    for place, arm in enumerate(arms):
        x, colour = 20 + place * (width - 40) / len(arms), COLOURS[place % len(COLOURS)]
        parts.append(f'<rect x="{x:.0f}" y="{height - 18}" width="12" height="12" fill="{colour}"/>')
        label = f"{arm} ({len(runs[arm])} runs)"
        parts.append(f'<text x="{x + 17:.0f}" y="{height - 8}" fill="#1c1d1f">{escape(label)}</text>')
    return "".join(parts) + "</svg>\n"


def curve(runs: Sequence[Metrics], key: str) -> list[Point]:
    """Per step that every run has, the mean over runs and its 95% t-interval (the mean itself for one run)."""
    tables = [_series(run, key) for run in runs]
    steps = sorted(set.intersection(*(set(table) for table in tables))) if tables else []
    points = []
    for step in steps:
        mean, low, high = mean_over([table[step] for table in tables])
        points.append((step, mean, mean if math.isnan(low) else low, mean if math.isnan(high) else high))
    return points


def _series(run: Metrics, key: str) -> dict[float, float]:
    """Step -> value, smoothed where every step has one."""
    if key == "rolling":
        norms = [(line["step"], line.get("optim/grad_norm")) for line in run]
        known = [(float(step or 0), norm) for step, norm in norms if norm is not None]
        if len(known) < ROLLING:
            return {}
        values = rolling_variance([norm for _, norm in known], ROLLING)
        return dict(zip([step for step, _ in known][ROLLING - 1 :], values, strict=True))
    known = [(float(line["step"] or 0), value) for line in run if (value := line.get(key)) is not None]
    values = [value for _, value in known]
    if len(known) == len(run):
        values = trailing_mean(values, SMOOTH)
    return dict(zip([step for step, _ in known], values, strict=True))


def _panel(curves: Mapping[str, Sequence[Point]], title: str, arms: Sequence[str]) -> str:
    points = [point for run in curves.values() for point in run]
    head = f'<text x="{LEFT}" y="18" font-size="12" font-weight="600" fill="#1c1d1f">{escape(title)}</text>'
    if not points:
        return head + f'<text x="{LEFT}" y="60" fill="#5d6168">not logged</text>'
    ys = nice_ticks([value for _, _, low, high in points for value in (max(low, 0.0), high)], 4)
    left, right = min(p[0] for p in points), max(p[0] for p in points)

    def at(x: float, y: float) -> str:
        share = (x - left) / (right - left) if right > left else 0.5
        high = HEIGHT - BOTTOM - (min(max(y, ys[0]), ys[-1]) - ys[0]) / (ys[-1] - ys[0]) * (HEIGHT - TOP - BOTTOM)
        return f"{LEFT + share * (WIDTH - LEFT - RIGHT):.1f} {high:.1f}"

    parts = [head]
    for value in ys:
        line = at(left, value).split()[1]
        parts.append(f'<path d="M{LEFT} {line}H{WIDTH - RIGHT}" stroke="#e3e3de" fill="none"/>')
        parts.append(
            f'<text x="{LEFT - 6}" y="{float(line) + 4:.1f}" text-anchor="end" fill="#5d6168">{value:.3g}</text>'
        )
    for value in nice_ticks([left, right], 5, whole=True):
        if left <= value <= right:
            place = at(value, ys[0]).split()[0]
            parts.append(
                f'<text x="{place}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle" fill="#5d6168">{value:g}</text>'
            )
    for number, arm in enumerate(arms):
        run, colour = curves[arm], COLOURS[number % len(COLOURS)]
        if run:
            band = [at(x, high) for x, _, _, high in run] + [at(x, low) for x, _, low, _ in reversed(run)]
            parts.append(f'<path d="M{"L".join(band)}Z" fill="{colour}" fill-opacity="0.14"/>')
            middle = "L".join(at(x, mean) for x, mean, _, _ in run)
            parts.append(f'<path d="M{middle}" stroke="{colour}" stroke-width="1.8" fill="none"/>')
    return "".join(parts)
