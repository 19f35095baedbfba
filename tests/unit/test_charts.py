"""Must fail when points are misplaced, a gap is bridged, or text can leave its place in the markup."""

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hiexp.charts import BOTTOM, HEIGHT, LEFT, MAX_COLUMNS, RIGHT, TOP, WIDTH, line_chart, nice_ticks, trailing_mean


def paths(svg, kind):
    found = re.findall(rf'<path class="{kind} s(\d)" d="M([^"]+)"', svg)
    return [(int(style), [tuple(map(float, p.split())) for p in d.split("L")]) for style, d in found]


def test_lines_lie_where_the_axes_say():
    svg = line_chart(
        {"a": [(0, 0.0), (5, 0.5), (10, 1.0)], "b": [(0, 1.0), (10, 1.0)]}, "step", "reward", {"a": 0, "b": 3}
    )
    (style_a, a), (style_b, b) = paths(svg, "line")
    assert (style_a, style_b) == (0, 3)
    assert a == [
        (LEFT, HEIGHT - BOTTOM),
        ((LEFT + WIDTH - RIGHT) / 2, (TOP + HEIGHT - BOTTOM) / 2),
        (WIDTH - RIGHT, TOP),
    ]
    assert b == [(LEFT, TOP), (WIDTH - RIGHT, TOP)]
    assert ">step<" in svg and ">reward<" in svg and "step 5\na: 0.5</title>" in svg


def test_values_that_are_not_finite_split_the_line():
    points = [(0, 1.0), (1, 2.0), (2, math.nan), (3, 1.0), (4, math.inf), (5, 2.0), (6, 2.0)]
    svg = line_chart({"a": points}, "step", "y", {"a": 0})
    assert [len(p) for _, p in paths(svg, "line")] == [2, 2] and svg.count("<circle") == 1
    assert "nan" not in svg and "inf" not in svg
    assert line_chart({"a": [(0, math.nan)]}, "x", "y", {"a": 0}) == "" == line_chart({"a": []}, "x", "y", {"a": 0})


def test_long_runs_are_smoothed_and_keep_few_tooltips():
    svg = line_chart({"a": [(i, float(i % 2)) for i in range(1000)]}, "step", "y", {"a": 0})
    ((_, raw),), ((_, smooth),) = paths(svg, "raw"), paths(svg, "line")
    assert len(raw) == len(smooth) == 1000
    assert max(abs(y - (TOP + HEIGHT - BOTTOM) / 2) for _, y in smooth[100:]) < 5
    assert svg.count("<rect") <= MAX_COLUMNS


def test_trailing_mean_by_hand():
    assert trailing_mean([1, 2, 3, 6], 2) == [1, 1.5, 2.5, 4.5]
    assert trailing_mean([], 3) == []


def test_text_is_escaped():
    svg = line_chart({'<b>"': [(0, 1.0), (1, 2.0)]}, "<i>", '"><script>', {'<b>"': 0})
    assert not re.search(r"<(b|i|script)>", svg)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.floats(-1e9, 1e9).map(lambda x: round(x, 6)), min_size=1, max_size=5))
def test_ticks_are_round_few_and_enclose_the_data(values):
    ticks = nice_ticks(values)
    step = ticks[1] - ticks[0]
    slack = 1e-6 * step
    assert 2 <= len(ticks) <= 8 and ticks[0] <= min(values) + slack and ticks[-1] >= max(values) - slack
    assert min(abs(step / 10 ** math.floor(math.log10(step * 1.0001)) - m) for m in (1, 2, 5)) < 1e-3


def test_whole_ticks_for_steps():
    assert nice_ticks([0, 2], whole=True) == [0, 1, 2]
    assert nice_ticks([3], whole=True)[0] == pytest.approx(1) or nice_ticks([3], whole=True)[-1] >= 3
