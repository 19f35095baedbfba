"""The application behind the server, without a socket: limits, words of refusal, counters, the token.

Must fail when: what is too long, wrong or forbidden is searched; a refusal has no reason; a failed search is answered
with 200; /metrics does not count; a token is not asked for. (tests/e2e/test_search_service.py starts the real process.)
"""

import asyncio
import json
import re
import socket
import threading
import time

import pytest

from hiexp.config import ConfigError
from hiexp.encoder import HashEncoder
from hiexp.search import BM25Search
from hiexp.search_server import ServeConfig, build_app, listen, main, serve
from hiexp.search_types import ScoredDocument, ScoredSearch, SearchConfig
from hiexp.trajectory import Document

httpx2 = pytest.importorskip("httpx2")
pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")

BM25 = BM25Search([("p1", Document("Oslo", "Oslo is in Norway")), ("p2", Document("Bern", "Bern is in Switzerland"))])


def play(scene, backend=BM25, **changes):
    app = build_app(ServeConfig(**changes), backend)

    async def run():
        transport = httpx2.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx2.AsyncClient(transport=transport, base_url="http://t") as http,
        ):
            return await scene(http)

    return asyncio.run(asyncio.wait_for(run(), 30))


def post(path, body, headers=None, **changes):
    """(status, answer) of one request."""

    async def scene(http):
        data = body if isinstance(body, (bytes, str)) else json.dumps(body)
        response = await http.post(path, content=data, headers=headers)
        return response.status_code, response.json()

    return play(scene, **changes)


def test_an_answer():
    status, said = post("/retrieve", {"queries": ["where is Oslo", ""], "topk": 1, "return_scores": True})
    assert status == 200 and said["result"][1] == []
    ((first,), _) = said["result"]
    assert first["document"] == {"id": "p1", "contents": '"Oslo"\nOslo is in Norway'} and first["score"] > 0


