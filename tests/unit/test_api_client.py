"""One request to an endpoint: messages, stop strings, refused fields, and every shape of a reply that costs something.

Must fail if a reply that was paid for is asked for again, one that was cut is taken for whole, a filtered one loses
what it cost, or a field that the model refuses is dropped without a word. test_reflector.py has the rest of the client.
"""

import json

import pytest
from endpoint import serve

from hiexp import api_client
from hiexp.api_client import ApiWriter, Budget, Client, WriterConfig
from hiexp.chat_replies import Failed, Refused, Reply, read_reply, refused_field
from hiexp.config import ConfigError
from hiexp.sampling import Sampling

SAMPLING = Sampling(0.5, 0.9, ("</s>", "\n\n"), 7)
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello there"}]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(api_client, "FIRST_PAUSE", 0.01)
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def ask(endpoint, prompt=MESSAGES, sampling=SAMPLING, **changes):
    cfg = WriterConfig(**({"url": endpoint.url, "model": "m", "timeout": 5.0, "max_retries": 2} | changes))
    return Client(cfg).ask(prompt, 10, sampling)


def whole(content="hi", finish="stop", usage=None, **message):
    choice = {"message": {"content": content, **message}, "finish_reason": finish}
    return json.dumps({"choices": [choice], "usage": usage}).encode()


def events(*parts, done=True):
    lines = [f"data: {json.dumps(part)}\n\n" for part in parts] + ["data: [DONE]\n\n"] * done
    return (": comment\n\nevent: x\n" + "".join(lines)).encode()


def delta(content=None, finish=None, **more):
    return {"choices": [{"delta": {"content": content}, "finish_reason": finish}], **more}


def test_messages_and_stop_strings_are_sent():
    with serve(lambda *_: "fine") as endpoint:
        assert ask(endpoint).text == "fine"
    (body,) = endpoint.bodies
    assert body["messages"] == MESSAGES and body["stop"] == ["</s>", "\n\n"]
    assert {name: body[name] for name in ("max_tokens", "temperature", "top_p", "seed")} == {
        "max_tokens": 10, "temperature": 0.5, "top_p": 0.9, "seed": 7
    }  # fmt: skip


USAGE = {"prompt_tokens": 5, "completion_tokens": 3}


@pytest.mark.parametrize(
    ("data", "reply"),
    [
        (whole("hi", usage=USAGE), Reply("hi", 5, 3)),
        (whole("hi", "length", USAGE), Reply("hi", 5, 3, "length")),
        (whole("", "length", USAGE), Reply("", 5, 3, "length")),
        (whole(None, "length", USAGE), Reply("", 5, 3, "length")),  # all of it was thought
        (whole(None, "stop", USAGE), Reply("", 5, 3)),
        (whole("hi", None), Reply("hi", 26, 1)),  # nothing told: characters / 4
        (whole("hi", usage={"prompt_tokens": "x", "completion_tokens": -1}), Reply("hi", 26, 1)),
        # thoughts that completion_tokens leaves out stand in the total, and on the bill
        (whole("hi", usage=USAGE | {"total_tokens": 20}), Reply("hi", 5, 15)),
        (whole("hi", usage=USAGE | {"total_tokens": 8}), Reply("hi", 5, 3)),
        (whole("a\ud800b"), Reply("a?b", 26, 1)),
        (events(delta("h"), delta("i"), delta(None, "stop"), {"choices": [], "usage": USAGE}), Reply("hi", 5, 3)),
        (events(delta("h\u2028i", "length", usage=USAGE), done=False), Reply("h\u2028i", 5, 3, "length")),
        (events(delta("hi", usage=USAGE)), Reply("hi", 5, 3)),
    ],
)
def test_replies_and_what_they_cost(data, reply):
    assert read_reply(data, 100) == reply


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (whole("hi")[:-9], "no chat completion"),
        (b"", "no chat completion"),
        (b'{"choices": []}', "no chat completion"),
        (b'{"choices": [null]}', "no chat completion"),
        (b'{"error": {"message": "overloaded"}}', "overloaded"),  # under status 200
        (whole(None, None), "no text"),
        (whole(7), "no text"),
        (events(delta("h"), done=False), "cut"),
        (events(delta("h"), done=False) + b'data: {"choi', "damaged"),
        (events(delta("h"), {"error": {"message": "overloaded"}}, done=False), "overloaded"),
    ],
)
def test_what_is_no_whole_reply_may_be_asked_for_again(data, told):
    with pytest.raises(Failed, match=told):
        read_reply(data, 100)


