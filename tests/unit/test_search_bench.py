"""The search bench measures what it says, on a small index.

Must fail when: the three are not given the same work, a ratio is turned round, or clients do more than wait.
"""

import asyncio
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from search_double import serving

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
import search as bench  # noqa: E402


@pytest.fixture(scope="module")
def local():
    return bench.backend(600)


def test_the_encoder_is_near_its_rows(local):
    table = local.ranker.encoder
    queries = table.encode(["q5", "q599"], "query")
    assert np.argmax(table.rows @ queries.T, axis=0).tolist() == [5, 599]
    assert local.search(["q7"], 1)[0][0] == bench.passage(7)


def burn(seconds):
    began = time.process_time()
    while time.process_time() - began < seconds:
        pass


def test_a_slow_backend_has_a_low_ratio(local, monkeypatch):
    monkeypatch.setattr(bench, "queries_of", lambda round_, count=16: [f"q{i}" for i in range(16)])
    plain = type(local).search
    monkeypatch.setattr(type(local), "search", lambda self, *args: burn(0.1) or plain(self, *args))
    result = bench.speed(local, None, 3)
    assert result["in_process_ratio"] < 0.6 and result["in_process_qps"] < result["faiss_qps"]


def test_clients_ask_one_query_after_the_other():
    def answer(body, number):
        assert len(body["queries"]) == 1 and body["topk"] == bench.TOP_K
        time.sleep(0.02)
        return {"result": [[]]}

    with serving(answer) as server:
        seconds = asyncio.run(bench.crowd(server.url, 3, 12))
        assert len(seconds) == 12 == len(server.bodies) and min(seconds) >= 0.02
        assert server.connections == 3 and server.widest == 3
