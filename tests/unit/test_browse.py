"""The viewer of rollouts; must fail if a text can steer a terminal or a page, a part is lost, a pipe gets colours."""

import json
import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest
from test_report import EVIL, Page, Vocabulary

from hiexp import browse
from hiexp.browse import COLOURS, html_view, main, printable, text_view
from hiexp.tracking import append_trajectories, write_trajectories
from hiexp.trajectory import Document, Segment, Source, Status, Trajectory, Turn

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY = Vocabulary()


def attempt(name="q1", reward=1.0, status=Status.ANSWERED, text="", member=0):
    trajectory = Trajectory(name, member, strategies=("E2-1",))
    for source in (Source.PROMPT, Source.EXPERIENCE, Source.POLICY, Source.DOCUMENT, Source.NOTICE, Source.POLICY):
        ids = VOCABULARY.encode(f"{source.value} says {text}")
        trajectory.append(Segment(source, ids, (-0.5,) if source is Source.POLICY else ()))
    documents = (Document(f"Oslo {text}", "It is a city."), Document("Bergen", "So is it."))
    trajectory.turns = [Turn("", "search", "where ?", documents, ("E1-4",)), Turn("", "answer", "x", notice="too late")]
    trajectory.answer, trajectory.reward, trajectory.status = f"here {text}", reward, status
    return trajectory


def test_a_trajectory_in_plain_text():
    assert text_view(7, attempt(), VOCABULARY, "where is it ?") == (
        "step 7  q1  attempt 0  answered, reward 1.000  1 searches  2 of 6 tokens by the policy\n"
        "  question: where is it ?\n"
        "  answer: here \n"
        "  experience: E2-1, E1-4\n"
        "  turn 1: search 'where ?'  found: Oslo ; Bergen  cases: E1-4\n"
        "  turn 2: answer 'x'  too late\n"
        "[prompt] prompt says \n"
        "[experience] experience says \n"
        "[policy 1] policy says \n"
        "[document] document says \n"
        "[notice] notice says \n"
        "[policy 2] policy says \n"
    )


def test_every_author_has_its_colour_on_every_line():
    text = text_view(0, attempt(text="a\nb"), VOCABULARY, colours=True)
    for source, colour in COLOURS.items():
        assert f"\033[{colour}m[{source.value}" in text
        assert f"{source.value} says a\033[0m\n\033[{colour}mb\033[0m\n" in text
    assert len(set(COLOURS.values())) == len(Source)
    assert (
        text.startswith("\033[1;32mstep")
        and text_view(0, attempt(reward=0.2), VOCABULARY, "", True)[:7] == "\033[1;31m"
    )


def test_no_text_can_steer_the_terminal():
    evil = "\033]0;title\007\033[2J\r\x9b31m\u202eabc"
    text = text_view(0, attempt(f"q{evil}", text=evil), VOCABULARY, evil)
    assert text.count("\\x1b]0;title\\x07\\x1b[2J\\r\\x9b31m\\u202eabc") >= 9
    assert not [c for c in text if not c.isprintable() and c != "\n"]
    assert printable("tab\t, newline\n, gr\u00fc\u00df \u4f60\u597d") == "tab\t, newline\n, gr\u00fc\u00df \u4f60\u597d"


def test_the_page_escapes_everything_and_filters_without_scripts(tmp_path):
    tried = [
        (3, attempt(f"q0 {EVIL}", 1.0, text=EVIL)),
        (3, attempt("q1", 0.4, text=EVIL)),
        (4, attempt("q2", 0.0, Status.OUT_OF_TURNS)),
    ]
    parts = html_view(iter(tried), VOCABULARY, {f"q0 {EVIL}": f"why {EVIL}"}, None)
    browse.write_page(tmp_path / "x.html", f"t {EVIL}", parts, browse.FILTERS)
    html = (tmp_path / "x.html").read_text()
    page = Page(html)
    assert html.count(EVIL) == 0 and unescape(html).count(EVIL) > 10
    assert not page.tags & {"script", "img", "link", "iframe", "object", "base", "form"}
    links = [value for name, value in page.attributes if name == "href"]
    targets = {value for name, value in page.attributes if name == "id"}
    filters = [link for link in links if link.startswith("#show-")]
    assert set(filters) == {
        f"#show-{n}" for n in ("all", "answered", "right", "partly_right", "out_of_turns", "without_reward")
    }
    assert {link[1:] for link in filters} <= targets
    rules = dict(re.findall(r"#show-(\w+):target~\.list>details:not\(\.(\w+)\)\{display:none\}", html))
    assert rules.keys() >= {link.removeprefix("#show-") for link in filters} - {"all"}
    assert all(name == hidden for name, hidden in rules.items()) and rules.keys() >= {status.value for status in Status}
    assert html.index('id="show-all"') < html.index('<div class="list">'), "CSS reaches only what comes after"
    classes = re.findall(r'<details class="([\w ]+)"', html)
    assert classes == ["answered right", "answered partly_right", "out_of_turns without_reward"]
    assert "answered (2)" in html and "out of turns (1)" in html and "<em>policy 2</em>" in html


