"""Writers, budgets and the journal, against a loopback endpoint that fails in every way it can.

Must fail if a 429 is not retried or its Retry-After ignored, if redirects are followed, a key is shown in an error,
replies under way are dropped when another fails, a budget starts anew after a restart, or torn lines are read."""

import email.utils
import json
import logging
import threading
import time
from collections import Counter

import numpy as np
import pytest
from endpoint import serve

from hiexp import api_client, journal
from hiexp.api_client import ApiWriter, Budget, BudgetReached, Client, Refused, WriterConfig
from hiexp.config import ConfigError
from hiexp.encoder import HashEncoder
from hiexp.hek_prompts import PROMPTS
from hiexp.journal import Journal, KeptEncoder, digest
from hiexp.reflector import Reflector, Request
from hiexp.sampling import Sampling

KEY = "zz-very-private-0123456789"
FIELDS = ("title", "description")


class Words:
    """A word is a token."""

    def encode(self, text, add_special_tokens=True):
        return text.split()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(api_client, "FIRST_PAUSE", 0.01)
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def lesson(prompt, seed, number):
    return json.dumps({"title": f"title of {prompt}", "description": "d"})


def config(endpoint, **changes):
    return WriterConfig(**({"url": endpoint.url, "model": "teacher", "timeout": 5.0, "max_retries": 3} | changes))


def ask(endpoint, prompt="p", **changes):
    return Client(config(endpoint, **changes)).ask(prompt, 10, Sampling(0.5, 0.9, (), 7))


def make(endpoint, book=None, attempts=1, role="reflector", **changes):
    cfg, book = config(endpoint, **changes), book or Journal()
    spent = list(book.values())
    budget = Budget(cfg, role, len(spent), sum(one["prompt_tokens"] + one["reply_tokens"] for one in spent))
    writer = ApiWriter(cfg, Words(), 10, budget)
    return Reflector(writer, HashEncoder(), PROMPTS["compact"], Sampling(0.7, 0.9, (), 3), attempts, book, role)


def requests(count):
    return [Request((f"prompt {i}",), 1, ("q ?",), ("Oslo",)) for i in range(count)]


# --- one request ---


def test_a_request_is_an_openai_chat_completion_and_its_usage_is_read(monkeypatch):
    monkeypatch.setenv("TEACHER_KEY", f" {KEY}\n")
    with serve(lambda *_: "two words") as endpoint:
        reply = ask(endpoint, "one two three", api_key_env="TEACHER_KEY")
    assert (reply.text, reply.prompt_tokens, reply.reply_tokens) == ("two words", 3, 2)
    assert endpoint.bodies == [
        {
            "path": "/v1/chat/completions",
            "model": "teacher",
            "messages": [{"role": "user", "content": "one two three"}],
            "max_tokens": 10,
            "temperature": 0.5,
            "top_p": 0.9,
            "seed": 7,
        }
    ]
    assert endpoint.headers[0]["Authorization"] == f"Bearer {KEY}"


GARBAGE = [
    (200, {}, "<html>busy</html>"),
    (200, {}, "[" * 100_000),
    (200, {}, '{"choices": []}'),
    (200, {}, '{"choices": [{"message": {"content": null}}]}'),
    (200, {}, "[1]"),
    (200, {}, b"\xff\xfe"),
    (200, {"Content-Length": "500"}, "cut"),
    (429, {}, "slow down"),
    (500, {}, ""),
    (503, {"Retry-After": "soon"}, ""),
    (408, {}, ""),
]


@pytest.mark.parametrize("fault", GARBAGE, ids=str)
def test_what_may_pass_is_tried_again(fault):
    if fault[2] == "cut":  # the server holds the connection open, so the client's own limit must end it
        fault = (200, {"Content-Length": "500", "Connection": "close"}, "cut")
    with serve(lambda prompt, seed, n: fault if n < 3 else "fine") as endpoint:
        assert ask(endpoint).text == "fine"
        assert len(endpoint.asked) == 3
    with serve(lambda *_: fault) as endpoint, pytest.raises(ConfigError, match=r"failed 3 times.*same command"):
        ask(endpoint, max_retries=2)
    assert len(endpoint.asked) == 3


def test_silence_and_a_reply_that_never_ends_meet_the_time_limit(monkeypatch):
    with serve(lambda prompt, seed, n: time.sleep(0.8 * (n == 1)) or "late") as endpoint:
        assert ask(endpoint, timeout=0.3).text == "late" and len(endpoint.asked) == 2

    class Drip:
        def read1(self, _):
            time.sleep(0.02)
            return b" "

    with pytest.raises(api_client.Failed, match="in time"):
        api_client._read_all(Drip(), time.monotonic() + 0.1)
    monkeypatch.setattr(api_client, "MOST_BYTES", 3)
    with pytest.raises(api_client.Failed, match="more than"):
        api_client._read_all(Drip(), time.monotonic() + 5)


