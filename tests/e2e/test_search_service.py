"""`python -m hiexp.search serve` as a process of its own, asked as the published agents ask, and killed at bad moments.

Must fail when: a dialect gets another shape or other passages than the search in this process; a query is lost or given
to another when a server dies; a stop drops what was taken; a broken connection harms the next one.
"""

import importlib.util
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

from hiexp import http_calls
from hiexp.config import ConfigError
from hiexp.data import Sample
from hiexp.encoder import TfidfEncoder
from hiexp.hek import HEK
from hiexp.protocols import PROTOCOLS
from hiexp.rollout import RolloutConfig, run_rollouts
from hiexp.search import corpus_hash, describe_search, open_search
from hiexp.search_cache import CachedSearch
from hiexp.search_clients import HttpSearch
from hiexp.search_remote_config import HttpConfig
from hiexp.search_types import SearchConfig
from hiexp.trajectory import Source

ROOT = Path(__file__).resolve().parents[2]
MISSING = [name for name in ("fastapi", "uvicorn", "prometheus_client") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (requirements-search.txt)"),
]
WORDS = [
    "oslo",
    "bern",
    "rome",
    "river",
    "mayor",
    "castle",
    "year",
    "born",
    "album",
    "film",
    "north",
    "tower",
    "bridge",
]
WORDS += ["\u00e9t\u00e9", "\u4e2d\u6587"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """4,000 passages; every tenth without a title, some of several lines."""
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    lines = []
    for i in range(4000):
        text = " ".join(WORDS[(i * k + k * k) % len(WORDS)] for k in range(2, 40)) + f" number{i}"
        title = "" if i % 10 == 0 else f'The "{WORDS[i % len(WORDS)]}" {i}'
        lines.append(json.dumps({"id": f"doc-{i}", "title": title, "text": text.replace("river", "river\nmayor")}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def in_process(corpus):
    return open_search(SearchConfig("bm25", (str(corpus),)))


@contextmanager
def served(corpus, *words):
    """The process and its address; it is killed if the test did not end it."""
    command = [sys.executable, "-m", "hiexp.search", "serve", f"search.corpus=[{corpus}]", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    said: queue.Queue[str] = queue.Queue()
    reader = threading.Thread(target=lambda: [said.put(line) for line in process.stdout], daemon=True)
    reader.start()
    try:
        line = said.get(timeout=90)
        assert line.startswith("serving 4000 passages on http://127.0.0.1:"), line
        yield process, line.split()[-1]
    finally:
        process.kill()
        process.wait(10)
        reader.join(10)
        process.stdout.close()


@pytest.fixture(scope="module")
def url(corpus):
    with served(corpus, "port=0", "top_k=4") as (_, address):
        yield address


def post(address, body):
    request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as response:
        assert response.status == 200
        return json.loads(response.read())


QUERIES = ["castle of oslo", "\u00e9t\u00e9 \u4e2d\u6587 album", "number17", "who was born north", ""]


def search_r1(url, queries, k):
    answer = post(f"{url}/retrieve", {"queries": queries, "topk": k, "return_scores": True})
    assert set(answer) == {"result"}
    for row in answer["result"]:
        assert [one["score"] for one in row] == sorted((one["score"] for one in row), reverse=True)
    return [[(one["document"]["id"], one["document"]["contents"]) for one in row] for row in answer["result"]]


def search_r1_bare(url, queries, k):
    answer = post(f"{url}/retrieve", {"queries": queries, "topk": k, "return_scores": False})
    return [[(one["id"], one["contents"]) for one in row] for row in answer["result"]]


def skyrl(url, queries, k):
    rows = []
    for query in queries:
        (row,) = post(f"{url}/retrieve", {"query": query, "topk": k, "return_scores": True})["result"]
        rows.append([(one["document"]["id"], one["document"]["contents"]) for one in row])
    return rows


def zerosearch(url, queries, k):
    return [[("", one["text"]) for one in post(f"{url}/retrieve", {"query": query, "top_k": k})] for query in queries]


def flashrag(url, queries, k):
    rows = []
    for query in queries:
        plain = post(f"{url}/search", {"query": query, "top_n": k, "return_score": False})
        documents, scores = post(f"{url}/search", {"query": query, "top_n": k, "return_score": True})
        assert documents == plain and len(scores) == len(documents)
        rows.append([(one["id"], one["contents"]) for one in plain])
    return rows


def flashrag_batch(url, queries, k):
    answer = post(f"{url}/batch_search", {"query": queries, "top_n": k, "return_score": False})
    documents, scores = post(f"{url}/batch_search", {"query": queries, "top_n": k, "return_score": True})
    assert documents == answer and [len(row) for row in scores] == [len(row) for row in documents]
    return [[(one["id"], one["contents"]) for one in row] for row in answer]


def r1_searcher(url, queries, k):
    answer = post(f"{url}/queries", {"queries": queries, "k": k})
    assert answer["queries"] == queries
    return [[("", text) for text in row] for row in answer["answers"]]


@pytest.mark.parametrize("k", [1, 3, 20])
@pytest.mark.parametrize(
    "ask",
    [search_r1, search_r1_bare, skyrl, zerosearch, flashrag, flashrag_batch, r1_searcher],
    ids=lambda f: f.__name__,
)
def test_each_published_client_gets_what_the_search_in_this_process_finds(url, in_process, ask, k):
    truth = in_process.search_scored(QUERIES, k)
    for row, found in zip(ask(url, QUERIES, k), truth, strict=True):
        contents = [f'"{one.document.title}"\n{one.document.text}' for one in found]
        assert [text for _, text in row] == contents
        if row and row[0][0]:
            assert [key for key, _ in row] == [one.id for one in found]
        # as Search-R1 takes a passage apart: the first line is the title
        titles = [text.split("\n")[0].strip('"') for _, text in row]
        assert titles == [one.document.title.strip('"') for one in found]


def test_health_names_the_corpus(url, corpus):
    with urllib.request.urlopen(f"{url}/health", timeout=10) as response:
        health = json.loads(response.read())
    facts = {"backend": "bm25", "corpus": corpus_hash([corpus])}
    assert health == facts | {"passages": 4000, "status": "ok"}
    asked = SearchConfig("http", http=HttpConfig((url,)))
    said = {"backend": "http", "corpus": facts["corpus"], "server": {"backend": "bm25", "passages": 4000}}
    assert describe_search(asked) == said, "an evaluation over HTTP states what was searched"


@pytest.mark.slow
def test_B95_servers_with_other_encoders_are_not_taken_for_one(corpus, tmp_path):
    """The same corpus, other vectors: which of them is asked decides what is found."""
    TfidfEncoder.fit(WORDS).save(tmp_path / "tfidf.json")
    one = ("port=0", "search.backend=dense", "encoder.kind=hash")
    two = (*one[:2], "encoder.kind=tfidf", f"encoder.path={tmp_path / 'tfidf.json'}")
    with served(corpus, *one) as (_, first), served(corpus, *two) as (_, second):
        facts = [describe_search(SearchConfig("http", http=HttpConfig((address,)))) for address in (first, second)]
        assert [fact["server"]["encoder"].split(":")[0] for fact in facts] == ["hash", "tfidf"]
        assert facts[0]["corpus"] == facts[1]["corpus"]
        with pytest.raises(ConfigError, match="serve different things"):
            describe_search(SearchConfig("http", http=HttpConfig((first, second))))


def test_a_null_or_missing_number_is_the_servers_own(url):
    for body in ({"queries": ["castle"], "topk": None}, {"queries": ["castle"]}):
        assert len(post(f"{url}/retrieve", body)["result"][0]) == 4


def client(*urls, **changes):
    settings = {"timeout": 20.0, "max_retries": 5, "queries_per_request": 4, "breaker_seconds": 0.3} | changes
    return HttpSearch(HttpConfig(urls, **settings))


@pytest.mark.parametrize("dialect", ["search_r1", "skyrl", "zerosearch", "flashrag", "flashrag_batch", "r1_searcher"])
def test_our_client_finds_what_the_search_in_this_process_finds(url, in_process, dialect):
    assert client(url, dialect=dialect).search(QUERIES, 5) == in_process.search(QUERIES, 5)


def test_long_and_odd_queries_are_searched_and_longer_ones_are_told(url, in_process):
    odd = ["tower " * 1700, "\u0001 \u202e\U0001f600 castle", "\u00e9t\u00e9 " * 2500, '"}]<search>\\ bern']
    assert client(url).search(odd, 4) == in_process.search(odd, 4)
    with pytest.raises(ConfigError, match=r"search for 'x{300}\.\.\. \(20001 characters\)' .*HTTP 422 .*at most 20000"):
        client(url).search(["x" * 20001], 4)


def many(count):
    return [f"{WORDS[i % 13]} {WORDS[(i * 7) % 15]} number{i}" for i in range(count)]


def test_forty_clients_at_once(url, in_process):
    queries, results = many(40), {}

    def ask(query):
        results[query] = [search_r1(url, [query], 3)[0] for _ in range(3)]

    threads = [threading.Thread(target=ask, args=(query,)) for query in queries]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for query, found in zip(queries, in_process.search_scored(queries, 3), strict=True):
        assert [[key for key, _ in row] for row in results[query]] == [[one.id for one in found]] * 3


def test_a_server_killed_in_the_middle_loses_nothing(corpus, url, in_process, monkeypatch):
    monkeypatch.setattr(http_calls, "FIRST_PAUSE", 0.05)
    queries = many(600)
    with served(corpus, "port=0") as (process, doomed):
        search, answered = client(doomed, url), []
        send = search._caller.post

        async def post_and_kill(address, *rest):
            answer = await send(address, *rest)
            answered.append(address)
            if sum(address.startswith(doomed) for address in answered) == 5:
                process.kill()  # while other requests are under way
            return answer

        monkeypatch.setattr(search._caller, "post", post_and_kill)
        found = search.search(queries, 3)
        assert 5 <= sum(address.startswith(doomed) for address in answered) < 100
        assert found == in_process.search(queries, 3)
        process.wait(10)
        assert search.search(queries[:8], 3) == in_process.search(queries[:8], 3)
        assert search.replicas[0].failures and not search.replicas[1].failures


def test_a_server_that_is_started_again_is_waited_for(corpus, in_process, monkeypatch):
    monkeypatch.setattr(http_calls, "FIRST_PAUSE", 0.2)
    with served(corpus, "port=0") as (process, url):
        search, port = client(url, max_retries=12, breaker_seconds=1.0), url.rsplit(":", 1)[1]
        assert search.search(["castle"], 3) == in_process.search(["castle"], 3)
        process.kill()
        process.wait(10)
        found = []
        thread = threading.Thread(target=lambda: found.append(search.search(["castle", "tower"], 3)))
        thread.start()
        with served(corpus, f"port={port}"):
            thread.join(60)
        assert found == [in_process.search(["castle", "tower"], 3)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_is_an_orderly_end(corpus, number):
    with served(corpus, "port=0") as (process, url):
        process.send_signal(number)  # at once: whoever reads that it serves may stop it
        assert process.wait(30) == 0
        with pytest.raises(OSError):
            post(f"{url}/retrieve", {"queries": ["a"]})


def test_broken_connections_harm_nobody_else(url, in_process):
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps({"queries": ["castle"]}).encode()
    head = b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    for sent in (b"", head, head + body[:5], head + body, b"nonsense\r\n\r\n", head.replace(b"POST", b"P" * 70000)):
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
    assert client(url).search(["castle"], 3) == in_process.search(["castle"], 3)


def test_a_port_in_use_is_told(corpus, url):
    command = [sys.executable, "-m", "hiexp.search", "serve", f"search.corpus=[{corpus}]", f"port={url.split(':')[-1]}"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90)
    assert ended.returncode == 2 and "Address already in use; choose another port" in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1


def test_a_rollout_over_http_is_the_rollout_in_this_process(url, in_process, scripted_engine):
    def roll(search):
        engine = scripted_engine(
            ["<search> castle of oslo </search>", "<search> tower </search>", "<answer> a </answer>"]
        )
        cfg = RolloutConfig(protocol="search_r1", group_size=2, max_response_tokens=4000)
        samples = [Sample("s", "?", ("a",)), Sample("t", "!", ("a",))]
        parts = (engine, engine.tokenizer, PROTOCOLS["search_r1"], search, HEK.empty(), samples, cfg, 0)
        return [trajectory.to_json() for trajectory in run_rollouts(*parts)]

    over_http = roll(CachedSearch(client(url), 100))
    assert over_http == roll(in_process)
    assert any(segment[0] == Source.DOCUMENT.value for segment in over_http[0]["segments"])
