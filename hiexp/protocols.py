"""How an agent talks: the prompt, the stop strings, what a turn asks for, and how the environment replies.

Everything is labelled text, `(source, text)`, so that the rollout can record who wrote each token. The parser reads the
text of one policy turn and nothing else. To add a protocol: an instance of `TagProtocol` (or any class with the same
four members) in the dict at the bottom; its instruction and its parser then sit in this one file.

Worked example (compact): the policy wrote `<search> capital of Norway </search>`, the environment replies

    NOTICE "\\n<information>\\n"   DOCUMENT "oslo is the capital of norway"   NOTICE "\\n</information>\\n"
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


class AgentProtocol(Protocol):
    """Labelled text in, an `Action` out; no state, no tokenizer kept."""

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

    def prompt(self, question: str, strategy: str, tokenizer: Any) -> Pieces:
        """The opening of a trajectory; an empty strategy omits its block."""
        ...

    def parse(self, text: str) -> Action:
        """What the text of ONE policy turn asks for."""
        ...

    def observation(self, documents: Sequence[Document], case: str, notice: str) -> Pieces:
        """The environment's reply to a turn; each of the three may be empty."""
        ...


class _Span(NamedTuple):
    end: int
    content: str


_THINK = re.compile(r"<think>.*?</think>", re.DOTALL)
_SLOT = "[[STRATEGY SLOT]]"
_CHATML_REPLY = "<|im_start|>assistant\n"


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

    @property
    def searches(self) -> bool:
        return self.query_tags is not None

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
        if self.before.startswith("<|im_end|>") and not text.endswith(_CHATML_REPLY):
            raise ConfigError(
                f"protocol {self.name} needs a tokenizer with a ChatML template; use search_r1 for this model"
            )
        head, _, tail = text.partition(_SLOT)  # the slot comes before the question, so a question cannot forge it
        if not strategy:
            return [(Source.PROMPT, head + tail)]
        (_, opening), experience, (_, closing) = _strategy_block(strategy, "\n\n", "")
        return [(Source.PROMPT, head + opening), experience, (Source.PROMPT, closing + tail)]

    def parse(self, text: str) -> Action:
        queries = _pairs(text, self.query_tags) if self.query_tags else []
        answers = _pairs(text, self.answer_tags) if self.answer_tags else _boxes(text)
        first_query = queries[0].end if queries else len(text) + 1
        answers = [answer for answer in answers if answer.end < first_query]
        if answers:
            ends_here = bool(self.answer_tags) or bool(queries)
            return Action("answer", answers[-1].content.strip(), answers[-1].end if ends_here else len(text))
        if not queries:
            return Action("malformed", "", len(text))
        query = self.read_query(queries[0].content)
        return Action("search" if query else "malformed", query, queries[0].end)

    def observation(self, documents: Sequence[Document], case: str, notice: str) -> Pieces:
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
        return _merge([*pieces, (Source.NOTICE, self.after)])

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


def _merge(pieces: Pieces) -> Pieces:
    """Neighbours of one source joined, empty text dropped: fewer cuts, so tokens stay natural."""
    merged: Pieces = []
    for source, text in pieces:
        if merged and merged[-1][0] is source:
            merged[-1] = (source, merged[-1][1] + text)
        elif text:
            merged.append((source, text))
    return merged


def _pairs(text: str, tags: tuple[str, str]) -> list[_Span]:
    """Complete pairs in order; an opening tag that was given up for a later one does not count."""
    spans, start = [], 0
    opening, closing = tags
    while (close := text.find(closing, start)) >= 0:
        opened = text.rfind(opening, start, close)
        if opened >= 0:
            spans.append(_Span(close + len(closing), text[opened + len(opening) : close]))
        start = close + len(closing)
    return spans


def _boxes(text: str) -> list[_Span]:
    """Every complete box outside closed thoughts, in order."""
    return [_Span(end, content) for end, content in boxes(_THINK.sub(lambda thought: " " * len(thought[0]), text))]


def _tool_query(content: str) -> str:
    """`{"name": "search", "arguments": {"query": "..."}}` -> the query; anything else -> empty."""
    try:
        call = json.loads(content)
    except (ValueError, RecursionError):
        return ""
    arguments = call.get("arguments") if isinstance(call, dict) and call.get("name") == "search" else None
    query = arguments.get("query") if isinstance(arguments, dict) else None
    return query.strip() if isinstance(query, str) else ""


