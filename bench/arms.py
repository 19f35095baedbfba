"""What dosage and the closed loop do to training: arms from one warm start, at equal rollouts, with intervals.

    python bench/arms.py runs/lab [more demo folders] [--out runs/arms] [--arms frozen closed ...] [--json] [--quick]

A demo folder is what `python -m hiexp.lab demo` wrote (world, policy, HEK of one seed). Each arm is train.py on its
world, then evaluate.py on the test questions with the HEK that the training ended with, on and off. What is finished is
not run again; two runs are the same to the byte. Differences are paired by question within a demo (bootstrap, 95%),
and by demo (t-interval) where there are several.

    grpo         no experience                       frozen    every group, the HEK as built (HiExp)
    half         frozen, half of the groups without  anneal    from every group to none
    tokens       budgets fall from all to none       control   frozen, an eighth of the groups without
    closed       the HEK is refreshed (an eighth without, for the uplift)
    grpo_half    half of the groups of `grpo`: the dose control for `half`

extra_time: seconds of refreshes / seconds of the run without them.
"""

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from hiexp.assemble import Config  # noqa: E402
from hiexp.config import ConfigError, load  # noqa: E402
from hiexp.data import read_samples, write_samples  # noqa: E402
from hiexp.evaluation import difference  # noqa: E402
from hiexp.paired import paired  # noqa: E402
from hiexp.records import read_attempts  # noqa: E402
from hiexp.refresh import held_out  # noqa: E402
from hiexp.tracking import read_metrics  # noqa: E402

