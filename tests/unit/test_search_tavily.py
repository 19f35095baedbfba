"""The live web, played by a server on the loopback: budget, memory, replay and every way to fail.

Must fail when: a query is sent uncut, or the cache is asked for what was not sent; an answer of another day, number or
setting counts; a replay asks the network; a failure becomes an empty result; credits are not counted, the cap is passed
or the key shows.
"""

import json
import os
import sys
import time
import types
import warnings
from datetime import date, timedelta

import pytest
from search_double import serving

from hiexp import http_calls
from hiexp.config import ConfigError
from hiexp.search import open_search
from hiexp.search_cache import CachedSearch
from hiexp.search_remote_config import TavilyConfig
from hiexp.search_tavily import AnswerCache, TavilySearch, fit
from hiexp.search_types import SearchConfig
from hiexp.trajectory import Document

KEY = "tvly-canary-0123456789"


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    monkeypatch.setattr(http_calls, "FIRST_PAUSE", 0.01)
    monkeypatch.setenv("TAVILY_API_KEY", KEY)
    monkeypatch.setitem(sys.modules, "tavily", None)  # the REST call, whether the package is installed or not


def page(query, number=0, **more):
    return {
        "url": f"https://x/{query}/{number}",
        "title": f"T {query}",
        "content": f"about {query} {number}",
        "score": 0.9,
    } | more


def answer(body, number=0):
    results = [page(body["query"], i) for i in range(body["max_results"])]
    return {"query": body["query"], "results": results, "response_time": 0.1, "usage": {"credits": 1}}


def tavily(server, **changes):
    return TavilySearch(TavilyConfig(url=server.url, **({"timeout": 2.0, "max_retries": 2} | changes)))


def expected(queries, top_k=1):
    return [[Document(f"T {query}", f"about {query} {i}") for i in range(top_k)] for query in queries]


def test_pages_become_documents_and_the_request_is_the_documented_one():
    with serving(answer) as server:
        search = tavily(server, depth="advanced", topic="news", exclude_domains=("a.org", "b.org"))
        assert search.search(["one", "two \u00e9\u4e2d", "one", " "], 2) == [
            *expected(["one", "two \u00e9\u4e2d", "one"], 2),
            [],
        ]
        assert search.search_scored(["one"], 1)[0][0].id == "https://x/one/0"
        body = next(body for body in server.bodies if body["query"] == "one")
        assert body == {
            "query": "one", "max_results": 2, "search_depth": "advanced", "topic": "news",
            "exclude_domains": ["a.org", "b.org"], "include_usage": True,
        }  # fmt: skip
        assert set(server.paths) == {"/search"} and len(server.bodies) == 3
        assert server.headers[0]["Authorization"] == f"Bearer {KEY}"


def test_B91_a_long_query_is_cut_at_a_word_told_and_remembered_as_sent(tmp_path):
    long = "word " * 200
    with serving(answer) as server:
        search = tavily(server, cache=str(tmp_path))
        with pytest.warns(UserWarning, match="1000 characters is cut to 399|999 characters is cut to 399"):
            found = search.search([long], 1)
        (sent,) = [body["query"] for body in server.bodies]
        assert len(sent) == 399 and sent.endswith("word") and long.startswith(sent)
        assert found == expected([sent])
        assert search.search([sent], 1) == found and len(server.bodies) == 1


@pytest.mark.parametrize(
    ("query", "sent"),
    [
        ("a" * 400, "a" * 400),
        ("a" * 401, "a" * 400),
        ("a" * 399 + " b", "a" * 399),
        (" x ", "x"),
        ("a " + "b" * 500, "a"),
    ],
)
def test_where_a_query_is_cut(query, sent):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert fit(query) == sent


