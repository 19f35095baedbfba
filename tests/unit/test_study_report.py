"""The report on results that were made up: every claim has a row, nothing unfinished is shown, no number is lost."""

import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from hiexp.experience import LEVELS
from hiexp.study_arms import ARMS, TUNED
from hiexp.study_figure import curve, figure
from hiexp.study_plan import SizeConfig, StudyConfig, plan
from hiexp.study_report import write_study
from hiexp.study_stats import BY_SPLIT, CLAIMS, OURS
from hiexp.tracking import write_json

SPLITS = {"in_domain": 4, "paraphrase": 2, "held_out": 2, "second_world": 3}
SIZE = SizeConfig(seeds=3, warm_starts=2)


def metrics(rng, steps=12):
    for step in range(steps):
        line = {"step": step, "reward/mean": 0.3 + 0.02 * step + 0.01 * rng.random(), "optim/grad_norm": rng.random()}
        line |= {"reward/within_group_var": 0.1 * rng.random(), "advantage/var": rng.random(), "loss/entropy": 0.1}
        yield line | ({"dev/em": 0.4} if step % 4 == 3 else {})


def write_job(out, job, rng):
    folder = out / job.name
    folder.mkdir(parents=True)
    write_json(folder / "done.json", {"told": job.told, "cpu_seconds": 10.0, "score": float(rng.random())})
    if job.kind in ("build", "measure"):
        (folder / "run" / "hek").mkdir(parents=True)
        for level in LEVELS:
            entry = {"description": "label , founder", "qa_groups": [["label_founder-train-1", "x"]]}
            (folder / "run" / "hek" / f"level{level}.jsonl").write_text(json.dumps(entry) + "\n" if level < 3 else "")
    if job.kind != "arm":
        return
    arm = job.told["arm"]
    with (folder / "results.jsonl").open("w") as file:
        for hek in ARMS[arm].tests:
            for split, count in SPLITS.items():
                scores = {f"family{i % 2}-test-{i}": float(rng.random()) for i in range(count)}
                key = {"arm": arm, "warm": job.told["warm"], "seed": job.told["seed"], "split": split, "hek": hek}
                for how in ("greedy", "sampled"):
                    line = key | {"decoding": how, "em": 0.0, "shown": 0.3, "scores": scores}
                    file.write(json.dumps(line) + "\n")
    if ARMS[arm].steps:
        (folder / "run").mkdir()
        lines = "".join(json.dumps(line) + "\n" for line in metrics(rng))
        (folder / "run" / "metrics.jsonl").write_text(lines)


@pytest.fixture
def study(tmp_path):
    cfg, rng = StudyConfig(str(tmp_path), set="full", size=SIZE), np.random.default_rng(0)
    jobs = plan(cfg)
    for job in jobs:
        write_job(tmp_path, job, rng)
    return tmp_path, cfg, jobs


def test_the_report_has_every_claim_arm_and_verdict(study):
    out, cfg, jobs = study
    summary = write_study(out, cfg, {job.name for job in jobs})
    page = (out / "report.html").read_text()
    for claim in (*CLAIMS, *OURS):
        assert f"({claim.number})" in page
        rows = summary["claims"][claim.number]["sampled"]
        assert len(rows) == len(claim.rows) + len(claim.controls)
        assert all(row["pairs"] == 6 for row in rows)
        assert all(row["verdict"] for row in rows[: len(claim.rows)])
    for name, arm in ARMS.items():
        assert {f"{name} / {hek}" for hek in arm.tests} <= summary["arms"].keys()
    assert summary["stability"]["e2_e1 - grpo"]["panel"]["grad_norm_mean"]["pairs"] == 6
    numbers = {"i", "ii", "iii", "iv", "dose", "lesson", "better"}
    assert json.loads((out / "summary.json").read_text())["claims"].keys() == numbers
    text = re.sub(r"<svg.*?</svg>", "", page, flags=re.DOTALL)
    assert text.count("<table>") == text.count("</table>") > 8
    assert "nan" not in text


