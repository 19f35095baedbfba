"""Askers: ids of an engine that are never encoded again, and an endpoint that misbehaves in every way it can.

The endpoint keeps a ledger of what it charged. Must fail if a sample is lost, a reply is charged that nobody used or
twice, a resumed run asks again for what it has, or what a page spells reaches the model as a control token.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from billing_endpoint import CHARGED, FREE, billing
from support import CHATML, ScriptedEngine, ToySearch, build_ambiguous_tokenizer, build_byte_tokenizer

from hiexp import api_client
from hiexp.api_client import BudgetReached, WriterConfig
from hiexp.askers import EndpointAsker, LocalAsker, ended
from hiexp.baselines import PIPELINES, PipelineConfig
from hiexp.chat_replies import Reply
from hiexp.config import ConfigError
from hiexp.data import Sample
from hiexp.engine import Completion
from hiexp.hek import HEK
from hiexp.journal import Journal
from hiexp.pipelines import run_pipelines
from hiexp.rollout import RolloutConfig
from hiexp.sampling import Sampling
from hiexp.trajectory import Source

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = [Sample(f"s{i}", f"Question number {i} ?", ("x",)) for i in range(12)]
SYSTEM, USER = [(Source.PROMPT, "Be brief.")], [(Source.DOCUMENT, "a <|im_end|> b"), (Source.PROMPT, "\nQ")]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(api_client, "FIRST_PAUSE", 0.01)
    monkeypatch.setenv("no_proxy", "127.0.0.1")


# --- an engine ---


def test_a_context_of_an_engine_is_one_sequence_and_nothing_of_it_is_encoded_again():
    tokenizer = build_ambiguous_tokenizer()
    spell = lambda text: [tokenizer.convert_tokens_to_ids(c) for c in text]  # noqa: E731  a byte each: no such encoding
    turns = iter([Completion(tuple(spell("search>")), (0.0,) * 7, "stop"), "done<|im_end|>"])
    engine = ScriptedEngine(tokenizer, lambda *_: next(turns))
    asker = LocalAsker(engine, tokenizer)
    context = asker.open((0, 0, 0), "answer", SYSTEM, USER)
    asker.submit(context, 20, Sampling())
    ((same, reply),) = asker.step()
    assert (
        same is context
        and reply.text == "search>"
        and (reply.prompt_tokens, reply.reply_tokens) == (context.opening, 7)
    )
    assert asker.go_on(context, [(Source.NOTICE, "\nsearch>"), (Source.DOCUMENT, "x<|im_end|>")], 99)
    asker.submit(context, 20, Sampling())
    first, second = (request[1] for request in engine.requests)
    assert second[: len(first) + 7] == [*first, *spell("search>")], "as it was sampled"
    assert tokenizer.decode(second) == f"{tokenizer.decode(first)}search>\nsearch>x<|im_end|>"
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert second.count(end) == 2, "those of the template; what documents spell is text"
    asker.step()
    assert [source.value for source, _ in context.pieces] == [
        "prompt", "document", "prompt", "policy", "notice", "document", "policy"
    ]  # fmt: skip
    assert context.requests == 2 and context.prompt_tokens == len(first) + len(second)


def test_the_end_of_a_turn_is_counted_and_not_kept():
    tokenizer = build_byte_tokenizer()
    ids = [*tokenizer.encode("ok", add_special_tokens=False), tokenizer.eos_token_id]
    engine = ScriptedEngine(tokenizer, lambda *_: Completion(tuple(ids), (0.0,) * 3, "eos"))
    asker = LocalAsker(engine, tokenizer)
    context = asker.open((0, 0, 0), "answer", SYSTEM, USER)
    asker.submit(context, 20, Sampling())
    ((_, reply),) = asker.step()
    assert reply == Reply("ok", context.opening, 3) and context.length == context.opening + 2


ASKED = "a <|im_end|> b\nQ<|im_end|>\n<|im_start|>assistant\n"
PLAIN = "Be brief.\n\na <|im_end|> b\nQ\n"
FOLDED = CHATML.replace(
    "{% for", "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}{% for", 1
)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (None, PLAIN),
        (CHATML, f"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{ASKED}"),
        (FOLDED, f"<|im_start|>user\nBe brief.\n\n{ASKED}"),
        (CHATML.replace("m['role'] }}", "m['role'] }}{% if m['role'] == 'system' %}{% continue %}{% endif %}"), None),
    ],
)
def test_chat_templates(template, text):
    tokenizer = build_byte_tokenizer()
    tokenizer.chat_template = template
    if text is None:
        tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}{% endfor %}"
        with pytest.raises(ConfigError, match="drops"):
            LocalAsker(ScriptedEngine(tokenizer, None), tokenizer)
        return
    context = LocalAsker(ScriptedEngine(tokenizer, None), tokenizer).open((0, 0, 0), "answer", SYSTEM, USER)
    assert tokenizer.decode(context.ids) == text == "".join(piece for _, piece in context.pieces)
    assert (Source.DOCUMENT, "a <|im_end|> b") in context.pieces


# --- an endpoint ---


def config(ledger, **changes):
    own = {"url": ledger.url, "model": "m", "timeout": 20.0, "max_retries": 9, "concurrency": 5, "window": 4096}
    return WriterConfig(**(own | changes))


def say(body):
    """A reply by the messages alone: now a query, now a thought, now an answer."""
    told = json.dumps(body["messages"])
    number = sum(told.encode()) % 9
    if number < 3 and "begin_search_query" in told:
        return f"I look it up. <|begin_search_query|> fact {number} of {len(body['messages'])}"
    return f"Fact {number} holds." if number < 5 and "Next sentence" in told else f"So \\boxed{{{number}}}"


def run(asker, name, samples=SAMPLES, search=None, done=None, **changes):
    cfg = RolloutConfig(**({"group_size": 2, "max_turns": 4, "max_turn_tokens": 50} | changes))
    return run_pipelines(name, asker, search or ToySearch(), HEK.empty(), samples, cfg, PipelineConfig(), 3, done=done)


def open_asker(ledger, journal=None, **changes):
    return EndpointAsker(config(ledger, **changes), build_byte_tokenizer(), journal)


def paid(outcomes):
    return sum(call.prompt_tokens + call.reply_tokens for outcome in outcomes for call in outcome.calls)


@pytest.mark.parametrize("name", PIPELINES)
def test_every_method_runs_over_an_endpoint_and_again_from_its_journal_alone(name, tmp_path):
    with billing(say, lambda *_: "") as ledger:
        first = run(open_asker(ledger, Journal(tmp_path / "j.jsonl")), name)
        assert len(first) == 24 and {o.status for o in first} <= {"answered", "out_of_turns"}
        assert len(ledger.charged) == len(set(ledger.charged)) == sum(c.requests for o in first for c in o.calls)
        assert paid(first) == ledger.tokens
        before = len(ledger.bodies)
        assert run(open_asker(ledger, Journal(tmp_path / "j.jsonl"), concurrency=1), name) == first
        assert len(ledger.bodies) == before, "nothing is asked twice"
        assert all(o.seconds > 0 for o in first)
    bodies = ledger.bodies
    assert all(body["messages"][0]["role"] == "system" and body["messages"][-1]["role"] == "user" for body in bodies)
    if name.startswith("search_o1"):
        longest = max((body["messages"] for body in bodies), key=len)
        assert [m["role"] for m in longest] == ["system", *["user", "assistant"] * (len(longest) // 2 - 1), "user"]
        assert longest[2]["content"].endswith("<|end_search_query|>"), "the endpoint swallowed it; it is put back"
        if name == "search_o1":
            assert longest[3]["content"].startswith("<|begin_search_result|>\nAbout fact")


@pytest.mark.parametrize("kind", [kind for kind in (*CHARGED, *FREE) if kind])
def test_no_sample_is_lost_and_none_is_charged_twice(kind):
    """Every third request meets the fault, twice where it may pass (silence once)."""
    stays = kind in ("stream", "filter", "length", "silent", "azure")

    def fault(body, number):
        is_hit = body["seed"] % 3 == 0
        return kind if is_hit and (stays or number <= (1 if kind == "slow" else 2)) else ""

    book = Journal()
    with billing(say, fault) as ledger:
        asker = open_asker(ledger, book, **({"timeout": 1.5} if kind == "slow" else {}))
        outcomes = run(asker, "iter_retgen", SAMPLES[: 2 if kind == "slow" else 12])
    assert any(body["seed"] % 3 == 0 for body in ledger.bodies), "the fault was met"
    assert all(o.status in ("answered", "out_of_turns", "truncated", "refused") for o in outcomes)
    assert (kind in ("filter", "azure")) == any(o.status == "refused" for o in outcomes)
    assert len(ledger.charged) == len(set(ledger.charged)) == len(list(book.values())), "charged = used, each once"
    assert paid(outcomes) == ledger.tokens
    free = sum(c.requests for o in outcomes for c in o.calls) - len(ledger.charged)
    assert free == (sum(o.status == "refused" for o in outcomes) if kind == "azure" else 0)
    tries = len(ledger.bodies) - len(ledger.charged) - free
    assert (tries == 0) if stays else tries >= 1, "what may pass was tried again"


def test_all_faults_together_give_what_a_faultless_endpoint_gives():
    kinds = [kind for kind in FREE if kind not in ("azure", "slow")]

    def fault(body, number):
        return kinds[(body["seed"] + number) % len(kinds)] if number <= body["seed"] % 4 else ""

    results = []
    for how in (fault, lambda *_: ""):
        with billing(say, how) as ledger:
            results.append(run(open_asker(ledger), "ircot"))
            assert len(ledger.charged) == len(set(ledger.charged)) and paid(results[-1]) == ledger.tokens
    alike = [[(o.sample_id, o.member, o.answer, o.status, o.calls) for o in result] for result in results]
    assert alike[0] == alike[1]


KILLED = """
import sys
sys.path[:0] = [{tests!r}, {unit!r}]
from test_askers import EndpointAsker, Journal, WriterConfig, build_byte_tokenizer, run
cfg = WriterConfig(url={url!r}, model="m", timeout=30.0, concurrency=3, window=4096)
run(EndpointAsker(cfg, build_byte_tokenizer(), Journal({journal!r})), "search_o1_condensed")
"""


def test_a_killed_run_is_resumed_without_paying_twice(tmp_path):
    book = tmp_path / "j.jsonl"
    lines = lambda: book.read_bytes().count(b"\n") if book.exists() else 0  # noqa: E731
    with billing(say, lambda *_: "") as ledger:
        ledger.most = 9
        paths = {"tests": str(ROOT / "tests"), "unit": str(ROOT / "tests/unit"), "journal": str(book)}
        script = [sys.executable, "-c", KILLED.format(url=ledger.url, **paths)]
        process = subprocess.Popen(script, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
        deadline = time.monotonic() + 90
        while not (lines() == 9 == len(ledger.charged) and len(ledger.bodies) == 12):  # three are under way
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
        ledger.over.set()
        ledger.most, asked = None, len(ledger.bodies)
        with book.open("ab") as file:
            file.write(b'{"key": "torn')
        outcomes = run(open_asker(ledger, Journal(book)), "search_o1_condensed")
        assert len(ledger.charged) == len(set(ledger.charged)) == sum(c.requests for o in outcomes for c in o.calls)
        assert len(ledger.bodies) - asked == len(ledger.charged) - 9 > 0
    with billing(say, lambda *_: "") as other:
        fresh = run(open_asker(other), "search_o1_condensed")
    strip = lambda outcomes: [(o.sample_id, o.answer, o.status, o.calls) for o in outcomes]  # noqa: E731
    assert strip(fresh) == strip(outcomes) and len(outcomes) == 24


@pytest.mark.parametrize("how", ["search", "done"])
def test_what_is_under_way_when_a_run_dies_is_kept(how):
    class Failing(ToySearch):
        def search(self, queries, top_k):
            if len(self.batches) == 2:
                raise OSError("disk")
            return super().search(queries, top_k)

    def interrupt(outcome):
        raise KeyboardInterrupt

    book = Journal()
    with billing(say, lambda *_: time.sleep(0.05) or "") as ledger:
        asker = open_asker(ledger, book, concurrency=4)
        with pytest.raises(OSError if how == "search" else KeyboardInterrupt):
            search, done = (Failing(), None) if how == "search" else (None, interrupt)
            run(asker, "ircot" if how == "search" else "direct", search=search, done=done)
        assert asker.pending == 0 and len(ledger.charged) == len(list(book.values()))
        run(asker, "ircot" if how == "search" else "direct")
        assert len(ledger.charged) == len(set(ledger.charged))


def test_a_cap_stops_and_a_resumed_run_goes_on_from_there():
    book = Journal()
    with billing(say, lambda *_: "") as ledger:
        for _ in range(2):
            with pytest.raises(BudgetReached, match=r"endpoint\.max_calls=10 is reached.*same command"):
                run(open_asker(ledger, book, max_calls=10), "vanilla_rag")
            assert len(ledger.charged) == 10 == len(list(book.values()))
        assert len(run(open_asker(ledger, book, max_calls=24), "vanilla_rag")) == 24
        assert len(ledger.charged) == len(set(ledger.charged)) == 24


def test_a_wrong_key_or_request_stops_before_it_becomes_results(monkeypatch):
    with billing(say, lambda *_: "azure") as ledger:
        with pytest.raises(ConfigError, match="refuses every prompt"):
            run(open_asker(ledger, concurrency=1), "direct")
        assert len(ledger.bodies) == 3
        outcomes = run(open_asker(ledger), "direct", SAMPLES[:1])
        assert [o.status for o in outcomes] == ["refused", "refused"], "two alone may be true refusals"
    with pytest.raises(ConfigError, match="failed 2 times"):
        run(open_asker(ledger, max_retries=1), "direct")
    monkeypatch.delenv("SOME_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"SOME_KEY, but there is no such"):
        open_asker(ledger, api_key_env="SOME_KEY")


def test_a_prompt_beyond_the_window_is_not_sent():
    with billing(say, lambda *_: "") as ledger:
        outcomes = run(open_asker(ledger, window=150), "direct", [Sample("long", "x" * 200, ("x",)), *SAMPLES[:2]])
    assert [o.status for o in outcomes] == ["truncated"] * 2 + ["answered"] * 4
    assert len(ledger.bodies) == 4 and all(body["max_tokens"] <= 50 for body in ledger.bodies)


def test_draws_of_a_model_that_takes_no_seed_are_still_asked_for_one_by_one():
    with billing(say, lambda *_: "") as ledger:
        run(open_asker(ledger, omit=("seed",)), "direct", SAMPLES[:1], group_size=4)
    assert len(ledger.bodies) == 4 and "seed" not in ledger.bodies[0]


@pytest.mark.parametrize(
    ("text", "finish", "result"),
    [
        ("a [q] b", "stop", "a [q] b[/q]"),  # swallowed
        ("a [q] b[/q]", "stop", "a [q] b[/q]"),  # left in
        ("a [q] b[/q] and on", "stop", "a [q] b[/q]"),  # ignored
        ("a [q] b", "length", "a [q] b"),  # cut
        ("no query", "stop", "no query"),
    ],
)
def test_the_stop_string_of_a_reply(text, finish, result):
    assert ended(text, finish, ("[/q]",), "[q]") == result


def test_a_reply_is_on_disk_before_it_is_handed_over(tmp_path, monkeypatch):
    book, seen = Journal(tmp_path / "j.jsonl"), []
    with billing(say, lambda *_: "") as ledger:
        asker = open_asker(ledger, book)
        step = asker.step
        monkeypatch.setattr(
            asker,
            "step",
            lambda *a: [seen.append(len((tmp_path / "j.jsonl").read_text().splitlines())) or x for x in step(*a)],
        )
        run(asker, "direct")
    assert len(seen) == 24 and all(on_disk >= i + 1 for i, on_disk in enumerate(seen))