def test_an_answer_is_asked_and_paid_for_once(tmp_path):
    with serving(answer) as server:
        first = tavily(server, cache=str(tmp_path)).search(["a", "b"], 1)
        search = tavily(server, cache=str(tmp_path))
        assert search.search(["b", "a"], 1) == first[::-1]
        assert len(server.bodies) == 2
        assert search.counters() == {"search/credits": 0, "search/web_requests": 0, "search/from_disk": 2}
        for other in ({"depth": "advanced"}, {"topic": "news"}, {"include_domains": ("x.org",)}):
            tavily(server, cache=str(tmp_path), **other).search(["a"], 1)
        tavily(server, cache=str(tmp_path)).search(["a"], 2)
        assert len(server.bodies) == 6, "another setting or number is another question"


def days_ago(folder, days):
    """As if all answers in the cache had been recorded some days ago."""
    for file in folder.rglob("*.json"):
        record = json.loads(file.read_text())
        record["time"] -= days * 86400
        file.write_text(json.dumps(record))
        file.rename(file.with_name(f"{date.today() - timedelta(days)}.json"))


def test_an_answer_counts_for_its_time_to_live(tmp_path):
    with serving(answer) as server:
        tavily(server, cache=str(tmp_path)).search(["a"], 1)
        days_ago(tmp_path, 10)
        tavily(server, cache=str(tmp_path), ttl_days=11).search(["a"], 1)
        assert len(server.bodies) == 1
        tavily(server, cache=str(tmp_path), ttl_days=9).search(["a"], 1)
        assert len(server.bodies) == 2 and len(list(tmp_path.rglob("*.json"))) == 2


def test_a_replay_needs_no_key_and_no_network(tmp_path, monkeypatch):
    edition = {"n": 0}

    def changing(body, number):
        return {"results": [page(body["query"], edition["n"])]}

    with serving(changing) as server:
        tavily(server, cache=str(tmp_path)).search(["a"], 1)
        days_ago(tmp_path, 100)
        edition["n"] = 1
        tavily(server, cache=str(tmp_path), ttl_days=1).search(["a", "b"], 1)
    monkeypatch.delenv("TAVILY_API_KEY")
    replay = TavilySearch(TavilyConfig(url="http://127.0.0.1:1", cache=str(tmp_path), replay=True))
    assert replay.search(["a", "b"], 1) == [[Document("T a", "about a 1")], [Document("T b", "about b 1")]]
    then = (date.today() - timedelta(50)).isoformat()
    old = TavilySearch(TavilyConfig(cache=str(tmp_path), replay=True, as_of=then))
    assert old.search(["a"], 1) == [[Document("T a", "about a 0")]]
    with pytest.raises(ConfigError, match=r"replay=true, and .* has no answer to 'b'"):
        old.search(["b"], 1)
    with pytest.raises(ConfigError, match="has no answer to 'c'"):
        replay.search(["a", "c"], 1)


def test_no_results_is_an_answer_and_is_remembered(tmp_path):
    with serving(lambda body, number: {"results": []}) as server:
        search = tavily(server, cache=str(tmp_path))
        assert search.search(["a"], 3) == [[]] == search.search(["a"], 3)
        assert len(server.bodies) == 1


def test_a_damaged_record_is_told(tmp_path):
    with serving(answer) as server:
        tavily(server, cache=str(tmp_path)).search(["a"], 1)
        (file,) = tmp_path.rglob("*.json")
        file.write_text(file.read_text()[:-20])
        with pytest.raises(ConfigError, match=r"\.json is no recorded answer .*remove it"):
            tavily(server, cache=str(tmp_path)).search(["a"], 1)
    assert not list(tmp_path.rglob("*.part"))


def test_a_failed_query_is_neither_remembered_nor_paid_for(tmp_path):
    with serving(lambda body, number: answer(body) if number == 4 else (500, {}, "")) as server:
        search = tavily(server, cache=str(tmp_path), max_credits=1)
        with pytest.raises(ConfigError, match=r"search for 'a' at .* failed 3 times, last: HTTP 500"):
            search.search(["a"], 1)
        assert search.credits == 0 and not list(tmp_path.rglob("*.json"))
        assert search.search(["a"], 1) == expected(["a"]) and search.credits == 1


