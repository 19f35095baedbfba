"""The merges of agglomerative clustering below a height, without the matrix of all distances.

Every merge below height h has a cross pair of rows closer than h, so clusters never leave a connected component of the
graph {cosine > tau} and each component is clustered on its own (METHOD.md 12.6). For average and complete linkage that
is immediate. Ward: merges below h give a cluster of a rows a squared deviation of at most (a - 1) h^2 / 2, so its
variance is below h^2 / 2 (1 - 1/a); centroids of two clusters that merge are within h^2 / 2 (1/a + 1/b) squared; the
mean squared distance of cross pairs, which is the two variances and that, is thus below h^2. Where two merges tie
exactly, the order of unrelated rows decides, in scikit-learn too; either choice is right.

Up to WHOLE rows there is one component. Above GIANT rows, near duplicates are first grouped around leaders, which is
the only approximation; average and Ward then merge groups by their means, exactly (the mean cosine of two groups is the
product of their means), in memory for one copy of the rows. Complete linkage needs all distances of the leaders.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.cluster.hierarchy import linkage as scipy_linkage
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from hiexp.config import ConfigError, lookup

WHOLE = 2048
"""Up to so many rows the whole tree is made: 32 MB, and no graph is needed."""
GIANT = 20_000
"""Largest component whose distances are all held: 1.6 GB, twice while they are clustered."""
DUPLICATE = 0.97
"""Cosine to a leader at which a row of a giant component counts as the leader's copy."""
TILE = 2048
"""Rows of a block of products (16 MB for two blocks)."""
MANY = 200_000
"""Edges of a tile that are held at most."""
SLACK = 1e-5
"""What a float32 product may be off; a graph with a few more edges is as good."""
HEIGHTS = {
    "average": lambda tau: 1 - tau,
    "complete": lambda tau: 1 - tau,
    "ward": lambda tau: float(np.sqrt(max(2 - 2 * tau, 0))),
}


@dataclass(frozen=True)
class Tree:
    """Merges, lowest first, as pairs of rows of the two clusters, their heights, and what is not exact."""

    merges: np.ndarray  # [M, 2]
    heights: np.ndarray  # [M]
    total: int  # rows
    notes: tuple[str, ...] = ()

    def labels(self, height: float) -> np.ndarray:
        """The cluster of every row [total] after all merges strictly below `height`."""
        chosen = self.merges[: int(np.searchsorted(self.heights, height))]
        return join(np.arange(self.total), chosen[:, 0], chosen[:, 1])

    def groups(self, height: float) -> list[list[int]]:
        """The rows of every cluster, ascending, clusters in order of their first row."""
        return sorted(members.tolist() for members in members_of(self.labels(height)))


def height(threshold: float, linkage: str) -> float:
    """The merge height that a similarity threshold stands for."""
    return lookup(HEIGHTS, linkage, "linkage")(threshold)


def told_rows(vectors: np.ndarray) -> np.ndarray:
    """Indices of the rows that are not zero; ValueError if a value is not finite (the encoder is broken)."""
    if not len(vectors):
        return np.zeros(0, int)
    bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if len(bad):
        raise ValueError(f"{len(bad)} of {len(vectors)} vectors are not finite, first rows {bad[:3].tolist()}")
    return np.flatnonzero(np.any(vectors, axis=1))


def tree(
    vectors: np.ndarray,  # [N, D] unit or zero rows
    threshold: float,
    linkage: str,
    labels: np.ndarray | None = None,  # [rows that are not zero] components at `threshold`, where they are known
) -> Tree:
    """All merges below the height of `threshold` (of a small input: all merges). Zero rows take no part."""
    limit, told = height(threshold, linkage), told_rows(vectors)
    if len(told) <= WHOLE:
        merges, heights = _all_distances(vectors[told], linkage)
        return Tree(told[merges], heights, len(vectors))
    rows = np.ascontiguousarray(vectors[told], np.float32)
    if labels is None:
        labels = components(rows, [threshold])[0]
    merges, heights, notes = [np.zeros((0, 2), int)], [np.zeros(0)], []
    for members in members_of(labels):
        if len(members) < 2:
            continue
        if len(members) > GIANT:
            found, at, note = _giant(rows[members], threshold, linkage)
            notes.append(note)
        else:
            found, at = _all_distances(vectors[told[members]], linkage)
        below = at < limit
        merges.append(told[members[found[below]]])
        heights.append(at[below])
    order = np.argsort(np.concatenate(heights), kind="stable")
    return Tree(np.concatenate(merges)[order], np.concatenate(heights)[order], len(vectors), tuple(notes))


