"""Tables against numpy. They must fail if a mean runs over attempts instead of questions, an average is formed of
fewer columns, differences are not paired, or answers to different questions share a column."""

import json
from statistics import fmean

import numpy as np
import pytest
from evaluation_runs import arm, attempt, scored, write_run

from hiexp.arms import pairs, read_arms, spread_of_means, took
from hiexp.config import ConfigError
from hiexp.evaluation import difference
from hiexp.paper_rows import TABLES, paper_rows
from hiexp.significance import holm, sign_flip_test
from hiexp.table_build import Options, build_table
from hiexp.tables import COMMANDS, main

QA = ("hotpotqa", "2wiki", "musique", "bamboogle")


@pytest.fixture
def run(tmp_path):
    """Search-o1 without and with experience on the four sets of Table 1, and a method that the paper lacks."""
    rng = np.random.default_rng(0)
    arms = [
        arm("Search-o1" + " + HiExp" * hek, name, scored(rng, 30, chance=0.4 + 0.2 * hek), hek, "search_o1")
        for name in QA
        for hek in (False, True)
    ]
    return write_run(tmp_path / "run", *arms, *(arm("Mine", name, scored(rng, 30)) for name in QA))


def built(folder, name="table1", **options):
    return build_table(TABLES[name], read_arms([folder]), Options(**options))


def row(table, label):
    return next(one for one in table.rows if one.label == label)


# ---- what was measured


def test_cells_are_means_over_questions_with_numpy(run, tmp_path):
    rng = np.random.default_rng(5)
    uneven = [
        attempt(place, {"cem": float(score), "f1": 0.5, "em": 0.0}, member)
        for place in range(20)
        for member, score in enumerate(rng.integers(0, 2, 4))
    ]
    folder = write_run(tmp_path / "k", *(arm("Mine", name, uneven, decoding="sampled") for name in QA))
    table = built(folder)
    cell = table.rows[0].cells["hotpotqa.cem"].ours
    values = np.array([a.scores["cem"] for a in uneven]).reshape(20, 4).mean(axis=1)
    assert cell.mean == pytest.approx(100 * values.mean())
    assert cell.low < cell.mean < cell.high
    drawn = np.random.default_rng(1).choice(values, (20_000, 20)).mean(axis=1)
    assert cell.low == pytest.approx(100 * np.percentile(drawn, 2.5), abs=1.5)
    assert cell.high == pytest.approx(100 * np.percentile(drawn, 97.5), abs=1.5)
    assert any("Avg@4" in note for note in table.notes)


def test_an_average_counts_every_benchmark_the_same():
    small, large = [1.0] * 5, [0.0, 1.0] * 500
    found = spread_of_means([small, large], 0)
    assert found.mean == pytest.approx(0.75)
    rng = np.random.default_rng(3)
    means = [(1.0 + rng.choice(large, 1000).mean()) / 2 for _ in range(4000)]
    assert found.low == pytest.approx(np.percentile(means, 2.5), abs=0.004)
    assert found.high == pytest.approx(np.percentile(means, 97.5), abs=0.004)


def test_an_average_needs_all_its_columns(tmp_path):
    rng = np.random.default_rng(0)
    folder = write_run(tmp_path, *(arm("ReSearch", name, scored(rng, 9)) for name in QA[:3]))
    table = built(folder)
    assert table.rows[0].cells["average.cem"].ours is None and table.rows[0].cells["musique.cem"].ours
    assert any("nothing on Bamboogle" in note for note in table.notes)


def test_differences_are_paired_by_question_and_corrected(run):
    table, arms = built(run), {(one.benchmark, one.label): one for one in read_arms([run])}
    [gain] = table.gains
    off, on = arms["hotpotqa", "Search-o1"], arms["hotpotqa", "Search-o1 + HiExp"]
    wanted = difference(off.attempts, on.attempts, "cem")
    found = gain.cells["hotpotqa.cem"]
    assert (found.mean, found.low, found.high) == pytest.approx(
        (100 * wanted.mean, 100 * wanted.low, 100 * wanted.high)
    )
    gains = [b.scores["cem"] - a.scores["cem"] for a, b in zip(off.attempts, on.attempts, strict=True)]
    assert gain.p["hotpotqa.cem"] == pytest.approx(sign_flip_test(gains), abs=1e-12)
    assert list(gain.p_holm.values()) == pytest.approx(holm(list(gain.p.values())))
    average = gain.cells["average.cem"].mean
    assert average == pytest.approx(fmean(gain.cells[f"{name}.cem"].mean for name in QA))


