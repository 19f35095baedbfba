"""An index folder: every kind against brute force, killed and resumed to the same bytes, refused when it does not fit.

Must fail if a resumed build differs from an uninterrupted one or encodes a finished shard again, if another encoder,
prefix or corpus is taken, or if a file that was cut off is mapped into memory.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from hiexp import vectors
from hiexp.config import ConfigError
from hiexp.encoder import HashEncoder, TfidfEncoder, unit_rows
from hiexp.indexes import build_index, open_index, read_manifest
from hiexp.search import open_search
from hiexp.search_types import IndexConfig, SearchConfig

ROOT = Path(__file__).resolve().parents[2]
faiss = pytest.importorskip("faiss")


class Drawn:
    """A vector per text, drawn by its hash; a query is near the passage of its number. Counts what it encodes."""

    def __init__(self, dim: int = 32, name: str = "drawn") -> None:
        self.dim, self.fingerprint, self.prefix, self.pooling = dim, f"{name}:{dim}", "e5", "mean"
        self.encoded: list[str] = []

    def encode(self, texts, kind):
        if kind == "passage":
            self.encoded += texts
        rows = [np.random.default_rng(int(text.split()[-1])).normal(size=self.dim) for text in texts]
        return np.array(rows, np.float32).reshape(len(texts), self.dim)


def corpus_file(folder: Path, count: int, name: str = "corpus.jsonl") -> str:
    path = folder / name
    rows = [{"id": f"p{i}", "title": f"T{i}", "text": f"passage number {i}"} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def config(folder: Path, corpus: str, **changes) -> IndexConfig:
    return IndexConfig(**{"out": str(folder), "corpus": (corpus,), "shard_rows": 64, "threads": 1} | changes)


def content(folder: Path) -> dict[str, bytes]:
    files = [
        path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in ("lock", "manifest.json")
    ]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def found(folder: Path, encoder, queries, top_k, **settings):
    cfg = SearchConfig("dense", index=str(folder), **settings)
    return [[hit.id for hit in row] for row in open_search(cfg, encoder).search_scored(queries, top_k)]


QUERIES = [f"like {i}" for i in range(0, 600, 7)]
LEAST = {
    ("flat", "float32"): 1.0,
    ("flat", "float16"): 0.99,
    ("flat", "int8"): 0.95,
    ("flat", "pq"): 0.15,
    ("ivf", "float32"): 1.0,
    ("ivf", "float16"): 0.99,
    ("ivf", "int8"): 0.9,
    ("ivf", "pq"): 0.15,
    ("hnsw", "float32"): 0.99,
    ("hnsw", "float16"): 0.98,
}
"""least share of the 10 nearest that is found; all lists are read"""


@pytest.mark.parametrize(
    ("kind", "storage"), [pytest.param(*key, marks=[pytest.mark.slow] if key == ("ivf", "pq") else []) for key in LEAST]
)
def test_every_kind_against_brute_force(tmp_path, kind, storage):
    encoder = Drawn()
    corpus = corpus_file(tmp_path, 600)
    cfg = config(tmp_path / "i", corpus, kind=kind, storage=storage, lists=8, pq_bytes=2)
    manifest = build_index(cfg, encoder)["dense"]
    assert (manifest["kind"], manifest["storage"], manifest["dimension"]) == (kind, storage, 32)
    assert manifest["lists"] == (8 if kind == "ivf" else 0)
    assert not (tmp_path / "i" / "vectors").exists() and encoder.encoded == [
        f"T{i}\npassage number {i}" for i in range(600)
    ]
    rows = unit_rows(encoder.encode([str(i) for i in range(600)], "query"))
    nearest = np.argsort(-(rows[::7] @ rows.T), axis=1)[:, :10]
    for mmap in (True, False):
        ids = found(tmp_path / "i", encoder, QUERIES, 10, mmap=mmap, breadth=8 if kind == "ivf" else 0)
        shares = [len({f"p{j}" for j in best} & set(row)) / 10 for best, row in zip(nearest, ids, strict=True)]
        assert np.mean(shares) >= LEAST[kind, storage]
        if storage in ("float32", "float16"):
            assert [row[0] for row in ids] == [f"p{i}" for i in range(0, 600, 7)]


def test_breadth_trades_time_for_recall(tmp_path):
    encoder = Drawn()
    manifest = build_index(config(tmp_path / "i", corpus_file(tmp_path, 600), kind="ivf", lists=32, breadth=2), encoder)
    exact = found(tmp_path / "i", encoder, QUERIES, 10, breadth=32)

    def recall(**settings):
        rows = found(tmp_path / "i", encoder, QUERIES, 10, **settings)
        return np.mean([len(set(a) & set(b)) for a, b in zip(rows, exact, strict=True)])

    assert manifest["dense"]["breadth"] == 2
    assert recall(breadth=1) < recall() == recall(breadth=2) < recall(breadth=16) <= 10


SLOW = """
import os, sys, time
sys.path[:0] = {paths!r}
from test_indexes import Drawn, config
from hiexp.indexes import build_index
class Slow(Drawn):
    def encode(self, texts, kind):
        with open({log!r}, "a") as file:
            file.write("".join(text.split()[-1] + " " for text in texts))
        time.sleep({pause})
        return super().encode(texts, kind)
