"""The stability panel against numpy; it must fail if starts and ends are swapped or a variance is the sample's."""

import json
import math

import numpy as np
import pytest

from hiexp.run_panel import (
    area,
    at_equal_reward,
    half_life,
    largest_drop,
    main,
    noise_scale,
    rolling_variance,
    spikes,
    stability_panel,
    step_cost,
    steps_to,
)


def lines(count=40, **series):
    rng = np.random.default_rng(0)
    names = ("reward/mean", "optim/grad_norm", "loss/entropy", "loss/kl", "group/all_right_frac", "time/rollout_cpu")
    values = {name: rng.random(count).tolist() for name in names} | series
    return [{"step": i, **{name: column[i] for name, column in values.items()}} for i in range(count)]


def column(metrics, name):
    return np.array([line[name] for line in metrics])


def test_panel_against_numpy():
    metrics = lines()
    panel = stability_panel(metrics)
    reward, norm = column(metrics, "reward/mean"), column(metrics, "optim/grad_norm")
    assert panel["reward_start"] == pytest.approx(reward[:5].mean())
    assert panel["reward_end"] == pytest.approx(reward[-5:].mean())
    assert panel["reward_mean"] == pytest.approx(reward.mean()) and panel["steps"] == 40
    assert panel["grad_norm_var"] == pytest.approx(norm.var()) and panel["grad_norm_mean"] == pytest.approx(norm.mean())
    assert panel["all_right_groups"] == pytest.approx(column(metrics, "group/all_right_frac").mean())
    assert panel["kl_max"] == column(metrics, "loss/kl").max()
    assert "zero_signal_groups" not in panel, "what a run did not log is left out"


def test_values_that_were_not_finite_are_passed_over():
    metrics = lines()
    metrics[3]["loss/kl"] = None
    metrics[4]["loss/kl"] = 7.0
    assert stability_panel(metrics)["kl_max"] == 7.0
    with pytest.raises(ValueError, match="no steps"):
        stability_panel([])


def test_spikes_stand_out_from_what_came_before():
    calm = [1.0, 1.1, 0.9, 1.05, 0.95, 1.0, 1.1]
    assert spikes(calm) == 0
    assert spikes([*calm, 9.0, 1.0, 8.0]) == 2
    assert spikes([9.0, *calm]) == 0, "nothing came before the first"


def test_step_cost_is_the_median():
    metrics = lines(**{"time/rollout_cpu": [1.0] * 39 + [99.0], "time/update_cpu": [2.0] * 40})
    assert step_cost(metrics) == {"rollout": 1.0, "update": 2.0}


def test_rolling_variance_against_numpy():
    values = np.random.default_rng(0).random(120)
    windows = np.lib.stride_tricks.sliding_window_view(values, 50).var(axis=1)
    assert rolling_variance(values.tolist()) == pytest.approx(windows.tolist()) and len(windows) == 71
    assert rolling_variance(values[:20].tolist()) == pytest.approx([values[:20].var()])
    assert rolling_variance([]) == []
    metrics = lines(120, **{"optim/grad_norm": values.tolist()})
    assert stability_panel(metrics)["grad_norm_rolling_var"] == pytest.approx(windows.mean())


@pytest.mark.parametrize("count", [2, 4])
def test_noise_scale_finds_the_noise_that_was_put_in(count):
    """Gradients g + noise of a known covariance: tr(Sigma) / |g|^2 = 400 * 0.09 / |g|^2."""
    rng = np.random.default_rng(1)
    truth = rng.normal(size=400)
    metrics = []
    for step in range(300):
        drawn = truth + 0.3 * rng.normal(size=(count, 400)) * math.sqrt(2)
        norms = np.linalg.norm(drawn, axis=1)
        cosines = [drawn[i] @ drawn[i + 1] / norms[i] / norms[i + 1] for i in range(count - 1)]
        line = {f"optim/grad_norm_{i}": float(norm) for i, norm in enumerate(norms)}
        metrics.append(
            {"step": step, "optim/grad_norm": float(norms.mean()), **line, "optim/grad_cosine": np.mean(cosines)}
        )
    expected = 400 * 0.09 * 2 / (truth @ truth)
    assert noise_scale(metrics) == pytest.approx(expected, rel=0.03)
    # the same from the sizes of one mini-batch and of all (McCandlish et al., eq. A.2), for two
    if count == 2:
        pairs = [(m["optim/grad_norm_0"], m["optim/grad_norm_1"], m["optim/grad_cosine"]) for m in metrics]
        small = np.mean([(a * a + b * b) / 2 for a, b, _ in pairs])
        big = np.mean([(a * a + b * b + 2 * a * b * c) / 4 for a, b, c in pairs])
        assert noise_scale(metrics) == pytest.approx((small - big) / (1 - 1 / 2) / (2 * big - small))
    assert noise_scale([{"optim/grad_norm_0": 1.0, "optim/grad_norm_1": 1.0, "optim/grad_cosine": -0.1}]) is None
    assert noise_scale([{"optim/grad_norm_0": 1.0, "optim/grad_norm_1": None, "optim/grad_cosine": 0.5}]) is None
    assert noise_scale([{"optim/grad_norm_0": 1.0}]) is None


def test_half_life_of_a_decay():
    decay = [2.0 * 0.5 ** (step / 25) for step in range(60)]
    assert half_life(decay) == pytest.approx(25)
    noisy = np.array(decay) * np.exp(np.random.default_rng(0).normal(size=60) * 0.1)
    slope = np.polyfit(np.arange(60), np.log(noisy), 1)[0]
    assert half_life(noisy.tolist()) == pytest.approx(-math.log(2) / slope)
    assert half_life([1.0, 1.1, 1.2]) is None and half_life([1.0]) is None and half_life([0.0, 0.0]) is None
    assert half_life([4.0, 0.0, 1.0]) == pytest.approx(1), "a zero has no logarithm and is passed over"


