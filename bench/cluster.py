"""Time and peak memory of clustering at size, beside plain scikit-learn; and of retrieval from 200k keys.

    python bench/cluster.py [--quick] [--json]          # --quick: 7k keys

Data: unit rows of 768 dimensions, planted clusters of 8 on average, 25 clusters to a topic, and a direction common to
all, so that cosines concentrate as those of e5 do: about 0.70 between topics, 0.78 within one, 0.96 within a cluster.
Clustered with average linkage at tau = 0.9. "chained" is the worst case: the same at tau = 0.69, where nearly every row
hangs together with every other, so that no decomposition helps and the rows are merged by their means.

Every figure is of a fresh process: seconds of the call alone (cpu_seconds: of all its threads, which a busy machine
changes less), peak_mb of the whole process (VmHWM, the keys included).
ratio = scikit-learn's over ours, so above 1 we are better; null where its distances (8 n^2 bytes, held twice over half
a matrix) exceed the memory that is available. `equal`: the same partition as scikit-learn's run over everything; where
that does not fit, as its run over a sample of rows that is closed under {cosine > tau} (found here by products, not by
what is measured), which every exact algorithm must cluster alike.
Retrieval: 128 queries, the best 10 of the keys: HEK.retrieve over one faiss (IndexFlatIP) call on the same keys,
and over numpy's product and partial sort.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from hiexp.clustering import calibrate_threshold, cluster, height  # noqa: E402
from hiexp.encoder import Kind  # noqa: E402

DIM = 768
TAU = 0.9
CHAINED = 0.69
SIZES = (7_000, 45_000, 200_000)
QUICKLY_LEFT_OUT = ("chained", "sklearn_chained", "ward", "sklearn_ward")
SAMPLE = 4_000
"""rows of a sample, at least"""


def planted(count: int, seed: int = 0) -> np.ndarray:
    """[count, 768] float32 unit rows, made in blocks."""
    rng = np.random.default_rng(seed)

    def directions(n: int) -> np.ndarray:
        return rng.standard_normal((n, DIM), np.float32) / np.float32(np.sqrt(DIM))

    topics = 0.7 * directions(max(count // 200, 1))
    clusters = 2 * directions(1) + topics[rng.integers(len(topics), size=max(count // 8, 1))]
    clusters += directions(len(clusters))
    rows = np.empty((count, DIM), np.float32)
    for start in range(0, count, 8192):
        block = rows[start : start + 8192]
        block[:] = clusters[rng.integers(len(clusters), size=len(block))] + 0.5 * directions(len(block))
        block /= np.linalg.norm(block, axis=1, keepdims=True)
    return rows


def by_scikit_learn(rows: np.ndarray, linkage: str, tau: float) -> np.ndarray:
    """Labels of one plain run over everything."""
    from sklearn.cluster import AgglomerativeClustering

    metric = "euclidean" if linkage == "ward" else "cosine"
    settings: dict[str, Any] = {"n_clusters": None, "distance_threshold": height(tau, linkage)}
    return AgglomerativeClustering(linkage=linkage, metric=metric, **settings).fit_predict(rows.astype(np.float64))


def by_hiexp(rows: np.ndarray, linkage: str, tau: float) -> np.ndarray:
    labels = np.empty(len(rows), int)
    for number, group in enumerate(cluster(rows, tau, linkage)):
        labels[group] = number
    return labels


METHODS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "average": lambda rows: by_hiexp(rows, "average", TAU),
    "ward": lambda rows: by_hiexp(rows, "ward", TAU),
    "chained": lambda rows: by_hiexp(rows, "average", CHAINED),
    "calibrate": lambda rows: np.array([calibrate_threshold(rows, 1)[0]]),
    "sklearn_average": lambda rows: by_scikit_learn(rows, "average", TAU),
    "sklearn_ward": lambda rows: by_scikit_learn(rows, "ward", TAU),
    "sklearn_chained": lambda rows: by_scikit_learn(rows, "average", CHAINED),
}


def same_partition(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two labellings group the rows alike, whatever the labels are called."""
    pairs = len(np.unique(np.stack([a, b]), axis=1).T)
    return pairs == len(np.unique(a)) == len(np.unique(b))