ARMS: dict[str, list[str]] = {
    "grpo": ["hek.path="],
    "frozen": [],
    "half": ["dosage.dropout=0.5"],
    "anneal": ["dosage.dropout=0.0", "dosage.dropout_end=1.0"],
    "tokens": ["dosage.tokens=1.0", "dosage.tokens_end=0.0"],
    "control": ["dosage.dropout=0.125"],
    "closed": ["refresh.every=12"],
    "grpo_half": ["hek.path=", "train.prompts_per_step=6"],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("demos", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "arms")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--against", default="frozen", choices=list(ARMS))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="4 steps of two arms on 8 test questions: does it run")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.quick:
        args.arms, args.steps = ["frozen", "closed"], 4
    for demo in args.demos:
        if not (demo / "world").is_dir():
            print(f"{demo} is no demo folder (there is no world in it); make one: python -m hiexp.lab demo out={demo}")
            return 2
    arms = list(dict.fromkeys([args.against, *args.arms]))
    with ThreadPoolExecutor(args.jobs) as pool:
        jobs = [pool.submit(run_arm, demo, arm, args) for arm in arms for demo in args.demos]
        for job in jobs:
            job.result()
    results = {arm: [read_arm(args.out / demo.name / arm) for demo in args.demos] for arm in arms}
    table = {arm: summarise(results[args.against], found) for arm, found in results.items()}
    print(json.dumps(table) if args.json else show(table, args.against))
    return 0


def run_arm(demo: Path, arm: str, args: argparse.Namespace) -> None:
    """train.py and evaluate.py, unless they have finished."""
    out, quick = args.out / demo.name / arm, ["refresh.every=2", "train.prompts_per_step=2"] if args.quick else []
    seed = json.loads((demo / "summary.json").read_text())["seed"]
    world = demo / "world"
    shared = [
        str(ROOT / "configs" / "lab.yaml"),
        f"seed={seed}",
        *(f"data.{split}={world / split}.jsonl" for split in ("train", "dev", "test")),
        f"encoder.path={world / 'encoder.json'}",
        f"search.corpus=[{world / 'corpus.jsonl'}]",
    ]
    rest = out / "train.jsonl"
    if arm != "closed":  # it leaves them out by itself
        cfg = load(Config, [*shared, "model.path=", "out=", "refresh.every=1"])
        write_samples(rest, held_out(read_samples(world / "train.jsonl"), cfg.refresh, seed)[1])
        shared.append(f"data.train={rest}")
    train = [f"train.steps={args.steps}", "train.dev_every=0", "train.show_every=0"]
    train.append(f"hek.path={demo / 'hek' / 'hek'}")
    if not (out / "train" / "summary.json").exists():
        settings = [*train, *ARMS[arm], *(quick if arm == "closed" else [])]
        call("train.py", [*shared, f"model.path={demo / 'policy'}", f"out={out / 'train'}", *settings], out)
    hek = json.loads((out / "train" / "summary.json").read_text())["hek"] or demo / "hek" / "hek"
    if not (out / "eval" / "summary.json").exists():
        settings = [f"model.path={out / 'train' / 'policy'}", f"hek.path={hek}", f"out={out / 'eval'}"]
        call("evaluate.py", [*shared, *settings, *(["data.limit=8"] if args.quick else [])], out)


def call(script: str, settings: list[str], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    log = out / f"{script}.log"
    with log.open("w") as stream:
        command = [sys.executable, str(ROOT / script), *settings]
        code = subprocess.run(
            command, stdout=stream, stderr=stream, env=os.environ | {"OMP_NUM_THREADS": "1"}
        ).returncode
    if code:
        raise ConfigError(f"{script} failed with {code}; see {log}")


def read_arm(folder: Path) -> dict[str, Any]:
    metrics = read_metrics(folder / "train")
    spent = sum(line.get("time/refresh") or 0.0 for line in metrics)
    rest = sum(line.get(name) or 0.0 for line in metrics for name in ("time/rollout", "time/update", "time/sync"))
    return {
        "attempts": {
            store: read_attempts(folder / "eval" / f"samples_{store}_sampled.jsonl") for store in ("hek_on", "hek_off")
        },
        "reward": [line["reward/mean"] or 0.0 for line in metrics],
        "hinted": [line.get("reward/hinted") for line in metrics],
        "extra_time": spent / rest,
        "refreshes": [
            {key.removeprefix("refresh/"): value for key, value in line.items() if key.startswith("refresh/")}
            for line in metrics
            if "refresh/accepted" in line
        ],
    }


def summarise(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> dict[str, Any]:
    """Sampled EM of an arm by demo, HEK on and off, and its difference to another arm."""
    row: dict[str, Any] = {
        "extra_time": [one["extra_time"] for one in after],
        "refreshes": [one["refreshes"] for one in after],
    }
    row["reward"] = [sum(one["reward"]) / len(one["reward"]) for one in after]
    for store in ("hek_on", "hek_off"):
        means = [[mean_em(one["attempts"][store]) for one in arm] for arm in (before, after)]
        gains = [
            difference(b["attempts"][store], a["attempts"][store], "em") for b, a in zip(before, after, strict=True)
        ]
        over = paired(*means) if len(after) > 1 else None
        row[store] = {
            "em": means[1],
            "difference": [[gain.mean, gain.low, gain.high] for gain in gains],
            "over_demos": [over.difference, over.low, over.high] if over else None,
        }
    return row


def mean_em(attempts: list[Any]) -> float:
    return sum(one.scores["em"] for one in attempts) / len(attempts)


def show(table: dict[str, Any], against: str) -> str:
    lines = [f"sampled EM in percent, difference to {against} [95%]; one value per demo, then over demos"]
    for arm, row in table.items():
        for store in ("hek_on", "hek_off"):
            cells = [
                f"{100 * em:.1f} ({100 * mean:+.1f} [{100 * low:.1f}, {100 * high:.1f}])"
                for em, (mean, low, high) in zip(row[store]["em"], row[store]["difference"], strict=True)
            ]
            if row[store]["over_demos"]:
                mean, low, high = (100 * value for value in row[store]["over_demos"])
                cells.append(f"all {mean:+.1f} [{low:.1f}, {high:.1f}]")
            lines.append(f"{arm:10} {store:8} " + "  ".join(cells))
        rewards = " ".join(f"{value:.3f}" for value in row["reward"])
        extra = " ".join(f"{100 * value:.1f}%" for value in row["extra_time"])
        lines.append(f"{arm:10} mean reward {rewards}; extra time of refreshes {extra}")
    return "\n".join(lines)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as error:
        sys.exit(f"error: {error}")
