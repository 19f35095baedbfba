"""The kind of protocol that a published agent speaks: every string between policy and environment is data here.

What a document, a query or an experience holds is made inert as everywhere. A policy's tokens are never rendered again,
so what it wrote stays as it was sampled. The agents themselves are in peer_protocols.py.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hiexp.config import ConfigError
from hiexp.observations import neutralise
from hiexp.prompt_files import PromptText, fill, today
from hiexp.tag_protocol import (
    CHATML_REPLY,
    END_OF_TURN,
    Action,
    Asked,
    Pieces,
    answers_of,
    merge,
    pairs,
)
from hiexp.trajectory import Document, Source

_SLOT = "<strategy slot>"  # a question cannot hold it, for tags in it are neutralised
_ENDS = re.compile(rf"(?:{'|'.join(map(re.escape, END_OF_TURN))})\s*\Z")

Queries = tuple[tuple[str, ...], str]
"""What a query pair asks for, and why it cannot be done; both empty: it is no query."""


@dataclass(frozen=True)
class PeerProtocol:
    """Like TagProtocol, with every string between the policy and the environment as one published agent has it."""

    name: str
    prompt_text: PromptText
    query_tags: tuple[str, str]
    stop: tuple[str, ...]
    opening: str
    """of an observation, the result tag included"""
    closing: str
    line: Callable[[int, Document], str]
    """(number from 1, document) -> how it is shown"""
    read_query: Callable[[str], Queries]
    answer_tags: tuple[str, str] = ("<answer>", "</answer>")
    read_answer: Callable[[str], str] = str.strip
    takes_first: bool = False
    """of several answers the first counts, else the last"""
    between: str = "\n"
    ending: str = ""
    """after the last document"""
    nothing: str = ""
    """in place of documents, where a search found none"""
    complaint: str = ""
    """the whole reply to a turn that asked for nothing; empty: the notice, where results would stand"""
    last_call: str = ""
    """added to the reply before the last turn"""
    experience: tuple[str, str] = ("<experience>\n", "\n</experience>\n\n")
    after: str = ""
    """at the end of every reply"""
    form: Literal["chat", "raw"] = "chat"
    """messages for the chat template, or one text for the model to continue"""
    prefix: str = ""
    """how the model's reply begins"""
    wants_mark: bool = False
    """a question ends with a question mark, added where it is missing"""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    needs_original_prompt: bool = True
    date: str = field(default_factory=today)
    searches: bool = True
    refuses_repeats: bool = False

    def speaking(self, text: PromptText, date: str, is_original: bool) -> "PeerProtocol":
        return replace(self, prompt_text=text, date=date, needs_original_prompt=not is_original)

    def prompt(self, question: str, strategy: str, tokenizer: Any) -> Pieces:
        """The opening pieces; ConfigError when the tokenizer's chat template does not fit the protocol.

        The strategy stands where {strategy} is; in an instruction without that field, right before the question.
        """
        question, strategy = neutralise(question).strip(), neutralise(strategy).strip()
        if self.wants_mark and not question.endswith("?"):
            question += "?"
        has_place, slot = "strategy" in self.prompt_text.fields, _SLOT if strategy else ""
        values = {"question": question if has_place else slot + question, "strategy": slot, "date": self.date}
        text = self._render(tokenizer, fill(self.prompt_text.system, values), fill(self.prompt_text.user, values))
        if not strategy:
            return [(Source.PROMPT, text)]
        opening, closing = ("\n\n<strategy>\n", "\n</strategy>") if has_place else ("<strategy>\n", "\n</strategy>\n")
        head, _, tail = text.partition(_SLOT)
        tail = closing + tail.replace(_SLOT, "")
        return [(Source.PROMPT, head + opening), (Source.EXPERIENCE, strategy), (Source.PROMPT, tail)]

    def _render(self, tokenizer: Any, system: str, user: str) -> str:
        whole = f"{system}\n\n{user}" if system else user
        is_chatml = self.opening.startswith(END_OF_TURN[0])
        text = whole
        if self.form == "chat" and getattr(tokenizer, "chat_template", None):
            text = self._render_chat(tokenizer, system, user, whole)
        if is_chatml and not text.endswith(CHATML_REPLY):
            raise ConfigError(f"protocol {self.name} needs a tokenizer with a ChatML template, as Qwen's models have")
        return text + self.prefix

    def _render_chat(self, tokenizer: Any, system: str, user: str, whole: str) -> str:
        """As messages; the instruction opens the user's where a template knows no system role."""
        from jinja2 import TemplateError  # a dependency of chat templates alone

        options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
        if self.prompt_text.tools:
            options["tools"] = [dict(tool) for tool in self.prompt_text.tools]
        messages = [{"role": "system", "content": system}] if system else []
        try:
            text = tokenizer.apply_chat_template([*messages, {"role": "user", "content": user}], **options)
        except TemplateError:
            text = ""
        if not all(part.strip() in text for part in (system, user)):  # a template may trim
            text = tokenizer.apply_chat_template([{"role": "user", "content": whole}], **options)
        if not all(part.strip() in text for part in (system, user)):
            raise ConfigError("the tokenizer's chat template drops the instruction; set another model or template")
        return text

    def parse(self, text: str) -> Action:
        """The complete pair that closes first decides, as in TagProtocol."""
        text = text if isinstance(text, str) else ""
        queries = pairs(text, self.query_tags)
        first_query = queries[0].end if queries else len(text) + 1
        answers = [answer for answer in pairs(text, self.answer_tags) if answer.end < first_query]
        if answers:
            answer = answers[0 if self.takes_first else -1]
            ends_here = bool(queries) or self.answer_tags[1] in self.stop
            return Action("answer", self.read_answer(answer.content), answer.end if ends_here else len(text))
        if not queries:
            # what the policy closed goes on with the complaint, so the token that closed it is left out
            closed = _ENDS.search(text) if self.complaint else None
            return Action("malformed", "", closed.start() if closed else len(text))
        asked, refused = self.read_query(queries[0].content)
        if not asked and not refused:
            return Action("malformed", "", queries[0].end)
        return Action("search", asked[0] if asked else "", queries[0].end, asked[1:], refused)

    def answer(self, response: str) -> str | None:
        """That of the first or of the last turn with a complete answer (`takes_first`); see AgentProtocol."""
        answers = answers_of(self, response)
        return answers[0 if self.takes_first else -1] if answers else None

    def observation(self, documents: Sequence[Document], case: str, notice: str, asked: Asked | None = None) -> Pieces:
        if asked is None:
            asked = Asked(Action("search", ""), (("", len(documents)),) if documents else ())
        rest = asked.rest if not asked.rest.strip() else ""  # line breaks that the policy wrote itself
        if asked.action.kind == "malformed" and self.complaint:
            pieces: Pieces = [(Source.NOTICE, self.complaint.removeprefix(rest))]
        else:
            shown = self._results(documents, asked) if asked.found else [(Source.NOTICE, notice)]
            pieces = [(Source.NOTICE, self.opening.removeprefix(rest)), *shown, (Source.NOTICE, self.closing)]
        if case:
            before, after = self.experience
            lines = (Source.EXPERIENCE, neutralise(case).strip())
            pieces += [(Source.NOTICE, before), lines, (Source.NOTICE, after)]
        if asked.is_last:
            pieces.append((Source.NOTICE, self.last_call))
        return merge([*pieces, (Source.NOTICE, self.after)])

    def _results(self, documents: Sequence[Document], asked: Asked) -> Pieces:
        if not documents:
            return [(Source.NOTICE, self.nothing)]
        pieces: Pieces = []
        for number, document in enumerate(documents, 1):
            # neutralised after joining, so that a tag split over title and text is caught as well
            shown = (Source.DOCUMENT, neutralise(self.line(number, document)))
            pieces += [(Source.NOTICE, self.between if number > 1 else ""), shown]
        return [*pieces, (Source.NOTICE, self.ending)]
