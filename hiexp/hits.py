"""What a query finds in a store: hits, the first that are accepted, and the lines that are shown of them."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from hiexp.acceptance import Judge, ranked
from hiexp.experience import Experience

Block = tuple[str, tuple[str, ...]]
"""Lines to show and the ids of the experiences in them; ("", ()) when there is nothing to say."""
GATED = 64
"""entries of a query that the gate is asked about, nearest first: its answer need not fall with their rank"""


@dataclass(frozen=True)
class Hit:
    """A retrieved experience, its cosine to the query, and whether and why it was accepted."""

    experience: Experience
    score: float
    accepted: bool
    value: float = math.nan
    """what was compared with the threshold: a cosine, z or a probability (hek.accept)"""
    threshold: float = math.nan
    reason: str = ""


def best_hits(
    judge: Judge,
    key: np.ndarray,
    cosines: np.ndarray,
    values: np.ndarray,
    hidden: Collection[int],
    top_k: int,
    include_rejected: bool,
) -> list[Hit]:
    """The first `top_k` of the entries by rank that are accepted (or of all)."""
    decide, hits = judge.verdicts(key, cosines, values, hidden), []
    for seen, j in enumerate(ranked(values, top_k + len(hidden) + GATED)):
        if len(hits) == top_k or (judge.gate and seen == GATED + len(hidden) and not include_rejected):
            break
        if j in hidden:
            continue
        verdict = decide(j)
        if verdict.accepted or include_rejected:
            entry, told = judge.entries[j], (verdict.accepted, verdict.value, verdict.threshold, verdict.reason)
            hits.append(Hit(entry, float(cosines[j]), *told))
        elif verdict.far:
            break
    return hits


def fill(hits: Sequence[Hit], count_tokens: Callable[[str], int], budget: int, cut: bool = False) -> Block:
    """Lines in rank order while they fit, each once, passing over those that do not; `cut` shortens the first."""
    lines: list[str] = []
    ids: list[str] = []
    for hit in hits:
        line = hit.experience.line()
        while cut and not lines and count_tokens(line) > budget and " " in line:
            line = line.rsplit(" ", 1)[0]
        if line not in ("-", *lines) and count_tokens("\n".join([*lines, line])) <= budget:
            lines.append(line)
            ids.append(hit.experience.id)
    return "\n".join(lines), tuple(ids)
