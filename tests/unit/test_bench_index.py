"""The index bench measures what it says: exact neighbours are exact, and every kind is made and asked.

Must fail if the neighbours that recall is counted against are not the nearest, or if a figure is missing.
"""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

index_bench = pytest.importorskip("index")


def test_recall_is_counted_against_the_nearest_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(index_bench, "SHARD", 300)  # the last block is shorter than the others
    monkeypatch.setattr(index_bench, "rate", lambda *_: 1.0)
    index_bench.write_rows(tmp_path, 1000)
    rows, queries = (np.load(tmp_path / f"{name}.npy").astype(np.float32) for name in ("rows", "queries"))
    nearest = np.load(tmp_path / "nearest.npy")
    truth = np.argsort(-(queries @ rows.T), axis=1)[:, : index_bench.NEAREST]
    assert np.all(np.sort(nearest, axis=1) == np.sort(truth, axis=1))
    least = {"flat": 0.999, "ivf": 0.9, "hnsw": 0.9}
    result = {"rows": 1000, "dimensions": index_bench.DIM, "raw_mb": 1}
    for kind, share in least.items():
        made, asked = index_bench.make(tmp_path, kind, 1), index_bench.ask(tmp_path, kind)
        assert made["disk_mb"] >= 1 and set(asked["at"]) == {str(b) for b in index_bench.BREADTHS[kind]}
        recalls = [at["recall"] for at in asked["at"].values()]
        assert max(recalls) >= share and recalls == sorted(recalls)
        result[kind] = made | asked
    text = index_bench.table(result | {"hnsw": {"stopped_after": 5.0}})
    assert text.count("\n| ivf |") == 2 and "| hnsw | more than 5 |" in text
    assert json.loads(json.dumps(result)) == result
