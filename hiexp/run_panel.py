"""Was training stable? The panel of numbers that answers it, from the lines of a run's metrics.jsonl.

The variance of normalised advantages is (almost) the share of groups with a signal, so a lower one says nothing about
noise by itself; that is why the groups without a signal and the raw variance of rewards stand beside it.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean, median, pvariance

Metrics = Sequence[Mapping[str, float | None]]
EDGE = 5
"""steps that count as the start and as the end of a run"""


def stability_panel(metrics: Metrics) -> dict[str, float]:
    """Name -> value over the whole run; `_start` and `_end` are means of the first and last five steps.

    Raises ValueError for a run without steps. Keys that a run did not log are left out.
    """
    if not metrics:
        raise ValueError("no steps were logged")
    panel: dict[str, float] = {"steps": len(metrics)}
    reward = _values(metrics, "reward/mean")
    panel |= {"reward_start": fmean(reward[:EDGE]), "reward_end": fmean(reward[-EDGE:]), "reward_mean": fmean(reward)}
    norms = _values(metrics, "optim/grad_norm")
    panel |= {
        "grad_norm_mean": fmean(norms),
        "grad_norm_var": pvariance(norms),
        "grad_norm_spikes": float(spikes(norms)),
    }
    for name, key in MEANS.items():
        if values := _values(metrics, key):
            panel[name] = fmean(values)
    if entropy := _values(metrics, "loss/entropy"):
        panel |= {"entropy_start": fmean(entropy[:EDGE]), "entropy_end": fmean(entropy[-EDGE:])}
    if kl := _values(metrics, "loss/kl"):
        panel["kl_max"] = max(kl)
    return panel


def spikes(values: Sequence[float], window: int = 100, limit: float = 5.0) -> int:
    """How many values exceed the median of the `window` before them by more than `limit` median absolute deviations."""
    count = 0
    for index in range(EDGE, len(values)):
        before = values[max(0, index - window) : index]
        middle = median(before)
        spread = median([abs(value - middle) for value in before])
        count += values[index] > middle + limit * spread
    return count


def _values(metrics: Metrics, key: str) -> list[float]:
    return [value for line in metrics if (value := line.get(key)) is not None]


def step_cost(metrics: Metrics) -> dict[str, float]:
    """Median CPU seconds of a step's rollout and update."""
    return {name: median(_values(metrics, f"time/{name}_cpu")) for name in ("rollout", "update")}


MEANS = {
    "within_group_var": "reward/within_group_var",
    "zero_signal_groups": "group/zero_std_frac",
    "all_right_groups": "group/all_right_frac",
    "all_wrong_groups": "group/all_wrong_frac",
    "advantage_var": "advantage/var",
    "grad_cosine": "optim/grad_cosine",
    "clip_frac": "loss/clip_frac",
    "tokens_per_trajectory": "rollout/tokens",
}
"""panel name -> logged metric whose mean over the run it is"""
