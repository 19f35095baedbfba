"""The cost table: hours and tokens of making experience, of training with it and without, and of evaluating.

A run folder says itself what it is: build_hek.py, train.py and evaluate.py leave different files. Hours are those of
the process that logged them; `--devices` turns them into device hours.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from hiexp import pictures
from hiexp.arms import read_arms
from hiexp.config import ConfigError, read_yaml
from hiexp.paper_rows import paper
from hiexp.sheets import Result, Sheet, number
from hiexp.tables import finish, parser_of
from hiexp.tracking import iter_trajectories, read_metrics

BUILD, TRAIN, TRAIN_HIEXP, EVALUATE = "experience", "training", "training with experience", "evaluation"


@dataclass(frozen=True)
class Stage:
    """A part of a run. None = not logged."""

    kind: str
    name: str
    run: str
    wall: float | None = None
    """seconds"""
    cpu: float | None = None
    """seconds of all threads of one process"""
    tokens: float | None = None
    """read and written by a model; of rollouts everything in the contexts"""
    written: float | None = None
    """tokens that a model wrote"""
    calls: float | None = None
    """trajectories, replies or attempts"""
    price: float | None = None


def cost(command: str, argv: Sequence[str]) -> None:
    parser = parser_of(command, "Hours and tokens of build_hek.py, train.py and evaluate.py, and the overhead.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="their folders, in any order")
    parser.add_argument("--devices", type=int, default=1, metavar="N", help="GPUs (or processes) that each run had")
    parser.add_argument("--paper", action="store_true", help="the paper's figures beside ours")
    found = parser.parse_args(argv)
    if found.devices < 1:
        raise ConfigError(f"--devices {found.devices} must be at least 1")
    pictures.check()
    stages = [stage for run in found.runs for stage in read_stages(Path(run))]
    result = cost_result(stages, found.devices, found.paper)
    known = [stage for stage in stages if stage.wall is not None]
    hours = [
        pictures.Dot(value, value, value) for value in (_hours(stage.wall) for stage in known) if value is not None
    ]
    names = [f"{stage.name} ({Path(stage.run).name})" for stage in known]
    finish(found.out, result, lambda files: pictures.dots(files, "Hours", names, {"wall hours": {"ours": hours}}))


def read_stages(run: Path) -> list[Stage]:
    """What a run folder tells; ConfigError for a folder of none of the three scripts."""
    if not run.is_dir():
        raise ConfigError(f"no such folder: {run}; give folders of build_hek.py, train.py or evaluate.py")
    if (run / "metrics.jsonl").is_file():
        return [_training(run)]
    if (run / "evaluation.json").is_file():
        return _evaluation(run)
    summary = _summary(run)
    if "pairs" in summary or (run / "kept").is_dir():
        return _build(run, summary)
    raise ConfigError(f"{run} is no finished run of build_hek.py, train.py or evaluate.py")


def overhead(stages: Iterable[Stage]) -> dict[str, float]:
    """What experience costs on top, in percent: making it, per training run; and a step of training with it."""
    walls: dict[str, list[float]] = {}
    calls: dict[str, list[float]] = {}
    for stage in stages:
        if stage.wall is not None:
            walls.setdefault(stage.kind, []).append(stage.wall)
            calls.setdefault(stage.kind, []).append(stage.calls or 0.0)
    found = {}
    trained = walls.get(TRAIN_HIEXP) or walls.get(TRAIN)
    if BUILD in walls and trained:
        found["building, of one training run"] = 100 * sum(walls[BUILD]) / fmean(trained)
    if all(kind in walls and all(calls[kind]) for kind in (TRAIN, TRAIN_HIEXP)):
        plain, hiexp = (sum(walls[kind]) / sum(calls[kind]) for kind in (TRAIN, TRAIN_HIEXP))
        found["a trajectory of training with experience, against without"] = 100 * (hiexp / plain - 1)
    return found


def cost_result(stages: Sequence[Stage], devices: int, with_paper: bool) -> Result:
    lines = []
    for stage in stages:
        wall, cpu = _hours(stage.wall), _hours(stage.cpu)
        device = wall * devices if wall is not None else None
        counts = [_count(value) for value in (stage.calls, stage.tokens, stage.written)]
        price = "-" if stage.price is None else f"{stage.price:.3g}"
        hours = ["-" if value is None else f"{value:.3g}" for value in (wall, device, cpu)]
        lines.append([stage.kind, stage.name, Path(stage.run).name, *hours, *counts, price])
    names = ("kind", "stage", "run", "wall hours", "device hours", "CPU hours", "calls", "tokens", "written", "price")
    body = [Sheet("Cost", [("", name) for name in names], lines, 3)]
    above = overhead(stages)
    if above:
        rows = [[name, f"{number(value)}%"] for name, value in above.items()]
        body.append(Sheet("Overhead of experience", [("", ""), ("", "percent")], rows))
    notes = [
        f"Device hours: wall hours times {devices} (--devices). CPU hours are those of one process.",
        "Calls: trajectories of a build or a training run, replies of a reflector, attempts of an evaluation.",
        "- is not logged. Training counts its steps; validation and checkpoints between them are not in it.",
    ]
    printed = paper()["cost"] if with_paper else None
    if printed:
        rows = [
            ["hours to build experience", f"below {printed['hek_gpu_hours_below']} GPU-hours"],
            ["distillation", printed["distillation"]],
            ["clustering", printed["clustering"]],
            ["training", f"about {printed['training_hours']} hours as printed"],
            ["overhead", f"below {printed['overhead_percent_below']}%"],
        ]
        body.append(Sheet("The paper's", [("", ""), ("", "printed")], rows, 2))
        notes += [f"{flag['id']}: {flag['text']}." for flag in printed["flags"]]
    data = {
        "stages": [asdict(stage) for stage in stages],
        "devices": devices,
        "overhead_percent": above,
        "notes": notes,
    }
    return Result("cost", "Cost of experience, training and evaluation", data | {"paper": printed}, body, notes)


def _training(run: Path) -> Stage:
    metrics = read_metrics(run)
    if not metrics:
        raise ConfigError(f"{run}: no step was logged yet")
    config = read_yaml(run / "config.yaml") if (run / "config.yaml").is_file() else {}
    with_hek = bool((config.get("hek") or {}).get("path") or (config.get("refresh") or {}).get("every"))
    siblings, prompts = (
        (config.get("rollout") or {}).get("group_size"),
        (config.get("train") or {}).get("prompts_per_step"),
    )
    per_step = siblings * prompts if siblings and prompts else None
    tokens = [line["rollout/tokens"] for line in metrics if line.get("rollout/tokens") is not None]
    return Stage(
        TRAIN_HIEXP if with_hek else TRAIN,
        f"{len(metrics)} steps, {_median_step(metrics):.3g} s each",
        str(run),
        wall=sum(_step_seconds(line) for line in metrics),
        cpu=_total(metrics, ("time/rollout_cpu", "time/update_cpu", "time/sync_cpu")),
        tokens=sum(value or 0.0 for value in tokens) * per_step if tokens and per_step else None,
        written=_total(metrics, ("rollout/trained_tokens",)),
        calls=float(per_step * len(metrics)) if per_step else None,
    )


def _step_seconds(line: Mapping[str, float | None]) -> float:
    whole = line.get("time/step")
    parts = (line.get(name) or 0.0 for name in ("time/rollout", "time/update", "time/sync"))
    return whole if whole is not None else sum(parts)


def _median_step(metrics: Sequence[Mapping[str, float | None]]) -> float:
    return median(_step_seconds(line) for line in metrics)


def _total(metrics: Sequence[Mapping[str, float | None]], names: Sequence[str]) -> float | None:
    values = [value for line in metrics for name in names if (value := line.get(name)) is not None]
    return sum(values) if values else None


def _build(run: Path, summary: Mapping[str, Any]) -> list[Stage]:
    """Rollouts, then everything that a model wrote about them."""
    stages = []
    if (run / "trajectories.jsonl").is_file():
        count = tokens = written = 0
        for _, one in iter_trajectories(run / "trajectories.jsonl"):
            count, tokens = count + 1, tokens + one.num_tokens
            written += sum(one.response_mask)
        time, cpu = summary.get("time/rollout"), summary.get("time/rollout_cpu")
        stages.append(Stage(BUILD, "rollouts", str(run), time, cpu, float(tokens), float(written), float(count)))
    read = wrote = replies = 0
    file = run / "kept" / "replies.jsonl"
    for record in map(json.loads, file.read_text(encoding="utf-8").splitlines()) if file.is_file() else ():
        replies, read = replies + 1, read + record.get("prompt_tokens", 0)
        wrote += record.get("reply_tokens", 0)
    known = file.is_file()
    time, cpu = summary.get("time/build"), summary.get("time/build_cpu")
    counts = (float(read + wrote), float(wrote), float(replies)) if known else (None, None, None)
    return [*stages, Stage(BUILD, "lessons, clusters, patterns", str(run), time, cpu, *counts)]


def _evaluation(run: Path) -> list[Stage]:
    """One entry per arm; seconds are those of its attempts, where they were measured."""
    stages = []
    for arm in read_arms([run]):
        attempts = arm.attempts
        seconds = sum(attempt.seconds for attempt in attempts)
        prices = [attempt.cost for attempt in attempts if attempt.cost is not None]
        name = f"{arm.label}, {arm.benchmark or 'data.test'}, {arm.decoding}"
        tokens, written = (
            sum(a.prompt_tokens + a.policy_tokens for a in attempts),
            sum(a.policy_tokens for a in attempts),
        )
        stages.append(
            Stage(
                EVALUATE, name, str(arm.run), seconds or None, None, float(tokens), float(written),
                float(len(attempts)), sum(prices) if prices else None,
            )
        )  # fmt: skip
    summary = _summary(run)
    wall = [value for key, value in summary.items() if key.startswith("time/") and not key.endswith("_cpu")]
    if wall:
        cpu = [value for key, value in summary.items() if key.startswith("time/") and key.endswith("_cpu")]
        stages.append(Stage(EVALUATE, "all arms together", str(run), sum(wall), sum(cpu) if cpu else None))
    return stages


def _summary(run: Path) -> Mapping[str, Any]:
    path = run / "summary.json"
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise ConfigError(f"{path} is damaged ({error}); run the script again") from error


def _hours(seconds: float | None) -> float | None:
    return None if seconds is None else seconds / 3600


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"
