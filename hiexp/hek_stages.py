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

from hiexp.api_client import ApiWriter, Budget, Client, WriterConfig
from hiexp.assemble import ROLLOUTS_AT_ONCE, Agent, Config, engine_only, start_engine
from hiexp.data import Sample
from hiexp.encoder import Encoder
from hiexp.engine import Engine, Sampling
from hiexp.hek import HEK
from hiexp.hek_build import MAX_MEMBERS, PROMPTS
from hiexp.journal import Journal, KeptEncoder, digest
from hiexp.model import load_tokenizer
from hiexp.reflector import EngineWriter, Reflector, Writer
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
    """ConfigError for a model folder or a key that is not there, before any work."""
    for writer in (cfg.build.reflector, cfg.build.abstractor):
        if writer.url:
            Client(writer)
        elif writer.model:
            load_tokenizer(writer.model)


def open_reflectors(models: Models, encoder: Encoder, out: Path) -> tuple[Reflector, Reflector]:
    """Reflector and abstractor; two that name one model folder share its engine."""
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
        return EngineWriter(engine, tokenizer, who.model or cfg.model.path, *room, prompts.own_tags, budget)

    sampling = Sampling(build.reflect_temperature, build.reflect_top_p, (), cfg.seed)
    made = partial(Reflector, encoder=kept, prompts=prompts, sampling=sampling, max_attempts=build.max_attempts)
    first, above = (
        made(writer(role, who), journal=journal, role=role, progress=progress, say=say)
        for role, who in (("reflector", build.reflector), ("abstractor", build.abstractor))
    )
    return first, above


def open_stages(out: Path) -> Journal:
    """The journal of `build_hek`."""
    return Journal(out / KEPT / "stages.jsonl")


def roll_out(models: Models, samples: Sequence[Sample], out: Path) -> list[Trajectory]:
    """rollouts_per_question attempts at each question without experience; finished parts come from the journal.

    A part is what is sampled together (ROLLOUTS_AT_ONCE). It is kept and repeated as a whole, because the last bit of a
    logit may depend on who else is in the batch.
    """
    cfg, journal = models.cfg, Journal(out / KEPT / "rollouts.jsonl")
    size = cfg.build.rollouts_per_question

    def keep(part: Sequence[Sample], seed: int, run: Callable[[], list[Trajectory]]) -> list[Trajectory]:
        keys = part_keys(cfg, part, seed)
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

    return models.agent.rollout_all(samples, cfg.seed, "rollouts", HEK.empty(), keep, group_size=size)


def part_keys(cfg: Config, part: Sequence[Sample], seed: int) -> list[str]:
    """A journal key for each question of a part."""
    together = [[sample.id, sample.question] for sample in part]
    shared = (cfg.model.path, asdict(cfg.rollout), cfg.build.rollouts_per_question, seed, together)
    return [digest("rollout", *shared, i) for i in range(len(part))]


def forget_rollouts(out: Path) -> None:
    """A finished run has them in trajectories.jsonl."""
    (out / KEPT / "rollouts.jsonl").unlink(missing_ok=True)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def estimate(cfg: Config, samples: Sequence[Sample]) -> str:
    """A table of what the build will take, from the questions, what is kept in cfg.out, and stated assumptions."""
    build, kept = cfg.build, Path(cfg.out) / KEPT
    rollouts, replies = (Journal(kept / f"{name}.jsonl", read_only=True) for name in ("rollouts", "replies"))
    size = build.rollouts_per_question
    at_once = max(1, ROLLOUTS_AT_ONCE // size)
    parts = ((samples[i : i + at_once], cfg.seed * 1_000_003 + i) for i in range(0, len(samples), at_once))
    done = sum(key in rollouts for part, seed in parts for key in part_keys(cfg, part, seed))
    left, seconds = len(samples) - done, [record["seconds"] for record in rollouts.values()]
    speed = sum(seconds) / len(seconds) if seconds else None
    most = left * size * cfg.rollout.max_response_tokens
    rows = [("rollout", f"{left * size:,} rollouts ({done * size:,} kept)", "-", f"<= {most:,}", _time(speed, left))]
    entries, highest, total = round(len(samples) * MIXED), len(samples), 0
    for level in range(1, build.max_level + 1):
        role = "reflector" if level == 1 else "abstractor"
        spent = [record for record in replies.values() if record["level"] == level]
        if level > 1:
            entries, highest = entries // MEMBERS[level], highest // max(build.min_cluster, 1)
        calls = max(0, round(entries * ATTEMPTS) - len(spent))
        read, written = _prompt_tokens(cfg, samples, level), round(build.max_new_tokens * WRITTEN)
        per_call = sum(record["seconds"] for record in spent) / len(spent) if spent else None
        asked = f"~{calls:,} calls of {role} ({len(spent):,} kept), <= {highest * build.max_attempts:,}"
        rows.append((f"level {level}", asked, f"~{calls * read:,}", f"~{calls * written:,}", _time(per_call, calls)))
        total += calls * (read + written)
    head = ("stage", "calls", "prompt tokens", "reply tokens", "time")
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in (head, *rows))
    assumed = (
        f"Assumed: {MIXED:.0%} of {len(samples)} questions have a success and a failure; {ATTEMPTS} replies a lesson; "
        f"{MEMBERS[2]} lessons a pattern, {MEMBERS[3]} patterns a strategy; replies fill {WRITTEN:.0%} of "
        f"max_new_tokens; attempts of half max_turns; {CHARACTERS} characters a token (prompt set {build.prompts})."
    )
    together = f"lessons together: about {total:,} tokens"
    return "\n".join([*lines, together, assumed, "Nothing was loaded, asked or written."])


def _time(per_item: float | None, items: int) -> str:
    return "unknown before the first of them" if per_item is None and items else f"~{(per_item or 0) * items:.0f} s"


def _prompt_tokens(cfg: Config, samples: Sequence[Sample], level: int) -> int:
    """Of one request, with made-up attempts or lessons of usual length."""
    prompts = PROMPTS[cfg.build.prompts].asking_for(cfg.build.language)
    if level > 1:
        return len(prompts.abstract(level, [("word " * 12, "word " * 40)] * MAX_MEMBERS)) // CHARACTERS
    documents = (Document("t" * 30, "d" * 200),) * cfg.rollout.top_k
    turns = [Turn("x" * 300, "search", "q" * 40, documents) for _ in range(cfg.rollout.max_turns // 2)]
    trace = prompts.trace(Trajectory("", turns=turns, status=Status.ANSWERED, answer="a" * 20), True)
    question = samples[len(samples) // 2].question
    return len(prompts.reflect(question, samples[0].answers[0], trace, trace)) // CHARACTERS
