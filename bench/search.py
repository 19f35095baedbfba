"""What a search costs beside raw faiss: in this process, through the server, and for many clients at once.

    python bench/search.py [--quick] [--json]      # --quick: 25k rows instead of 100k

Data: planted unit rows of 768 dimensions (bench/cluster.py), passages of about 100 words. The encoder only looks its
vectors up, so that what is compared is everything but the model. All search threads are 1; the server is a process of
its own, and its clients take part of the same cores.

Speed: 128 queries a call, the best 5 of 100k rows of a flat index. Raw faiss, the backend (vectors, faiss, passages)
and the server (batches of 32, four requests at once, JSON both ways) take turns; ratio = their queries per second over
raw faiss', the median over the rounds. That of the backend, which like raw faiss uses one thread of this process, is
taken from CPU seconds, which a busy machine changes less; that of the server from wall time.

Latency: clients that ask one query after the other, 1, 16 and 128 of them, one query a request; p50 and p99 in
milliseconds. With 128 clients on one core, most of it is waiting for the others. p99_ms is that of 16 clients; faiss_ms
is one raw call with as many queries as there are clients.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import faiss  # noqa: E402
import numpy as np  # noqa: E402
from cluster import DIM, planted  # noqa: E402

from hiexp.encoder import Kind  # noqa: E402
from hiexp.rankers import DenseRanker  # noqa: E402
from hiexp.search import LocalSearch  # noqa: E402
from hiexp.search_clients import HttpSearch  # noqa: E402
from hiexp.search_remote_config import HttpConfig  # noqa: E402
from hiexp.search_server import PACKAGES, ServeConfig, listen, run  # noqa: E402
from hiexp.trajectory import Document  # noqa: E402

TOP_K = 5
CALL = 128
"""queries of a call"""
ROWS, QUICK_ROWS = 100_000, 25_000
CLIENTS = (1, 16, 128)


class Table:
    """An encoder that knows each query's vector: that of "q7" is near row 7 of the corpus."""

    fingerprint, dim = "bench", DIM

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows
        noise = np.random.default_rng(1).standard_normal(rows[: 1 << 14].shape, np.float32) * 0.4 / DIM**0.5
        self.queries = rows[: len(noise)] + noise
        self.queries /= np.linalg.norm(self.queries, axis=1, keepdims=True)

    def encode(self, texts: list[str], kind: Kind) -> np.ndarray:
        return self.queries[[int(text[1:]) % len(self.queries) for text in texts]]


def passage(row: int) -> Document:
    return Document(f"Title {row}", f"p{row} " + ("words of a passage that says what it says " * 12).strip())


def backend(count: int) -> LocalSearch:
    """Flat, in memory."""
    rows = planted(count)
    index = faiss.IndexFlatIP(DIM)
    index.add(rows)  # pyright: ignore[reportCallIssue]
    passages = [(str(row), passage(row)) for row in range(count)]
    return LocalSearch(passages, DenseRanker(index, Table(rows), threads=1))  # pyright: ignore[reportArgumentType]


def queries_of(round_: int, count: int = CALL) -> list[str]:
    return [f"q{(round_ * count + i) % 16_384}" for i in range(count)]


