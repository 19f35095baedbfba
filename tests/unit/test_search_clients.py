"""The client against servers that fail in every way, on the loopback.

Must fail when: a failure becomes an empty result or is not told with its query; answers are given to other queries; a
request has no end; a dead server is asked again and again while another lives; Retry-After is ignored; the token shows.
"""

import gc
import re
import socket
import threading
import time

import pytest
from search_double import serving

from hiexp import http_calls
from hiexp.assemble import Config
from hiexp.config import ConfigError, describe
from hiexp.search import describe_search, open_search
from hiexp.search_clients import HttpSearch
from hiexp.search_remote_config import HttpConfig
from hiexp.search_types import SearchConfig
from hiexp.trajectory import Document


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(http_calls, "FIRST_PAUSE", 0.01)


def answer(body, number=0):
    """What an honest Search-R1 server says: one passage that names its query."""
    one = lambda query: {"document": {"id": f"id {query}", "contents": f'"T {query}"\nabout {query}'}, "score": 1.0}  # noqa: E731
    return {"result": [[one(query)] for query in body["queries"]]}


def client(*urls, **changes):
    settings = {"timeout": 2.0, "max_retries": 3, "breaker_seconds": 0.2} | changes
    return HttpSearch(HttpConfig(urls, **settings))


def expected(queries):
    return [[Document(f"T {query}", f"about {query}")] for query in queries]


def test_many_queries_come_back_in_order_over_few_connections():
    queries = [f"q{i} \u00e9\u4e2d" for i in range(50)]
    with serving(answer) as server:
        search = client(server.url, queries_per_request=8, connections=3)
        for _ in range(3):
            assert search.search(queries, 2) == expected(queries)
        assert sorted(len(body["queries"]) for body in server.bodies) == [2] * 3 + [8] * 18
        assert {body["topk"] for body in server.bodies} == {2} and set(server.paths) == {"/retrieve"}
        assert server.widest <= 3 and server.connections <= 3
        found = search.search_scored(["x"], 1)[0][0]
        assert (found.id, found.score) == ("id x", 1.0)


def test_requests_are_under_way_at_once():
    def slow(body, number):
        time.sleep(0.2)
        return answer(body)

    with serving(slow) as server:
        client(server.url, queries_per_request=1, connections=8).search([f"q{i}" for i in range(8)], 1)
        assert 4 < server.widest <= 8


def test_blank_queries_find_nothing_and_are_not_sent():
    with serving(answer) as server:
        assert client(server.url).search([" ", "a", ""], 1) == [[], *expected(["a"]), []]
        assert [body["queries"] for body in server.bodies] == [["a"]]
        assert client(server.url).search([" "], 1) == [[]] and len(server.bodies) == 1


def test_a_server_that_gives_more_than_was_asked_for_is_cut():
    three = {"result": [[{"contents": f"t\n{i}"} for i in range(3)]]}
    with serving(lambda body, number: three) as server:
        assert [d.text for d in client(server.url).search(["a"], 2)[0]] == ["0", "1"]


PASSING = {
    "500": (500, {}, "oops"),
    "503": (503, {"Retry-After": "0"}, "busy"),
    "no JSON": (200, {}, "<html>proxy</html>"),
    "half JSON": (200, {}, '{"result": [['),
    "closed": "close",
    "half closed": "half",
    "too few": {"result": []},
    "too many": {"result": [[], []]},
    "null": {"result": [None]},
    "other schema": {"hits": []},
}


@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING)
def test_B40_a_fault_that_passes_is_tried_again(fault):
    with serving(lambda body, number: fault if number <= 2 else answer(body)) as server:
        search = client(server.url)
        assert search.search(["a"], 1) == expected(["a"])
        assert len(server.bodies) == 3 and search.counters() == {"search/failed_requests": 2}


@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING)
def test_B40_a_fault_that_stays_ends_the_run_with_the_query(fault):
    with serving(lambda body, number: fault if "bad" in body["queries"][0] else answer(body)) as server:
        with pytest.raises(ConfigError, match=r"search for 'bad one' at http.* failed 4 times, last: "):
            client(server.url, queries_per_request=1).search(["good", "bad one"], 1)
        assert sum("bad one" in body["queries"] for body in server.bodies) == 4


