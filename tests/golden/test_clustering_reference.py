"""Clustering against scikit-learn's own labels, scipy, a naive loop in pure Python, and known height
facts. Broken on purpose, each of these failed: `<=` for `<`, similarities as distances, zero rows kept, h =
tau."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import pdist
from sklearn.cluster import AgglomerativeClustering

from hiexp.clustering import (
    calibrate_threshold,
    cluster,
    height,
    near_duplicates,
    representatives,
)
from hiexp.config import ConfigError
from hiexp.encoder import unit_rows

LINKAGES = ("average", "complete", "ward")


def titles(n, d, seed, groups=6, spread=0.35):
    """Unit rows around a few directions, as titles of question families are."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(groups, d))
    return unit_rows(centres[rng.integers(groups, size=n)] + spread * rng.normal(size=(n, d)))


def at_cosine(s, n=1):
    """n copies of one unit vector and n of another at cosine s."""
    return np.array([[1.0, 0.0]] * n + [[s, np.sqrt(1 - s * s)]] * n)


def partition(labels):
    groups = {}
    for i, label in enumerate(labels):
        groups.setdefault(label, []).append(i)
    return sorted(groups.values())


def naive(rows, threshold, kind):
    """Merge the closest two clusters while their distance is below 1 - threshold; O(n^4), pure Python."""
    distance = [[1 - float(np.dot(a, b)) for b in rows] for a in rows]
    groups = [[i] for i in range(len(rows))]
    while len(groups) > 1:
        best = None
        for a in range(len(groups)):
            for b in range(a + 1, len(groups)):
                pairs = [distance[i][j] for i in groups[a] for j in groups[b]]
                d = max(pairs) if kind == "complete" else sum(pairs) / len(pairs)
                if best is None or d < best[0]:
                    best = (d, a, b)
        if not best[0] < 1 - threshold:
            break
        groups[best[1]] += groups.pop(best[2])
    return sorted(sorted(group) for group in groups)


@pytest.mark.parametrize("kind", ["average", "complete"])
@pytest.mark.parametrize("threshold", [0.95, 0.8, 0.5, 0.1])
def test_equals_a_naive_loop(kind, threshold):
    rows = titles(24, 8, seed=3)
    assert cluster(rows, threshold, kind) == naive(np.asarray(rows, np.float64), threshold, kind)


@pytest.mark.parametrize("kind", LINKAGES)
@pytest.mark.parametrize("threshold", [0.97, 0.9, 0.75, 0.4, -0.5])
def test_equals_scikit_learn_and_scipy(kind, threshold):
    rows = np.asarray(titles(120, 16, seed=1), np.float64)
    h = height(threshold, kind)
    metric = {"ward": "euclidean"}.get(kind, "cosine")
    model = AgglomerativeClustering(n_clusters=None, distance_threshold=h, linkage=kind, metric=metric)
    ours = cluster(rows, threshold, kind)
    assert ours == partition(model.fit_predict(rows))
    tree = linkage(pdist(rows, metric), method=kind)
    assert ours == partition(fcluster(tree, np.nextafter(h, 0), criterion="distance"))


@pytest.mark.parametrize("s", [0.5, 0.8, 0.9, 0.95])
@pytest.mark.parametrize("n", [1, 2, 4, 16, 64])
def test_height_facts(s, n):
    """Average and complete merge at 1 - s for every size; Ward at sqrt(2 - 2s) * sqrt(n)."""
    rows = at_cosine(s, n)
    together, apart = [list(range(2 * n))], [list(range(n)), list(range(n, 2 * n))]
    for kind in ("average", "complete"):
        assert cluster(rows, s - 1e-7, kind) == together
        assert cluster(rows, s + 1e-7, kind) == apart
    ward = np.sqrt(2 - 2 * s) * np.sqrt(n)
    for h, expected in ((ward * (1 + 1e-6), together), (ward * (1 - 1e-6), apart)):
        tau = 1 - h * h / 2  # the tau whose height is h, below -1 for large groups
        assert cluster(rows, tau, "ward") == expected


def test_B106_exactly_at_the_threshold_stays_apart():
    rows = np.array([[1.0, 0.0, 0.0], [0.75, np.sqrt(1 - 0.5625), 0.0]])  # distance 0.25, exact in floats
    assert cluster(rows, 0.75) == [[0], [1]]
    assert cluster(rows, 0.75 - 1e-7) == [[0, 1]]


