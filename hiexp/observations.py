"""What text from outside may look like once it is shown: inert, of bounded length, and no passage twice.

A page must not be able to speak as the user, the policy, the environment or the experience. So whatever looks like a
tag or like a control token of a chat template is rewritten with other brackets: it stays readable and means nothing.
"""

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence

from hiexp.passages import sentence_ends
from hiexp.raw_text import mended
from hiexp.trajectory import Document

# characters that nobody sees: controls, formats, fillers, variation selectors, and marks that sit on a letter
_HIDDEN = (
    "\\x00-\\x08\\x0e-\\x1b\\x7f-\\x84\\x86-\\x9f\\u00ad\\u0300-\\u036f\\u0600-\\u0605\\u061c\\u06dd\\u070f\\u0890\\u0891"
    "\\u08e2\\u115f\\u1160\\u17b4\\u17b5\\u180b-\\u180f\\u1ab0-\\u1aff\\u1dc0-\\u1dff\\u200b-\\u200f\\u202a-\\u202e"
    "\\u2060-\\u206f\\u20d0-\\u20ff\\u2800\\u3164\\ufe00-\\ufe0f\\ufe20-\\ufe2f\\ufeff\\uffa0\\ufff0-\\ufffb\\U000110bd"
    "\\U000110cd\\U00013430-\\U0001345f\\U0001bca0-\\U0001bca3\\U0001d173-\\U0001d17a\\U000e0000-\\U000e0fff"
)
# possessive, all of them, so that no text makes a search slow
_UNSEEN, _GAP = f"[{_HIDDEN}]*+", f"[\\s{_HIDDEN}]*+"
_LESS, _MORE, _BAR = "<\\uff1c\\ufe64", ">\\uff1e\\ufe65", "|\\uff5c"  # wide forms, which some vocabularies fold
_SLASH = "[/\\uff0f]?+"
_LETTER, _REST = "[A-Za-z_\\uff21-\\uff3a\\uff41-\\uff5a]", "\\w:.\\-\\u2581"
_NAME = f"{_LETTER}[{_REST}{_HIDDEN}]*+"
_INSIDE = f"[^{_LESS}{_MORE}]"
_CONTROL = re.compile(f"[{_LESS}]({_UNSEEN}[{_BAR}][^{_LESS}{_MORE}{_BAR}]{{0,200}}+[{_BAR}]{_UNSEEN})[{_MORE}]")
_OPENING = re.compile(f"[{_LESS}]({_UNSEEN}[{_BAR}])")
_CLOSING = re.compile(f"([{_BAR}]{_UNSEEN})[{_MORE}]")
# with attributes: no space before the name, as in a < b; a name of one letter needs a =, which a<b and c>d lacks
_LONG, _SHORT = f"{_LETTER}{_UNSEEN}[{_REST}][{_REST}{_HIDDEN}]*+", f"{_LETTER}{_UNSEEN}(?=[\\s/]{_INSIDE}*=)"
_TAG = re.compile(
    f"[{_LESS}]({_GAP}{_SLASH}{_GAP}{_NAME}{_GAP}{_SLASH}{_GAP})[{_MORE}]"
    f"|[{_LESS}]({_UNSEEN}{_SLASH}{_UNSEEN}(?:{_LONG}|{_SHORT})[\\s/]{_INSIDE}*+)[{_MORE}]"
)
_UNCLOSED = re.compile(f"[{_LESS}]({_UNSEEN}{_SLASH}{_UNSEEN}{_LONG}{_GAP}{_SLASH}{_GAP})\\Z")
_WORDS = ["INST", "SYSTEM_PROMPT", "AVAILABLE_TOOLS", "TOOL_CALLS", "TOOL_RESULTS", "TOOL_CONTENT", "ARGS", "gMASK"]
_BRACKETS = re.compile(
    f"[\\[\\uff3b]({_UNSEEN}{_SLASH}{_UNSEEN}(?:{'|'.join(map(_UNSEEN.join, _WORDS))}){_UNSEEN})[\\]\\uff3d]"
)
_MARK = re.compile(r"\[\s*/?\s*[\w:.-]++[^\[\]]{0,300}+\]|\([|\uff5c][^|\uff5c]{0,100}+[|\uff5c]\)")
_WORD_END = re.compile(r"(?<=\S)(?=\s)")
ENOUGH = 0.5
"""A cut at the end of a sentence must leave this much of the budget in use; else words are cut."""


REACH = 16
"""Characters for each token of the budget within which sentences are looked for; prose has four or five."""


def neutralise(text: str) -> str:
    """Text from outside with tags and chat control tokens inert but readable: `<search>` becomes `[search]`.

    Half of a surrogate pair, which no tokenizer takes, becomes U+FFFD.
    """
    return _neutralise(text)[0]


def count_marks(text: str) -> int:
    """How much `neutralise` rewrites."""
    return _neutralise(text)[1]


def _neutralise(text: str) -> tuple[str, int]:
    text, controls = _CONTROL.subn(r"(\1)", mended(text))
    text, openings = _OPENING.subn(r"(\1", text)
    text, closings = _CLOSING.subn(r"\1)", text)
    text, tags = _TAG.subn(lambda found: f"[{found[1] or found[2]}]", text)
    text, unclosed = _UNCLOSED.subn(r"[\1", text)
    text, brackets = _BRACKETS.subn(r"(\1)", text)
    return text, controls + openings + closings + tags + unclosed + brackets


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
