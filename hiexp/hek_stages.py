"""What build_hek.py puts together: kept rollouts, the models that write, and what it all will take.

<out>/kept/rollouts.jsonl   the siblings of one question a line, until the run has finished
<out>/kept/replies.jsonl    every reply of a reflector or abstractor, accepted or not
<out>/kept/stages.jsonl     clusterings
<out>/kept/vectors/         embedded titles
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from hiexp.agent_logs import Logs, read_logs
from hiexp.api_client import ApiWriter, Budget, Client, WriterConfig
from hiexp.assemble import ROLLOUTS_AT_ONCE, Agent, Config, engine_only, open_agent, open_samples, start_engine
from hiexp.config import ConfigError
from hiexp.data import Sample, read_samples, subset
from hiexp.encoder import Encoder
from hiexp.engine import Engine, Sampling
from hiexp.experience import Asked
from hiexp.hek import HEK
from hiexp.hek_build import MAX_MEMBERS, PROMPTS, Pair, contrastive_pairs, judge_by_answer, reflection_wordings
from hiexp.journal import Journal, KeptEncoder, digest
from hiexp.model import load_tokenizer
from hiexp.protocols import open_protocol
from hiexp.reflector import EngineWriter, Reflector, Writer
from hiexp.search import SearchConfig, open_search
from hiexp.success import Judge
from hiexp.tracking import progress
from hiexp.trajectory import Document, Status, Trajectory, Turn

KEPT = "kept"
MIXED = 0.5
"""share of questions that are taken to have both a success and a failure"""
ATTEMPTS = 1.3
"""replies per accepted lesson"""
MEMBERS = {2: 4, 3: 3}
"""entries of the level below in one abstraction: the lower ends of what the calibration of thresholds aims at"""
WRITTEN = 0.5
"""share of its room that a reply fills"""
CHARACTERS = 4
"""of one token"""


class Bytes:
    """Stands for a tokenizer where no model is here: a token for three bytes, which is rather too many."""

    def encode(self, text: str, add_special_tokens: bool = False) -> Sequence[int]:
        return range(len(text.encode()) // 3 + 1)


def open_questions(cfg: Config) -> tuple[list[Sample], Logs | None]:
    """What the HEK is built from: training questions to try, or the logs of an agent that has tried its own.

    ConfigError for what cannot give a HEK, as far as that can be seen without a model.
    """
    logs = None
    if cfg.build.logs:
        logs = read_logs(cfg.build.logs, lambda: _training_questions(cfg))
    elif cfg.rollout.temperature <= 0:
        raise ConfigError("rollout.temperature=0: greedy attempts are all alike, none to contrast; set it above 0")
    samples = logs.samples if logs else open_samples(cfg.data, "train")
    if cfg.build.questions > len(samples):
        there = f"{cfg.build.logs or cfg.data.train} has {len(samples)} questions"
        raise ConfigError(f"build.questions={cfg.build.questions}, but {there}; lower it, or set 0 for all")
    if not logs:
        return subset(samples, cfg.build.questions, cfg.seed), None
    logs = logs.subset(cfg.build.questions, cfg.seed)
    if not logs.has_rewards:
        judge = judge_by_answer(cfg.build)
        for sample, group in zip(logs.samples, logs.attempts(), strict=True):
            for attempt in group:
                attempt.reward = float(judge(attempt, sample))
    if not _pairs(cfg, logs):
        raise ConfigError(logs.nothing_to_contrast(cfg.build.success_reward))
    return logs.samples, logs


def _training_questions(cfg: Config) -> dict[str, Sample]:
    return {sample.id: sample for sample in read_samples(cfg.data.train)} if cfg.data.train else {}


def judge_of(cfg: Config, logs: Logs | None) -> Judge:
    """Success by the rewards of logs, else by the answers."""
    return (logs and logs.judge(cfg.build.success_reward)) or judge_by_answer(cfg.build)


def _pairs(cfg: Config, logs: Logs) -> list[Pair]:
    return contrastive_pairs(logs.attempts(), logs.samples, judge_of(cfg, logs))


def open_parts(cfg: Config, logs: Logs | None) -> Agent:
    """The agent that makes rollouts; for logs only what a writer needs of it: no search, a policy if one is named."""
    if not logs:
        return open_agent(cfg)
    if cfg.threads:
        torch.set_num_threads(cfg.threads)
    tokenizer = load_tokenizer(cfg.model.path) if cfg.model.path else Bytes()
    no_search = open_search(SearchConfig(backend="none"))
    return Agent(cfg.rollout, tokenizer, open_protocol(cfg.rollout), no_search, None, HEK.empty())


@dataclass(frozen=True)
class Models:
    """Opens each model when it is first needed, once."""

    agent: Agent
    cfg: Config

    def policy(self) -> Engine:
        return self.agent.engine or start_engine(self.agent, self.cfg, *engine_only(self.cfg))

    def local(self, path: str) -> tuple[Any, Callable[[], Engine]]:
        """(tokenizer, what gives the engine) of a model folder; "" or the policy's own folder is the policy."""
        if path in ("", self.cfg.model.path):
            return self.agent.tokenizer, self.policy
        tokenizer, cfg = load_tokenizer(path), replace(self.cfg, model=replace(self.cfg.model, path=path))
        # an agent of its own: start_engine gives an agent its engine
        return tokenizer, cache(lambda: start_engine(replace(self.agent, tokenizer=tokenizer), cfg, *engine_only(cfg)))


