"""Asking a model that somebody prompts: behind an engine in this process, or behind an OpenAI-compatible endpoint.

A `Context` is one conversation: it opens with a system and a user text in labelled pieces, the model replies, and it
may go on with more text from outside and another reply. With an engine that is one sequence of ids: what the model
wrote is never encoded again. With an endpoint it is a list of messages, and every reply is on disk before anybody sees
it, under a digest of the whole request: what was paid for once is not asked for again, in this run or in the next.
"""

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from hiexp.api_client import REFUSED_AT_FIRST, Budget, BudgetReached, Client, WriterConfig
from hiexp.chat_replies import Refused, Reply
from hiexp.config import ConfigError
from hiexp.engine import Engine, decode, with_bos
from hiexp.journal import Journal, digest
from hiexp.sampling import Sampling
from hiexp.tag_protocol import Pieces, merge
from hiexp.trajectory import Source

_SYSTEM, _USER = "[[SYSTEM TEXT]]", "[[USER TEXT]]"
PLAIN_FRAME = ("", "\n\n", "\n")
"""What stands before, between and after the system and the user text where there is no chat template."""


@dataclass
class Context:
    """One conversation, and what it cost."""

    key: tuple[int, int, int]
    """position of the question, member, number of the context in the attempt"""
    purpose: str
    pieces: Pieces
    """everything in it so far"""
    opening: int
    """tokens before the first reply"""
    length: int
    """tokens so far: exact for an engine, as the given tokenizer counts for an endpoint"""
    ids: list[int] = field(default_factory=list)
    """of an engine's context"""
    messages: list[dict[str, str]] = field(default_factory=list)
    """of an endpoint's"""
    requests: int = 0
    prompt_tokens: int = 0
    reply_tokens: int = 0
    tokens: int = 0
    """read and written by the newest request"""
    seconds: float = 0.0
    """that an endpoint took for its replies; 0 for an engine, whose rows share their time"""

    def add(self, reply: Reply, seconds: float = 0.0) -> None:
        self.requests += 1
        self.prompt_tokens += reply.prompt_tokens
        self.reply_tokens += reply.reply_tokens
        self.seconds += seconds
        self.tokens = reply.prompt_tokens + reply.reply_tokens
        self.say([(Source.POLICY, reply.text)])

    def say(self, pieces: Pieces) -> None:
        self.pieces += [(source, text) for source, text in pieces if text]


class Asker(Protocol):
    """Continuous batching of replies: open contexts, submit them, step."""

    streams: bool
    """False: `step` returns all that are pending"""

    @property
    def pending(self) -> int: ...

    def count(self, text: str) -> int:
        """Tokens of a text."""
        ...

    def open(self, key: tuple[int, int, int], purpose: str, system: Pieces, user: Pieces) -> Context: ...

    def go_on(self, context: Context, pieces: Pieces, most: int) -> bool:
        """Add text from outside to an open context; False, and nothing added, if `most` tokens do not hold it."""
        ...

    def room(self, context: Context) -> int:
        """Tokens that a reply may have."""
        ...

    def submit(self, context: Context, max_tokens: int, sampling: Sampling, opening: str = "") -> None:
        """Ask for a reply. `opening`: what the stop string closes, to tell whether a reply ended with it."""
        ...

    def step(self, patience: float | None = None) -> list[tuple[Context, Reply]]:
        """Replies that are there, in any order; they are in their contexts by then. May wait `patience` seconds."""
        ...

    def forget(self, contexts: Iterable[Context]) -> None:
        """Nothing is asked in these any more."""
        ...


class LocalAsker:
    """Asks the model of an engine, through its chat template where it has one."""

    def __init__(self, engine: Engine, tokenizer: Any) -> None:
        self.streams, self._engine, self._tokenizer = engine.streams, engine, tokenizer
        self._frame = chat_frame(tokenizer)
        self._running: dict[tuple[int, int, int], Context] = {}

    @property
    def pending(self) -> int:
        return len(self._running)

    def count(self, text: str) -> int:
        return len(self._encode(text, True))

    def open(self, key: tuple[int, int, int], purpose: str, system: Pieces, user: Pieces) -> Context:
        pieces = framed(self._frame, system, user)
        ids = list(with_bos(self._tokenizer, self._ids(pieces)))
        return Context(key, purpose, pieces, len(ids), len(ids), ids)

    def go_on(self, context: Context, pieces: Pieces, most: int) -> bool:
        ids = self._ids(pieces)
        if len(ids) > min(most, self._engine.max_length - context.length):
            return False
        context.ids += ids
        context.length = len(context.ids)
        context.say(pieces)
        return True

    def room(self, context: Context) -> int:
        return self._engine.max_length - context.length

    def submit(self, context: Context, max_tokens: int, sampling: Sampling, opening: str = "") -> None:
        self._engine.submit(context.key, context.ids, max_tokens, sampling)
        self._running[context.key] = context

    def step(self, patience: float | None = None) -> list[tuple[Context, Reply]]:
        replies = []
        for key, completion in self._engine.step():
            context, ids = self._running.pop(key), completion.token_ids
            kept = ids[:-1] if completion.finish in ("eos", "broken") else ids  # no text follows the end of a turn
            finish = "stop" if completion.finish == "eos" else completion.finish
            reply = Reply(decode(self._tokenizer, kept), context.length, len(ids), finish)
            context.ids += kept
            context.length = len(context.ids)
            context.add(reply)
            replies.append((context, reply))
        return replies

    def forget(self, contexts: Iterable[Context]) -> None:
        keys = [context.key for context in contexts]
        self._engine.forget(keys)
        for key in keys:
            self._running.pop(key, None)

    def _ids(self, pieces: Pieces) -> list[int]:
        # a control token that text from outside spells, or the model in an earlier context, stays text
        return [token for source, text in pieces for token in self._encode(text, source not in _OURS)]

    def _encode(self, text: str, literal: bool) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False, split_special_tokens=literal)["input_ids"]