def test_a_page_of_too_many_says_what_is_left_out(monkeypatch):
    monkeypatch.setattr(browse, "MAX_ON_PAGE", 2)
    html = "".join(html_view(((step, attempt(f"q{step}")) for step in range(5)), VOCABULARY, {}, None))
    assert "newest 2 of 5" in html and "q4" in html and "q3" in html and "q2" not in html


@pytest.fixture
def run(tmp_path, byte_tokenizer):
    """A run folder with steps 0 and 2 as train.py leaves it."""
    folder = tmp_path / "run"
    folder.mkdir()
    byte_tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "model/config.json").write_text("{}")
    (tmp_path / "train.jsonl").write_text('{"id": "q1", "question": "where is it ?", "answers": ["x"]}\n')
    (folder / "config.yaml").write_text(
        f"model: {{path: {tmp_path / 'model'}}}\ndata: {{train: {tmp_path / 'train.jsonl'}, dev: ''}}\n"
        "hek: {path: null}\n"
    )
    for step in (0, 2):
        ids = byte_tokenizer.encode(f"step {step} thinks", add_special_tokens=False)
        trajectory = Trajectory("q1", segments=[Segment(Source.POLICY, tuple(ids), (-0.5,) * len(ids))])
        append_trajectories(folder / "trajectories.jsonl", [trajectory], step)
    return folder


def test_outside_a_terminal_the_command_prints_plain_text(run, tmp_path, capsys):
    assert main(["show", str(run)]) == 0
    out = capsys.readouterr().out
    assert "[policy 1] step 0 thinks" in out and "[policy 1] step 2 thinks" in out
    assert "question: where is it ?" in out and "\033" not in out
    assert main(["show", str(run), "--html", str(tmp_path / "page.html")]) == 0
    assert "step 2 thinks" in (tmp_path / "page.html").read_text()


def test_a_terminal_gets_colours_in_a_pager_unless_it_asks_for_none(run, capsys, monkeypatch):
    paged = []
    monkeypatch.setattr(browse, "_page", lambda texts: paged.append("".join(texts)))
    monkeypatch.setattr(browse.shutil, "which", lambda name: "/usr/bin/less")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert main(["show", str(run)]) == 0 and "\033[36m[policy 1] step 0" in paged[0]
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(["show", str(run)]) == 0 and "\033" not in paged[1] and "step 0 thinks" in paged[1]
    assert main(["show", str(run), "--plain"]) == 0 and len(paged) == 2
    assert "step 0 thinks" in capsys.readouterr().out


def test_one_step_and_what_cannot_be_shown(run, tmp_path, capsys):
    assert main(["show", str(run), "--step", "2"]) == 0
    out = capsys.readouterr().out
    assert "step 2 thinks" in out and "step 0 thinks" not in out
    for arguments, message in (
        ([str(run), "--step", "1"], "the last that were: 0, 2"),
        ([str(tmp_path)], "holds no trajectories"),
        ([str(run), "--tokenizer", str(tmp_path)], "--tokenizer"),
        ([str(run), "--html", str(tmp_path / "no" / "x.html")], "cannot write"),
    ):
        assert main(["show", *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1


def test_a_file_of_an_evaluation_can_be_named(run, capsys):
    write_trajectories(run / "trajectories_hek_on.jsonl", [Trajectory("q1", policy_version=9)])
    assert main(["show", str(run / "trajectories_hek_on.jsonl")]) == 0
    assert capsys.readouterr().out.startswith("step 9  q1")
    assert json.loads((run / "trajectories.jsonl").read_text().splitlines()[0])["step"] == 0


@pytest.mark.slow
def test_a_reader_that_leaves_early_is_no_error(run):
    line = (run / "trajectories.jsonl").read_text().splitlines()[0]
    with (run / "trajectories.jsonl").open("a") as file:
        file.writelines(line.replace('"step": 0', f'"step": {step}') + "\n" for step in range(3, 2000))
    command = f"{sys.executable} -m hiexp.tracking show {run} | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.stdout.startswith("step 0  q1") and done.stdout.endswith("\n0\n") and done.stderr == ""
