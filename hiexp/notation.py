r"""Answers as they are written: the last `\boxed{}` of a text, and equality of two answers but for their notation.

Pure text, linear time, nothing is calculated and no package is needed: the second opinion beside math_check.py, and
what a success is when a HEK is built from written solutions.
"""

import re
from collections.abc import Sequence
from fractions import Fraction

_BRACES = re.compile(r"(\\{1,4}boxed\s*\{)|\\.|([{}])", re.DOTALL)
_WRAPPED = re.compile(r"\\(?:text(?:bf|it|rm)?|boxed)\s*\{([^{}]*)\}")
_BOXED = re.compile(r"\\boxed\s*\{([^{}]*)\}")
_MOST_WRAPPERS = 8
"""around each other; more are left in place"""
_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))")
_NOISE = re.compile(r"\\(?:left|right|text|mathrm|displaystyle|[,;:! ()\[\]$])|[${}\s]|(?<=\d),(?=\d{3}(?!\d))")
_NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)", re.ASCII)
_MOST_DIGITS = 1000
"""A longer number is compared as text: nothing that is an answer has as many, and reading it takes quadratic time."""


def boxes(text: str) -> list[tuple[int, str]]:
    r"""Every complete `\boxed{...}` that is in no other, in order: where it ends, and its content without `\text{}`.

    Braces are counted, so an answer may hold braces; a box that a length limit cut off is no answer at all, and what
    stands in one is not lost. A box that is all there is in a box is opened too.
    """
    return [(end + 1, _unwrap(text[start:end], _WRAPPED)) for start, end in _spans(text)]


def last_boxed(text: str, keep_text: bool = False) -> str | None:
    r"""Content of the last complete `\boxed{...}`, "" where it is empty; None where there is none.

    `keep_text` leaves `\text{}` in it, which tells a word from a product of its letters.
    """
    spans = _spans(text) if isinstance(text, str) else []
    return _unwrap(text[slice(*spans[-1])], _BOXED if keep_text else _WRAPPED) if spans else None


def equals(answer: str, golds: Sequence[str]) -> bool:
    r"""Whether an answer to a problem is a gold one: equal as a number, or equal as text but for notation.

    0.5, 1/2 and \frac{1}{2} are one number, 1,000 and 1000 too; 12 is not 2, and -3 is not 3. Nothing is calculated:
    \sqrt{4} is not 2 and x+1 is not 1+x (math_check.py knows, with a package).
    """
    found = _form(answer)
    return found != "" and any(found == _form(gold) for gold in golds)


def _spans(text: str) -> list[tuple[int, int]]:
    """Where the contents of the outermost complete boxes begin and end."""
    opened: list[int | None] = []  # where the content of each open box begins; None for a brace
    spans: list[tuple[int, int]] = []
    for mark in _BRACES.finditer(text):
        if mark[1]:
            opened.append(mark.end())
        elif mark[2] == "{":
            opened.append(None)
        elif mark[2] and opened and (start := opened.pop()) is not None:
            while spans and spans[-1][0] > start:
                spans.pop()
            spans.append((start, mark.start()))
    return spans


def _unwrap(content: str, wrapped: re.Pattern[str]) -> str:
    content = content.strip()
    for _ in range(_MOST_WRAPPERS):
        before, content = content, wrapped.sub(r"\1", content).strip()
        spans = _spans(content) if content.startswith("\\boxed") else []
        if len(spans) == 1 and spans[0][1] == len(content) - 1:
            content = content[slice(*spans[0])].strip()
        if content == before:
            break
    return content


def _form(text: str) -> str | Fraction:
    """A number, or the text without what only sets it."""
    boxed = last_boxed(text)
    text = text if boxed is None else boxed
    text = _FRACTION.sub(lambda found: "/".join(part for part in found.groups() if part is not None), text.strip())
    text = _NOISE.sub("", text.replace("\u2212", "-")).rstrip(".").casefold()
    above, slash, below = text.partition("/")
    if len(text) <= _MOST_DIGITS and _NUMBER.fullmatch(above) and (not slash or _NUMBER.fullmatch(below)):
        divisor = Fraction(below) if slash else Fraction(1)
        return Fraction(above) / divisor if divisor else text
    return text
