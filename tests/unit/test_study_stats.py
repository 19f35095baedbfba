"""Statistics of the study against numpy and scipy, on results that were made up."""

import json
import math

import numpy as np
import pytest
from scipy import stats

from hiexp.paired import paired
from hiexp.study_stats import (
    CLAIMS,
    Claim,
    Results,
    claim_rows,
    compare,
    mean_over,
    read_results,
    stability_rows,
    stability_verdict,
    verdict,
)

FAMILIES = ("a", "b", "c")
CELLS = [(w, s) for w in range(2) for s in range(5)]


def lines(arm, hek, cell, rng, lift=0.0):
    for split, count in (("in_domain", 6), ("paraphrase", 3), ("held_out", 4), ("second_world", 5)):
        names = ("d",) if split == "held_out" else FAMILIES
        scores = {
            f"{f}-test-{split}{i}": float(np.clip(rng.random() + lift, 0, 1)) for f in names for i in range(count)
        }
        for decoding in ("sampled", "greedy"):
            yield {
                "arm": arm, "warm": cell[0], "seed": cell[1], "split": split, "hek": hek, "decoding": decoding,
                "em": float(np.mean(list(scores.values()))), "shown": 0.5, "scores": scores,
            }  # fmt: skip


@pytest.fixture
def made():
    rng, results = np.random.default_rng(0), Results()
    for arm, hek, lift, cells in (
        ("grpo", "off", 0.0, CELLS),
        ("e2_e1", "on", 0.15, CELLS[:-1]),
        ("e2_e1", "off", -0.3, CELLS),
        ("e2", "on", 0.1, CELLS),
        ("by_teacher", "on", 0.15, CELLS),
    ):
        for cell in cells:
            for line in lines(arm, hek, cell, rng, lift):
                results.add(line)
    return results


def macro(results, side, cell):
    scores = results.scores[(*side, "sampled")][cell]
    by_family = {}
    for split in ("in_domain", "paraphrase", "held_out"):
        for name, em in scores[split].items():
            by_family.setdefault(name.split("-")[0], []).append(em)
    return np.mean([np.mean(values) for values in by_family.values()])


def test_macro_counts_every_family_once_and_never_the_second_world(made):
    assert made.value(("grpo", "off"), (0, 0)) == pytest.approx(macro(made, ("grpo", "off"), (0, 0)))
    plain = np.mean([em for part in made.scores["grpo", "off", "sampled"][0, 0].values() for em in part.values()])
    assert made.value(("grpo", "off"), (0, 0)) != pytest.approx(plain)
    second = made.value(("grpo", "off"), (0, 0), "second_world")
    assert second == pytest.approx(np.mean(list(made.scores["grpo", "off", "sampled"][0, 0]["second_world"].values())))
    assert made.value(("e2_e1", "on"), CELLS[-1]) is None


def test_a_difference_is_paired_over_the_cells_that_both_have(made):
    row = compare(made, "x", ("e2_e1", "on"), ("grpo", "off"))
    cells = CELLS[:-1]
    gains = np.array([macro(made, ("e2_e1", "on"), c) - macro(made, ("grpo", "off"), c) for c in cells])
    assert row.found.pairs == 9
    assert row.found.difference == pytest.approx(gains.mean())
    low, high = stats.t.interval(0.95, 8, gains.mean(), stats.sem(gains))
    assert (row.found.low, row.found.high) == pytest.approx((low, high), rel=1e-3)
    assert row.found.sign_p == pytest.approx(stats.binomtest(int((gains > 0).sum()), 9).pvalue)
    for start in (0, 1):
        assert row.per_warm_start[start] == pytest.approx(gains[[w == start for w, _ in cells]].mean())
    assert compare(made, "x", ("e3", "on"), ("grpo", "off")) is None


def test_mean_over_is_a_t_interval():
    values = [0.2, 0.5, 0.4, 0.7]
    mean, low, high = mean_over(values)
    expected = stats.t.interval(0.95, 3, np.mean(values), stats.sem(values))
    assert (mean, low, high) == pytest.approx((np.mean(values), *expected), rel=1e-3)
    assert math.isnan(mean_over([0.5])[1])


@pytest.mark.parametrize(
    ("gains", "margin", "word"),
    [
        ([0.1, 0.12, 0.11], 0.0, "as in the paper"),
        ([-0.1, -0.12, -0.11], 0.0, "opposite"),
        ([0.1, -0.12, 0.11], 0.0, "not shown"),
        ([0.1, 0.1], 0.0, "too few pairs"),
        ([-0.01, -0.011, -0.012], 0.02, "as in the paper (not worse by 2 points)"),
        ([-0.03, -0.031, -0.032], 0.02, "opposite"),
        ([0.0, 0.0, 0.0], 0.0, "not shown"),
    ],
)
def test_verdicts(gains, margin, word):
    assert verdict(paired([0.0] * len(gains), gains), margin) == word


def test_claim_rows_have_verdicts_and_controls_have_none(made):
    claim = Claim("i", "x", (("up", ("e2_e1", "on"), ("grpo", "off")),), (("gone", ("e2_e1", "off"), ("grpo", "off")),))
    rows = claim_rows(made, claim)
    assert [row.verdict for row in rows] == ["as in the paper", ""]
    assert rows[1].found.high < 0
    assert json.dumps([row.to_json() for row in rows], allow_nan=False)
    assert [claim.number for claim in CLAIMS] == ["i", "ii", "iii", "iv"]


def test_results_are_read_from_lines(tmp_path, made):
    rng = np.random.default_rng(0)
    file = tmp_path / "results.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines("grpo", "off", (0, 0), rng)))
    read = read_results([file])
    assert read.value(("grpo", "off"), (0, 0)) == made.value(("grpo", "off"), (0, 0))


def run(rng, norm, reward=0.5):
    return [
        {
            "step": i,
            "reward/mean": reward + 0.01 * float(rng.random()),
            "optim/grad_norm": norm * float(1 + 0.3 * rng.random()),
            "reward/within_group_var": 0.1,
        }
        for i in range(20)
    ]


def test_stability_compares_panels_and_steps_of_equal_reward():
    rng = np.random.default_rng(1)
    against = {(0, s): run(rng, 1.0) for s in range(4)}
    of = {(0, s): run(rng, 0.5) for s in range(5)}
    plain, matched = stability_rows(of, against)
    assert plain["grad_norm_mean"].pairs == 4
    gaps = [
        np.mean([line["optim/grad_norm"] for line in of[c]]) - np.mean([line["optim/grad_norm"] for line in against[c]])
        for c in against
    ]
    assert plain["grad_norm_mean"].difference == pytest.approx(np.mean(gaps))
    assert matched["grad_norm"][0].difference == pytest.approx(np.mean(gaps)), "one bin holds every step"
    assert matched["grad_norm"][1] == 1.0
    variances = [np.var([line["optim/grad_norm"] for line in of[c]]) for c in against]
    assert plain["grad_norm_var"].second == pytest.approx(np.mean(variances))
    assert stability_verdict(plain, matched) == "as in the paper"
    assert stability_verdict(*stability_rows(against, of)) == "opposite"
    far = {(0, s): run(rng, 0.5, reward=0.9) for s in range(4)}
    assert stability_rows(far, against)[1] == {}, "no reward in common, no comparison"
    assert stability_verdict({}, {}) == "too few pairs"
