"""Memory, time and recall of the vector indexes that `python -m hiexp.search index` makes, on synthetic vectors.

    python bench/index.py [--quick] [--json] [--rows 1000000] [--kinds flat,ivf,hnsw] [--budget SECONDS]

Data: unit rows of 768 dimensions in planted clusters (bench/cluster.py), queries near rows of them. Each kind is made
by `hiexp.vectors` out of the same vectors, in a fresh process: seconds to train and add (and CPU-seconds of all its
threads, which a busy machine changes less), peak memory of that process above its start, size on disk. Another fresh
process then opens it as training does, mapped into memory: milliseconds to open, memory of its own (not mapped) that
the queries took, queries per second in batches of 1 and of 64 with one thread, and the share of the exact 10 nearest
among its 10 (recall@10, exact by brute force in float32 over the stored rows).
--budget: a kind that does not finish in so many seconds is stopped and reported as such. --quick: 20,000 rows.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

import numpy as np  # noqa: E402
from cluster import DIM, planted  # noqa: E402

from hiexp.rankers import DenseRanker, set_breadth  # noqa: E402
from hiexp.search_types import IndexConfig  # noqa: E402
from hiexp.vectors import index_rows  # noqa: E402

QUERIES = 512
NEAREST = 10
SHARD = 1 << 14
BREADTHS = {"flat": (0,), "ivf": (16, 64), "hnsw": (64, 128, 512)}
"""lists read, candidates kept: each is measured"""


def write_rows(folder: Path, rows: int) -> None:
    """Float16 vectors, queries, and the exact nearest rows of each query."""
    data = planted(rows).astype(np.float16)
    np.save(folder / "rows.npy", data)
    rng = np.random.default_rng(1)
    queries = data[rng.integers(rows, size=QUERIES)].astype(np.float32)
    queries += 0.5 * rng.standard_normal(queries.shape, np.float32) / np.float32(np.sqrt(DIM))
    queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    best = np.zeros((QUERIES, 0), np.float32)
    found = np.zeros((QUERIES, 0), np.int64)
    for start in range(0, rows, SHARD):
        block = data[start : start + SHARD].astype(np.float32)
        scores = np.concatenate([best, queries @ block.T], 1)
        here = np.arange(start, start + len(block))
        places = np.concatenate([found, np.broadcast_to(here, (QUERIES, len(block)))], 1)
        order = np.argpartition(-scores, NEAREST - 1, axis=1)[:, :NEAREST]
        best, found = np.take_along_axis(scores, order, 1), np.take_along_axis(places, order, 1)
    np.save(folder / "queries.npy", queries)
    np.save(folder / "nearest.npy", found)


def make(folder: Path, kind: str, threads: int) -> dict[str, Any]:
    """Make one index in this process."""
    data = np.load(folder / "rows.npy", mmap_mode="r")

    def blocks() -> Any:
        return (data[start : start + SHARD].astype(np.float32) for start in range(0, len(data), SHARD))

    cfg = IndexConfig(out=str(folder), kind=kind, storage="float16", threads=threads)
    before, seconds, cpu = memory("VmHWM"), time.perf_counter(), time.process_time()
    lists, breadth = index_rows(folder / f"{kind}.faiss", blocks, DIM, len(data), cfg)
    return {
        "build_seconds": round(time.perf_counter() - seconds, 1),
        "build_cpu_seconds": round(time.process_time() - cpu, 1),
        "build_peak_mb": memory("VmHWM") - before,
        "disk_mb": (folder / f"{kind}.faiss").stat().st_size >> 20,
        "lists": lists,
        "breadth": breadth,
    }


def ask(folder: Path, kind: str) -> dict[str, Any]:
    """Open one index in this process and search it."""
    import faiss

    queries, nearest = np.load(folder / "queries.npy"), np.load(folder / "nearest.npy")
    before = memory("RssAnon")
    seconds = time.perf_counter()
    index = faiss.read_index(str(folder / f"{kind}.faiss"), faiss.IO_FLAG_MMAP_IFC)
    figures: dict[str, Any] = {"open_ms": round(1000 * (time.perf_counter() - seconds), 1), "at": {}}
    ranker = DenseRanker(index, None)  # type: ignore[arg-type]  (the queries are vectors)
    for breadth in BREADTHS[kind]:
        set_breadth(index, breadth)
        found = [[row for _, row in ranking] for ranking in ranker.rank_vectors(queries[:64], NEAREST)]  # and warm
        found += [[row for _, row in ranking] for ranking in ranker.rank_vectors(queries[64:], NEAREST)]
        shares = [len(set(a) & set(b)) / NEAREST for a, b in zip(found, nearest.tolist(), strict=True)]
        rates = {f"queries_per_second_{batch}": rate(ranker, queries, batch) for batch in (1, 64)}
        figures["at"][str(breadth)] = {"recall": round(float(np.mean(shares)), 4), **rates}
    return figures | {"anonymous_mb": memory("RssAnon") - before, "mapped_mb": memory("RssFile")}


def rate(ranker: DenseRanker, queries: np.ndarray, batch: int, least: float = 3.0) -> float:
    """Queries per second of calls with `batch` queries, measured for `least` seconds or two calls."""
    start, calls = time.perf_counter(), 0
    while calls < 2 or time.perf_counter() - start < least:
        first = calls * batch % (len(queries) - batch + 1)
        ranker.rank_vectors(queries[first : first + batch], NEAREST)
        calls += 1
    return round(calls * batch / (time.perf_counter() - start), 1)


def memory(name: str) -> int:
    """MB of this process, as /proc has it."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) >> 10


