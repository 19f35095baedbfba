"""What the lab study writes of itself: results.jsonl, tuning.json, summary.json, claims.md, figure.svg, report.html.

Only what has finished is in them, and every number can be traced to a job's folder. The same functions read a running
study (jobs=0), so the page can be looked at while the jobs go on.
"""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

from hiexp.paired import Paired
from hiexp.report import write_page
from hiexp.run_panel import Metrics
from hiexp.study_arms import ARMS, TRAINED, TUNED
from hiexp.study_figure import figure
from hiexp.study_plan import StudyConfig, grid, store_folder, tune_jobs
from hiexp.study_stats import (
    BY_SPLIT,
    CLAIMS,
    MACRO,
    OURS,
    SPLITS,
    Cell,
    Claim,
    Results,
    Row,
    claim_rows,
    compare,
    mean_over,
    read_results,
    stability_rows,
    stability_verdict,
)
from hiexp.study_stores import BUILT, right_share
from hiexp.tracking import read_metrics, write_json

SHOWN = ("grpo", "e2_e1", "half", "gspo", "gspo_e2_e1")
"""arms of the figure"""
STABILITY = (("e2_e1", "grpo"), ("half", "grpo"), ("filler", "grpo"), ("gspo_e2_e1", "gspo"))
"""pairs that the panel compares; the paper's claim is the first"""
STYLE = "td.says{text-align:left;white-space:normal;min-width:260px} td.word{text-align:left} .figure svg{width:100%}"


def write_study(out: Path, cfg: StudyConfig, finished: Collection[str]) -> dict[str, Any]:
    """Write everything from the finished jobs; returns what summary.json holds."""
    files = sorted(out / name / "results.jsonl" for name in finished if (out / name / "results.jsonl").is_file())
    (out / "results.jsonl").write_text("".join(file.read_text(encoding="utf-8") for file in files), encoding="utf-8")
    results, runs = read_results(files), _runs(out, cfg, finished)
    tuning = _tuning(out, cfg, finished)
    write_json(out / "tuning.json", tuning)
    summary = summarise(results, runs)
    summary |= {"lessons": _lessons(out, cfg, finished), "tuning": tuning, "cost": _cost(out, finished)}
    write_json(out / "summary.json", _plain(summary))
    drawing = figure({arm: [metrics for _, metrics in sorted(runs.get(arm, {}).items())] for arm in SHOWN})
    (out / "figure.svg").write_text(drawing, encoding="utf-8")
    (out / "claims.md").write_text(markdown(summary), encoding="utf-8")
    write_page(out / "report.html", "Lab study", page(summary, results, drawing, cfg), STYLE)
    return summary


def summarise(results: Results, runs: Mapping[str, Mapping[Cell, Metrics]]) -> dict[str, Any]:
    """Numbers only: arms, claims by decoding, key comparisons by split, stability."""
    claims = {
        claim.number: {
            "says": claim.says,
            "lacking": _lacking(results, claim),
            **{how: [row.to_json() for row in claim_rows(results, claim, MACRO, how)] for how in ("sampled", "greedy")},
        }
        for claim in _claims(results)
    }
    stability = {}
    for of, against in STABILITY:
        if runs.get(of, {}).keys() & runs.get(against, {}).keys():
            plain, matched = stability_rows(runs[of], runs[against])
            stability[f"{of} - {against}"] = {
                "panel": {name: vars(found) for name, found in plain.items()},
                "at_equal_reward": {
                    name: vars(found) | {"counterpart": share} for name, (found, share) in matched.items()
                },
                "verdict": stability_verdict(plain, matched),
            }
    return {
        "arms": arm_table(results),
        "claims": claims,
        "by_split": [row for split in SPLITS for row in _split_rows(results, split)],
        "stability": stability,
    }


def _claims(results: Results) -> tuple[Claim, ...]:
    """The paper's claims, and those of ours of which something has finished."""
    return *CLAIMS, *(one for one in OURS if claim_rows(results, one))


def _lacking(results: Results, claim: Claim) -> str:
    """Says which arms its other comparisons wait for."""
    have = {row.says for row in claim_rows(results, claim)}
    sides = {side for says, *pair in (*claim.rows, *claim.controls) if says not in have for side in pair}
    names = sorted({arm for arm, hek in sides if not results.cells((arm, hek))}, key=list(ARMS).index)
    return f"Not finished, and so not here: {', '.join(names)}." if names else ""


