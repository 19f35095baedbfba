"""CPU time, peak memory and gradient error of the fused token-mask head, beside other trainers' heads.

    python bench/loss.py [--quick] [--json]          # peers: see requirements-bench.txt; absent ones are null

Every head gets the same hidden states (H=896), weights and objective: GRPO (token) or GSPO (sequence) with a k3 term. A
part of the rows is trained ("kept"), the rest is prompt and documents. "As it runs" means what the library's trainer
does on a CPU: trl, liger, verl and naive score every row. trl_kept, liger_kept and verl_kept are the same kernels fed
the trained rows alone. ratio = CPU time theirs / ours, so above 1 we are faster.

How it is measured: one process and one thread; all heads in turn, round after round; the first round is dropped (first
touch of memory, and where errors against float64 are taken), and the median of the rounds' ratios is reported. malloc
keeps what is freed (MALLOC_MMAP_MAX_=0, MALLOC_TRIM_THRESHOLD_), as the system hands out fresh pages far more slowly
than they are used. Peak memory is of a fresh process per head with malloc as it is: VmHWM after clear_refs, less what
was there before. The formula is of what exists at once, C = rows of a chunk, s = bytes of the dtype:
C V (4 + s) logits and their gradient, V H 4 head gradient, N H s gradient of the hidden states; in bfloat16 V H s more,
the head gradient in the dtype of the weights that autograd asks for.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

import torch  # noqa: E402
from peers import HEADS, exact, gradient_error, gradients, make_problem, missing, ours  # noqa: E402

from hiexp.fused import CHUNK_ROWS, SEQUENCE_CHUNKS  # noqa: E402

H = 896
SEQUENCES = 8
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "1000000000000", "OMP_NUM_THREADS": "1"}
LIMIT = {"fp32": 2e-6, "bf16": 5e-3}
"""largest gradient error"""


@dataclass(frozen=True)
class Case:
    V: int
    N: int
    kept: int
    """percent"""
    dtype: str
    mode: str

    def problem(self) -> Any:
        return make_problem(self.V, H, SEQUENCES, self.N // SEQUENCES, self.kept / 100, DTYPES[self.dtype], self.mode)

    @property
    def formula_mb(self) -> float:
        size = DTYPES[self.dtype].itemsize
        rows = CHUNK_ROWS * (SEQUENCE_CHUNKS if self.mode == "sequence" else 1)
        chunk = min(rows, self.N * self.kept // 100)
        head = self.V * H * (4 if size == 4 else 4 + size)
        return (chunk * self.V * (4 + size) + head + self.N * H * size) / 1e6


def cases(quick: bool) -> list[Case]:
    if quick:
        some = [(128, 100, "fp32", "token"), (256, 30, "fp32", "token"), (512, 30, "bf16", "sequence")]
        return [Case(32768, *one) for one in some]
    sizes = ((32768, 1024), (151936, 512))
    rest = [(k, d, m) for d in ("fp32", "bf16") for m in ("token", "sequence") for k in (100, 40, 30, 20)]
    return [Case(*size, *one) for size in sizes for one in rest]


def measure(case: Case, names: Sequence[str], rounds: int) -> dict[str, Any]:
    """Ratios, our CPU seconds and rate, and everyone's gradient error."""
    problem = case.problem()
    truth = exact(problem)
    errors, times = {}, {name: [] for name in names}
    for number in range(rounds + 1):
        for name in names:
            start = time.process_time()
            found = gradients(HEADS[name], problem)
            times[name].append(time.process_time() - start)
            if number == 0:
                errors[name] = gradient_error(found, truth)
            del found
    mine = times["ours"][1:]
    ratio = {
        name: statistics.median(theirs / own for theirs, own in zip(times[name][1:], mine, strict=True))
        for name in names
        if name != "ours"
    }
    products = 6 * H * case.V * int(problem.mask.sum())
    return {
        **asdict(case),
        "ratio": {name: round(ratio[name], 3) if name in ratio else None for name in HEADS if name != "ours"},
        "grad_err": errors["ours"],
        "errors": errors,
        "cpu_s": round(statistics.median(mine), 4),
        "gflop_per_cpu_s": round(products / statistics.median(mine) / 1e9, 1),
    }


def accuracy() -> list[dict[str, Any]]:
    """Our gradient error in the modes that the cases do not have: entropy bonus, temperature, two passes."""
    rows = []
    variants = {
        "entropy": ("token", {"entropy_coef": 0.01}, None),
        "temperature 0.7": ("token", {"temperature": 0.7}, None),
        "small chunks": ("token", {}, 7),
        "sequence, two passes": ("sequence", {}, 3),
        "sequence, entropy, temperature": ("sequence", {"entropy_coef": 0.01, "temperature": 1.3}, None),
    }
    for dtype in DTYPES:
        for label, (mode, settings, chunk_rows) in variants.items():
            problem = make_problem(4096, H, SEQUENCES, 64, 0.5, DTYPES[dtype], mode, **settings)
            found = gradients(lambda p, c=chunk_rows: ours(p, c), problem)
            rows.append({"mode": label, "dtype": dtype, "grad_err": gradient_error(found, exact(problem))})
    return rows


