"""The stability panel against numpy; it must fail if starts and ends are swapped or a variance is the sample's."""

import numpy as np
import pytest

from hiexp.run_panel import spikes, stability_panel, step_cost


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
