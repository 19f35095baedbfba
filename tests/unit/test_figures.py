"""Figures, the case study and the cost table against numpy and scipy. They must fail if a band is no t-interval, the
artefact of groups without a signal is not told, hops and facts are mixed up, or a case hides the opposite ones."""

import json
from pathlib import Path

import numpy as np
import pytest
from evaluation_runs import TRACE, arm, attempt, write_run
from scipy import stats

from hiexp.arms import read_arms
from hiexp.case_study import choose_pair, count_kinds, experience_in, trace
from hiexp.config import ConfigError
from hiexp.costs import BUILD, EVALUATE, TRAIN, TRAIN_HIEXP, Stage, overhead, read_stages
from hiexp.data import Sample
from hiexp.figures import band_over_runs, bucket, hop_shares, read_runs, series, stability
from hiexp.paper_rows import paper
from hiexp.records import Call
from hiexp.tables import main


def training_run(folder, seed, hek="", steps=60, size=8, shift=0.0):
    """metrics.jsonl whose advantages are those of real groups, and config.yaml."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    lines = []
    for step in range(steps):
        rewards = (rng.random((6, size)) < 0.3 + 0.4 * step / steps).astype(float)
        spread = rewards.std(axis=1, ddof=1, keepdims=True)
        advantages = np.divide(rewards - rewards.mean(axis=1, keepdims=True), spread, where=spread > 0, out=rewards * 0)
        line = {
            "step": step, "reward/mean": float(rewards.mean() + shift), "advantage/var": float(advantages.var()),
            "group/zero_std_frac": float((spread == 0).mean()), "optim/grad_norm": float(rng.random() + shift),
            "time/rollout": 2.0 + shift, "time/update": 1.0, "time/rollout_cpu": 1.0, "time/update_cpu": 0.5,
            "rollout/tokens": 100.0, "rollout/trained_tokens": 640.0,
        }  # fmt: skip
        lines.append(line | ({"dev/em": float(rng.random())} if step % 10 == 9 else {}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = f"seed: {seed}\nhek: {{path: '{hek}'}}\nrollout: {{group_size: {size}}}\ntrain: {{prompts_per_step: 6}}\n"
    (folder / "config.yaml").write_text(text)
    return str(folder)


@pytest.fixture
def arms(tmp_path):
    without = [training_run(tmp_path / f"grpo{seed}", seed) for seed in (0, 1, 2)]
    hiexp = [training_run(tmp_path / f"hiexp{seed}", seed, "hek", shift=0.1) for seed in (2, 0, 1)]
    return without, hiexp


# ---- figure 3


def test_a_band_is_the_t_interval_over_seeds(arms):
    runs = read_runs(arms[0])
    band = band_over_runs([series(run, "optim/grad_norm") for run in runs])
    values = np.array([[line["optim/grad_norm"] for line in run.metrics] for run in runs])
    low, high = stats.t.interval(0.95, 2, values.mean(axis=0), values.std(axis=0, ddof=1) / np.sqrt(3))
    np.testing.assert_allclose(band.y, values.mean(axis=0))
    np.testing.assert_allclose(band.low, low, rtol=2e-4, atol=2e-4)
    np.testing.assert_allclose(band.high, high, rtol=2e-4, atol=2e-4)


def test_the_variance_of_advantages_is_told_to_be_an_artefact(arms):
    result, panels = stability({"GRPO": read_runs(arms[0]), "GRPO + HiExp": read_runs(arms[1])})
    measured = panels["Variance of group advantages"]
    np.testing.assert_allclose(measured["GRPO"].y, measured["GRPO (expected)"].y, atol=1e-6)
    assert any("(G - 1) / G" in note for note in result.notes)
    [gap] = [note for note in result.notes if note.startswith("Largest distance")]
    assert float(gap.split("is ")[-1].split(": ")[-1].split()[0]) < 1e-6 or "e-" in gap


def test_a_variance_that_is_no_artefact_leaves_the_line(tmp_path, arms):
    path = tmp_path / "grpo0" / "metrics.jsonl"
    lines = [json.loads(line) | {"advantage/var": 0.5} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result, _ = stability({"a": read_runs(arms[0]), "b": read_runs(arms[1])})
    [gap] = [note for note in result.notes if note.startswith("Largest distance")]
    assert float(gap.split(": ")[1].split()[0]) > 0.1


def test_rolling_variance_and_pairs_by_seed(arms):
    first, second = read_runs(arms[0]), read_runs(arms[1])
    assert [run.seed for run in second] == [0, 1, 2], "runs are sorted, whatever the order on the command line"
    norms = [line["optim/grad_norm"] for line in first[0].metrics]
    rolled = series(first[0], "rolling_var")
    assert list(rolled) == list(range(49, 60)) and rolled[59] == pytest.approx(np.var(norms[-50:]))
    result, _ = stability({"a": first, "b": second})
    pair = result.data["paired"]["grad_norm_mean"]
    assert pair["difference"] == pytest.approx(0.1) and pair["pairs"] == 3, "a shift of 0.1 at equal seeds"


def test_runs_of_other_seeds_and_lengths_are_not_paired(tmp_path, arms):
    short = [training_run(tmp_path / "short", 7, "hek", steps=30)]
    result, panels = stability({"a": read_runs(arms[0]), "b": read_runs(short)})
    assert result.data["paired"] == {} and any("nothing is paired" in note for note in result.notes)
    assert any("different length" in note for note in result.notes)
    assert len(panels["Mean reward of the rollouts"]["b"].x) == 30
    assert panels["Mean reward of the rollouts"]["b"].low == [None] * 30, "one run has no interval"


def test_figure3_writes_its_files(arms, tmp_path, capsys):
    command = ["figure3", "--without", *arms[0], "--with", *arms[1], "--paper", "--out", str(tmp_path / "out")]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "At equal mean reward" in text and "prints no numbers" in text
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".json", ".md", ".tex", ".svg", ".png"}
    data = json.loads((tmp_path / "out" / "figure3.json").read_text())
    assert len(data["curves"]["Validation reward"]["GRPO"]["x"]) == 6


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["figure3", "--without", "a"], "--with"),
        (["figure3", "--without", "nowhere", "--with", "nowhere"], "no folder of a training run"),
        (["figure4", "hotpotqa"], "BENCHMARK=FILE"),
        (["figure4", "nothing=x.json"], "benchmark"),
        (["cost", "nowhere"], "no such folder"),
        (["table9", "nowhere"], "no such folder"),
    ],
)
def test_mistakes_are_told_in_one_line(command, message, capsys):
    assert main(command) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_seed_comes_once_in_an_arm(arms, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match="have seed 0"):
        read_runs([arms[0][0], arms[1][1]])
    with pytest.raises(ConfigError, match="no step"):
        read_runs([str(tmp_path / "empty")])


# ---- figure 4


def test_hops_are_counted_by_both_definitions():
    samples = [
        Sample(str(i), "q", ("a",), hops=h, facts=f) for i, (h, f) in enumerate([(2, 3), (3, 3), (4, 0), (9, 2)])
    ]
    result, panels = hop_shares({"musique": samples}, with_paper=True)
    assert panels["by the data set's hop label"]["MuSiQue"] == {
        "<=2": 25.0, "3": 25.0, "4": 25.0, ">=5": 25.0, "not stated": 0.0
    }  # fmt: skip
    assert panels["by the number of supporting facts"]["MuSiQue"]["not stated"] == 25.0
    row = next(one for one in result.data["paper"] if one["bucket"] == "3")
    assert (row["paper"], row["hops"], row["facts"], row["fits"]) == ("35.0", "25.0", "66.7", "neither")
    assert any("D12" in note and "2 to 4 hops" in note for note in result.notes)
    assert [bucket(n) for n in (0, 1, 2, 3, 4, 5, 12)] == ["not stated", "<=2", "<=2", "3", "4", ">=5", ">=5"]


def test_the_papers_shares_add_up():
    for name, one in paper()["figure4"]["datasets"].items():
        assert sum(share["share"] for share in one["shares"]) == pytest.approx(100, abs=0.11), name


def test_frames_in_the_figure_is_counted_in_articles(tmp_path, capsys):
    from test_paper_rows import SHARED

    file = SHARED.parent / "data" / "qa" / "frames.jsonl"
    if not file.exists():
        pytest.skip("the questions are not here")
    assert main(["figure4", f"frames={file}", "--paper", "--out", str(tmp_path)]) == 0
    data = json.loads((tmp_path / "figure4.json").read_text())
    links = np.array([json.loads(line)["n_links"] for line in file.read_text().splitlines()])
    counts = {"<=2": (links <= 2).sum(), "3": (links == 3).sum(), "4": (links == 4).sum(), ">=5": (links >= 5).sum()}
    assert data["counts"]["facts"]["frames"] == counts
    assert [round(100 * n / 824, 1) for n in counts.values()] == [37.6, 35.0, 16.3, 11.2]
    capsys.readouterr()


# ---- table 9


def study_run(tmp_path):
    """Questions 0 and 1 helped, 2 hurt, 3 right both times, 4 wrong both times; 1 is the one with both levels."""
    verdicts = {0: (0, 1), 1: (0, 1), 2: (1, 0), 3: (1, 1), 4: (0, 0)}
    plain = (TRACE[0], TRACE[2], ("document", "D" * 3000), TRACE[5])
    off = [attempt(i, {"cem": float(a)}, prediction="Rome", calls=(Call(plain),)) for i, (a, _) in verdicts.items()]
    on = [attempt(i, {"cem": float(b)}, calls=(Call(TRACE if i == 1 else plain),)) for i, (_, b) in verdicts.items()]
    return write_run(tmp_path / "r", arm("R", "frames", off), arm("R + HiExp", "frames", on, hek=True))


def test_a_case_is_shown_with_the_number_of_opposite_ones(tmp_path, capsys):
    folder = study_run(tmp_path)
    assert main(["table9", str(folder), "--out", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    assert "helped) | 2 | 40.0%" in text and "hurt) | 1 | 20.0%" in text
    assert "Question q1" in text and "strategy (E2 or E3), in the prompt | - E2: plan first" in text
    assert "case (E1), after search 1 | - E1: check the year" in text
    assert "'rome' does not cover" in text and "letters cut" in text
    data = json.loads((tmp_path / "out" / "table9.json").read_text())
    assert data["counts"] == {"helped": 2, "hurt": 1, "both_right": 1, "both_wrong": 1}
    assert main(["table9", str(folder), "--kind", "hurt", "--out", str(tmp_path / "out")]) == 0
    assert "Question q2" in capsys.readouterr().out
    assert main(["table9", str(folder), "--question", "q9"]) == 2
    assert "not among the 5 questions" in capsys.readouterr().err
    assert main(["table9", str(folder), "--metric", "em"]) == 2
    assert "no score em" in capsys.readouterr().err


def test_a_case_needs_one_pair_of_arms(tmp_path):
    write_run(tmp_path / "a", arm("R", "frames", [attempt(0, {"cem": 1.0})]))
    with pytest.raises(ConfigError, match="no arm was run with and without"):
        choose_pair(read_arms([tmp_path]))
    kinds = ((name, hek) for name in ("frames", "musique") for hek in (False, True))
    write_run(tmp_path / "a", *(arm("R" + " + HiExp" * h, n, [attempt(0, {"cem": 1.0})], h) for n, h in kinds))
    arms = read_arms([tmp_path])
    with pytest.raises(ConfigError, match="several arms"):
        choose_pair(arms)
    assert choose_pair(arms, "MuSiQue")[0].benchmark == "musique"
    off, on = choose_pair(arms, "frames")
    assert count_kinds(off.attempts, on.attempts, "cem")["both_right"] == ["q0"]


def test_where_experience_was_shown():
    calls = (
        Call((("experience", "plan"), ("policy", "x")), "thought"),
        Call((("document", "d"), ("notice", "-"), ("document", "another"), ("experience", "case"))),
    )
    found = experience_in(attempt(0, {}, calls=calls))
    assert [(one.level[:4], one.place, one.text) for one in found] == [
        ("stra", "request 1", "plan"),
        ("case", "request 2, after search 1", "case"),
    ]
    assert trace(attempt(0, {}, calls=()), 10) == [("notice", "the trace was not kept")]
    fenced = attempt(0, {}, calls=(Call((("policy", "````\n# not a heading"),)),))
    assert trace(fenced, 5) == [("policy", "````\n# not a heading")]


# ---- cost


def test_cost_of_every_stage(arms, tmp_path, capsys):
    build = tmp_path / "hek"
    (build / "kept").mkdir(parents=True)
    (build / "summary.json").write_text(
        json.dumps({"pairs": 3, "time/rollout": 20.0, "time/build": 34.0, "time/build_cpu": 5})
    )
    replies = [{"prompt_tokens": 100, "reply_tokens": 7}, {"prompt_tokens": 50, "reply_tokens": 3}]
    (build / "kept" / "replies.jsonl").write_text("".join(json.dumps(one) + "\n" for one in replies))
    [lessons] = read_stages(build)
    assert (lessons.kind, lessons.wall, lessons.tokens, lessons.written, lessons.calls) == (BUILD, 34.0, 160, 10, 2)
    [plain], [hiexp] = read_stages(Path(arms[0][0])), read_stages(Path(arms[1][0]))
    assert (plain.kind, hiexp.kind) == (TRAIN, TRAIN_HIEXP)
    assert plain.wall == pytest.approx(180) and plain.cpu == pytest.approx(90)
    assert plain.tokens == pytest.approx(60 * 48 * 100) and plain.calls == 60 * 48
    above = overhead([lessons, plain, hiexp])
    assert above["building, of one training run"] == pytest.approx(100 * 34 / 186)
    assert above["a trajectory of training with experience, against without"] == pytest.approx(100 * (186 / 180 - 1))
    folder = write_run(tmp_path / "ev", arm("R", "frames", [attempt(0, {"cem": 1.0}, cost=0.25, seconds=3.0)]))
    [evaluation] = read_stages(folder)
    assert evaluation == Stage(EVALUATE, "R, frames, greedy", str(folder), 3.0, None, 860.0, 60.0, 1.0, 0.25)
    command = [
        "cost",
        str(build),
        arms[0][0],
        arms[1][0],
        str(folder),
        "--devices",
        "8",
        "--paper",
        "--out",
        str(tmp_path),
    ]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "below 6%" in text and "D9" in text and "18.3%" in text
    (tmp_path / "other").mkdir()
    with pytest.raises(ConfigError, match="no finished run"):
        read_stages(tmp_path / "other")