def test_nobody_listening_is_told_with_the_address():
    with serve(lesson) as endpoint:
        gone = config(endpoint, max_retries=1)
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1.*failed 2 times.*refused"):
        Client(gone).ask("p", 10, Sampling())


@pytest.mark.parametrize("how", ["seconds", "date"])
def test_retry_after_is_honoured(how):
    def busy(prompt, seed, n):
        wait = "0.6" if how == "seconds" else email.utils.formatdate(time.time() + 2, usegmt=True)
        return (429, {"Retry-After": wait}, "") if n == 1 else "fine"

    with serve(busy) as endpoint:
        ask(endpoint)
    first, second = endpoint.times
    assert second - first >= (0.6 if how == "seconds" else 0.95)  # a date has whole seconds


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(None, 0), ("", 0), ("x", 0), ("-5", 0), ("nan", 0), ("3", 3), ("inf", 600), ("Mon, 99 Foo", 0)],
)
def test_retry_after_is_bounded(value, seconds):
    assert api_client.retry_after(value) == seconds


def test_pauses_double_with_jitter_and_are_bounded(monkeypatch):
    class Clock:
        def __init__(self):
            self.pauses = []

        def wait(self, seconds):
            self.pauses.append(seconds)

    monkeypatch.setattr(api_client, "FIRST_PAUSE", 1.0)
    many = []
    for _ in range(5):
        clock = Clock()
        with serve(lambda *_: (500, {}, "")) as endpoint, pytest.raises(ConfigError):
            Client(config(endpoint, max_retries=9)).ask("p", 10, Sampling(), clock)
        for i, pause in enumerate(clock.pauses):
            most = min(2**i, 60)
            assert most / 2 <= pause <= most
        many.append(tuple(clock.pauses))
    assert len(set(many)) == 5


@pytest.mark.parametrize("status", [401, 403, 404, 302])
def test_what_cannot_pass_stops_at_once_without_showing_the_key(status, monkeypatch, caplog, capfd):
    monkeypatch.setenv("TEACHER_KEY", KEY)
    caplog.set_level(logging.DEBUG)
    with serve(lambda *_: "stolen") as thief:
        headers = {"Location": f"{thief.url}/chat/completions"} if status == 302 else {}
        with serve(lambda *_: (status, headers, f"bad key {KEY}")) as endpoint:
            with pytest.raises(ConfigError, match=rf"HTTP {status}.*TEACHER_KEY") as error:
                ask(endpoint, api_key_env="TEACHER_KEY")
            assert len(endpoint.asked) == 1 and not thief.asked
    shown = str(error.value) + repr(error.value.__context__) + caplog.text + "".join(capfd.readouterr())
    assert KEY not in shown and "<redacted>" in shown


def test_an_unusable_key_is_told_before_any_request(monkeypatch):
    url = {"url": "http://127.0.0.1:1/v1", "model": "m"}
    monkeypatch.delenv("TEACHER_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"TEACHER_KEY, but there is no such"):
        Client(WriterConfig(**url, api_key_env="TEACHER_KEY"))
    monkeypatch.setenv("TEACHER_KEY", f"{KEY}\nX-Evil: 1")
    with pytest.raises(ConfigError) as error:
        Client(WriterConfig(**url, api_key_env="TEACHER_KEY"))
    assert KEY not in str(error.value)
    with pytest.raises(ConfigError, match="NAME") as error:
        WriterConfig(**url, api_key_env=KEY)
    assert KEY not in str(error.value)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"url": "host:8000"}, "no address"),
        ({"url": "http://"}, "no address"),
        ({"url": "http://me:secret123@host/v1"}, "api_key_env"),
        ({"url": "http://host/v1?key=1"}, "no address"),
        ({"url": "http://host/v1", "model": ""}, "needs model"),
        ({"url": "", "api_key_env": "A_KEY"}, "set url"),
        ({"api_key_env": "AKEYNAME"}, "ends in"),
        ({"concurrency": 0}, "concurrency=0"),
        ({"timeout": 0.0}, "timeout=0"),
        ({"timeout": float("nan")}, "timeout=nan"),
        ({"max_retries": -1}, "max_retries"),
        ({"max_calls": -1}, "max_calls"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"window": 1}, "window"),
    ],
)
def test_impossible_settings(change, match):
    with pytest.raises(ConfigError, match=match) as error:
        WriterConfig(**({"url": "http://host/v1", "model": "m"} | change))
    assert "secret123" not in str(error.value)


