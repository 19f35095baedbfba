"""Figure 3 (was training stable?) and Figure 4 (how many hops do the questions have?).

A lower variance of normalised advantages is no evidence of better gradients: with G siblings and rewards divided by
their standard deviation it is (1 - share of groups without a signal) (G - 1) / G, whatever the policy does. Figure 3
draws that beside the measured curve, and run_panel.py's numbers, also at equal reward, stand below it.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from hiexp import pictures
from hiexp.benchmarks import open_benchmark
from hiexp.config import ConfigError, read_yaml
from hiexp.data import Sample
from hiexp.paired import paired, t_quantile
from hiexp.paper_rows import TITLES, benchmark_of, paper
from hiexp.run_panel import CONDITIONED, WINDOW, at_equal_reward, rolling_variance, stability_panel
from hiexp.sheets import Result, Sheet, number
from hiexp.tables import finish, parser_of
from hiexp.tracking import read_metrics

Metrics = Sequence[Mapping[str, float | None]]
PANELS = {
    "dev": "Validation reward",
    "reward/mean": "Mean reward of the rollouts",
    "advantage/var": "Variance of group advantages",
    "optim/grad_norm": "Gradient norm before clipping",
    "rolling_var": f"Rolling variance of the gradient norm ({WINDOW} steps)",
}
"""logged number -> title; `dev` is dev/em, or whatever else the dev questions were scored by"""
EXPECTED = "advantage/var (expected)"
ARTEFACT = (
    "The variance of advantages says how many groups had a signal, not how noisy the gradient was: the dotted line is "
    "(1 - share of groups without a signal) (G - 1) / G, computed from those shares alone."
)
BUCKETS = ("<=2", "3", "4", ">=5", "not stated")
FITS = 1.0
"""points by which a share may differ from the paper's"""
DEFINITIONS = {"hops": "by the data set's hop label", "facts": "by the number of supporting facts"}


@dataclass(frozen=True)
class TrainingRun:
    folder: Path
    seed: int
    group_size: int
    metrics: Metrics


def figure3(command: str, argv: Sequence[str]) -> None:
    parser = parser_of(command, "Training without experience and with it: curves over seeds, and the stability panel.")
    parser.add_argument("--without", nargs="+", required=True, metavar="RUN", help="folders of train.py, no experience")
    parser.add_argument("--with", nargs="+", required=True, metavar="RUN", dest="hiexp", help="the same with it")
    parser.add_argument("--paper", action="store_true", help="say what the paper prints about it")
    parser.add_argument("--names", nargs=2, default=("GRPO", "GRPO + HiExp"), metavar="NAME", help="of the two arms")
    found = parser.parse_args(argv)
    pictures.check()
    if found.names[0] == found.names[1]:
        raise ConfigError(f"--names {' '.join(found.names)}: the arms need different names")
    arms = dict(zip(found.names, (read_runs(found.without), read_runs(found.hiexp)), strict=True))
    result, panels = stability(arms, found.paper)
    title = ", ".join(f"{name}: {len(runs)} runs" for name, runs in arms.items())
    finish(found.out, result, lambda files: pictures.curves(files, f"{title}; 95% t-interval", panels, "step"))


def read_runs(folders: Sequence[str]) -> list[TrainingRun]:
    """By seed; ConfigError for a folder without steps, or a seed that comes twice."""
    runs = []
    for folder in map(Path, folders):
        try:
            metrics = read_metrics(folder)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{folder} is no folder of a training run (no readable metrics.jsonl in it)") from error
        if not metrics:
            raise ConfigError(f"{folder}: no step was logged yet")
        config = read_yaml(folder / "config.yaml") if (folder / "config.yaml").is_file() else {}
        size = int((config.get("rollout") or {}).get("group_size") or 0)
        runs.append(TrainingRun(folder, int(config.get("seed") or 0), size, metrics))
    seeds = Counter(run.seed for run in runs)
    if twice := [seed for seed, count in seeds.items() if count > 1]:
        raise ConfigError(f"{seeds[twice[0]]} runs of one arm have seed {twice[0]}; an arm is runs of different seeds")
    return sorted(runs, key=lambda run: run.seed)


