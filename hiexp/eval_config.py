"""Settings of an evaluation: which questions, which methods, how attempts are drawn, what they cost."""

import math
from dataclasses import dataclass, field
from typing import Literal

from hiexp.api_client import WriterConfig
from hiexp.baselines import PipelineConfig
from hiexp.config import ConfigError, lookup
from hiexp.metrics import METRICS


@dataclass(frozen=True)
class Decoding:
    """How attempts are drawn: temperature 0 is greedy, as in engine.Sampling."""

    name: str
    temperature: float
    top_p: float
    samples: int
    """attempts at each question"""


@dataclass(frozen=True)
class EvalConfig:
    """How a model is evaluated."""

    benchmarks: dict[str, str] = field(default_factory=dict)
    """benchmark (python -m hiexp.benchmarks list) to file, each in any published layout; empty = data.test"""
    aliases: dict[str, str] = field(default_factory=dict)
    """benchmark to a file of aliases (2wiki: id_aliases.json) that count as gold answers too; empty = single golds"""
    methods: tuple[str, ...] = ("agent",)
    """ways to answer (methods.py), each without experience and, where hek.path is set, with it; agent is rollout.*"""
    own_limits: bool = True
    """a published agent keeps the limits it was published with; false: rollout.* for all methods alike"""
    prompt_files: dict[str, str] = field(default_factory=dict)
    """method to the file of its original instruction, as rollout.prompt_file is for the method agent (docs/peers.md)"""
    label: str = ""
    """row of the tables; empty = the method's own"""
    label_hek: str = ""
    """row of the tables for the attempts with experience; empty = label and " + HiExp" """
    model_name: str = ""
    """how tables name the model; empty = the last part of model.path, or the endpoint's model"""
    subset: bool = True
    """the paper's 1,000 questions of HotpotQA, 2WikiMultiHopQA and MuSiQue; false = all of a file"""
    on_bad_row: Literal["error", "skip"] = "error"
    """a row of a data file that cannot be read ends the run, or is left out and counted"""
    greedy: bool = True
    """one attempt at each question with the likeliest tokens"""
    samples_per_question: int = 0
    """besides, so many attempts drawn with the two settings below; 0 = as many as a benchmark is reported with
    (Avg@32 of AIME and AMC), none for others"""
    temperature: float = 1.0
    """of the sampled attempts"""
    top_p: float = 0.95
    """of the sampled attempts"""
    metrics: tuple[str, ...] = ("em", "f1", "cem", "cem_bound", "cem_tokens")
    """names from metrics.py; a benchmark of problems has math instead"""
    judged: bool = False
    """have the answers graded by the judges of judge.* too (lasj)"""
    seed: int = 0
    """of the samples, and of the draws behind the intervals"""
    endpoint: WriterConfig = field(default_factory=WriterConfig)
    """a model behind an OpenAI-compatible endpoint answers instead of model.path, which then only counts tokens"""
    price_in: float = 0.0
    """of a million tokens that a model reads, in any currency; for the cost of an arm"""
    price_out: float = 0.0
    """of a million tokens that a model writes"""
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)

    def __post_init__(self) -> None:
        for name in self.metrics:
            lookup(METRICS, name, "metric")
        for name in ("metrics", "methods"):
            if not getattr(self, name):
                raise ConfigError(f"{name} is empty; name at least one, or leave it out")
        if self.samples_per_question < 0 or not (self.greedy or self.samples_per_question or self.benchmarks):
            raise ConfigError(
                f"greedy={self.greedy} with samples_per_question={self.samples_per_question} evaluates nothing; set "
                "greedy=true or samples_per_question to at least 1"
            )
        if not (self.temperature > 0 and 0 < self.top_p <= 1):
            raise ConfigError(
                f"need temperature > 0 and 0 < top_p <= 1, got {self.temperature} and {self.top_p}; "
                "for the likeliest token set greedy=true"
            )
        for name in ("price_in", "price_out"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name}={getattr(self, name)} must be a number that is not negative")
        if self.seed < 0:
            raise ConfigError(f"seed={self.seed} must not be negative")
        if self.endpoint.model and not self.endpoint.url:
            raise ConfigError("endpoint.model is set without endpoint.url; a local model is named by model.path")

    def decodings(self, samples: int = 1) -> list[Decoding]:
        """Greedy first, then sampled, as far as they are asked for; `samples`: a benchmark's own number of attempts."""
        number = self.samples_per_question or (samples if samples > 1 else 0)
        greedy = [Decoding("greedy", 0.0, 1.0, 1)] if self.greedy else []
        sampled = Decoding("sampled", self.temperature, self.top_p, number)
        return [*greedy, *([sampled] if number else [])]

    def cost(self, prompt_tokens: int, reply_tokens: int) -> float | None:
        """None without prices."""
        if not (self.price_in or self.price_out):
            return None
        return (self.price_in * prompt_tokens + self.price_out * reply_tokens) / 1e6