# --- many requests ---


def test_concurrency_is_bounded_and_used():
    with serve(lambda *a: time.sleep(0.05) or lesson(*a)) as endpoint:
        replies = make(endpoint, concurrency=3).ask(requests(9), FIELDS, Counter())
    assert endpoint.widest == 3
    assert [reply["title"] for reply in replies] == [f"title of prompt {i}" for i in range(9)]


def test_a_prompt_that_the_endpoint_refuses_is_a_rejected_reply_and_a_wrong_request_stops():
    def picky(prompt, seed, n):
        return (400, {}, "filtered") if prompt in ("prompt 0", "prompt 1") else lesson(prompt, seed, n)

    counts, book = Counter(), Journal()
    with serve(picky) as endpoint:
        replies = make(endpoint, book, concurrency=1).ask(requests(4), FIELDS, counts)
        assert [reply is None for reply in replies] == [True, True, False, False]
        assert counts == {"empty": 2, "accepted": 2} and len(endpoint.asked) == 4
        with pytest.raises(Refused):
            ask(endpoint, "prompt 0")
    book = Journal()
    with serve(lambda *_: (400, {}, "unknown parameter")) as endpoint:
        with pytest.raises(ConfigError, match=r"refuses every prompt.*unknown parameter"):
            make(endpoint, book, concurrency=1).ask(requests(9), FIELDS, Counter())
        assert len(endpoint.asked) == 3 and not list(book.values()), "nothing is taken for an answer"


def test_replies_under_way_are_kept_when_another_request_fails():
    def one_fails(prompt, seed, n):
        if prompt == "prompt 0":
            return (401, {}, "no")
        time.sleep(0.2)
        return lesson(prompt, seed, n)

    book = Journal()
    with serve(one_fails) as endpoint, pytest.raises(ConfigError, match="401"):
        make(endpoint, book, concurrency=4).ask(requests(9), FIELDS, Counter())
    assert len(endpoint.asked) == 4 and len(list(book.values())) == 3
    with serve(lesson) as endpoint:
        assert None not in make(endpoint, book).ask(requests(9), FIELDS, Counter())
    assert len(endpoint.asked) == 6, "what was answered before is not asked again"


def test_a_longer_wording_gives_way_to_the_window():
    long = Request(("w " * 50, "w " * 20), 1, (), ())
    with serve(lambda *_: json.dumps({"title": "a", "description": "b"})) as endpoint:
        for window, words in ((60, 50), (59, 20), (30, 20)):
            make(endpoint, window=window).ask([long], FIELDS, Counter())
            assert len(endpoint.asked[-1][0].split()) == words
        counts = Counter()
        assert make(endpoint, window=29).ask([long], FIELDS, counts) == [None]
    assert counts == {"prompt_too_long": 1} and len(endpoint.asked) == 3


# --- budget ---


@pytest.mark.parametrize("cap", [{"max_calls": 4}, {"max_tokens": 4 * 12 + 5}])
def test_a_cap_stops_between_replies_counts_earlier_starts_and_goes_on_when_raised(cap, tmp_path):
    long = json.dumps({"title": "a", "description": "d d d d d d d"})  # ten words: as many as a reply may have
    with serve(lambda *_: long) as endpoint:
        for _ in range(2):  # the second start finds the cap reached already
            book = Journal(tmp_path / "replies.jsonl")
            with pytest.raises(BudgetReached, match=r"reflector\.max_\w+=\d+ is reached.*same command"):
                make(endpoint, book, concurrency=2, **cap).ask(requests(9), FIELDS, Counter())
            assert len(endpoint.asked) == 4 == len(list(book.values()))
        counts = Counter()
        make(endpoint, Journal(tmp_path / "replies.jsonl")).ask(requests(9), FIELDS, counts)
    assert len(endpoint.asked) == 9 and counts == {"accepted": 9}


def test_a_token_cap_is_never_passed_and_unused_room_is_given_back():
    with serve(lambda *_: json.dumps({"title": "a", "description": "b"})) as endpoint:  # 4 words of 10
        reflector = make(endpoint, concurrency=1, max_tokens=40)
        with pytest.raises(BudgetReached):
            reflector.ask(requests(99), FIELDS, Counter())
    assert len(endpoint.asked) == 5 and reflector.writer.budget.tokens == 30  # 6 a call; a sixth might take 42


# --- journal ---


