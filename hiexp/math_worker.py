r"""Compares answers to problems with math-verify, in a process of its own: one line of JSON in, one out.

    {"id": 7, "seconds": 10, "prediction": "0.5", "golds": ["\\frac{1}{2}"]}   ->   {"id": 7, "correct": true, ...}

math_check.py starts it by its path, ends it when an item takes too long, and reads its replies. It imports nothing of
hiexp, so that it is small and up at once. The library's own time limits are switched off: they raise outside of the
main thread, and no signal handler runs inside one long multiplication.
"""

import contextlib
import json
import logging
import math
import os
import re
import resource
import signal
import sys
from functools import lru_cache
from typing import Any

MEMORY = 4 << 30
"""bytes of address space: a tower of powers fills any memory within seconds"""
SPARE_SECONDS = 5
"""after which an item ends this process, should the parent be gone or have failed to"""
ROUNDING, PRECISION = 6, 15
"""math-verify's decimals of floats, and digits of a difference"""

_DELIMITED = re.compile(r"\$|\\\(|\\\[|\\boxed|\\begin\{")
_POWER_OF_TEN = re.compile(r"(?<![A-Za-z0-9_\\.])([-+]?\d+(?:\.\d*)?|[-+]?\.\d+)[eE]([-+]?\d+)(?![A-Za-z0-9_.])")
_TRAILING_DOT = re.compile(r"(?<=\d)\.(?=\s*/)")
_TEXT = re.compile(r"\\(?:text(?:bf|it|rm)?|mathrm|mbox)\s*\{\s*\(?([^{}()]*[A-Za-z][^{}()]*)\)?\s*\}")
"""an answer in words, or an option letter; a product of letters for math-verify where the braces are missing"""
_OPTION = re.compile(r"\(?([A-Za-z])[).:]{1,2}")
_PROSE = re.compile(r"(?<![\\A-Za-z{])[A-Za-z]{2,}[ ,]+[A-Za-z]{2,}")


def compare(prediction: str, golds: list[str]) -> dict[str, Any]:
    """{"correct": whether it equals a gold answer, "reason": "", or "unparsable" where it is no mathematics}."""
    from math_verify import verify

    found = parse(prediction)
    for gold in golds:
        wanted = parse_gold(gold)
        if word := _TEXT.fullmatch(gold.strip(" $")):
            is_equal = _plain(_TEXT.sub(r"\1", prediction)) == _plain(word[1])
        else:
            decimals, digits = limits(wanted[0] if wanted else None)
            is_equal = bool(wanted and found) and verify(list(wanted), found, decimals, digits, timeout_seconds=None)
        if is_equal:
            return {"correct": True, "reason": ""}
    is_read = any(not isinstance(value, str) for value in found)
    return {"correct": False, "reason": "" if is_read else "unparsable"}


@lru_cache(maxsize=1024)
def parse_gold(text: str) -> tuple[Any, ...]:
    return tuple(parse(text))


def parse(text: str) -> list[Any]:
    """Expressions that an answer stands for, its text last; wrapped in $...$ unless it says itself where LaTeX is."""
    from math_verify import parse as read

    text = text.strip().rstrip(".").replace("\\$", "").replace("np.", "\\")  # prices, and numpy's names in Minerva
    text = _TRAILING_DOT.sub(".0", _POWER_OF_TEN.sub(r"\1 \\times 10^{\2}", text))
    if option := _OPTION.fullmatch(text):
        text = option[1]
    if not (_DELIMITED.search(text) or _PROSE.search(text)):
        text = f"${text}$"
    return read(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType]


def limits(gold: Any) -> tuple[int, int]:
    """Decimals and digits to compare with a gold answer: with the usual ones, all small numbers were equal."""
    zeros = 0
    with contextlib.suppress(TypeError, ValueError, OverflowError, AttributeError):
        size = abs(float(gold))
        zeros = -1 - math.floor(math.log10(size)) if 0 < size < 1e-3 else 0
    return ROUNDING + zeros, PRECISION + zeros


def _plain(text: str) -> str:
    return " ".join(text.strip(" $.()").split()).casefold()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, whatever it is in the middle of
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    with contextlib.suppress(ValueError, OSError):  # not every system knows this limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY if hard < 0 else min(MEMORY, hard), hard))
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no reply
    logging.disable()
    try:
        compare("1", ["1"])
    except Exception as error:
        replies.write(json.dumps({"failed": f"{type(error).__name__}: {error}"}) + "\n")
        return
    replies.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        item = json.loads(line)
        signal.alarm(math.ceil(item["seconds"]) + SPARE_SECONDS)
        try:
            found = compare(item["prediction"], item["golds"])
        except MemoryError:
            found = {"correct": False, "reason": "too large"}
        except Exception:  # of a library that was given what no one foresaw
            found = {"correct": False, "reason": "unparsable"}
        signal.alarm(0)
        replies.write(json.dumps({"id": item["id"], **found}) + "\n")


if __name__ == "__main__":
    main()