def components(rows: np.ndarray, thresholds: Sequence[float], limit: int | None = None) -> list[np.ndarray]:
    """Per threshold the component [N] of every float32 row in the graph {cosine > threshold}, from one pass.

    A threshold with a component of more than `limit` rows is followed no further: all rows count as one component.
    Memory: a tile of products, the edges of a row of tiles, and one label per row and threshold.
    """
    found = [_Labels(np.arange(len(rows)), limit) for _ in thresholds]
    for start in range(0, len(rows), TILE):
        for other in range(start, len(rows), TILE):
            tile = rows[start : start + TILE] @ rows[other : other + TILE].T
            for labels, threshold in zip(found, thresholds, strict=True):
                if not labels.closed:
                    labels.add(tile > threshold - SLACK, start, other)
        for labels in found:
            labels.flush()
    return [labels.of for labels in found]


class _Labels:
    """Components so far, and edges that are not yet in them: one look at all labels serves a row of tiles."""

    def __init__(self, of: np.ndarray, limit: int | None) -> None:
        self.of, self.limit, self.closed = of, limit, False
        self.edges: list[tuple[np.ndarray, np.ndarray]] = []

    def add(self, near: np.ndarray, start: int, other: int) -> None:
        """A tile of the graph whose first row and column are these rows."""
        near &= self.of[start : start + TILE, None] != self.of[None, other : other + TILE]
        while np.count_nonzero(near) > MANY:  # an edge of every row and column joins most of them
            i, j = np.flatnonzero(near.any(axis=1)), np.flatnonzero(near.any(axis=0))
            first = np.append(i, near[:, j].argmax(axis=0)), np.append(near[i].argmax(axis=1), j)
            self.edges.append((first[0] + start, first[1] + other))
            self.flush()
            near &= self.of[start : start + TILE, None] != self.of[None, other : other + TILE]
        i, j = np.nonzero(near)
        if len(i):
            self.edges.append((i + start, j + other))

    def flush(self) -> None:
        if not self.edges:
            return
        self.of = join(self.of, *(np.concatenate(ends) for ends in zip(*self.edges, strict=True)))
        self.edges = []
        if self.limit is not None and np.bincount(self.of).max() > self.limit:
            self.of, self.closed = np.zeros(len(self.of), int), True


