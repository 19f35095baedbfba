"""What a protocol is, and the kind that most are: paired tags around queries, results and answers.

A protocol turns a question into the prompt, the text of one policy turn into an `Action`, and what the environment has
to say into its reply. Everything is labelled text, `(source, text)`, so that the rollout can record who wrote each
token. The instructions of our own protocols and the registry are in protocols.py, those of published agents in
peer_protocols.py.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Protocol

from hiexp.config import ConfigError
from hiexp.metrics import boxes
from hiexp.observations import neutralise
from hiexp.trajectory import Document, Source

Pieces = list[tuple[Source, str]]


@dataclass(frozen=True)
class Action:
    """What one turn of the policy asks for."""

    kind: Literal["search", "answer", "malformed"]
    text: str
    """the query or the answer, trimmed; empty when malformed"""
    end: int = 0
    """characters of the turn up to the end of the action; tokens that begin after it were never acted on"""
    more: tuple[str, ...] = ()
    """further queries of the same turn"""
    refused: str = ""
    """why the environment cannot do what a well-formed search asks for; shown to the policy in place of results"""

    @property
    def queries(self) -> tuple[str, ...]:
        """What is to be searched for."""
        return (self.text, *self.more) if self.kind == "search" and not self.refused else ()


@dataclass(frozen=True)
class Asked:
    """The turn that an observation replies to."""

    action: Action
    found: tuple[tuple[str, int], ...] = ()
    """(query, how many of the documents it brought) of each that was executed"""
    rest: str = ""
    """what the last token of the turn wrote beyond the action"""
    is_last: bool = False
    """one more turn, and no search after it"""


class AgentProtocol(Protocol):
    """Labelled text in, an `Action` out; no state, no tokenizer kept. Any text has a defined result: none raises."""

    @property
    def name(self) -> str: ...

    @property
    def searches(self) -> bool:
        """Whether a turn can ask for a search."""
        ...

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end a turn; the engine keeps the token that completes one."""
        ...

    @property
    def refuses_repeats(self) -> bool:
        """Whether a query that was searched before is answered by a notice instead of the same documents again."""
        ...

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Fields of RolloutConfig under which the protocol's agent was published; empty for our own."""
        ...

    @property
    def needs_original_prompt(self) -> bool:
        """It speaks for a published agent with an instruction that the agent was not trained on."""
        ...

    def prompt(self, question: str, strategy: str, tokenizer: Any) -> Pieces:
        """The opening of a trajectory; an empty strategy omits its block."""
        ...

    def parse(self, text: str) -> Action:
        """What the text of ONE policy turn asks for."""
        ...

    def answer(self, response: str) -> str | None:
        """The answer of a whole attempt: the text of all policy turns, without prompt and results. None: there is none;
        empty: one was given and it is empty.

        Equal to the answer of a rollout that ended with one.
        """
        ...

    def observation(self, documents: Sequence[Document], case: str, notice: str, asked: Asked | None = None) -> Pieces:
        """The environment's reply to a turn; each of the first three may be empty."""
        ...


class Span(NamedTuple):
    end: int
    content: str


_SLOT = "[[STRATEGY SLOT]]"
CHATML_REPLY = "<|im_start|>assistant\n"
END_OF_TURN = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>")
"""Tokens that end a turn in the chat templates of Qwen and Llama."""


