"""The clustering of large inputs, made small: the sizes at which it changes its way are lowered.

Must fail if components are taken at a threshold above tau, if an edge of the graph is lost, if the distance of two
groups ignores their sizes, if a dead group is asked again, if a leader pass joins across the threshold, or if values
that are not finite pass."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st
from scipy.sparse.csgraph import connected_components
from sklearn.cluster import AgglomerativeClustering

from hiexp import clustering, components
from hiexp.clustering import (
    HEIGHTS,
    assign,
    calibrate_threshold,
    centroids,
    cluster,
    height,
    near_duplicates,
)
from hiexp.config import ConfigError
from hiexp.encoder import unit_rows

LINKAGES = ("average", "complete", "ward")


def titles(n, d, seed, groups=6, spread=0.35):
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(groups, d))
    return unit_rows(centres[rng.integers(groups, size=n)] + spread * rng.normal(size=(n, d)))


def sizes(monkeypatch, **values):
    for name, value in values.items():
        for module in (clustering, components):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)


@pytest.fixture
def split(monkeypatch):
    """Graph and components from 9 rows on, in tiles of 16, with no giant."""
    sizes(monkeypatch, WHOLE=8, TILE=16, MANY=20, GIANT=10**9)


@pytest.fixture
def giant(monkeypatch):
    """Every component of more than 10 rows is a giant, with no duplicates."""
    sizes(monkeypatch, WHOLE=8, TILE=16, MANY=20, GIANT=10, DUPLICATE=2.0)


def scikit_learn(rows, threshold, kind):
    metric = {"ward": "euclidean"}.get(kind, "cosine")
    settings: dict[str, Any] = {"n_clusters": None, "distance_threshold": height(threshold, kind)}
    model = AgglomerativeClustering(linkage=kind, metric=metric, **settings)
    groups = {}
    for i, label in enumerate(model.fit_predict(np.asarray(rows, np.float64))):
        groups.setdefault(label, []).append(i)
    return sorted(groups.values())


@limits(deadline=None, max_examples=40)
@given(st.integers(9, 150), st.integers(2, 16), st.integers(0, 10**6), st.sampled_from([0.99, 0.9, 0.7, 0.4, -0.3]))
@pytest.mark.parametrize("kind", LINKAGES)
def test_components_give_the_labels_of_the_global_run(kind, n, d, seed, threshold):
    rows = titles(n, d, seed, groups=1 + seed % 20, spread=0.1 + seed % 7 / 10)
    with pytest.MonkeyPatch.context() as patch:
        sizes(patch, WHOLE=8, TILE=16, MANY=20, GIANT=10**9)
        assert cluster(rows, threshold, kind) == scikit_learn(rows, threshold, kind)


@limits(deadline=None, max_examples=40)
@given(st.integers(11, 150), st.integers(2, 16), st.integers(0, 10**6), st.sampled_from([0.99, 0.9, 0.7, 0.4, -0.3]))
@pytest.mark.parametrize("kind", ["average", "ward"])
def test_merging_by_means_gives_the_labels_of_the_global_run(kind, n, d, seed, threshold):
    rows = titles(n, d, seed, groups=1 + seed % 20, spread=0.1 + seed % 7 / 10)
    with pytest.MonkeyPatch.context() as patch:
        sizes(patch, WHOLE=8, TILE=16, GIANT=10, DUPLICATE=2.0)
        assert cluster(rows, threshold, kind) == scikit_learn(rows, threshold, kind)


def test_several_components_are_found_and_clustered_apart(split, monkeypatch):
    """The point of it: no matrix of all distances."""
    rows, seen = titles(200, 16, seed=2, groups=25, spread=0.2), []
    whole = components._all_distances
    monkeypatch.setattr(components, "_all_distances", lambda v, kind: seen.append(len(v)) or whole(v, kind))
    assert cluster(rows, 0.8) == scikit_learn(rows, 0.8, "average")
    assert len(seen) > 10 and max(seen) < 40


@pytest.mark.parametrize("threshold", [0.97, 0.95, 0.9])
def test_components_are_those_of_the_whole_graph(split, threshold):
    rows = titles(150, 8, seed=4, groups=30)
    expected = connected_components(rows @ rows.T > threshold - components.SLACK)[1]
    found = components.components(rows, [0.99, threshold])[1]
    np.testing.assert_array_equal(np.unique(found, return_inverse=True)[1], expected)
    assert np.bincount(found).max() < 150


def test_a_threshold_whose_component_is_too_large_is_followed_no_further(split):
    rows = titles(150, 8, seed=4, groups=30)
    strict, loose = components.components(rows, [0.95, 0.2], limit=60)
    assert strict.any() and not loose.any()


@pytest.mark.parametrize("kind", LINKAGES)
@pytest.mark.parametrize("at_most", [1.0, 0.9, 0.72, 0.3, 0.1])
def test_calibration_of_a_large_input_is_that_of_a_small_one(kind, at_most, monkeypatch):
    for seed, level in ((5, 1), (6, 2), (7, 1)):
        rows = titles(200, 16, seed, groups=10 * level + seed, spread=0.15 * seed - 0.5)
        expected = calibrate_threshold(rows, level, kind, at_most)
        with monkeypatch.context() as patch:
            sizes(patch, WHOLE=8, TILE=16, MANY=20, GIANT=10**9)
            assert calibrate_threshold(rows, level, kind, at_most) == expected
            if kind != "complete":
                sizes(patch, GIANT=20, DUPLICATE=2.0)
                tau, how = calibrate_threshold(rows, level, kind, at_most)
                assert (tau, how.split(";")[0]) == expected


@pytest.mark.parametrize("kind", LINKAGES)
def test_a_giant_component_joins_near_duplicates_first_and_says_so(kind, monkeypatch):
    base = titles(12, 8, seed=1, groups=1, spread=0.6)
    rng = np.random.default_rng(0)
    rows = unit_rows(np.repeat(base, 5, axis=0) + 0.02 * rng.normal(size=(60, 8)))
    sizes(monkeypatch, WHOLE=8, TILE=16, GIANT=40)
    notes = []
    groups = cluster(rows, 0.6, kind, notes)
    expected = scikit_learn(rows, 0.6, kind)
    if kind == "complete":  # of leaders alone: the largest distance of two groups is taken between these
        leading = scikit_learn(rows[::5], 0.6, kind)
        expected = [[row for i in group for row in range(5 * i, 5 * i + 5)] for group in leading]
    assert groups == expected and 1 < len(groups) < 12
    assert len(notes) == 1 and "60 entries" in notes[0] and "12 leaders" in notes[0]
    cluster(rows[:30], 0.6, kind, notes)
    assert len(notes) == 1


def test_a_leader_stands_for_the_mean_of_its_copies(monkeypatch):
    """The mean cosine of the last row is 0.680, that to the leader alone 0.574."""
    sizes(monkeypatch, WHOLE=2, GIANT=2)
    angles = np.radians([0, 10, 10, 10, 10, 55])
    rows = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    assert cluster(rows, 0.65) == scikit_learn(rows, 0.65, "average") == [[0, 1, 2, 3, 4, 5]]


def test_complete_linkage_refuses_a_component_that_does_not_fit(giant):
    with pytest.raises(ConfigError, match=r"complete.*linkage=average"):
        cluster(titles(60, 8, seed=0, groups=1), 0.1, "complete")


def test_the_leader_pass_keeps_a_pair_at_the_threshold_apart(monkeypatch):
    sizes(monkeypatch, WHOLE=2, GIANT=2)
    row = np.array([[1, 0], [0.984375, np.sqrt(1 - 0.984375**2)], [1, 0], [1, 0]], np.float32)
    assert cluster(row, 0.984375) == [[0, 2, 3], [1]]
    assert cluster(row, 0.984) == [[0, 1, 2, 3]]


@pytest.mark.parametrize("kind", LINKAGES)
@pytest.mark.parametrize("way", ["split", "giant"])
def test_B106_exactly_at_the_threshold_stays_apart_at_any_size(kind, way, request):
    request.getfixturevalue(way)
    pair = np.array([[1, 0], [0.75, np.sqrt(1 - 0.5625)]])
    rows = np.zeros((12, 12))
    for i in range(6):  # six pairs, each in a plane of its own
        rows[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = pair
    alone = [[i] for i in range(12)]
    assert cluster(rows, 0.75 + 1e-9 * (kind == "ward"), kind) == alone  # a square root has no exact 0.75
    assert cluster(rows, 0.75 - 1e-6, kind) == [[2 * i, 2 * i + 1] for i in range(6)]


@pytest.mark.parametrize("kind", LINKAGES)
def test_identical_and_zero_rows_at_any_size(kind, split, monkeypatch):
    rows = np.vstack([np.repeat(np.eye(4)[:1], 30, 0), np.zeros((5, 4)), np.repeat(np.eye(4)[1:2], 30, 0)])
    expected = [list(range(30)), *[[i] for i in range(30, 35)], list(range(35, 65))]
    assert cluster(rows, 0.999, kind) == expected
    sizes(monkeypatch, GIANT=10)
    assert cluster(rows, 0.9, kind) == expected


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", LINKAGES)
def test_values_that_are_not_finite_are_refused_with_their_rows(bad, kind):
    rows = titles(20, 4, seed=0)
    rows[[3, 17], 1] = bad
    for call in (lambda: cluster(rows, 0.8, kind), lambda: calibrate_threshold(rows, 1, kind)):
        with pytest.raises(ValueError, match=r"2 of 20 vectors are not finite, first rows \[3, 17\]"):
            call()
    with pytest.raises(ValueError, match="not finite"):
        assign(rows, np.eye(4), 0.5)


def test_near_duplicates_in_tiles_are_those_of_a_loop(monkeypatch):
    sizes(monkeypatch, TILE=16)
    rows = titles(150, 4, seed=3, groups=9, spread=0.2)
    kinds = [str(i % 2) for i in range(150)]
    for threshold in (0.99, 0.9, 0.6):
        groups = []
        for i in range(150):
            near = [(float(rows[g[0]] @ rows[i]), -k) for k, g in enumerate(groups) if kinds[g[0]] == kinds[i]]
            if near and max(near)[0] >= threshold:
                groups[-max(near)[1]].append(i)
            else:
                groups.append([i])
        assert near_duplicates(rows, kinds, threshold) == groups


def test_a_new_row_joins_the_group_of_greatest_mean_cosine():
    rows = titles(60, 6, seed=1)
    groups, new = cluster(rows, 0.7), titles(40, 6, seed=1, spread=0.6)
    found = assign(new, centroids(rows, groups), 0.7)
    for row, place in zip(new, found, strict=True):
        means = [float(np.mean([np.dot(row, rows[i]) for i in group])) for group in groups]
        assert place == (int(np.argmax(means)) if max(means) >= 0.7 else -1)
    assert {-1} < set(found.tolist())


def test_a_new_row_at_the_threshold_joins_and_one_that_says_nothing_waits():
    means = centroids(np.eye(2), [[0], [1]])
    new = np.array([[0.6, 0.8], [0.0, 0.0], [np.sqrt(0.5), np.sqrt(0.5)]], np.float32)
    assert assign(new, means, 0.8).tolist() == [1, -1, -1]
    assert assign(new, means, 0.5).tolist() == [1, -1, 0]  # of equals the first
    assert assign(new, means[:0], -1.0).tolist() == [-1, -1, -1]
    assert assign(new[:0], means, 0.5).tolist() == []
    assert centroids(np.eye(3), []).shape == (0, 3)


def test_every_linkage_that_is_offered_is_tested():
    assert set(HEIGHTS) == set(LINKAGES)
