"""The live web through Tavily, with a budget and with a memory that makes an evaluation repeatable.

    search.backend=tavily search.tavily.cache=runs/web search.tavily.max_credits=5000
    search.backend=tavily search.tavily.cache=runs/web search.tavily.replay=true       # the same answers, no network

The official package (tavily-python) is used where it is installed, else its documented REST call. A query longer than
the service takes is cut at a word. Every answer is one file, <cache>/<hash of what was asked>/<day>.json, written
whole or not at all. When no attempt succeeds the run ends with the query in the message; what other queries were sent
by then is waited for, counted and kept, since it is paid for. A request whose answer never came may have been charged:
it counts against max_credits, not in search/credits.
"""

import asyncio
import hashlib
import importlib
import json
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

from hiexp.api_client import TRANSIENT, Failed, read_key
from hiexp.config import ConfigError
from hiexp.http_calls import Caller, Refused, Unsure, persist, shorten
from hiexp.raw_text import mended
from hiexp.redact import redact
from hiexp.search_remote_config import TavilyConfig
from hiexp.search_types import ScoredDocument, ScoredSearch, check_top_k
from hiexp.trajectory import Document

MOST_CHARACTERS = 400
"""of a query; the service refuses more"""
MOST_RESULTS = 20
CREDITS = {"basic": 1, "advanced": 2}
DAY = 86400.0
Request = asyncio.Future[dict[str, Any]]


class _Spent(Exception):
    """The cap leaves no room for this query."""

    def __init__(self, query: str) -> None:
        super().__init__(query)
        self.query = query


class TavilySearch(ScoredSearch):
    """Queries to the web; ids are addresses. Safe to share between threads."""

    def __init__(self, cfg: TavilyConfig) -> None:
        """ConfigError where the key's variable is not set or the cache cannot be used."""
        self.cfg = cfg
        self.credits, self.requests, self.from_cache = 0, 0, 0
        """used by this start of the run; queries that the service answered; those that the cache did"""
        self._reserved = self._perhaps = 0  # credits of requests under way, and of those that nobody answered
        self._cache = AnswerCache(cfg.cache) if cfg.cache else None
        if cfg.replay and not (self._cache and self._cache.folder.is_dir()):
            raise ConfigError(f"search.tavily.cache={cfg.cache}: no such folder; record it first, with replay=false")
        if self._cache and not cfg.replay:
            self._cache.check_writable()
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
        asked = {query: fit(mended(query)) for query in dict.fromkeys(queries) if query.strip()}
        answers = self._caller.run(self._answer_all(list(dict.fromkeys(asked.values())), top_k))
        return [_documents(answers[asked[query]])[:top_k] if query in asked else [] for query in queries]

    def counters(self) -> dict[str, float]:
        """Cumulative: what was paid, and how queries were answered."""
        counts = {"credits": self.credits, "web_requests": self.requests, "from_disk": self.from_cache}
        return {f"search/{name}": float(count) for name, count in counts.items()}

    async def _answer_all(self, queries: list[str], top_k: int) -> dict[str, dict[str, Any]]:
        sent: set[Request] = set()

        async def one(query: str) -> dict[str, Any]:
            async with self._room:
                return await self._answer(query, top_k, sent)

        tasks: list[Request] = []
        try:
            if queries and not self._cache:  # answers that nothing keeps are lost with the run: all of them or none
                self._check_cap(queries[-1], len(queries))
            tasks += [asyncio.ensure_future(one(query)) for query in queries]
            return dict(zip(queries, await asyncio.gather(*tasks), strict=True))
        except _Spent as error:
            await _end(tasks, sent)
            used = f"{self.credits} used" + (f", perhaps {self._perhaps} more" if self._perhaps else "")
            cap = f"search.tavily.max_credits={self.cfg.max_credits} is reached"
            raise ConfigError(f"{cap}: {used}; raise it to ask {shorten(error.query)} and go on") from None
        finally:
            await _end(tasks, sent)

    async def _answer(self, query: str, top_k: int, sent: set[Request]) -> dict[str, Any]:
        body = self._body(query, top_k)
        if self._cache and (known := self._cache.find(body, self.cfg)) is not None:
            self.from_cache += 1
            return known
        if self.cfg.replay:
            raise ConfigError(f"search.tavily.replay=true, and {self.cfg.cache} has no answer to {shorten(query)}")
        what = f"search for {shorten(query)} at {redact(self.cfg.url)}"

        async def attempt() -> dict[str, Any]:
            """One request. It goes on if this query is given up, as the service cannot be told to."""
            self._check_cap(query)
            self._reserved += CREDITS[self.cfg.depth]
            task = asyncio.ensure_future(self._pay(body))
            sent.add(task)
            task.add_done_callback(sent.discard)
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen, even if nobody waits
            return await asyncio.shield(task)

        try:
            return await persist(attempt, self.cfg.max_retries, what)
        except Refused as error:
            raise ConfigError(f"{what}: {error}; check the key in {self.cfg.api_key_env} and its plan") from None

    async def _pay(self, body: dict[str, Any]) -> dict[str, Any]:
        """The answer to one request, counted and kept."""
        price = CREDITS[self.cfg.depth]
        try:
            answer = await self._ask(body)
        except Unsure:
            self._perhaps += price
            raise
        finally:
            self._reserved -= price
        usage = answer.get("usage")
        used = usage.get("credits") if isinstance(usage, dict) else None
        self.credits += used if type(used) is int and used >= 0 else price
        self.requests += 1
        if self._cache:
            self._cache.store(body, answer)
        return answer

    def _check_cap(self, query: str, count: int = 1) -> None:
        """_Spent where more requests could pass the cap; all of this happens in one thread, the caller's loop."""
        needed = self.credits + self._perhaps + self._reserved + count * CREDITS[self.cfg.depth]
        if self.cfg.max_credits and needed > self.cfg.max_credits:
            raise _Spent(query)

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
        _documents(answer)  # an answer that cannot be read is not kept
        return answer


