"""Was training stable? The panel of numbers that answers it, from the lines of a run's metrics.jsonl.

    python -m hiexp.run_panel runs/hiexp_s0 runs/hiexp_s1 runs/hiexp_s2                          # runs side by side
    python -m hiexp.run_panel runs/hiexp_s* --against runs/grpo_s*                               # paired by seed

The variance of normalised advantages is (almost) the share of groups with a signal, so a lower one says nothing about
noise by itself; that is why the groups without a signal and the raw variance of rewards stand beside it, and why two
arms are also compared at equal mean reward.
"""

import argparse
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, pvariance

from hiexp.config import ConfigError, read_yaml
from hiexp.paired import paired, ratio_interval
from hiexp.tracking import read_metrics

Metrics = Sequence[Mapping[str, float | None]]
EDGE = 5
"""steps that count as the start and as the end of a run"""
WINDOW = 50
"""steps of the rolling variance"""
BIN = 0.1
"""width of the bins of mean reward"""


def stability_panel(metrics: Metrics) -> dict[str, float]:
    """Name -> value over the whole run; `_start` and `_end` are means of the first and last five steps.

    Raises ValueError for a run without steps. What a run did not log, or what its numbers do not define (a half-life of
    an entropy that rises), is left out.
    """
    if not metrics:
        raise ValueError("no steps were logged")
    panel: dict[str, float | None] = {"steps": len(metrics)}
    for part in (_reward_part, _gradient_part, _policy_part, _validation_part):
        panel |= part(metrics)
    return {name: value for name, value in panel.items() if value is not None}


def spikes(values: Sequence[float], window: int = 100, limit: float = 5.0) -> int:
    """How many values exceed the median of the `window` before them by more than `limit` median absolute deviations."""
    count = 0
    for index in range(EDGE, len(values)):
        before = values[max(0, index - window) : index]
        middle = median(before)
        spread = median([abs(value - middle) for value in before])
        count += values[index] > middle + limit * spread
    return count


def rolling_variance(values: Sequence[float], window: int = WINDOW) -> list[float]:
    """Population variance of the last `window` values, from the first full window on (one value if there is none)."""
    size = min(window, len(values))
    return [pvariance(values[end - size : end]) for end in range(size, len(values) + 1)] if values else []


def noise_scale(metrics: Metrics) -> float | None:
    """tr(Sigma) / |g|^2 in mini-batches: how many it takes until the noise of their mean is as large as the gradient.

    From batches of one and of two mini-batches (McCandlish et al. 2018, appendix A): with gradients a and b,
    |a - b|^2 / 2 estimates tr(Sigma) and a.b estimates |g|^2, each without bias; both are averaged over the run before
    they are divided. The mini-batches of a step are one optimiser step apart, which counts as noise here. None where
    the products average to zero or less, or were not logged.
    """
    noise, signal = [], []
    for line in metrics:
        norms = [line.get(f"optim/grad_norm_{i}") for i in range(sum(k.startswith("optim/grad_norm_") for k in line))]
        cosine = line.get("optim/grad_cosine")
        known = [norm for norm in norms if norm is not None]
        if cosine is None or len(known) < 2:
            continue
        products = [a * b * cosine for a, b in pairwise(known)]
        squares = [(a * a + b * b) / 2 for a, b in pairwise(known)]
        noise.append(fmean(squares) - fmean(products))
        signal.append(fmean(products))
    return fmean(noise) / fmean(signal) if signal and fmean(signal) > 0 else None


def half_life(values: Sequence[float]) -> float | None:
    """Steps in which an exponential fitted to the values (least squares on their logarithms) falls to a half.

    None for values that do not fall, or fewer than two above 0.
    """
    points = [(x, math.log(value)) for x, value in enumerate(values) if value > 0]
    if len(points) < 2:
        return None
    middle_x, middle_y = fmean(x for x, _ in points), fmean(y for _, y in points)
    slope = sum((x - middle_x) * (y - middle_y) for x, y in points) / sum((x - middle_x) ** 2 for x, _ in points)
    return -math.log(2) / slope if slope < 0 else None


def area(points: Sequence[tuple[float, float]]) -> float:
    """Area under (step, value) by trapezoids, divided by the steps it spans: a mean over the run."""
    if len(points) == 1:
        return points[0][1]
    pieces = sum((x1 - x0) * (y0 + y1) / 2 for (x0, y0), (x1, y1) in pairwise(points))
    return pieces / (points[-1][0] - points[0][0])


def steps_to(points: Sequence[tuple[float, float]], share: float = 0.8) -> float | None:
    """First step at which the value is `share` of the last one or more; None if the last is not above 0."""
    goal = share * points[-1][1]
    return next(step for step, value in points if value >= goal) if goal > 0 else None


def largest_drop(values: Sequence[float], weight: float) -> float:
    """Largest fall of the exponential moving average from its highest value before; `weight` is that of a new value."""
    average = top = values[0]
    drop = 0.0
    for value in values:
        average += weight * (value - average)
        top = max(top, average)
        drop = max(drop, top - average)
    return drop


