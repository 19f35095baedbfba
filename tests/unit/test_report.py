"""Must fail when a text of a model or document is not escaped, the page loads anything, or a part is lost."""

import json
import re
from html import unescape
from html.parser import HTMLParser

import pytest

from hiexp.config import ConfigError
from hiexp.data import Sample
from hiexp.report import summary_tables, write_report
from hiexp.trajectory import Segment, Source, Status, Trajectory, Turn

EVIL = "</div><script>alert('x')</script><img src=http://evil.example/a.png onerror=alert(1)>"


class Vocabulary:
    """Each text is one token."""

    def __init__(self):
        self.texts = []

    def encode(self, text):
        self.texts.append(text)
        return (len(self.texts) - 1,)

    def decode(self, ids):
        return "".join(self.texts[i] for i in ids)


class Page(HTMLParser):
    def __init__(self, html):
        super().__init__()
        self.tags, self.attributes, self.open, self.colours = set(), [], [], {}
        self.feed(html)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs
        if tag not in ("meta", "br"):
            self.open.append((tag, dict(attrs).get("class") or ""))

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if len(self.open) and self.open[-1][1].startswith("seg "):
            self.colours[data] = self.open[-1][1].split()[1]


@pytest.fixture
def parts(tmp_path):
    vocabulary = Vocabulary()
    hek = tmp_path / "hek"
    hek.mkdir()
    for level, entry_id, children, parent in [
        (3, "E3-1", ["E2-1"], None),
        (2, "E2-1", ["E1-1"], "E3-1"),
        (1, "E1-1", [], "E2-1"),
        (1, "E1-2", [], None),
    ]:
        entry = {
            "id": entry_id, "level": level, "type": "mixed", "title": f"title {entry_id} {EVIL}",
            "description": f"text {entry_id} {EVIL}",
            "qa_groups": [["q0", f"origin {entry_id} {EVIL}"]],
            "tags": [EVIL], "child_ids": children, "parent_id": parent,
        }  # fmt: skip
        with (hek / f"level{level}.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def attempt(sample_id, answer, reward):
        trajectory = Trajectory(sample_id, strategies=("E2-1",))
        for source in Source:
            ids = vocabulary.encode(f"{source.value} says {EVIL}")
            trajectory.append(Segment(source, ids, (-0.5,) if source is Source.POLICY else ()))
        trajectory.turns.append(Turn("", "search", "x", cases=("E1-1",)))
        trajectory.answer, trajectory.reward, trajectory.status = answer, reward, Status.ANSWERED
        return trajectory

    rows = [{"step": i, "reward/mean": i / 9, "loss/kl": None if i == 4 else 0.1, f"x/{EVIL}": 1.0} for i in range(10)]
    arms = {f"base {EVIL}": {"em": 0.25, EVIL: EVIL}, "grpo": {"em": 0.5}}
    base = [attempt("q0", EVIL, 0.0), attempt("q1", "x", 1.0)]
    return {
        "out_html": tmp_path / "report.html",
        "title": f"title {EVIL}",
        "summary": {"seconds": 12.5, "reflector": EVIL, "arms": arms},
        "curves": {f"base {EVIL}": rows, "grpo": rows},
        "hek_folder": hek,
        "trajectories": {"base": base, "grpo": [attempt("q0", "Oslo", 1.0)]},
        "samples": [Sample("q0", f"question 0 {EVIL}", ("Oslo", EVIL), EVIL), Sample("q1", "question 1", ("x",))],
        "tokenizer": vocabulary,
        "notes": [f"note {EVIL}"],
    }  # fmt: skip


def test_nothing_is_injected_loaded_or_run(parts):
    write_report(**parts)
    html = parts["out_html"].read_text()
    page = Page(html)
    assert not page.tags & {"script", "img", "link", "iframe", "object", "base", "form"}
    names = {name for name, _ in page.attributes}
    assert not {name for name in names if name.startswith("on")} and "src" not in names
    assert all(value.startswith("#") for name, value in page.attributes if name in ("href", "xlink:href"))
    assert not re.search(r"@import|url\(", html.split("</style>")[0])
    assert html.count(EVIL) == 0 and unescape(html).count(EVIL) > 20


def test_every_part_is_on_the_page(parts):
    write_report(**parts)
    text = unescape(parts["out_html"].read_text())
    for wanted in [
        "12.5",
        "25.0",
        "50.0",
        "note",
        "question 0",
        "question 1",
        "Reward",
        "Distance from the start",
        "All other metrics",
    ]:
        assert wanted in text, wanted
    for entry in ("E3-1", "E2-1", "E1-1", "E1-2"):
        assert f"title {entry}" in text and f"text {entry}" in text and text.count(f'id="{entry}"') == 1
    assert text.index("title E3-1") < text.index("title E2-1") < text.index("title E1-1") < text.index("origin E1-1")
    assert text.index("origin E1-1") < text.index("title E1-2")  # inside its parents, before the next tree
    assert 'href="#E2-1"' in text and 'href="#E1-1"' in text
    assert text.count("<svg") == 3
    missing = text.split("Distance from the start")[1].split("</figure>")[0]
    assert "step 3\n" in missing and "step 4\n" not in missing  # null in the log is a gap, not a zero


def test_every_segment_has_the_colour_of_its_author(parts):
    write_report(**parts)
    colours = Page(parts["out_html"].read_text()).colours
    segments = {text: colour for text, colour in colours.items() if " says " in text}
    assert {text.split()[0] for text in segments} == {source.value for source in Source}
    assert all(text.split()[0] == colour for text, colour in segments.items())


def test_arms_stand_side_by_side_and_what_is_left_out_is_counted(parts):
    parts["trajectories"]["base"] += [parts["trajectories"]["base"][0]] * 5
    write_report(**parts)
    text = parts["out_html"].read_text()
    assert text.count('class="attempt"') == 4 and "4 of 8 trajectories are shown" in text
    questions = text.split('class="attempts"')[1:]
    assert [q.count('class="attempt"') for q in questions] == [3, 1]  # q0: two of base, one of grpo; it comes first


def test_a_page_of_nothing_says_so(parts):
    write_report(parts["out_html"], "empty", {}, {}, None, {}, [], None)
    text = parts["out_html"].read_text()
    Page(text)
    for message in ("no results", "No training steps", "No experience", "No trajectories"):
        assert message in text


def test_tables_of_a_nested_summary():
    interval = {"mean": 0.4, "low": 0.3, "high": 0.5}
    summary = {
        "seconds": 3,
        "arms": {
            "base": {"em": interval, "hek_on": {"f1": 0.5}, "by_family": {"bridge": {"em": 0.1}}},
            "grpo": {"overall": {"num_questions": 7, "scores": {"em": interval}}, "by_family": {"bridge": {"em": 0.2}}},
        },
        "panel": {"grad": 0.7},
    }
    assert summary_tables(summary) == {
        "arms": [
            ("", "base", {"em": interval}),
            ("", "base / hek_on", {"f1": 0.5}),
            ("", "grpo", {"num_questions": 7, "em": interval}),
        ],
        "by_family": [("bridge", "base", {"em": 0.1}), ("bridge", "grpo", {"em": 0.2})],
        "panel": [("", "", {"grad": 0.7})],
    }  # fmt: skip


def test_scores_are_in_percent_with_the_best_in_bold(tmp_path):
    summary = {
        "arms": {
            "a": {"em_greedy": {"mean": 0.4, "low": 0.31, "high": 0.5}, "tokens": 12},
            "b": {"em_greedy": 0.6, "tokens": 1234},
        }
    }
    write_report(tmp_path / "r.html", "t", summary, {}, None, {}, [], None)
    text = (tmp_path / "r.html").read_text()
    assert "<td>40.0<small>31.0 to 50.0</small></td>" in text and '<td class="best">60.0</td>' in text
    assert "<td>1,234</td>" in text


def test_an_unwritable_place_is_told_in_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot write the report .*No such file"):
        write_report(tmp_path / "no" / "r.html", "t", {}, {}, None, {}, [], None)