@pytest.mark.parametrize(
    "fault",
    [(429, {"Retry-After": "0"}, "{}"), (500, {}, ""), "close", "half", {"detail": "?"}, {"results": [3]}],
    ids=str,
)
def test_faults_that_pass_are_tried_again(fault):
    with serving(lambda body, number: fault if number <= 2 else answer(body)) as server:
        assert tavily(server).search(["a"], 1) == expected(["a"])
        assert len(server.bodies) == 3


@pytest.mark.parametrize("status", [400, 401, 403, 432, 433])
def test_quota_and_key_are_told_at_once_with_the_query(status):
    said = json.dumps({"detail": {"error": f"This request exceeds your plan ({KEY})."}})
    with serving(lambda body, number: (status, {}, said)) as server:
        with pytest.raises(ConfigError) as error:
            tavily(server).search(["a"], 1)
        assert len(server.bodies) == 1
    told = str(error.value)
    assert f"search for 'a' at {server.url}: HTTP {status}" in told and "plan" in told and "TAVILY_API_KEY" in told
    assert "canary" not in told


def test_silence_ends():
    with serving(lambda body, number: "hang") as server, pytest.raises(ConfigError, match=r"no answer within 0\.2 s"):
        tavily(server, timeout=0.2, max_retries=1).search(["a"], 1)


def test_credits_are_counted_as_told_or_by_the_list():
    costs = [{"usage": {"credits": 3}}, {}, {"usage": {"credits": "x"}}]
    with serving(lambda body, number: {"results": []} | costs[number - 1]) as server:
        search = tavily(server, depth="advanced")
        for query in "abc":
            search.search([query], 1)
        assert search.counters() == {"search/credits": 3 + 2 + 2, "search/web_requests": 3, "search/from_disk": 0}


def test_the_cap_is_never_passed(tmp_path):
    with serving(answer) as server:
        search = tavily(server, max_credits=5, cache=str(tmp_path))
        search.search(["a", "b", "c"], 1)
        with pytest.raises(ConfigError, match=r"max_credits=5 is reached: \d used; raise it to ask '"):
            search.search(["a", "d", "e", "f"], 1)
        assert len(server.bodies) <= 5 and search.credits <= 5
        assert search.search(["a"], 1) == expected(["a"]), "what is in the cache costs nothing"


def test_half_of_a_surrogate_pair_is_no_obstacle():
    odd = {"results": [page("a", title="T \ud800", content="x \udfff y", url="https://x/\ud900")]}
    with serving(lambda body, number: odd) as server:
        (row,) = tavily(server).search_scored(["a \ud800"], 1)
        assert server.bodies[0]["query"] == "a \ufffd"
        assert (row[0].id, row[0].document) == ("https://x/\ufffd", Document("T \ufffd", "x \ufffd y"))


def test_queries_are_under_way_at_once_but_not_too_many():
    def slow(body, number):
        time.sleep(0.05)
        return answer(body)

    with serving(slow) as server:
        tavily(server, concurrency=4).search([f"q{i}" for i in range(12)], 1)
        assert 2 <= server.widest <= 4


def test_the_key_shows_nowhere(tmp_path, capfd):
    with serving(answer) as server:
        search = tavily(server, cache=str(tmp_path))
        search.search(["a"], 1)
        for file in tmp_path.rglob("*"):
            assert file.is_dir() or KEY not in file.read_text()
    assert KEY not in "".join(capfd.readouterr())
    os.environ["TAVILY_API_KEY"] = ""
    with pytest.raises(
        ConfigError, match=r"search.tavily.api_key_env=TAVILY_API_KEY, but there is no such environment variable"
    ):
        TavilySearch(TavilyConfig())


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"replay": True}, "replay=true needs cache"),
        ({"as_of": "2026-01-01"}, "as_of=2026-01-01 is for replay"),
        ({"replay": True, "cache": "x", "as_of": "May"}, "no day such as"),
        ({"ttl_days": 0}, "ttl_days=0"),
        ({"max_credits": -1}, "max_credits=-1"),
        ({"api_key_env": KEY}, "NAME of an environment variable"),
        ({"url": "tavily"}, "no address such as"),
    ],
)
def test_settings_that_cannot_work_are_told(changes, told):
    with pytest.raises(ConfigError, match=told) as error:
        TavilyConfig(**changes)
    assert "canary" not in str(error.value)