def stability(arms: Mapping[str, Sequence[TrainingRun]], with_paper: bool = False) -> tuple[Result, dict[str, Any]]:
    """What figure3 says, and its curves: panel title -> arm -> band."""
    panels: dict[str, dict[str, pictures.Band]] = {}
    for key, title in PANELS.items():
        bands = {name: band_over_runs([series(run, key) for run in runs]) for name, runs in arms.items()}
        panels[title] = {name: band for name, band in bands.items() if band.x}
    measured = panels[PANELS["advantage/var"]]
    for name, runs in arms.items():
        expected = band_over_runs([series(run, EXPECTED) for run in runs])
        if expected.x and name in measured:
            measured[f"{name} (expected)"] = replace(expected, low=[None] * len(expected.x))
    shown = {title: bands for title, bands in panels.items() if bands}
    first, second = arms.values()
    body = [_panel_sheet(arms), _equal_reward(arms)]
    notes = [ARTEFACT, _artefact_gap(arms), *_seed_notes(arms)]
    if with_paper:
        notes.append(f"Paper: {paper()['figure3']['note']}; only the direction of the curves can be compared.")
    data = {
        "figure": "figure3",
        "arms": {name: [{"run": str(run.folder), "seed": run.seed} for run in runs] for name, runs in arms.items()},
        "curves": {title: {name: asdict(band) for name, band in bands.items()} for title, bands in shown.items()},
        "panel": {name: [stability_panel(run.metrics) for run in runs] for name, runs in arms.items()},
        "paired": {name: _plain(found) for name, found in compare(first, second).items()},
        "notes": notes,
    }
    return Result("figure3", "Figure 3: stability of training", data, [one for one in body if one.lines], notes), shown


def series(run: TrainingRun, key: str) -> dict[int, float]:
    """step -> value of a logged number, or of one that is made of others (see PANELS)."""
    if key == "dev":
        key = _dev_key(run.metrics)
    if key == "rolling_var":
        norms = series(run, "optim/grad_norm")
        rolled = rolling_variance(list(norms.values()))
        return dict(zip(list(norms)[len(norms) - len(rolled) :], rolled, strict=True)) if norms else {}
    if key == EXPECTED:
        size = run.group_size
        silent = series(run, "group/zero_std_frac")
        return {step: (1 - share) * (size - 1) / size for step, share in silent.items()} if size > 1 else {}
    return {int(line["step"] or 0): value for line in run.metrics if (value := line.get(key)) is not None}


def band_over_runs(runs: Sequence[Mapping[int, float]]) -> pictures.Band:
    """Mean and 95% t-interval over runs, at the steps that all of them have; without an interval for a single run."""
    if not runs or not all(runs):
        return pictures.Band([], [], [], [])
    steps = sorted(set.intersection(*(set(run) for run in runs)))
    mean, low, high = [], [], []
    for step in steps:
        values = [run[step] for run in runs]
        middle = fmean(values)
        half = t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
        mean.append(middle)
        low.append(middle - half if half is not None else None)
        high.append(middle + half if half is not None else None)
    return pictures.Band(steps, mean, low, high)


def compare(first: Sequence[TrainingRun], second: Sequence[TrainingRun]) -> dict[str, Any]:
    """The panel's numbers paired by seed; empty unless both arms have the same seeds."""
    if [run.seed for run in first] != [run.seed for run in second]:
        return {}
    panels, others = ([stability_panel(run.metrics) for run in arm] for arm in (first, second))
    found = {}
    for name in dict.fromkeys(name for panel in [*panels, *others] for name in panel):
        both = [(a[name], b[name]) for a, b in zip(panels, others, strict=True) if name in a and name in b]
        if both:
            found[name] = paired([before for before, _ in both], [after for _, after in both])
    return found


