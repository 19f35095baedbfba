"""Recall@k against a count by hand: ids, contents, cut passages, repetitions, and what the corpus does not have.

Must fail if a supporting passage that was left out as a repetition, or cut, counts as not found, or if one that is
missing is left out of the mean.
"""

import gzip
import json

import pytest

from hiexp import recall
from hiexp.config import ConfigError
from hiexp.data import DataError
from hiexp.indexes import build_index
from hiexp.passages import cut
from hiexp.recall import RecallConfig, Targets, measure, read_questions
from hiexp.search import open_search
from hiexp.search_cli import main
from hiexp.search_types import IndexConfig, ScoredDocument, ScoredSearch, SearchConfig
from hiexp.trajectory import Document

LONG = " ".join(f"Sentence {i} tells of things." for i in range(60))


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def corpus(tmp_path):
    rows = [("a", "A", "alpha"), ("b", "B", "beta"), ("twin", "A", "alpha"), ("long", "L", LONG), ("c", "C", "gamma")]
    return write(tmp_path / "c.jsonl", [dict(zip(("id", "title", "text"), row, strict=True)) for row in rows])


class Answers(ScoredSearch):
    """Finds the ids that a table has for the query."""

    def __init__(self, table):
        self.table = table

    def search_scored(self, queries, top_k):
        return [[ScoredDocument(key, 0.0, Document("", "")) for key in self.table[query][:top_k]] for query in queries]


def question(text, *ids):
    return {"id": text, "question": text, "answers": ["x"], "supporting_ids": list(ids)}


def test_recall_is_a_count_by_hand(tmp_path):
    path = corpus(tmp_path)
    index = str(tmp_path / "i")
    build_index(IndexConfig(out=index, corpus=(path,), backend="bm25", words=100))
    rows = [question("q1", "a", "b"), question("q2", "twin", "long"), question("q3", "a", "nowhere", "c")]
    cfg = RecallConfig((write(tmp_path / "q.jsonl", rows),), SearchConfig("bm25", index=index), k=(1, 2, 3))
    table = {"q1": ["c", "a", "b"], "q2": ["long#2", "a", "long#1"], "q3": ["c", "b", "twin"]}
    figures = measure(cfg, Answers(table))[cfg.questions[0]]
    assert (figures["questions"], figures["missing"]) == (3, 1)
    expected = {"1": (0 + 1 / 2 + 1 / 3) / 3, "2": (1 / 2 + 1 + 1 / 3) / 3, "3": (1 + 1 + 1 / 3) / 3}
    for k, value in expected.items():
        mean, low, high = figures["recall"][k]
        assert mean == pytest.approx(value, abs=1e-4) and low <= mean <= high
    assert "1 supporting passages are not in the corpus" in recall.table({"q.jsonl": figures})


def test_in_memory_the_repeated_are_known_too(tmp_path):
    path = corpus(tmp_path)
    questions = write(tmp_path / "q.jsonl", [question("alpha", "twin")])
    cfg = RecallConfig((questions,), SearchConfig("bm25", (path,)), k=(1,))
    assert measure(cfg, open_search(cfg.search))[questions]["recall"]["1"][0] == 1.0


@pytest.mark.parametrize("words", [0, 20])
def test_questions_with_their_own_paragraphs_are_looked_up_by_content(tmp_path, words):
    """The corpus holds the passages under ids of its own, whole or cut."""
    record = {
        "_id": "q",
        "question": "Which things?",
        "supporting_facts": [["A", 0], ["L", 0]],
        "context": [["A", ["alpha"]], ["B", ["beta"]], ["L", LONG.replace(". ", ".| ").split("|")]],
    }
    questions = write(tmp_path / "q.jsonl", [record])
    index = str(tmp_path / "i")
    build_index(IndexConfig(out=index, corpus=(corpus(tmp_path),), backend="bm25", words=words))
    backend = open_search(SearchConfig("bm25", index=index))
    (asked,) = read_questions(questions, words)
    targets = Targets([asked], backend.passages, backend.passages.aliases())
    parts = {f"long#{n}" for n in range(len(cut(LONG, words)))} if words else {"long"}
    assert targets.missing == 0 and [targets.ids(item) for item in asked.supporting] == [{"a"}, parts]
    assert targets.recall(asked, ["b", sorted(parts)[-1]]) == 0.5 and targets.recall(asked, ["a", "b"]) == 0.5