def arm_table(results: Results) -> dict[str, Any]:
    """Arm / on or off -> cells, sampled and greedy macro EM, sampled EM by split; means over cells with t-intervals."""
    table = {}
    for arm in ARMS:
        for hek in ("on", "off"):
            if not (cells := results.cells((arm, hek))):
                continue
            row: dict[str, Any] = {"cells": len(cells), "shown": fmean(results.shown[arm, hek])}
            for name, split, decoding in (
                ("sampled", MACRO, "sampled"),
                ("greedy", MACRO, "greedy"),
                *((split, split, "sampled") for split in SPLITS),
            ):
                values = [v for c in cells if (v := results.value((arm, hek), c, split, decoding)) is not None]
                row[name] = mean_over(values) if values else None
            table[f"{arm} / {hek}"] = row
    return table


def _split_rows(results: Results, split: str) -> list[dict[str, Any]]:
    found = (compare(results, says, of, against, split) for says, of, against in BY_SPLIT)
    return [row.to_json() | {"split": split} for row in found if row]


def _runs(out: Path, cfg: StudyConfig, finished: Collection[str]) -> dict[str, dict[Cell, Metrics]]:
    """Metrics of every finished training run, by arm and cell."""
    runs: dict[str, dict[Cell, Metrics]] = {}
    for arm in (name for name, one in TRAINED.items() if one.steps):
        for w in range(cfg.size.warm_starts):
            for seed in cfg.seeds:
                if (name := f"w{w}s{seed}/{arm}") in finished:
                    runs.setdefault(arm, {})[w, seed] = read_metrics(out / name / "run")
    return runs


def _lessons(out: Path, cfg: StudyConfig, finished: Collection[str]) -> dict[str, Any]:
    """Who wrote them -> level -> share of right plans, mean over cells with its t-interval."""
    table: dict[str, Any] = {}
    for store in BUILT:
        found: dict[str, list[float]] = {}
        for cell in (f"w{w}s{seed}" for w in range(cfg.size.warm_starts) for seed in cfg.seeds):
            if f"{cell}/{store}" in finished:
                for level, share in right_share(store_folder(out, cell, store)).items():
                    found.setdefault(level, []).append(share)
        if found:
            table[store] = {level: mean_over(shares) for level, shares in found.items()}
    return table


def _tuning(out: Path, cfg: StudyConfig, finished: Collection[str]) -> dict[str, Any]:
    """Arm -> validation EM of every point, and the one that was chosen."""
    points, table = grid(cfg.size), {}
    for arm in TUNED:
        jobs = tune_jobs(arm, cfg.size)
        if len(points) == 1 or not all(name in finished for runs in jobs for name in runs):
            continue
        scores = [[json.loads((out / name / "done.json").read_text())["score"] for name in runs] for runs in jobs]
        means = [fmean(row) for row in scores]
        best = means.index(max(means))
        table[arm] = {
            "points": [{"lr": lr, "clip": clip, "em": row} for (lr, clip), row in zip(points, scores, strict=True)],
            "chosen": {"lr": points[best][0], "clip": points[best][1]},
        }
    return table


def _cost(out: Path, finished: Collection[str]) -> dict[str, Any]:
    """CPU seconds by kind of job, and of an arm's runs by their mean."""
    spent: dict[str, list[float]] = {}
    for name in finished:
        seconds = json.loads((out / name / "done.json").read_text())["cpu_seconds"]
        spent.setdefault("tune" if name.startswith("tune/") else name.split("/", 1)[1], []).append(seconds)
    table = {name: {"jobs": len(v), "mean": fmean(v), "sum": sum(v)} for name, v in sorted(spent.items())}
    return table | {"all": {"jobs": len(finished), "sum": sum(sum(v) for v in spent.values())}}


