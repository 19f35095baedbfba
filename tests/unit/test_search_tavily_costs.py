"""What the live web costs: every request that was sent is counted and kept, whatever becomes of the others.

Must fail if an answer that was paid for is lost or not counted, a request goes out after the cap is told, one that may
have been charged is forgotten, an unwritable cache is noticed after paying, or an answer without results becomes an
empty one.
"""

import json
import sys
import time
import types

import pytest
from search_double import serving
from test_search_tavily import answer, expected, settings, stub, tavily  # noqa: F401 (settings: a fixture for all)

from hiexp.config import ConfigError


@pytest.mark.parametrize("by_package", [False, True])
def test_what_the_cap_allows_is_asked_counted_and_kept(monkeypatch, tmp_path, by_package):
    """Three queries, room for two: none of what was paid is lost, and nothing is sent once the error is told."""

    def slow(body, number=0):
        time.sleep(0.2)
        return answer(body)

    with serving(slow) as server:
        if by_package:
            stub(
                monkeypatch, lambda query, timeout, body: server.bodies.append(query) or slow({"query": query, **body})
            )
        search = tavily(server, max_credits=2, cache=str(tmp_path))
        with pytest.raises(ConfigError, match=r"max_credits=2 is reached: 2 used; raise it to ask 'c'"):
            search.search(["a", "b", "c"], 1)
        sent = len(server.bodies)
        assert (search.credits, sent, len(list(tmp_path.rglob("*.json")))) == (2, 2, 2)
        assert search.search(["b", "a"], 1) == expected(["b", "a"])
        time.sleep(0.4)
        assert len(server.bodies) == sent


def test_without_a_cache_a_batch_that_the_cap_does_not_allow_costs_nothing():
    with serving(answer) as server:
        with pytest.raises(ConfigError, match="max_credits=2 is reached: 0 used"):
            tavily(server, max_credits=2).search(["a", "b", "c"], 1)
        assert not server.bodies
        assert tavily(server, max_credits=2).search(["a", "b"], 1) == expected(["a", "b"])


@pytest.mark.parametrize("fault", ["hang", "half", {"foo": 1}], ids=str)
def test_requests_that_may_have_been_charged_count_against_the_cap(fault):
    with serving(lambda body, number: fault) as server:
        search = tavily(server, max_credits=3, timeout=0.2, max_retries=9)
        with pytest.raises(ConfigError, match="max_credits=3 is reached: 0 used, perhaps 3 more"):
            search.search(["a"], 1)
        assert len(server.bodies) == 3 and search.credits == 0


def test_an_error_leaves_what_was_sent_counted_and_kept(tmp_path):
    def reply(body, number):
        time.sleep(0.0 if body["query"] == "bad" else 0.3)
        return (401, {}, "no") if body["query"] == "bad" else answer(body)

    with serving(reply) as server:
        search = tavily(server, cache=str(tmp_path))
        with pytest.raises(ConfigError, match=r"'bad' at .*HTTP 401"):
            search.search(["a", "bad", "b"], 1)
        assert search.credits == 2 and len(list(tmp_path.rglob("*.json"))) == 2


@pytest.mark.parametrize("cache", ["file", "file/below", "/proc/nope"])
def test_a_cache_that_cannot_be_written_is_told_before_anything_is_paid(tmp_path, cache):
    (tmp_path / "file").write_text("mine")
    with serving(answer) as server:
        with pytest.raises(ConfigError, match=r"search\.tavily\.cache=.* cannot be written"):
            tavily(server, cache=str(tmp_path / cache)).search(["a"], 1)
        assert not server.bodies and (tmp_path / "file").read_text() == "mine"


def test_a_cache_that_becomes_unwritable_is_told_in_one_line(tmp_path):
    with serving(answer) as server:
        search = tavily(server, cache=str(tmp_path / "c"))
        (tmp_path / "c").rmdir()
        (tmp_path / "c").write_text("x")
        with pytest.raises(ConfigError, match="cannot be written"):
            search.search(["a"], 1)


class RawResponse:
    def __init__(self, content):
        self.status_code, self.content = 200, content


@pytest.mark.parametrize(
    "said", [b'{"foo": 1}', b"[]", b'{"results": null}', b'{"results": ' + b"9" * 5000 + b"}", b"<"]
)
def test_an_answer_without_results_does_not_become_an_empty_one_in_the_package(monkeypatch, tmp_path, said):
    """The package fills in `results`, so the answer is looked at before it does."""

    def search(query, timeout, body):
        sent.append(query)
        for hook in package.TavilyClient.session.hooks["response"]:
            hook(RawResponse(said if len(sent) < 3 else json.dumps(answer({"query": query, **body})).encode()))
        found = json.loads(said) if len(sent) < 3 else answer({"query": query, **body})
        found["results"] = found.get("results", [])
        return found

    sent: list[str] = []
    stub(monkeypatch, search)
    package = sys.modules["tavily"]
    package.TavilyClient.session = types.SimpleNamespace(hooks={"response": []})
    with serving(answer) as server:
        found = tavily(server, cache=str(tmp_path))
        assert found.search(["a"], 1) == expected(["a"]) and len(sent) == 3
        assert found.credits == 1 and len(list(tmp_path.rglob("*.json"))) == 1


@pytest.mark.parametrize("said", ['{"foo": 1}', "[]", '{"usage": ' + "9" * 5000 + "}", "{"])
def test_the_real_package_takes_no_answer_without_results_for_an_empty_one(monkeypatch, said):
    monkeypatch.delitem(sys.modules, "tavily")
    pytest.importorskip("tavily")
    with serving(lambda body, number: (200, {}, said) if number == 1 else answer(body)) as server:
        search = tavily(server)
        assert search.search(["a"], 2) == expected(["a"], 2) and len(server.bodies) == 2 and search.credits == 1