def test_an_id_that_merely_looks_like_a_part_is_itself(tmp_path):
    rows = [{"id": "x#1", "text": "one"}, {"id": "x", "text": "two"}]
    passages = [(row["id"], Document("", row["text"])) for row in rows]
    asked = recall.Question("q", ["x#1"])
    assert Targets([asked], passages, {}).ids("x#1") == {"x#1"}


def test_what_an_approximation_loses(tmp_path):
    path = corpus(tmp_path)
    questions = write(tmp_path / "q.jsonl", [question("q1", "a"), question("q2", "b")])
    cfg = RecallConfig((questions,), SearchConfig("bm25", (path,)), k=(2,))
    ours, exact = {"q1": ["a", "b"], "q2": ["b"]}, {"q1": ["b", "c"], "q2": ["b", "c"]}
    figures = measure(cfg, Answers(ours), Answers(exact))[questions]
    assert figures["exact"]["2"][0] == 0.5 and figures["recall"]["2"][0] == 1.0


def test_the_command_prints_a_table_and_writes_the_figures(tmp_path, capsys):
    questions = write(tmp_path / "q.jsonl", [question("alpha", "a"), question("gamma", "b")])
    words = [f"search.corpus=[{corpus(tmp_path)}]", f"questions=[{questions}]", "k=[1]", f"json={tmp_path / 'f.json'}"]
    assert main(["recall", *words]) == 0
    assert "| q.jsonl | 2 | 0.500 [" in capsys.readouterr().out
    assert json.loads((tmp_path / "f.json").read_text())[questions]["recall"]["1"][0] == 0.5


@pytest.mark.parametrize("place", ["", "nowhere/f.json", "file/f.json"])
def test_figures_that_cannot_be_written_are_told_before_the_work(tmp_path, capsys, monkeypatch, place):
    monkeypatch.setattr(recall, "measure", None)
    (tmp_path / "file").write_text("x")
    questions = write(tmp_path / "q.jsonl", [question("alpha", "a")])
    words = [f"search.corpus=[{corpus(tmp_path)}]", f"questions=[{questions}]", f"json={tmp_path / place}"]
    assert main(["recall", *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: json=") and "cannot be written" in said and len(said.splitlines()) == 1


def test_an_index_without_its_list_of_repetitions_is_told(tmp_path):
    index = str(tmp_path / "i")
    build_index(IndexConfig(out=index, corpus=(corpus(tmp_path),), backend="bm25"))
    cfg = RecallConfig((write(tmp_path / "q.jsonl", [question("q1", "a")]),), SearchConfig("bm25", index=index))
    for damage in (lambda path: path.write_text('{"id": '), lambda path: path.unlink()):
        damage(tmp_path / "i" / "repeated.jsonl")
        with pytest.raises(ConfigError, match=r"repeated\.jsonl is missing or damaged"):
            measure(cfg, open_search(cfg.search))


def test_packed_and_broken_files_of_questions(tmp_path):
    path = tmp_path / "q.gz"
    with gzip.open(path, "wt") as file:
        file.write(json.dumps(question("alpha", "a")) + "\n")
    assert read_questions(path, 0) == [recall.Question("alpha", ["a"])]
    broken = {"id": "q", "question": "Who?", "supporting_facts": [[]], "context": [["A", ["x"]]]}
    for record, told in (
        (broken, ":1: question 'q': supporting_facts"),
        ({"supporting_ids": "a"}, ":1: supporting_ids"),
    ):
        with pytest.raises(DataError, match=told):
            read_questions(write(tmp_path / "b.jsonl", [question("x", "a") | {"supporting_ids": []} | record]), 0)


def test_mistakes_are_told_in_one_line(tmp_path, capsys):
    no_gold = write(tmp_path / "n.jsonl", [{"id": "1", "question": "Who?", "answers": ["x"]}])
    with pytest.raises(ConfigError, match="no question names its supporting passages"):
        read_questions(no_gold, 0)
    for words, message in (
        (["recall"], "questions"),
        (["recall", "questions=[]"], "questions is empty"),
        (["recall", f"questions=[{no_gold}]", "k=[0]"], "places from 1 on"),
        (["recal"], "did you mean 'recall'"),
        (["recall", f"questions=[{no_gold}]", "search.backend=none"], "search.corpus"),
    ):
        code = main(words)
        out, err = capsys.readouterr()
        assert (code, message in err) == (2, True) or (len(words) == 1 and code == 0 and message in out)
