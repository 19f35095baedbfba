"""The lab's questions in other languages: their wordings, and their words where a language writes no spaces.

Entities, passages, plans and answers are the same in every language; names are Latin words. The wordings stand in
lab_wordings.json, in the order of the English ones: the last is for test questions only, and has no word of its own.
Add a language: one entry there.
"""

import json
import re
from functools import cache
from pathlib import Path

from hiexp.encoder import UNSPACED

FILE = Path(__file__).with_name("lab_wordings.json")
_SINGLE = rf"{UNSPACED}\uff0c\uff1f"
_WORD = re.compile(rf"{{[aby]}}|[{_SINGLE}]|[^\s{{}}{_SINGLE}]+")
MARKS = "?,\u00bf\uff1f\uff0c"
"""what is no word in a question"""
KEPT = ("someone", "first", "year", "\u7b2c", "\u4e00", "primer", "primera", "primero")
"""words of a lesson's title that make it another kind of question, or stand for a name or a year"""


@cache
def wordings() -> dict[str, dict[str, tuple[str, ...]]]:
    """Language -> family -> wordings, without English."""
    read = json.loads(FILE.read_text(encoding="utf-8"))
    return {code: {name: tuple(texts) for name, texts in families.items()} for code, families in read.items()}


def languages() -> tuple[str, ...]:
    """Codes of the languages that questions can be asked in."""
    return ("en", *sorted(wordings()))


def spaced(wording: str) -> str:
    """With spaces between all words and placeholders; a letter of a script without spaces is a word."""
    return " ".join(_WORD.findall(wording))