def test_results_are_one_line_per_arm_cell_split_store_and_decoding(study):
    out, cfg, jobs = study
    write_study(out, cfg, {job.name for job in jobs})
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    keys = [(x["arm"], x["warm"], x["seed"], x["split"], x["hek"], x["decoding"]) for x in lines]
    assert len(set(keys)) == len(keys)
    sides = sum(len(arm.tests) for arm in ARMS.values())
    assert len(keys) == sides * 6 * len(SPLITS) * 2
    assert all(x["scores"] for x in lines)


def test_only_what_has_finished_is_counted(study):
    out, cfg, jobs = study
    finished = {job.name for job in jobs if job.name != "w0s0/e2_e1"}
    summary = write_study(out, cfg, finished)
    by_says = {row["says"]: row for row in summary["claims"]["i"]["sampled"]}
    assert by_says["E2+E1 > GRPO"]["pairs"] == 5
    assert by_says["E3 > GRPO"]["pairs"] == 6
    assert '"e2_e1"' not in "".join(
        line for line in (out / "results.jsonl").read_text().splitlines() if '"warm": 0, "seed": 0' in line
    )


def test_tuning_shows_each_point_and_the_choice(study):
    out, cfg, jobs = study
    tuning = write_study(out, cfg, {job.name for job in jobs})["tuning"]
    assert tuning.keys() == set(TUNED)
    for found in tuning.values():
        assert len(found["points"]) == 4
        best = max(found["points"], key=lambda point: np.mean(point["em"]))
        assert found["chosen"] == {"lr": best["lr"], "clip": best["clip"]}
    some = {job.name for job in jobs if job.name != "tune/w0/grpo/1"}
    assert "grpo" not in write_study(out, cfg, some)["tuning"], "no choice before every point has finished"


def test_claims_are_a_table_of_markdown_too(study):
    out, cfg, jobs = study
    summary = write_study(out, cfg, {job.name for job in jobs})
    rows = [line for line in (out / "claims.md").read_text().splitlines() if line.startswith("| ")]
    wanted = sum(len(claim.rows) + len(claim.controls) + 1 for claim in (*CLAIMS, *OURS))
    split = len(BY_SPLIT) + 1
    assert [row.count("|") for row in rows[:wanted] + rows[-split:]] == [9] * wanted + [6] * split
    stable, panel = rows[wanted:-split], summary["stability"]["e2_e1 - grpo"]["panel"]["grad_norm_var"]
    assert {row.count("|") for row in stable} == {8}
    assert f"| {panel['difference']:+.3g} |" in next(row for row in stable if "grad_norm_var" in row)
    gap = next(row for row in summary["by_split"] if row["split"] == "held_out")
    assert f"{100 * gap['difference']:+.1f} [" in next(row for row in rows[-split:] if gap["says"] in row)
    first = summary["claims"]["i"]["sampled"][0]
    assert f"{100 * first['difference']:+.1f} [{100 * first['low']:.3g}, {100 * first['high']:.3g}]" in rows[1]


def test_what_has_not_finished_is_named(study):
    out, cfg, jobs = study
    some = {job.name for job in jobs if not job.name.endswith(("/rft_same", "/gspo_half"))}
    claims = write_study(out, cfg, some)["claims"]
    better = next(claim for claim in OURS if claim.number == "better")
    whole = [row[0] for row in (*better.rows, *better.controls) if "rft_same" not in (row[1][0], row[2][0])]
    assert len(whole) > 3 and [row["says"] for row in claims["better"]["greedy"]] == whole
    assert claims["better"]["lacking"] == "Not finished, and so not here: rft_same."
    assert claims["dose"]["lacking"].endswith("gspo_half.") and not claims["lesson"]["lacking"]
    for file in ("claims.md", "report.html"):
        assert "not here: rft_same." in (out / file).read_text()
    core = {job.name for job in jobs if job.kind != "arm" or ARMS[job.told["arm"]].set == "core"}
    claims = write_study(out, cfg, core)["claims"]
    assert "better" not in claims and "half_e2" in claims["dose"]["lacking"]
    assert all(not claims[number]["lacking"] for number in ("i", "ii", "iii", "iv"))