def page(summary: Mapping[str, Any], results: Results, drawing: str, cfg: StudyConfig) -> list[str]:
    """Markup of the report's body."""
    size = cfg.size
    cells = len(results.cells(("grpo", "off")))
    held_out = ", ".join(size.held_out) or "none"
    head = (
        f"<p>{len(cfg.seeds)} worlds x {size.warm_starts} warm starts are planned; GRPO has finished in {cells} of "
        f"these cells. Every arm trains for {size.steps} steps of {size.prompts} questions x {size.group} attempts. "
        "EM in percent, macro mean over families; differences are paired within a cell, with 95% t-intervals over "
        "cells, not adjusted for their number. Families that "
        f"neither experience nor RL saw: {escape(held_out)}.</p>"
    )
    parts = [head, "<h2>Claims</h2>"]
    for claim in _claims(results):
        lacking = f'<p class="soft">{_lacking(results, claim)}</p>' if _lacking(results, claim) else ""
        parts.append(f"<h3>({claim.number}) {escape(claim.says)}</h3>{_rows(claim_rows(results, claim))}{lacking}")
    parts.append("<h3>(v) training is stabler</h3>")
    for name, found in summary["stability"].items():
        parts.append(f"<p><b>{escape(name)}</b>: {escape(found['verdict'])}</p>{_stability(found)}")
    parts.append(f'<h2>The figure of the paper, from these runs</h2><div class="figure">{drawing}</div>')
    parts.append(f"<h2>Arms</h2>{_arms(summary['arms'])}")
    for how in ("greedy",):
        parts.append(f"<h2>The claims with {how} decoding</h2>")
        parts += [f"<h3>({c.number})</h3>{_rows(claim_rows(results, c, MACRO, how))}" for c in _claims(results)]
    parts.append("<h2>By test split</h2>" + _by_split(summary["by_split"]))
    parts.append("<h2>Lessons with the right plan</h2>" + _lesson_table(summary["lessons"]))
    parts.append("<h2>Tuning</h2>" + _tuning_table(summary["tuning"], len(grid(size))))
    parts.append("<h2>Cost</h2>" + _cost_table(summary["cost"]))
    return parts


def markdown(summary: Mapping[str, Any]) -> str:
    """The claims and their controls as tables of Markdown: sampled and greedy differences in points."""
    lines = []
    for number, claim in summary["claims"].items():
        lines += [f"**({number}) {claim['says']}**", ""]
        lines.append("| comparison | of | against | sampled [95%] | cells | by warm start | greedy [95%] | verdict |")
        lines.append("|" + "---|" * 8)
        greedy = {row["says"]: row for row in claim["greedy"]}
        for row in claim["sampled"]:
            other = greedy[row["says"]]
            warm = ", ".join(f"{100 * gain:+.1f}" for _, gain in sorted(row["per_warm_start"].items()))
            cells = (
                row["says"],
                _score(row["second"]),
                _score(row["first"]),
                _difference(row),
                str(row["pairs"]),
                warm,
            )
            lines.append("| " + " | ".join((*cells, _difference(other), row["verdict"] or "control")) + " |")
        lines += ["", claim["lacking"], ""] if claim["lacking"] else [""]
    if not summary["stability"]:
        lines += ["**(v) training is stabler**", "", f"Not finished: {', '.join(arm for arm, _ in STABILITY)}.", ""]
    for name, found in summary["stability"].items():
        lines += [f"**(v) training is stabler: {name}: {found['verdict']}**", "", f"| {' | '.join(STABLE[:-1])} |"]
        lines += ["|---" * (len(STABLE) - 1) + "|", *(f"| {' | '.join(row[:-1])} |" for row in _stable_rows(found)), ""]
    lines += [
        "**by test split, sampled**",
        "",
        f"| comparison | {' | '.join(SPLITS)} |",
        "|---" * (1 + len(SPLITS)) + "|",
    ]
    for says in dict.fromkeys(row["says"] for row in summary["by_split"]):
        found = {row["split"]: _difference(row) for row in summary["by_split"] if row["says"] == says}
        lines.append(f"| {says} | {' | '.join(found.get(split, '-') for split in SPLITS)} |")
    return "\n".join([*lines, ""])


def _difference(row: Mapping[str, Any]) -> str:
    return f"{100 * row['difference']:+.1f} {_interval(row['low'], row['high'], 100)}"


def _rows(rows: Sequence[Row]) -> str:
    head = (
        "comparison",
        "of",
        "against",
        "difference",
        "95% interval",
        "sign test p",
        "cells",
        "by warm start",
        "verdict",
    )
    lines = []
    for row in rows:
        warm = ", ".join(f"{100 * gain:+.1f}" for _, gain in sorted(row.per_warm_start.items()))
        cells = (escape(row.says), _score(row.found.second), _score(row.found.first), *_gap(row.found))
        lines.append([*cells, f"{row.found.sign_p:.2g}", str(row.found.pairs), warm, row.verdict or "control"])
    return _table(head, lines)