@contextmanager
def server(count: int):
    """The address of a server of `backend(count)` in a process of its own."""
    command = [sys.executable, __file__, "--serve", str(count)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        assert process.stdout
        yield process.stdout.readline().split()[-1]
    finally:
        process.terminate()
        process.wait(30)


def serve(count: int) -> None:
    cfg = ServeConfig(port=0)
    with listen(cfg) as listener:
        run(cfg, backend(count), listener)


def speed(local: LocalSearch, address: str | None, rounds: int) -> dict[str, Any]:
    """Queries per second of the three, and the ratios of the rounds."""
    ranker: Any = local.ranker
    remote = HttpSearch(HttpConfig((address,), queries_per_request=32, connections=4)) if address else None

    def raw(queries: list[str]) -> None:
        faiss.omp_set_num_threads(1)
        ranker.index.search(ranker.encoder.encode(queries, "query"), TOP_K)

    calls: dict[str, Callable[[list[str]], Any]] = {"faiss": raw, "in_process": lambda q: local.search(q, TOP_K)}
    if remote:
        calls["server"] = lambda q: remote.search(q, TOP_K)
        assert remote.search(queries_of(0), TOP_K) == local.search(queries_of(0), TOP_K)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for round_ in range(rounds + 1):
        for name, call in calls.items():
            began, cpu = time.perf_counter(), time.process_time()
            call(queries_of(round_))
            seconds[name].append((time.perf_counter() - began, time.process_time() - cpu))
    kept = {name: np.array(times[1:]).T for name, times in seconds.items()}  # the first round warms up
    result: dict[str, Any] = {
        f"{name}_qps": round(CALL / float(np.median(wall)), 1) for name, (wall, _) in kept.items()
    }
    for name in calls.keys() - {"faiss"}:
        clock = int(name == "in_process")
        ratios = kept["faiss"][clock] / kept[name][clock]
        result[f"{name}_ratio"] = round(float(median(ratios)), 3)
        result[f"{name}_quartiles"] = [round(float(q), 3) for q in np.quantile(ratios, (0.25, 0.75))]
    return result


async def one_client(address: str, seconds: list[float], left: list[int]) -> None:
    """Asks one query after the other over one connection, with as little code as HTTP allows."""
    host, port = address.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    while left[0] > 0:
        left[0] -= 1
        body = json.dumps({"queries": [f"q{left[0] % 16_384}"], "topk": TOP_K, "return_scores": True}).encode()
        began = time.perf_counter()
        writer.write(b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        answer = await reader.readexactly(int(length.split(b":")[1]))
        seconds.append(time.perf_counter() - began)
        assert head.startswith(b"HTTP/1.1 200") and answer.startswith(b'{"result"')
    writer.close()


async def crowd(address: str, clients: int, requests: int) -> list[float]:
    seconds: list[float] = []
    left = [requests]
    await asyncio.gather(*(one_client(address, seconds, left) for _ in range(clients)))
    return seconds


def latency(local: LocalSearch, address: str, per_client: int) -> dict[str, Any]:
    """p50 and p99 in milliseconds for each number of clients."""
    ranker: Any = local.ranker
    result = {}
    for clients in CLIENTS:
        vectors = ranker.encoder.encode(queries_of(0, clients), "query")
        bare = []
        for _ in range(5):
            began = time.perf_counter()
            ranker.index.search(vectors, TOP_K)
            bare.append(time.perf_counter() - began)
        asyncio.run(crowd(address, clients, 2 * clients))
        began = time.perf_counter()
        seconds = asyncio.run(crowd(address, clients, max(per_client * clients, 40)))
        rate = len(seconds) / (time.perf_counter() - began)
        p50, p99 = (round(1000 * float(q), 1) for q in np.quantile(seconds, (0.5, 0.99)))
        faiss_ms = round(1000 * float(median(bare)), 1)
        result[str(clients)] = {"p50_ms": p50, "p99_ms": p99, "qps": round(rate, 1), "faiss_ms": faiss_ms}
    return result


def bench(quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    count, result = QUICK_ROWS if quick else ROWS, {}
    result |= {"rows": count, "dim": DIM, "cpus": os.cpu_count(), "in_process_ratio": None, "server_ratio": None}
    result["p99_ms"] = None
    local = backend(count)
    missing = [name for name in PACKAGES if not _is_installed(name)]
    if missing:
        result["reason"] = f"no server: {', '.join(missing)} not installed (requirements-search.txt)"
        say(result["reason"])
        result |= speed(local, None, 3 if quick else 11)
    else:
        with server(count) as address:
            result |= speed(local, address, 5 if quick else 11)
            say(json.dumps({key: value for key, value in result.items() if "_" in key}))
            result["latency"] = latency(local, address, 3 if quick else 8)
        result["p99_ms"] = result["latency"]["16"]["p99_ms"]
        for clients, line in result["latency"].items():
            say(f"{clients:>4} clients {json.dumps(line)}")
    return result


def _is_installed(name: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(name) is not None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="25k rows instead of 100k, fewer rounds")
    parser.add_argument("--json", action="store_true", help="print one JSON object on standard output")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        return serve(given.serve)
    stream = sys.stderr if given.json else sys.stdout
    result = bench(given.quick, lambda text: print(text, file=stream, flush=True))
    if given.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