@pytest.mark.parametrize(
    "data", [whole("par", "content_filter", USAGE), whole(None, "stop", USAGE, refusal="I will not")]
)
def test_a_filtered_reply_is_refused_with_what_it_cost_and_not_asked_for_again(data):
    with serve(lambda *_: (200, {}, data)) as endpoint, pytest.raises(Refused) as error:
        ask(endpoint)
    assert len(endpoint.asked) == 1
    assert (error.value.reply.prompt_tokens, error.value.reply.reply_tokens) == (5, 3)


def test_a_filtered_lesson_counts_against_the_budget_and_is_no_sign_of_a_wrong_request():
    with serve(lambda *_: (200, {}, whole("par", "content_filter", USAGE))) as endpoint:
        cfg = WriterConfig(url=endpoint.url, model="m", concurrency=1)
        budget = Budget(cfg, "reflector")

        class Words:
            def encode(self, text, add_special_tokens=True):
                return text.split()

        writer = ApiWriter(cfg, Words(), 10, budget)
        replies = list(writer.answer({i: f"p {i}" for i in range(5)}, dict.fromkeys(range(5), SAMPLING)))
    assert [reply.text for part in replies for reply in part.values()] == [""] * 5
    assert (budget.calls, budget.tokens) == (5, 40)


def refusal(field, value="parameter"):
    told = f"Unsupported {value}: '{field}' is not supported with this model. Use 'something_else' instead."
    error = {"message": told, "type": "invalid_request_error", "param": field, "code": f"unsupported_{value}"}
    return 400, {}, json.dumps({"error": error})


def test_a_model_that_refuses_max_tokens_is_asked_with_max_completion_tokens():
    with serve(lambda *_: refusal("max_tokens")) as endpoint, pytest.raises(ConfigError, match="max_completion_tokens"):
        endpoint.reply = lambda *_: (
            refusal("max_tokens") if "max_tokens" in endpoint.bodies[-1] else refusal("max_completion_tokens")
        )
        ask(endpoint)
    with serve(lambda *_: "fine") as endpoint:
        endpoint.reply = lambda *_: refusal("max_tokens") if "max_tokens" in endpoint.bodies[-1] else "fine"
        client = Client(WriterConfig(url=endpoint.url, model="o9", max_retries=0))
        assert [client.ask(MESSAGES, 10, SAMPLING).text for _ in range(3)] == ["fine"] * 3
    names = ["max_completion_tokens" if "max_completion_tokens" in body else "max_tokens" for body in endpoint.bodies]
    assert names == ["max_tokens", *["max_completion_tokens"] * 3], "once is enough to know"


@pytest.mark.parametrize("field", ["temperature", "top_p", "seed", "stop"])
def test_a_model_that_refuses_a_field_is_told_with_the_remedy(field):
    with serve(lambda *_: refusal(field, "value")) as endpoint:
        with pytest.raises(ConfigError, match=rf"takes no {field}.*omit=\[{field}\]"):
            ask(endpoint)
        assert len(endpoint.asked if field != "seed" else endpoint.bodies) == 1
    with serve(lambda *_: "fine") as endpoint:
        Client(WriterConfig(url=endpoint.url, model="m", omit=("temperature", "top_p", "stop"))).ask(
            MESSAGES, 10, SAMPLING
        )
    assert set(endpoint.bodies[0]) == {"model", "messages", "max_tokens", "seed", "path"}
    with pytest.raises(ConfigError, match=r"omit has tempo; .*temperature"):
        WriterConfig(omit=("tempo",))


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ("Unsupported value: 'temperature' does not support 0.2 with this model", "temperature"),
        ('{"error": {"message": "Unrecognized request argument supplied: \'seed\'"}}', "seed"),
        ('{"error": {"message": "max_tokens is too large: 5", "param": "max_tokens", "code": "invalid"}}', ""),
        ("This model's maximum context length is 5 tokens; you requested 'max_tokens' 9", ""),
        ('{"error": {"code": "content_filter", "message": "unknown words"}}', ""),
        ('{"error": "unsupported"}', ""),
        ("[" * 9999, ""),
    ],
)
def test_a_refused_field_is_told_from_a_refused_prompt(body, field):
    assert refused_field(body) == field
