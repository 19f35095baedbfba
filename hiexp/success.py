"""What counts as a success when a HEK is built: of a search agent, and of a written solution.

Not the reward (rewards.py): a lesson is drawn from the contrast, so a right answer must not be one by luck.
"""

from collections.abc import Callable

from hiexp.data import Sample
from hiexp.metrics import METRICS
from hiexp.notation import equals
from hiexp.trajectory import Status, Trajectory

Judge = Callable[[Trajectory, Sample], bool]


def is_success(trajectory: Trajectory, sample: Sample, max_words: int = 20, is_math: bool = False) -> bool:
    """Answered, and the answer covers a gold one without being so long that this may be luck; in math, it equals it."""
    if trajectory.status is not Status.ANSWERED or len(trajectory.answer.split()) > max_words:
        return False
    if is_math:
        return equals(trajectory.answer, sample.answers)
    return METRICS["cem"](trajectory.answer, sample.answers) == 1
