"""Requests that end: one thread with an event loop, a pool of connections, a deadline for all of a request, retries.

What may pass (HTTP 408, 425, 429, 5xx, a broken connection, silence, an answer that is none) is `Failed` and tried
again after a pause that doubles each time, with jitter, and is never shorter than the server's Retry-After. What
cannot pass is ConfigError at once. Redirects are not followed: they would take a key to another host.
"""

import asyncio
import json
import random
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import httpx2

from hiexp.api_client import FIRST_PAUSE, LONGEST_PAUSE, TRANSIENT, Failed, retry_after
from hiexp.config import ConfigError
from hiexp.redact import redact

MOST_BYTES = 64 << 20
SAID = 300
"""characters of a server's own words that a message repeats"""
T = TypeVar("T")


class Refused(ConfigError):
    """The service says no, and would say so again."""


class Unsure(Failed):
    """The service may have done, and charged for, what was asked; no answer says so."""


class Caller:
    """Runs coroutines for threads that wait for them; connections stay open between calls."""

    def __init__(self, name: str, connections: int, use_proxy: bool) -> None:
        """`use_proxy`: as HTTPS_PROXY and the like say; a proxy cannot reach servers of the machine's own network."""
        self._name, self._connections, self._use_proxy = name, connections, use_proxy
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._clients: list[httpx2.AsyncClient] = []  # one, once it is needed

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`; what it raises is raised here. It is cancelled if the waiting thread is interrupted."""
        future = asyncio.run_coroutine_threadsafe(work, self._started())
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_turn, args=(self._loop,), name=self._name, daemon=True).start()
                weakref.finalize(self, _end, self._loop, self._clients)
            return self._loop

    async def post(self, url: str, body: Any, headers: Mapping[str, str], timeout: float) -> Any:
        """What the JSON answer holds, `timeout` seconds being enough for all of it. Failed, Unsure or Refused."""
        if not self._clients:  # made in the loop that will use it
            limits = httpx2.Limits(max_connections=self._connections, max_keepalive_connections=self._connections)
            self._clients.append(httpx2.AsyncClient(limits=limits, timeout=None, trust_env=self._use_proxy))
        (client,) = self._clients
        request = client.build_request("POST", url, json=body, headers=dict(headers))
        try:
            async with asyncio.timeout(timeout):
                response = await client.send(request, stream=True)
                try:
                    data = await _read_all(response)
                finally:
                    await response.aclose()
        except TimeoutError:
            raise Unsure(f"no answer within {timeout:g} s") from None
        except (httpx2.HTTPError, OSError) as error:
            kind = Failed if isinstance(error, (httpx2.ConnectError, httpx2.ConnectTimeout)) else Unsure
            raise kind(redact(f"{type(error).__name__}: {error}".rstrip(": "))) from None
        if response.status_code != 200:
            raise _judge(response.status_code, response.headers.get("Retry-After"), data)
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            raise Unsure(f"the answer is no JSON: {data[:40]!r}") from None


def _turn(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


def _end(loop: asyncio.AbstractEventLoop, clients: list[httpx2.AsyncClient]) -> None:
    """Close the connections of a Caller that nobody has any more, then its loop, which ends the thread."""

    async def close() -> None:
        try:
            for client in clients:
                await client.aclose()
        finally:
            loop.stop()

    asyncio.run_coroutine_threadsafe(close(), loop)


async def persist(attempt: Callable[[], Awaitable[T]], max_retries: int, what: str) -> T:
    """The result of the first attempt that does not raise Failed; ConfigError that names `what` where none succeeds."""
    pause, jitter = FIRST_PAUSE, random.Random()  # spreads pauses: of no result
    for number in range(max_retries + 1):
        try:
            return await attempt()
        except Failed as error:
            if number == max_retries:
                raise ConfigError(f"{what} failed {number + 1} times, last: {error}") from None
            await asyncio.sleep(max(error.pause, pause * jitter.uniform(0.5, 1.0)))
            pause = min(2 * pause, LONGEST_PAUSE)
    raise AssertionError("unreachable")


def shorten(query: str) -> str:
    """A query as messages show it."""
    return repr(query if len(query) <= SAID else f"{query[:SAID]}... ({len(query)} characters)")


async def _read_all(response: httpx2.Response) -> bytes:
    parts, size = [], 0
    async for part in response.aiter_bytes():
        parts.append(part)
        size += len(part)
        if size > MOST_BYTES:
            raise Unsure(f"an answer of more than {MOST_BYTES >> 20} MiB")
    return b"".join(parts)


def _judge(status: int, pause: str | None, data: bytes) -> Exception:
    said = redact(" ".join(data.decode("utf-8", "replace").split()))[:SAID]
    told = f"HTTP {status} {said}".strip()
    return Failed(told, retry_after(pause)) if status in TRANSIENT or status >= 500 else Refused(told)
