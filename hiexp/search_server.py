"""Serves an index over HTTP, to this project's clients and to those of the published search agents.

    python -m hiexp.search serve search.backend=bm25 search.corpus=[wiki.jsonl] port=8000
    curl -s localhost:8000/retrieve -d '{"queries": ["capital of Norway"], "topk": 3, "return_scores": true}'

POST /retrieve, /search, /batch_search, /queries (hiexp/dialects.py has their shapes), GET /health and /metrics
(Prometheus). Requests that arrive while a search runs are searched together next. It listens on this machine alone
unless host says otherwise. SIGTERM or Ctrl-C: what was taken is answered, then it stops. What fails has an HTTP status
and {"error": ...}: 400 no JSON, 401 wrong token, 408 the body did not come, 413 too long, 422 no known request, 503 too
busy, 504 not in time, 500 the search itself failed, 404 and 405 no such path. uvicorn itself answers
what is no HTTP (400) and connections above max_connections (503), in plain text. Only text and numbers are read from a
request, never a path.
"""

import asyncio
import hmac
import importlib.util
import json
import math
import os
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from hiexp.api_client import read_key
from hiexp.config import ConfigError, run_script
from hiexp.dialects import PATHS, Limits, RequestError, read_request
from hiexp.encoder import Encoder, EncoderConfig, load_encoder
from hiexp.micro_batches import Busy, MicroBatcher
from hiexp.rankers import Reranked
from hiexp.redact import redact
from hiexp.search import NEEDS_ENCODER, describe_search, open_search
from hiexp.search_remote_config import check_variable
from hiexp.search_types import ScoredSearch, SearchConfig

PACKAGES = ("fastapi", "uvicorn", "prometheus_client")
LOCAL = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class ServeConfig:
    """What is served, to whom, and how much of it at once."""

    search: SearchConfig = field(default_factory=SearchConfig)
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    host: str = "127.0.0.1"
    """address to listen on; 0.0.0.0 = every network of the machine"""
    port: int = 8000
    """0 = any free one; it is printed"""
    token_env: str = ""
    """environment variable with a token that requests must bear; empty = none is asked for"""
    top_k: int = 5
    """passages per query where a request names no number"""
    max_top_k: int = 100
    """passages that a request may ask for"""
    max_queries: int = 512
    """queries in one request"""
    max_characters: int = 20000
    """characters of one query"""
    max_megabytes: int = 8
    """of one request"""
    batch: int = 128
    """queries that are searched together; a longer request is searched alone"""
    gather_ms: float = 2.0
    """while several clients ask: how long an idle server waits for more of them before it searches"""
    max_waiting: int = 8192
    """queries that may wait; more are refused with 503"""
    max_connections: int = 1024
    """connections at once; more are refused with 503"""
    timeout: float = 60.0
    """seconds after which a request that is not answered is given up with 504"""
    idle_seconds: float = 75.0
    """a connection that has brought no whole head of a request for so long is closed; longer than the pause between
    two searches of a rollout"""
    grace_seconds: int = 20
    """how long a server that was told to stop goes on with what it has taken"""

    def __post_init__(self) -> None:
        least = {"port": 0, "max_connections": 1, "max_megabytes": 1, "grace_seconds": 0, "gather_ms": 0}
        counts = ("top_k", "max_top_k", "max_queries", "max_characters", "batch", "max_waiting")
        for name, bound in (least | dict.fromkeys(counts, 1)).items():
            if not bound <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{name}={getattr(self, name)} must be at least {bound}")
        for name in ("timeout", "idle_seconds"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name}={getattr(self, name)} must be a number of seconds above 0")
        if self.top_k > self.max_top_k:
            raise ConfigError(f"top_k={self.top_k} is above max_top_k={self.max_top_k}; raise the latter")
        if self.token_env:
            check_variable("token_env", self.token_env)
        if self.port > 65535:
            raise ConfigError(f"port={self.port} must be at most 65535")

    @property
    def limits(self) -> Limits:
        return Limits(self.top_k, self.max_top_k, self.max_queries, self.max_characters)


