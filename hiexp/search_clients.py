"""Search by a server: this project's own (hiexp/search_server.py) or any that speaks one of its dialects.

    search.backend=http search.http.urls=[http://one:8000,http://two:8000]

A batch is split into requests that are under way at once. Each goes to the server with the fewest; one that fails gives
way to another without a pause, and is left alone for a while after a few failures in a row. When no attempt succeeds
the run ends with the query in the message: a failure is never an empty result.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx2

from hiexp.api_client import Failed, read_key
from hiexp.config import ConfigError
from hiexp.dialects import DIALECTS, Results, SchemaError, read_response
from hiexp.http_calls import Caller, Refused, persist, shorten
from hiexp.raw_text import mended
from hiexp.redact import redact
from hiexp.search_remote_config import HttpConfig
from hiexp.search_types import ScoredDocument, ScoredSearch, check_top_k

HEALTH_SECONDS = 10.0


@dataclass
class Replica:
    """One server, and how it has behaved."""

    url: str
    under_way: int = 0
    failures: int = 0
    """in a row"""
    closed_until: float = 0.0
    """on the monotonic clock: nothing is sent before; then one request tries it"""

    def worked(self) -> None:
        self.failures, self.closed_until = 0, 0.0

    def failed(self, cfg: HttpConfig) -> None:
        self.failures += 1
        if self.failures >= cfg.breaker_failures:
            self.closed_until = time.monotonic() + cfg.breaker_seconds


class HttpSearch(ScoredSearch):
    """Queries to servers over HTTP; safe to share between threads."""

    def __init__(self, cfg: HttpConfig) -> None:
        """ConfigError where no server is named or the token's variable is not set."""
        if not cfg.urls:
            raise ConfigError("search.http.urls is empty; name at least one server, e.g. [http://127.0.0.1:8000]")
        self.cfg, self.dialect = cfg, DIALECTS[cfg.dialect]
        self.replicas = [Replica(_address(url, self.dialect.path)) for url in cfg.urls]
        self.failed_requests = 0
        self._headers = {}
        if cfg.token_env:
            self._headers["Authorization"] = f"Bearer {read_key(cfg.token_env, 'search.http.token_env')}"
        self._caller = Caller("http-search", cfg.connections, use_proxy=False)
        self._room = asyncio.Semaphore(cfg.connections)  # of all threads: waiting for room is no part of a timeout

    def search_scored(self, queries: list[str], top_k: int) -> list[list[ScoredDocument]]:
        check_top_k(top_k)
        results: list[list[ScoredDocument]] = [[] for _ in queries]
        asked = [i for i, query in enumerate(queries) if query.strip()]  # a blank query finds nothing anywhere
        if asked:
            found = self._caller.run(self._search_all([mended(queries[i]) for i in asked], top_k))
            for i, row in zip(asked, found, strict=True):
                results[i] = row[:top_k]
        return results

    def counters(self) -> dict[str, float]:
        """Requests that had to be sent again, or that ended the run."""
        return {"search/failed_requests": self.failed_requests}

    async def _search_all(self, queries: list[str], top_k: int) -> Results:
        size = self.cfg.queries_per_request if self.dialect.takes_many else 1
        parts = [queries[start : start + size] for start in range(0, len(queries), size)]

        async def one(part: list[str]) -> Results:
            async with self._room:
                return await self._ask(part, top_k)

        tasks = [asyncio.ensure_future(one(part)) for part in parts]
        try:
            return [row for part in await asyncio.gather(*tasks) for row in part]
        finally:
            for task in tasks:
                task.cancel()

    async def _ask(self, queries: Sequence[str], top_k: int) -> Results:
        """One request, by as many attempts as it takes and may take."""
        body, tried = self.dialect.body(queries, top_k), set[str]()
        more = f" and {len(queries) - 1} more" if len(queries) > 1 else ""
        what = f"search for {shorten(queries[0])}{more} at {', '.join(redact(one.url) for one in self.replicas)}"

        async def attempt() -> Results:
            """At every server that has not had this request yet, until one answers."""
            tried.clear()
            while True:
                replica = await self._pick(tried)
                tried.add(replica.url)
                try:
                    return await self._send(replica, body, len(queries))
                except Failed:
                    if all(one.url in tried or self._is_closed(one) for one in self.replicas):
                        raise

        try:
            return await persist(attempt, self.cfg.max_retries, what)
        except Refused as error:
            hint = "check search.http.urls, dialect and token_env"
            raise ConfigError(f"{what}: {error}; {hint}") from None

    async def _pick(self, tried: set[str]) -> Replica:
        """The open server with the fewest requests, of those not tried; where none is open, the first that will be."""
        fresh = [one for one in self.replicas if one.url not in tried] or self.replicas
        is_open = [one for one in fresh if not self._is_closed(one)]
        chosen = min(is_open or fresh, key=lambda one: (0.0 if is_open else one.closed_until, one.under_way))
        if (wait := chosen.closed_until - time.monotonic()) > 0:
            await asyncio.sleep(wait)
        if chosen.failures >= self.cfg.breaker_failures:  # this request tries it, the others go on leaving it alone
            chosen.closed_until = time.monotonic() + self.cfg.breaker_seconds
        return chosen

    async def _send(self, replica: Replica, body: dict[str, Any], count: int) -> Results:
        replica.under_way += 1
        try:
            payload = await self._caller.post(replica.url, body, self._headers, self.cfg.timeout)
            results = read_response(payload, count)
        except SchemaError as error:
            self._failed(replica)
            raise Failed(f"{redact(replica.url)}: {error}") from None
        except Failed as error:
            self._failed(replica)
            raise Failed(f"{redact(replica.url)}: {error}", error.pause) from None
        finally:
            replica.under_way -= 1
        replica.worked()
        return results

    def _failed(self, replica: Replica) -> None:
        self.failed_requests += 1
        replica.failed(self.cfg)

    @staticmethod
    def _is_closed(replica: Replica) -> bool:
        return replica.closed_until > time.monotonic()


def described_by_servers(cfg: HttpConfig) -> dict[str, Any]:
    """{corpus: what the servers' /health says, "unknown" where none says it, server: the rest of it}.

    ConfigError for servers that say different things: what is found would depend on which of them is asked.
    """
    said = {url: facts for url in cfg.urls if (facts := _health(url, min(cfg.timeout, HEALTH_SECONDS)))}
    for url, facts in said.items():
        first = next(iter(said))
        if facts != said[first]:
            urls = f"{redact(first)} and {redact(url)}"
            raise ConfigError(f"search.http.urls: {urls} serve different things ({said[first]}, {facts}); name equals")
    facts = dict(next(iter(said.values()), {}))
    return {"corpus": str(facts.pop("corpus", "unknown")), "server": facts}


def _health(url: str, timeout: float) -> dict[str, Any]:
    """What a server of this project says of itself; nothing where it does not answer or is another kind of server."""
    parts = urlsplit(url)
    try:
        said = httpx2.get(f"{parts.scheme}://{parts.netloc}/health", timeout=timeout, trust_env=False).json()
    except (httpx2.HTTPError, OSError, ValueError, RecursionError):
        return {}
    is_ours = isinstance(said, dict) and isinstance(said.get("corpus"), str)
    return {name: value for name, value in said.items() if name != "status"} if is_ours else {}


def _address(url: str, path: str) -> str:
    """The address to post to: that of the setting where it has a path, else with the dialect's."""
    return url if urlsplit(url).path.strip("/") else url.rstrip("/") + path
