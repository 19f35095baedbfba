"""The settings of a run, and the parts that the three scripts put together from them.

One YAML file describes one experiment; `train.py`, `build_hek.py` and `evaluate.py` all read it, each the sections it
needs. Cheap checks come first, so that a wrong path is reported before a model is loaded.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hiexp.checkpoint import CheckpointConfig
from hiexp.config import ConfigError, lookup
from hiexp.data import Sample, golds_in_questions, read_samples, shared_questions
from hiexp.demonstrations import SFTConfig
from hiexp.distributed import Context
from hiexp.dosage import DosageConfig
from hiexp.effects import UpliftConfig
from hiexp.encoder import Encoder, EncoderConfig, load_encoder
from hiexp.engine import Engine, EngineConfig
from hiexp.eval_config import EvalConfig
from hiexp.fsdp import ShardConfig, load_sharded
from hiexp.hek import HEK, HEKConfig
from hiexp.hek_build import BuildConfig
from hiexp.hek_update import RefreshConfig
from hiexp.judge import JudgeConfig, Judges
from hiexp.lora import LoraConfig
from hiexp.loss import LossConfig
from hiexp.model import DTYPES, ModelConfig, full_parameters, load_causal_lm, load_tokenizer
from hiexp.protocols import PROTOCOLS, AgentProtocol, open_protocol
from hiexp.rewards import JUDGE, Judge, RewardConfig
from hiexp.rollout import RolloutConfig, run_rollouts
from hiexp.run_log import LogConfig
from hiexp.sampling import Sampling
from hiexp.search import NEEDS_ENCODER, open_search
from hiexp.search_cache import remembering
from hiexp.search_types import SearchBackend, SearchConfig
from hiexp.tracking import progress
from hiexp.trainer import OptimConfig
from hiexp.trajectory import Trajectory
from hiexp.vllm_engine import open_engine
from hiexp.watch import WatchConfig

ROLLOUTS_AT_ONCE = 96
Keep = Callable[[Sequence[Sample], int, Callable[[], list[Trajectory]]], list[Trajectory]]
"""(questions of a part, its seed, what samples its trajectories) -> its trajectories"""
ALONE = Context()
ROW_MASKS = ("eager", "sdpa")
"""attentions that the torch engine can use; it samples with sdpa where the trainer packs"""


@dataclass(frozen=True)
class DataConfig:
    train: str = ""
    """file of training questions, {id, question, answers, family?} as JSON lines; train.py and build_hek.py"""
    dev: str = ""
    """file of questions for validation while training (train.dev_every)"""
    test: str = ""
    """file of questions that evaluate.py asks, where eval.benchmarks names none"""
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
    refill: int = 0
    """draw again, at most so many times a step, for groups whose rewards are all equal (DAPO's dynamic sampling)"""
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
        for name in ("refill", "dev_every", "show_every", "save_every"):
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
    resume_changed: bool = False
    """go on with an interrupted run although settings or HEK differ from what it began with"""
    data: DataConfig = field(default_factory=DataConfig)
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    search: SearchConfig = field(default_factory=SearchConfig)
    hek: HEKConfig = field(default_factory=HEKConfig)
    build: BuildConfig = field(default_factory=BuildConfig)
    dosage: DosageConfig = field(default_factory=DosageConfig)
    refresh: RefreshConfig = field(default_factory=RefreshConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    shard: ShardConfig = field(default_factory=ShardConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    sft: SFTConfig = field(default_factory=SFTConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    watch: WatchConfig = field(default_factory=WatchConfig)
    log: LogConfig = field(default_factory=LogConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    uplift: UpliftConfig = field(default_factory=UpliftConfig)

    def __post_init__(self) -> None:
        for name in ("seed", "threads"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} must not be negative")
        if self.seed >= 2**40:
            raise ConfigError(f"seed={self.seed} must be below 2**40")
        if self.reward.overlong_tokens > self.rollout.max_response_tokens:
            limit = f"rollout.max_response_tokens={self.rollout.max_response_tokens}"
            raise ConfigError(f"reward.overlong_tokens={self.reward.overlong_tokens} is above {limit}; lower it")
        protocol = lookup(PROTOCOLS, self.rollout.protocol, "rollout.protocol")
        if protocol.searches and self.search.backend == "none" and "agent" in self.eval.methods:
            raise ConfigError(
                f"rollout.protocol={self.rollout.protocol} searches, but search.backend is none; set bm25 or dense, or "
                "a protocol that never searches"
            )


@dataclass
class Agent:
    """Everything that turns questions into trajectories; the model itself comes last (`start_engine`)."""

    cfg: RolloutConfig
    tokenizer: Any
    protocol: AgentProtocol
    search: SearchBackend
    encoder: Encoder | None
    hek: HEK
    engine: Engine | None = None
    judge: Judge | None = None
    """grades answers for rewards.score (reward.metric=judge)"""

    def rollout(
        self,
        samples: Sequence[Sample],
        seed: int,
        hek: HEK | None = None,
        progress: Callable[[int], Any] | None = None,
        first: int = 0,
        hinted: Sequence[bool] | None = None,
        metrics: dict[str, float] | None = None,
        positions: Sequence[int] | None = None,
        done: Callable[[Trajectory], None] | None = None,
        **changes: Any,
    ) -> list[Trajectory]:
        """group_size trajectories a sample, siblings adjacent; `changes` replace fields of RolloutConfig.

        `first`: position of samples[0] among the questions of all ranks, or `positions` of each; `hinted`: per sample,
        whether it gets experience; `metrics` gets the seconds of searching; `done` each trajectory as it ends.
        """
        assert self.engine is not None
        parts = (self.engine, self.tokenizer, self.protocol, self.search, self.hek if hek is None else hek)
        cfg = replace(self.cfg, **changes)
        more = {"first": first, "positions": positions, "done": done, "hinted": hinted, "metrics": metrics}
        return run_rollouts(*parts, samples, cfg, seed, progress, **more)

    def rollout_all(
        self, samples: Sequence[Sample], seed: int, label: str, hek: HEK, keep: Keep | None = None, **changes: Any
    ) -> list[Trajectory]:
        """The same for any number of samples: a part at a time, which bounds memory, with a progress bar.

        `keep` may have a part's trajectories from before, and else runs it.
        """
        size = changes.get("group_size", self.cfg.group_size)
        at_once, trajectories = max(1, ROLLOUTS_AT_ONCE // size), []
        with progress(total=len(samples) * size, label=label, unit="rollout") as bar:
            for start in range(0, len(samples), at_once):
                part = samples[start : start + at_once]
                part_seed = seed * 1_000_003 + start
                run = partial(self.rollout, part, part_seed, hek, bar.update, **changes)
                trajectories += keep(part, part_seed, run) if keep else run()
                bar.update(len(trajectories) - bar.n)
        return trajectories


def open_agent(cfg: Config) -> Agent:
    """Protocol, tokenizer, encoder, HEK and search, in order of cost. Raises ConfigError naming what is wrong."""
    if cfg.threads:
        torch.set_num_threads(cfg.threads)
    protocol = open_protocol(cfg.rollout)
    tokenizer = load_tokenizer(cfg.model.path)
    protocol.prompt("?", "?", tokenizer)  # a chat template that does not fit is told now
    needs_encoder = bool(cfg.hek.path or cfg.refresh.every or cfg.search.backend in NEEDS_ENCODER)
    encoder = load_encoder(cfg.encoder) if needs_encoder else None
    hek = HEK((), encoder, cfg.hek) if cfg.refresh.every else HEK.empty()
    if cfg.hek.path and encoder:
        hek = HEK.load(cfg.hek.path, encoder, cfg.hek)
    if cfg.hek.path and (level := cfg.rollout.strategy_level) and not hek.levels[level]:
        raise ConfigError(f"HEK {cfg.hek.path} has no entry of rollout.strategy_level={level}; set 0 or another level")
    if cfg.hek.min_uplift is not None and not cfg.refresh.every and not any(one.on_count for one in hek.asked):
        measured = f"nothing in HEK {cfg.hek.path!r} says how questions fare with it"
        raise ConfigError(
            f"hek.min_uplift={cfg.hek.min_uplift}, but {measured}; measure it with python -m hiexp.uplift"
        )
    search = remembering(open_search(cfg.search, encoder), cfg.search)
    return Agent(cfg.rollout, tokenizer, protocol, search, encoder, hek)


def reward_judge(cfg: Config, ctx: Context = ALONE) -> Judge | None:
    """What grades answers for rewards.score, with reward.metric=judge: rank 0 asks, all ranks call it together.

    ConfigError for a judge that is not named or has no key. What it says is kept in judge.cache, or <out>/verdicts.
    """
    if cfg.reward.metric != JUDGE:
        return None
    judges = ctx.on_main(lambda: Judges(cfg.judge, cfg.judge.cache or Path(cfg.out) / "verdicts"), "judge")
    return lambda items: ctx.on_main(lambda: judges.reward(items), "judge")


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


def load_models(cfg: Config, with_reference: bool, ctx: Context = ALONE) -> tuple[Any, Any, Any]:
    """(policy, what the torch engine is to keep as its own, frozen reference or None); policy and reference sharded."""
    policy = load_sharded(cfg.model, cfg.shard, ctx, cfg.lora, cfg.seed)
    reference = load_sharded(cfg.model, cfg.shard, ctx).requires_grad_(False) if with_reference else None
    return policy, engine_model(cfg, ctx) if cfg.engine.kind == "torch" else None, reference


def engine_model(cfg: Config, ctx: Context = ALONE) -> Any:
    """A whole model for the torch engine, in the dtype that the trainer's layers compute in."""
    attention = cfg.model.attention if cfg.model.attention in ROW_MASKS else "sdpa"
    model = load_causal_lm(replace(cfg.model, attention=attention))
    return model.to(ctx.device, DTYPES[cfg.shard.param_dtype]).requires_grad_(False)  # type: ignore[arg-type]


def engine_only(cfg: Config, ctx: Context = ALONE) -> tuple[Any, Any]:
    """(model whose weights a vLLM engine takes, model that the torch engine keeps): for scripts that train nothing."""
    model = engine_model(cfg, ctx)
    return model, model


def start_engine(agent: Agent, cfg: Config, policy: Any, model: Any, version: int = 0) -> Engine:
    """Give the agent an engine that samples from the policy as it is now; the engine keeps `model` as its own."""
    sampling = Sampling(cfg.rollout.temperature, cfg.rollout.top_p)
    weights, dtype = full_parameters(policy), cfg.shard.param_dtype
    parts = (cfg.engine, cfg.model.path, model, agent.tokenizer, weights, sampling, dtype, version)
    agent.engine = open_engine(*parts)
    return agent.engine