class Meters:
    """What /metrics shows."""

    def __init__(self, batcher: MicroBatcher) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self.registry = CollectorRegistry()
        one = {"namespace": "hiexp_search", "registry": self.registry}
        self.requests = Counter("requests", "answered requests", ("path", "status"), **one)
        self.queries = Counter("queries", "queries in answered requests", **one)
        self.seconds = Histogram("request_seconds", "from a request's arrival to its answer", ("path",), **one)
        for name, text in batcher.COUNTS.items():
            Gauge(name, text, **one).set_function(lambda name=name: getattr(batcher, name))

    def text(self) -> bytes:
        from prometheus_client import generate_latest

        return generate_latest(self.registry)


class Refusal(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def build_app(cfg: ServeConfig, backend: ScoredSearch, encoder: Encoder | None = None) -> Any:
    """The FastAPI application around an open backend; /health names the encoder."""
    from fastapi import FastAPI, Request, Response
    from starlette.exceptions import HTTPException

    batcher = MicroBatcher(backend, cfg.batch, cfg.gather_ms / 1000, cfg.max_waiting)
    facts, meters = describe_search(cfg.search, encoder) | {"passages": _size(backend)}, Meters(batcher)
    token = read_key(cfg.token_env, "token_env") if cfg.token_env else ""

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        async with batcher.running():
            yield

    app = FastAPI(title="HiExp search", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.router.redirect_slashes = False

    def respond(status: int, payload: Any) -> Any:
        headers = {"Retry-After": "1"} if status == 503 else None
        return Response(json.dumps(payload), status, headers, "application/json")

    async def post(request: Request) -> Response:
        began, path = perf_counter(), request.url.path
        try:
            _authorise(request, token)
            status, payload = 200, await _answer(path, await _body(request, cfg), cfg, batcher, meters)
        except Refusal as error:
            status, payload = error.status, {"error": redact(str(error))}
        except asyncio.CancelledError:  # by uvicorn, when the time to end has come
            status, payload = 503, {"error": "the server was stopped before this was answered; ask another one"}
        meters.requests.labels(path, str(status)).inc()
        meters.seconds.labels(path).observe(perf_counter() - began)
        return respond(status, payload)

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> Response:
        paths = f"POST {', '.join(PATHS)}, GET /health and /metrics"
        return respond(error.status_code, {"error": f"{error.detail} {request.url.path[:80]}; there are {paths}"})

    for path in PATHS:
        app.add_api_route(path, post, methods=["POST"], response_model=None)

    @app.get("/health")
    async def health() -> Any:
        return respond(200, {"status": "ok"} | facts)

    @app.get("/metrics", response_model=None)
    async def metrics(request: Request) -> Response:
        try:
            _authorise(request, token)
        except Refusal as error:
            return respond(error.status, {"error": str(error)})
        return Response(meters.text(), media_type="text/plain; version=0.0.4")

    return app


async def _answer(path: str, body: Any, cfg: ServeConfig, batcher: MicroBatcher, meters: Meters) -> Any:
    try:
        asked = read_request(path, body, cfg.limits)
    except RequestError as error:
        raise Refusal(422, str(error)) from None
    try:
        async with asyncio.timeout(cfg.timeout):
            results = await batcher.search(asked.queries, asked.top_k)
    except TimeoutError:
        raise Refusal(504, f"not answered within {cfg.timeout:g} s; try again later or send fewer queries") from None
    except Busy as error:
        raise Refusal(503, str(error)) from None
    except Exception as error:
        print(redact(f"search failed: {type(error).__name__}: {error}"), file=sys.stderr, flush=True)
        raise Refusal(500, f"the search failed: {type(error).__name__}: {error}") from None
    meters.queries.inc(len(asked.queries))
    return asked.render(results)


async def _body(request: Any, cfg: ServeConfig) -> Any:
    """The JSON of a request, within the limits of size and time."""
    from starlette.requests import ClientDisconnect

    parts, size, most = [], 0, cfg.max_megabytes << 20
    try:
        async with asyncio.timeout(cfg.timeout):
            async for part in request.stream():
                parts.append(part)
                size += len(part)
                if size > most:
                    raise Refusal(413, f"more than {cfg.max_megabytes} MB; send fewer queries at once")
    except TimeoutError:
        raise Refusal(408, f"the request did not come within {cfg.timeout:g} s") from None
    except ClientDisconnect:
        raise Refusal(400, "the client left before the request was whole") from None
    try:
        return json.loads(b"".join(parts))
    except (ValueError, RecursionError):
        raise Refusal(400, "the body is no JSON") from None


def _authorise(request: Any, token: str) -> None:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    is_right = hmac.compare_digest(given.strip().encode(), token.encode())
    if token and not (is_right and scheme.lower() == "bearer"):
        raise Refusal(401, "a bearer token is needed, and the right one")


def _size(backend: Any) -> int | None:
    searched: Any = backend.backend if isinstance(backend, Reranked) else backend
    return len(searched.passages) if hasattr(searched, "passages") else None


def serve(cfg: ServeConfig) -> int:
    """Open the index, listen, and answer until told to stop."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"serving needs {', '.join(missing)}: pip install -r requirements-search.txt")
    with listen(cfg) as listener:
        encoder = load_encoder(cfg.encoder) if cfg.search.backend in NEEDS_ENCODER else None
        backend = open_search(cfg.search, encoder)
        if not isinstance(backend, ScoredSearch) or cfg.search.backend == "none":
            raise ConfigError(f"search.backend={cfg.search.backend} finds nothing that could be served")
        run(cfg, backend, listener, encoder)
    return 0


def run(cfg: ServeConfig, backend: ScoredSearch, listener: socket.socket, encoder: Encoder | None = None) -> None:
    """Say where, and answer requests at `listener` until told to stop."""
    import uvicorn  # pyright: ignore[reportMissingImports]

    from hiexp.http_serving import Server

    settings = uvicorn.Config(
        build_app(cfg, backend, encoder),
        log_level="warning",
        access_log=False,
        limit_concurrency=cfg.max_connections,
        timeout_keep_alive=math.ceil(cfg.idle_seconds),
        timeout_graceful_shutdown=cfg.grace_seconds,
        server_header=False,
    )
    port, host = listener.getsockname()[1], f"[{cfg.host}]" if ":" in cfg.host else cfg.host
    if cfg.host not in LOCAL and not cfg.token_env:
        print("warning: anyone who reaches this machine can search; set token_env", file=sys.stderr, flush=True)

    def ready() -> None:
        print(f"serving {_size(backend) or 'unknown'} passages on http://{host}:{port}", flush=True)

    Server(settings, cfg.idle_seconds, ready).run_until_stopped(listener)


def listen(cfg: ServeConfig) -> socket.socket:
    """The listening socket, taken before the index is opened: a port in use is told at once."""
    family = socket.AF_INET6 if ":" in cfg.host else socket.AF_INET
    try:
        listener = socket.create_server((cfg.host, cfg.port), family=family, backlog=cfg.max_connections)
        # connections inherit it; asyncio sets it for other sockets alone, and without it each answer waits 40 ms
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        number = error.errno or 0  # below 0 where a name has no address: then strerror() knows nothing of it
        reason = os.strerror(number) if number > 0 else str(error.strerror or error).split(" (while")[0]
        raise ConfigError(f"host={cfg.host} port={cfg.port}: {reason}; choose another port, or 0 for any") from None


def main(argv: Sequence[str]) -> int:
    """`python -m hiexp.search serve`; see the top of this file."""
    return run_script(serve, ServeConfig, argv, __doc__)
