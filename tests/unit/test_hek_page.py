"""The page of a build. Must fail if a text of a model is taken for markup, or if a reason for a drop is not on it."""

import re
from collections import Counter

from hiexp.encoder import HashEncoder
from hiexp.hek import HEK, Experience
from hiexp.hek_page import write_build_page
from hiexp.hek_report import BuildReport, LevelReport

EVIL = '<script>alert("x")</script>'


def test_every_count_is_shown_and_nothing_runs(tmp_path):
    entry = Experience("E1-000000", 1, "mixed", f"title {EVIL}", EVIL, qa_groups=(("s", EVIL),))
    HEK([entry], HashEncoder()).save(tmp_path / "hek")
    report = BuildReport("full", "average", EVIL, questions=41, all_right=7, all_wrong=19, pairs=15)
    report.replies = {1: Counter({"accepted": 13, "gold_leak": 29, "no_object": 3}), 2: Counter({"title_too_long": 5})}
    report.given_up, report.merged, report.stop = {1: 2, 2: 0}, 17, EVIL
    report.levels, report.entries = [LevelReport(1, 0.625, "calibrated", [1])], {1: 1, 2: 0}
    report.warnings = [EVIL]
    write_build_page(tmp_path / "page.html", report, tmp_path / "hek")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    cells = re.findall(r"<td[^>]*>(.*?)</td>", page)
    assert cells[:4] == ["41", "7", "19", "15"]
    rows = [cells[i : i + 4] for i in range(4, 20, 4)]
    assert [row[:3] for row in rows] == [
        ["1", "gold_leak", "29"],
        ["1", "accepted", "13"],
        ["1", "no_object", "3"],
        ["2", "title_too_long", "5"],
    ]
    assert rows[0][3].startswith("tells the answer") and rows[3][3] == "title too long"
    assert "level 1: 2" in page and "level 2: 0" not in page and ": 17." in page and "0.625" in page
    assert "<script" not in page and page.count("&lt;script&gt;") >= 6 and 'src="' not in page and "http" not in page