def test_validation_by_hand():
    points = [(9.0, 0.2), (19.0, 0.6), (39.0, 0.5)]
    assert area(points) == pytest.approx((10 * 0.4 + 20 * 0.55) / 30) and area(points[:1]) == 0.2
    assert steps_to(points) == 19.0 and steps_to(points, 0.3) == 9.0 and steps_to([(0.0, 0.0)]) is None
    metrics = [{"step": step, "reward/mean": 0.1} for step in range(40)]
    for step, value in points:
        metrics[int(step)] |= {"dev/f1": 0.9, "dev/em": value}
    panel = stability_panel(metrics)
    # moving average of half old and half new: 0.2, 0.4, 0.45
    assert (panel["dev_area"], panel["dev_steps_to_80"], panel["dev_max_drop"]) == (area(points), 19.0, 0.0)
    assert "grad_norm_mean" not in panel and "entropy_start" not in panel


def test_largest_drop_is_from_the_highest_before():
    # averages: 0, 0.5, 0.75, 0.375, 0.6875, 0.34375
    assert largest_drop([0.0, 1.0, 1.0, 0.0, 1.0, 0.0], 0.5) == pytest.approx(0.75 - 0.34375)
    assert largest_drop([0.1, 0.2, 0.9], 0.1) == 0.0


def test_importance_weights_and_signal_are_in_the_panel():
    more = {
        "loss/is_weight": [0.5] * 20 + [1.0] * 20, "loss/is_weight_max": [1.5] * 39 + [2.0],
        "loss/is_ess": [0.25] * 40, "reward/within_group_std": [0.3] * 40, "loss/clip_frac": [0.1] * 40,
        "optim/clip_frac": [1.0] * 10 + [0.0] * 30, "loss/entropy": np.linspace(2, 1, 40).tolist(),
    }  # fmt: skip
    panel = stability_panel(lines(**more))
    wanted = {
        "is_weight_mean": 0.75, "is_weight_max": 2.0, "is_ess": 0.25, "within_group_std": 0.3, "clip_frac": 0.1,
        "grad_clipped": 0.25,
    }  # fmt: skip
    assert {name: panel[name] for name in wanted} == pytest.approx(wanted)
    assert panel["entropy_start"] == pytest.approx(np.linspace(2, 1, 40)[:5].mean())
    assert panel["entropy_end"] == pytest.approx(np.linspace(2, 1, 40)[-5:].mean()) and panel["entropy_half_life"] > 0


def test_equal_reward_undoes_what_only_reward_explains():
    """One arm learns faster; the number depends on reward alone, plus 0.05 in the second arm."""
    slow, fast = np.linspace(0, 0.5, 60), np.linspace(0, 0.99, 60)
    explain = lambda reward: np.floor(reward * 10 + 1e-9) / 10  # noqa: E731
    first = [{"reward/mean": r, "x": explain(r)} for r in slow.tolist()]
    second = [{"reward/mean": r, "x": explain(r) + 0.05} for r in fast.tolist()]
    plain = np.mean([line["x"] for line in second]) - np.mean([line["x"] for line in first])
    gap, share = at_equal_reward([first[:30], first[30:]], [second], "x")
    assert plain > 0.25 and gap == pytest.approx(0.05)
    counts = [np.bincount((np.floor(arm * 10 + 1e-9)).astype(int), minlength=10) for arm in (slow, fast)]
    assert share == pytest.approx(np.minimum(*counts).sum() / 60)
    assert at_equal_reward([[{"reward/mean": 0.1, "x": 1.0}]], [[{"reward/mean": 0.9, "x": 1.0}]], "x") is None
    assert at_equal_reward([[{"reward/mean": None, "x": 1.0}]], [second], "x") is None


def write_run(folder, seed, **series):
    folder.mkdir()
    (folder / "config.yaml").write_text(f"seed: {seed}\n")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines(**series)))
    return str(folder)


def test_the_command_prints_runs_side_by_side_and_arms_in_pairs(tmp_path, capsys):
    ones = [write_run(tmp_path / f"a{s}", s, **{"reward/mean": [0.5 + s / 100] * 40}) for s in range(3)]
    others = [write_run(tmp_path / f"b{s}", s, **{"reward/mean": [0.25 + s / 100] * 40}) for s in range(3)]
    assert main(ones) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("reward_mean"))
    assert row.split() == ["reward_mean", "0.5", "0.51", "0.52", "0.51"]
    assert main([*ones, "--against", *others]) == 0
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if line.startswith("reward_mean")).split()
    assert row[:4] == ["reward_mean", "0.26", "0.51", "0.25"] and row[-1] == "0.25"
    assert "grad_norm_rolling_var, runs / against: 1, 95% bootstrap" in out and "no reward in common" in out
    assert main([*ones, "--against", *ones]) == 0 and "100%" in capsys.readouterr().out


def test_the_command_refuses_what_is_no_pair_or_no_run(tmp_path, capsys):
    run, other = write_run(tmp_path / "a", 0), write_run(tmp_path / "b", 1)
    for arguments, message in (
        ([run, "--against", other], "seed 0"),
        ([run, run, "--against", other], "2 runs against 1"),
        ([str(tmp_path)], "no metrics.jsonl"),
    ):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
