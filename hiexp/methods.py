"""Every way to answer a question that evaluate.py can measure, by one name: a row of a table.

An agent speaks a protocol and decides itself when to search (rollout.py); a pipeline is a fixed course of searches and
requests (pipelines.py). `NAME+hiexp` is the same with experience. A published agent has the limits under which it was
published; `eval.own_limits=false` puts rollout.* in their place, the same for all.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hiexp.config import ConfigError, lookup
from hiexp.protocols import PROTOCOLS
from hiexp.rollout import RolloutConfig

SUFFIX = "+hiexp"


@dataclass(frozen=True)
class Method:
    """A protocol, a pipeline, or both: then an endpoint plays the pipeline and a local model the protocol."""

    title: str
    """its row in a table, where eval.label is not set"""
    protocol: str = ""
    """name in PROTOCOLS; "=" is the configured rollout.protocol"""
    pipeline: str = ""
    """name in baselines.PIPELINES"""
    limits: Mapping[str, Any] = field(default_factory=dict)
    """fields of RolloutConfig under which it was published, where its protocol does not state them (`defaults`)"""

    def rollout(self, cfg: RolloutConfig, own_limits: bool, prompt_file: str = "") -> RolloutConfig:
        """The settings that its attempts are made with."""
        if self.protocol == "=":
            return replace(cfg, prompt_file=prompt_file or cfg.prompt_file)
        cfg = replace(cfg, protocol=self.protocol or cfg.protocol, prompt_file=prompt_file)
        if not own_limits:
            return cfg
        return replace(cfg, **(dict(PROTOCOLS[self.protocol].defaults if self.protocol else {}) | dict(self.limits)))


def find(name: str) -> tuple[str, Method, bool]:
    """(name without suffix, method, whether the name asks for experience); ConfigError listing the known names."""
    plain = name.removesuffix(SUFFIX)
    return plain, lookup(METHODS, plain, "method (eval.methods)"), plain != name


def check(method: Method, name: str, is_endpoint: bool, has_search: bool, cfg: RolloutConfig) -> None:
    """ConfigError for a method that cannot run so."""
    if is_endpoint and not method.pipeline:
        plays = ", ".join(sorted(key for key, value in METHODS.items() if value.pipeline))
        raise ConfigError(
            f"method {name} speaks its protocol in tokens, which eval.endpoint.url cannot; serve the model from a "
            f"folder (model.path), or choose among {plays}"
        )
    protocol = cfg.protocol if method.protocol == "=" else method.protocol
    if not has_search and (PROTOCOLS[protocol].searches if protocol else method.pipeline != "direct"):
        raise ConfigError(f"method {name} searches, but search.backend is none; set bm25, dense, hybrid or another")


_SEARCH_O1 = {"max_searches": 10, "max_turns": 15}
"""run_search_o1.py for multi-hop questions; there a query brings 10 web pages, here rollout.top_k passages"""

METHODS: dict[str, Method] = {
    "agent": Method("Agent", protocol="="),
    "direct": Method("Direct", protocol="direct", pipeline="direct"),
    "vanilla_rag": Method("Vanilla RAG", pipeline="vanilla_rag"),
    "iter_retgen": Method("Iter-RetGen", pipeline="iter_retgen"),
    "ircot": Method("IRCoT", pipeline="ircot"),
    "search_o1": Method(
        "Search-o1",
        protocol="search_o1",
        pipeline="search_o1",
        limits=_SEARCH_O1,
    ),
    "search_o1_condensed": Method(
        "Search-o1 (condensed)",  # the paper's Search-o1 row equals its ablation without condensation
        pipeline="search_o1_condensed",
        limits=_SEARCH_O1,
    ),
    "search_r1_v0.1": Method("Search-R1-v0.1", protocol="search_r1_original"),
    "search_r1_v0.2": Method("Search-R1-v0.2", protocol="search_r1_original"),
    "search_r1_v0.3": Method("Search-R1-v0.3", protocol="search_r1_original"),
    "research": Method("ReSearch", protocol="research"),
    "research_base": Method("ReSearch", protocol="research_base"),
    "r1_searcher": Method("R1-Searcher", protocol="r1_searcher"),
    "r1_searcher_chat": Method("R1-Searcher", protocol="r1_searcher_chat"),
    "stepsearch": Method("StepSearch", protocol="stepsearch"),
    "deepresearcher": Method("DeepResearcher", protocol="deepresearcher"),
    "math": Method("Math", protocol="direct"),
}