def check_writers(cfg: Config) -> None:
    """ConfigError for a writer, a model folder or a key that is not there, before any work."""
    if not (cfg.model.path or cfg.build.reflector.model):
        raise ConfigError(
            "model.path is empty, so there is no policy to write lessons; set build.reflector.model=FOLDER, or "
            "build.reflector.url and build.reflector.model for an endpoint"
        )
    for writer in (cfg.build.reflector, cfg.build.abstractor):
        if writer.url:
            Client(writer)
        elif writer.model:
            load_tokenizer(writer.model)


def open_reflectors(models: Models, encoder: Encoder, out: Path) -> tuple[Reflector, Reflector]:
    """Reflector and abstractor; two that name one model folder share its engine. Without a policy an abstractor that is
    not named is the reflector.
    """
    cfg, journal, local = models.cfg, Journal(out / KEPT / "replies.jsonl"), cache(models.local)
    kept = KeptEncoder(encoder, out / KEPT / "vectors")
    build, prompts = cfg.build, PROMPTS[cfg.build.prompts].asking_for(cfg.build.language)

    def writer(role: str, who: WriterConfig) -> Writer:
        spent = [record for record in journal.values() if record.get("role") == role]
        tokens = sum(record["prompt_tokens"] + record["reply_tokens"] for record in spent)
        budget = Budget(who, f"build.{role}", len(spent), tokens)
        if who.url:
            return ApiWriter(who, models.agent.tokenizer, build.max_new_tokens, budget)
        tokenizer, engine = local(who.model)
        room = (build.max_new_tokens, build.tokens_per_batch)
        name, form = who.model or cfg.model.path, prompts.own_tags
        return EngineWriter(engine, tokenizer, name, *room, form, budget, prompts.use_chat)

    sampling = Sampling(build.reflect_temperature, build.reflect_top_p, prompts.stop, cfg.seed)
    made = partial(Reflector, encoder=kept, prompts=prompts, sampling=sampling, max_attempts=build.max_attempts)
    roles = {"reflector": build.reflector} | ({"abstractor": build.abstractor} if _has_abstractor(cfg) else {})
    found = [
        made(writer(role, who), journal=journal, role=role, progress=progress, say=say) for role, who in roles.items()
    ]
    return found[0], found[-1]


def _has_abstractor(cfg: Config) -> bool:
    return bool(cfg.model.path or cfg.build.abstractor.model)


def open_stages(out: Path) -> Journal:
    """The journal of `build_hek`."""
    return Journal(out / KEPT / "stages.jsonl")


def roll_out(
    models: Models, samples: Sequence[Sample], out: Path, size: int, hek: HEK | None = None, store: str = ""
) -> list[Trajectory]:
    """`size` attempts at each question, without experience or with that of `hek`; finished parts come from the journal.

    `store` tells one HEK and its settings from another. A part is what is sampled together (ROLLOUTS_AT_ONCE). It is
    kept and repeated as a whole, because the last bit of a logit may depend on who else is in the batch.
    """
    cfg, journal = models.cfg, Journal(out / KEPT / "rollouts.jsonl")

    def keep(part: Sequence[Sample], seed: int, run: Callable[[], list[Trajectory]]) -> list[Trajectory]:
        keys = part_keys(cfg, part, seed, size, store)
        records = [record for key in keys if (record := journal.get(key))]
        if len(records) == len(keys):
            return [Trajectory.from_json(one) for record in records for one in record["trajectories"]]
        models.policy()
        start = time.monotonic()
        found = run()
        seconds = (time.monotonic() - start) / len(part)
        lines = [[one.to_json() for one in found[i : i + size]] for i in range(0, len(found), size)]
        journal.add({key: {"seconds": seconds, "trajectories": line} for key, line in zip(keys, lines, strict=True)})
        return found

    return models.agent.rollout_all(samples, cfg.seed, "rollouts", hek or HEK.empty(), keep, group_size=size)


def part_keys(cfg: Config, part: Sequence[Sample], seed: int, size: int, store: str = "") -> list[str]:
    """A journal key for each question of a part."""
    together = [[sample.id, sample.question] for sample in part]
    shared = (cfg.model.path, asdict(cfg.rollout), size, seed, together, *([store] if store else []))
    return [digest("rollout", *shared, i) for i in range(len(part))]


def forget_rollouts(out: Path) -> None:
    """A finished run has them in trajectories.jsonl."""
    (out / KEPT / "rollouts.jsonl").unlink(missing_ok=True)


