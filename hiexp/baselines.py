"""Methods that prompt a model in a fixed course of searches and requests, each written as a generator.

A method yields what it wants and is sent what came of it, so that many questions run side by side (pipelines.py):

    [found] = yield Look((query,), shown)       the passages and the experience of each query
    reply = yield Ask(system, user, "answer")   the reply in a context of its own
    reply = yield More(pieces)                  the same context goes on (where its Ask said stays_open)
    return Final(answer, status)

Each is the same with experience: strategies in the system text, cases beside the passages of a query. The prompts are
our own words. To add a method: a generator and one line of PIPELINES; METHODS in methods.py makes it a row of a table.
"""

import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hiexp.chat_replies import Reply
from hiexp.config import ConfigError
from hiexp.observations import cut, neutralise
from hiexp.passages import sentence_ends
from hiexp.protocols import PROTOCOLS
from hiexp.rollout import LIMIT, MALFORMED, NOTHING_FOUND, REPEATED, RolloutConfig
from hiexp.tag_protocol import Pieces, TagProtocol, normalise_query
from hiexp.trajectory import Document, Source, Status


@dataclass(frozen=True)
class PipelineConfig:
    """What the published descriptions of prompted methods leave open, or state differently; the rest is rollout.*."""

    iterations: int = 3
    """Iter-RetGen: searches, each followed by a reply (3 in FlashRAG's pipeline)"""
    query_order: Literal["generation_first", "question_first"] = "generation_first"
    """Iter-RetGen: how the last reply and the question make a query; FlashRAG has the question first"""
    query_tokens: int = 128
    """Iter-RetGen and IRCoT: a reply or thought is cut to this in a query, as encoders read a few hundred at most"""
    thoughts: int = 8
    """IRCoT: thoughts at most (8 in the paper, 2 in FlashRAG's pipeline)"""
    thought_tokens: int = 128
    """IRCoT: tokens of a reply of which the first sentence is the thought"""
    paragraphs: int = 15
    """IRCoT: passages that are kept, those found first (15 in the paper)"""
    condensed_tokens: int = 512
    """Search-o1, condensed: tokens of what stands in the chain for the pages of a query"""
    chain_tokens: int = 1024
    """Search-o1, condensed: how much of the chain the condensing request sees, its newest parts"""
    lenient: bool = False
    """take the last line of a final reply without a box for its answer; false: it has none"""

    def __post_init__(self) -> None:
        for name in (
            "iterations", "query_tokens", "thoughts", "thought_tokens", "paragraphs", "condensed_tokens", "chain_tokens"
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")


@dataclass(frozen=True)
class Ask:
    """A request in a new context."""

    system: Pieces
    user: Pieces
    purpose: str
    max_tokens: int = 0
    """0 = rollout.max_turn_tokens"""
    stop: tuple[str, ...] = ()
    opening: str = ""
    """what the stop string closes"""
    stays_open: bool = False
    """whether More may follow"""


@dataclass(frozen=True)
class More:
    """Text from outside, and another request, in the context that stays open."""

    pieces: Pieces
    stop: tuple[str, ...] = ()
    opening: str = ""


@dataclass(frozen=True)
class Look:
    """Queries to execute."""

    queries: tuple[str, ...]
    shown: frozenset[str]
    """ids of the experience that the next context shows anyway"""


@dataclass(frozen=True)
class Found:
    """What a query brought."""

    documents: tuple[Document, ...]
    case: str = ""
    case_ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class Final:
    answer: str
    status: Status


Play = Generator[Ask | More | Look, Any, Final]


@dataclass(frozen=True)
class Task:
    """A question, and what its method may use."""

    query: str
    """the question as it is searched with"""
    strategy: str
    """experience for the system text; empty for none"""
    shown: frozenset[str]
    """ids of it"""
    cfg: PipelineConfig
    limits: RolloutConfig
    count: Callable[[str], int]
    """tokens of a text"""

    def system(self, instruction: str) -> Pieces:
        if not self.strategy:
            return [(Source.PROMPT, instruction)]
        strategy = neutralise(self.strategy).strip()
        opening, closing = f"{instruction}\n\n<strategy>\n", "\n</strategy>"
        return [(Source.PROMPT, opening), (Source.EXPERIENCE, strategy), (Source.PROMPT, closing)]

    def question(self, after: str = "") -> Pieces:
        return [(Source.PROMPT, f"Question: {neutralise(self.query).strip()}{after}")]

    def evidence(self, documents: Sequence[Document], case: str, most: int = 0, notice: str = "") -> Pieces:
        """Passages of at most `most` tokens each (0 = rollout.max_document_tokens), and the experience beside them."""
        notice = notice or ("" if documents else NOTHING_FOUND)
        return self.short(_PASSAGES.observation(documents, case, notice), most)

    def short(self, pieces: Pieces, most: int = 0) -> Pieces:
        most = most or self.limits.max_document_tokens
        return [(s, cut(text, most, self.count) if s is Source.DOCUMENT else text) for s, text in pieces]

    def with_query(self, text: str) -> str:
        """A reply of the model as part of a query: without boxes and line breaks, and not too long."""
        return cut(" ".join(_BOX.sub(r"\1", spoken(text)).split()), self.cfg.query_tokens, self.count)

    def final(self, reply: Reply) -> Final:
        """The last box outside thoughts is the answer."""
        action = PROTOCOLS["direct"].parse(reply.text)
        if action.kind == "answer":
            return Final(action.text, Status.ANSWERED)
        lines = [line.strip() for line in spoken(reply.text).splitlines() if line.strip()]
        if self.cfg.lenient and lines:
            return Final(_LEAD.sub("", lines[-1]).strip(" *"), Status.ANSWERED)
        return Final("", Status.TRUNCATED if reply.finish == "length" else Status.OUT_OF_TURNS)


_PASSAGES = TagProtocol(
    name="passages", instruction="", query_tags=None, result_tags=("<passages>", "</passages>"), before=""
)
_BOX = re.compile(r"\\boxed\s*\{([^{}]*)\}")
_LEAD = re.compile(
    r"^\W*(?:so |thus |therefore |hence )?,?\s*(?:the )?(?:final )?answer(?: is)?\s*:?\s*", re.IGNORECASE
)
_THOUGHTS = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_CONCLUDES = re.compile(r"\banswer\s+is\b", re.IGNORECASE)

_ADVICE = (
    "An <experience></experience> block may follow the passages: advice from earlier, similar questions. Advice is no "
    "evidence: never quote it as a fact, and leave it aside when it does not fit."
)
READ = (
    "You answer a question with the help of passages, which may or may not hold the facts. Use them where they help, "
    f"and reply with only a brief answer in \\boxed{{}}. {_ADVICE}"
)
DRAFT = (
    "You answer a question with the help of passages, which may or may not hold the facts. Reason in a few sentences "
    f"that name the facts in full, then give the shortest complete answer in \\boxed{{}}. {_ADVICE}"
)
THINK = (
    "You work towards the answer to a question, one sentence at a time, with the help of passages. You see the "
    "sentences so far; write only the next one, which states one fact that leads on or names what has to be found out. "
    f'When the answer is certain, write "So the answer is: " and the answer instead. {_ADVICE}'
)
CONDENSE = (
    "Someone who works on a question has searched and found pages. From their reasoning so far and the query you see "
    "what they need. Write down, in a few plain sentences, the facts in the pages that help with it, and nothing that "
    'the pages do not say. If there are none, write "The pages hold nothing helpful."'
)


def direct(task: Task) -> Play:
    """The question alone."""
    reply = yield Ask(task.system(_tags("direct").instruction), task.question(), "answer")
    return task.final(reply)


def vanilla_rag(task: Task) -> Play:
    """One search with the question, one reply."""
    [found] = yield Look((task.query,), task.shown)
    reply = yield _reading(task, READ, found.documents, found.case)
    return task.final(reply)


def iter_retgen(task: Task) -> Play:
    """Search and reply in turns: each reply sees only the passages of its own search, for which the last one helps.

    Shao et al. 2023. Every reply stands in a context of its own.
    """
    parts, reply = [task.query], None
    for _ in range(task.cfg.iterations):
        if reply is not None:
            parts = [part for part in (task.with_query(reply.text), task.query) if part]
            if task.cfg.query_order == "question_first":
                parts.reverse()
        [found] = yield Look((" ".join(parts),), task.shown)
        reply = yield _reading(task, DRAFT, found.documents, found.case)
    assert reply is not None
    return task.final(reply)


def ircot(task: Task) -> Play:
    """Thoughts of a sentence, each of which is the next query, until one names the answer; then a reader answers.

    Trivedi et al. 2023: passages add up, and the reader sees them but not the thoughts. A thought that was had before
    would find nothing new, so it ends the chain as well.
    """
    seen, thoughts, known = _Gathered(task), [], set()
    seen.add((yield Look((task.query,), seen.shown))[0])
    for _ in range(task.cfg.thoughts):
        so_far: Pieces = [(Source.PROMPT, "\nSentences so far: ")] if thoughts else []
        so_far += [(Source.POLICY, neutralise(" ".join(thoughts)))] if thoughts else []
        user = [
            *task.evidence(seen.documents, seen.case),
            *task.question(),
            *so_far,
            (Source.PROMPT, "\nNext sentence:"),
        ]
        reply = yield Ask(task.system(THINK), user, "thought", task.cfg.thought_tokens)
        thought = first_sentence(reply.text)
        if not thought or normalise_query(thought) in known:
            break
        thoughts.append(thought)
        known.add(normalise_query(thought))
        query = task.with_query(thought)
        if not query or _CONCLUDES.search(thought):
            break
        seen.add((yield Look((query,), seen.shown))[0])
    reply = yield _reading(task, READ, seen.documents, seen.case)
    return task.final(reply)


def search_o1(task: Task) -> Play:
    """The agent of the search_o1 protocol, played as messages; an engine plays it in tokens (rollout.py)."""
    return _search_o1(task, is_condensed=False)


def search_o1_condensed(task: Task) -> Play:
    """Search-o1 with its Reason-in-Documents: another request condenses the pages before they enter the chain."""
    return _search_o1(task, is_condensed=True)


def _search_o1(task: Task, is_condensed: bool) -> Play:
    protocol, limits = _tags("search_o1"), task.limits
    stop, opening = protocol.stop, (protocol.query_tags or ("",))[0]
    queries: set[str] = set()
    shown, chain, searches, malformed = set(task.shown), Chain(task), 0, 0
    wanted = Ask(task.system(protocol.instruction), task.question(), "answer", 0, stop, opening, stays_open=True)
    for turn in range(1, limits.max_turns + 1):
        reply = yield wanted
        action = protocol.parse(reply.text)
        chain.add(Source.POLICY, reply.text)
        malformed += action.kind == "malformed"
        if action.kind == "answer":
            return Final(action.text, Status.ANSWERED)
        if reply.finish == "length" and action.kind == "malformed":
            return Final("", Status.TRUNCATED)
        if turn == limits.max_turns or malformed > limits.max_malformed:
            break
        query, documents, case, notice, most = action.text, (), "", "", 0
        if action.kind == "malformed":
            notice = MALFORMED
        elif searches >= limits.max_searches:
            notice = LIMIT
        elif normalise_query(query) in queries:
            notice = REPEATED
        else:
            [found] = yield Look((query,), frozenset(shown))
            searches, documents, case = searches + 1, found.documents, found.case
            queries.add(normalise_query(query))
            shown.update(found.case_ids)
            notice = "" if documents else NOTHING_FOUND
            if documents and is_condensed:
                said = spoken((yield _condensing(task, chain, query, documents)).text)
                documents, most = (Document("", said),) if said else (), task.cfg.condensed_tokens
        pieces = task.short(protocol.observation(documents, case, notice), most)
        for source, text in pieces:
            chain.add(source, text)
        wanted = More(pieces, stop, opening)
    return Final("", Status.OUT_OF_TURNS)


def _tags(name: str) -> TagProtocol:
    protocol = PROTOCOLS[name]
    assert isinstance(protocol, TagProtocol)
    return protocol


def _reading(task: Task, instruction: str, documents: Sequence[Document], case: str) -> Ask:
    return Ask(task.system(instruction), [*task.evidence(documents, case), *task.question()], "answer")


def _condensing(task: Task, chain: "Chain", query: str, documents: Sequence[Document]) -> Ask:
    user: Pieces = [(Source.PROMPT, "Reasoning so far:\n"), *chain.newest(), (Source.PROMPT, "\n\nQuery: ")]
    user += [(Source.POLICY, neutralise(query)), (Source.PROMPT, "\n\n"), *task.evidence(documents, "")]
    return Ask([(Source.PROMPT, CONDENSE)], [*task.question("\n\n"), *user], "condense", task.cfg.condensed_tokens)


class _Gathered:
    """Passages and cases of all searches, each once."""

    def __init__(self, task: Task) -> None:
        self._most, self.documents, self.shown = task.cfg.paragraphs, [], task.shown
        self._cases: list[str] = []

    @property
    def case(self) -> str:
        return "\n".join(self._cases)

    def add(self, found: Found) -> None:
        self.documents += [document for document in found.documents if document not in self.documents]
        del self.documents[self._most :]
        self.shown |= set(found.case_ids)
        self._cases += [found.case] if found.case else []


@dataclass
class Chain:
    """What the model wrote and what it was told of pages, for the request that condenses the next ones."""

    task: Task
    parts: Pieces = field(default_factory=list)

    def add(self, source: Source, text: str) -> None:
        if source in (Source.POLICY, Source.DOCUMENT):
            self.parts.append((source, neutralise(spoken(text))))

    def newest(self) -> Pieces:
        """The last parts that fit, a part too long by itself cut; a blank line between two."""
        room, kept = self.task.cfg.chain_tokens, []
        for source, text in reversed(self.parts):
            text = text if kept else cut(text, room, self.task.count)
            room -= self.task.count(text)
            if room < 0:
                break
            kept = [(source, text), *([(Source.PROMPT, "\n\n")] if kept else []), *kept]
        return kept


def spoken(text: str) -> str:
    """A reply without thoughts in <think>, closed or cut off."""
    return _THOUGHTS.sub("", text).strip()


def first_sentence(text: str) -> str:
    """The first sentence or line of a reply, without a label before it."""
    line = re.sub(r"^(?:next )?(?:thought|sentence)\s*:\s*", "", spoken(text), flags=re.IGNORECASE).partition("\n")[0]
    return line[: sentence_ends(line)[0]].strip() if line else ""


PIPELINES: dict[str, Callable[[Task], Play]] = {
    "direct": direct,
    "vanilla_rag": vanilla_rag,
    "iter_retgen": iter_retgen,
    "ircot": ircot,
    "search_o1": search_o1,
    "search_o1_condensed": search_o1_condensed,
}