async def _end(tasks: Sequence[Request], sent: set[Request]) -> None:
    """Ask nothing more, and take in the answers to what has been sent."""
    for task in tasks:
        task.cancel()
    if sent:
        await asyncio.wait(set(sent))


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

    def check_writable(self) -> None:
        """ConfigError, before anything is paid for, where no answer could be kept."""
        with self._writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.folder, suffix=".part"):
                pass

    def store(self, body: dict[str, Any], answer: dict[str, Any]) -> None:
        """Keep an answer. ConfigError where the folder has become unwritable."""
        place, now = self._place(body), time.time()
        record = json.dumps({"asked": body, "time": now, "answer": answer})
        with self._writing():
            place.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=place, suffix=".part", delete=False) as part:
                part.write(record)
            Path(part.name).replace(place / f"{date.fromtimestamp(now).isoformat()}.json")

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            told = f"search.tavily.cache={self.folder} cannot be written: {error}"
            raise ConfigError(f"{told}; name a writable folder with space") from None

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
    client = package.TavilyClient(api_key=key, api_base_url=cfg.url.rstrip("/"))
    if hooks := getattr(getattr(client, "session", None), "hooks", None):
        hooks.setdefault("response", []).append(_check_raw)
    return client


def _check_raw(response: Any, *_: Any, **__: Any) -> None:
    """Before the package sees it: what it makes of an answer without results is an answer with none."""
    if response.status_code == 200:
        try:
            answer = json.loads(response.content)
        except (ValueError, RecursionError):
            raise Unsure(f"the answer is no JSON: {response.content[:40]!r}") from None
        _documents(answer)


async def _by_package(client: Any, body: dict[str, Any], timeout: float) -> Any:
    """The same request through the package; its exceptions sorted into those that may pass and those that cannot."""
    try:
        async with asyncio.timeout(timeout + 1):
            return await asyncio.to_thread(client.search, **body, timeout=timeout)
    except Failed:
        raise
    except Exception as error:
        name, response = type(error).__name__, getattr(error, "response", None)
        told = redact(f"{name}: {error}")
        status = getattr(response, "status_code", None)
        if name in ("InvalidAPIKeyError", "ForbiddenError", "BadRequestError", "MissingAPIKeyError"):
            raise Refused(told) from None
        if status is not None and status not in TRANSIENT and status < 500:
            raise Refused(told) from None
        if status is not None or name == "UsageLimitExceededError":
            raise Failed(told) from None
        if isinstance(error, (OSError, ValueError, RecursionError)) or name == "TimeoutError":
            was_sent = "NewConnectionError" not in told and name != "ConnectTimeout"
            raise (Unsure if was_sent else Failed)(told) from None
        raise


def _documents(answer: Any) -> list[ScoredDocument]:
    """Title and content of each result, an address once; Unsure where the answer has another form."""
    results = answer.get("results") if isinstance(answer, dict) else None
    if not isinstance(results, list):
        keys = ", ".join(map(str, answer)) if isinstance(answer, dict) else type(answer).__name__
        raise Unsure(f"the answer has no list of results ({keys[:80]})")
    found: dict[str, ScoredDocument] = {}
    for place, one in enumerate(results):
        url = one.get("url") if isinstance(one, dict) else None
        title, content, score = (one.get(name) or "" for name in ("title", "content", "score")) if url else ("",) * 3
        if not all(isinstance(text, str) for text in (url, title, content)):
            raise Unsure(f"a result is no page with url, title and content, but {str(one)[:80]!r}")
        score = float(score) if type(score) in (int, float) else 1 / (place + 1)
        if content.strip():
            document = Document(mended(title).strip(), mended(content).strip())
            found.setdefault(str(url), ScoredDocument(mended(str(url)), score, document))
    return list(found.values())
