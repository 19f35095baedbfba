"""The paper's numbers against its own arithmetic. They must fail if a wrong number of it is repeated unflagged."""

import json
from pathlib import Path

import numpy as np
import pytest

from hiexp.paper_rows import (
    TABLES,
    TOLERANCE,
    Column,
    PaperRow,
    find_row,
    flags,
    paper,
    paper_cell,
    paper_rows,
    recomputed,
)

QA = ("hotpotqa", "2wiki", "musique", "bamboogle")
SHARED = Path(__file__).resolve().parents[3] / "shared" / "paper_tables.json"


def test_every_average_of_the_paper_follows_from_its_columns_but_two():
    wrong = []
    for spec in TABLES.values():
        for printed in paper_rows(spec.name):
            for column in spec.columns:
                parts = [printed.scores.get(f"{name}.{column.metric}") for name in column.benchmarks]
                if len(parts) > 1 and None not in parts and column.key in printed.scores:
                    gap = abs(np.mean(parts) - printed.scores[column.key])
                    if gap > 0.06:
                        wrong.append((spec.name, printed.label, printed.model))
    assert wrong == [("table1", "ReSearch", "Qwen2.5-7B"), ("table1", "Search-R1-v0.3", "Qwen2.5-32B")]


def test_the_wrong_numbers_of_the_paper_are_mended_and_flagged():
    spec = TABLES["table1"]
    by_key = {column.key: column for column in spec.columns}
    research = next(one for one in paper_rows("table1") if one.label == "ReSearch")
    f1, cem = (paper_cell(spec, research, by_key[f"musique.{metric}"]) for metric in ("f1", "cem"))
    assert (f1.value, f1.printed, cem.value, cem.printed) == (34.1, 28.0, 28.0, 34.1)
    assert [flag.id for flag in cem.flags] == ["D2"]
    assert recomputed(spec, research, by_key["average.cem"]) == pytest.approx(48.7)
    search_r1 = [one for one in paper_rows("table1") if one.label == "Search-R1-v0.3"][1]
    average = paper_cell(spec, search_r1, by_key["average.cem"])
    assert average.value == 53.3 and average.printed == 53.5 and [flag.id for flag in average.flags] == ["D3"]


def test_an_average_that_nobody_flagged_is_recomputed_too():
    spec = TABLES["table5"]
    scores = {"hotpotqa.cem": 10.0, "2wiki.cem": 20.0, "musique.cem": 30.0}
    for printed, wanted in ((20.05, 20.05), (20.5, 20.0)):
        row = PaperRow("GSPO", "", "Qwen2.5-7B", scores | {"average.cem": printed})
        cell = paper_cell(spec, row, spec.columns[-1])
        assert (cell.value, cell.printed) == (wanted, printed)


def test_gains_are_what_the_paper_prints_and_the_flags_what_they_hide():
    for spec in TABLES.values():
        for one in paper_rows(spec.name):
            if one.gain is not None:
                average = next(key for key in one.scores if key.startswith("average"))
                size = one.model.split("-")[1]
                over = [o for o in paper_rows(spec.name) if o.label == one.gain_over]
                other = next((o for o in over if size in o.model), over[0])
                assert one.gain == pytest.approx(one.scores[average] - other.scores[average], abs=0.051)
    texts = [flag.text for flag in flags("table1") if flag.id == "D1"]
    assert "5.5" in texts[0] and "4.5" in texts[1]


def test_grids_of_scores_show_how_many_questions_there_were():
    cells = [f"{name}.{metric}" for name in QA[:3] for metric in ("cem", "em")]
    halves = {o.label for o in paper_rows("table1") if all(2 * o.scores[c] == round(2 * o.scores[c]) for c in cells)}
    assert halves == set(next(flag.rows for flag in flags("table1") if flag.id == "grid-200"))
    off = {
        (o.label, o.model)
        for o in paper_rows("table1")
        for c in ("bamboogle.cem", "bamboogle.em")
        if abs(round(o.scores[c] * 1.25) / 1.25 - o.scores[c]) > 0.051
    }
    assert off == {("Qwen3-235B-A22B", "Qwen3-235B-A22B"), ("HiExp-Searcher", "Qwen2.5-32B")}


def test_numbers_are_those_that_were_collected():
    if not SHARED.exists():
        pytest.skip("the collected numbers are not here")
    collected = json.loads(SHARED.read_text())
    names = {"HotpotQA": "hotpotqa", "2Wiki": "2wiki", "Musique": "musique", "Bamboogle": "bamboogle"}
    for ours, theirs in zip(paper_rows("table1"), collected["table1"]["rows"], strict=True):
        assert (ours.label, ours.model) == (theirs["method"], theirs["base_model"])
        for name, key in names.items():
            for metric, value in theirs[name].items():
                assert ours.scores[f"{key}.{metric.lower()}"] == value
    for ours, theirs in zip(paper_rows("table4"), collected["table4"]["rows"], strict=True):
        assert sorted(ours.scores.values()) == sorted(v for k, v in theirs.items() if k[0].isupper())
    for ours, theirs in zip(paper_rows("table2"), collected["table2"]["rows"], strict=True):
        assert ours.scores["out_of_domain.cem"] == theirs["Out-of-Domain"]["CEM"]
        assert ours.scores["in_domain.f1"] == theirs["In-Domain"]["F1"]


@pytest.mark.parametrize("name", TABLES)
def test_every_label_of_the_paper_and_every_alias_finds_its_row(name):
    spec = TABLES[name]
    for printed in paper_rows(name):
        assert find_row(spec, printed.label, printed.model, "agent") is printed
        for alias in spec.aliases.get(printed.label, ()):
            assert find_row(spec, alias, printed.model, "agent").label == printed.label
    assert set(spec.aliases) <= {printed.label for printed in paper_rows(name)}
    assert {label for pair in spec.gains for label in pair} <= {printed.label for printed in paper_rows(name)}


@pytest.mark.parametrize(
    ("label", "model", "method", "wanted"),
    [
        ("ReSearch", "Qwen2.5-32B-Instruct", "research", ("ReSearch", "Qwen2.5-32B")),
        ("research-32B", "unknown", "research", ("ReSearch", "Qwen2.5-32B")),
        ("ReSearch", "SmolLM2-135M", "research", ("ReSearch", "Qwen2.5-7B")),
        ("search-o1", "Qwen2.5-7B", "search_o1", ("Search-o1*", "Qwen2.5-7B")),
        ("Vanilla RAG", "gpt-4.1-2025-04-14", "vanilla_rag", ("GPT-4.1", "GPT-4.1-0414")),
        ("Vanilla RAG", "gpt-4.1-mini", "vanilla_rag", ("Vanilla RAG", "Qwen2.5-7B")),
        ("Vanilla RAG", "deepseek-r1-distill-qwen-7b", "vanilla_rag", ("Vanilla RAG", "Qwen2.5-7B")),
        ("GRPO + HiExp", "Qwen2.5-7B", "agent", ("HiExp-Searcher", "Qwen2.5-7B")),
        ("Searching", "Qwen2.5-7B", "agent", None),
    ],
)
def test_a_row_is_found_by_label_and_size(label, model, method, wanted):
    found = find_row(TABLES["table1"], label, model, method)
    assert (found and (found.label, found.model)) == wanted


def test_columns_are_keys_of_the_papers_numbers():
    known = {key for rows in paper()["tables"].values() for one in rows for key in one["scores"]}
    for spec in TABLES.values():
        for column in spec.columns:
            assert column.paper_key in known or spec.name == "table2", column
    assert Column("average", QA, "cem", "Average").key == "average.cem" and TOLERANCE == 0.06
