"""Replies from any OpenAI-compatible endpoint, over the standard library alone.

One POST to <url>/chat/completions per reply (chat_replies.py reads it). What may pass (HTTP 408, 409, 425, 429, 5xx, a
broken connection, silence, a reply that is no reply) is tried again after a pause that doubles each time, with jitter,
and is never shorter than the server's Retry-After. What cannot pass (a wrong key, model or address) stops the run in
one line. The key comes from an environment variable, goes into one header, is never sent on by a redirect, and is in
no message.
"""

import email.utils
import json
import os
import random
import re
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from hiexp.chat_replies import LIMITS, OPTIONAL, Failed, Refused, Reply, Unsupported, read_reply, refused_field
from hiexp.config import ConfigError
from hiexp.redact import HIDDEN, redact
from hiexp.sampling import Sampling

CHAT = "/chat/completions"
TRANSIENT = {408, 409, 425, 429}
PER_PROMPT = {400, 413, 422}
"""About this prompt (too long, refused by a content filter), unless every prompt meets it."""
REFUSED_AT_FIRST = 3
"""So many refusals before any reply mean that the request is wrong, not the prompts."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
LONGEST_RETRY_AFTER = 600.0
TOLD_PAUSE = 5.0
"""a pause from this length on is told on stderr"""
MOST_BYTES = 16 << 20
SECRET_NAMES = ("_KEY", "_TOKEN", "_SECRET", "_PASSWORD")
"""How a variable's name must end for redact.py to keep its value out of every file and message."""
AGAIN = "; what was answered is kept: run the same command again to go on"


