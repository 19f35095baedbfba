import json
import os
import subprocess
import sys
from datetime import date
from pathlib import Path

import numpy as np
import pytest

from hiexp import search
from hiexp.config import ConfigError
from hiexp.encoder import HashEncoder
from hiexp.indexes import build_index
from hiexp.passages import read_corpus
from hiexp.rankers import Reranked
from hiexp.search import BM25Search, DenseSearch, NoSearch, open_search
from hiexp.search_remote_config import TavilyConfig
from hiexp.search_types import IndexConfig, SearchConfig
from hiexp.trajectory import Document

ROOT = Path(__file__).resolve().parents[2]


def passages(*texts: str) -> list[tuple[str, Document]]:
    return [(f"p{i}", Document(f"t{i}", text)) for i, text in enumerate(texts)]


def titles(results: list[list[Document]]) -> list[list[str]]:
    return [[document.title for document in row] for row in results]


class TableEncoder:
    """Vectors from a table; records how it was called."""

    def __init__(self, table: dict[str, list[float]], fingerprint: str = "table") -> None:
        self.table, self.fingerprint, self.dim = table, fingerprint, 2
        self.calls: list[tuple[str, str]] = []

    def encode(self, texts, kind):
        self.calls += [(text, kind) for text in texts]
        return np.array([self.table.get(text, [0.0, 0.0]) for text in texts], np.float32).reshape(len(texts), 2)


def test_bm25_counts_years_and_single_letters_and_no_stop_word_is_dropped():
    backend = BM25Search(passages("born in 1998", "born in 1999", "Malcolm X spoke", "Malcolm spoke", "Who", "is it"))
    assert titles(backend.search(["1999", "x", "who?", "THE", "is"], 3)) == [
        ["t1"],
        ["t2"],
        ["t4"],
        [],
        ["t5"],
    ]


def test_bm25_ties_are_in_corpus_order_also_at_the_cut():
    corpus = [(str(i), Document("same", f"river u{i:02d}")) for i in range(40)]
    (found,) = BM25Search(corpus).search(["river"], 7)
    assert [document.text for document in found] == [f"river u{i:02d}" for i in range(7)]


@pytest.mark.parametrize("query", ["", "  ", "?!", "zzz unknown"])
def test_nothing_asked_or_nothing_found_is_an_empty_list(query):
    assert BM25Search(passages("a b", "c")).search([query, "c"], 5)[0] == []


def test_a_passage_without_words_is_no_obstacle():
    backend = BM25Search([("1", Document("", "!!")), ("2", Document("", "word")), ("3", Document("", "??"))])
    assert [d.text for d in backend.search(["word !!"], 5)[0]] == ["word"]


def test_B41_a_passage_under_two_ids_is_shown_once():
    twin = Document("Oslo", "capital of Norway")
    corpus = [("1", twin), ("2", Document("Bergen", "in Norway, a city of Norway")), ("3", twin)]
    encoder = HashEncoder()
    for backend in (BM25Search(corpus), DenseSearch(corpus, encoder)):
        (found,) = backend.search(["capital of Norway"], 3)
        assert [document.title for document in found] == ["Oslo", "Bergen"]
    same_text = [("1", Document("Oslo", "a city")), ("2", Document("Bergen", "a city"))]
    assert titles(BM25Search(same_text).search(["city"], 3)) == [["Oslo", "Bergen"]]  # another title: another passage


def test_one_list_for_each_query_in_order_and_alone_as_in_a_batch():
    corpus = passages("alpha beta", "beta gamma", "gamma delta", "delta alpha")
    queries = ["gamma", "", "alpha beta", "nothing here", "delta", "gamma"]
    for backend in (BM25Search(corpus), DenseSearch(corpus, HashEncoder())):
        together = backend.search(queries, 2)
        assert together == [backend.search([query], 2)[0] for query in queries]
        assert len(together) == 6 and together[1] == [] and together[0] == together[5]
        assert backend.search([], 2) == []
        with pytest.raises(ValueError, match="top_k=0"):
            backend.search(queries, 0)


def test_B45_vector_length_never_ranks():
    table = {"far\nx": [6.0, 8.0], "near\nx": [1.0, 0.0], "q": [5.0, 0.0]}
    backend = DenseSearch([("1", Document("far", "x")), ("2", Document("near", "x"))], TableEncoder(table))
    assert titles(backend.search(["q"], 2)) == [["near", "far"]]
    assert np.allclose(backend.vectors, [[0.6, 0.8], [1.0, 0.0]])


def test_B47_passages_and_queries_are_encoded_as_what_they_are_and_prefixes_are_the_encoders():
    encoder = TableEncoder({"t0\nfirst": [1.0, 0.0], "who": [1.0, 0.0]})
    backend = DenseSearch(passages("first"), encoder)
    backend.search(["who"], 1)
    assert encoder.calls == [("t0\nfirst", "passage"), ("who", "query")]


def test_a_query_that_means_nothing_to_the_encoder_finds_nothing():
    backend = DenseSearch(passages("first", "second"), TableEncoder({"t0\nfirst": [1.0, 0.0], "who": [0.0, 2.0]}))
    assert titles(backend.search(["unknown", "who"], 1)) == [[], ["t0"]]


