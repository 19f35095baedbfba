"""The settings of a run, and the parts that the three scripts put together from them.

One YAML file describes one experiment; `train.py`, `build_hek.py` and `evaluate.py` all read it, each the sections it
needs. Cheap checks come first, so that a wrong path is reported before a model is loaded.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hiexp.config import ConfigError, lookup
from hiexp.data import Sample, golds_in_questions, read_samples, shared_questions
from hiexp.encoder import Encoder, EncoderConfig, load_encoder
from hiexp.engine import Engine, TorchEngine
from hiexp.evaluation import EvalConfig
from hiexp.hek import HEK, HEKConfig
from hiexp.hek_build import BuildConfig
from hiexp.loss import LossConfig
from hiexp.model import ModelConfig, frozen_copy, load_causal_lm, load_tokenizer
from hiexp.protocols import PROTOCOLS, AgentProtocol
from hiexp.rewards import RewardConfig
from hiexp.rollout import RolloutConfig, run_rollouts
from hiexp.search import SearchBackend, SearchConfig, open_search
from hiexp.tracking import progress
from hiexp.trainer import OptimConfig
from hiexp.trajectory import Trajectory

ROLLOUTS_AT_ONCE = 96


@dataclass(frozen=True)
class DataConfig:
    train: str = ""
    """file of training questions, {id, question, answers, family?} as JSON lines; train.py and build_hek.py"""
    dev: str = ""
    """file of questions for validation while training (train.dev_every)"""
    test: str = ""
    """file of questions that evaluate.py asks"""
    limit: int = 0
    """use only the first so many questions of each file; 0 = all"""

    def __post_init__(self) -> None:
        if self.limit < 0:
            raise ConfigError(f"limit={self.limit} must be 0 (all) or above")


@dataclass(frozen=True)
class TrainConfig:
    steps: int = 1000
    """rollout-and-learn cycles"""
    prompts_per_step: int = 16
    """questions per step; each is answered rollout.group_size times"""
    dev_every: int = 0
    """validate (greedy) on data.dev every so many steps and at the end; 0 = never"""
    show_every: int = 10
    """write the trajectories of every so many steps to trajectories.jsonl; 0 = never"""
    save_every: int = 100
    """write the policy every so many steps, besides at the end; 0 = at the end only"""

    def __post_init__(self) -> None:
        for name in ("steps", "prompts_per_step"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("dev_every", "show_every", "save_every"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be 0 (never) or above")


@dataclass(frozen=True)
class Config:
    out: str
    """folder that the run writes to; never one that holds another run"""
    model: ModelConfig
    seed: int = 0
    """every random choice derives from it"""
    threads: int = 0
    """CPU threads of torch; 0 leaves its default; results repeat exactly only for the same number"""
    data: DataConfig = field(default_factory=DataConfig)
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    search: SearchConfig = field(default_factory=SearchConfig)
    hek: HEKConfig = field(default_factory=HEKConfig)
    build: BuildConfig = field(default_factory=BuildConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)

    def __post_init__(self) -> None:
        for name in ("seed", "threads"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} must not be negative")
        protocol = lookup(PROTOCOLS, self.rollout.protocol, "rollout.protocol")
        if protocol.searches and self.search.backend == "none":
            raise ConfigError(
                f"rollout.protocol={self.rollout.protocol} searches, but search.backend is none; set bm25 or dense, or "
                "a protocol that never searches"
            )


@dataclass
class Agent:
    """Everything that turns questions into trajectories; the model itself comes last (`start`)."""

    cfg: RolloutConfig
    tokenizer: Any
    protocol: AgentProtocol
    search: SearchBackend
    encoder: Encoder | None
    hek: HEK
    engine: Engine | None = None

    def start(self, model: torch.nn.Module) -> Engine:
        """Give the agent an engine that samples from `model`, which the engine keeps as its own."""
        self.engine = TorchEngine(model, self.tokenizer)
        return self.engine

    def rollout(
        self,
        samples: Sequence[Sample],
        seed: int,
        hek: HEK | None = None,
        progress: Callable[[int], Any] | None = None,
        **changes: Any,
    ) -> list[Trajectory]:
        """group_size trajectories a sample, siblings adjacent; `changes` replace fields of RolloutConfig."""
        assert self.engine is not None
        parts = (self.engine, self.tokenizer, self.protocol, self.search, self.hek if hek is None else hek)
        return run_rollouts(*parts, samples, replace(self.cfg, **changes), seed, progress)

    def rollout_all(
        self, samples: Sequence[Sample], seed: int, label: str, hek: HEK, **changes: Any
    ) -> list[Trajectory]:
        """The same for any number of samples: a part at a time, which bounds memory, with a progress bar."""
        size = changes.get("group_size", self.cfg.group_size)
        at_once, trajectories = max(1, ROLLOUTS_AT_ONCE // size), []
        with progress(total=len(samples) * size, label=label, unit="rollout") as bar:
            for start in range(0, len(samples), at_once):
                part = samples[start : start + at_once]
                trajectories += self.rollout(part, seed * 1_000_003 + start, hek, bar.update, **changes)
        return trajectories


def open_agent(cfg: Config) -> Agent:
    """Protocol, tokenizer, encoder, HEK and search, in order of cost. Raises ConfigError naming what is wrong."""
    if cfg.threads:
        torch.set_num_threads(cfg.threads)
    protocol = PROTOCOLS[cfg.rollout.protocol]
    tokenizer = load_tokenizer(cfg.model.path)
    protocol.prompt("?", "?", tokenizer)  # a chat template that does not fit is told now
    needs_encoder = bool(cfg.hek.path or cfg.search.backend == "dense")
    encoder = load_encoder(cfg.encoder) if needs_encoder else None
    hek = HEK.load(cfg.hek.path, encoder, cfg.hek) if cfg.hek.path and encoder else HEK.empty()
    if cfg.hek.path and (level := cfg.rollout.strategy_level) and not hek.levels[level]:
        raise ConfigError(f"HEK {cfg.hek.path} has no entry of rollout.strategy_level={level}; set 0 or another level")
    return Agent(cfg.rollout, tokenizer, protocol, open_search(cfg.search, encoder), encoder, hek)


def open_samples(cfg: DataConfig, split: str) -> list[Sample]:
    """The questions of data.<split>; ConfigError when it is not set, missing or empty.

    Warns of questions that are among the training questions too, and of questions that hold their own answer.
    """
    path = getattr(cfg, split)
    if not path:
        raise ConfigError(f"data.{split} is not set; name the file of its questions")
    samples = read_samples(path, cfg.limit)
    if split != "train" and cfg.train and (shared := shared_questions(samples, read_samples(cfg.train))):
        warnings.warn(f"{len(shared)} questions of data.{split} are in data.train too, first {shared[0]}", stacklevel=2)
    if leaked := golds_in_questions(samples):
        share = f"{len(leaked)} of {len(samples)} questions of data.{split}"
        warnings.warn(f"{share} hold their answer (choices between two do), first {leaked[0]}", stacklevel=2)
    return samples


def load_models(cfg: Config, with_reference: bool) -> tuple[Any, Any, Any]:
    """(policy, its copy for the engine, frozen reference or None)."""
    policy = load_causal_lm(cfg.model)
    return policy, frozen_copy(policy), frozen_copy(policy) if with_reference else None
