"""What an evaluation leaves behind: one line of JSON per attempt, the same for every method and every model.

An agent's trajectory has one context from its prompt to its answer; a pipeline such as Iter-RetGen has one per request.
Either way an attempt holds `calls`, each a list of labelled text: who wrote what. Token ids are left out: an endpoint
gives none, and nothing here is trained on. Tables, figures and the leaderboard page read these lines and nothing else.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from hiexp.config import ConfigError
from hiexp.data import Sample
from hiexp.trajectory import Status, Trajectory

REFUSED = "refused"
"""Status of an attempt that an endpoint would not answer (a content filter, a prompt that is too long)."""


@dataclass(frozen=True)
class Call:
    """One context of a model: labelled text, and what its requests cost."""

    pieces: tuple[tuple[str, str], ...]
    """(source, text) in order; source is a value of trajectory.Source"""
    purpose: str = "answer"
    """what the model was asked for: answer, thought, condense ..."""
    requests: int = 1
    """times the model was asked to go on"""
    prompt_tokens: int = 0
    """read, summed over the requests: what an endpoint bills"""
    reply_tokens: int = 0
    """written by the model"""


@dataclass(frozen=True)
class Outcome:
    """What a method made of one question, before it is scored."""

    sample_id: str
    member: int
    answer: str
    status: str
    """a value of trajectory.Status, or "refused" """
    searches: int
    calls: tuple[Call, ...]
    tokens: int
    """everything in the contexts, prompts included"""
    strategies: tuple[str, ...] = ()
    """ids of the level-2 or level-3 experience that was shown"""
    cases: tuple[str, ...] = ()
    """ids of the level-1 experience that was shown"""
    seconds: float = 0.0
    """from the first request to the answer; 0 = not measured (rows of a batch are not told apart)"""


@dataclass(frozen=True)
class Attempt:
    """One scored attempt: a line of samples_<arm>.jsonl."""

    id: str
    member: int
    family: str
    family_group: str
    prediction: str
    """the answer; empty where there is none"""
    answers: tuple[str, ...]
    scores: dict[str, float]
    """by metric, in [0, 1]; a verdict that a judge failed to give is not there"""
    status: str
    searches: int
    answer_words: int
    tokens: int
    """everything, the prompt included"""
    policy_tokens: int
    """written by the model"""
    question: str = ""
    hops: int = 0
    """as the data set labels it; 0 = not stated"""
    facts: int = 0
    """supporting facts; 0 = not stated"""
    prompt_tokens: int = 0
    requests: int = 1
    cost: float | None = None
    """in the currency of eval.price_in and .price_out; None = no prices"""
    seconds: float = 0.0
    strategies: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    calls: tuple[Call, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "Attempt":
        known = {field.name for field in fields(cls)}
        values = {name: value for name, value in record.items() if name in known}
        for name in ("answers", "strategies", "cases"):
            values[name] = tuple(values.get(name, ()))
        values["calls"] = tuple(_call(call) for call in values.get("calls", ()))
        return cls(**values)


def outcome_of(trajectory: Trajectory, tokenizer: Any = None) -> Outcome:
    """A finished agent trajectory as an outcome: one call, its ids decoded segment by segment (None: no text)."""
    segments = trajectory.segments if tokenizer else []
    pieces = tuple((s.source.value, tokenizer.decode(list(s.token_ids))) for s in segments)
    read = written = requests = before = 0
    for segment in trajectory.segments:
        if segment.source.value == "policy":
            read, written, requests = read + before, written + len(segment.token_ids), requests + 1
        before += len(segment.token_ids)
    has_answer = trajectory.status is Status.ANSWERED
    return Outcome(
        sample_id=trajectory.sample_id,
        member=trajectory.member,
        answer=trajectory.answer if has_answer else "",
        status=trajectory.status.value,
        searches=trajectory.num_searches,
        calls=(Call(pieces, "answer", requests, read, written),),
        tokens=trajectory.num_tokens,
        strategies=trajectory.strategies,
        cases=tuple(case for turn in trajectory.turns for case in turn.cases),
    )


def attempt_of(outcome: Outcome, sample: Sample, scores: dict[str, float], cost: float | None = None) -> Attempt:
    """The line that is written of an outcome."""
    prediction = outcome.answer if outcome.answer.strip() else ""
    return Attempt(
        id=sample.id,
        member=outcome.member,
        family=sample.family,
        family_group=sample.family_group,
        prediction=prediction,
        answers=sample.answers,
        scores=scores,
        status=outcome.status,
        searches=outcome.searches,
        answer_words=len(prediction.split()),
        tokens=outcome.tokens,
        policy_tokens=sum(call.reply_tokens for call in outcome.calls),
        question=sample.question,
        hops=sample.hops,
        facts=sample.facts,
        prompt_tokens=sum(call.prompt_tokens for call in outcome.calls),
        requests=sum(call.requests for call in outcome.calls),
        cost=cost,
        seconds=outcome.seconds,
        strategies=outcome.strategies,
        cases=outcome.cases,
        calls=outcome.calls,
    )


def read_attempts(path: str | Path) -> list[Attempt]:
    """The lines of a samples_<arm>.jsonl; ConfigError naming file and line for anything else."""
    attempts = []
    with Path(path).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                attempts.append(Attempt.from_json(json.loads(line)))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise ConfigError(f"{path}:{number} is no attempt of an evaluation ({error})") from error
    return attempts


def write_attempts(path: str | Path, attempts: Iterable[Attempt]) -> None:
    """One line per attempt; the file is replaced when all of it is written."""
    target = Path(path)
    part = target.with_name(target.name + ".tmp")
    with part.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(attempt.to_json(), ensure_ascii=False) + "\n" for attempt in attempts)
    part.replace(target)


def _call(record: dict[str, Any]) -> Call:
    pieces = tuple((str(source), str(text)) for source, text in record["pieces"])
    return Call(pieces, **{name: value for name, value in record.items() if name != "pieces"})