def test_more_than_the_service_gives_is_told():
    with serving(answer) as server, pytest.raises(ConfigError, match=r"top_k=21: Tavily gives at most 20"):
        tavily(server).search(["a"], 21)


def test_a_replay_of_nothing_is_told(tmp_path):
    with pytest.raises(ConfigError, match="no such folder; record it first"):
        TavilySearch(TavilyConfig(cache=str(tmp_path / "none"), replay=True))


def stub(monkeypatch, search):
    """In place of tavily-python: its constructor, its method and its exceptions, as documented."""
    names = ("UsageLimitExceededError", "ForbiddenError", "InvalidAPIKeyError", "BadRequestError", "TimeoutError")
    package = types.ModuleType("tavily")
    package.errors = types.SimpleNamespace(**{name: type(name, (Exception,), {}) for name in names})

    class TavilyClient:
        def __init__(self, api_key, api_base_url):
            self.api_key, self.api_base_url = api_key, api_base_url

        def search(self, query, timeout, **body):
            return search(query, timeout, body)

    package.TavilyClient = TavilyClient
    monkeypatch.setitem(sys.modules, "tavily", package)
    return package.errors


def test_the_package_is_used_where_it_is_installed(monkeypatch, tmp_path):
    asked = []

    def search(query, timeout, body):
        asked.append((query, timeout, body))
        if len(asked) == 1:
            raise errors.UsageLimitExceededError("slow down")
        if query == "bad":
            raise errors.ForbiddenError(f"over your plan {KEY}")
        return answer({"query": query, **body})

    errors = stub(monkeypatch, search)
    found = TavilySearch(TavilyConfig(cache=str(tmp_path), timeout=7.0))
    assert found.search(["a"], 2) == expected(["a"], 2)
    assert len(asked) == 2 and asked[1][:2] == ("a", 7.0)
    assert asked[1][2] == {"max_results": 2, "search_depth": "basic", "topic": "general", "include_usage": True}
    with pytest.raises(ConfigError, match=r"search for 'bad' at .*ForbiddenError: over your plan") as error:
        found.search(["bad"], 1)
    assert len(asked) == 3 and "canary" not in str(error.value)


def test_a_mistake_of_our_own_in_the_package_is_not_tried_again(monkeypatch):
    asked = []

    def search(query, timeout, body):
        asked.append(query)
        raise TypeError("search() got an unexpected keyword")

    stub(monkeypatch, search)
    with pytest.raises(TypeError, match="unexpected keyword"):
        TavilySearch(TavilyConfig()).search(["a"], 1)
    assert len(asked) == 1


def test_the_real_package_speaks_to_the_same_server(monkeypatch):
    monkeypatch.delitem(sys.modules, "tavily")
    pytest.importorskip("tavily")
    with serving(lambda body, number: (429, {}, "{}") if number == 1 else answer(body)) as server:
        search = tavily(server)
        assert search._package is not None and search.search(["a"], 2) == expected(["a"], 2)
        assert server.paths == ["/search"] * 2 and server.bodies[1]["query"] == "a"
        assert server.headers[1]["Authorization"] == f"Bearer {KEY}"


def test_it_is_a_backend_and_its_costs_reach_the_metrics():
    with serving(answer) as server:
        search = open_search(SearchConfig("tavily", tavily=TavilyConfig(url=server.url)))
        cached = CachedSearch(search, 10)
        cached.search(["a", "a"], 1)
        assert cached.counters()["search/credits"] == 1
    assert AnswerCache("x").find({"query": "a"}, TavilyConfig()) is None
