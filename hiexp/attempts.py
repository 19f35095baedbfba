"""What an agent did, in whatever shape it was logged, as the turns that a reflection reads.

A text, a chat and a list of steps each have a function here. Queries are known by the tags of the known protocols or as
tool calls; what comes back is no writing of the agent's and becomes the documents of the search before.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hiexp.data import DataError
from hiexp.metrics import boxes
from hiexp.protocols import PROTOCOLS, TagProtocol
from hiexp.trajectory import Document, Turn

QUERY_KEYS = ("query", "q", "search_query", "question", "input")
"""arguments of a tool call that are its query"""
HELP = "docs/experience.md shows the format"

_TAGGED = [one for one in PROTOCOLS.values() if isinstance(one, TagProtocol)]
_QUERIES = {one.query_tags: one.read_query for one in _TAGGED if one.query_tags}
_RESULTS = {one.result_tags for one in _TAGGED if one.result_tags[0]} | {("<tool_response>", "</tool_response>")}
_ANSWERS = {one.answer_tags for one in _TAGGED if one.answer_tags}
_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)
_LAST_LINE = re.compile(r"^(?:the )?(?:final )?answer(?: is)?\s*[:=]?\s*", re.IGNORECASE)


def turns_of_text(text: str) -> list[Turn]:
    """The turns of an attempt in one text: each ends with a search in the tags of a known protocol.

    The answer stands in the last turn: between answer tags, in a box, or else (in a text without any such tag) it is
    the last line.
    """
    marks = [
        (start, end, _Mark(content, read))
        for tags, read in _QUERIES.items()
        for start, end, content in _pairs(text, tags)
    ]
    marks += [(start, end, _Mark(content)) for tags in _RESULTS for start, end, content in _pairs(text, tags)]
    turns: list[Turn] = []
    at, said = 0, ""
    for start, end, mark in sorted(marks, key=lambda item: item[:2]):
        if start < at:  # inside the results: not the agent's
            continue
        if mark.read is None:
            said, at = said + text[at:start], end
            if turns:
                turns[-1] = _with_result(turns[-1], mark.content)
        elif query := mark.read(mark.content):
            turns.append(Turn((said + text[at:end]).strip(), "search", query))
            said, at = "", end
    rest = said + text[at:]
    if rest.strip():
        answer = _answer_of(rest, bool(marks))
        turns.append(Turn(rest.strip(), "answer" if answer else "malformed", answer))
    return turns


@dataclass(frozen=True)
class _Mark:
    content: str
    read: Callable[[str], str] | None = None
    """of a query; None: a result"""


def _pairs(text: str, tags: tuple[str, str]) -> list[tuple[int, int, str]]:
    """(start, end, content) of each complete pair; an opening tag that was given up for a later one does not count."""
    opening, closing = map(re.escape, tags)
    pattern = re.compile(f"{opening}((?:(?!{opening}).)*?){closing}", re.DOTALL)
    return [(found.start(), found.end(), found[1]) for found in pattern.finditer(text)]


def _answer_of(text: str, is_tagged: bool) -> str:
    tagged = [pair for tags in _ANSWERS for pair in _pairs(text, tags)]
    if tagged:
        return max(tagged)[2].strip()
    spoken = _THOUGHT.sub("", text)
    if boxed := boxes(spoken):
        return boxed[-1][1].strip()
    lines = [line.strip() for line in spoken.splitlines() if line.strip()]
    return _LAST_LINE.sub("", lines[-1].strip("*# ")).strip() if lines and not is_tagged else ""


def turns_of_messages(messages: Sequence[Mapping[str, Any]], where: str) -> list[Turn]:
    """A chat: what an assistant writes or calls, with what tools (or the user, who then speaks for one) reply."""
    turns: list[Turn] = []
    calls: dict[str, int] = {}
    for number, message in enumerate(messages, 1):
        role, text = message["role"], _content(message.get("content"), f"{where}: message {number}")
        if role == "assistant":
            said = turns_of_text(text)
            for call in message.get("tool_calls") or ():
                query = _called(call, f"{where}: message {number}")
                before = said.pop().text if said and said[-1].action != "search" else ""
                calls[str(call.get("id"))] = len(turns) + len(said)
                said.append(Turn(before, "search", query))
            turns += said
        elif role in ("tool", "function", "user") and turns:
            at = calls.get(str(message.get("tool_call_id")), len(turns) - 1)
            if turns[at].action == "search":
                found = [content for tags in _RESULTS for _, _, content in _pairs(text, tags)] or [text]
                for one in found:
                    turns[at] = _with_result(turns[at], one, as_text(message.get("name")))
            else:
                turns[at] = replace(turns[at], notice=text)
        elif role not in ("system", "developer", "user"):
            raise DataError(f"{where}: message {number} has role {role!r}; known: system, user, assistant, tool")
    last = len(turns) - 1
    return [
        replace(turn, action="malformed", argument="") if turn.action == "answer" and i < last else turn
        for i, turn in enumerate(turns)
    ]


def turns_of_steps(steps: Sequence[Mapping[str, Any]], where: str) -> list[Turn]:
    """Steps {text?, query?, documents?, answer?, notice?}; a turn of our own records is one too."""
    turns = []
    for number, step in enumerate(steps, 1):
        action, argument = as_text(step.get("action")), as_text(step.get("argument"))
        query = as_text(step.get("query")) or (argument if action == "search" else "")
        answer = as_text(step.get("answer")) or (argument if action == "answer" else "")
        text = as_text(step.get("text") or step.get("thought"))
        if not (text or query or answer):
            found = ", ".join(step) or "nothing"
            raise DataError(f"{where}: step {number} needs text, query or answer; it holds {found}; {HELP}")
        kind = "search" if query else "answer" if answer else "malformed"
        documents = _documents(step.get("documents"), f"{where}: step {number}")
        turns.append(Turn(text, kind, query or answer, documents, (), as_text(step.get("notice"))))
    return turns


def _documents(items: Any, where: str) -> tuple[Document, ...]:
    """Of a list of texts, [title, text] pairs, or {title?, text} objects (or one text)."""
    documents = []
    for item in [items] if isinstance(items, str) else items or ():
        if isinstance(item, dict):
            text = item.get("text", item.get("contents", item.get("content")))
            title = item.get("title") or ""
        else:
            title, text = item if isinstance(item, list) and len(item) == 2 else ("", item)
        if not isinstance(text, str) or not isinstance(title, str):
            raise DataError(f"{where}: a document is a text, [title, text] or {{title, text}}, got {item!r}; {HELP}")
        documents.append(Document(title.strip(), text.strip()))
    return tuple(documents)


def _with_result(turn: Turn, text: str, title: str = "") -> Turn:
    text = text.strip()
    return replace(turn, documents=(*turn.documents, Document(title, text))) if text else turn


def _content(content: Any, where: str) -> str:
    """Of a message: a text, nothing, or parts of which those with text count."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(isinstance(part, dict) and "text" in part for part in content):
        return "\n".join(as_text(part["text"]) for part in content)
    raise DataError(f"{where}: content must be a text or a list of {{type, text}} parts; write other parts as text")


def _called(call: Any, where: str) -> str:
    """What a tool was asked: its query, or else its arguments as they are."""
    function = call.get("function", call) if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return arguments.strip()
    if not isinstance(arguments, dict):
        raise DataError(f"{where}: a tool call needs function.arguments, as JSON; got {call!r}")
    query = first_of(arguments, QUERY_KEYS)
    return query.strip() if isinstance(query, str) else json.dumps(arguments, ensure_ascii=False)


def first_of(record: Mapping[str, Any], keys: Sequence[str]) -> Any:
    return next((record[key] for key in keys if record.get(key) is not None), None)


def as_text(value: Any) -> str:
    if value is None or isinstance(value, (dict, list, bool)):
        return ""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value).strip()