"""


def run(out: Path, corpus: str, log: Path, pause: float) -> subprocess.Popen:
    paths = [str(ROOT), str(ROOT / "tests" / "unit")]
    code = SLOW.format(paths=paths, log=str(log), pause=pause)
    code += f"build_index(config({str(out)!r}, {corpus!r}, backend='hybrid', kind='ivf', lists=8), Slow())"
    return subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_killed_and_run_again_gives_the_same_bytes_and_encodes_no_finished_shard_again(tmp_path):
    corpus = corpus_file(tmp_path, 640)
    whole = run(tmp_path / "whole", corpus, tmp_path / "whole.log", 0)
    first = run(tmp_path / "cut", corpus, tmp_path / "first.log", 0.3)
    shards = tmp_path / "cut" / "vectors"
    deadline = time.monotonic() + 60
    while len(list(shards.glob("*.npy"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    finished = len(list(shards.glob("*.npy")))
    assert 3 <= finished < 10 and "dense" not in read_manifest(tmp_path / "cut")
    with pytest.raises(ConfigError, match=r"has no dense part; run `python -m hiexp\.search index"):
        open_search(SearchConfig("dense", index=str(tmp_path / "cut")), Drawn())
    second = run(tmp_path / "cut", corpus, tmp_path / "second.log", 0)
    assert second.wait(60) == 0 and whole.wait(60) == 0, second.stderr and second.stderr.read()
    again = [int(number) for number in (tmp_path / "second.log").read_text().split()]
    assert again == list(range(64 * finished, 640))
    assert content(tmp_path / "cut") == content(tmp_path / "whole")
    assert read_manifest(tmp_path / "cut") == read_manifest(tmp_path / "whole")


@pytest.mark.parametrize("damage", ["cut", "gone", "other_shape"])
def test_a_damaged_shard_is_encoded_again(tmp_path, damage, monkeypatch):
    corpus, encoder = corpus_file(tmp_path, 200), Drawn()
    monkeypatch.setattr(vectors, "_empty_index", lambda *_: (_ for _ in ()).throw(RuntimeError("stop")))
    with pytest.raises(RuntimeError, match="stop"):
        build_index(config(tmp_path / "i", corpus), encoder)
    monkeypatch.undo()
    shard = tmp_path / "i" / "vectors" / "000001.npy"
    if damage == "cut":
        shard.write_bytes(shard.read_bytes()[:-10])
    elif damage == "gone":
        shard.unlink()
    else:
        np.save(shard, np.zeros((64, 31), np.float16))
    encoder.encoded.clear()
    build_index(config(tmp_path / "i", corpus), encoder)
    assert [text.split()[-1] for text in encoder.encoded] == [str(i) for i in range(64, 128)]
    build_index(config(tmp_path / "other", corpus), encoder)
    assert content(tmp_path / "i") == content(tmp_path / "other")


def test_shards_of_something_else_are_refused(tmp_path, monkeypatch):
    corpus = corpus_file(tmp_path, 100)
    monkeypatch.setattr(vectors, "_empty_index", lambda *_: (_ for _ in ()).throw(RuntimeError("stop")))
    with pytest.raises(RuntimeError):
        build_index(config(tmp_path / "i", corpus), Drawn())
    monkeypatch.undo()
    for changes, encoder, message in (
        ({}, Drawn(name="other"), "begun with encoder=drawn:32, now other:32"),
        ({"storage": "float32"}, Drawn(), "begun with dtype=float16, now float32"),
        ({"shard_rows": 50}, Drawn(), "begun with shard_rows=64, now 50"),
        ({"words": 7}, Drawn(), "made with words=100, now 7"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_index(config(tmp_path / "i", corpus, **changes), encoder)
    Path(corpus).write_text('{"id": "1", "text": "changed"}\n')
    with pytest.raises(ConfigError, match="other files, or they have changed"):
        build_index(config(tmp_path / "i", corpus), Drawn())


def test_a_finished_index_gets_the_part_it_lacks_and_is_else_left_alone(tmp_path):
    corpus, encoder = corpus_file(tmp_path, 100), Drawn()
    build_index(config(tmp_path / "i", corpus, backend="bm25"))
    with pytest.raises(ConfigError, match="has no dense part"):
        open_search(SearchConfig("hybrid", index=str(tmp_path / "i")), encoder)
    build_index(config(tmp_path / "i", corpus, backend="hybrid"), encoder)
    before = content(tmp_path / "i")
    encoder.encoded.clear()
    build_index(config(tmp_path / "i", corpus, backend="hybrid"), encoder)
    assert content(tmp_path / "i") == before and not encoder.encoded
    assert (
        open_search(SearchConfig("hybrid", index=str(tmp_path / "i")), encoder).search(["number 7"], 1)[0][0].title
        == "T7"
    )
    for changes, encoder_now, message in (
        ({"kind": "hnsw"}, encoder, f"kind=flat, now hnsw; choose another out=..., with vectors_from={tmp_path / 'i'}"),
        ({}, Drawn(name="other"), "encoder=drawn:32, now other:32; choose"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_index(config(tmp_path / "i", corpus, **changes), encoder_now)


def test_vectors_are_taken_from_a_flat_index_instead_of_encoding(tmp_path):
    corpus, encoder = corpus_file(tmp_path, 300), Drawn()
    build_index(config(tmp_path / "flat", corpus, storage="float32"), encoder)
    encoder.encoded.clear()
    from_flat = config(tmp_path / "ivf", corpus, kind="ivf", lists=4, vectors_from=str(tmp_path / "flat"))
    assert build_index(from_flat)["dense"]["encoder"] == encoder.fingerprint and not encoder.encoded
    assert read_manifest(tmp_path / "ivf")["dense"]["taken_from"] == "float32"
    build_index(config(tmp_path / "anew", corpus, kind="ivf", lists=4, storage="float16"), encoder)
    assert "taken_from" not in read_manifest(tmp_path / "anew")["dense"]
    assert found(tmp_path / "ivf", encoder, QUERIES[:20], 5) == found(tmp_path / "anew", encoder, QUERIES[:20], 5)
    other = corpus_file(tmp_path, 299, "other.jsonl")
    for source, of, message in (
        ("flat", other, "is of another corpus"),
        ("ivf", corpus, "is of another kind"),
        ("nowhere", corpus, "is not a whole index"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_index(config(tmp_path / f"x{message[-4:]}", of, kind="ivf", vectors_from=str(tmp_path / source)))


def test_B47_another_encoder_prefix_or_corpus_is_refused(tmp_path):
    corpus = corpus_file(tmp_path, 50)
    build_index(config(tmp_path / "i", corpus, words=0), Drawn())
    facts = read_manifest(tmp_path / "i")["dense"]
    assert (facts["encoder"], facts["prefix"], facts["pooling"], facts["normalised"]) == (
        "drawn:32",
        "e5",
        "mean",
        True,
    )
    cfg = SearchConfig("dense", (corpus,), str(tmp_path / "i"))
    with pytest.raises(ConfigError, match=r"encoder is 'drawn:32', now 'hash:none:64'; remove .*encoder\.prefix=e5"):
        open_index(cfg, HashEncoder(64))
    other = corpus_file(tmp_path, 49, "other.jsonl")
    with pytest.raises(ConfigError, match=r"manifest\.json: corpus is"):
        open_index(SearchConfig("dense", (other,), str(tmp_path / "i")), Drawn())
    copied = corpus_file(tmp_path, 50, "copy.jsonl")  # another name, the same passages
    assert open_index(SearchConfig("dense", (copied,), str(tmp_path / "i")), Drawn())


@pytest.mark.slow
def test_ranks_that_start_together_make_an_index_once(tmp_path):
    corpus, log = corpus_file(tmp_path, 200), tmp_path / "log"
    cfg = f"SearchConfig('hybrid', ({corpus!r},), {str(tmp_path / 'i')!r})"
    asked = (
        "from hiexp.search import open_search\nfrom hiexp.search_types import SearchConfig\n"
        f"search = open_search({cfg}, Slow())\n"
        "print(search.search(['x 7'], 1)[0][0].title)"
    )
    paths = [str(ROOT), str(ROOT / "tests" / "unit")]
    code = SLOW.format(paths=paths, log=str(log), pause=0.2) + asked
    ranks = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [rank.communicate(timeout=90)[0].strip() for rank in ranks] == ["T7"] * 3
    numbers = log.read_text().split()
    assert sorted(map(int, numbers)) == sorted([*range(200), 7, 7, 7])


def test_settings_are_checked_first():
    for changes, message in (
        ({"kind": "hnws"}, "did you mean 'hnsw'"),
        ({"storage": "fp16"}, "unknown storage"),
        ({"backend": "tfidf"}, "unknown backend"),
        ({"neighbours": 1}, "neighbours=1 must be at least 2"),
        ({"words": -1}, "words=-1"),
    ):
        with pytest.raises(ConfigError, match=message):
            IndexConfig(out="x", **changes)
    with pytest.raises(ConfigError, match="needs an encoder"):
        build_index(IndexConfig(out="x", corpus=("y",)))


def test_odd_layouts_name_the_remedy(tmp_path):
    corpus = corpus_file(tmp_path, 40)
    for changes, message in (({"storage": "pq"}, "256 passages"), ({"storage": "pq", "pq_bytes": 5}, "must divide")):
        with pytest.raises(ConfigError, match=message):
            build_index(config(tmp_path / "i", corpus, **changes), Drawn())


def test_crowded_vectors_without_a_prefix_are_noticed(tmp_path):
    class Crowded(Drawn):
        def encode(self, texts, kind):
            return super().encode(texts, kind) + 3

    encoder = Crowded()
    with pytest.warns() as seen:
        encoder.prefix = "none"
        cosine = build_index(config(tmp_path / "a", corpus_file(tmp_path, 50)), encoder)["dense"]["mean_cosine"]
    rows = unit_rows(encoder.encode([str(i) for i in range(50)], "query"))
    assert cosine == pytest.approx((rows @ rows.T)[np.triu_indices(50, 1)].mean(), abs=2e-3)
    (tmp_path / "more").mkdir()
    cosines = set()
    corpus = corpus_file(tmp_path / "more", 700)
    for name, changes in (("b", {}), ("c", {"shard_rows": 100}), ("d", {"vectors_from": str(tmp_path / "b")})):
        made = config(tmp_path / name, corpus, storage="float32", **changes)
        with pytest.warns():
            cosines.add(build_index(made, None if "vectors_from" in changes else encoder)["dense"]["mean_cosine"])
    rows = unit_rows(encoder.encode([str(i) for i in range(700)], "query"))
    assert len(cosines) == 1 and cosines.pop() == pytest.approx(
        (rows @ rows.T)[np.triu_indices(700, 1)].mean(), abs=2e-2
    )
    assert any(f"mean cosine of two passages is {cosine}" in str(w.message) for w in seen)


def test_the_labs_encoder_makes_an_index_too(tmp_path):
    texts = ["who founded the city of norn", "who founded the label of the band", "when was the band made"]
    path = tmp_path / "c.jsonl"
    path.write_text("".join(json.dumps({"id": str(i), "text": text}) + "\n" for i, text in enumerate(texts)))
    encoder = TfidfEncoder.fit(texts)
    manifest = build_index(IndexConfig(out=str(tmp_path / "i"), corpus=(str(path),)), encoder)["dense"]
    assert manifest["dimension"] == len(encoder.vocabulary) and manifest["prefix"] == "none"
    assert found(tmp_path / "i", encoder, ["the label of xyzzy", "xyzzy", "made when"], 1) == [["1"], [], ["2"]]
