"""Settings of searches that go over the network: servers of a local index, and the live web."""

import re
from dataclasses import dataclass
from datetime import date
from typing import Literal
from urllib.parse import urlsplit

from hiexp.config import ConfigError
from hiexp.redact import redact

DialectName = Literal["search_r1", "skyrl", "zerosearch", "flashrag", "flashrag_batch", "r1_searcher"]


@dataclass(frozen=True)
class HttpConfig:
    """Where search.backend=http asks, and how patiently."""

    urls: tuple[str, ...] = ()
    """addresses of servers of one and the same index, e.g. http://host:8000; one that fails gives way to another"""
    dialect: DialectName = "search_r1"
    """how they are asked; see docs/search_serving.md. An address with a path of its own keeps it"""
    timeout: float = 30.0
    """seconds that one request may take, from connecting to the last byte"""
    max_retries: int = 5
    """attempts at one request after the first has failed, before the run stops"""
    queries_per_request: int = 64
    """queries sent together, where the dialect can"""
    connections: int = 8
    """requests under way at once"""
    token_env: str = ""
    """environment variable that holds the servers' bearer token; empty = they need none"""
    breaker_failures: int = 3
    """failures in a row after which a server is left alone for a while"""
    breaker_seconds: float = 10.0
    """how long it is left alone before one request tries it again"""

    def __post_init__(self) -> None:
        least = {"max_retries": 0, "queries_per_request": 1, "connections": 1, "breaker_failures": 1}
        _check_least(self, least)
        _check_seconds(self, "timeout", "breaker_seconds")
        for url in self.urls:
            _check_url("urls", url)
        if self.token_env:
            check_variable("token_env", self.token_env)


@dataclass(frozen=True)
class TavilyConfig:
    """How search.backend=tavily asks the live web, what it may cost and what is kept."""

    api_key_env: str = "TAVILY_API_KEY"
    """environment variable that holds the key"""
    url: str = "https://api.tavily.com"
    """base address of the service"""
    depth: Literal["basic", "advanced"] = "basic"
    """basic costs 1 credit a query, advanced 2"""
    topic: Literal["general", "news", "finance"] = "general"
    """kind of sources"""
    include_domains: tuple[str, ...] = ()
    """search these sites only; empty = all"""
    exclude_domains: tuple[str, ...] = ()
    """never these sites, e.g. those that publish the questions"""
    cache: str = ""
    """folder of answers by query and date; empty = every query is asked (and paid) anew"""
    ttl_days: float = 30.0
    """an answer in the cache counts for so long"""
    replay: bool = False
    """answer from the cache alone, at any age: nothing is asked, and a query that is not there ends the run"""
    as_of: str = ""
    """replay: the newest answer up to this day (YYYY-MM-DD); empty = the newest"""
    max_credits: int = 0
    """credits that this start of the run may use, before it stops; 0 = no cap"""
    concurrency: int = 8
    """queries under way at once"""
    timeout: float = 30.0
    """seconds that one request may take"""
    max_retries: int = 5
    """attempts at one query after the first has failed, before the run stops"""

    def __post_init__(self) -> None:
        _check_least(self, {"max_credits": 0, "concurrency": 1, "max_retries": 0})
        _check_seconds(self, "timeout", "ttl_days")
        _check_url("url", self.url)
        check_variable("api_key_env", self.api_key_env)
        if self.replay and not self.cache:
            raise ConfigError("replay=true needs cache, the folder of the recorded answers")
        if self.as_of:
            if not self.replay:
                raise ConfigError(f"as_of={self.as_of} is for replay=true; set both, or neither")
            try:
                date.fromisoformat(self.as_of)
            except ValueError:
                raise ConfigError(f"as_of={self.as_of!r} is no day such as 2026-01-31") from None


def _check_least(cfg: HttpConfig | TavilyConfig, least: dict[str, int]) -> None:
    for name, bound in least.items():
        if getattr(cfg, name) < bound:
            raise ConfigError(f"{name}={getattr(cfg, name)} must be at least {bound}")


def _check_seconds(cfg: HttpConfig | TavilyConfig, *names: str) -> None:
    for name in names:
        if not 0 < getattr(cfg, name) < float("inf"):
            raise ConfigError(f"{name}={getattr(cfg, name)} must be a number above 0")


def _check_url(name: str, url: str) -> None:
    try:
        parts = urlsplit(url)
        is_plain = parts.scheme in ("http", "https") and parts.hostname and not (parts.query or parts.fragment)
        is_plain = is_plain and (parts.port is None or parts.port > 0)
    except ValueError:
        parts, is_plain = None, False
    if parts and (parts.username or parts.password):
        raise ConfigError(f"{name} holds a user or password; put the secret into an environment variable")
    if not is_plain:
        raise ConfigError(f"{name}: {redact(url)!r} is no address such as http://host:8000")


def check_variable(name: str, variable: str) -> None:
    """ConfigError unless it is a name by which redaction knows its value for a secret."""
    if not re.fullmatch(r"[A-Za-z_]\w*(?:_KEY|_TOKEN|_SECRET|_PASSWORD)", variable):
        # the value is not shown: it may be the secret itself
        endings = "_KEY, _TOKEN, _SECRET or _PASSWORD"
        raise ConfigError(f"{name} must be the NAME of an environment variable that ends in {endings}")