@dataclass(frozen=True)
class TagProtocol:
    """A protocol of paired tags, for queries, results and either answers or `\\boxed{}`.

    One rule decides what a turn asks for: the complete pair that closes first. Where that is an answer and further
    complete answers follow before any query, the last of them counts. A pair inside `<think>` counts as well (the stop
    string ends the turn there), except a box, which no stop string ends.
    """

    name: str
    instruction: str
    query_tags: tuple[str, str] | None
    result_tags: tuple[str, str] = ("", "")
    answer_tags: tuple[str, str] | None = None
    """None: the answer stands in a balanced `\\boxed{}`"""
    read_query: Callable[[str], str] = str.strip
    before: str = "\n"
    after: str = ""
    """what stands before and after every observation: the chat template's turn change, where there is one"""
    use_titles: bool = True
    use_chat: bool = True
    """render through the tokenizer's chat template, where there is one; False: plain text for the model to continue"""
    refuses_repeats: bool = True

    @property
    def searches(self) -> bool:
        return self.query_tags is not None

    @property
    def defaults(self) -> Mapping[str, Any]:
        return {}

    @property
    def needs_original_prompt(self) -> bool:
        return False

    @property
    def stop(self) -> tuple[str, ...]:
        return tuple(pair[1] for pair in (self.query_tags, self.answer_tags) if pair)

    def prompt(self, question: str, strategy: str, tokenizer: Any) -> Pieces:
        """The opening pieces; ConfigError when the tokenizer's chat template does not fit the protocol."""
        question, strategy = neutralise(question).strip(), neutralise(strategy).strip()
        if not self.instruction:
            return [*_strategy_block(strategy, "", "\n"), (Source.PROMPT, f"question : {question}\n")]
        slot = f"{self.instruction}{_SLOT}"
        if self.use_chat and getattr(tokenizer, "chat_template", None):
            text = _render(tokenizer, slot, question)
        else:
            text = f"{slot}\n\nQuestion: {question}\n"
        if self.before.startswith("<|im_end|>") and not text.endswith(CHATML_REPLY):
            raise ConfigError(
                f"protocol {self.name} needs a tokenizer with a ChatML template; use search_r1 for this model"
            )
        head, _, tail = text.partition(_SLOT)  # the slot comes before the question, so a question cannot forge it
        if not strategy:
            return [(Source.PROMPT, head + tail)]
        (_, opening), experience, (_, closing) = _strategy_block(strategy, "\n\n", "")
        return [(Source.PROMPT, head + opening), experience, (Source.PROMPT, closing + tail)]

    def parse(self, text: str) -> Action:
        text = text if isinstance(text, str) else ""
        queries = pairs(text, self.query_tags) if self.query_tags else []
        answers = pairs(text, self.answer_tags) if self.answer_tags else _boxes(text)
        first_query = queries[0].end if queries else len(text) + 1
        answers = [answer for answer in answers if answer.end < first_query]
        if answers:
            ends_here = bool(self.answer_tags) or bool(queries)
            return Action("answer", answers[-1].content.strip(), answers[-1].end if ends_here else len(text))
        if not queries:
            return Action("malformed", "", len(text))
        query = self.read_query(queries[0].content)
        return Action("search" if query else "malformed", query, queries[0].end)

    def answer(self, response: str) -> str | None:
        """That of the last turn with a complete answer; see AgentProtocol."""
        answers = answers_of(self, response)
        return answers[-1] if answers else None

    def observation(self, documents: Sequence[Document], case: str, notice: str, asked: Asked | None = None) -> Pieces:
        pieces: Pieces = [(Source.NOTICE, self.before)]
        if documents:
            opening, closing = (f"{tag}\n" if tag else "" for tag in self.result_tags)
            pieces.append((Source.NOTICE, opening))
            for document in documents:
                pieces += [(Source.DOCUMENT, self._line(document)), (Source.NOTICE, "\n")]
            pieces.append((Source.NOTICE, closing))
        if case:
            pieces += [(Source.NOTICE, "<experience>\n"), (Source.EXPERIENCE, neutralise(case).strip())]
            pieces.append((Source.NOTICE, "\n</experience>\n"))
        if notice:
            pieces.append((Source.NOTICE, f"<notice>\n{notice}\n</notice>\n"))
        return merge([*pieces, (Source.NOTICE, self.after)])

    def _line(self, document: Document) -> str:
        title = document.title if self.use_titles else ""
        # neutralised after joining, so that a tag split over title and text is caught as well
        return neutralise(" ".join(f"{title}: {document.text}".split() if title else document.text.split()))


def _strategy_block(strategy: str, before: str, after: str) -> Pieces:
    if not strategy:
        return []
    opening, closing = f"{before}<strategy>\n", f"\n</strategy>{after}"
    return [(Source.PROMPT, opening), (Source.EXPERIENCE, strategy), (Source.PROMPT, closing)]


def _render(tokenizer: Any, instruction: str, question: str) -> str:
    """The chat template as text; the instruction opens the user turn where a template knows no system role."""
    from jinja2 import TemplateError  # a dependency of chat templates alone

    messages = [{"role": "system", "content": instruction}, {"role": "user", "content": question}]
    options = {"tokenize": False, "add_generation_prompt": True}
    try:
        text = tokenizer.apply_chat_template(messages, **options)
    except TemplateError:
        text = ""
    if _SLOT not in text:
        content = f"{instruction}\n\nQuestion: {question}"
        text = tokenizer.apply_chat_template([{"role": "user", "content": content}], **options)
    if _SLOT not in text:
        raise ConfigError("the tokenizer's chat template drops the instruction; set another model or template")
    return text


def merge(pieces: Pieces) -> Pieces:
    """Neighbours of one source joined, empty text dropped: fewer cuts, so tokens stay natural."""
    merged: Pieces = []
    for source, text in pieces:
        if merged and merged[-1][0] is source:
            merged[-1] = (source, merged[-1][1] + text)
        elif text:
            merged.append((source, text))
    return merged


def pairs(text: str, tags: tuple[str, str]) -> list[Span]:
    """Complete pairs in order; an opening tag that was given up for a later one does not count."""
    spans, start = [], 0
    opening, closing = tags
    while (close := text.find(closing, start)) >= 0:
        opened = text.rfind(opening, start, close)
        if opened >= 0:
            spans.append(Span(close + len(closing), text[opened + len(opening) : close]))
        start = close + len(closing)
    return spans


def _boxes(text: str) -> list[Span]:
    """Every complete box outside closed thoughts, in order."""
    parts, end = [], 0
    while (start := text.find("<think>", end)) >= 0 and (close := text.find("</think>", start)) >= 0:
        before, end = text[end:start], close + len("</think>")
        parts += [before, " " * (end - start)]
    return [Span(place, content) for place, content in boxes("".join([*parts, text[end:]]))]


def turns_of(response: str, stop: Sequence[str]) -> list[str]:
    """The policy's turns in the text of all of them: each ends with a stop string or a token that ends turns."""
    response = response if isinstance(response, str) else ""
    ends = re.compile("|".join(re.escape(mark) for mark in (*stop, *END_OF_TURN)))
    cuts = [0, *(found.end() for found in ends.finditer(response)), len(response)]
    return [response[start:end] for start, end in pairwise(cuts) if start < end]


def answers_of(protocol: AgentProtocol, response: str) -> list[str]:
    """The answers of the turns that give one, in order."""
    actions = map(protocol.parse, turns_of(response, protocol.stop))
    return [action.text for action in actions if action.kind == "answer"]


def normalise_query(query: str) -> str:
    """Equal for queries that differ in case, spacing or punctuation only."""
    return " ".join(re.findall(r"\w+", query.casefold())) or query.strip()
