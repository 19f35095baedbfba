r"""The protocols of published search agents, for their checkpoints: tags, line breaks and limits are theirs.

Search-R1, StepSearch, ReSearch, R1-Searcher and DeepResearcher, as their repositories have them (docs/peers.md names
the files, and what is unsure). Only the sentences are ours: an instruction in our words stands in for the original,
which a user gives as a text file (prompt_files.py).

Worked example (search_r1_original): the policy wrote `<search> capital of Norway </search>`, the environment replies

    NOTICE "\n\n<information>"   DOCUMENT "Doc 1(Title: \"Oslo\") Oslo is ..."   NOTICE "</information>\n\n"
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from hiexp.metrics import boxes
from hiexp.observations import neutralise
from hiexp.peer_form import PeerProtocol, Queries
from hiexp.prompt_files import PromptText
from hiexp.tag_protocol import CHATML_REPLY, Asked, Pieces
from hiexp.trajectory import Document, Source

NO_QUERY = "the query was empty"
NO_PAGES = "pages cannot be opened here so work with what the searches return"
MOST_QUERIES = 3
"""of one tool call of DeepResearcher; its handler drops the others"""


class DeepResearcherProtocol(PeerProtocol):
    """Results are a list with an entry for each query, in Python's notation: its chat template prints them so."""

    def _results(self, documents: Sequence[Document], asked: Asked) -> Pieces:
        pieces: Pieces = [(Source.NOTICE, "[")]
        rest = iter(documents)
        for place, (query, count) in enumerate(asked.found):
            head = f"{{'search_query': {neutralise(query)!r}, 'web_page_info_list': ["
            pieces.append((Source.NOTICE, f"{', ' if place else ''}{head}"))
            for number in range(count):
                title, text = _plain(next(rest))
                quoted = repr(text)  # its last quote is ours, so that a document that is cut stays quoted
                shown = f"{{'title': {title!r}, 'url': '', 'quick_summary': {quoted[:-1]}"
                pieces += [(Source.NOTICE, ", " if number else ""), (Source.DOCUMENT, neutralise(shown))]
                pieces.append((Source.NOTICE, f"{quoted[-1]}}}"))
            pieces.append((Source.NOTICE, "]}"))
        return [*pieces, (Source.NOTICE, "]")]


def _limits(**fields: int) -> Mapping[str, Any]:
    return MappingProxyType(fields)


def _plain(document: Document) -> tuple[str, str]:
    return " ".join(document.title.split()), " ".join(document.text.split())


def _quoted(document: Document) -> tuple[str, str]:
    """Title and text as the wiki-18 passages that these agents read have them: the title in quotes."""
    title, text = _plain(document)
    return f'"{title}"' if title else "", text


def _search_r1_line(number: int, document: Document) -> str:
    title, text = _quoted(document)
    return f"Doc {number}(Title: {title}) {text}"


def _stepsearch_line(number: int, document: Document) -> str:
    title, text = _quoted(document)
    return f"Doc {number}<## Title: {title} ##> {text}"


def _contents(number: int, document: Document) -> str:
    return "\n".join(part for part in _quoted(document) if part)


def _r1_searcher_line(number: int, document: Document) -> str:
    title, text = _plain(document)
    return f"({number})Title: {title} Text: {text}" if title else f"({number}){text}"


def _one_query(content: str, refused: str = NO_QUERY) -> Queries:
    query = content.strip()
    return ((query,), "") if query else ((), refused)


def _keywords(content: str) -> Queries:
    """R1-Searcher's: without quotation marks and dots of omission; an empty query is none."""
    query = content.replace('"', "").replace("'", "").replace("\t", " ").replace("...", "").strip()
    return ((query,) if query else ()), ""


