"""What scoring costs: the text metrics of 10,000 predictions, and math-verify on 2,000 answers, some of which hang it.

    python bench/scoring.py [--quick] [--json]      # --quick: a tenth of each

Text: made-up predictions of 1 to 12 words (and one in a hundred of 400) against 1 to 8 golds, scored by every text
metric one call at a time, as evaluate.py does. One pass, caches empty. Target: 2 seconds of CPU time, which other work
on the machine changes less than the clock.

Problems: real notations, half of them right, all different so that nothing is compared once for two; 1% are planted
answers that math-verify never comes back from. The limit is what the worker processes could take at most: one second
(the time limit here) for each planted answer and 100 ms for any other, over the number of workers, and the start of the
workers. Besides, all verdicts must be what they should be and no worker may be missing.
"""

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from hiexp import math_check  # noqa: E402
from hiexp.metrics import METRICS  # noqa: E402

TEXT_TARGET = 2.0
TIMEOUT = 1.0
PER_ANSWER = 0.1
START = 10.0
TEXT = "the a of in Velm Mara Holt river Oslo 1987 3,500 no yes U.S. (born) and 2.50 Lake-Tana north film"
NOTATIONS = [
    (r"\boxed{{{0}}}", "{0}"),
    (r"so \boxed{{\frac{{{0}}}{{2}}}}", "{0}/2"),
    (r"\boxed{{{0}^\circ}}", "{0}"),
    (r"\boxed{{(1, {0})}}", "(1,{0})"),
    (r"\boxed{{{0}\sqrt{{2}}}}", r"\sqrt{{2}}*{0}"),
    (r"\boxed{{2(k+{0})}}", "2k+2*{0}"),
    (r"\boxed{{x={0}}}", "{0}"),
    (r"\boxed{{\{{{0},3\}}}}", r"\{{3,{0}\}}"),
]
"""a right answer and its gold, for any number"""
HANGING = [r"9^{{9^{{9^{{9^{{{0}}}}}}}}}", r"({0}^{{10^{{10^{{10}}}}}})!", r"2^{{3^{{4^{{5^{{6^{{{0}}}}}}}}}}}"]


def text_rows(count: int) -> list[tuple[str, list[str]]]:
    draw = random.Random(0)

    def phrase(most: int) -> str:
        return " ".join(draw.choices(TEXT.split(), k=draw.randint(1, most)))

    return [
        (phrase(400 if i % 100 == 0 else 12), [phrase(4) for _ in range(draw.choice((1, 1, 1, 2, 8)))])
        for i in range(count)
    ]


def math_rows(count: int) -> tuple[list[tuple[str, list[str]]], list[bool | None]]:
    """Pairs, and what each is: right, wrong, or (None) planted."""
    pairs, truths = [], []
    for i in range(count):
        if i % 100 == 50:
            pairs.append((HANGING[i // 100 % len(HANGING)].format(i + 9), ["7"]))
            truths.append(None)
            continue
        answer, gold = NOTATIONS[i % len(NOTATIONS)]
        number, is_right = i + 11, i // len(NOTATIONS) % 2 == 0
        pairs.append((answer.format(number), [gold.format(number if is_right else number + 1)]))
        truths.append(is_right)
    return pairs, truths


def text(count: int) -> dict[str, Any]:
    rows = text_rows(count)
    metrics = {name: metric for name, metric in METRICS.items() if name != "math"}
    began, cpu = time.perf_counter(), time.process_time()
    sums = {name: sum(metric(*row) for row in rows) for name, metric in metrics.items()}
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    target = TEXT_TARGET * count / 10_000
    means = {name: round(total / count, 4) for name, total in sums.items()}
    times = {"seconds": round(seconds, 3), "cpu_seconds": round(cpu, 3), "target": target, "ok": cpu < target}
    return {"predictions": count, **times, **means}


def problems(count: int, workers: int) -> dict[str, Any]:
    pairs, truths = math_rows(count)
    planted = truths.count(None)
    began = time.perf_counter()
    verdicts = math_check.check_all(pairs, TIMEOUT, workers)
    seconds = time.perf_counter() - began
    limit = START + (planted * (TIMEOUT + 1.0) + (count - planted) * PER_ANSWER) / workers
    right = sum(v.correct is t for v, t in zip(verdicts, truths, strict=True) if t is not None)
    stopped = sum(v.reason == "timeout" for v, t in zip(verdicts, truths, strict=True) if t is None)
    size = len(math_check.shared_pool().pids)
    ok = seconds < limit and right == count - planted and size == workers
    return {
        "answers": count, "planted": planted, "workers": workers, "seconds": round(seconds, 2),
        "limit": round(limit, 1), "as_they_should": right, "stopped": stopped, "pool": size, "ok": ok,
        "second_disagrees": sum(v.correct != v.second for v in verdicts),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a tenth of each")
    parser.add_argument("--json", action="store_true", help="print one line of JSON alone")
    parser.add_argument("--workers", type=int, default=math_check.default_workers())
    arguments = parser.parse_args()
    share = 10 if arguments.quick else 1
    result = {"text": text(10_000 // share), "math": problems(2_000 // share, arguments.workers)}
    if arguments.json:
        print(json.dumps(result))
    else:
        for name, found in result.items():
            print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in found.items()))
    return 0 if all(found["ok"] for found in result.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