_OURS = (Source.PROMPT, Source.NOTICE)


@dataclass(frozen=True)
class _Request:
    context: Context
    messages: tuple[dict[str, str], ...]
    length: int
    max_tokens: int
    sampling: Sampling
    opening: str
    key: str
    """of its record in the journal"""


class EndpointAsker:
    """Asks an endpoint, `concurrency` requests at once. A missing key is told here, before the first question.

    tokenizer: counts what fits; the endpoint's own usage is what is recorded.
    journal: of every reply that was paid for; those of earlier starts count against the budget.
    """

    streams = True

    def __init__(
        self, cfg: WriterConfig, tokenizer: Any, journal: Journal | None = None, name: str = "endpoint"
    ) -> None:
        self._cfg, self._client, self._tokenizer = cfg, Client(cfg), tokenizer
        self._journal, self._lock, self._stop = journal or Journal(), threading.Lock(), threading.Event()
        self._role = name
        spent = [record for record in self._journal.values() if record.get("role") == name]
        tokens = sum(record["prompt_tokens"] + record["reply_tokens"] for record in spent)
        self._budget = Budget(cfg, name, len(spent), tokens)
        self._pool = ThreadPoolExecutor(cfg.concurrency, thread_name_prefix="endpoint")
        self._queue: deque[_Request] = deque()
        self._running: dict[Future[tuple[Reply, float]], tuple[_Request, int]] = {}
        self._ready: list[tuple[Context, Reply]] = []
        self._held: list[tuple[Context, Reply]] = []  # refusals, until a reply shows that the request itself is right
        self._answered, self._failure = False, None

    @property
    def pending(self) -> int:
        return len(self._queue) + len(self._running) + len(self._ready) + len(self._held)

    def count(self, text: str) -> int:
        ids = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return len(ids)

    def open(self, key: tuple[int, int, int], purpose: str, system: Pieces, user: Pieces) -> Context:
        pieces = framed(PLAIN_FRAME, system, user)
        texts = {"system": _text(system), "user": _text(user)}
        messages = [{"role": role, "content": text} for role, text in texts.items() if text]
        length = sum(self.count(text) for text in texts.values())
        return Context(key, purpose, pieces, length, length, messages=messages)

    def go_on(self, context: Context, pieces: Pieces, most: int) -> bool:
        text = _text(pieces)
        length = self.count(text)
        if length > min(most, self._cfg.window - context.length):
            return False
        context.messages.append({"role": "user", "content": text.strip()})
        context.length += length
        context.say(pieces)
        return True

    def room(self, context: Context) -> int:
        return self._cfg.window - context.length

    def submit(self, context: Context, max_tokens: int, sampling: Sampling, opening: str = "") -> None:
        messages = tuple(dict(message) for message in context.messages)
        whole = (self._cfg.model, list(messages), max_tokens, vars(sampling), list(self._cfg.omit))
        key = digest("chat", *whole)
        self._queue.append(_Request(context, messages, context.length, max_tokens, sampling, opening, key))

    def step(self, patience: float | None = None) -> list[tuple[Context, Reply]]:
        """As `Asker`. Before anything is raised, the requests under way are awaited and what they brought is kept."""
        self._start()
        if self._running and not self._ready:
            for future in wait(self._running, timeout=patience, return_when=FIRST_COMPLETED).done:
                self._take(future)
            self._start()
        if self._failure and not (self._running or self._ready):
            failure, self._failure = self._failure, None
            self._stop.clear()
            raise failure
        if self._answered or not (self._queue or self._running):
            self._ready, self._held = self._ready + self._held, []
        ready, self._ready = self._ready, []
        return ready

    def forget(self, contexts: Iterable[Context]) -> None:
        """What is not under way yet is not asked; what is, is awaited and kept."""
        gone = {id(context) for context in contexts}
        self._queue = deque(request for request in self._queue if id(request.context) not in gone)
        self._ready = [ready for ready in self._ready if id(ready[0]) not in gone]
        self._held = [held for held in self._held if id(held[0]) not in gone]
        under_way = [future for future, (request, _) in self._running.items() if id(request.context) in gone]
        if under_way:
            self._stop.set()  # nobody waits through another pause
            wait(under_way)
            for future in under_way:
                del self._running[future]
            self._stop.clear()

    def _start(self) -> None:
        """Send what the limits allow; what the journal knows is ready at once."""
        while self._queue and self._failure is None:
            request = self._queue[0]
            with self._lock:
                record = self._journal.get(request.key)
            if record is not None:
                reply = Reply(*(record[name] for name in ("text", "prompt_tokens", "reply_tokens", "finish")))
                self._hand_over(self._queue.popleft(), reply, record["seconds"])
                continue
            if len(self._running) >= self._cfg.concurrency:
                return
            most = request.length + request.max_tokens
            try:
                self._budget.reserve(1, most)
            except BudgetReached as error:
                self._failure = error
                return
            self._running[self._pool.submit(self._ask, self._queue.popleft())] = (request, most)

    def _ask(self, request: _Request) -> tuple[Reply, float]:
        """In a worker thread: the reply is on disk on return."""
        start = time.monotonic()
        try:
            reply = self._client.ask(request.messages, request.max_tokens, request.sampling, self._stop)
        except Refused as error:
            if error.reply is None:  # cost nothing
                raise
            reply = replace(error.reply, finish="refused")
        seconds = round(time.monotonic() - start, 3)
        with self._lock:
            self._journal.add({request.key: vars(reply) | {"role": self._role, "seconds": seconds}})
        return reply, seconds

    def _take(self, future: "Future[tuple[Reply, float]]") -> None:
        request, reserved = self._running.pop(future)
        try:
            reply, seconds = future.result()
        except Refused as error:
            self._budget.settle(reserved, 0)
            self._hold(request, error)
        except Exception as error:  # ConfigError, or a fault of ours: raised when the others are in
            self._failure = self._failure or error
            self._stop.set()
        else:
            self._budget.settle(reserved, reply.prompt_tokens + reply.reply_tokens)
            self._hand_over(request, reply, seconds)

    def _hold(self, request: _Request, error: Refused) -> None:
        reply = Reply("", 0, 0, "refused")
        request.context.add(reply)
        self._held.append((request.context, reply))
        if not self._answered and len(self._held) >= REFUSED_AT_FIRST and self._failure is None:
            self._failure = ConfigError(f"{self._client.where} refuses every prompt: {error}")

    def _hand_over(self, request: _Request, reply: Reply, seconds: float) -> None:
        self._answered, context = True, request.context
        text = ended(reply.text, reply.finish, request.sampling.stop, request.opening)
        reply = replace(reply, text=text)
        context.messages.append({"role": "assistant", "content": text})
        context.length += self.count(text)
        context.add(reply, seconds)
        self._ready.append((context, reply))