_ADVICE = (
    "A result may also hold an <experience></experience> block: advice from earlier, similar situations. Advice is not "
    "evidence: never quote it as a fact, and leave it aside when it does not fit. Stop searching as soon as the facts "
    "suffice."
)
_QWEN_TOOL = (
    "You answer questions by reasoning and, where facts are missing, by searching. Think inside <think></think> first. "
    "To search, write one <tool_call></tool_call> that holds a JSON object with `name` set to `search` and "
    "`arguments.query` set to a short query about one fact that can be understood on its own, for example\n"
    '<tool_call>{"name": "search", "arguments": {"query": "..."}}</tool_call>\n'
    f"The result comes back in <tool_response></tool_response>. {_ADVICE} Finish with the shortest complete answer in "
    "\\boxed{}."
)
_SEARCH_O1 = (
    "You answer questions by reasoning and, where facts are missing, by searching. To search, write a short query "
    "about one fact between <|begin_search_query|> and <|end_search_query|>. The result comes back between "
    f"<|begin_search_result|> and <|end_search_result|>. {_ADVICE} Finish with the shortest complete answer in "
    "\\boxed{}."
)
_SEARCH_R1 = (
    "You answer questions by reasoning and, where facts are missing, by searching. Think inside <think></think> first. "
    "To search, write a short query about one fact inside <search></search>. The result comes back in "
    f"<information></information>. {_ADVICE} Finish with the shortest complete answer inside <answer></answer>."
)
_FEW_SHOT = """\
Look facts up, one at a time: write <search> what to look up </search> and passages come back. Then write <answer> the \
shortest answer </answer>. Advice between <experience> and </experience> is no evidence.

Question: In which country was the author of Peer Gynt born?
<search> author of Peer Gynt </search>
<information>
Peer Gynt: Peer Gynt is a play by Henrik Ibsen.
</information>
<search> birthplace of Henrik Ibsen </search>
<information>
Henrik Ibsen: Ibsen was born in Skien, Norway.
</information>
<answer> Norway </answer>

Question: Who is older, the painter of Guernica or the composer of Bolero?
<search> painter of Guernica </search>
<information>
Guernica: a painting by Pablo Picasso, born 1881.
</information>
<search> composer of Bolero </search>
<information>
Bolero: an orchestral work by Maurice Ravel, born 1875.
</information>
<answer> Maurice Ravel </answer>"""
_FEW_SHOT_DIRECT = """\
Give the shortest answer to each question.

Question: In which country was the author of Peer Gynt born?
<answer> Norway </answer>

Question: Who is older, the painter of Guernica or the composer of Bolero?
<answer> Maurice Ravel </answer>"""
_DIRECT = "Answer the question. Think step by step, then give the shortest complete answer in \\boxed{}."

PROTOCOLS: dict[str, AgentProtocol] = {
    "qwen_tool": TagProtocol(
        name="qwen_tool",
        instruction=_QWEN_TOOL,
        query_tags=("<tool_call>", "</tool_call>"),
        read_query=_tool_query,
        before="<|im_end|>\n<|im_start|>user\n<tool_response>\n",
        after=f"</tool_response><|im_end|>\n{_CHATML_REPLY}",
    ),
    "search_o1": TagProtocol(
        name="search_o1",
        instruction=_SEARCH_O1,
        query_tags=("<|begin_search_query|>", "<|end_search_query|>"),
        result_tags=("<|begin_search_result|>", "<|end_search_result|>"),
    ),
    "search_r1": TagProtocol(
        name="search_r1",
        instruction=_SEARCH_R1,
        query_tags=("<search>", "</search>"),
        result_tags=("<information>", "</information>"),
        answer_tags=("<answer>", "</answer>"),
    ),
    # for models too small to follow an instruction: worked examples as plain text, with search and without
    "few_shot": TagProtocol(
        name="few_shot",
        instruction=_FEW_SHOT,
        query_tags=("<search>", "</search>"),
        result_tags=("<information>", "</information>"),
        answer_tags=("<answer>", "</answer>"),
        use_chat=False,
    ),
    "few_shot_direct": TagProtocol(
        name="few_shot_direct",
        instruction=_FEW_SHOT_DIRECT,
        query_tags=None,
        answer_tags=("<answer>", "</answer>"),
        use_chat=False,
    ),
    # for tiny word-level models: no instruction, no titles, every token between spaces
    "compact": TagProtocol(
        name="compact",
        instruction="",
        query_tags=("<search>", "</search>"),
        result_tags=("<information>", "</information>"),
        answer_tags=("<answer>", "</answer>"),
        use_titles=False,
    ),
    "direct": TagProtocol(name="direct", instruction=_DIRECT, query_tags=None),
}
