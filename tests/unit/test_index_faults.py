"""Index folders that are damaged, foreign, finished otherwise or taken: each is refused in one line and left as it is.

Must fail if a damaged file ends in a traceback or in other passages, a folder of other files gets a file or is advised
to be removed, a setting that a finished index does not have is passed over, or the same corpus under another name or
time is taken for another one.
"""

import json
import os
import re

import numpy as np
import pytest
from test_indexes import Drawn, config, content, corpus_file, found

from hiexp import vectors
from hiexp.config import ConfigError
from hiexp.indexes import build_index
from hiexp.search import open_search
from hiexp.search_types import SearchConfig

faiss = pytest.importorskip("faiss")


@pytest.mark.parametrize(
    ("made", "changes", "told"),
    [
        ({"kind": "ivf", "lists": 8}, {"lists": 4}, "lists=8, now 4"),
        (
            {"kind": "ivf", "lists": 8},
            {"breadth": 3},
            "breadth=8, now 3; choose another out=..., or leave it and set",
        ),
        ({"kind": "hnsw"}, {"neighbours": 16}, "neighbours=32, now 16"),
        pytest.param({"storage": "pq", "pq_bytes": 2}, {"pq_bytes": 4}, "pq_bytes=2, now 4", marks=pytest.mark.slow),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_finished_index_is_not_another_one(tmp_path, made, changes, told):
    corpus, encoder = corpus_file(tmp_path, 300), Drawn()
    build_index(config(tmp_path / "i", corpus, **made), encoder)
    before = content(tmp_path / "i")
    build_index(config(tmp_path / "i", corpus, **made), encoder)
    left_open = {name: 0 for name in ("lists", "pq_bytes") if name in made and name not in changes}
    build_index(config(tmp_path / "i", corpus, **made | left_open), encoder)
    with pytest.raises(ConfigError, match=re.escape(told)):
        build_index(config(tmp_path / "i", corpus, **made | changes), encoder)
    assert content(tmp_path / "i") == before


def test_a_corpus_is_known_by_what_is_in_it(tmp_path):
    corpus, encoder = corpus_file(tmp_path, 50), Drawn()
    build_index(config(tmp_path / "i", corpus), encoder)
    encoder.encoded.clear()
    os.utime(corpus)
    spelled = str(tmp_path / "." / ".." / tmp_path.name / "corpus.jsonl")
    for same in (corpus, spelled, corpus_file(tmp_path, 50, "copy.jsonl")):
        build_index(config(tmp_path / "i", same), encoder)
    assert not encoder.encoded


@pytest.mark.parametrize(
    "name", ["index.faiss", "bm25/data.csc.index.npy", "passages.jsonl", "manifest.json", "offsets.npy"]
)
@pytest.mark.parametrize("damage", ["cut", "gone", "empty"])
def test_a_damaged_index_is_refused_in_one_line(tmp_path, name, damage):
    corpus = corpus_file(tmp_path, 50)
    build_index(config(tmp_path / "i", corpus, backend="hybrid"), Drawn())
    file = tmp_path / "i" / name
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-40] if damage == "cut" else b"")
    with pytest.raises(ConfigError) as error:
        open_search(SearchConfig("hybrid", index=str(tmp_path / "i")), Drawn())
    assert "\n" not in str(error.value) and str(tmp_path / "i") in str(error.value)


def zeros(path):
    data = bytearray(path.read_bytes())
    data[500:1500] = bytes(1000)
    path.write_bytes(data)


def emptied(path):
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest | {"bm25": {}, "dense": {"files": 3}}))


@pytest.mark.parametrize(
    ("name", "damage", "told"),
    [
        ("passages.jsonl", zeros, "is damaged"),
        ("offsets.npy", lambda path: np.save(path, np.load(path)[[0, *range(2, 51)]]), "holds 49 passages, not 50"),
        ("offsets.npy", lambda path: np.save(path, np.load(path) - [0, *range(1, 50), 0]), "is damaged"),
        ("manifest.json", emptied, r"its part bm25 is damaged|its part dense is damaged"),
        ("index.faiss", lambda path: path.write_bytes((path.parents[1] / "other" / "index.faiss").read_bytes()), "not"),
    ],
)
def test_an_index_with_other_content_is_refused_in_one_line(tmp_path, name, damage, told):
    corpus = corpus_file(tmp_path, 50)
    build_index(config(tmp_path / "i", corpus, backend="hybrid"), Drawn())
    build_index(config(tmp_path / "other", corpus_file(tmp_path, 49, "o.jsonl")), Drawn())
    damage(tmp_path / "i" / name)
    for backend in ("bm25", "dense"):
        if (backend, name) == ("bm25", "index.faiss"):
            continue
        with pytest.raises(ConfigError, match=told) as error:
            search = open_search(SearchConfig(backend, index=str(tmp_path / "i")), Drawn())
            for number in range(50):
                search.search([f"passage number {number}"], 50)
        assert "\n" not in str(error.value) and str(tmp_path / "i") in str(error.value)