def at_equal_reward(first: Sequence[Metrics], second: Sequence[Metrics], key: str) -> tuple[float, float] | None:
    """(difference second - first of the mean of `key` at equal mean reward, share of steps with a counterpart).

    Steps of all runs of an arm are sorted into bins of reward/mean; a bin counts by the steps of the arm that has fewer
    in it. None where the arms share no bin.
    """
    one, other = _by_reward(first, key), _by_reward(second, key)
    weights = {place: min(len(one[place]), len(other[place])) for place in one.keys() & other.keys()}
    total = sum(weights.values())
    if not total:
        return None
    gap = sum(weight * (fmean(other[place]) - fmean(one[place])) for place, weight in weights.items()) / total
    return gap, total / min(sum(map(len, one.values())), sum(map(len, other.values())))


def step_cost(metrics: Metrics) -> dict[str, float]:
    """Median CPU seconds of a step's rollout and update."""
    return {name: median(_values(metrics, f"time/{name}_cpu")) for name in ("rollout", "update")}


def side_by_side(runs: Mapping[str, Metrics]) -> str:
    """One line per number, one column per run, and their mean if there are several."""
    panels = {name: stability_panel(lines) for name, lines in runs.items()}
    rows = [["", *panels, *(["mean"] if len(panels) > 1 else [])]]
    for name in _names(panels.values()):
        found = [panel.get(name) for panel in panels.values()]
        mean = [fmean(value for value in found if value is not None)] if len(found) > 1 else []
        rows.append([name, *map(_number, [*found, *mean])])
    return _align(rows)


def comparison(runs: Sequence[Metrics], against: Sequence[Metrics]) -> str:
    """Two arms paired by position: the panel's numbers, the ratio of gradient variances, and equal mean reward."""
    panels, others = [stability_panel(lines) for lines in runs], [stability_panel(lines) for lines in against]
    rows = [["", "against", "runs", "difference", "95% t-interval", "sign test p"]]
    for name in _names([*panels, *others]):
        both = [(b[name], a[name]) for a, b in zip(panels, others, strict=True) if name in a and name in b]
        if both:
            found = paired([before for before, _ in both], [after for _, after in both])
            interval = f"[{_number(found.low)}, {_number(found.high)}]" if found.pairs > 1 else "one pair"
            middle = map(_number, (found.first, found.second, found.difference))
            rows.append([name, *middle, interval, _number(found.sign_p)])
    return "\n\n".join([_align(rows), *_ratio(panels, others), _equal_reward(runs, against)])


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("python -m hiexp.run_panel", description="Numbers about the stability of runs.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a training run")
    parser.add_argument("--against", nargs="+", default=[], metavar="RUN", help="the other arm, in the same order")
    arguments = parser.parse_args(argv)
    try:
        if arguments.against:
            _check_pairs(arguments.runs, arguments.against)
            print(comparison([_read(run) for run in arguments.runs], [_read(run) for run in arguments.against]))
        else:
            print(side_by_side({run: _read(run) for run in arguments.runs}))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _reward_part(metrics: Metrics) -> dict[str, float | None]:
    reward = _values(metrics, "reward/mean")
    if not reward:
        return {}
    panel = {"reward_start": fmean(reward[:EDGE]), "reward_end": fmean(reward[-EDGE:]), "reward_mean": fmean(reward)}
    return panel | {"reward_max_drop": largest_drop(reward, 0.1)} | _means(metrics, SIGNAL)


def _gradient_part(metrics: Metrics) -> dict[str, float | None]:
    norms = _values(metrics, "optim/grad_norm")
    if not norms:
        return {}
    panel: dict[str, float | None] = {
        "grad_norm_mean": fmean(norms),
        "grad_norm_var": pvariance(norms),
        "grad_norm_rolling_var": fmean(rolling_variance(norms)),
        "grad_norm_spikes": float(spikes(norms)),
    }
    return panel | _means(metrics, GRADIENT) | {"noise_scale": noise_scale(metrics)}


def _policy_part(metrics: Metrics) -> dict[str, float | None]:
    panel: dict[str, float | None] = {}
    if entropy := _values(metrics, "loss/entropy"):
        panel = {"entropy_start": fmean(entropy[:EDGE]), "entropy_end": fmean(entropy[-EDGE:])}
        panel["entropy_half_life"] = half_life(entropy)
    if kl := _values(metrics, "loss/kl"):
        panel |= {"kl_end": fmean(kl[-EDGE:]), "kl_max": max(kl)}
    if top := _values(metrics, "loss/is_weight_max"):
        panel["is_weight_max"] = max(top)
    return panel | _means(metrics, POLICY)


def _validation_part(metrics: Metrics) -> dict[str, float | None]:
    """Of dev/em, or of whatever else the dev questions were scored by."""
    names = sorted(
        {key for line in metrics for key in line if key.startswith("dev/")}, key=lambda k: (k != "dev/em", k)
    )
    pairs = [(line["step"], line.get(names[0])) for line in metrics] if names else []
    points = [(float(step or 0), value) for step, value in pairs if value is not None]
    if not points:
        return {}
    drop = largest_drop([value for _, value in points], 0.5)
    return {"dev_area": area(points), "dev_steps_to_80": steps_to(points), "dev_max_drop": drop}


