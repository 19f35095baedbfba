"""The arms of an evaluation: which there are, and their attempts, kept as they end so that a crash loses none.

An arm is a benchmark, a method, with or without experience, and a decoding. Each finished attempt is scored in another
thread and goes to `<out>/parts/<arm>.<rank>.jsonl`; the same command then asks only what is missing, with the seeds it
would have had. Under torchrun every rank takes a share of the questions.
"""

import json
import threading
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hiexp import math_check
from hiexp.assemble import Agent, Config, open_samples
from hiexp.benchmarks import QA, open_benchmark
from hiexp.config import ConfigError
from hiexp.data import Sample
from hiexp.distributed import Context
from hiexp.eval_config import Decoding
from hiexp.evaluation import describe_setting, file_name, score_answer
from hiexp.hek import HEK, HEKConfig
from hiexp.journal import Journal, digest
from hiexp.methods import Method, check, find
from hiexp.pipelines import run_pipelines
from hiexp.protocols import open_protocol
from hiexp.records import Attempt, Outcome, attempt_of, outcome_of
from hiexp.resume import file_hash, folder_hash
from hiexp.rollout import RolloutConfig
from hiexp.search import describe_search
from hiexp.tracking import progress, write_json
from hiexp.trajectory import Trajectory

AT_ONCE, STREAMED_AT_ONCE = 96, 4096
"""Attempts under way together: an engine that finishes a batch as a whole, and one that streams."""

SCORERS = 4
"""Threads that wait for a problem's answer to be checked, as a hard one may take seconds."""
STATED = ("protocol", "prompt_file", "prompt_date", "group_size", "temperature", "top_p")
"""Fields of RolloutConfig that a setting names elsewhere: as protocol, template or decoding."""


@dataclass(frozen=True)
class Bench:
    """Questions to ask, and how their answers are scored."""

    name: str
    """empty for data.test"""
    samples: list[Sample]
    metrics: tuple[str, ...]
    decodings: list[Decoding]
    sha256: str = ""
    """of the file"""


@dataclass(frozen=True)
class Arm:
    bench: Bench
    method_name: str
    method: Method
    hek: bool
    decoding: Decoding

    @property
    def name(self) -> str:
        """hek_off_greedy, or with the benchmark and the method before it where they are named."""
        method = "" if self.method_name == "agent" else self.method_name
        arm = f"hek_{'on' if self.hek else 'off'}_{self.decoding.name}"
        return ".".join(part for part in (self.bench.name, method, arm) if part)

    def about(self, cfg: Config) -> dict[str, Any]:
        """What the tables need to know of it."""
        label = cfg.eval.label or self.method.title
        model = cfg.eval.model_name or cfg.eval.endpoint.model or Path(cfg.model.path).name
        return {
            "benchmark": self.bench.name,
            "method": self.method_name,
            "hek": self.hek,
            "decoding": self.decoding.name,
            "label": (cfg.eval.label_hek or f"{label} + HiExp") if self.hek else label,
            "model": model,
        }


def open_benches(cfg: Config) -> list[Bench]:
    """The questions of eval.benchmarks, or else of data.test; ConfigError before anything else is opened."""
    if not cfg.eval.benchmarks:
        samples = open_samples(cfg.data, "test")
        return [Bench("", samples, cfg.eval.metrics, cfg.eval.decodings(), file_hash(cfg.data.test))]
    if unknown := sorted(set(cfg.eval.aliases) - set(cfg.eval.benchmarks)):
        raise ConfigError(f"eval.aliases has {unknown[0]}, which is not among eval.benchmarks")
    benches = []
    for name, path in cfg.eval.benchmarks.items():
        told = {"subset": cfg.eval.subset, "on_bad_row": cfg.eval.on_bad_row}
        loaded = open_benchmark(name, path, aliases=cfg.eval.aliases.get(name, ""), **told)
        samples = loaded.samples[: cfg.data.limit] if cfg.data.limit else loaded.samples
        own = loaded.benchmark.metrics
        more = (name for name in own if name not in QA)
        metrics = tuple(dict.fromkeys((*cfg.eval.metrics, *more))) if loaded.benchmark.task == "qa" else own
        decodings = cfg.eval.decodings(loaded.benchmark.samples)
        if not decodings:
            raise ConfigError(f"eval.greedy=false and no eval.samples_per_question: nothing to do for {name}")
        benches.append(Bench(name, samples, metrics, decodings, loaded.sha256))
    return benches


