"""The record of one attempt at one question, with the author of every token.

Nothing here is re-derived later: the loss mask, the report's colours and the reflection prompt all read these records.
Worked example (ids are tokens):

    PROMPT     [11, 12]      the question                       not trained
    EXPERIENCE [21]          a strategy from the HEK            not trained
    POLICY     [31, 32, 33]  "<search> ... </search>"           trained, with 3 log-probs from the sampler
    DOCUMENT   [41, 42]      what the search returned           not trained
    POLICY     [34, 35]      "<answer> ... </answer>"           trained

    token_ids     = [11, 12, 21, 31, 32, 33, 41, 42, 34, 35]
    response_mask = [ F,  F,  F,  T,  T,  T,  F,  F,  T,  T]
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Source(Enum):
    """Who wrote a token. NOTICE is the environment's own voice: wrappers of an observation, limits, repeated query."""

    PROMPT = "prompt"
    EXPERIENCE = "experience"
    POLICY = "policy"
    DOCUMENT = "document"
    NOTICE = "notice"


class Status(Enum):
    RUNNING = "running"
    ANSWERED = "answered"
    OUT_OF_TURNS = "out_of_turns"
    TRUNCATED = "truncated"
    BROKEN = "broken"
    """The engine sampled an id that the tokenizer does not know (a model head wider than its vocabulary)."""


@dataclass(frozen=True)
class Document:
    """A passage that search returned."""

    title: str
    text: str


@dataclass(frozen=True)
class Segment:
    """A run of tokens with one author. Log-probs exist exactly where the policy wrote."""

    source: Source
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        wanted = len(self.token_ids) if self.source is Source.POLICY else 0
        if len(self.logprobs) != wanted:
            given = f"{len(self.token_ids)} tokens and {len(self.logprobs)} log-probs"
            raise ValueError(f"a {self.source.value} segment of {given}; it needs {wanted} log-probs")


@dataclass(frozen=True)
class Turn:
    """What happened in one turn, as text: for reflection, reports and metrics, never for training."""

    text: str
    action: str
    """search, answer or malformed"""
    argument: str
    """the query or the answer"""
    documents: tuple[Document, ...] = ()
    cases: tuple[str, ...] = ()
    """ids of the level-1 experiences shown with the documents"""
    notice: str = ""
    more: tuple[str, ...] = ()
    """queries beside `argument`, where one turn asked several"""


@dataclass
class Trajectory:
    """Append-only record of one attempt; siblings of a group share `sample_id` and differ in `member`."""

    sample_id: str
    member: int = 0
    policy_version: int = 0
    strategies: tuple[str, ...] = ()
    """ids of the level-2 or level-3 experiences in the prompt"""
    hek_version: int = -1
    """of the store whose experience it could be shown (0 = as built, then one more each refresh); -1 = none"""
    segments: list[Segment] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    status: Status = Status.RUNNING
    answer: str = ""
    reward: float = 0.0

    def append(self, segment: Segment) -> None:
        if self.status is not Status.RUNNING:
            raise ValueError(f"trajectory of {self.sample_id} has ended ({self.status.value}); nothing may be appended")
        if segment.token_ids:
            self.segments.append(segment)

    @property
    def token_ids(self) -> list[int]:
        return [token for segment in self.segments for token in segment.token_ids]

    @property
    def sources(self) -> list[Source]:
        return [segment.source for segment in self.segments for _ in segment.token_ids]

    @property
    def response_mask(self) -> list[bool]:
        """True exactly on the tokens that the policy sampled."""
        return [source is Source.POLICY for source in self.sources]

    @property
    def rollout_logprobs(self) -> list[float]:
        """The sampler's log-probs of the policy tokens, in order: diagnostics only, never the ratio's denominator."""
        return [value for segment in self.segments for value in segment.logprobs]

    @property
    def num_tokens(self) -> int:
        return sum(len(segment.token_ids) for segment in self.segments)

    @property
    def num_response_tokens(self) -> int:
        return sum(len(s.token_ids) for s in self.segments if s.source is Source.POLICY)

    @property
    def num_searches(self) -> int:
        """Queries that were executed (a refused repetition or one beyond the limit is not)."""
        return sum(1 + len(turn.more) for turn in self.turns if turn.action == "search" and not turn.notice)

    @property
    def queries(self) -> list[str]:
        asked = [turn for turn in self.turns if turn.action == "search"]
        return [query for turn in asked for query in (turn.argument, *turn.more) if query]

    def render(self, tokenizer: Any) -> str:
        """The trajectory as text, each segment marked with its author: look at your rollouts."""
        return "".join(f"[{s.source.value}]{tokenizer.decode(list(s.token_ids))}\n" for s in self.segments)

    def to_json(self) -> dict[str, Any]:
        return {
            "sample_id": self.sample_id,
            "member": self.member,
            "policy_version": self.policy_version,
            "strategies": list(self.strategies),
            "hek_version": self.hek_version,
            "segments": [[s.source.value, list(s.token_ids), list(s.logprobs)] for s in self.segments],
            "turns": [_turn_to_json(turn) for turn in self.turns],
            "status": self.status.value,
            "answer": self.answer,
            "reward": self.reward,
        }

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "Trajectory":
        return cls(
            sample_id=record["sample_id"],
            member=record["member"],
            policy_version=record["policy_version"],
            strategies=tuple(record["strategies"]),
            hek_version=record.get("hek_version", -1),
            segments=[Segment(Source(s), tuple(ids), tuple(lp)) for s, ids, lp in record["segments"]],
            turns=[_turn_from_json(turn) for turn in record["turns"]],
            status=Status(record["status"]),
            answer=record["answer"],
            reward=record["reward"],
        )


def groups_of(trajectories: Sequence[Trajectory], group_size: int) -> list[list[Trajectory]]:
    """Split adjacent siblings into groups of one sample each; ValueError when siblings are not adjacent."""
    groups = [list(trajectories[i : i + group_size]) for i in range(0, len(trajectories), group_size)]
    for group in groups:
        if len(group) != group_size or len({t.sample_id for t in group}) != 1:
            raise ValueError(f"not a group of {group_size} siblings: {[t.sample_id for t in group]}")
    return groups


def _turn_to_json(turn: Turn) -> dict[str, Any]:
    record = dict(vars(turn))
    record |= {"documents": [[d.title, d.text] for d in turn.documents], "cases": list(turn.cases)}
    if turn.more:
        return record | {"more": list(turn.more)}
    del record["more"]  # records of one query a turn are what they always were
    return record


def _turn_from_json(record: dict[str, Any]) -> Turn:
    documents = tuple(Document(title, text) for title, text in record["documents"])
    more = tuple(record.get("more", ()))
    return Turn(**(record | {"documents": documents, "cases": tuple(record["cases"]), "more": more}))