def closed_sample(rows: np.ndarray, tau: float, least: int = SAMPLE) -> np.ndarray | None:
    """Rows of which none has a cosine above tau to any other row; None if that takes more than five times `least`."""
    chosen, frontier = np.zeros(len(rows), bool), np.arange(min(len(rows), least // 8))
    chosen[frontier] = True
    while len(frontier) and chosen.sum() <= 5 * least:
        reached = np.zeros(len(rows), bool)
        for start in range(0, len(frontier), 1024):
            for other in range(0, len(rows), 8192):
                near = rows[frontier[start : start + 1024]] @ rows[other : other + 8192].T > tau - 1e-5
                reached[other : other + 8192] |= near.any(axis=0)
        frontier = np.flatnonzero(reached & ~chosen)
        chosen |= reached
    return np.flatnonzero(chosen) if not len(frontier) else None


def measure(name: str, count: int, folder: str) -> dict[str, float]:
    """One method in this process; its labels go to a file of the folder."""
    rows = planted(count)
    start, cpu = time.perf_counter(), time.process_time()
    labels = METHODS[name](rows)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    np.save(Path(folder) / f"{name}-{count}.npy", labels)
    return {"seconds": round(seconds, 2), "cpu_seconds": round(cpu, 2), "peak_mb": round(status_mb("VmHWM"), 1)}


def status_mb(key: str, path: str = "/proc/self/status") -> float:
    line = next(line for line in Path(path).read_text().splitlines() if line.startswith(key + ":"))
    return int(line.split()[1]) * 1024 / 1e6


def fits(count: int) -> bool:
    """Whether plain scikit-learn's distances and the copy that is clustered have room."""
    return 8 * count * count / 1e6 + 2 * 8 * DIM * count / 1e6 < 0.9 * status_mb("MemAvailable", "/proc/meminfo")


def child(name: str, count: int, folder: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--one", name, "--rows", str(count), "--folder", folder]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def size(count: int, folder: str, say: Callable[[str], None], names: list[str]) -> dict[str, Any]:
    """All methods at one size, the ratios, and whether the partitions are equal."""
    found: dict[str, Any] = {}
    for name in names:
        found[name] = child(name, count, folder) if not name.startswith("sklearn") or fits(count) else None
        say(f"{count:>7} {name:16} " + json.dumps(found[name]))
    ratio, equal = {}, {}
    for name in ("average", "ward", "chained"):
        theirs = found.get(f"sklearn_{name}")
        if name in found:
            equal[name] = compare(name, count, folder, theirs is not None)
        if name in found and theirs:
            ratio[name] = {key: round(theirs[key] / found[name][key], 2) for key in ("seconds", "peak_mb")}
    say(f"{count:>7} equal {equal} ratio {ratio}")
    return {**found["average"], "equal": equal["average"], "equals": equal, "ratio": ratio, "methods": found}


def compare(name: str, count: int, folder: str, whole: bool) -> bool | None:
    """With scikit-learn over all rows, or over a closed sample; None where no closed sample is small enough."""
    ours = np.load(Path(folder) / f"{name}-{count}.npy")
    if whole:
        return same_partition(ours, np.load(Path(folder) / f"sklearn_{name}-{count}.npy"))
    rows, tau = planted(count), CHAINED if name == "chained" else TAU
    chosen = closed_sample(rows, tau)
    if chosen is None:
        return None
    return same_partition(ours[chosen], by_scikit_learn(rows[chosen], "ward" if name == "ward" else "average", tau))


class Keys:
    """An encoder whose texts are numbers of rows."""

    fingerprint, dim = "bench", DIM

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows

    def encode(self, texts: Sequence[str], kind: Kind) -> np.ndarray:
        return self.rows[[int(text) for text in texts]]


def retrieval(count: int, rounds: int = 7) -> dict[str, float]:
    """Median milliseconds of 128 queries through HEK.retrieve and through one faiss or numpy call, and the ratios."""
    import faiss

    from hiexp.experience import Experience
    from hiexp.hek import HEK, HEKConfig

    rows = planted(count)
    encoder, empty = Keys(rows), np.zeros((0, DIM), np.float32)
    entries = [
        Experience(
            id=f"E1-{i:06d}", level=1, type="x", title=str(i), description="-", tags=(), qa_groups=((str(i), str(i)),)
        )
        for i in range(count)
    ]
    hek = HEK(entries, encoder, HEKConfig(case_threshold=0.8), vectors={1: rows, 2: empty, 3: empty})
    index = faiss.IndexFlatIP(DIM)
    index.add(rows)  # pyright: ignore[reportCallIssue]
    queries = [str(i * (count // 128)) for i in range(128)]
    calls = {
        "hek_ms": lambda: hek.retrieve(queries, 1, 10, exclude=queries),
        "numpy_ms": lambda: np.argpartition(encoder.encode(queries, "query") @ rows.T, -10, axis=1),
        "faiss_ms": lambda: index.search(encoder.encode(queries, "query"), 10),  # pyright: ignore[reportCallIssue]
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(1000 * (time.perf_counter() - start))
    median = {name: round(float(np.median(some[1:])), 1) for name, some in times.items()}
    ratio, to_numpy = (
        round(float(np.median(np.divide(times["hek_ms"][1:], times[other][1:]))), 3)
        for other in ("faiss_ms", "numpy_ms")
    )
    return {**median, "ratio": ratio, "ratio_to_numpy": to_numpy, "peak_mb": round(status_mb("VmHWM"), 1)}


def run(quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    result: dict[str, Any] = {"n": {}, "dim": DIM, "tau": TAU, "chained_tau": CHAINED, "cpus": os.cpu_count()}
    result["threads"] = os.environ.get("OMP_NUM_THREADS", "all")
    with tempfile.TemporaryDirectory() as folder:
        for count in SIZES[:1] if quick else SIZES:
            left_out = QUICKLY_LEFT_OUT if quick else ("chained", "sklearn_chained") if count == SIZES[2] else ()
            result["n"][str(count)] = size(count, folder, say, [name for name in METHODS if name not in left_out])
        count = SIZES[0] if quick else SIZES[2]
        result["retrieval"] = {str(count): child("retrieval", count, folder)}
        say(f"{count:>7} retrieval        " + json.dumps(result["retrieval"][str(count)]))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="7k keys alone, without Ward and the worst case")
    parser.add_argument("--json", action="store_true", help="print one JSON object on standard output")
    parser.add_argument("--one", choices=[*METHODS, "retrieval"], help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        count = arguments.rows
        found = retrieval(count) if arguments.one == "retrieval" else measure(arguments.one, count, arguments.folder)
        print(json.dumps(found))
        return
    stream = sys.stderr if arguments.json else sys.stdout
    result = run(arguments.quick, lambda text: print(text, file=stream, flush=True))
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
