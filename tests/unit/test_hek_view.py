"""The viewer: what it prints of a small store, that nothing in it is obeyed, and that it works in a pipe."""

import io
import json
import subprocess
import sys
from dataclasses import replace

import pytest

from hiexp.encoder import HashEncoder
from hiexp.hek import HEK, Experience
from hiexp.hek_view import difference, main, tree_lines


def entry(number, title, text="do", level=1, parent=None, children=(), sources=()):
    pairs = tuple((qid, f"ask {qid}") for qid in sources)
    return Experience(f"E{level}-{number}", level, "mixed", title, text, (), "", pairs, tuple(children), parent)


def small():
    return [
        entry(1, "who founded a band", "search the band", parent="E2-1", sources=("a",)),
        entry(2, "who founded a city", "search the city", parent="E2-1", sources=("b",)),
        entry(3, "where is \x1b[2J it", "<script>alert(1)</script>\nnext", sources=("c",)),
        entry(1, "who founded it", "look it up", 2, children=("E1-1", "E1-2"), sources=("a", "b")),
    ]


@pytest.fixture
def store(tmp_path):
    HEK(small(), HashEncoder(), settings={}).save(tmp_path / "run" / "hek")
    (tmp_path / "run" / "config.yaml").write_text("encoder: {kind: hash}\nhek: {case_threshold: 0.9}\ntrain: {}\n")
    return str(tmp_path / "run" / "hek")


def test_show_prints_the_tree_with_its_sources(store, capsys):
    assert main(["show", store]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "E2-1 [mixed] who founded it: look it up  (2 of level 1, 2 questions)",
        "  E1-1 [mixed] who founded a band: search the band  (1 questions)",
        "      from a: ask a",
    ]
    assert "\x1b" not in "".join(lines) and r"\x1b[2J" in lines[5] and r"\nnext" in lines[5]
    assert main(["show", store, "--level", "2"]) == 0
    assert capsys.readouterr().out.splitlines() == lines[:1]


def test_search_says_what_is_shown_and_why(store, capsys):
    assert main(["search", store, "who founded a band", "--level", "1", "--top", "2"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "level 1 (3 entries): who founded a band [en]"
    assert out[2].split()[:3] == ["yes", "E1-1", "1.000"] and "cosine 1.000 >= 0.900" in out[2]
    assert out[3].split()[:2] == ["no", "E1-2"] and "< 0.900" in out[3]
    assert main(["search", store, "--sample", "a", "who founded a band", "hek.case_threshold=0.1"]) == 0
    out = capsys.readouterr().out
    assert "E1-1" not in out and "yes    E1-2" in out and "level 2" in out and "level 3" not in out
    assert main(["search", store, "x", "hek.accept=zscore"]) == 0  # too small to calibrate: told, not raised
    assert "cannot be calibrated for level 1" in capsys.readouterr().out


def test_search_reads_queries_from_a_pipe(store, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("who founded a city\n\nwhere is it\n"))
    assert main(["search", store, "-", "--level", "1"]) == 0
    assert capsys.readouterr().out.count("level 1 (3 entries)") == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["search", "STORE", "q", "encoder.kind=hsh"], "did you mean 'hash'"),
        (["search", "STORE", "q", "hek.acept=zscore"], "did you mean hek.accept"),
        (["search", "STORE", "q", "--top", "0"], "--top=0"),
        (["show", "nowhere"], "no HEK in 'nowhere'"),
        (["diff", "STORE", "nowhere"], "no HEK in 'nowhere'"),
    ],
)
def test_mistakes_are_told_in_a_line(store, capsys, words, message):
    assert main([store if word == "STORE" else word for word in words]) == 2
    told = capsys.readouterr().err
    assert message in told and told.startswith("error: ") and told.count("\n") == 1


def by_id(entries):
    return {one.id: one for one in entries}


def test_difference_tells_added_removed_changed_moved_and_renumbered():
    old = small()
    same = difference(by_id(old), by_id(old))
    assert same.same == 4 and not (same.added or same.removed or same.changed or same.moved)
    new = [
        replace(old[0], id="E1-9", parent_id="E2-7"),  # its parent is only renumbered: not moved
        replace(old[1], parent_id=None),
        replace(old[2], description="else"),
        replace(old[3], id="E2-7", child_ids=("E1-9",)),
        entry(4, "new", parent=None),
    ]
    found = difference(by_id(old), by_id(new))
    assert [one.id for one in found.added] == ["E1-4"] and not found.removed
    assert [(a.id, b.id, names) for a, b, names in found.changed] == [("E1-3", "E1-3", ("description",))]
    assert [b.id for _, b in found.moved] == ["E1-2"] and (found.renumbered, found.same) == (2, 2)
    other = difference(by_id(old), by_id([entry(1, "quite another", "lesson", sources=("z",))]))
    assert len(other.removed) == 4 and len(other.added) == 1 and not other.changed  # an equal id alone says nothing


def test_stats_count_what_is_there(store, capsys):
    assert main(["stats", store, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    cases, patterns = figures["levels"]["1"], figures["levels"]["2"]
    assert figures["questions"] == 3 and (cases["entries"], patterns["entries"]) == (3, 1)
    assert cases["title_words"] == {"least": 4, "median": 4.0, "most": 4}
    assert patterns["cluster_sizes"]["most"] == 2 and patterns["coverage"] == pytest.approx(2 / 3)
    assert cases["orphans"] == {"count": 1, "first": ["E1-3"]} and cases["languages"] == {"en": 3}
    assert main(["stats", store]) == 0
    assert "3 source questions" in capsys.readouterr().out


def test_stats_find_repeated_and_near_titles(tmp_path, capsys):
    table = [
        entry(1, "a b c d", "x"),
        entry(2, "a b c d", "y"),
        entry(3, "A b c d", "x"),
        entry(4, "\u57ce\u5e02 \u8c01"),
    ]
    HEK(table, HashEncoder()).save(tmp_path / "hek")
    main(["stats", str(tmp_path / "hek"), "--json"])
    level = json.loads(capsys.readouterr().out)["levels"]["1"]
    assert (level["same_title"], level["titles_with_different_lessons"]) == (1, 1)
    assert level["near_duplicates"] == {"count": 2, "first": [["E1-1", "E1-3"], ["E1-2", "E1-3"]]}


@pytest.mark.parametrize("words", [["show"], ["stats"], ["search", "<i>where</i> is it"], ["diff", "STORE"]])
def test_B43_pages_hold_no_markup_of_the_store_and_load_nothing(store, tmp_path, capsys, words):
    page = tmp_path / "page.html"
    words = [words[0], store, *(store if word == "STORE" else word for word in words[1:])]
    assert main([*words, "--html", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert (
        "<script" not in text and "<i>where" not in text and "http" not in text and text.startswith("<!doctype html>")
    )
    assert "wrote" in capsys.readouterr().out


def test_the_module_runs_and_a_reader_that_stops_is_no_failure(tmp_path):
    many = [entry(i, f"title {i} " + "word " * 40) for i in range(2000)]
    HEK(many, HashEncoder(8)).save(tmp_path / "hek")
    command = [sys.executable, "-m", "hiexp.hek", "show", str(tmp_path / "hek")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stderr
        assert process.stdout.readline().startswith("E1-0 ")
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0


def test_not_when_is_in_the_tree():
    told = replace(entry(1, "t"), not_when=("a rainy day",))
    assert "    not when: a rainy day" in list(tree_lines({"E1-1": told}))