@dataclass(frozen=True)
class WriterConfig:
    """Which model writes: the policy (nothing set), a model folder, or an endpoint."""

    model: str = ""
    """folder of a local model, or (with url) the name under which the endpoint knows its model; empty = the policy"""
    url: str = ""
    """base address of an OpenAI-compatible endpoint, up to and with /v1; empty = a local model"""
    api_key_env: str = ""
    """environment variable that holds the endpoint's key; empty = it needs none"""
    window: int = 32768
    """endpoint: its context window in tokens, prompt and reply together, as the policy's tokenizer counts"""
    concurrency: int = 8
    """endpoint: requests under way at once"""
    timeout: float = 120.0
    """endpoint: seconds that one request may take"""
    max_retries: int = 6
    """endpoint: attempts at one request after the first has failed, before the run stops"""
    max_calls: int = 0
    """replies that may be asked for in all, earlier starts of the run included; 0 = no cap"""
    max_tokens: int = 0
    """the same for prompt and reply tokens together; a reply that might pass the cap is not asked for"""
    omit: tuple[str, ...] = ()
    """endpoint: those of temperature, top_p, seed and stop that its model refuses: not sent, it draws as it likes"""

    def __post_init__(self) -> None:
        for name, least in (("window", 2), ("concurrency", 1), ("max_retries", 0), ("max_calls", 0), ("max_tokens", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least {least}")
        if unknown := [name for name in self.omit if name not in OPTIONAL]:
            raise ConfigError(f"omit has {', '.join(unknown)}; it may have {', '.join(OPTIONAL)}")
        if not 0 < self.timeout < float("inf"):
            raise ConfigError(f"timeout={self.timeout} must be a number of seconds above 0")
        if self.url:
            self._check_url()
        elif self.api_key_env:
            raise ConfigError("api_key_env is for an endpoint; set url too, or leave both empty")
        if self.api_key_env and not re.fullmatch(r"[A-Za-z_]\w*(?:_KEY|_TOKEN|_SECRET|_PASSWORD)", self.api_key_env):
            # the value is not shown: it may be the key itself
            endings = ", ".join(SECRET_NAMES)
            raise ConfigError(f"api_key_env must be the NAME of an environment variable that ends in one of {endings}")

    def _check_url(self) -> None:
        try:
            parts = urlsplit(self.url)
            is_plain = parts.scheme in ("http", "https") and parts.hostname and not (parts.query or parts.fragment)
        except ValueError:
            parts, is_plain = None, False
        if parts and (parts.username or parts.password):
            raise ConfigError("url holds a user or password; put the key into a variable and name it in api_key_env")
        if not is_plain:
            raise ConfigError(f"url={redact(self.url)!r} is no address such as http://host:8000/v1")
        if not self.model:
            raise ConfigError(f"url={redact(self.url)} needs model, the name under which the endpoint knows its model")


class BudgetReached(Exception):
    """The next reply might pass max_calls or max_tokens; all before it are kept."""


class Budget:
    """Counts what was asked for against the caps of a WriterConfig; one thread asks, so there is no lock."""

    def __init__(self, cfg: WriterConfig, name: str, calls: int = 0, tokens: int = 0) -> None:
        self._cfg, self._name = cfg, name
        self.calls, self.tokens = calls, tokens

    def reserve(self, calls: int, tokens: int) -> None:
        """Take `calls` and at most `tokens` out of the budget, or raise BudgetReached and take nothing."""
        for what, used, more in (("calls", self.calls, calls), ("tokens", self.tokens, tokens)):
            cap = getattr(self._cfg, f"max_{what}")
            if cap and used + more > cap:
                key = f"{self._name}.max_{what}"
                raise BudgetReached(f"{key}={cap} is reached: {used} {what} used, {more} wanted next; raise it{AGAIN}")
        self.calls, self.tokens = self.calls + calls, self.tokens + tokens

    def settle(self, reserved: int, used: int) -> None:
        """The tokens that replies really took."""
        self.tokens += used - reserved


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would take the key to another host."""

    def redirect_request(self, *_: Any) -> None:
        return None


class Client:
    """Asks one endpoint; safe to share between threads. ConfigError at once when the key's variable is not set."""

    def __init__(self, cfg: WriterConfig) -> None:
        self.cfg = cfg
        self.where = f"{redact(cfg.url)} (model {cfg.model})"
        self._key = read_key(cfg.api_key_env) if cfg.api_key_env else ""
        self._opener = urllib.request.build_opener(_NoRedirect)
        self._jitter = random.Random()  # spreads pauses: of no result
        self._limit = LIMITS[0]

    def ask(
        self,
        prompt: str | Sequence[Mapping[str, str]],
        max_new_tokens: int,
        sampling: Sampling,
        stop: threading.Event | None = None,
    ) -> Reply:
        """The reply to one user message, or to messages. Refused, or ConfigError where no attempt can succeed.

        Once a reply was read nothing is asked again. `stop` ends a pause between attempts, and with it the attempts.
        """
        stop = stop or threading.Event()
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(one) for one in prompt]
        pause = FIRST_PAUSE
        for attempt in range(self.cfg.max_retries + 1):
            try:
                return self._attempt(messages, max_new_tokens, sampling)
            except Failed as error:
                if attempt == self.cfg.max_retries:
                    raise ConfigError(f"{self.where} failed {attempt + 1} times, last: {error}{AGAIN}") from None
                wait_for = max(error.pause, pause * self._jitter.uniform(0.5, 1.0))
                pause = min(2 * pause, LONGEST_PAUSE)
                if wait_for >= TOLD_PAUSE:  # else a long Retry-After looks like a program that hangs
                    left = f"attempt {attempt + 2} of {self.cfg.max_retries + 1} in {wait_for:.0f} s"
                    print(f"{self.where}: {error}; {left}", file=sys.stderr, flush=True)
                if stop.wait(wait_for):
                    raise ConfigError(f"{self.where}: given up, last: {error}") from None
        raise AssertionError("unreachable")

    def _attempt(self, messages: list[dict[str, str]], max_new_tokens: int, sampling: Sampling) -> Reply:
        """One reply, under the name of the token limit that the endpoint's model takes."""
        characters = sum(len(message["content"]) for message in messages)
        optional = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed & 0x7FFFFFFF,
        } | ({"stop": list(sampling.stop)} if sampling.stop else {})
        sent = {name: value for name, value in optional.items() if name not in self.cfg.omit}
        for limit in (self._limit, LIMITS[-1]):
            body = {"model": self.cfg.model, "messages": messages, limit: max_new_tokens, **sent}
            try:
                return read_reply(self._post(json.dumps(body).encode()), characters)
            except Unsupported as error:
                if error.field != limit or limit == LIMITS[-1]:
                    remedy = f"set omit=[{error.field}], and it draws as it likes" if error.field in sent else ""
                    told = f"{self.where} takes no {error.field}: {error}"
                    raise ConfigError(f"{told}; {remedy or 'choose another model'}{AGAIN}") from None
                self._limit = LIMITS[-1]
        raise AssertionError("unreachable")

    def _post(self, data: bytes) -> bytes:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(self.cfg.url.rstrip("/") + CHAT, data, headers)
        deadline = time.monotonic() + self.cfg.timeout
        try:
            with self._opener.open(request, timeout=self.cfg.timeout) as response:
                return _read_all(response, deadline)
        except urllib.error.HTTPError as error:
            with error:
                raise self._judge(error) from None
        except TimeoutError:
            raise Failed(f"no reply within {self.cfg.timeout:g} s") from None
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                raise Failed(f"no reply within {self.cfg.timeout:g} s") from None
            raise Failed(self._hide(f"{type(reason).__name__}: {reason}")) from None

    def _judge(self, error: urllib.error.HTTPError) -> Exception:
        """What an HTTP status means: Failed, Refused, Unsupported, or the ConfigError that ends the run."""
        try:
            said = error.read(2000).decode("utf-8", "replace")
        except (OSError, HTTPException):
            said = ""
        told = self._hide(f"HTTP {error.code} {' '.join(said.split())[:300]}".strip())
        if error.code in TRANSIENT or error.code >= 500:
            return Failed(told, retry_after(error.headers.get("Retry-After")))
        if error.code in PER_PROMPT:
            return Unsupported(field, told) if (field := refused_field(said)) else Refused(told)
        key = f", the key in {self.cfg.api_key_env}" if self.cfg.api_key_env else " and api_key_env"
        return ConfigError(f"{self.where}: {told}; check url, model{key}{AGAIN}")

    def _hide(self, text: str) -> str:
        return redact(text.replace(self._key, HIDDEN) if self._key else text)