def figure4(command: str, argv: Sequence[str]) -> None:
    parser = parser_of(command, "How many hops the questions of a benchmark have, by both definitions.")
    parser.add_argument("files", nargs="+", metavar="BENCHMARK=FILE", help="for example hotpotqa=hotpot_dev.json")
    parser.add_argument(
        "--paper", action="store_true", help="the paper's shares beside ours, and what is wrong with them"
    )
    parser.add_argument("--subset", action="store_true", help="the paper's 1,000 questions of a larger set")
    found = parser.parse_args(argv)
    pictures.check()
    sets: dict[str, Sequence[Sample]] = {}
    for item in found.files:
        name, equals, path = item.partition("=")
        if not equals or not path:
            raise ConfigError(f"{item} is not of the form BENCHMARK=FILE")
        sets[benchmark_of(name)] = open_benchmark(benchmark_of(name), path, subset=found.subset).samples
    result, panels = hop_shares(sets, found.paper)
    finish(found.out, result, lambda files: pictures.shares(files, result.title, panels, BUCKETS))


def bucket(number_of: int) -> str:
    """Where a number of hops or facts belongs; 0 is not stated."""
    if number_of <= 0:
        return "not stated"
    return "<=2" if number_of <= 2 else ">=5" if number_of >= 5 else str(number_of)


def hop_shares(sets: Mapping[str, Sequence[Sample]], with_paper: bool) -> tuple[Result, dict[str, Any]]:
    """Shares in percent by both definitions; with the paper's, in its own buckets, and what they do not fit."""
    counts = {
        kind: {name: Counter(bucket(getattr(one, kind)) for one in samples) for name, samples in sets.items()}
        for kind in DEFINITIONS
    }
    panels: dict[str, dict[str, dict[str, float]]] = {}
    lines: list[Sequence[str] | str] = []
    for kind, by_set in counts.items():
        lines.append(DEFINITIONS[kind])
        bars = panels.setdefault(DEFINITIONS[kind], {})
        for name, found in by_set.items():
            shares = {one: 100 * found[one] / len(sets[name]) for one in BUCKETS}
            bars[TITLES.get(name, name)] = shares
            lines.append([TITLES.get(name, name), str(len(sets[name])), *(number(shares[one]) for one in BUCKETS)])
    header = [("", "benchmark"), ("", "questions"), *(("hops or facts", one) for one in BUCKETS)]
    body = [Sheet("Shares of questions (percent)", header, lines)]
    notes, rows = [], []
    if with_paper:
        rows = _beside_paper(sets, counts)
        columns = ("benchmark", "bucket", "paper's unit", "paper", "ours by hops", "ours by facts", "fits")
        body.append(Sheet("Beside the paper's shares (percent)", [("", one) for one in columns], rows, 3))
        told = [flag for flag in paper()["figure4"]["flags"] if flag["dataset"] in sets]
        notes = [f"{flag['id']}, {TITLES[flag['dataset']]}: {flag['text']}." for flag in told]
        notes.append(f"Shares marked with * are what the printed ones leave of 100. Fits: within {FITS:g} point.")
    data = {
        "figure": "figure4",
        "counts": {kind: {name: dict(found) for name, found in by_set.items()} for kind, by_set in counts.items()},
        "paper": [dict(zip(("benchmark", "bucket", "unit", "paper", "hops", "facts", "fits"), row, strict=True))
                  for row in rows],
        "notes": notes,
    }  # fmt: skip
    return Result("figure4", "Figure 4: hops per question", data, body, notes), panels


def _beside_paper(sets: Mapping[str, Sequence[Sample]], counts: Mapping[str, Any]) -> list[list[str]]:
    rows = []
    for name, printed in paper()["figure4"]["datasets"].items():
        for one in printed["shares"] if name in sets else ():
            ours = {}
            for kind in DEFINITIONS:
                found = counts[kind][name]
                stated = len(sets[name]) - found["not stated"]
                ours[kind] = 100 * sum(found[part] for part in one["buckets"]) / stated if stated else None
            fits = [kind for kind, share in ours.items() if share is not None and abs(share - one["share"]) <= FITS]
            star = "*" if one.get("derived") else ""
            cells = [TITLES[name], " or ".join(one["buckets"]), printed["unit"], f"{one['share']:.1f}{star}"]
            rows.append([*cells, number(ours["hops"]), number(ours["facts"]), ", ".join(fits) or "neither"])
    return rows