def _means(metrics: Metrics, keys: Mapping[str, str]) -> dict[str, float | None]:
    return {name: fmean(values) for name, key in keys.items() if (values := _values(metrics, key))}


def _values(metrics: Metrics, key: str) -> list[float]:
    return [value for line in metrics if (value := line.get(key)) is not None]


def _by_reward(runs: Sequence[Metrics], key: str) -> dict[int, list[float]]:
    bins: dict[int, list[float]] = {}
    for line in (line for run in runs for line in run):
        reward, value = line.get("reward/mean"), line.get(key)
        if reward is not None and value is not None:
            bins.setdefault(math.floor(reward / BIN + 1e-9), []).append(value)
    return bins


def _ratio(panels: Sequence[Mapping[str, float]], others: Sequence[Mapping[str, float]]) -> list[str]:
    name = "grad_norm_rolling_var"
    if not all(panel.get(name, 0.0) > 0 for panel in [*panels, *others]):
        return []
    ratio, low, high = ratio_interval([panel[name] for panel in others], [panel[name] for panel in panels])
    return [f"{name}, runs / against: {ratio:.3g}, 95% bootstrap interval over seeds [{low:.3g}, {high:.3g}]"]


def _equal_reward(runs: Sequence[Metrics], against: Sequence[Metrics]) -> str:
    rows = [["at equal mean reward", "difference", "steps with a counterpart"]]
    first, second = ([_with_variance(lines) for lines in arm] for arm in (against, runs))
    for name, key in CONDITIONED.items():
        if found := at_equal_reward(first, second, key):
            rows.append([name, _number(found[0]), f"{found[1]:.0%}"])
    return _align(rows) if len(rows) > 1 else "at equal mean reward: the arms have no reward in common"


def _with_variance(metrics: Metrics) -> list[dict[str, float | None]]:
    """The lines, with the rolling variance that ends at each step."""
    known = [line for line in metrics if line.get("optim/grad_norm") is not None]
    rolled = rolling_variance(_values(known, "optim/grad_norm"))
    late = known[len(known) - len(rolled) :]
    variance = {id(line): value for line, value in zip(late, rolled, strict=True)}
    return [dict(line) | {"rolling_var": variance.get(id(line))} for line in metrics]


def _read(run: str) -> Metrics:
    try:
        metrics = read_metrics(run)
    except OSError as error:
        raise ConfigError(f"{run} is no folder of a training run (no metrics.jsonl in it)") from error
    if not metrics:
        raise ConfigError(f"{run}: no step was logged yet")
    return metrics


def _check_pairs(runs: Sequence[str], against: Sequence[str]) -> None:
    """Pairs must have seen the same questions in the same order, which the seed decides."""
    if len(runs) != len(against):
        raise ConfigError(f"{len(runs)} runs against {len(against)}: give as many, in the same order of seeds")
    for pair in zip(runs, against, strict=True):
        configs = [Path(run) / "config.yaml" for run in pair]
        seeds = [read_yaml(config).get("seed") for config in configs if config.is_file()]
        if len(set(seeds)) > 1:
            raise ConfigError(f"{pair[0]} has seed {seeds[0]} and {pair[1]} has {seeds[1]}: pairs must have one seed")


def _names(panels: Iterable[Mapping[str, float]]) -> list[str]:
    return list(dict.fromkeys(name for panel in panels for name in panel))


def _number(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "-"
    return f"{value:.0f}" if value == round(value) and abs(value) < 1e6 else f"{value:.3g}"


def _align(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    first = [f"{row[0]:<{widths[0]}}" for row in rows]
    rest = ["".join(f"  {cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True)) for row in rows]
    return "\n".join(name + cells for name, cells in zip(first, rest, strict=True))


SIGNAL = {
    "within_group_std": "reward/within_group_std",
    "within_group_var": "reward/within_group_var",
    "zero_signal_groups": "group/zero_std_frac",
    "all_right_groups": "group/all_right_frac",
    "all_wrong_groups": "group/all_wrong_frac",
    "advantage_var": "advantage/var",
    "tokens_per_trajectory": "rollout/tokens",
}
GRADIENT = {"grad_clipped": "optim/clip_frac", "grad_cosine": "optim/grad_cosine"}
POLICY = {
    "clip_frac": "loss/clip_frac",
    "is_weight_mean": "loss/is_weight",
    "is_ess": "loss/is_ess",
    "mismatch_kl": "rollout/mismatch_kl",
}
"""panel name -> logged metric whose mean over the run it is. within_group_var is Var(r - mean of the group); is_ess the
effective share of tokens under importance weights"""
CONDITIONED = {
    "zero_signal_groups": "group/zero_std_frac",
    "within_group_var": "reward/within_group_var",
    "advantage_var": "advantage/var",
    "grad_norm": "optim/grad_norm",
    "grad_norm_rolling_var": "rolling_var",
    "grad_cosine": "optim/grad_cosine",
    "entropy": "loss/entropy",
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