def test_dense_ties_are_in_corpus_order():
    table = {f"t{i}\nsame": [1.0, 1.0] for i in range(30)} | {"q": [1.0, 0.0]}
    backend = DenseSearch(passages(*["same"] * 30), TableEncoder(table))
    for asked in (1, 25):  # faiss multiplies matrices from 20 queries on
        assert titles(backend.search(["q"] * asked, 4)) == [["t0", "t1", "t2", "t3"]] * asked


def corpus_file(folder: Path, name: str, *records: tuple[str, str, str]) -> str:
    path = folder / name
    rows = [json.dumps({"id": i, "title": title, "text": text}) for i, title, text in records]
    path.write_text("\n".join(rows) + "\n")
    return str(path)


class Counting(HashEncoder):
    def __init__(self, dim: int = 1024) -> None:
        super().__init__(dim)
        self.kinds: list[str] = []

    def encode(self, texts, kind):
        self.kinds.append(kind)
        return super().encode(texts, kind)


@pytest.mark.parametrize("backend", ["bm25", "dense", "hybrid"])
def test_an_index_is_made_of_the_corpus_once_and_then_opened(tmp_path, backend):
    rows = ("1", "Oslo", "capital"), ("2", "Bergen", "city"), ("3", "Oslo", "capital")
    corpus = corpus_file(tmp_path, "c.jsonl", *rows)
    cfg = SearchConfig(backend, (corpus,), str(tmp_path / "deep" / "index"))
    made = open_search(cfg, HashEncoder())
    encoder = Counting()
    opened = open_search(cfg, encoder)
    in_memory = open_search(SearchConfig(backend, (corpus,)), HashEncoder())
    for queries in (["capital", "city"], ["", "city"]):
        found = opened.search_scored(queries, 2)
        assert found == made.search_scored(queries, 2) == in_memory.search_scored(queries, 2)
        assert [[hit.document for hit in row] for row in found] == opened.search(queries, 2)
    assert found[1][0].id == "2" and set(encoder.kinds) <= {"query"}
    manifest = json.loads((tmp_path / "deep" / "index" / "manifest.json").read_text())
    assert manifest["corpus"] == search.corpus_hash([corpus]) == search.corpus_of(cfg)
    assert (manifest["passages"], manifest["repeated"], manifest["records"], manifest["cut"]) == (2, 1, 3, 0)
    Path(corpus).unlink()
    assert (
        open_search(SearchConfig(backend, index=cfg.index), HashEncoder()).search(["city"], 1)[0][0].title == "Bergen"
    )


def test_corpus_of_several_files(tmp_path):
    one = corpus_file(tmp_path, "1.jsonl", ("a", "Oslo", "capital"), ("b", "Bergen", "city"))
    two = corpus_file(tmp_path, "2.jsonl", ("c", "Oslo", "capital"), ("d", "Rome", "capital of Italy"))
    backend = open_search(SearchConfig("bm25", (one, two)))
    assert sorted(titles(backend.search(["capital"], 5))[0]) == ["Oslo", "Rome"]
    assert search.corpus_hash([one, two]) != search.corpus_hash([two, one]) != search.corpus_hash([one])
    clash = corpus_file(tmp_path, "3.jsonl", ("a", "Paris", "capital"))
    with pytest.raises(ConfigError, match=r"3\.jsonl:1: passage id 'a' is also in .*1\.jsonl"):
        read_corpus([one, clash])


def test_misconfiguration_is_told_in_one_line(tmp_path):
    corpus = corpus_file(tmp_path, "c.jsonl", ("1", "Oslo", "capital"))
    (tmp_path / "nothing.jsonl").touch()
    for cfg, message in [
        (SearchConfig("bm25", (str(tmp_path / "nothing.jsonl"),)), "nothing.jsonl is empty"),
        (SearchConfig("bm25", (str(tmp_path / "nothing.jsonl"),), str(tmp_path / "index")), "nothing.jsonl is empty"),
        (SearchConfig("bm52", (corpus,)), "unknown search backend 'bm52'; did you mean 'bm25'"),
        (SearchConfig("bm25"), "search.corpus is empty"),
        (SearchConfig("bm25", (corpus[:-1],)), "did you mean .*c.jsonl"),
        (SearchConfig("dense", (corpus,)), "needs an encoder"),
    ]:
        with pytest.raises(ConfigError, match=message):
            open_search(cfg)
    with pytest.raises(ConfigError, match="at least one passage"):
        BM25Search([])
    with pytest.raises(ConfigError, match="at least one passage"):
        DenseSearch([], HashEncoder())