def plan(cfg: Config, benches: Sequence[Bench]) -> list[Arm]:
    """Every arm, without experience first and then with it; ConfigError for a method that cannot run so."""
    methods: dict[str, Method] = {}
    for name in cfg.eval.methods:
        plain, method, wants_hek = find(name)
        check(method, name, bool(cfg.eval.endpoint.url), cfg.search.backend != "none", cfg.rollout)
        if wants_hek and not cfg.hek.path:
            raise ConfigError(f"eval.methods has {name}, but hek.path is not set; name a HEK (build_hek.py writes one)")
        methods[plain] = method
        if plays_protocol(method, cfg):
            file = cfg.eval.prompt_files.get(plain, "")
            if open_protocol(method.rollout(cfg.rollout, cfg.eval.own_limits, file)).needs_original_prompt:
                warnings.warn(
                    f"method {name} runs with an instruction in our own words; a checkpoint that was trained with "
                    f"another scores lower than it can: put the original into a file, eval.prompt_files.{plain}=FILE",
                    stacklevel=2,
                )
    if unknown := sorted(set(cfg.eval.prompt_files) - set(methods)):
        raise ConfigError(f"eval.prompt_files has {unknown[0]}, which is not among eval.methods: {', '.join(methods)}")
    if any("math" in bench.metrics for bench in benches):
        math_check.require()
    stores = [False, True] if cfg.hek.path else [False]
    return [
        Arm(bench, name, method, hek, decoding)
        for bench in benches
        for name, method in methods.items()
        for hek in stores
        for decoding in bench.decodings
    ]


def check_prompts(arms: Sequence[Arm], cfg: Config, tokenizer: Any) -> None:
    """ConfigError for a protocol whose prompt the tokenizer's chat template cannot carry."""
    for arm in arms:
        if plays_protocol(arm.method, cfg):
            try:
                open_protocol(settings(arm, cfg)).prompt("?", "?", tokenizer)
            except ConfigError as error:
                raise ConfigError(f"method {arm.method_name} cannot be asked here: {error}") from None


class Ledger:
    """The scored attempts of an arm that are on disk, by (sample id, member); those of all ranks can be read."""

    def __init__(self, out: Path, arm: Arm, cfg: Config, ctx: Context) -> None:
        self._arm, self._cfg, folder = arm, cfg, out / "parts"
        own = folder / f"{file_name(arm.name)}.{ctx.rank}.jsonl"
        self._others = [
            Journal(path, read_only=True)
            for path in sorted(folder.glob(f"{file_name(arm.name)}.*.jsonl"))
            if path != own
        ]
        self._own, self._lock = Journal(own), threading.Lock()
        self._samples = {sample.id: sample for sample in arm.bench.samples}

    def missing(self, sample: Sample) -> bool:
        """Whether one of its attempts is not there."""
        return any(self._find(sample.id, member) is None for member in range(self._arm.decoding.samples))

    def keep(self, outcome: Outcome, trajectory: Trajectory | None) -> None:
        """Score an attempt and write it; one that is there already stays as it is."""
        key = self._key(outcome.sample_id, outcome.member)
        if self._find(outcome.sample_id, outcome.member) is not None:
            return
        sample = self._samples[outcome.sample_id]
        scores = score_answer(outcome.answer, sample.answers, self._arm.bench.metrics)
        attempt = attempt_of(outcome, sample, scores, None)
        cost = self._cfg.eval.cost(attempt.prompt_tokens, attempt.policy_tokens)
        record: dict[str, Any] = {"attempt": replace(attempt, cost=cost).to_json()}
        if trajectory is not None and outcome.member == 0:
            record["trajectory"] = trajectory.to_json()
        with self._lock:
            self._own.add({key: record})

    def attempts(self) -> Iterator[tuple[Attempt, Trajectory | None]]:
        """(attempt, its trajectory if it is kept) in the order of the questions; ConfigError where one is missing."""
        for sample in self._arm.bench.samples:
            for member in range(self._arm.decoding.samples):
                record = self._find(sample.id, member)
                if record is None:
                    raise ConfigError(
                        f"arm {self._arm.name}: no attempt {member} at {sample.id}; run the command again"
                    )
                kept = record.get("trajectory")
                yield Attempt.from_json(record["attempt"]), Trajectory.from_json(kept) if kept else None

    def _find(self, sample_id: str, member: int) -> dict[str, Any] | None:
        key = self._key(sample_id, member)
        return next((record for journal in (self._own, *self._others) if (record := journal.get(key))), None)

    def _key(self, sample_id: str, member: int) -> str:
        return digest(self._arm.name, sample_id, member)