def run(rows: int, kinds: list[str], threads: int, budget: float, note: Any = print) -> dict[str, Any]:
    """{"rows", "raw_mb", kind: figures or {"stopped_after": seconds}}."""
    result: dict[str, Any] = {"rows": rows, "dimensions": DIM, "raw_mb": rows * DIM * 2 >> 20, "threads": threads}
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as place:
        write_rows(Path(place), rows)
        note(f"{rows} vectors written")
        for kind in kinds:
            command = [sys.executable, __file__, "--folder", place, "--threads", str(threads), "--one"]
            try:
                made = subprocess.run([*command, f"make:{kind}"], capture_output=True, text=True, timeout=budget)
                asked = subprocess.run([*command, f"ask:{kind}"], capture_output=True, text=True, timeout=budget)
                if made.returncode or asked.returncode:
                    raise RuntimeError((made.stderr + asked.stderr)[-500:])
                result[kind] = json.loads(made.stdout) | json.loads(asked.stdout)
            except subprocess.TimeoutExpired:
                result[kind] = {"stopped_after": budget}
            note(f"{kind}: {result[kind]}")
            (Path(place) / f"{kind}.faiss").unlink(missing_ok=True)
    return result


def table(result: dict[str, Any]) -> str:
    lines = [
        f"{result['rows']} vectors of {result['dimensions']} dimensions, float16: {result['raw_mb']} MB",
        "| index | made in s (CPU s) | peak MB | disk MB | open ms | own MB | breadth | recall@10 | q/s 1 | q/s 64 |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for kind in (kind for kind in BREADTHS if kind in result):
        row = result[kind]
        if "stopped_after" in row:
            lines.append(f"| {kind} | more than {row['stopped_after']:.0f} | | | | | | | | |")
            continue
        for breadth, at in row["at"].items():
            cells = [kind, f"{row['build_seconds']} ({row['build_cpu_seconds']})", row["build_peak_mb"], row["disk_mb"]]
            cells += [row["open_ms"], row["anonymous_mb"], breadth, at["recall"]]
            cells += [at["queries_per_second_1"], at["queries_per_second_64"]]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="20,000 rows")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--kinds", default="flat,ivf,hnsw")
    parser.add_argument("--threads", type=int, default=0, help="that make an index; 0 = all")
    parser.add_argument("--budget", type=float, default=3600, help="seconds for making or asking one kind")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        what, kind = given.one.split(":")
        folder = Path(given.folder)
        print(json.dumps(make(folder, kind, given.threads) if what == "make" else ask(folder, kind)))
        return
    rows = 20_000 if given.quick else given.rows
    result = run(rows, given.kinds.split(","), given.threads, given.budget, lambda text: print(text, file=sys.stderr))
    print(json.dumps(result) if given.json else table(result))


if __name__ == "__main__":
    main()