def test_B93_the_keys_of_an_unknown_answer_are_told():
    strange = serving(lambda body, number: {"hits": [], "took": 3})
    with strange as server, pytest.raises(ConfigError, match="'hits', 'took'"):
        client(server.url, max_retries=0).search(["a"], 1)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422, 302])
def test_what_cannot_pass_is_told_at_once(status):
    with serving(lambda body, number: (status, {"Location": "http://127.0.0.1:1/"}, "because")) as server:
        with pytest.raises(ConfigError, match=f"'a' and 1 more at http.*HTTP {status} because; check search.http"):
            client(server.url).search(["a", "b"], 1)
        assert len(server.bodies) == 1


@pytest.mark.parametrize("fault", ["hang", "drip"])
def test_silence_ends_with_the_timeout(fault):
    with serving(lambda body, number: fault if number == 1 else answer(body)) as server:
        began = time.perf_counter()
        assert client(server.url, timeout=0.3).search(["a"], 1) == expected(["a"])
        assert 0.3 <= time.perf_counter() - began < 10
    with serving(lambda body, number: fault) as server:
        began = time.perf_counter()
        with pytest.raises(ConfigError, match=r"failed 2 times, last: .*no answer within 0\.2 s"):
            client(server.url, timeout=0.2, max_retries=1).search(["a"], 1)
        assert time.perf_counter() - began < 10


def test_headers_one_by_one_do_not_hold_a_request():
    """A server that sends a byte now and then never lets a timeout between bytes expire."""
    listener = socket.create_server(("127.0.0.1", 0))
    stop = threading.Event()

    def drip():
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            for byte in b"HTTP/1.1 200 OK\r\n" + b"X-A: b\r\n" * 1000:
                if stop.wait(0.02):
                    return
                try:
                    connection.send(bytes([byte]))
                except OSError:
                    return

    thread = threading.Thread(target=drip, daemon=True)
    thread.start()
    began = time.perf_counter()
    with pytest.raises(ConfigError, match=r"no answer within 0\.4 s"):
        client(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=0.4, max_retries=0).search(["a"], 1)
    assert time.perf_counter() - began < 10
    stop.set()
    thread.join()
    listener.close()


def test_nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(
        ConfigError, match=f"search for 'a' at http://127.0.0.1:{port}/retrieve failed 2 times, last: .*"
    ):
        client(f"http://127.0.0.1:{port}", max_retries=1).search(["a"], 1)


def test_retry_after_is_waited_for():
    with serving(lambda body, number: (429, {"Retry-After": "0.4"}, "slow") if number == 1 else answer(body)) as server:
        client(server.url).search(["a"], 1)
        assert server.times[1] - server.times[0] >= 0.4


def test_another_server_takes_over_without_a_pause(monkeypatch):
    monkeypatch.setattr(http_calls, "FIRST_PAUSE", 60.0)
    with serving(lambda body, number: (500, {}, "")) as broken, serving(answer) as sound:
        search = client(broken.url, sound.url, breaker_failures=2, breaker_seconds=60.0)
        began = time.perf_counter()
        for i in range(10):
            assert search.search([f"q{i}"], 1) == expected([f"q{i}"])
        assert time.perf_counter() - began < 20
        assert len(broken.bodies) == 2, "after two failures it is left alone"
        assert len(sound.bodies) == 10


def test_a_server_that_is_well_again_is_used_again():
    with serving(lambda body, number: "close" if number <= 2 else answer(body)) as server, serving(answer) as other:
        search = client(server.url, other.url, breaker_failures=2, breaker_seconds=0.15, queries_per_request=1)
        search.search(["a", "b", "c", "d"], 1)
        time.sleep(0.2)
        for i in range(3):
            search.search([f"q{i}{j}" for j in range(8)], 1)
        assert len(server.bodies) > 6 and search.replicas[0].failures == 0


