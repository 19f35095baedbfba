"""What text from outside may look like once it is shown: inert, of bounded length, and no passage twice.

A page must not be able to speak as the user, the policy, the environment or the experience. So whatever looks like a
tag or like a control token of a chat template is rewritten with other brackets: it stays readable and means nothing.
"""

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence

from hiexp.passages import sentence_ends
from hiexp.trajectory import Document

_HIDDEN = "\\u00ad\\u061c\\u180e\\u200b-\\u200f\\u202a-\\u202e\\u2060-\\u2064\\ufeff"  # characters that nobody sees
_GAP = f"[\\s{_HIDDEN}]*+"  # possessive, so that no text makes a search slow
_LESS, _MORE, _BAR = "<\\uff1c\\ufe64", ">\\uff1e\\ufe65", "|\\uff5c"  # wide forms, which some vocabularies fold
_NAME = f"[A-Za-z_][\\w:.\\-\\u2581{_HIDDEN}]*+"
_INSIDE = f"[^{_LESS}{_MORE}]"
_OPENING = re.compile(f"[{_LESS}]([{_HIDDEN}]*+[{_BAR}])")
_CLOSING = re.compile(f"([{_BAR}][{_HIDDEN}]*+)[{_MORE}]")
_TAG = re.compile(
    f"[{_LESS}]({_GAP}/?{_GAP}{_NAME}{_GAP}/?{_GAP})[{_MORE}]"
    f"|[{_LESS}](/?{_NAME}[\\s/]{_INSIDE}{{0,300}}+)[{_MORE}]"  # with attributes: no space before the name, as in a < b
)
_UNCLOSED = re.compile(f"[{_LESS}]({_GAP}/?{_GAP}{_NAME}{_GAP}/?{_GAP})\\Z")
_BRACKETS = re.compile(
    r"\[(/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|TOOL_CONTENT|ARGS|gMASK))\]"
)
_MARK = re.compile(r"\[\s*/?\s*[\w:.-]++[^\[\]]{0,300}+\]|\([|\uff5c][^|\uff5c]{0,100}+[|\uff5c]\)")
_WORD_END = re.compile(r"(?<=\S)(?=\s)")
ENOUGH = 0.5
"""A cut at the end of a sentence must leave this much of the budget in use; else words are cut."""


REACH = 16
"""Characters for each token of the budget within which sentences are looked for; prose has four or five."""


def neutralise(text: str) -> str:
    """Text from outside with tags and chat control tokens inert but readable: `<search>` becomes `[search]`."""
    return _neutralise(text)[0]


def count_marks(text: str) -> int:
    """How much `neutralise` rewrites."""
    return _neutralise(text)[1]


def _neutralise(text: str) -> tuple[str, int]:
    text, openings = _OPENING.subn(r"(\1", text)
    text, closings = _CLOSING.subn(r"\1)", text)
    text, tags = _TAG.subn(lambda found: f"[{found[1] or found[2]}]", text)
    text, unclosed = _UNCLOSED.subn(r"[\1", text)
    text, brackets = _BRACKETS.subn(r"(\1)", text)
    return text, openings + closings + tags + unclosed + brackets


def different(documents: Iterable[Document]) -> tuple[Document, ...]:
    """The documents in order, those that read the same (but for case, spacing and width of characters) once."""
    first: dict[tuple[str, str], Document] = {}
    for document in documents:
        first.setdefault((_folded(document.title), _folded(document.text)), document)
    return tuple(first.values())


def cut(text: str, budget: int, count: Callable[[str], int]) -> str:
    """The beginning of neutralised `text` that has at most `budget` tokens, as `count` tells them.

    It ends with a sentence if that uses ENOUGH of the budget, else with a word, else (one endless word) with a
    character; never inside of what was a tag. Text within the budget comes back as it is.
    """
    if count(text) <= budget:
        return text
    marks = [found.span() for found in _MARK.finditer(text)]
    sentences = sentence_ends(text[: REACH * budget])[:-1]  # the last is the end of what was looked at
    for ends, least in ((sentences, ENOUGH * budget), (_word_ends(text), 1)):
        end = _longest(text, _outside(ends, marks), budget, count)
        if end and count(text[:end]) >= least:
            return text[:end]
    return text[: _longest(text, _outside(range(1, len(text)), marks), budget, count)]


def _word_ends(text: str) -> list[int]:
    return [found.end() for found in _WORD_END.finditer(text)]


def _outside(ends: Sequence[int], marks: Sequence[tuple[int, int]]) -> list[int]:
    starts = [start for start, _ in marks]
    inside = lambda end: (i := bisect_right(starts, end - 1)) and starts[i - 1] < end < marks[i - 1][1]  # noqa: E731
    return [end for end in ends if not inside(end)]


def _longest(text: str, ends: Sequence[int], budget: int, count: Callable[[str], int]) -> int:
    """The last of the ascending `ends` up to which the text fits the budget; 0 if there is none."""
    place = bisect_right(ends, budget, key=lambda end: count(text[:end]))
    while place and count(text[: ends[place - 1]]) > budget:  # more characters can be fewer tokens
        place -= 1
    return ends[place - 1] if place else 0


def _folded(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())