def tried_without(groups: Sequence[Sequence[Trajectory]], samples: Sequence[Sample]) -> list[Asked]:
    """How every question of the build went, those that were always right or never among them."""
    records = (Asked(sample.id, sample.question) for sample in samples)
    return [one.after(off=[t.reward for t in group]) for one, group in zip(records, groups, strict=True)]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def estimate(cfg: Config, samples: Sequence[Sample], logs: Logs | None = None) -> str:
    """A table of what the build will take, from the questions, what is kept in cfg.out, and stated assumptions."""
    build, replies = cfg.build, Journal(Path(cfg.out) / KEPT / "replies.jsonl", read_only=True)
    pairs = _pairs(cfg, logs) if logs else []
    if logs:
        attempts = sum(map(len, logs.attempts()))
        rows = [("logs", f"{attempts:,} attempts, no rollouts", "-", "-", "-")]
        entries, highest = len(pairs), len(pairs)
    else:
        rows, entries, highest = [_rollout_row(cfg, samples)], round(len(samples) * MIXED), len(samples)
    total = 0
    for level in range(1, build.max_level + 1):
        role = "abstractor" if level > 1 and _has_abstractor(cfg) else "reflector"
        spent = [record for record in replies.values() if record["level"] == level]
        if level > 1:
            entries, highest = entries // MEMBERS[level], highest // max(build.min_cluster, 1)
        calls = max(0, round(entries * ATTEMPTS) - len(spent))
        read, written = _prompt_tokens(cfg, samples, level, pairs), round(build.max_new_tokens * WRITTEN)
        per_call = sum(record["seconds"] for record in spent) / len(spent) if spent else None
        asked = f"~{calls:,} calls of {role} ({len(spent):,} kept), <= {highest * build.max_attempts:,}"
        rows.append((f"level {level}", asked, f"~{calls * read:,}", f"~{calls * written:,}", _time(per_call, calls)))
        total += calls * (read + written)
    head = ("stage", "calls", "prompt tokens", "reply tokens", "time")
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in (head, *rows))
    together = f"lessons together: about {total:,} tokens"
    return "\n".join([*lines, together, _assumed(cfg, samples, logs, pairs), "Nothing was loaded, asked or written."])


def _rollout_row(cfg: Config, samples: Sequence[Sample]) -> tuple[str, ...]:
    rollouts = Journal(Path(cfg.out) / KEPT / "rollouts.jsonl", read_only=True)
    size = cfg.build.rollouts_per_question
    at_once = max(1, ROLLOUTS_AT_ONCE // size)
    parts = ((samples[i : i + at_once], cfg.seed * 1_000_003 + i) for i in range(0, len(samples), at_once))
    done = sum(key in rollouts for part, seed in parts for key in part_keys(cfg, part, seed, size))
    left, seconds = len(samples) - done, [record["seconds"] for record in rollouts.values()]
    speed = sum(seconds) / len(seconds) if seconds else None
    most = left * size * cfg.rollout.max_response_tokens
    return "rollout", f"{left * size:,} rollouts ({done * size:,} kept)", "-", f"<= {most:,}", _time(speed, left)


def _assumed(cfg: Config, samples: Sequence[Sample], logs: Logs | None, pairs: Sequence[Pair]) -> str:
    questions = (
        f"counted: {len(pairs)} of {len(samples)} questions have a success and a failure"
        if logs
        else f"{MIXED:.0%} of {len(samples)} questions have a success and a failure; attempts of half max_turns"
    )
    return (
        f"Assumed: {questions}; {ATTEMPTS} replies a lesson; "
        f"{MEMBERS[2]} lessons a pattern, {MEMBERS[3]} patterns a strategy; replies fill {WRITTEN:.0%} of "
        f"max_new_tokens; {CHARACTERS} characters a token (prompt set {cfg.build.prompts})."
    )


def _time(per_item: float | None, items: int) -> str:
    return "unknown before the first of them" if per_item is None and items else f"~{(per_item or 0) * items:.0f} s"


def _prompt_tokens(cfg: Config, samples: Sequence[Sample], level: int, pairs: Sequence[Pair]) -> int:
    """Of one request: the mean over pairs where there are some, else with made-up attempts or lessons."""
    prompts = PROMPTS[cfg.build.prompts].asking_for(cfg.build.language)
    if level > 1:
        return len(prompts.abstract(level, [("word " * 12, "word " * 40)] * MAX_MEMBERS)) // CHARACTERS
    if pairs:
        return sum(len(reflection_wordings(prompts, pair)[0]) for pair in pairs) // len(pairs) // CHARACTERS
    documents = (Document("t" * 30, "d" * 200),) * cfg.rollout.top_k
    turns = [Turn("x" * 300, "search", "q" * 40, documents) for _ in range(cfg.rollout.max_turns // 2)]
    trace = prompts.trace(Trajectory("", turns=turns, status=Status.ANSWERED, answer="a" * 20), True)
    question = samples[len(samples) // 2].question
    return len(prompts.reflect(question, samples[0].answers[0], trace, trace)) // CHARACTERS
