r"""The JSON object in a language model's reply, or a word for why there is none. Pure text, linear time, no eval.
`parse_lines` reads the two plain lines of a model that was shown examples and continues them.

What is mended: trailing commas, single and typographic quotes, full-width punctuation between the strings, a missing
end after the last wanted field, Python's True, False and None, and LaTeX with single backslashes (`"\frac"` would be a
form feed). What is not: unquoted keys, missing commas, unescaped double quotes inside double quotes.

Which object counts: the first that is sound JSON and has the fields; only where there is none, the first that had to
be mended. Text in <think> never counts. No part of a cut-off or broken object is taken, nor one nested in another:
half a lesson is worse than none.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

TYPES = ("success_factor", "pitfall", "mixed")
MAX_DEPTH = 40
"""of objects and lists within each other; deeper ones are malformed"""

HEADING = "###"
"""begins a line that is no part of a reply in plain lines"""

_FIELDS = ("type", "title", "thinking", "description")
_CLOSING = {'"': '"', "'": "'", "\u2018": "\u2019", "\u201c": "\u201d", "\u201d": "\u201d", "\uff02": "\uff02"}
_BLANK = re.compile(r"\s*")
_BRACE = re.compile("[{\uff5b]")
_BRACES = re.compile("[{}\uff5b\uff5d]")
_BRACES_AND_QUOTES = re.compile('\\\\.|["{}\uff5b\uff5d]', re.DOTALL)
_DOUBLE_QUOTED = re.compile(r'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_LOOSE_STRINGS = {
    closing: re.compile(rf"(?:[^\\{closing}]++|\\.|{closing}(?!\s*[,:}}\]\uff0c\uff1a\uff5d\uff3d]))*+", re.DOTALL)
    for closing in "'\u2019\u201d\uff02"
}
"""Up to the quote that ends a string: one that punctuation of JSON follows, for it may also be an apostrophe."""
_BEGINNING = re.compile(
    "[{\uff5b]\\s*(?:\"|['\u2018\u201c\u201d\uff02][^\"'{}\\\\\u2018\u2019\u201c\u201d\uff02]{0,64}+['\u2019\u201d\uff02])"
)
"""What begins an object. A first key in loose quotes must be short: no brace in prose may be read far."""
_SCALAR = re.compile(r"(true|false|null|NaN|-?Infinity)\b|(True|False|None)\b|-?\d[\d.eE+-]*")
_THINKING = re.compile(r"<(/?)think(?:ing)?>", re.IGNORECASE)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|([A-Za-z]+)|(.))", re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_END_OF_TEXT = re.compile(r"(?:<[|\uff5c][^<>\s]*[|\uff5c]>|</s>|<eos>|<end_of_turn>)\s*\Z")
_NO_VALUE = re.compile(r"[\x00-\x1f\x7f]|<[|\uff5c]|[|\uff5c]>|\b(?:Title|Description):")
_LATEX_NAMES = """
nabla natural ne nearrow neg neq newcommand nexists nmid nolimits nonumber norm not notin nparallel nsubseteq nu nwarrow
rangle rbrace rbrack rceil rfloor rgroup rho right rightarrow rightharpoonup rightleftharpoons rm root rvert rVert
tag tan tanh tau tbinom text textbf textit textrm textsf textstyle texttt tfrac therefore theta thickapprox thicksim
thinspace tilde times to top triangle triangledown triangleleft triangleq triangleright twoheadrightarrow
"""
_LATEX = frozenset(_LATEX_NAMES.split())
r"""Commands that begin like \n, \r or \t. The whole run of letters must be one: "\nabla" is, "\nThen" is a new line."""


def parse_reply(text: str, required: Sequence[str]) -> dict[str, Any] | str:
    """The known fields of the object that counts, or the reason why no object has the `required` ones.

    Strings come back with white space collapsed, `tags` as a list (empty where there is none). Reasons: empty,
    unfinished_thinking, truncated, no_object, malformed, missing_<field>, bad_<field>, duplicate_<field> (two values
    under one key: neither can be trusted). Where several objects fail, the last one's reason is given.
    """
    text = text.replace("\ufeff", "")
    if not text.strip():
        return "empty"
    mended: dict[str, Any] | None = None
    reason = "no_object"
    for found in _objects(text):
        outcome = found if isinstance(found, str) else _check_fields(found, required)
        if isinstance(outcome, str):
            reason = outcome
        elif not isinstance(found, str) and not found.is_mended:
            return outcome
        else:
            mended = mended or outcome
    return mended or reason


def parse_experience(reply: str, required: Sequence[str] = ("title", "description")) -> dict[str, Any] | None:
    """The lesson in a reply: its known fields (type, title, tags, thinking, description), or None if there is none.

    None, too, for text that is empty, refuses, is cut off, holds a lesson in <think> alone, or is no text at all; never
    half a lesson, never an exception. A build asks for more than title and description: `required` is then
    `PROMPTS["full"].reflect_fields`. `parse_reply` gives the reason in place of None.
    """
    found = parse_reply(reply, required) if isinstance(reply, str) else "empty"
    return None if isinstance(found, str) else found


def parse_lines(text: str, required: Sequence[str]) -> dict[str, Any] | str:
    """Title and description of a reply that continues "Title:" by `...` and `Description: ...`, or the reason why not.

    The reply goes up to where a next example begins (HEADING); both lines must be whole, and nothing may follow them.
    A line is whole if a line break or an end-of-text token follows. Reasons: empty, truncated, missing_<field>,
    bad_<field> (a label or a control token inside), malformed (a third line).
    """
    body = re.split(rf"^{HEADING}", text.replace("\ufeff", ""), maxsplit=1, flags=re.MULTILINE)[0]
    body = _END_OF_TEXT.sub("\n", body)
    if not body.strip():
        return "empty"
    *lines, rest = (line.strip() for line in body.split("\n"))
    while lines and not lines[-1]:
        lines.pop()
    if len(lines) < 2 and rest:
        return "truncated"
    if len(lines) > 2 or (len(lines) == 2 and rest):
        return "malformed"
    title, description = [*lines, ""][:2]
    is_labelled = description.startswith("Description:")
    told = description.removeprefix("Description:") if is_labelled else ""
    values = {"title": title.removeprefix("Title:"), "description": told}
    clean: dict[str, Any] = {field: " ".join(value.split()) for field, value in values.items()}
    for field in required:
        if not clean[field]:
            return f"missing_{field}"
        if _NO_VALUE.search(clean[field]):
            return f"bad_{field}"
    return clean | {"tags": []}


@dataclass(frozen=True)
class _Object:
    fields: list[tuple[str, Any]]
    """in order, keys perhaps twice; a number or a literal is None"""
    is_mended: bool
    is_cut: bool
    """the text ended before it did; `fields` are those that were whole"""


class _BrokenError(Exception):
    """The reader met something that no mending explains."""


class _CutError(Exception):
    """The reader met the end of the text."""


def _objects(text: str) -> Iterator[_Object | str]:
    """The outermost objects outside the thinking, in order, and a reason in place of a broken one.

    Linear: an object that has begun is left at its end; a brace in prose is left at its partner, found beforehand.
    """
    thinking, partners, position = _thinking(text), _partners(text), 0
    thinking.reverse()
    while found := _BRACE.search(text, position):
        start = found.start()
        while thinking and thinking[-1][0] < position:  # a tag inside a string of the object just read
            thinking.pop()
        if thinking and thinking[-1][0] <= start:
            position = thinking.pop()[1]
            continue
        if not _BEGINNING.match(text, start):
            position = partners.get(start, start) + 1
            continue
        reader = _Reader(text, start)
        try:
            fields = reader.read_object()
            position = reader.position
            yield _Object(fields, reader.is_mended, False)
        except _CutError:
            is_safe = reader.outermost and not reader.has_loose_quotes
            yield _Object(reader.outermost, True, True) if is_safe else "truncated"
            return
        except _BrokenError:
            if not reader.has_begun and (start in partners or reader.has_loose_quotes):
                position = partners.get(start, start) + 1
                continue
            end = _after_braces(text, reader.position, reader.open_braces)
            yield "truncated" if end is None else "malformed"
            position = len(text) if end is None else end
    if position > len(text) or (thinking and thinking[0][0] >= position and thinking[0][1] > len(text)):
        yield "unfinished_thinking"


class _Reader:
    """A recursive descent over one object; `position` is where it stands, also after an error."""

    def __init__(self, text: str, start: int) -> None:
        self.text, self.position = text, start
        self.is_mended = self.has_loose_quotes = self.has_begun = False
        self.open_braces = 0
        self.outermost: list[tuple[str, Any]] = []

    def read_object(self, depth: int = 0) -> list[tuple[str, Any]]:
        fields: list[tuple[str, Any]] = self.outermost if depth == 0 else []
        self._take("{\uff5b")
        self.open_braces += 1
        while not self._accept("}\uff5d"):
            key = self._string()
            self._take(":\uff1a")
            self.has_begun = True
            fields.append((key, self._value(depth + 1)))
            self._separate("}\uff5d")
        self.open_braces -= 1
        return fields

    def _value(self, depth: int) -> Any:
        character = self._peek()
        if depth > MAX_DEPTH:
            raise _BrokenError
        if character in "{\uff5b":
            return dict(self.read_object(depth))
        if character in "[\uff3b":
            return self._list(depth)
        if character in _CLOSING:
            return self._string()
        scalar = _SCALAR.match(self.text, self.position)
        if scalar is None:
            raise _BrokenError
        self.is_mended |= scalar[2] is not None
        self.position = scalar.end()
        return None

    def _list(self, depth: int) -> list[Any]:
        self._take("[\uff3b")
        values = []
        while not self._accept("]\uff3d"):
            values.append(self._value(depth + 1))
            self._separate("]\uff3d")
        return values

    def _separate(self, closing: str) -> None:
        """A comma, or the closing bracket (left where it is); both means a comma too many."""
        if self._peek() in closing:
            return
        self._take(",\uff0c")
        self.is_mended |= self._peek() in closing

    def _string(self) -> str:
        opening = self._peek()
        closing = _CLOSING.get(opening)
        if closing is None:
            raise _BrokenError
        self.position += 1
        if opening == '"':
            body = _DOUBLE_QUOTED.match(self.text, self.position)
        else:
            self.is_mended = self.has_loose_quotes = True
            body = _LOOSE_STRINGS[closing].match(self.text, self.position)
        if body is None or self.text[body.end() : body.end() + 1] != closing:
            raise _CutError
        self.position = body.end() + 1
        return _unescape(body[0])

    def _peek(self) -> str:
        if self.text[self.position : self.position + 1] <= " " or self.text[self.position] > "~":
            blank = _BLANK.match(self.text, self.position)
            self.position = blank.end() if blank else self.position
        if self.position == len(self.text):
            raise _CutError
        return self.text[self.position]

    def _accept(self, characters: str) -> bool:
        """Step over one of the characters, of which the first is the ASCII one, if it comes next."""
        character = self._peek()
        if character not in characters:
            return False
        self.is_mended |= character != characters[0]
        self.position += 1
        return True

    def _take(self, characters: str) -> None:
        if not self._accept(characters):
            raise _BrokenError


def _unescape(body: str) -> str:
    r"""JSON's escapes, and LaTeX's commands as they stand. Half of a surrogate pair, which no file could hold, becomes
    U+FFFD."""
    if "\\" not in body:
        return body
    body = _ESCAPE.sub(_one_escape, body)
    return body.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _one_escape(found: re.Match[str]) -> str:
    code, letters, other = found.groups()
    if code is not None:
        return chr(int(code, 16))
    if other is not None:
        return other if other in "\"'\\/" else found[0]
    if letters[0] in "nrt" and letters not in _LATEX:  # JSON's \b and \f stand for nothing that a lesson could hold
        return {"n": "\n", "r": "\r", "t": "\t"}[letters[0]] + letters[1:]
    return found[0]


def _thinking(text: str) -> list[tuple[int, int]]:
    """(start, end) of each stretch of thinking; nested tags count, and one that never ends ends beyond the text.

    A closing tag without an opening one ends a block that the prompt opened: all before it was thinking. Where more
    are opened than closed, the last closing tag ends the block, as in the templates of reasoning models.
    """
    spans: list[tuple[int, int]] = []
    depth = start = last_close = 0
    for tag in _THINKING.finditer(text):
        if not tag[1]:
            start = start if depth else tag.start()
            depth += 1
            continue
        last_close = tag.end()
        depth -= 1
        if depth < 0:
            spans, depth = [(0, tag.end())], 0
        elif depth == 0:
            spans.append((start, tag.end()))
    if depth:
        spans.append((start, last_close if last_close > start else len(text) + 1))
    return spans


def _partners(text: str) -> dict[int, int]:
    """Where each brace that is closed is closed, strings not being known."""
    partners: dict[int, int] = {}
    opened: list[int] = []
    for brace in _BRACES.finditer(text):
        if brace[0] in "{\uff5b":
            opened.append(brace.start())
        elif opened:
            partners[opened.pop()] = brace.start()
    return partners


def _after_braces(text: str, position: int, depth: int) -> int | None:
    """Past the brace that closes the outermost of `depth` open ones, or None where none does."""
    quoted = False
    for mark in _BRACES_AND_QUOTES.finditer(text, position):
        if mark[0] == '"':
            quoted = not quoted
        elif not quoted and mark[0] in "{}\uff5b\uff5d":
            depth += 1 if mark[0] in "{\uff5b" else -1
            if depth == 0:
                return mark.end()
    return None


def _check_fields(found: _Object, required: Sequence[str]) -> dict[str, Any] | str:
    """The known fields, cleaned, or what is wrong with them."""
    value = dict(found.fields)
    for field in required:
        if field not in value:
            return "truncated" if found.is_cut else f"missing_{field}"
    for key, given in found.fields:
        if key in (*required, "tags") and given != value[key]:
            return f"duplicate_{key}"
    clean: dict[str, Any] = {}
    for field in _FIELDS:
        if field in value:
            text = " ".join(value[field].split()) if isinstance(value[field], str) else None
            if text is not None and not _CONTROL.search(text) and (text or field not in required):
                clean[field] = text
            elif field in required:
                return f"bad_{field}"
    if "type" in required and clean["type"] not in TYPES:
        return "bad_type"
    tags = value.get("tags", [])
    if not isinstance(tags, list) or not all(isinstance(tag, str) and not _CONTROL.search(tag.strip()) for tag in tags):
        return "bad_tags"
    clean["tags"] = [" ".join(tag.split()) for tag in tags]
    return clean