def test_one_point_of_the_grid_is_no_choice(tmp_path):
    cfg = StudyConfig(str(tmp_path), size=replace(SIZE, lrs=(3e-4,), clips=("own",)))
    write_study(tmp_path, cfg, set())
    assert "nothing was chosen" in (tmp_path / "report.html").read_text()


def test_a_report_of_some_worlds_has_their_cells_alone(study):
    out, cfg, _ = study
    some, rng = replace(cfg, worlds=(7,)), np.random.default_rng(1)
    for job in plan(some):
        if not (out / job.name).exists():
            write_job(out, job, rng)
    summary = write_study(out, some, {job.name for job in plan(some)})
    assert {json.loads(line)["seed"] for line in (out / "results.jsonl").read_text().splitlines()} == {7}
    assert all(row["pairs"] == 2 for row in summary["claims"]["better"]["sampled"])
    assert summary["stability"]["e2_e1 - grpo"]["panel"]["grad_norm_mean"]["pairs"] == 2
    assert "1 worlds x 2 warm starts" in (out / "report.html").read_text()


def test_lessons_are_counted_by_who_wrote_them(study):
    out, cfg, jobs = study
    lessons = write_study(out, cfg, {job.name for job in jobs if job.name != "w0s0/teacher"})["lessons"]
    one = {f"level {n}": (1.0, 1.0, 1.0) for n in (1, 2)}
    assert lessons == dict.fromkeys(("self", "teacher", "measured", "coarse"), one)


def test_costs_are_summed(study):
    out, cfg, jobs = study
    cost = write_study(out, cfg, {job.name for job in jobs})["cost"]
    assert cost["all"] == {"jobs": len(jobs), "sum": 10.0 * len(jobs)}
    assert cost["shuffled"]["jobs"] == cost["made/shuffled"]["jobs"] == 6, "the arm and its store"
    assert cost["grpo"] == {"jobs": 6, "mean": 10.0, "sum": 60.0}


def test_an_empty_study_has_a_page_too(tmp_path):
    cfg = StudyConfig(str(tmp_path), size=SIZE)
    write_study(tmp_path, cfg, set())
    assert "Nothing of this has finished yet" in (tmp_path / "report.html").read_text()


def test_curves_are_means_with_t_intervals():
    runs = [[{"step": i, "dev/em": float(10 * r + i) if i % 2 else None} for i in range(6)] for r in range(3)]
    points = curve(runs, "dev/em")
    assert [point[0] for point in points] == [1, 3, 5]
    values = np.array([1.0, 11.0, 21.0])
    assert points[0][1] == pytest.approx(values.mean())
    assert points[0][2:] == pytest.approx(stats.t.interval(0.95, 2, values.mean(), stats.sem(values)), rel=1e-3)
    assert curve([], "dev/em") == []


def test_rolling_variance_and_smoothing_in_curves():
    rng = np.random.default_rng(0)
    norms = rng.random(12).tolist()
    run = [{"step": i, "optim/grad_norm": norm, "reward/mean": norm} for i, norm in enumerate(norms)]
    rolled = curve([run], "rolling")
    assert [point[0] for point in rolled] == [7, 8, 9, 10, 11]
    assert rolled[-1][1] == pytest.approx(np.var(norms[4:]))
    assert curve([run], "reward/mean")[-1][1] == pytest.approx(np.mean(norms[-3:]))


def test_the_figure_is_xml_with_a_band_and_a_line_for_each_arm():
    rng = np.random.default_rng(0)
    runs = {"grpo": [list(metrics(rng)) for _ in range(3)], "e2_e1": [list(metrics(rng)) for _ in range(3)], "half": []}
    root = ElementTree.fromstring(figure(runs))
    paths = [node for node in root.iter() if node.tag.endswith("path")]
    assert sum("fill-opacity" in node.attrib for node in paths) == 2 * 6
    assert "half" not in figure(runs)
    assert figure({}) == ""
