"""Agglomerative clustering of experience titles under a similarity threshold tau, and how to choose tau.

Two clusters merge if and only if their distance is strictly below a height h, so two rows at exactly tau stay
apart. Ward is the paper's choice; its height grows with the sizes a and b, so it means tau for two single
rows only, and it takes euclidean distances of unit rows.

    average    mean cosine distance over all pairs    h = 1 - tau
    complete   largest cosine distance of a pair      h = 1 - tau
    ward       sqrt(2ab / (a+b)) |centroid a - b|     h = sqrt(2 - 2 tau)
"""

from collections.abc import Sequence

import numpy as np
from sklearn.cluster import AgglomerativeClustering

from hiexp.config import lookup

GRID = 0.005
LOOSEST = 0.3
"""Calibration goes no looser than this similarity: beyond it anything joins anything."""
MEAN_SIZE = {1: (4, 12), 2: (3, 10)}
FALLBACK = {1: 0.92, 2: 0.88}
"""Usual values for e5, whose cosines lie close together."""


def cluster(
    vectors: np.ndarray,  # [N, D] unit rows
    threshold: float,  # similarity tau
    linkage: str = "average",
) -> list[list[int]]:
    """Index groups, ascending, in order of their first member; a zero row is alone. N may be 0 or 1."""
    merges, heights = _tree(vectors, linkage)
    return _cut(merges, int(np.sum(heights < height(threshold, linkage))), len(vectors))


def height(threshold: float, linkage: str) -> float:
    """The merge height that a similarity threshold stands for."""
    return lookup(HEIGHTS, linkage, "linkage")(threshold)


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
    """
    merges, heights = _tree(vectors, linkage)
    low, high = MEAN_SIZE[level]
    useful = None
    for step in range(1, int((1 - LOOSEST) / GRID) + 1):
        threshold = round(1 - step * GRID, 3)
        if threshold > at_most:
            continue
        groups = _cut(merges, int(np.sum(heights < height(threshold, linkage))), len(vectors))
        sizes = [len(group) for group in groups if len(group) > 1]
        if not sizes or not low <= np.mean(sizes) <= high or max(sizes) > max(0.1 * len(vectors), high):
            continue
        if sum(sizes) >= 0.6 * len(vectors):
            return threshold, "calibrated"
        useful = threshold if useful is None else useful
    if useful is not None:
        return useful, "calibrated, though the clusters hold less than 60% of the entries"
    return min(FALLBACK[level], at_most), "default, since no threshold gave clusters of a useful size"


def representatives(vectors: np.ndarray, limit: int) -> list[int]:
    """Row indices: the medoid, then at each step the row least similar to those chosen; at most `limit`."""
    similarity = vectors @ vectors.T
    chosen = [int(np.argmax(np.round(similarity.sum(axis=1), 6)))]
    while len(chosen) < min(limit, len(vectors)):
        nearest = np.round(similarity[:, chosen].max(axis=1), 6)
        nearest[chosen] = np.inf
        chosen.append(int(np.argmin(nearest)))
    return chosen


def near_duplicates(vectors: np.ndarray, kinds: Sequence[str], threshold: float) -> list[list[int]]:
    """Groups whose first row leads: a row joins the most similar leader of its kind at >= threshold."""
    groups: list[list[int]] = []
    for i, row in enumerate(vectors):
        leaders = [group for group in groups if kinds[group[0]] == kinds[i]]
        similarity = vectors[[group[0] for group in leaders]] @ row if leaders else np.zeros(0)
        if len(similarity) and similarity.max() >= threshold - 1e-6:
            leaders[int(np.argmax(np.round(similarity, 6)))].append(i)
        else:
            groups.append([i])
    return groups


def _tree(vectors: np.ndarray, linkage: str) -> tuple[list[tuple[int, int]], np.ndarray]:
    """All merges, lowest first, as pairs of member rows, and their heights. Zero rows take no part."""
    lookup(HEIGHTS, linkage, "linkage")
    rows = np.asarray(vectors, np.float64)
    told = np.flatnonzero(rows.any(axis=1)) if len(rows) else np.zeros(0, int)
    if len(told) < 2:  # the estimator needs two
        return [], np.zeros(0)
    rows, whole = rows[told], {"n_clusters": None, "distance_threshold": 0}
    if linkage == "ward":  # accepts euclidean distances only
        model = AgglomerativeClustering(**whole, linkage="ward").fit(rows)
    else:
        distances = np.clip(1 - rows @ rows.T, 0, 2)
        np.fill_diagonal(distances, 0)
        model = AgglomerativeClustering(**whole, linkage=linkage, metric="precomputed").fit(distances)
    member = list(range(len(rows)))  # one row of every node of the tree
    merges = []
    for left, right in model.children_:
        merges.append((int(told[member[left]]), int(told[member[right]])))
        member.append(member[left])
    return merges, model.distances_


def _cut(merges: list[tuple[int, int]], count: int, total: int) -> list[list[int]]:
    """Groups after the first `count` merges."""
    root = list(range(total))

    def find(i: int) -> int:
        while root[i] != i:
            root[i] = root[root[i]]
            i = root[i]
        return i

    for left, right in merges[:count]:
        a, b = sorted((find(left), find(right)))
        root[b] = a
    groups: dict[int, list[int]] = {}
    for i in range(total):
        groups.setdefault(find(i), []).append(i)
    return list(groups.values())


HEIGHTS = {
    "average": lambda tau: 1 - tau,
    "complete": lambda tau: 1 - tau,
    "ward": lambda tau: float(np.sqrt(max(2 - 2 * tau, 0))),
}