@pytest.mark.parametrize(
    ("path", "body", "status", "told", "changes"),
    [
        ("/retrieve", "{", 400, "no JSON", {}),
        ("/retrieve", b"\xff\xfe", 400, "no JSON", {}),
        ("/retrieve", "[" * 100000, 400, "no JSON", {}),
        ("/retrieve", [], 422, "JSON object", {}),
        ("/retrieve", {"queries": ["a"] * 3}, 422, "at most 2", {"max_queries": 2}),
        ("/retrieve", {"queries": ["a" * 11]}, 422, "11 characters; at most 10", {"max_characters": 10}),
        ("/retrieve", {"queries": ["a"], "topk": 9}, 422, "from 1 to 8", {"max_top_k": 8}),
        ("/retrieve", {"queries": ["a" * (1 << 20)]}, 413, "more than 1 MB", {"max_megabytes": 1}),
        ("/search", {"path": "/etc/passwd"}, 422, "'path'", {}),
        ("/retrieve", '{"queries": ["a \\ud800"]}', 422, "half of a surrogate pair", {}),
        ("/nowhere", {"queries": ["a"]}, 404, "there are POST /retrieve, /search", {}),
        ("/retrieve/", {"queries": ["a"]}, 404, "there are POST /retrieve, /search", {}),
        ("/health", {}, 405, "Method Not Allowed", {}),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_cannot_be_answered_is_refused_with_a_reason(path, body, status, told, changes):
    got, said = post(path, body, **changes)
    assert got == status and told in said["error"]


def test_other_paths_and_methods_are_not_there():
    async def scene(http):
        get, other = await http.get("/retrieve"), await http.post("/../etc/passwd", content="{}")
        docs = await http.get("/docs")
        return get.status_code, other.status_code, docs.status_code

    assert play(scene) == (405, 404, 404)


def test_non_ascii_and_ten_thousand_characters_are_searched():
    status, said = post("/queries", {"queries": ["\u00d8slo \u4e2d\u6587 \U0001f600 Oslo", "Bern " * 2000], "k": 1})
    assert status == 200 and said["queries"][0] == "\u00d8slo \u4e2d\u6587 \U0001f600 Oslo"
    assert [row[0].split("\n")[0] for row in said["answers"]] == ['"Oslo"', '"Bern"']


class Held(ScoredSearch):
    def __init__(self):
        self.go = threading.Event()

    def search_scored(self, queries, top_k):
        self.go.wait(10)
        if "bad" in queries:
            raise ValueError("no index for bad, sk-abcdefghijklmnop1234")
        return [[ScoredDocument("1", 1.0, Document("", query))] for query in queries]


def test_late_and_crowded_requests_are_told_so():
    backend = Held()

    async def scene(http):
        ask = lambda n: http.post("/queries", json={"queries": [f"q{i}" for i in range(n)]})  # noqa: E731
        first, waiting = asyncio.create_task(ask(1)), []
        await asyncio.sleep(0.05)
        waiting.append(asyncio.create_task(ask(2)))
        await asyncio.sleep(0.05)
        crowded = await ask(3)
        late = await first
        backend.go.set()
        await asyncio.gather(*waiting)
        return crowded, late, await ask(1)

    crowded, late, later = play(scene, backend, timeout=0.3, max_waiting=4)
    assert crowded.status_code == 503 and crowded.headers["Retry-After"] == "1" and "waiting" in crowded.json()["error"]
    assert late.status_code == 504 and "0.3 s" in late.json()["error"]
    assert later.status_code == 200


def test_a_search_that_fails_is_a_500_for_its_cause_alone(capsys):
    backend = Held()
    backend.go.set()

    async def scene(http):
        asked = [http.post("/queries", json={"queries": [query]}) for query in ("a", "bad", "b")]
        return await asyncio.gather(*asked)

    one, bad, two = play(scene, backend)
    assert (one.status_code, bad.status_code, two.status_code) == (200, 500, 200)
    assert "no index for bad" in bad.json()["error"] and "sk-abc" not in bad.text
    assert "no index for bad" in capsys.readouterr().err


def test_a_body_that_does_not_come_is_given_up():
    async def dribble():
        for _ in range(100):
            yield b" "
            await asyncio.sleep(0.05)

    async def scene(http):
        began = time.perf_counter()
        response = await http.post("/retrieve", content=dribble())
        return response.status_code, time.perf_counter() - began

    status, seconds = play(scene, timeout=0.3)
    assert status == 408 and seconds < 4


def test_a_client_that_leaves_in_the_middle_is_no_error_of_the_server():
    app, said = build_app(ServeConfig(), BM25), []
    events = iter([{"type": "http.request", "body": b'{"queries"', "more_body": True}, {"type": "http.disconnect"}])

    async def receive():
        return next(events)

    async def send(event):
        said.append(event)

    async def run():
        scope = {"type": "http", "method": "POST", "path": "/retrieve", "headers": [], "query_string": b""}
        async with app.router.lifespan_context(app):
            await app(scope, receive, send)

    asyncio.run(asyncio.wait_for(run(), 10))
    assert said[0]["status"] == 400


def test_a_token_is_asked_for(monkeypatch):
    monkeypatch.setenv("SEARCH_TOKEN", "right-canary-token")
    body, changes = {"queries": ["Oslo"]}, {"token_env": "SEARCH_TOKEN"}
    assert post("/retrieve", body, **changes)[0] == 401
    assert post("/retrieve", body, {"Authorization": "Bearer wrong"}, **changes)[0] == 401
    assert post("/retrieve", body, {"Authorization": "right-canary-token"}, **changes)[0] == 401
    for scheme in ("Bearer", "bearer"):
        assert post("/retrieve", body, {"Authorization": f"{scheme} right-canary-token"}, **changes)[0] == 200

    async def scene(http):
        return (await http.get("/health")).status_code, (await http.get("/metrics")).status_code

    assert play(scene, **changes) == (200, 401)
    monkeypatch.delenv("SEARCH_TOKEN")
    with pytest.raises(ConfigError, match="token_env=SEARCH_TOKEN, but there is no such environment variable"):
        build_app(ServeConfig(**changes), BM25)


def test_B95_servers_with_other_encoders_say_so():
    """Both serve the same corpus, and rank it differently."""

    async def scene(http):
        return (await http.get("/health")).json()

    said = []
    for encoder in (HashEncoder(64), HashEncoder(32)):
        app = build_app(ServeConfig(search=SearchConfig("dense")), BM25, encoder)

        async def run(app=app):
            async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://t") as http:
                return await scene(http)

        said.append(asyncio.run(run()))
    one, two = said
    assert (one["encoder"], two["encoder"]) == ("hash:none:64", "hash:none:32")
    assert {name for name in one if one[name] != two[name]} == {"encoder"}


def test_a_null_flag_does_not_hide_the_other():
    status, said = post("/search", {"query": "Oslo", "top_n": 1, "return_scores": None, "return_score": True})
    assert status == 200 and len(said) == 2 and said[1][0] > 0


def test_health_and_metrics_count():
    async def scene(http):
        for body in ({"queries": ["Oslo", "Bern"]}, {"queries": ["Oslo"]}, {"nothing": 1}):
            await http.post("/retrieve", json=body)
        return (await http.get("/health")).json(), (await http.get("/metrics")).text

    health, text = play(scene)
    assert health == {"status": "ok", "backend": "bm25", "passages": 2, "corpus": "none"}
    value = lambda name: float(re.search(rf"^hiexp_search_{re.escape(name)} (\S+)$", text, re.MULTILINE)[1])  # noqa: E731
    assert value('requests_total{path="/retrieve",status="200"}') == 2
    assert value('requests_total{path="/retrieve",status="422"}') == 1
    assert value("queries_total") == 3 and value("batches") == 2 and value("waiting") == 0
    assert value('request_seconds_count{path="/retrieve"}') == 3


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["port=70000"], "port=70000"),
        (["top_k=200"], "top_k=200 is above max_top_k=100"),
        (["timeout=0"], "timeout=0"),
        (["batch=0"], "batch=0"),
        (["token_env=TOK"], "token_env must be the NAME of an environment variable that ends in"),
        (["host=nowhere.invalid", "port=0"], "host=nowhere.invalid port=0: "),
        (["search.corpus=[/nowhere.jsonl]", "port=0"], "nowhere.jsonl"),
        (["search.backend=dense", "search.corpus=[x]", "encoder.path=/nowhere", "port=0"], "nowhere"),
    ],
)
def test_settings_that_cannot_work_are_told_in_one_line(words, told, capsys):
    assert main(words) == 2
    said = capsys.readouterr().err
    assert (told in said or "serving needs" in said) and "Unknown error" not in said
    assert len(said.strip().splitlines()) == 1


def test_answers_are_sent_at_once():
    """Nagle's algorithm would hold the second part of each answer back until the client has acknowledged the first."""
    with listen(ServeConfig(port=0)) as listener, socket.create_connection(listener.getsockname()[:2]):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_what_is_not_installed_is_told(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"serving needs fastapi, uvicorn, prometheus_client: pip install -r"):
        serve(ServeConfig(search=SearchConfig(corpus=("x",))))