def test_reranking_is_opened_with_the_search(tmp_path, monkeypatch):
    corpus = corpus_file(tmp_path, "c.jsonl", ("1", "Oslo", "city"), ("2", "Rome", "city of old"))
    with pytest.raises(ConfigError, match=r"search\.rerank='.*' is not a cross-encoder"):
        open_search(SearchConfig("bm25", (corpus,), rerank=str(tmp_path)))
    monkeypatch.setattr(
        search, "cross_encoder", lambda folder: lambda pairs: np.array([len(text) for _, text in pairs])
    )
    backend = open_search(SearchConfig("bm25", (corpus,), rerank="x", rerank_depth=2))
    assert titles(backend.search(["city"], 1)) == [["Rome"]]
    assert titles(open_search(SearchConfig("bm25", (corpus,))).search(["city"], 1)) == [["Oslo"]]


def test_settings_of_search_are_checked_first(tmp_path):
    corpus = corpus_file(tmp_path, "c.jsonl", ("1", "Oslo", "city"))
    for changes, message in (
        ({"device": "gpu"}, "must be cpu or cuda"),
        ({"threads": 0}, r"search\.threads=0 must be at least 1"),
        ({"breadth": -1}, r"search\.breadth=-1"),
    ):
        with pytest.raises(ConfigError, match=message):
            SearchConfig("bm25", (corpus,), **changes)
    with pytest.raises(ConfigError, match=r"search\.index=|is not a search index"):
        open_search(SearchConfig("bm25", index=str(tmp_path / "nowhere")))
    with pytest.raises(ConfigError, match=r"needs search\.index"):
        open_search(SearchConfig("dense", (corpus,), device="cuda"), HashEncoder())


def test_no_search_refuses_to_be_asked():
    backend = open_search(SearchConfig("none"))
    assert isinstance(backend, NoSearch)
    with pytest.raises(ConfigError, match=r"search\.backend is none"):
        backend.search(["who?"], 5)


def test_bm25_does_not_depend_on_the_hash_seed_and_prints_nothing():
    """bm25s numbers its vocabulary through a set of strings."""
    corpus = [(str(i), Document("", f"w{i % 7} w{i % 5} w{i % 3} x y u{i}")) for i in range(60)]
    queries = ["w1 w2 w3 w4 x", "y w0 w6"]
    here = [[document.text for document in row] for row in BM25Search(corpus).search(queries, 20)]
    code = (
        "from hiexp.search import BM25Search\nfrom hiexp.trajectory import Document\n"
        f"c = [(i, Document('', text)) for i, text in {[(i, d.text) for i, d in corpus]}]\n"
        f"print([[d.text for d in row] for row in BM25Search(c).search({queries}, 20)])"
    )
    environment = os.environ | {"PYTHONHASHSEED": "1", "PYTHONPATH": str(ROOT)}
    there = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert there.stdout.strip() == str(here) and there.stderr == ""


def test_half_of_a_surrogate_pair_in_a_query_or_a_passage_is_no_obstacle():
    corpus = passages("a \ud800 city", "a band")
    asked = []

    def score(pairs):
        asked.extend(pairs)
        return np.arange(len(pairs), 0.0, -1.0)

    for backend in (BM25Search(corpus), DenseSearch(corpus, HashEncoder(64))):
        for found in (backend, Reranked(backend, score, 2)):
            assert found.search(["city \udfff"], 1)[0][0] == corpus[0][1]
    assert asked and not any("\ud800" <= sign <= "\udfff" for pair in asked for text in pair for sign in text)


def test_an_evaluation_states_what_was_searched(tmp_path):
    corpus = corpus_file(tmp_path, "c.jsonl", *((str(i), f"T{i}", f"text {i}") for i in range(50)))
    digest = search.corpus_hash([corpus])
    describe = lambda backend, **more: search.describe_search(SearchConfig(backend, (corpus,), **more))  # noqa: E731
    assert describe("bm25") == {"backend": "bm25", "corpus": digest}
    exact = {"corpus": digest, "kind": "flat", "storage": "float32", "breadth": 0}
    assert describe("hybrid") == exact | {"backend": "hybrid"}
    made = IndexConfig(out=str(tmp_path / "i"), corpus=(corpus,), kind="hnsw", storage="float16", breadth=48)
    build_index(made, HashEncoder())
    hnsw = {"backend": "dense", "corpus": digest, "kind": "hnsw", "storage": "float16", "breadth": 48}
    assert describe("dense", index=made.out) == hnsw
    for name in ("one", "two"):
        (tmp_path / name / "cross").mkdir(parents=True)
        (tmp_path / name / "cross" / "model.safetensors").write_text(name)
    one, two = (
        describe("dense", index=made.out, breadth=99, rerank=str(tmp_path / name / "cross"), rerank_depth=20)
        for name in ("one", "two")
    )
    assert one["rerank"].startswith("cross:") and one["rerank"] != two["rerank"], "weights, not the folder's name"
    assert one | {"rerank": ""} == hnsw | {"breadth": 99, "rerank": "", "rerank_depth": 20}
    assert search.describe_search(SearchConfig("none")) == {"backend": "none", "corpus": "none"}
    web = search.describe_search(SearchConfig("tavily", tavily=TavilyConfig(cache="/x/web", replay=True, topic="news")))
    assert web["corpus"] == "web, recorded in web" and web["web"]["topic"] == "news"
    today = date.today().isoformat()
    assert search.describe_search(SearchConfig("tavily"))["corpus"] == f"web, {today}"