def test_work_is_spread_over_servers():
    with serving(answer) as one, serving(answer) as two:
        slow = lambda body, number: time.sleep(0.05) or answer(body)  # noqa: E731
        one.reply = two.reply = slow
        client(one.url, two.url, queries_per_request=1).search([f"q{i}" for i in range(20)], 1)
        assert min(len(one.bodies), len(two.bodies)) >= 5


def test_when_all_are_left_alone_it_waits_until_one_may_be_tried():
    with serving(lambda body, number: "close" if number <= 3 else answer(body)) as server:
        search = client(server.url, breaker_failures=1, breaker_seconds=0.15)
        assert search.search(["a"], 1) == expected(["a"])
        assert server.times[-1] - server.times[0] >= 0.4


def test_many_threads_share_a_client():
    wrong = []
    with serving(answer) as server:
        search = client(server.url, queries_per_request=2)

        def ask(name):
            queries = [f"{name}-{i}" for i in range(5)]
            for _ in range(10):
                if search.search(queries, 1) != expected(queries):
                    wrong.append(name)

        threads = [threading.Thread(target=ask, args=(name,)) for name in "abcdef"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_a_client_that_is_gone_leaves_no_thread_and_no_connection():
    before = set(threading.enumerate())
    with serving(answer) as server:
        search = client(server.url)
        search.search(["a"], 1)
        (thread,) = [one for one in set(threading.enumerate()) - before if one.name == "http-search"]
        del search
        gc.collect()
        thread.join(10)
        assert not thread.is_alive()


def test_the_token_is_sent_and_shown_nowhere(monkeypatch):
    monkeypatch.setenv("MY_SEARCH_TOKEN", "s3cret-canary-0001")
    with serving(lambda body, number: (401, {}, "no s3cret-canary-0001")) as server:
        search = client(server.url, token_env="MY_SEARCH_TOKEN")
        with pytest.raises(ConfigError) as error:
            search.search(["a"], 1)
        assert server.headers[0]["Authorization"] == "Bearer s3cret-canary-0001"
        assert "canary" not in str(error.value) and "HTTP 401" in str(error.value)
    monkeypatch.delenv("MY_SEARCH_TOKEN")
    with pytest.raises(
        ConfigError, match=r"search.http.token_env=MY_SEARCH_TOKEN, but there is no such environment variable"
    ):
        client("http://127.0.0.1:1", token_env="MY_SEARCH_TOKEN")


def test_a_long_query_is_sent_whole_and_shown_short():
    long = "word " * 2000
    with serving(lambda body, number: answer(body) if number == 1 else (422, {}, "too long")) as server:
        assert client(server.url).search([long], 1) == [[Document(f"T {long}".strip(), f"about {long}".strip())]]
        with pytest.raises(ConfigError, match=re.escape("(10000 characters)")) as error:
            client(server.url).search([long], 1)
        assert len(str(error.value)) < 700


def test_a_huge_answer_is_refused(monkeypatch):
    monkeypatch.setattr(http_calls, "MOST_BYTES", 1000)
    huge = serving(lambda body, number: {"result": [[{"contents": "x" * 2000}]]})
    with huge as server, pytest.raises(ConfigError, match="an answer of more than"):
        client(server.url, max_retries=0).search(["a"], 1)


@pytest.mark.parametrize(
    ("dialect", "path", "reply"),
    [
        (
            "skyrl",
            "/retrieve",
            lambda b: {"result": [[{"document": {"id": "1", "contents": f"T\n{b['query']}"}, "score": 1}]]},
        ),
        ("zerosearch", "/retrieve", lambda b: [{"text": f"T\n{b['query']}"}]),
        ("flashrag", "/search", lambda b: [{"id": "1", "contents": f"T\n{b['query']}"}]),
        ("flashrag_batch", "/batch_search", lambda b: [[{"id": "1", "contents": f"T\n{q}"}] for q in b["query"]]),
        (
            "r1_searcher",
            "/queries",
            lambda b: {"queries": b["queries"], "answers": [[f"T\n{q}"] for q in b["queries"]]},
        ),
    ],
)
def test_other_peoples_servers_can_be_asked(dialect, path, reply):
    with serving(lambda body, number: reply(body)) as server:
        found = client(server.url, dialect=dialect).search(["a", "b", "c"], 4)
        assert found == [[Document("T", query)] for query in "abc"]
        assert set(server.paths) == {path}
        asked = client(f"{server.url}/v2/find", dialect=dialect)
        asked.search(["a"], 1)
        assert server.paths[-1] == "/v2/find"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"urls": ()}, "search.http.urls is empty"),
        ({"urls": ("localhost:8000",)}, "no address such as"),
        ({"urls": ("ftp://x",)}, "no address such as"),
        ({"urls": ("http://u:p@x",)}, "user or password"),
        ({"urls": ("http://x?token=1",)}, "no address such as"),
        ({"timeout": 0}, "timeout=0"),
        ({"max_retries": -1}, "max_retries=-1"),
        ({"connections": 0}, "connections=0"),
        ({"token_env": "hunter2"}, "NAME of an environment variable"),
    ],
)
def test_settings_that_cannot_work_are_told(changes, told):
    with pytest.raises(ConfigError, match=told) as error:
        HttpSearch(HttpConfig(**({"urls": ("http://127.0.0.1:1",)} | changes)))
    assert "hunter2" not in str(error.value)