def _tool_call(content: str) -> Queries:
    """`{"name": "web_search", "arguments": {"query": ["...", "..."]}}`, or browse_webpage with a url_list."""
    try:
        call = json.loads(content)
    except (ValueError, RecursionError):
        return (), ""
    arguments = call.get("arguments") if isinstance(call, dict) else None
    if not isinstance(arguments, dict):
        return (), ""
    queries, pages = arguments.get("query"), arguments.get("url_list")
    if call.get("name") == "web_search" and isinstance(queries, list):
        asked = (query.strip() for query in queries[:MOST_QUERIES] if isinstance(query, str))
        found = tuple(query for query in asked if query)
        return found, "" if found else NO_QUERY
    return (), NO_PAGES if call.get("name") == "browse_webpage" and isinstance(pages, list) and pages else ""


def _boxed(content: str) -> str:
    """The last complete box in an answer; an answer without one is empty."""
    found = boxes(content)
    return found[-1][1] if found else ""


_SEARCH_R1 = """\
Work out the answer to the question at the end. Whenever you have learned something, reason about it inside <think> \
and </think> before you do anything else. When a fact is missing, write <search> what to look for </search>; the best \
passages come back between <information> and </information>. Search as often as it takes. When nothing is missing, \
finish with the bare answer between <answer> and </answer>, such as <answer> Lisbon </answer>.{strategy}
Question: {question}
"""
_STEPSEARCH = """\
Research the question at the end with a search tool.
Begin with a plan inside <plan> and </plan>, and plan anew after each look at results. To search, write <search> a few \
keywords </search>; the results come back between <information> and </information>. Then go through every document \
inside <observation> and </observation>. When the facts suffice, finish with the bare answer between <answer> and \
</answer>, such as <answer> Lisbon </answer>.{strategy}
Question: {question}
"""
_RESEARCH = (
    "Reason step by step inside <think> and </think>. When a fact is missing, look it up in Wikipedia: write <search> "
    "what to look for </search>, and what is found follows between <result> and </result>. Reason again after each "
    "result. Finish with the answer between <answer> and </answer>, its final form in a box, such as <answer> The city "
    "is \\[ \\boxed{{Lisbon}} \\] </answer>.{strategy}"
)
_R1_SEARCHER = (
    "First reason inside <think> and </think>, then give the bare answer inside <answer> and </answer>. While "
    "reasoning, look up what is uncertain: write <|begin_of_query|> a few keywords about one fact <|end_of_query|>, "
    "and documents follow between <|begin_of_documents|> and <|end_of_documents|>.{strategy}"
)
_DEEPRESEARCHER = """\
The date is {date}. You are a research assistant with a search tool, and the question needs several searches.
Reply in one of two forms. Either reason and search:
<think>
what is known and what to look up next
</think>
<tool_call>
{"name": "web_search", "arguments": {"query": ["one query", "another query"]}}
</tool_call>
or, when the facts suffice, reason and answer with as few words as possible (yes or no where that is asked):
<think>
why the facts suffice
</think>
<answer>
the answer
</answer>{strategy}"""
_WEB_SEARCH: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "web_search",
        "description": "Finds passages for each of up to three queries.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "array", "items": {"type": "string"}, "description": "short queries"}},
            "required": ["query"],
        },
    },
}