def _dev_key(metrics: Metrics) -> str:
    names = sorted({key for line in metrics for key in line if key.startswith("dev/")})
    return "dev/em" if "dev/em" in names else names[0] if names else ""


def _panel_sheet(arms: Mapping[str, Sequence[TrainingRun]]) -> Sheet:
    """Per arm the mean over runs; paired by seed where both have the same seeds."""
    panels = {name: [stability_panel(run.metrics) for run in runs] for name, runs in arms.items()}
    first, second = arms.values()
    found, lines = compare(first, second), []
    for name in dict.fromkeys(key for runs in panels.values() for panel in runs for key in panel):
        means = []
        for runs in panels.values():
            values = [panel[name] for panel in runs if name in panel]
            means.append(f"{fmean(values):.3g}" if values else "-")
        pair = found.get(name)
        gap = (
            [f"{pair.difference:+.3g}", f"[{pair.low:.3g}, {pair.high:.3g}]" if pair.pairs > 1 else "one pair"]
            if pair
            else []
        )
        lines.append([name, *means, *(gap or ["-", "-"]), f"{pair.sign_p:.2g}" if pair else "-"])
    header = ["", *arms, "difference", "95% t-interval", "sign test p"]
    return Sheet("Stability panel (means over runs)", [("", name) for name in header], lines)


def _equal_reward(arms: Mapping[str, Sequence[TrainingRun]]) -> Sheet:
    """Differences among steps of equal mean reward: experience raises the reward, and with it all else."""
    first, second = ([_with_rolling(run) for run in runs] for runs in arms.values())
    lines = []
    for name, key in CONDITIONED.items():
        if found := at_equal_reward(first, second, key):
            lines.append([name, f"{found[0]:+.3g}", f"{found[1]:.0%}"])
    header = [("", ""), ("", "difference"), ("", "steps with a counterpart")]
    return Sheet("At equal mean reward", header, lines)


def _with_rolling(run: TrainingRun) -> Metrics:
    rolled = series(run, "rolling_var")
    return [dict(line) | {"rolling_var": rolled.get(int(line["step"] or 0))} for line in run.metrics]


def _artefact_gap(arms: Mapping[str, Sequence[TrainingRun]]) -> str:
    gaps = []
    for run in (run for runs in arms.values() for run in runs):
        expected, measured = series(run, EXPECTED), series(run, "advantage/var")
        gaps += [abs(expected[step] - value) for step, value in measured.items() if step in expected]
    if not gaps:
        return "The dotted line is missing: the runs logged no shares of groups, or no group size."
    return f"Largest distance of the measured variance from that line: {max(gaps):.2g} over {len(gaps)} steps."


def _seed_notes(arms: Mapping[str, Sequence[TrainingRun]]) -> list[str]:
    first, second = arms.values()
    notes = []
    if [run.seed for run in first] != [run.seed for run in second]:
        notes.append("The arms have other seeds: nothing is paired.")
    if min(len(first), len(second)) < 3:
        notes.append("Fewer than three seeds: an interval over them says little.")
    lengths = {name: sorted({len(run.metrics) for run in runs}) for name, runs in arms.items()}
    if len({length for values in lengths.values() for length in values}) > 1:
        told = "; ".join(f"{name}: {', '.join(map(str, values))}" for name, values in lengths.items())
        notes.append(f"Runs of different length ({told} steps): a curve ends where the first run of its arm does.")
    return notes


def _plain(found: Any) -> dict[str, float | None]:
    return {name: None if math.isnan(value) else value for name, value in asdict(found).items()}
