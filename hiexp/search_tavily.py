"""The live web through Tavily, with a budget and with a memory that makes an evaluation repeatable.

    search.backend=tavily search.tavily.cache=runs/web search.tavily.max_credits=5000
    search.backend=tavily search.tavily.cache=runs/web search.tavily.replay=true       # the same answers, no network

The official package (tavily-python) is used where it is installed, else its documented REST call. A query longer than
the service takes is cut at a word. Every answer is one file, <cache>/<hash of what was asked>/<day>.json, written
whole or not at all. When no attempt succeeds the run ends with the query in the message.
"""

import asyncio
import hashlib
import importlib
import json
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

from hiexp.api_client import TRANSIENT, Failed, read_key
from hiexp.config import ConfigError
from hiexp.http_calls import Caller, Refused, persist, shorten
from hiexp.redact import redact
from hiexp.search_remote_config import TavilyConfig
from hiexp.search_types import ScoredDocument, ScoredSearch, check_top_k
from hiexp.trajectory import Document

MOST_CHARACTERS = 400
"""of a query; the service refuses more"""
MOST_RESULTS = 20
CREDITS = {"basic": 1, "advanced": 2}
DAY = 86400.0


class TavilySearch(ScoredSearch):
    """Queries to the web; ids are addresses. Safe to share between threads."""

    def __init__(self, cfg: TavilyConfig) -> None:
        """ConfigError where the key's variable is not set or the cache cannot be used."""
        self.cfg = cfg
        self.credits, self.requests, self.from_cache = 0, 0, 0
        """used by this start of the run; queries that the service answered; those that the cache did"""
        self._reserved = 0
        self._cache = AnswerCache(cfg.cache) if cfg.cache else None
        if cfg.replay and not (self._cache and self._cache.folder.is_dir()):
            raise ConfigError(f"search.tavily.cache={cfg.cache}: no such folder; record it first, with replay=false")
        self._key = "" if cfg.replay else read_key(cfg.api_key_env, "search.tavily.api_key_env")
        self._package = None if cfg.replay else official_client(cfg, self._key)
        self._caller = Caller("http-tavily", cfg.concurrency, use_proxy=True)
        self._room = asyncio.Semaphore(cfg.concurrency)

    def search_scored(self, queries: list[str], top_k: int) -> list[list[ScoredDocument]]:
        check_top_k(top_k)
        if top_k > MOST_RESULTS:
            raise ConfigError(
                f"top_k={top_k}: Tavily gives at most {MOST_RESULTS} results; lower rollout.top_k, or "
                "search.rerank_depth with search.rerank"
            )
        asked = {query: fit(query) for query in dict.fromkeys(queries) if query.strip()}
        answers = self._caller.run(self._answer_all(list(dict.fromkeys(asked.values())), top_k))
        return [_documents(answers[asked[query]])[:top_k] if query in asked else [] for query in queries]

    def counters(self) -> dict[str, float]:
        """Cumulative: what was paid, and how queries were answered."""
        counts = {"credits": self.credits, "web_requests": self.requests, "from_disk": self.from_cache}
        return {f"search/{name}": float(count) for name, count in counts.items()}

    async def _answer_all(self, queries: list[str], top_k: int) -> dict[str, dict[str, Any]]:
        async def one(query: str) -> dict[str, Any]:
            async with self._room:
                return await self._answer(query, top_k)

        tasks = [asyncio.ensure_future(one(query)) for query in queries]
        try:
            return dict(zip(queries, await asyncio.gather(*tasks), strict=True))
        finally:
            for task in tasks:
                task.cancel()

    async def _answer(self, query: str, top_k: int) -> dict[str, Any]:
        body = self._body(query, top_k)
        if self._cache and (known := self._cache.find(body, self.cfg)) is not None:
            self.from_cache += 1
            return known
        if self.cfg.replay:
            raise ConfigError(f"search.tavily.replay=true, and {self.cfg.cache} has no answer to {shorten(query)}")
        what = f"search for {shorten(query)} at {redact(self.cfg.url)}"
        with self._reserve(query):
            try:
                answer = await persist(lambda: self._ask(body), self.cfg.max_retries, what)
            except Refused as error:
                raise ConfigError(f"{what}: {error}; check the key in {self.cfg.api_key_env} and its plan") from None
        usage = answer.get("usage")
        used = usage.get("credits") if isinstance(usage, dict) else None
        self.credits += used if type(used) is int and used >= 0 else CREDITS[self.cfg.depth]
        self.requests += 1
        if self._cache:
            self._cache.store(body, answer)
        return answer

    def _body(self, query: str, top_k: int) -> dict[str, Any]:
        cfg = self.cfg
        body = {"query": query, "max_results": top_k, "search_depth": cfg.depth, "topic": cfg.topic}
        domains = {"include_domains": list(cfg.include_domains), "exclude_domains": list(cfg.exclude_domains)}
        return body | {name: sites for name, sites in domains.items() if sites}

    async def _ask(self, body: dict[str, Any]) -> dict[str, Any]:
        body = body | {"include_usage": True}
        if self._package:
            answer = await _by_package(self._package, body, self.cfg.timeout)
        else:
            headers = {"Authorization": f"Bearer {self._key}"}
            url = self.cfg.url.rstrip("/") + "/search"
            answer = await self._caller.post(url, body, headers, self.cfg.timeout)
        _documents(answer)  # an answer that cannot be read is neither kept nor paid for twice
        return answer

    @contextmanager
    def _reserve(self, query: str) -> Iterator[None]:
        """Room under the cap for one more query; all of this happens in one thread, the caller's loop."""
        price = CREDITS[self.cfg.depth]
        if self.cfg.max_credits and self.credits + self._reserved + price > self.cfg.max_credits:
            cap = f"search.tavily.max_credits={self.cfg.max_credits} is reached"
            raise ConfigError(f"{cap}: {self.credits} used; raise it to ask {shorten(query)} and go on")
        self._reserved += price
        try:
            yield
        finally:
            self._reserved -= price