def ended(text: str, finish: str, stop: Sequence[str], opening: str) -> str:
    """The reply as an engine would give it: up to the first stop string, and with it.

    Endpoints leave the stop string out, so it is put back where what it closes is open.
    """
    found = sorted((text.find(string), string) for string in stop if string in text)
    if found:
        return text[: found[0][0] + len(found[0][1])]
    return text + stop[0] if stop and opening and finish == "stop" and opening in text else text


def chat_frame(tokenizer: Any) -> tuple[str, str, str]:
    """What a chat template writes before, between and after a system and a user text; PLAIN_FRAME without one.

    The system text opens the user's turn where a template knows no system role.
    """
    if not getattr(tokenizer, "chat_template", None):
        return PLAIN_FRAME
    from jinja2 import TemplateError  # a dependency of chat templates alone

    roles = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": _USER}]
    together = [{"role": "user", "content": f"{_SYSTEM}\n\n{_USER}"}]
    for messages in (roles, together):
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except TemplateError:
            continue
        before, has_system, rest = text.partition(_SYSTEM)
        between, has_user, after = rest.partition(_USER)
        if has_system and has_user:
            return before, between, after
    raise ConfigError("the tokenizer's chat template drops the system or the user text; set another model or template")


def framed(frame: tuple[str, str, str], system: Pieces, user: Pieces) -> Pieces:
    """The opening of a context; neighbours of one source are joined, so that tokens stay natural."""
    before, between, after = frame
    return merge([(Source.PROMPT, before), *system, (Source.PROMPT, between), *user, (Source.PROMPT, after)])


def _text(pieces: Pieces) -> str:
    return "".join(text for _, text in pieces)
