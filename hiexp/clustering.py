"""Agglomerative clustering of experience titles under a similarity threshold tau, and how to choose tau.

Two clusters merge if and only if their distance is strictly below a height h, so two rows at exactly tau stay
apart. Ward is the paper's choice; its height grows with the sizes a and b, so it means tau for two single
rows only, and it takes euclidean distances of unit rows.

    average    mean cosine distance over all pairs    h = 1 - tau
    complete   largest cosine distance of a pair      h = 1 - tau
    ward       sqrt(2ab / (a+b)) |centroid a - b|     h = sqrt(2 - 2 tau)

A zero row (a text that says nothing) is alone; a value that is not finite is refused, never dropped. How large inputs
are clustered is in components.py.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from hiexp.components import GIANT, HEIGHTS, TILE, WHOLE, components, height, near_duplicates, told_rows, tree

__all__ = [
    "HEIGHTS",
    "assign",
    "calibrate_threshold",
    "centroids",
    "cluster",
    "height",
    "near_duplicates",
    "representatives",
]

GRID = 0.005
LOOSEST = 0.3
"""Calibration goes no looser than this similarity: beyond it anything joins anything."""
MEAN_SIZE = {1: (4, 12), 2: (3, 10)}
FALLBACK = {1: 0.92, 2: 0.88}
"""Usual values for e5, whose cosines lie close together."""
LADDER = (0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6, 0.5, 0.4, LOOSEST)
"""Thresholds down to which calibration makes the tree of a large input, one after the other."""
CHANGED = 0.2
"""Share of new members from which a group is abstracted again, and of new rows from which all are clustered again."""


def cluster(
    vectors: np.ndarray,  # [N, D] unit rows
    threshold: float,  # similarity tau
    linkage: str = "average",
    notes: list[str] | None = None,  # gets a line for each thing that was not done exactly
) -> list[list[int]]:
    """Index groups, ascending, in order of their first member; a zero row is alone. N may be 0 or 1.

    ValueError for values that are not finite; ConfigError where complete linkage does not fit in memory.
    """
    found = tree(vectors, threshold, linkage)
    if notes is not None:
        notes.extend(found.notes)
    return found.groups(height(threshold, linkage))


def calibrate_threshold(
    vectors: np.ndarray,  # [N, D] unit rows
    level: int,  # 1 or 2: the level whose entries are clustered
    linkage: str = "average",
    at_most: float = 1.0,
) -> tuple[float, str]:
    """The strictest tau at which the clusters have a useful size, and how it was found.

    On a grid of 0.005 up to `at_most` (a coarser level must not be stricter): the mean size of clusters of
    two or more lies in [4, 12] (level 1) or [3, 10] (level 2), and the largest has at most a tenth of the
    entries, or that upper bound where a tenth is less (few entries could never meet a tenth). A tau that also
    puts 60% of the entries into such clusters is preferred.

    A large input is clustered down one rung of LADDER after the other, with the components of all rungs from one pass
    over the products, until a tau is found or the largest cluster, which only grows, is too large.
    """
    low, high = MEAN_SIZE[level]
    useful, note = None, ""
    for threshold, labels, notes in _scan(vectors, linkage, at_most):
        note = "".join(f"; {line}" for line in notes)
        sizes = np.bincount(labels)
        sizes = sizes[sizes > 1]
        if len(sizes) and sizes.max() > max(0.1 * len(vectors), high):
            break
        if not len(sizes) or not low <= np.mean(sizes) <= high:
            continue
        if sizes.sum() >= 0.6 * len(vectors):
            return threshold, "calibrated" + note
        useful = threshold if useful is None else useful
    if useful is not None:
        return useful, "calibrated, though the clusters hold less than 60% of the entries" + note
    return min(FALLBACK[level], at_most), "default, since no threshold gave clusters of a useful size" + note


def _scan(vectors: np.ndarray, linkage: str, at_most: float) -> Iterator[tuple[float, np.ndarray, tuple[str, ...]]]:
    """The grid's thresholds, strictest first, with the cluster of every row and what is not exact in that."""
    told, ladder = told_rows(vectors), (LOOSEST,)
    labels: Sequence[np.ndarray | None] = (None,)
    if len(told) > WHOLE:
        ladder = tuple(rung for rung in LADDER if rung <= at_most)
        # one component for all costs little more than a large one, but complete linkage can afford none above GIANT
        limit = len(told) // 2 if len(told) <= GIANT else None if linkage == "complete" else GIANT
        labels = components(np.ascontiguousarray(vectors[told], np.float32), ladder, limit)
    above = 1.0
    for rung, known in zip(ladder, labels, strict=True):
        found = tree(vectors, rung, linkage, known)
        for threshold in _grid(above, rung, at_most):
            yield threshold, found.labels(height(threshold, linkage)), found.notes
        above = rung


def _grid(above: float, down_to: float, at_most: float) -> list[float]:
    """The grid's thresholds in [down_to, above) up to `at_most`, strictest first."""
    steps = (round(1 - step * GRID, 3) for step in range(1, int((1 - LOOSEST) / GRID) + 1))
    return [threshold for threshold in steps if down_to <= threshold < above and threshold <= at_most]


def representatives(vectors: np.ndarray, limit: int) -> list[int]:
    """Row indices: the medoid, then at each step the row least similar to those chosen; at most `limit`."""
    similarity = vectors @ vectors.T
    chosen = [int(np.argmax(np.round(similarity.sum(axis=1), 6)))]
    while len(chosen) < min(limit, len(vectors)):
        nearest = np.round(similarity[:, chosen].max(axis=1), 6)
        nearest[chosen] = np.inf
        chosen.append(int(np.argmin(nearest)))
    return chosen


def centroids(vectors: np.ndarray, groups: Sequence[Sequence[int]]) -> np.ndarray:
    """[K, D] the mean row of every group, not of unit length: a row's product with it is its mean cosine."""
    means = [vectors[list(group)].mean(axis=0) for group in groups]
    return np.stack(means) if means else np.zeros((0, vectors.shape[1]), vectors.dtype)


def assign(
    vectors: np.ndarray,  # [N, D] unit rows that came after the clustering
    means: np.ndarray,  # [K, D] of `centroids`
    threshold: float,
) -> np.ndarray:
    """[N] the group whose members have the greatest mean cosine to the row, where that is at least the threshold.

    Others, and zero rows, are pending: -1. Of equal groups the first. Inclusive, unlike `cluster`: METHOD.md 12.1.
    """
    place = np.full(len(vectors), -1)
    told = told_rows(vectors)
    for start in range(0, len(told) if len(means) else 0, TILE):
        some = told[start : start + TILE]
        mean_cosine = np.round(vectors[some] @ means.T, 6)
        best = np.argmax(mean_cosine, axis=1)
        fits = mean_cosine[np.arange(len(some)), best] >= threshold - 1e-6
        place[some[fits]] = best[fits]
    return place