class AnswerCache:
    """A folder of answers, by what was asked and on which day."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def find(self, body: dict[str, Any], cfg: TavilyConfig) -> dict[str, Any] | None:
        """The newest answer that counts: within the TTL, or for a replay any up to `as_of`."""
        last = cfg.as_of or "9999"
        for file in sorted(self._place(body).glob("*.json"), reverse=True):
            if cfg.replay and file.stem > last:
                continue
            try:
                record = json.loads(file.read_text(encoding="utf-8"))
                asked_at, answer = float(record["time"]), record["answer"]
                _documents(answer)
            except (OSError, ValueError, KeyError, TypeError, Failed) as error:
                raise ConfigError(f"{file} is no recorded answer ({error}); remove it") from None
            is_fresh = cfg.replay or time.time() - asked_at < cfg.ttl_days * DAY
            return answer if is_fresh else None
        return None

    def store(self, body: dict[str, Any], answer: dict[str, Any]) -> None:
        place, now = self._place(body), time.time()
        place.mkdir(parents=True, exist_ok=True)
        record = json.dumps({"asked": body, "time": now, "answer": answer})
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=place, suffix=".part", delete=False) as part:
            part.write(record)
        Path(part.name).replace(place / f"{date.fromtimestamp(now).isoformat()}.json")

    def _place(self, body: dict[str, Any]) -> Path:
        return self.folder / hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:32]


def describe_web(cfg: TavilyConfig) -> dict[str, Any]:
    """{corpus: which answers count, web: what is asked for}."""
    day, folder = date.today().isoformat(), Path(cfg.cache).name
    corpus = f"web, {day}" + (f", answers of up to {cfg.ttl_days:g} days before from {folder}" if cfg.cache else "")
    if cfg.replay:
        corpus = f"web, recorded in {folder}" + (f" up to {cfg.as_of}" if cfg.as_of else "")
    asked = ("depth", "topic", "include_domains", "exclude_domains")
    return {"corpus": corpus, "web": {name: getattr(cfg, name) for name in asked}}


def fit(query: str) -> str:
    """The query as it is sent: cut at a word boundary where the service would refuse it, with a warning."""
    query = query.strip()
    if len(query) <= MOST_CHARACTERS:
        return query
    kept = query[: MOST_CHARACTERS + 1]
    kept = (kept.rsplit(None, 1)[0] if any(map(str.isspace, kept)) else kept)[:MOST_CHARACTERS].rstrip()
    warnings.warn(
        f"a query of {len(query)} characters is cut to {len(kept)} for Tavily: {shorten(query)}", stacklevel=2
    )
    return kept


def official_client(cfg: TavilyConfig, key: str) -> Any:
    """The client of tavily-python; None where it is not installed."""
    try:
        package = importlib.import_module("tavily")
    except ImportError:
        return None
    return package.TavilyClient(api_key=key, api_base_url=cfg.url.rstrip("/"))


async def _by_package(client: Any, body: dict[str, Any], timeout: float) -> Any:
    """The same request through the package; its exceptions sorted into those that may pass and those that cannot."""
    try:
        async with asyncio.timeout(timeout + 1):
            return await asyncio.to_thread(client.search, **body, timeout=timeout)
    except Exception as error:
        name, response = type(error).__name__, getattr(error, "response", None)
        told = redact(f"{name}: {error}")
        status = getattr(response, "status_code", None)
        if name in ("InvalidAPIKeyError", "ForbiddenError", "BadRequestError", "MissingAPIKeyError"):
            raise Refused(told) from None
        if status is not None and status not in TRANSIENT and status < 500:
            raise Refused(told) from None
        if isinstance(error, OSError) or name in ("UsageLimitExceededError", "TimeoutError"):
            raise Failed(told) from None
        raise


def _documents(answer: Any) -> list[ScoredDocument]:
    """Title and content of each result, an address once; Failed where the answer has another form."""
    results = answer.get("results") if isinstance(answer, dict) else None
    if not isinstance(results, list):
        keys = ", ".join(map(str, answer)) if isinstance(answer, dict) else type(answer).__name__
        raise Failed(f"the answer has no list of results ({keys[:80]})")
    found: dict[str, ScoredDocument] = {}
    for place, one in enumerate(results):
        url = one.get("url") if isinstance(one, dict) else None
        title, content, score = (one.get(name) or "" for name in ("title", "content", "score")) if url else ("",) * 3
        if not all(isinstance(text, str) for text in (url, title, content)):
            raise Failed(f"a result is no page with url, title and content, but {str(one)[:80]!r}")
        score = float(score) if type(score) in (int, float) else 1 / (place + 1)
        if content.strip():
            found.setdefault(str(url), ScoredDocument(str(url), score, Document(title.strip(), content.strip())))
    return list(found.values())
