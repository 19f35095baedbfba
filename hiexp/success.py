"""What counts as a success when a HEK is built: of a search agent, and of a written solution.

Not the reward (rewards.py): a lesson is drawn from the contrast, so a right answer must not be one by luck.
"""

import re
from collections.abc import Callable, Sequence
from fractions import Fraction

from hiexp.data import Sample
from hiexp.metrics import METRICS, boxes
from hiexp.trajectory import Status, Trajectory

Judge = Callable[[Trajectory, Sample], bool]

_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))")
_NOISE = re.compile(r"\\(?:left|right|text|mathrm|displaystyle|[,;:! ()\[\]])|[${}\s]|(?<=\d),(?=\d{3}(?!\d))")
_NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)")


def is_success(trajectory: Trajectory, sample: Sample, max_words: int = 20, is_math: bool = False) -> bool:
    """Answered, and the answer covers a gold one without being so long that this may be luck; in math, it equals it."""
    if trajectory.status is not Status.ANSWERED or len(trajectory.answer.split()) > max_words:
        return False
    if is_math:
        return equals(trajectory.answer, sample.answers)
    return METRICS["cem"](trajectory.answer, sample.answers) == 1


def equals(answer: str, golds: Sequence[str]) -> bool:
    r"""Whether an answer to a problem is a gold one: equal as a number, or equal as text but for notation.

    0.5, 1/2 and \frac{1}{2} are one number, 1,000 and 1000 too; 12 is not 2, and -3 is not 3. Nothing is calculated:
    \sqrt{4} is not 2 and x+1 is not 1+x (the package math-verify would know, and is not required).
    """
    found = _form(answer)
    return bool(found) and any(found == _form(gold) for gold in golds)


def _form(text: str) -> str | Fraction:
    """A number, or the text without what only sets it."""
    if boxed := boxes(text):
        text = boxed[-1][1]
    text = _FRACTION.sub(lambda found: "/".join(part for part in found.groups() if part is not None), text.strip())
    text = _NOISE.sub("", text.replace("\u2212", "-")).rstrip(".").casefold()
    above, slash, below = text.partition("/")
    if _NUMBER.fullmatch(above) and (not slash or _NUMBER.fullmatch(below)):
        divisor = Fraction(below) if slash else Fraction(1)
        return Fraction(above) / divisor if divisor else text
    return text