def join(labels: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Labels after the groups of rows a[i] and b[i] are joined."""
    size = len(labels)
    graph = coo_matrix((np.ones(len(a), bool), (labels[a], labels[b])), shape=(size, size))
    return connected_components(graph, directed=False)[1][labels]


def members_of(labels: np.ndarray) -> list[np.ndarray]:
    """The rows of every label, ascending."""
    order = np.argsort(labels, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(labels[order])) + 1) if len(order) else []


def near_duplicates(vectors: np.ndarray, kinds: Sequence[str], threshold: float) -> list[list[int]]:
    """Groups whose first row leads: a row joins the most similar leader of its kind at >= threshold."""
    groups: list[list[int]] = []
    codes = np.unique(np.asarray(kinds, str), return_inverse=True)[1].reshape(-1)
    for start in range(0, len(vectors), TILE):
        rows, kind = vectors[start : start + TILE], codes[start : start + TILE]
        best, place = _best_leader(vectors, codes, np.array([group[0] for group in groups], int), rows, kind)
        inner, leads = rows @ rows.T, np.full(len(rows), -1)
        for i in range(len(rows)):
            own = np.where((leads >= 0) & (kind == kind[i]), inner[i], -np.inf)
            j = int(np.argmax(np.round(own, 6)))
            if max(best[i], own.max()) < threshold - 1e-6:
                leads[i] = len(groups)
                groups.append([start + i])
            else:  # of equals the earlier leader
                groups[place[i] if round(best[i], 6) >= round(own[j], 6) else leads[j]].append(start + i)
    return groups


def _best_leader(
    vectors: np.ndarray, codes: np.ndarray, leaders: np.ndarray, rows: np.ndarray, kind: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Per row the similarity of the best leader of its kind (-inf: none) and that leader's place."""
    best, place = np.full(len(rows), -np.inf), np.zeros(len(rows), int)
    for start in range(0, len(leaders), TILE):
        some = leaders[start : start + TILE]
        similarity = np.where(kind[:, None] == codes[some], rows @ vectors[some].T, -np.inf)
        first = np.argmax(np.round(similarity, 6), axis=1)
        value = similarity[np.arange(len(rows)), first]
        better = np.round(value, 6) > np.round(best, 6)
        best[better], place[better] = value[better], start + first[better]
    return best, place


def _all_distances(vectors: np.ndarray, linkage: str) -> tuple[np.ndarray, np.ndarray]:
    """The whole tree, as scikit-learn makes it, as pairs of rows [N - 1, 2] and heights."""
    if len(vectors) < 2:
        return np.zeros((0, 2), int), np.zeros(0)
    rows = np.asarray(vectors, np.float64)
    if linkage == "ward" and len(rows) <= WHOLE:
        found = scipy_linkage(rows, "ward")
    else:
        found = scipy_linkage(_condensed(rows, linkage), linkage)
    member = np.arange(2 * len(rows) - 1)  # one row of every node of the tree
    merges = found[:, :2].astype(int)
    for i, (left, _) in enumerate(merges):
        member[len(rows) + i] = member[left]
    return member[merges], found[:, 2]


def _condensed(rows: np.ndarray, linkage: str) -> np.ndarray:
    """The upper triangle of the distances, row by row."""
    count = len(rows)
    distances, filled = np.empty(count * (count - 1) // 2), 0
    squares = np.einsum("nd,nd->n", rows, rows)
    for start in range(0, count, WHOLE):
        block = rows[start : start + WHOLE] @ rows[start:].T
        if linkage == "ward":
            block = np.sqrt(np.maximum(squares[start : start + WHOLE, None] + squares[start:] - 2 * block, 0))
        else:
            block = np.clip(1 - block, 0, 2)
        for i in range(len(block)):
            row = block[i, i + 1 :]
            distances[filled : filled + len(row)] = row
            filled += len(row)
    return distances


def _giant(rows: np.ndarray, threshold: float, linkage: str) -> tuple[np.ndarray, np.ndarray, str]:
    """Merges below the height of `threshold` in a component whose distances do not fit, and what was done."""
    copies = max(DUPLICATE, threshold + 2e-6)  # more than the slack of near_duplicates: at the threshold is apart
    groups = near_duplicates(rows, [""] * len(rows), copies)
    leaders = np.array([group[0] for group in groups])
    pairs = [(group[0], row) for group in groups for row in group[1:]]
    merges = np.array(pairs, int).reshape(-1, 2)
    cosines = np.einsum("nd,nd->n", rows[merges[:, 0]], rows[merges[:, 1]]) if len(merges) else np.zeros(0)
    distances = np.sqrt(np.maximum(2 - 2 * cosines, 0)) if linkage == "ward" else np.maximum(1 - cosines, 0)
    limit = height(threshold, linkage)
    distances = np.minimum(distances, np.nextafter(limit, -1))
    if linkage == "complete":
        if len(leaders) > GIANT:
            raise ConfigError(
                f"linkage=complete: {len(rows)} entries hang together at threshold {threshold} and have {len(leaders)} "
                f"leaders, more than the {GIANT} whose distances fit; use linkage=average or set a higher threshold"
            )
        found, heights = _all_distances(rows[leaders], linkage)
    else:
        means = np.stack([rows[group].mean(axis=0) for group in groups])
        found, heights = agglomerate(means, np.array([len(group) for group in groups]), linkage, limit)
    note = (
        f"{len(rows)} entries hang together at similarity {threshold}, more than {GIANT}: near duplicates "
        f"(cosine >= {copies:.3g}) were joined to {len(leaders)} leaders before clustering"
    )
    return np.concatenate([merges, leaders[found]]), np.concatenate([distances, heights]), note


def agglomerate(
    means: np.ndarray,  # [M, D] float32, the mean row of every group; overwritten
    counts: np.ndarray,  # [M] rows in it
    linkage: str,  # average or ward
    limit: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Merges [K, 2] of groups below `limit` and their heights, from means alone.

    All pairs of mutual nearest neighbours merge at once: these linkages are reducible (a merged group is no closer to a
    third than the closer of its parts), so such pairs merge in the tree too, and a group with none below the limit
    never gets one.
    """
    counts, top, alive = np.asarray(counts, np.float64).copy(), np.zeros(len(means)), np.ones(len(means), bool)
    partner, gap = np.full(len(means), -1), np.full(len(means), np.inf)
    merges, heights = [np.zeros((0, 2), int)], [np.zeros(0)]
    active = stale = np.arange(len(means))
    while len(active) > 1:
        partner[stale], gap[stale] = _nearest(means, counts, stale, active, linkage)
        alive[active[gap[active] >= limit + SLACK]] = False
        active = active[alive[active]]
        pairs = _mutual(active, partner, gap, alive)
        distance = _distance(means, counts, pairs, linkage)
        below = distance < limit
        alive[pairs[~below].ravel()] = False
        left, right = pairs[below].T
        share = (counts[left] / (counts[left] + counts[right]))[:, None].astype(np.float32)
        means[left] = share * means[left] + (1 - share) * means[right]
        counts[left] += counts[right]
        alive[right] = False
        top[left] = np.maximum(np.maximum(distance[below], top[left]), top[right])
        merges.append(pairs[below])
        heights.append(top[left])
        changed = ~alive
        changed[left] = True
        active = active[alive[active]]
        stale = active[changed[active] | changed[partner[active]]]
    return np.concatenate(merges), np.concatenate(heights)


def _mutual(active: np.ndarray, partner: np.ndarray, gap: np.ndarray, alive: np.ndarray) -> np.ndarray:
    """Pairs [P, 2] of mutual nearest neighbours; where rounding hides them all, the closest pair."""
    able = active[alive[partner[active]]]
    pairs = able[(partner[partner[able]] == able) & (able < partner[able])]
    if not len(pairs) and len(able):
        pairs = able[[np.argmin(gap[able])]]
    return np.sort(np.stack([pairs, partner[pairs]], axis=1), axis=1)


def _distance(means: np.ndarray, counts: np.ndarray, pairs: np.ndarray, linkage: str) -> np.ndarray:
    """The distance of every pair, in float64."""
    a, b = means[pairs[:, 0]].astype(np.float64), means[pairs[:, 1]].astype(np.float64)
    if linkage == "ward":
        m, n = counts[pairs[:, 0]], counts[pairs[:, 1]]
        return np.sqrt(2 * m * n / (m + n)) * np.linalg.norm(a - b, axis=1)
    return 1 - np.einsum("nd,nd->n", a, b)


def _nearest(
    means: np.ndarray, counts: np.ndarray, asked: np.ndarray, keys: np.ndarray, linkage: str
) -> tuple[np.ndarray, np.ndarray]:
    """For every asked group the nearest other among `keys` (ascending), and its distance."""
    partner, gap = np.full(len(asked), -1), np.full(len(asked), np.inf)
    # Ward multiplies what is left of a difference of squares by the size of the groups
    precision = np.float64 if linkage == "ward" else np.float32
    for some in _blocks(keys):
        key = means[some].astype(precision)
        for where in _blocks(np.arange(len(asked))):
            block = asked[where]
            query = means[block].astype(precision)
            near = query @ key.T
            if linkage == "ward":
                squares = [np.einsum("nd,nd->n", rows, rows) for rows in (query, key)]
                near = np.maximum(squares[0][:, None] + squares[1] - 2 * near, 0)
                m, n = counts[block, None], counts[some]
                near = np.sqrt(near * (2 * m * n / (m + n)))
            else:
                near = 1 - near
            near[block[:, None] == some] = np.inf
            first = np.argmin(near, axis=1)
            value = near[np.arange(len(block)), first]
            better = value < gap[where]
            gap[where[better]], partner[where[better]] = value[better], some[first[better]]
    return partner, gap


def _blocks(indices: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(indices), TILE):
        yield indices[start : start + TILE]