_search_r1 = PeerProtocol(
    name="search_r1_original",
    prompt_text=PromptText(_SEARCH_R1),
    query_tags=("<search>", "</search>"),
    stop=("</search>", "</answer>"),
    opening="\n\n<information>",
    closing="</information>\n\n",
    line=_search_r1_line,
    read_query=_one_query,
    complaint=(
        "\nI wrote neither a complete query nor a complete answer. A query stands between <search> and </search>, the "
        "final answer between <answer> and </answer>.\n"
    ),
    wants_mark=True,
    defaults=_limits(
        top_k=3, max_turns=5, max_searches=4, max_malformed=5, max_turn_tokens=500, max_document_tokens=500
    ),
)
_stepsearch = replace(
    _search_r1,
    name="stepsearch",
    prompt_text=PromptText(_STEPSEARCH),
    opening="\n\n<information> ",
    closing=" </information>\n\n",
    line=_stepsearch_line,
    complaint=(
        "\n<warning> I wrote neither a complete query nor a complete answer. A query stands between <search> and "
        "</search>, the final answer between <answer> and </answer>. </warning>\n"
    ),
    last_call="<warning> No search is left, so I answer with what I have found. </warning>\n\n",
    defaults=_limits(
        top_k=3, max_turns=6, max_searches=5, max_malformed=6, max_turn_tokens=800, max_document_tokens=800
    ),
)
_research = PeerProtocol(
    name="research",
    prompt_text=PromptText("{question}", _RESEARCH),
    query_tags=("<search>", "</search>"),
    stop=("</search>",),
    opening=" <result>\n",
    closing="\n</result>",
    line=_contents,
    read_query=partial(_one_query, refused="nothing to search"),
    read_answer=_boxed,
    takes_first=True,
    between="\n\n",
    experience=("\n<experience>\n", "\n</experience>"),
    defaults=_limits(
        top_k=5,
        max_turns=100,
        max_searches=100,
        max_malformed=0,
        max_turn_tokens=8192,
        max_response_tokens=8192,
        max_document_tokens=8192,
    ),
)
_r1_searcher = PeerProtocol(
    name="r1_searcher",
    prompt_text=PromptText(f"{_R1_SEARCHER}\n\nUser:{{question}}\nAssistant: <think>"),
    query_tags=("<|begin_of_query|>", "<|end_of_query|>"),
    stop=("<|end_of_query|>", "</answer>", "<|im_end|>", "<|endoftext|>"),
    opening="\n\n<|begin_of_documents|>\n",
    closing="<|end_of_documents|>\n\n",
    line=_r1_searcher_line,
    read_query=_keywords,
    ending="\n",
    nothing="None",
    form="raw",
    defaults=_limits(
        top_k=5,
        max_turns=9,
        max_searches=9,
        max_malformed=0,
        max_turn_tokens=512,
        max_response_tokens=29000,
        max_document_tokens=4096,
    ),
)
_deepresearcher = DeepResearcherProtocol(
    name="deepresearcher",
    prompt_text=PromptText("{question}", _DEEPRESEARCHER, (_WEB_SEARCH,)),
    query_tags=("<tool_call>", "</tool_call>"),
    stop=("</tool_call>", "</answer>"),
    opening="<|im_end|>\n<|im_start|>user\n<tool_response>\n",
    closing="",
    line=_contents,
    read_query=_tool_call,
    takes_first=True,
    experience=("\n<experience>\n", "\n</experience>"),
    after=f"\n</tool_response><|im_end|>\n{CHATML_REPLY}<think>",
    prefix="<think>",
    defaults=_limits(
        top_k=10,
        max_turns=10,
        max_searches=30,
        max_malformed=0,
        max_turn_tokens=2000,
        max_response_tokens=30767,
        max_document_tokens=2000,
    ),
)
PEERS: dict[str, PeerProtocol] = {
    "search_r1_original": _search_r1,
    "stepsearch": _stepsearch,
    "research": _research,
    # the checkpoint that was trained from a base model: the same as one text
    "research_base": replace(
        _research,
        name="research_base",
        prompt_text=PromptText(f"{_RESEARCH} User: {{question}}. Assistant:"),
        form="raw",
    ),
    "r1_searcher": _r1_searcher,
    # the checkpoint that was trained from Llama-3.1-8B-Instruct: the same as messages
    "r1_searcher_chat": replace(
        _r1_searcher,
        name="r1_searcher_chat",
        prompt_text=PromptText("{question}", _R1_SEARCHER),
        form="chat",
        prefix="<think>",
        stop=("<|end_of_query|>", "</answer>"),
    ),
    "deepresearcher": _deepresearcher,
}
