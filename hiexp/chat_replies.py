"""What an OpenAI-compatible endpoint said: a chat completion read strictly, whole or streamed, with what it cost.

A reply that was cut on its way, or is none, is `Failed`: it may be asked for again. One that a content filter held back
is `Refused`, and carries what it cost. Whatever else a model wrote is a `Reply`, even no text at all: it was paid for.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

LIMITS = ("max_tokens", "max_completion_tokens")
"""Names of the token limit: the one that every server knows, and the one that reasoning models ask for instead."""
OPTIONAL = ("temperature", "top_p", "seed", "stop")
"""Fields of a request that some models refuse."""


@dataclass(frozen=True)
class Reply:
    """The text that a model wrote, and what it cost."""

    text: str
    prompt_tokens: int
    reply_tokens: int
    """thoughts that the endpoint keeps to itself included"""
    finish: str = "stop"
    """stop, or length where a token limit cut it; askers add full, refused and broken"""


class Failed(Exception):
    """An attempt failed in a way that may pass; `pause` is what the server asked for, in seconds."""

    def __init__(self, reason: str, pause: float = 0.0) -> None:
        super().__init__(reason)
        self.pause = pause


class Refused(Exception):
    """The endpoint will not answer this prompt; `reply` says what that cost, None where it told nothing."""

    def __init__(self, reason: str, reply: Reply | None = None) -> None:
        super().__init__(reason)
        self.reply = reply


class Unsupported(Exception):
    """The endpoint's model does not take a field of the request."""

    def __init__(self, field: str, told: str) -> None:
        super().__init__(told)
        self.field = field


def read_reply(data: bytes, characters: int) -> Reply:
    """The reply in a response body. Failed, or Refused. `characters`: of the prompt, where the usage is not told."""
    answer = _decoded(data)
    try:
        choice = answer["choices"][0]
        message, finish = choice["message"], choice.get("finish_reason")
        text, refusal = message.get("content"), message.get("refusal")
    except (KeyError, IndexError, TypeError, AttributeError):
        raise Failed(f"the reply is no chat completion{_error_in(answer)}") from None
    if isinstance(text, list):  # some gateways send a text in parts
        text = "".join(str(part.get("text", "")) for part in text if isinstance(part, dict)) or None
    if text is None and isinstance(finish, str):
        text = ""  # all of it went into thoughts, or the model ended at once
    if not isinstance(text, str):
        raise Failed("the reply holds no text")
    text = text.encode("utf-8", "replace").decode()
    read, written = _usage(answer.get("usage"), characters, len(text))
    reply = Reply(text, read, written, "length" if finish in ("length", "max_tokens") else "stop")
    if finish == "content_filter" or (isinstance(refusal, str) and refusal and not text):
        raise Refused(f"the endpoint held its reply back ({finish or 'refusal'})", reply)
    return reply


def refused_field(body: str) -> str:
    """The field that an error of the endpoint says its model does not take; empty for an error of another kind."""
    try:
        error = json.loads(body)["error"]
        field, code, told = error.get("param"), str(error.get("code")), str(error.get("message"))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        field, code, told = None, "", body
    if not (code.startswith("unsupported") or _UNSUPPORTED.search(told)):
        return ""
    if field in (*LIMITS, *OPTIONAL):
        return str(field)
    named = _NAMED.search(told)
    return named[1] if named else ""


_UNSUPPORTED = re.compile(r"unsupported|n[o']t support|unrecogni[sz]ed|unknown|n[o']t permitted", re.IGNORECASE)
_NAMED = re.compile(rf"['\"`]({'|'.join((*LIMITS, *OPTIONAL))})['\"`]")


def _decoded(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        pass
    lines = data.decode("utf-8", "replace").split("\n")
    events = [line[5:].strip() for line in lines if line.startswith("data:")]
    if not events:
        raise Failed("the reply is no chat completion")
    return _joined(events)


def _joined(events: list[str]) -> dict[str, Any]:
    """A reply that was streamed although nobody asked for that, as it would have come whole."""
    texts: list[str] = []
    finish, usage, is_whole = None, None, False
    for event in events:
        if event == "[DONE]":
            is_whole = True
            break
        try:
            part = json.loads(event)
            usage = part.get("usage") or usage
            for choice in part.get("choices") or ():
                texts.append((choice.get("delta") or {}).get("content") or "")
                finish = choice.get("finish_reason") or finish
        except (ValueError, TypeError, AttributeError, RecursionError):
            raise Failed("the streamed reply is damaged") from None
        if part.get("error"):
            raise Failed(f"the streamed reply ended with an error{_error_in(part)}")
    if not (is_whole or finish):
        raise Failed("the streamed reply is cut")
    message = {"content": "".join(texts)}
    return {"choices": [{"message": message, "finish_reason": finish}], "usage": usage}


def _error_in(answer: Any) -> str:
    """Some gateways tell an error under status 200."""
    error = answer.get("error") if isinstance(answer, dict) else None
    return f": {' '.join(str(error).split())[:300]}" if error else ""


def _usage(usage: Any, read: int, written: int) -> tuple[int, int]:
    """Tokens read and written, guessed from characters where they are not told.

    Some endpoints leave a model's thoughts out of completion_tokens; the total has them, and the bill too.
    """
    told = usage if isinstance(usage, dict) else {}
    counts = {kind: told.get(f"{kind}_tokens") for kind in ("prompt", "completion", "total")}
    counts = {kind: count for kind, count in counts.items() if type(count) is int and count >= 0}
    prompt, completion = counts.get("prompt", read // 4 + 1), counts.get("completion", written // 4 + 1)
    return prompt, max(completion, counts.get("total", 0) - prompt)