def _by_split(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        [row["split"].replace("_", " ") + ": " + escape(row["says"]), _score(row["second"]), _score(row["first"]),
         f"{100 * row['difference']:+.1f}", _interval(row["low"], row["high"], 100), str(row["pairs"])]
        for row in rows
    ]  # fmt: skip
    return _table(("split and comparison", "of", "against", "difference", "95% interval", "cells"), lines)


def _arms(table: Mapping[str, Any]) -> str:
    columns = ("sampled", "greedy", *SPLITS)
    lines = []
    for name, row in table.items():
        says = f"{escape(name)}<br><small>{escape(ARMS[name.split(' / ')[0]].says)}</small>"
        lines.append([says, str(row["cells"]), f"{100 * row['shown']:.0f}%", *(_mean(row[c]) for c in columns)])
    return _table(("arm / experience", "cells", "shown", *(c.replace("_", " ") for c in columns)), lines)


STABLE = ("number", "of", "against", "difference", "95% interval", "sign test p", "cells", "steps with a counterpart")


def _stability(found: Mapping[str, Any]) -> str:
    return _table(STABLE, _stable_rows(found))


def _stable_rows(found: Mapping[str, Any]) -> list[list[str]]:
    lines = [
        [name, f"{one['second']:.3g}", f"{one['first']:.3g}", f"{one['difference']:+.3g}",
         _interval(one["low"], one["high"], 1), f"{one['sign_p']:.2g}", str(one["pairs"]), ""]
        for name, one in found["panel"].items()
    ]  # fmt: skip
    return lines + [
        [f"{name}, at equal reward", "", "", f"{one['difference']:+.3g}", _interval(one["low"], one["high"], 1),
         f"{one['sign_p']:.2g}", str(one["pairs"]), f"{100 * one['counterpart']:.0f}%"]
        for name, one in found["at_equal_reward"].items()
    ]  # fmt: skip


def _tuning_table(tuning: Mapping[str, Any], points: int) -> str:
    if points == 1:
        return "<p>One learning rate and one clip range: nothing was chosen.</p>"
    lines = []
    for arm, found in tuning.items():
        for point in found["points"]:
            is_best = all(point[key] == value for key, value in found["chosen"].items())
            scores = ", ".join(f"{100 * value:.1f}" for value in point["em"])
            mean = f"{100 * fmean(point['em']):.1f}"
            lines.append([arm, f"{point['lr']:g}", point["clip"], scores, mean, "chosen" if is_best else ""])
    return _table(("arm", "learning rate", "clip", "validation EM by warm start", "mean", ""), lines)


def _lesson_table(lessons: Mapping[str, Any]) -> str:
    levels = sorted({level for row in lessons.values() for level in row})
    return _table(
        ("written by", *levels), [[name, *(_mean(row.get(x)) for x in levels)] for name, row in lessons.items()]
    )


def _cost_table(cost: Mapping[str, Any]) -> str:
    lines = [
        [name, str(row["jobs"]), f"{row['mean']:.0f}" if "mean" in row else "", f"{row['sum']:.0f}"]
        for name, row in cost.items()
    ]
    return _table(("job", "finished", "mean CPU seconds", "sum"), lines)


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    if not lines:
        return '<p class="soft">Nothing of this has finished yet.</p>'
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(
        "<tr>"
        + "".join(f'<td class="{"says" if i == 0 else "word"}">{cell}</td>' for i, cell in enumerate(line))
        + "</tr>"
        for line in lines
    )
    return f'<div class="scroll"><table><tr>{top}</tr>{body}</table></div>'


def _score(value: float) -> str:
    return f"{100 * value:.1f}"


def _gap(found: Paired) -> tuple[str, str]:
    return f"{100 * found.difference:+.1f}", _interval(found.low, found.high, 100)


def _interval(low: float | None, high: float | None, scale: float) -> str:
    if low is None or high is None or math.isnan(low):
        return "-"
    return f"[{scale * low:.3g}, {scale * high:.3g}]"


def _mean(values: Sequence[float] | None) -> str:
    if not values:
        return "-"
    mean, low, high = values
    return _score(mean) if math.isnan(low) else f"{_score(mean)} <small>[{100 * low:.1f}, {100 * high:.1f}]</small>"


def _plain(value: Any) -> Any:
    """JSON has no nan."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