def run_arm(arm: Arm, cfg: Config, agent: Agent, asker: Any, ledger: Ledger, ctx: Context) -> int:
    """Make the attempts of this rank's share that are not in the ledger; how many there were to make."""
    ranks_per_engine = cfg.engine.tensor_parallel if agent.engine is not None else 1
    first, end = ctx.share(len(arm.bench.samples), ranks_per_engine)
    todo = [i for i in range(first, end) if ledger.missing(arm.bench.samples[i])]
    size, hek = arm.decoding.samples, agent.hek if arm.hek else HEK.empty()
    with (
        ThreadPoolExecutor(SCORERS if "math" in arm.bench.metrics else 1, thread_name_prefix="score") as pool,
        progress(total=len(todo) * size, label=arm.name, unit="attempt") as bar,
    ):
        scored: list[Future[None]] = []

        def keep(outcome: Outcome, trajectory: Trajectory | None = None) -> None:
            if ctx.leads(ranks_per_engine):
                scored.append(pool.submit(ledger.keep, outcome, trajectory))
            bar.update(1)

        streams = agent.engine is None or agent.engine.streams
        at_once = max(1, (STREAMED_AT_ONCE if streams else AT_ONCE) // size)
        for start in range(0, len(todo), at_once):
            places = todo[start : start + at_once]
            _attempt(arm, cfg, agent, asker, hek, places, keep)
            for future in scored:
                future.result()
            scored.clear()
    return len(todo) * size


def _attempt(arm: Arm, cfg: Config, agent: Agent, asker: Any, hek: HEK, places: Sequence[int], keep: Any) -> None:
    samples = [arm.bench.samples[i] for i in places]
    rollout = settings(arm, cfg)
    if plays_protocol(arm.method, cfg):
        player = replace(agent, cfg=rollout, protocol=open_protocol(rollout))
        done = lambda trajectory: keep(outcome_of(trajectory, agent.tokenizer), trajectory)  # noqa: E731
        player.rollout(samples, cfg.eval.seed, hek, positions=places, done=done)
    else:
        run_pipelines(
            arm.method.pipeline, asker, agent.search, hek, samples, rollout, cfg.eval.pipeline, cfg.eval.seed,
            positions=places, done=keep,
        )  # fmt: skip


def plays_protocol(method: Method, cfg: Config) -> bool:
    """Whether a local engine speaks the method's protocol, rather than a pipeline asking for replies."""
    return bool(method.protocol) and not cfg.eval.endpoint.url


def settings(arm: Arm, cfg: Config) -> RolloutConfig:
    """Protocol, limits and decoding of an arm."""
    rollout = arm.method.rollout(cfg.rollout, cfg.eval.own_limits, cfg.eval.prompt_files.get(arm.method_name, ""))
    decoding = arm.decoding
    return replace(rollout, group_size=decoding.samples, temperature=decoding.temperature, top_p=decoding.top_p)


def setting_of(arm: Arm, cfg: Config, agent: Agent) -> dict[str, Any]:
    """What this arm's numbers depend on; stored with them."""
    rollout, search = settings(arm, cfg), describe_search(cfg.search)
    template = ""
    if arm.method.protocol:
        template = "".join(text for _, text in open_protocol(rollout).prompt("?", "", agent.tokenizer))
    return describe_setting(
        model=cfg.eval.endpoint.model or cfg.model.path,
        hek=cfg.hek.path if arm.hek else None,
        protocol=rollout.protocol if arm.method.protocol else arm.method.pipeline,
        template=template,
        corpus=search["corpus"],
        search={name: value for name, value in search.items() if name != "corpus"},
        encoder=f"{cfg.search.backend} {agent.encoder.fingerprint if agent.encoder else ''}".strip(),
        pipeline={} if plays_protocol(arm.method, cfg) else asdict(cfg.eval.pipeline),
        top_k=rollout.top_k,
        samples=arm.bench.samples,
        decoding=arm.decoding,
        seed=cfg.eval.seed,
        rollout={name: value for name, value in asdict(rollout).items() if name not in STATED},
        thresholds=acceptance(cfg.hek),
    )


def acceptance(cfg: HEKConfig) -> dict[str, Any]:
    """What decides when an entry is shown; a gate by its content."""
    keys = {name: value for name, value in asdict(cfg).items() if name != "path"}
    return keys | ({"gate": Path(cfg.gate).read_text(encoding="utf-8")} if cfg.gate else {})


def record_hashes(out: Path, cfg: Config, benches: Sequence[Bench]) -> None:
    """Put digests of the model, the questions and the store of experience into run.json."""
    path = out / "run.json"
    hashes: dict[str, Any] = {"questions": {bench.name or "data.test": bench.sha256 for bench in benches}}
    if not cfg.eval.endpoint.url:
        hashes["model"] = folder_hash(cfg.model.path)
    hashes["hek"] = folder_hash(cfg.hek.path)
    write_json(path, json.loads(path.read_text(encoding="utf-8")) | {"hashes": hashes})