def test_it_is_a_backend_with_documented_settings():
    assert isinstance(open_search(SearchConfig("http", http=HttpConfig(("http://127.0.0.1:1",)))), HttpSearch)
    keys = describe(Config)
    for key in ("search.http.urls", "search.http.dialect", "search.tavily.ttl_days", "search.cache"):
        assert re.search(rf"{key} +\S.*  \S", keys)
    with pytest.raises(ValueError, match="top_k=0"):
        client("http://127.0.0.1:1").search(["a"], 0)


def test_half_of_a_surrogate_pair_is_no_obstacle():
    odd = {"result": [[{"id": "i\ud800", "contents": "T \udfff\nx \ud800"}, {"title": "\ud900", "text": "y"}]]}
    with serving(lambda body, number: odd) as server:
        (row,) = client(server.url).search_scored(["a \ud800"], 2)
        assert server.bodies[0]["queries"] == ["a \ufffd"]
        assert [(one.id, one.document) for one in row[:1]] == [("i\ufffd", Document("T \ufffd", "x \ufffd"))]
        assert row[1].document == Document("\ufffd", "y")


def test_an_empty_passage_is_none_and_nothing_but_empty_ones_is_a_failure():
    some = {"result": [[{"contents": ""}, {"contents": "T\nx"}, {"title": " ", "text": " "}]]}
    with serving(lambda body, number: some) as server:
        assert client(server.url).search(["a"], 3) == [[Document("T", "x")]]
    none = serving(lambda body, number: {"result": [[{"contents": ""}, {"contents": " \n "}]]})
    with none as server, pytest.raises(ConfigError, match="all 2 results of a query are empty"):
        client(server.url, max_retries=0).search(["a"], 3)


def test_what_servers_search_is_known_where_they_say_it():
    facts = {"status": "ok", "corpus": "abc", "passages": 3, "kind": "ivf", "breadth": 16}
    describe = lambda *urls: describe_search(SearchConfig("http", http=HttpConfig(urls, timeout=5.0)))  # noqa: E731
    with serving(answer) as one, serving(answer) as two, serving(answer) as foreign:
        one.health, two.health = facts, facts | {"status": "busy"}
        server = {"passages": 3, "kind": "ivf", "breadth": 16}
        assert describe(one.url, two.url + "/retrieve") == {"backend": "http", "corpus": "abc", "server": server}
        unknown = {"backend": "http", "corpus": "unknown", "server": {}}
        foreign.health = {"corpus": 3}
        assert describe(foreign.url) == unknown == describe("http://127.0.0.1:9")
        foreign.health = None
        assert describe(foreign.url, one.url)["corpus"] == "abc"
        two.health = facts | {"breadth": 64}
        with pytest.raises(ConfigError, match="serve different things"):
            describe(one.url, two.url)