def test_rows_stand_in_the_papers_order_and_missing_ones_are_not_invented(run):
    plain, beside = built(run), built(run, with_paper=True)
    assert [one.label for one in plain.rows] == ["Search-o1", "Search-o1 + HiExp", "Mine"]
    assert plain.rows[-1].section == "Not in the paper" and plain.rows[-1].paper is None
    missing = [one for one in beside.rows if not one.arms]
    assert len(missing) == len(paper_rows("table1")) - 2
    assert all(cell.ours is None for one in missing for cell in one.cells.values())
    cell = row(beside, "Search-o1").cells["2wiki.cem"]
    assert cell.difference == pytest.approx(cell.ours.mean - 51.0)
    assert all(cell.paper is None for one in plain.rows for cell in one.cells.values())


def test_a_flagged_cell_has_a_footnote_and_the_mended_number(run, tmp_path, capsys):
    rng = np.random.default_rng(0)
    write_run(tmp_path / "more", *(arm("ReSearch", name, scored(rng, 30), method="research") for name in QA))
    assert main(["table1", str(run), str(tmp_path / "more"), "--paper", "--out", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    data = json.loads((tmp_path / "out" / "table1.json").read_text())
    research = next(one for one in data["rows"] if one["label"] == "ReSearch" and one["arms"])
    cell = research["cells"]["musique.cem"]
    assert (cell["paper"], cell["paper_printed"], cell["paper_flags"]) == (28.0, 34.1, ["D2"])
    assert cell["difference"] == pytest.approx(cell["ours"]["mean"] - 28.0)
    mark = next(mark for mark, note in data["footnotes"].items() if note.startswith("D2"))
    assert f"34.1 ^{mark} | 28.0 ^{mark}" in text and f"- ^{mark} D2: " in text
    assert (tmp_path / "out" / "table1.md").read_text() == text.removesuffix("\n")


def test_table_4_has_avg_at_k_from_the_data(tmp_path):
    rng = np.random.default_rng(2)
    counts = {"aime24": 32, "aime25": 32, "amc": 32, "math500": 1, "minerva": 1, "olympiadbench": 1}
    arms = [
        arm(
            "Math" + " + HiExp" * hek,
            name,
            scored(rng, 6, ("math",), members=k),
            hek,
            "math",
            "sampled",
            "Qwen2.5-Math-7B",
        )
        for name, k in counts.items()
        for hek in (False, True)
    ]
    greedy = arm("Math", "aime24", scored(rng, 6, ("math",)), method="math", model="Qwen2.5-Math-7B")
    folder = write_run(tmp_path, *arms, greedy)
    table = built(folder, "table4", with_paper=True)
    base = row(table, "Math")
    assert base.paper.label == "Base Model" and base.arms["aime24"].decoding == "sampled"
    assert base.cells["average.math"].ours.mean == pytest.approx(
        fmean(base.cells[f"{n}.math"].ours.mean for n in counts)
    )
    assert sum("Avg@32" in note for note in table.notes) == 3
    only = built(folder, "table4", decoding="greedy")
    assert only.rows[0].arms["aime24"].decoding == "greedy" and only.rows[0].cells["average.math"].ours is None


def test_table_2_has_both_means_and_says_what_the_paper_leaves_open(tmp_path):
    rng = np.random.default_rng(2)
    sets = ("hotpotqa", "2wiki", "musique", "bamboogle", "frames", "morehopqa")
    folder = write_run(tmp_path, *(arm("GRPO + E2", name, scored(rng, 12)) for name in sets))
    table = built(folder, "table2", with_paper=True)
    cells = row(table, "GRPO + E2").cells
    three = fmean(cells[f"{name}.cem"].ours.mean for name in sets[3:] if f"{name}.cem" in cells)
    assert cells["out_of_domain_3.cem"].ours.mean == pytest.approx(three)
    assert cells["out_of_domain_2.cem"].ours.mean == pytest.approx(
        fmean(cells[f"{name}.cem"].ours.mean for name in sets[4:])
    )
    assert cells["out_of_domain_2.cem"].paper.value == cells["out_of_domain_3.cem"].paper.value == 33.6
    assert [flag.id for flag in cells["out_of_domain_3.cem"].paper.flags] == ["D16"]


def test_table_6_gain_and_table_3_verdicts(tmp_path):
    rng = np.random.default_rng(2)
    rows = (("Teacher", "agent"), ("GRPO + HiExp", "agent"))
    folder = write_run(
        tmp_path / "6",
        *(
            arm(label, n, scored(rng, 15), hek=True, method=f"m{i}")
            for i, (label, _) in enumerate(rows)
            for n in QA[:3]
        ),
    )
    table = built(folder, "table6", with_paper=True)
    [gain] = table.gains
    assert gain.row.startswith("GRPO + HiExp") and gain.over.startswith("Teacher")
    attempts = scored(rng, 10, ("f1", "lasj"))
    attempts[3].scores.pop("lasj")
    folder = write_run(tmp_path / "3", *(arm("ReSearch", n, attempts) for n in ("bamboogle", "frames", "morehopqa")))
    table = built(folder, "table3")
    values = [a.scores["lasj"] for a in attempts if "lasj" in a.scores]
    assert table.rows[0].cells["frames.lasj"].ours.mean == pytest.approx(100 * np.mean(values))
    assert any("1 attempts have no verdict" in note for note in table.notes)


def test_another_cover_em_is_still_compared_with_the_papers(tmp_path):
    rng = np.random.default_rng(0)
    folder = write_run(tmp_path, *(arm("IRCoT", n, scored(rng, 9, ("em", "f1", "cem", "cem_tokens"))) for n in QA))
    cells = row(built(folder, with_paper=True, cem="cem_tokens"), "IRCoT").cells
    assert cells["hotpotqa.cem_tokens"].paper.value == 47.3 and cells["average.cem_tokens"].paper.value == 32.2


def test_what_it_took_stands_beside_the_scores(run):
    one = read_arms([run])[0]
    found = took(one)
    assert found["tokens"] == pytest.approx(np.mean([a.tokens for a in one.attempts]))
    assert found["cost"] is None and found["seconds"] is None and found["questions"] == 30


def test_pairs_are_found_across_runs_by_label(tmp_path):
    rng = np.random.default_rng(0)
    write_run(tmp_path / "a", arm("R", "musique", scored(rng, 5)))
    write_run(tmp_path / "b", arm("R + HiExp", "musique", scored(rng, 5), hek=True))
    write_run(tmp_path / "c", arm("S", "musique", scored(rng, 5), hek=True))
    assert [(off.label, on.label) for off, on in pairs(read_arms([tmp_path]))] == [("R", "R + HiExp")]


# ---- broken input


def test_the_same_arm_twice_must_have_equal_settings(tmp_path, capsys):
    rng = np.random.default_rng(0)
    attempts = scored(rng, 5)
    write_run(tmp_path / "a", arm("ReSearch", "musique", attempts))
    write_run(tmp_path / "b", arm("ReSearch", "musique", attempts, top_k=3))
    with pytest.raises(ConfigError, match=r"same row, but differ: top_k: 5 versus 3"):
        read_arms([tmp_path])
    assert main(["table1", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and "top_k" in error
    write_run(tmp_path / "b", arm("ReSearch", "musique", scored(rng, 6)))
    with pytest.raises(ConfigError, match="questions: other ids"):
        read_arms([tmp_path])
    write_run(tmp_path / "b", arm("ReSearch", "musique", attempts))
    with pytest.warns(UserWarning, match="repeats"):
        assert len(read_arms([tmp_path])) == 1
    assert len(read_arms([tmp_path], keep_all=True)) == 2


def test_other_questions_do_not_share_a_column(tmp_path):
    rng = np.random.default_rng(0)
    write_run(tmp_path / "a", arm("ReSearch", "musique", scored(rng, 5)))
    write_run(tmp_path / "b", arm("R1-Searcher", "musique", scored(rng, 5, answers=("Rome",))))
    with pytest.raises(ConfigError, match=r"musique: rows are of different questions.*--mixed"):
        built(tmp_path)
    table = built(tmp_path, mixed=True)
    assert any(note.startswith("Not comparable. musique") for note in table.notes)


def test_experience_on_and_off_with_other_questions_have_no_difference(tmp_path):
    rng = np.random.default_rng(0)
    write_run(
        tmp_path,
        arm("ReSearch", "musique", scored(rng, 5)),
        arm("ReSearch + HiExp", "musique", scored(rng, 5, prefix="x"), hek=True),
    )
    [gain] = built(tmp_path, mixed=True).gains
    assert not gain.cells and "MuSiQue" in gain.note


def test_settings_that_differ_are_noted(tmp_path):
    rng = np.random.default_rng(0)
    attempts = scored(rng, 5)
    write_run(
        tmp_path, arm("ReSearch", "musique", attempts), arm("IRCoT", "musique", attempts, method="ircot", corpus="x")
    )
    assert any("corpus differs" in note and "IRCoT" in note for note in built(tmp_path).notes)


def test_two_methods_of_one_label_are_refused(tmp_path):
    rng = np.random.default_rng(0)
    write_run(tmp_path, arm("X", "musique", scored(rng, 5)), arm("X", "musique", scored(rng, 5), method="ircot"))
    with pytest.raises(ConfigError, match="labels of their own"):
        built(tmp_path)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "evaluation.json").unlink(), "holds no evaluation.json"),
        (lambda folder: (folder / "evaluation.json").write_text("{"), "no result of an evaluation"),
        (lambda folder: (folder / "evaluation.json").write_text('{"arms": {}}'), "names no arm"),
        (
            lambda folder: (folder / "evaluation.json").write_text('{"arms": {"hek_off_greedy": {}}}'),
            "older evaluate.py",
        ),
        (lambda folder: next(folder.glob("samples_*")).unlink(), "is not there"),
        (lambda folder: next(folder.glob("samples_*")).write_text(""), "is empty"),
        (lambda folder: next(folder.glob("samples_*")).write_text("{}\n"), "no attempt of an evaluation"),
        (lambda folder: _repeat_line(next(folder.glob("samples_*"))), "twice"),
        (lambda folder: _drop_line(next(folder.glob("samples_*"))), "not as many attempts at each question"),
    ],
)
def test_a_damaged_run_is_told_in_one_line(tmp_path, capsys, spoil, message):
    folder = write_run(tmp_path / "r", arm("ReSearch", "musique", scored(np.random.default_rng(0), 4, members=2)))
    spoil(folder)
    assert main(["table1", str(folder), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def _repeat_line(path):
    path.write_text(path.read_text() + path.read_text().splitlines()[0] + "\n")


def _drop_line(path):
    path.write_text("\n".join(path.read_text().splitlines()[1:]) + "\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["table7"], "table1, table2"),
        (["table1"], "required: RUN"),
        (["table1", "nowhere"], "no such folder"),
        (["table1", "x", "--decoding", "beam"], "invalid choice"),
        (["table1", "x", "--cem", "em"], "invalid choice"),
        (["table1", "x", "--bogus"], "unrecognized arguments"),
        (["table1", "x", "--seed", "-1"], "must not be negative"),
    ],
)
def test_mistakes_on_the_command_line(arguments, message, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_table_of_other_benchmarks_says_what_there_is(run, capsys):
    assert main(["table4", str(run)]) == 2
    assert "the runs have 2wiki, bamboogle, hotpotqa, musique" in capsys.readouterr().err
    assert set(COMMANDS) == {*TABLES, "table9", "figure3", "figure4", "cost", "page"}