def test_B109_the_similar_ones_are_joined():
    gram = np.array([[1, 0.9, 0.1], [0.9, 1, 0.1], [0.1, 0.1, 1]])
    rows = np.linalg.cholesky(gram)
    for kind in LINKAGES:
        assert cluster(rows, 0.8, kind) == [[0, 1], [2]]
    with pytest.raises(ConfigError, match="average"):
        cluster(rows, 0.8, "averge")


@pytest.mark.parametrize("kind", LINKAGES)
def test_B65_none_one_and_two_rows(kind):
    assert cluster(np.zeros((0, 4), np.float32), 0.5, kind) == []
    assert cluster(np.eye(4)[:1], 0.5, kind) == [[0]]
    assert cluster(np.eye(4)[:2], 0.5, kind) == [[0], [1]]
    assert cluster(np.eye(4)[[0, 0]], 0.5, kind) == [[0, 1]]
    for n in range(3):
        assert calibrate_threshold(np.eye(4)[:n], 1, kind)[0] == 0.92


@pytest.mark.parametrize("kind", LINKAGES)
def test_a_row_that_says_nothing_is_alone(kind):
    rows = np.array([[0, 0], [1, 0], [0, 0], [1, 0]], np.float32)
    assert cluster(rows, -1, kind) == [[0], [1, 3], [2]]


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 40), st.integers(0, 10**6), st.sampled_from([0.9, 0.7, 0.4]))
def test_properties(n, seed, threshold):
    """A partition; looser thresholds only join; complete linkage keeps every pair above the threshold."""
    rows = np.asarray(titles(n, 5, seed), np.float64)
    for kind in LINKAGES:
        groups = cluster(rows, threshold, kind)
        assert sorted(i for group in groups for i in group) == list(range(n))
        loose = cluster(rows, threshold - 0.2, kind)
        assert all(any(set(group) <= set(other) for other in loose) for group in groups)
    for group in cluster(rows, threshold, "complete"):
        assert (rows[group] @ rows[group].T).min() > threshold - 1e-9


def sizes_at(rows, threshold, kind):
    return [len(g) for g in cluster(rows, threshold, kind) if len(g) > 1]


@pytest.mark.parametrize("kind", LINKAGES)
def test_calibration_is_the_strictest_useful_threshold(kind):
    """Scanned again, independently, over the whole grid."""
    rows = titles(200, 16, seed=5, groups=30, spread=0.3)
    tau, how = calibrate_threshold(rows, 1, kind)
    useful = []
    for candidate in np.arange(0.995, 0.2999, -0.005).round(3):
        sizes = sizes_at(rows, candidate, kind)
        if sizes and 4 <= np.mean(sizes) <= 12 and max(sizes) <= 20 and sum(sizes) >= 120:
            useful.append(candidate)
    assert how == "calibrated" and tau == useful[0]


def test_calibration_says_when_it_had_to_give_way():
    assert calibrate_threshold(np.eye(30), 2) == (
        0.88,
        "default, since no threshold gave clusters of a useful size",
    )
    assert calibrate_threshold(np.eye(30), 2, at_most=0.7)[0] == 0.7
    few = unit_rows(np.vstack([np.repeat(np.eye(40)[:1], 5, 0), np.eye(40)]))  # one cluster of 6 among 45
    tau, how = calibrate_threshold(few, 1)
    assert tau == 0.995 and "less than 60%" in how
    assert calibrate_threshold(few, 1, at_most=0.6)[0] == 0.6


def test_representatives_are_the_medoid_and_then_the_farthest():
    angles = np.radians([0, 10, 20, 30, 80])
    rows = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    mean = [np.mean([np.cos(a - b) for b in angles]) for a in angles]
    assert int(np.argmax(mean)) == 3
    assert representatives(rows, 3) == [3, 4, 0]  # 80 is 50 away from 30; then 0 is 30 away from 30
    assert sorted(representatives(rows, 9)) == [0, 1, 2, 3, 4]
    assert representatives(rows[[0, 0, 0]], 2) == [0, 1]


def test_near_duplicates_join_the_closest_leader_of_their_kind():
    angles = np.radians([0, 5, 20, 24, 3, 12])
    rows = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    kinds = ["a", "a", "a", "a", "b", "a"]
    limit = np.cos(np.radians(8))
    assert near_duplicates(rows, kinds, limit) == [[0, 1], [2, 3, 5], [4]]  # 12 is 8 from 20, at the limit
    assert near_duplicates(rows[:0], [], 0.9) == []