def peak_mb(name: str, case: Case) -> float:
    """Peak resident memory of one forward and backward above what its inputs take, in a process of its own."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
    command = [sys.executable, __file__, "--peak", name, "--case", json.dumps(asdict(case))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def measure_peak(name: str, case: Case) -> float:
    gradients(HEADS[name], Case(512, 64, 50, case.dtype, case.mode).problem())  # loads what is loaded on first use
    problem = case.problem()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_mb("VmRSS")
    gradients(HEADS[name], problem)
    return _status_mb("VmHWM") - before


def _status_mb(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key + ":")).split()[1]) * 1024 / 1e6


def peaks(case: Case, names: Sequence[str], everyone: bool) -> dict[str, float | None]:
    """Ours against the formula; the others where asked."""
    chosen = [name for name in names if name == "ours" or (everyone and not name.endswith("_kept"))]
    found = {name: round(peak_mb(name, case), 1) for name in chosen}
    return {name: found.get(name) for name in HEADS} | {"formula": round(case.formula_mb, 1)}


def failures(result: dict[str, Any]) -> list[str]:
    """The targets that a result misses; a peer that is not there decides nothing."""
    missed = []
    for case in result["cases"]:
        ratio, label = case["ratio"], _label(case)
        floors = {"trl": 3.0, "liger": 3.0, "verl": 3.0} if case["kept"] <= 30 else {}
        floors |= dict.fromkeys(("trl_kept", "liger_kept", "verl_kept"), 1.2)
        floors |= {"naive": 0.9} if case["kept"] == 100 else {}
        missed += [
            f"{label}: {name} {ratio[name]} < {floor}"
            for name, floor in floors.items()
            if ratio[name] is not None and ratio[name] < floor
        ]
        peak = case["peak_mb"]
        if peak["ours"] is not None and peak["ours"] > 1.15 * peak["formula"]:
            missed.append(f"{label}: peak {peak['ours']} MB > 1.15 x {peak['formula']} MB")
    for row in [*result["cases"], *result["accuracy"]]:
        if row["grad_err"] > LIMIT[row["dtype"]]:
            missed.append(f"{_label(row)}: gradient error {row['grad_err']:.1e} > {LIMIT[row['dtype']]:.0e}")
    return missed


def _label(row: dict[str, Any]) -> str:
    size = f"V={row['V']} {row['kept']}% " if "V" in row else ""
    return f"{size}{row['dtype']} {row['mode']}"


def table(case: dict[str, Any]) -> str:
    ratios = "".join(f"{'-' if value is None else format(value, '.2f'):>11}" for value in case["ratio"].values())
    peak = case["peak_mb"]
    memory = "-" if peak["ours"] is None else f"{peak['ours']:.0f}/{peak['formula']:.0f}"
    rest = f"{case['cpu_s']:>9.3f}{case['gflop_per_cpu_s']:>9.0f}{case['grad_err']:>10.1e}{memory:>12}"
    return f"{_label(case):<30}{ratios}{rest}"


HEADER = f"{'':<30}" + "".join(f"{name:>11}" for name in HEADS if name != "ours")
HEADER += f"{'ours s':>9}{'GFLOP/s':>9}{'error':>10}{'MB/formula':>12}"


def run(quick: bool, rounds: int, say: Any) -> dict[str, Any]:
    absent = missing()
    for name, reason in absent.items():
        say(f"{name} is left out: {reason}")
    names = [name for name in HEADS if name not in absent]
    result: dict[str, Any] = {"cases": [], "accuracy": accuracy(), "absent": absent}
    say(HEADER)
    for case in cases(quick):
        row = measure(case, names, rounds)
        row["peak_mb"] = peaks(case, names, case.kept == 30 and case.mode == "token" and not quick)
        result["cases"].append(row)
        say(table(row))
    growth = Case(32768, 4096, 30, "fp32", "token"), Case(32768, 16384, 30, "fp32", "token")
    result["growth"] = [] if quick else [{"N": case.N, "peak_mb": peaks(case, ["ours"], False)} for case in growth]
    for row in result["growth"]:
        say(f"V=32768 30% fp32, {row['N']} tokens: {row['peak_mb']['ours']} MB, formula {row['peak_mb']['formula']}")
    for row in result["accuracy"]:
        say(f"error {row['grad_err']:.1e}  {_label(row)}")
    result["missed"] = failures(result)
    say("targets missed: " + ("none" if not result["missed"] else ""))
    for line in result["missed"]:
        say("  " + line)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three small cases, within a minute")
    parser.add_argument("--json", action="store_true", help="print one JSON object on standard output")
    parser.add_argument("--rounds", type=int, default=0, help="rounds that count; 0 = 3, with --quick 2")
    parser.add_argument("--peak", choices=HEADS, help=argparse.SUPPRESS)
    parser.add_argument("--case", type=lambda text: Case(**json.loads(text)), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak:
        torch.set_num_threads(1)
        print(measure_peak(arguments.peak, arguments.case))
        return
    if os.environ.get("MALLOC_MMAP_MAX_") != "0":
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | KEEP_MEMORY)
    stream = sys.stderr if arguments.json else sys.stdout
    rounds = arguments.rounds or (2 if arguments.quick else 3)
    result = run(arguments.quick, rounds, lambda text: print(text, file=stream, flush=True))
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
