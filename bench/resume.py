"""Kill train.py by SIGKILL at random points, start it again, and compare every byte with a run that was left alone.

    python bench/resume.py [FOLDER] [--quick] [--json] [--kills 20] [--seed 0]

Each kill is a run of its own: 6 lab steps, on one rank and on two (torchrun, gloo), saving synchronously and
asynchronously in turn; killed once as a whole or, with two ranks, only one of them; then the same command until it is
done. Compared: the exported policy, metrics.jsonl without times, trajectories.jsonl, and the last checkpoint (weights,
AdamW, sampler). FOLDER is that of a finished `make demo`; without one, a small lab is made first.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STEPS = 6
SMALL = (
    f"train.steps={STEPS}", "train.prompts_per_step=4", "rollout.group_size=4", "rollout.max_turn_tokens=16",
    "train.dev_every=0", "train.show_every=1", "train.save_every=2", "checkpoint.every=1", "reward.format_floor=0.5",
)  # fmt: skip
LIMIT_SECONDS = 600.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="the folder of a finished demo")
    parser.add_argument("--quick", action="store_true", help="2 kills")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        lab = arguments.folder or make_lab(Path(place) / "lab")
        result = measure(lab, Path(place), 2 if arguments.quick else arguments.kills, arguments.seed)
    print(json.dumps(result) if arguments.json else "\n".join(f"{key:<12} {value}" for key, value in result.items()))
    sys.exit(result["kills"] != result["identical"])


def make_lab(folder: Path) -> Path:
    """World and a policy that has learned just enough to answer now and then."""
    for command, out, *more in (("world", "world"), ("policy", "start", "warm_start.steps=60")):
        run([sys.executable, "-m", "hiexp.lab", command, f"out={folder / out}", *more]).wait()
    (folder / "start/policy").rename(folder / "policy")
    return folder


def measure(lab: Path, place: Path, kills: int, seed: int) -> dict[str, Any]:
    draw, whole, seconds = random.Random(seed), {}, {}
    for ranks in (1, 2):
        start = time.perf_counter()
        code = run(command(lab, place / f"whole{ranks}", ranks, False)).wait()
        assert not code, f"the run that is left alone, on {ranks} ranks: exit code {code}"
        seconds[ranks] = time.perf_counter() - start
        whole[ranks] = outcome(place / f"whole{ranks}")
    identical = 0
    for number in range(kills):
        ranks, is_async = 1 + number % 2, number % 4 >= 2
        out, step, wait = place / f"killed{number}", draw.randrange(STEPS), draw.random()
        victim = draw.choice(("all", "rank 0", "rank 1")) if ranks == 2 else "all"
        arguments = command(lab, out, ranks, is_async)
        wait *= seconds[ranks] / (2 * STEPS)
        while not kill(run(arguments), out, step, wait, victim):  # it was done before
            shutil.rmtree(out)
            wait /= 2
        found = sorted(path.name for path in (out / "checkpoints").glob("*"))
        code = run(arguments).wait()
        differing = [f"exit code {code}"] if code else differences(outcome(out), whole[ranks])
        identical += not differing
        line = f"{ranks} ranks, {victim} killed in step {step}, {' '.join(found)}: {differing or 'identical'}"
        print(line, file=sys.stderr, flush=True)
    return {"kills": kills, "identical": identical}


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [name for name in one if one[name] != other[name]]


def command(lab: Path, out: Path, ranks: int, is_async: bool) -> list[str]:
    world = lab / "world"
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    return [
        sys.executable, *launcher, str(ROOT / "train.py"), str(ROOT / "configs/lab.yaml"), *SMALL,
        f"model.path={lab / 'policy'}", f"data.train={world / 'train.jsonl'}", f"encoder.path={world / 'encoder.json'}",
        f"search.corpus=[{world / 'corpus.jsonl'}]", f"out={out}", f"checkpoint.async_save={str(is_async).lower()}",
    ]  # fmt: skip


def run(arguments: list[str]) -> subprocess.Popen[bytes]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return subprocess.Popen(arguments, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def kill(process: subprocess.Popen[bytes], out: Path, step: int, wait: float, victim: str) -> bool:
    """SIGKILL, `wait` seconds after `step` steps were logged, to all or to one worker; False if it came too late."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while process.poll() is None and logged(out) < step:
        assert time.monotonic() < deadline, f"{out.name}: no step {step} after {LIMIT_SECONDS:g} s"
        time.sleep(0.01)
    time.sleep(wait)
    family = [process.pid, *descendants(process.pid)]
    workers = [pid for pid in family if (rank := environment_of(pid).get("RANK")) and f"rank {rank}" == victim]
    for pid in workers or family:
        end(pid)
    process.wait()
    while any(Path(f"/proc/{pid}").exists() for pid in family):
        time.sleep(0.01)
    return not (out / "summary.json").exists()


def logged(out: Path) -> int:
    """Lines of metrics.jsonl; -1 before there is one."""
    try:
        return (out / "metrics.jsonl").read_bytes().count(b"\n")
    except OSError:
        return -1


def descendants(pid: int) -> list[int]:
    found = []
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in tasks.read_text().split():
            found += [int(child), *descendants(int(child))]
    return found


def environment_of(pid: int) -> dict[str, str]:
    try:
        entries = Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def end(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def outcome(out: Path) -> dict[str, Any]:
    """All that must not depend on interruptions, by name."""
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    newest = out / "checkpoints" / (out / "checkpoints/latest").read_text().strip()
    manifest = json.loads((newest / "manifest.json").read_text())
    return {
        "metrics": [{key: value for key, value in line.items() if not key.startswith("time/")} for line in metrics],
        "trajectories": (out / "trajectories.jsonl").read_bytes(),
        "policy": {path.name: path.read_bytes() for path in sorted((out / "policy").iterdir())},
        "checkpoint": {key: manifest[key] for key in ("step", "files", "state")},
        "leftovers": [
            path.name for path in out.rglob("*") if ".tmp" in path.name or path.name.endswith((".new", ".old"))
        ],
    }


if __name__ == "__main__":
    main()