def test_vectors_of_another_number_of_passages_are_refused(tmp_path):
    corpus, encoder = corpus_file(tmp_path, 50), Drawn()
    build_index(config(tmp_path / "i", corpus), encoder)
    index = faiss.IndexFlatIP(32)
    index.add(np.zeros((49, 32), np.float32))
    faiss.write_index(index, str(tmp_path / "i" / "index.faiss"))
    manifest = json.loads((tmp_path / "i" / "manifest.json").read_text())
    manifest["dense"]["files"] = {"index.faiss": (tmp_path / "i" / "index.faiss").stat().st_size}
    (tmp_path / "i" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ConfigError, match="has 49 vectors for 50 passages"):
        open_search(SearchConfig("dense", index=str(tmp_path / "i")), encoder)


class Infinite(Drawn):
    def encode(self, texts, kind):
        rows = super().encode(texts, kind)
        rows[[text.endswith(" 77") for text in texts]] = np.inf
        return rows


def test_a_vector_that_is_not_finite_names_its_passage(tmp_path, monkeypatch):
    corpus = corpus_file(tmp_path, 100)
    monkeypatch.setattr("hiexp.search.ENCODE_CHUNK", 10)
    monkeypatch.setattr(vectors, "CHUNK", 10)
    for search in (SearchConfig("dense", (corpus,)), SearchConfig("dense", (corpus,), str(tmp_path / "i"))):
        with pytest.raises(ConfigError, match="passage 'p77': the encoder gave a vector that is not finite"):
            open_search(search, Infinite())


def test_folders_that_are_no_index_are_left_alone(tmp_path):
    corpus = corpus_file(tmp_path, 5)
    for name, size in (("thesis.txt", 1), ("lock", 4)):
        folder = tmp_path / f"of {name}"
        folder.mkdir()
        (folder / name).write_text("x" * size)
        with pytest.raises(ConfigError, match=rf"holds other files \({name}\)"):
            build_index(config(folder, corpus), Drawn())
        assert {path.name: path.read_text() for path in folder.iterdir()} == {name: "x" * size}
    for backend in ("bm25", "dense"):
        for settings in ({"corpus": (corpus,)}, {}):
            with pytest.raises(ConfigError) as error:
                open_search(SearchConfig(backend, index=corpus, **settings), Drawn())
            assert "remove" not in str(error.value) and "is a file" in str(error.value)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(ConfigError, match=r"holds other files \(thesis.txt\)"):
        build_index(config(tmp_path / "mine", corpus), Drawn())
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="cannot write"):
        build_index(config(tmp_path / "file" / "index", corpus), Drawn())
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "manifest.json").write_text('{"encoder": "x", "corpus": "y", "count": 1}')
    for backend in ("bm25", "dense"):
        with pytest.raises(ConfigError, match="is not a search index"):
            open_search(SearchConfig(backend, (corpus,), str(tmp_path / "old")), Drawn())
    with pytest.raises(ConfigError, match="is not a search index"):
        open_search(SearchConfig("bm25", index=str(tmp_path / "nowhere")))


def test_two_processes_do_not_write_one_folder(tmp_path):
    import fcntl

    corpus = corpus_file(tmp_path, 5)
    (tmp_path / "i").mkdir()
    with (tmp_path / "i" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another process is writing"):
            build_index(config(tmp_path / "i", corpus), Drawn())


def test_a_full_disk_is_told_in_one_line_and_the_shards_stay(tmp_path, monkeypatch):
    corpus, encoder = corpus_file(tmp_path, 100), Drawn()

    def full(*_):
        raise RuntimeError("Error in fwrite: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(faiss, "write_index", full)
        with pytest.raises(ConfigError, match=r"cannot write .*index\.faiss\.part: .*No space left"):
            build_index(config(tmp_path / "i", corpus), encoder)
    encoder.encoded.clear()
    build_index(config(tmp_path / "i", corpus), encoder)
    assert not encoder.encoded and found(tmp_path / "i", encoder, ["like 7"], 1) == [["p7"]]