def test_every_reply_is_in_the_journal_and_none_is_asked_for_twice(tmp_path):
    def half(prompt, seed, n):
        return lesson(prompt, seed, n) if (seed + len(prompt)) % 2 else "no object"

    counts, replies = [], []
    with serve(half) as endpoint:
        for _ in range(2):
            book = Journal(tmp_path / "replies.jsonl")
            counts.append(Counter())
            replies.append(make(endpoint, book, attempts=3).ask(requests(20), FIELDS, counts[-1]))
    assert replies[0] == replies[1] and counts[0] == counts[1] and counts[0]["no_object"] > 5
    assert len(endpoint.asked) == len(set(endpoint.asked)) == sum(counts[0].values())
    lines = [json.loads(line) for line in (tmp_path / "replies.jsonl").read_text().splitlines()]
    assert len(lines) == len(endpoint.asked) and {line["role"] for line in lines} == {"reflector"}
    with serve(half) as endpoint:
        make(endpoint, Journal(tmp_path / "replies.jsonl"), model="other").ask(requests(2), FIELDS, Counter())
    assert len(endpoint.asked) >= 2, "another model is asked anew"


def test_a_torn_line_is_cut_and_a_damaged_one_passed_over(tmp_path):
    path, keys = tmp_path / "deep" / "j.jsonl", [digest(i) for i in range(4)]
    book = Journal(path)
    for i in range(3):
        book.add({keys[i]: {"text": f"\u4f60\n{i}"}})
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"key": "' + keys[3].encode() + b'", "te')
    assert Journal(path, read_only=True).get(keys[3]) is None and path.stat().st_size > len(whole)
    again = Journal(path)
    assert [again.get(key) is not None for key in keys] == [True, True, True, False] and path.read_bytes() == whole
    assert again.get(keys[1])["text"] == "\u4f60\n1"
    lines = whole.splitlines(keepends=True)
    path.write_bytes(lines[0] + b"\0" * 10 + b"\n" + lines[1][:-5] + b"\n" + lines[2])
    damaged = Journal(path)
    assert [damaged.get(key) is not None for key in keys] == [True, False, True, False]
    damaged.add({keys[1]: {"text": "new"}})
    assert Journal(path).get(keys[1])["text"] == "new" and len(list(Journal(path).values())) == 3


def test_a_write_that_fails_leaves_the_journal_as_it_was(tmp_path, monkeypatch):
    book = Journal(tmp_path / "j.jsonl")
    book.add({digest(0): {"text": "a"}})

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(journal.os, "fsync", full)
    with pytest.raises(ConfigError, match=r"No space left.*same command"):
        book.add({digest(1): {"text": "b"}})
    monkeypatch.undo()
    assert digest(1) not in book and len(list(Journal(tmp_path / "j.jsonl").values())) == 1


def test_texts_are_embedded_once(tmp_path):
    calls = []

    class Counting(HashEncoder):
        def encode(self, texts, kind):
            calls.append(list(texts))
            return super().encode(texts, kind)

    rows = [KeptEncoder(Counting(), tmp_path / "v").encode(["a b", "c"], "query") for _ in range(2)]
    np.testing.assert_array_equal(rows[0], rows[1])
    np.testing.assert_array_equal(rows[0], HashEncoder().encode(["a b", "c"], "query"))
    assert calls == [["a b", "c"]]
    [file] = (tmp_path / "v").iterdir()
    file.write_bytes(file.read_bytes()[:-3])
    np.testing.assert_array_equal(KeptEncoder(Counting(), tmp_path / "v").encode(["a b", "c"], "query"), rows[0])
    KeptEncoder(Counting(), tmp_path / "v").encode(["a b", "c"], "passage")
    assert len(calls) == 3


def test_a_text_in_parts_is_a_text_and_a_long_pause_is_told(monkeypatch, capsys):
    client = Client(WriterConfig(url="http://127.0.0.1:9/v1", model="m", max_retries=1))
    parts = [{"type": "text", "text": "a "}, {"type": "reasoning"}, {"type": "text", "text": "lesson"}]
    answer = {"choices": [{"message": {"content": parts}}]}

    class Pause(threading.Event):
        def wait(self, timeout=None):
            return False

    def post(data):
        if not asked.append(data) and len(asked) == 1:
            raise api_client.Failed("HTTP 429", 30.0)
        return json.dumps(answer).encode()

    asked: list[bytes] = []
    monkeypatch.setattr(client, "_post", post)
    assert client.ask("p", 10, Sampling(0.5, 0.9, (), 7), Pause()).text == "a lesson"
    assert capsys.readouterr().err == "http://127.0.0.1:9/v1 (model m): HTTP 429; attempt 2 of 2 in 30 s\n"
