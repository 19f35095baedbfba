"""The leaderboard page, also in a browser where there is one. They must fail if a text of a model can run as markup or
script, the page loads anything, a question or its reason is lost, or what was left out is not counted."""

import base64
import gzip
import hashlib
import json
import re
import shutil
import subprocess
from html import unescape
from html.parser import HTMLParser

import numpy as np
import pytest
from evaluation_runs import TRACE, arm, attempt, scored, write_run

from hiexp import leaderboard
from hiexp.arms import read_arms
from hiexp.leaderboard import why_lines, write_leaderboard
from hiexp.metrics import bootstrap_interval
from hiexp.records import Call
from hiexp.tables import main

EVIL = (
    "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">\x1b[31m\u202e\u2028"
)


def unpack(page, name):
    text = re.search(rf'<script type="text/plain" id="{name}">([^<]*)</script>', page)[1]
    assert re.fullmatch(r"[A-Za-z0-9+/=]*", text)
    return json.loads(gzip.decompress(base64.b64decode(text)))


@pytest.fixture
def run(tmp_path):
    rng = np.random.default_rng(0)
    return write_run(
        tmp_path / "run",
        arm("ReSearch", "musique", scored(rng, 45, ("em", "f1", "cem"), 0.3)),
        arm("ReSearch + HiExp", "musique", scored(rng, 45, ("em", "f1", "cem"), 0.7), hek=True),
        arm("Math", "aime24", scored(rng, 3, ("math",), members=6, answers=("12",)), method="math", decoding="sampled"),
    )


class Page(HTMLParser):
    def __init__(self, html):
        super().__init__()
        self.tags, self.attributes, self.scripts, self.kind, self.rows = [], [], [], None, []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self.kind = dict(attrs).get("type", "text/javascript") if tag == "script" else None
        if tag == "tr":
            self.rows.append([])

    def handle_endtag(self, tag):
        self.kind = None

    def handle_data(self, data):
        if self.kind == "text/javascript":
            self.scripts.append(data)
        elif self.rows and self.kind is None and data.strip():
            self.rows[-1].append(data)


def test_the_table_has_every_arm_with_its_interval(run, tmp_path):
    assert write_leaderboard(tmp_path / "page.html", [run]) == 0
    html = (tmp_path / "page.html").read_text()
    first = read_arms([run])[0]
    values = [a.scores["em"] for a in first.attempts]
    low, high = bootstrap_interval(values, 0)
    row = next(row for row in Page(html).rows if row[:2] == ["ReSearch", "Qwen2.5-7B"])
    assert row[2:5] == ["MuSiQue", "off", "greedy"]
    assert f"{100 * np.mean(values):.1f}" in row and f"{100 * low:.1f} to {100 * high:.1f}" in row


def test_every_question_has_its_scores_traces_and_reasons(run, tmp_path):
    write_leaderboard(tmp_path / "page.html", [run])
    html = (tmp_path / "page.html").read_text()
    sets = {one["name"]: one for one in unpack(html, "index")}
    assert set(sets) == {"MuSiQue", "AIME24"} and len(sets["MuSiQue"]["questions"]) == 45
    arms = {(one.benchmark, one.hek): one for one in read_arms([run])}
    metric = sets["MuSiQue"]["metrics"].index("CEM")
    for question in sets["MuSiQue"]["questions"]:
        for place, hek in enumerate((False, True)):
            wanted = next(a for a in arms["musique", hek].attempts if a.id == question["id"])
            assert question["scores"][metric][place] == wanted.scores["cem"]
        details = unpack(html, question["chunk"])[question["place"]]
        assert [entry[0] for entry in details] == [0, 1]
        [seen] = details[0][1]
        assert seen["prediction"] == "Paris" and seen["calls"] == [["", [list(piece) for piece in TRACE]]]
        assert any(line.startswith("EM 1: ") for line in seen["why"])
    question = sets["AIME24"]["questions"][0]
    [[_, attempts, left]] = unpack(html, question["chunk"])[question["place"]]
    assert len(attempts) == 4 and left == 2, "six attempts, four of them are shown"
    assert "against 12" in attempts[0]["why"][0]


def test_nothing_hostile_runs_and_nothing_is_loaded(tmp_path):
    calls = (Call((("policy", EVIL), ("document", EVIL)), EVIL), Call((("notice", EVIL),)))
    bad = attempt(
        0, {"em": 1.0}, calls=calls, question=EVIL, answers=(EVIL,), prediction=EVIL, status=EVIL, cases=(EVIL,)
    )
    folder = write_run(tmp_path / "r", arm(EVIL + "\ud800", "musique", [bad], model=EVIL))
    record = json.loads((folder / "evaluation.json").read_text())
    next(iter(record["arms"].values()))["benchmark"] = EVIL
    (folder / "evaluation.json").write_text(json.dumps(record))
    write_leaderboard(tmp_path / "page.html", [folder])
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    page = Page(html)
    assert len(page.scripts) == 1 and "owned" not in page.scripts[0]
    assert not {"img", "link", "iframe", "object", "form", "base"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on") or name in ("src", "href", "action")]
    policy = unescape(re.search(r'Content-Security-Policy" content="([^"]*)"', html)[1])
    digest = base64.b64encode(hashlib.sha256(page.scripts[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy and policy.startswith("default-src 'none'")
    assert "\x1b" not in html and "\u202e" not in html and "\\x1b[31m\\u202e\\u2028" in html
    [one] = unpack(html, "index")
    assert "\\x1b" in one["questions"][0]["text"] and "\x1b" not in json.dumps(one, ensure_ascii=False)
    traces = json.dumps(unpack(html, "c0"), ensure_ascii=False)
    assert "\x1b" not in traces and "\u202e" not in traces and traces.count("x1b[31m") > 6
    assert "innerHTML" not in page.scripts[0] and "eval(" not in page.scripts[0]


def test_what_does_not_fit_is_counted_and_keeps_its_scores(tmp_path, capsys):
    rng = np.random.default_rng(0)

    def noisy(place):
        text = base64.b85encode(rng.bytes(3000)).decode()  # does not shrink
        return attempt(place, {"em": 1.0}, calls=(Call((("policy", text),)),))

    folder = write_run(
        tmp_path / "r",
        arm("A", "musique", [noisy(i) for i in range(100)]),
        arm("A", "frames", [noisy(i) for i in range(100)]),
    )
    left = write_leaderboard(tmp_path / "page.html", [folder], 0.3)
    html = (tmp_path / "page.html").read_text()
    assert 0 < left < 200 and len(html) < 0.3e6 + 60_000
    sets = unpack(html, "index")
    kept = {one["name"]: sum(bool(q["chunk"]) for q in one["questions"]) for one in sets}
    assert sum(kept.values()) == 200 - left and min(kept.values()) > 0, "neither benchmark is left out as a whole"
    assert all(q["scores"] == [[1.0]] for one in sets for q in one["questions"])
    assert f"The traces of {left} questions are left out (limit: 0.3 MB" in html
    assert main(["page", str(folder), "--out", str(tmp_path / "p.html"), "--limit", "0"]) == 0
    assert "the traces of 200 questions are left out" in capsys.readouterr().out
    assert main(["page", str(folder), "--limit", "-1"]) == 2
    assert main(["page", str(folder), "--limit", "nan"]) == 2


def test_any_set_of_runs_has_a_page(tmp_path):
    rng = np.random.default_rng(0)
    attempts = scored(rng, 4)
    write_run(tmp_path / "a", arm("R", "musique", attempts))
    write_run(tmp_path / "b", arm("R", "musique", scored(rng, 6), top_k=3))
    write_leaderboard(tmp_path / "page.html", [tmp_path])
    html = (tmp_path / "page.html").read_text()
    assert "Arms with different question sets cannot be compared: MuSiQue (2)" in html
    [one] = unpack(html, "index")
    assert len(one["questions"]) == 6 and len({arm["name"] for arm in one["arms"]}) == 2
    last = one["questions"][-1]
    assert last["scores"][0][0] is None and last["scores"][0][1] is not None


def test_a_score_of_another_scorer_is_told():
    lines = why_lines(attempt(0, {"em": 0.0, "lasj": 0.8}), ["em", "lasj"])
    assert "0.00 is on record" in lines[0] and lines[1] == "LasJ 0.80"
    assert "on record" not in why_lines(attempt(0, {"em": 1.0}), ["em"])[0]


def test_long_pieces_are_cut_and_say_so(tmp_path):
    text = "x" * (leaderboard.MAX_CHARACTERS + 7)
    folder = write_run(
        tmp_path / "r", arm("R", "musique", [attempt(0, {"em": 1.0}, calls=(Call((("document", text),)),))])
    )
    write_leaderboard(tmp_path / "page.html", [folder])
    html = (tmp_path / "page.html").read_text()
    assert unpack(html, "c0")[0][0][1][0]["calls"][0][1][0][1].endswith("[7 letters left out]")


# ---- in a browser


USE = """
setTimeout(() => {
  const head = [...document.querySelectorAll("#arms th")].find((cell) => cell.textContent === "EM");
  head.click();
  const choose = (id, value) => { byId(id).value = value; byId(id).dispatchEvent(new Event("input")); };
  choose("wrong", "0");
  choose("right", "1");
  const rows = [...document.querySelectorAll("#arms tbody tr")].map((row) => row.cells[3].textContent);
  byId("legend").dataset.seen = rows.join(" ") + ", " + byId("found").textContent;
  document.querySelectorAll("#list details").forEach((fold) => { fold.open = true; });
}, 300);
"""
"""Sorts by EM, keeps what experience helped, opens it."""


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("chromium"), reason="no browser here")
def test_a_browser_sorts_filters_unpacks_and_runs_nothing_else(tmp_path, monkeypatch):
    calls = (Call((("policy", EVIL),)),)

    def attempts(*scores):
        return [attempt(i, {"em": s}, calls=calls, question=EVIL, prediction=EVIL) for i, s in enumerate(scores)]

    folder = write_run(
        tmp_path / "r",
        arm("R", "musique", attempts(0.0, 0.0, 1.0)),
        arm("R + HiExp", "musique", attempts(1.0, 0.0, 1.0), hek=True),
    )
    whole = leaderboard._beside
    monkeypatch.setattr(leaderboard, "_beside", lambda name: whole(name) + USE * name.endswith(".js"))
    write_leaderboard(tmp_path / "page.html", [folder])
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000", "--dump-dom"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", (tmp_path / "page.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert 'data-seen="on off, 1 of 3 questions, page 1 of 1"' in done.stdout
    assert done.stdout.count('<div class="seg policy"><em>policy</em>&lt;/script&gt;&lt;script&gt;') == 2
    assert "<title>Leaderboard</title>" in done.stdout and "<img" not in done.stdout