class ApiWriter:
    """Answers prompts through a Client, several at once; every reply stands alone and is handed over as it comes."""

    together = False

    def __init__(self, cfg: WriterConfig, tokenizer: Any, max_new_tokens: int, budget: Budget) -> None:
        self.name, self.max_new_tokens, self.budget = cfg.model, max_new_tokens, budget
        self._cfg, self._client, self._tokenizer = cfg, Client(cfg), tokenizer
        self._answered, self._refused = 0, 0

    def fit(self, wordings: Sequence[str]) -> str | None:
        """The first wording that leaves room for a reply."""
        room = self._cfg.window - self.max_new_tokens
        return next((text for text in wordings if self.length(text) <= room), None)

    def length(self, prompt: str) -> int:
        """Tokens, as the policy's tokenizer counts them."""
        return len(self._tokenizer.encode(prompt, add_special_tokens=False))

    def batches(self, prompts: Mapping[int, str]) -> Iterator[list[int]]:
        if prompts:
            yield list(prompts)

    def answer(self, prompts: Mapping[int, str], sampling: Mapping[int, Sampling]) -> Iterator[dict[int, Reply]]:
        """Replies as they arrive. Before anything is raised, requests under way are awaited and handed over."""
        queue, running, stop = iter(prompts), {}, threading.Event()
        failure: Exception | None = None
        held: dict[int, Reply] = {}  # refusals, until a reply shows that the request itself is right
        pool = ThreadPoolExecutor(self._cfg.concurrency, thread_name_prefix="reflector")
        try:
            while True:
                while failure is None and len(running) < self._cfg.concurrency and (i := next(queue, None)) is not None:
                    most = self.length(prompts[i]) + self.max_new_tokens
                    try:
                        self.budget.reserve(1, most)
                    except BudgetReached as error:
                        failure = error
                        break
                    ask = (self._client.ask, prompts[i], self.max_new_tokens, sampling[i], stop)
                    running[pool.submit(*ask)] = (i, most)
                if not running:
                    break
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    i, most = running.pop(future)
                    try:
                        held[i] = self._take(future, most)
                    except ConfigError as error:
                        failure = failure or error
                        stop.set()  # nobody waits through another pause
                    if self._answered and held:
                        yield held
                        held = {}
            if failure:
                raise failure
            if held:
                yield held
        finally:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)

    def _take(self, future: "Future[Reply]", reserved: int) -> Reply:
        """The reply; an empty one for a prompt that the endpoint refused, unless it refuses them all."""
        try:
            reply = future.result()
        except Refused as error:
            self._refused += error.reply is None
            if not self._answered and self._refused >= REFUSED_AT_FIRST:
                raise ConfigError(f"{self._client.where} refuses every prompt: {error}") from None
            reply = replace(error.reply, text="") if error.reply else Reply("", 0, 0)
        else:
            self._answered += 1
        self.budget.settle(reserved, reply.prompt_tokens + reply.reply_tokens)
        return reply


def read_key(variable: str, setting: str = "api_key_env") -> str:
    """The secret in an environment variable that `setting` names; ConfigError where there is none."""
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigError(f"{setting}={variable}, but there is no such environment variable; export it")
    if not key.isascii() or not key.isprintable():
        raise ConfigError(f"{setting}={variable}: its value holds characters that no key has; export it again")
    return key


def _read_all(response: Any, deadline: float) -> bytes:
    """The body; Failed if it is huge, or still coming at the deadline (a time limit per read would never end that)."""
    parts, size = [], 0
    while part := response.read1(1 << 16):
        parts.append(part)
        size += len(part)
        if size > MOST_BYTES:
            raise Failed(f"a reply of more than {MOST_BYTES >> 20} MiB")
        if time.monotonic() > deadline:
            raise Failed("the reply did not end in time")
    return b"".join(parts)


def retry_after(value: str | None) -> float:
    """Seconds of a Retry-After header: a number or a date; 0 for none, or none that can be read."""
    if not value:
        return 0.0
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return 0.0
    return min(max(seconds, 0.0), LONGEST_RETRY_AFTER) if seconds == seconds else 0.0
