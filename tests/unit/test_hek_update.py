"""The next version of a store, on an encoder whose cosines are known, with the abstractor's requests counted.

Must fail if near titles of two types join, if a removed member stays among the children, if small changes are forgotten
from version to version, if an id comes back, if a strategy keeps the old id of a pattern, if a rebuild forgets which
text was whose, or if the version before is changed.
"""

import copy
import math
from collections import defaultdict
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from writers import asked_of, lesson, members_of, scripted_reflector

from hiexp.config import ConfigError
from hiexp.encoder import HashEncoder
from hiexp.experience import LEVELS, Asked, check_lineage
from hiexp.hek import HEK, Experience, HEKConfig
from hiexp.hek_build import BuildConfig
from hiexp.hek_update import Book, RefreshConfig, next_version

CFG = BuildConfig(prompts="compact", threshold_1=0.8, threshold_2=0.5)
JOINED = replace(CFG, threshold_2=-0.5)
"""Patterns of any topics make a strategy."""


class AngleEncoder:
    """ "t3 a20 v5": 20 degrees away from the axis of topic 3, towards direction 5; topics are orthogonal."""

    fingerprint, dim = "angles", 96

    def encode(self, texts, kind):
        rows = np.zeros((len(texts), self.dim), np.float32)
        for row, text in zip(rows, texts, strict=True):
            topic, angle, way = (int(word[1:]) for word in text.split()[:3])
            row[topic], row[32 + way] = math.cos(math.radians(angle)), math.sin(math.radians(angle))
        return rows


ENCODER = AngleEncoder()


def case(title, description="d", kind="mixed", source=None):
    return Experience("new", 1, kind, title, description, qa_groups=(source or (f"q {title}", "?"),))


def store(groups, strategies=(), loose=()):
    """A built store: patterns over groups of titles, strategies over patterns, and cases without a pattern."""
    entries, n = [], 0
    patterns = [f"E2-{i:06d}" for i in range(len(groups))]
    above = {patterns[i]: f"E3-{j:06d}" for j, members in enumerate(strategies) for i in members}
    sources = {}
    for name, titles in zip([*patterns, None], [*groups, loose], strict=True):
        ids = []
        for title in titles:
            ids.append(f"E1-{n:06d}")
            entries.append(replace(case(title, f"case {n}"), id=ids[-1], parent_id=name))
            n += 1
        sources[name] = tuple(s for e in entries if e.id in ids for s in e.qa_groups)
        if name:
            text = (f"{titles[0].split()[0]} a0 v0", f"plan {name}")
            entries.append(Experience(name, 2, "pattern", *text, (), "", sources[name], tuple(ids), above.get(name)))
    for j, members in enumerate(strategies):
        ids = tuple(patterns[i] for i in members)
        merged = tuple(source for one in ids for source in sources[one])
        entries.append(Experience(f"E3-{j:06d}", 3, "strategy", "t31 a0 v0", f"rule {j}", (), "", merged, ids))
    return HEK(entries, ENCODER, HEKConfig(case_threshold=0.5))


def topic(number, count, angle=10, first=0):
    return [f"t{number} a{angle} v{first + i}" for i in range(count)]


def plan(prompt):
    """The abstraction of members: their topic, and how many they were."""
    members = members_of(prompt)
    return lesson(f"{members[0][0].split()[0]} a0 v0", f"plan of {' '.join(sorted(text for _, text in members))}")


class Abstractor:
    """Keeps the titles of every request in `asked`, level and topic."""

    def __init__(self, reply=plan):
        self.reflector = scripted_reflector(reply, ENCODER)

    @property
    def asked(self):
        """(level, topic of the first member) of each request."""
        prompts = asked_of(self.reflector)
        return [(int(p.split("level : ")[1][0]), members_of(p)[0][0].split()[0]) for p in prompts]


def update(hek, lessons=(), removed=(), abstractor=None, cfg=CFG, merge: float | None = 0.99, step=0, golds=None):
    """The next version, and the requests that it took; every version is checked."""
    abstractor = abstractor or Abstractor()
    new, counts = next_version(hek, lessons, removed, abstractor.reflector, golds or {}, cfg, merge, step)
    check(new, hek)
    return new, counts, abstractor.asked


def check(new, old):
    """What holds for every version."""
    check_lineage(list(new.by_id.values()))
    assert new.version == old.version + 1
    book = Book.of(new)
    for level, entries in new.levels.items():
        assert [e.id for e in entries] == sorted(e.id for e in entries)
        np.testing.assert_array_equal(new.vectors[level], ENCODER.encode([e.title for e in entries], "query"))
        for entry in entries:
            assert int(entry.id[3:]) < book.next[str(level)]
            if level > 1:
                children = [new.by_id[child] for child in entry.child_ids]
                assert children and set(entry.qa_groups) == {source for child in children for source in child.qa_groups}
    assert set(book.abstracted) == {e.id for level in (2, 3) for e in new.levels[level]}
    assert set(book.born) <= set(new.by_id)


def is_rebuilt(new, old):
    return Book.of(new).clustered["1"] != Book.of(old).clustered["1"]


def parents(hek):
    """Title -> title of what stands above it."""
    return {e.title: e.parent_id and hek.by_id[e.parent_id].title for e in hek.levels[1]}


# --- lessons ---


def test_the_same_text_adds_its_source_and_nothing_else():
    hek = store([topic(0, 5), topic(1, 5)])
    same = replace(hek.levels[1][2], id="other", parent_id=None, qa_groups=(("later", "?"),))
    for merge in (0.97, None):
        new, counts, asked = update(hek, [same, same], merge=merge)
        assert (counts["added"], counts["merged"], counts["level_1"], asked) == (0, 2, 10, [])
        entry = new.by_id["E1-000002"]
        assert entry == replace(hek.levels[1][2], qa_groups=(("q t0 a10 v2", "?"), ("later", "?")))
        assert {e.id for e in new.by_id.values()} == set(hek.by_id)
        assert ("later", "?") in new.by_id["E2-000000"].qa_groups
        assert ("later", "?") not in new.by_id["E2-000001"].qa_groups
    twice = [case("t2 a0 v0", "one text", source=("first", "?")), case("t2 a0 v0", "one text", source=("second", "?"))]
    new, counts, _ = update(hek, twice, merge=None)
    assert (counts["added"], counts["merged"]) == (1, 1)
    assert new.by_id["E1-000010"].qa_groups == (("first", "?"), ("second", "?"))


@pytest.mark.parametrize(("angle", "joins"), [(19, True), (20, True), (21, False)])
def test_a_near_title_joins_up_to_the_threshold_and_the_shorter_body_stays(angle, joins):
    hek = store([["t0 a0 v0", *topic(0, 5, 40, 1)], topic(1, 6)])  # "case 0" is two words
    near = math.cos(math.radians(20))
    for text, kept in (("a much longer body", "case 0"), ("short", "short")):
        new, counts, _ = update(hek, [case(f"t0 a{angle} v9", text)], merge=near)
        assert (counts["merged"], counts["added"]) == ((1, 0) if joins else (0, 1))
        entry = new.by_id["E1-000000"]
        assert entry.description == (kept if joins else "case 0") and entry.title == "t0 a0 v0"
        assert len(entry.qa_groups) == 1 + joins
    other = [case("t0 a0 v0", "short", "pitfall"), case("t0 a0 v0", "x", "pitfall"), case("t0 a1 v3", "y y", "pitfall")]
    new, counts, _ = update(hek, other, merge=near)
    assert (counts["added"], counts["merged"]) == (1, 2)  # none joins the mixed one, the later two the first
    [added] = [e for e in new.levels[1] if e.type == "pitfall"]
    assert len(added.qa_groups) == 2 and added.description == "short" and new.by_id["E1-000000"] == hek.levels[1][0]
    assert update(hek, [case("t0 a1 v9", "x")], merge=None)[1]["added"] == 1


def test_a_lesson_joins_the_nearest_entry_that_it_may_join():
    hek = store([["t0 a0 v0", "t0 a20 v1", *topic(0, 4, 40, 2)]])
    new, _, _ = update(hek, [case("t0 a15 v1", "long enough to lose")], merge=0.9)  # 15 and 5 degrees away
    assert [len(e.qa_groups) for e in new.levels[1]] == [1, 2, 1, 1, 1, 1]


# --- removal ---


def test_removal_takes_those_along_that_lost_their_last_member():
    hek = store([topic(0, 6), topic(1, 2), topic(2, 2)], [(0, 1), (2,)])
    new, counts, asked = update(hek, removed={"E1-000000", "E1-000006", "E1-000007", "E1-000008", "E1-000009"})
    assert counts["removed"] == 5 + 2 + 1  # patterns 1 and 2, strategy 1
    assert {e.id for e in new.levels[2]} == {"E2-000000"} and asked == [(3, "t0")]  # 1 of 6 cases, 1 of 2 patterns
    assert new.levels[2][0].child_ids == tuple(f"E1-{i:06d}" for i in range(1, 6))
    assert len(new.levels[3]) == 1 and new.levels[3][0].id == "E3-000002"
    assert all(source[0].split()[1] == "t0" for e in new.by_id.values() for source in e.qa_groups)


def test_a_removed_pattern_leaves_its_cases_and_its_strategy():
    hek = store([topic(0, 6), topic(1, 6), topic(2, 6)], [(0, 1, 2)])
    removed, counts, asked = update(hek, removed={"E2-000001"}, cfg=JOINED)
    assert counts["removed"] == 1 and len(removed.levels[1]) == 18
    assert asked == [(2, "t1"), (3, "t0")]  # its cases wait no longer: they are a cluster; a third of the strategy
    [fresh] = [e for e in removed.levels[2] if e.title.startswith("t1")]
    assert fresh.id == "E2-000003" and len(fresh.child_ids) == 6  # another text, another id
    none = update(hek, removed=set(hek.by_id))[0]
    assert len(none) == 0 and none.vectors[1].shape == (0, 96)
    again = update(none, [case(title) for title in topic(3, 3)])[0]
    assert [e.id for e in again.levels[1]] == [f"E1-{i:06d}" for i in range(18, 21)]


# --- what is abstracted again ---

BALLAST = [topic(8, 16), topic(9, 16)]


@pytest.mark.parametrize(
    ("members", "added", "gone", "is_asked"),
    [(4, 1, 0, True), (5, 1, 0, False), (8, 2, 0, True), (9, 2, 0, False), (5, 0, 1, True), (6, 0, 1, False)],
)
def test_a_pattern_is_written_again_from_a_fifth_of_changed_members_on(members, added, gone, is_asked):
    hek = store([topic(0, members), *BALLAST])
    lessons = [case(title, f"new {i}") for i, title in enumerate(topic(0, added, first=members))]
    new, counts, asked = update(hek, lessons, {f"E1-{i:06d}" for i in range(gone)})
    assert asked == ([(2, "t0")] if is_asked else []) and not is_rebuilt(new, hek)
    assert counts["abstracted"] == is_asked
    [pattern] = [e for e in new.levels[2] if e.title.startswith("t0")]
    assert len(pattern.child_ids) == members + added - gone
    assert pattern.id == ("E2-000003" if is_asked else "E2-000000")
    assert pattern.description.startswith("plan of " if is_asked else "plan E2-000000")


def test_small_changes_add_up_over_versions_until_the_text_is_made_again():
    hek, counts_of_asked = store([topic(0, 8), *BALLAST]), []
    for step in range(6):
        hek, _, asked = update(hek, [case(f"t0 a10 v{8 + step}", f"n{step}")], step=step)
        counts_of_asked.append(len(asked))
    # made of 8: 1/9, 2/10 (again, of 10), 1/11, 2/12, 3/13 (again, of 13), 1/14
    assert counts_of_asked == [0, 1, 0, 0, 1, 0]


def test_a_replaced_member_counts_once():
    hek = store([topic(0, 9), *BALLAST])
    hek, _, asked = update(hek, [case("t0 a10 v20", "n")])
    assert asked == []
    assert update(hek, removed={"E1-000000"})[2] == []  # one came and one went: 1 of 9 is another
    assert update(hek, removed={"E1-000000", "E1-000001"})[2] == [(2, "t0")]
    assert update(hek, removed={"E1-000041"})[2] == []  # the one that came has gone again


def test_nothing_is_asked_where_nothing_changed():
    hek = store([topic(0, 4), topic(1, 4)], [(0, 1)], loose=["t2 a0 v0"])
    new, counts, asked = update(hek)
    assert asked == [] and not any(counts[name] for name in ("added", "merged", "removed", "abstracted", "clustered"))
    assert new.by_id == hek.by_id and new.version == 1


def test_a_text_that_comes_out_the_same_keeps_its_id():
    hek = store([topic(0, 4), *BALLAST], [(0, 1, 2)])
    same = lambda prompt: lesson("t0 a0 v0", "plan E2-000000")  # noqa: E731
    new, _, asked = update(hek, [case("t0 a10 v5")], abstractor=Abstractor(same))
    assert asked == [(2, "t0")] and {e.id for e in new.levels[2]} == {e.id for e in hek.levels[2]}
    assert Book.of(new).abstracted["E2-000000"] == [*new.by_id["E2-000000"].child_ids]
    assert new.levels[3] and update(new)[2] == []


def test_an_abstraction_that_fails_keeps_the_old_text_and_is_asked_for_again():
    hek = store([topic(0, 4), *BALLAST])
    late = [case("t0 a10 v5", "late"), case("t1 a0 v0", "b"), case("t1 a10 v1", "c")]
    for reply in ("no", lesson("t0 a0 v0", "it is Oslo")):  # no object, and a gold answer
        golds = {f"q {one.title}": ("Oslo",) for one in late}
        new, counts, asked = update(hek, late, abstractor=Abstractor(lambda _, text=reply: text), golds=golds)
        assert asked == [(2, "t0"), (2, "t1")] and (counts["given_up"], counts["abstracted"]) == (2, 0)
        assert new.by_id["E2-000000"].description == "plan E2-000000"
        assert len(new.by_id["E2-000000"].child_ids) == 5  # the new member is there all the same
        assert parents(new)["t1 a0 v0"] is None  # a cluster without a text waits
        assert update(new)[2] == [(2, "t0"), (2, "t1")]


def test_what_waits_becomes_a_pattern_when_enough_of_it_is_there():
    hek = store([topic(0, 12), topic(1, 12)])
    hek, _, asked = update(hek, [case("t5 a0 v0", "first")], step=4)
    assert asked == [] and parents(hek)["t5 a0 v0"] is None
    before = hek
    hek, _, asked = update(hek, [case("t5 a10 v1", "second"), case("t6 a0 v0", "alone")], step=9)
    assert asked == [(2, "t5")] and not is_rebuilt(hek, before)
    [pattern] = [e for e in hek.levels[2] if e.title.startswith("t5")]
    assert pattern.child_ids == ("E1-000024", "E1-000025") and pattern.description == "plan of first second"
    assert parents(hek)["t6 a0 v0"] is None
    assert Book.of(hek).born == {"E1-000024": 4, "E1-000025": 9, "E1-000026": 9, "E2-000002": 9}


def test_a_new_lesson_goes_to_the_group_of_greatest_mean_cosine_or_waits():
    hek = store([topic(0, 8, 20), topic(1, 8, 20), topic(2, 8, 20)])
    lessons = [case("t1 a25 v20", "x"), case("t1 a35 v21", "y")]  # means cos 20 * cos 25 = 0.85, cos 20 * cos 35 = 0.77
    new, _, asked = update(hek, lessons)
    assert parents(new)["t1 a25 v20"] == "t1 a0 v0" and parents(new)["t1 a35 v21"] is None and asked == []


# --- rebuild ---


def test_a_rebuild_comes_with_a_fifth_of_late_entries_and_finds_the_old_texts():
    mixed = [*topic(0, 9), "t1 a10 v20", "t1 a10 v21"]  # two that belong elsewhere; only a rebuild parts them
    hek = store([mixed, topic(2, 9)])
    few = [case(title, "n") for title in topic(2, 4, first=10)]
    new, _, _ = update(hek, few)
    assert not is_rebuilt(new, hek) and parents(new)["t1 a10 v20"] == "t0 a0 v0"  # 4 of 24
    more = [*few, case("t2 a10 v15", "n")]
    new, _, asked = update(hek, more)  # 5 of 25
    assert is_rebuilt(new, hek)
    assert parents(new) | {"t1 a10 v21": "t1 a0 v0"} == parents(new) and parents(new)["t0 a10 v0"] == "t0 a0 v0"
    # 2 of 11 left the first, which keeps its text; two are a new group; 5 of 14 are new in the other
    assert sorted(asked) == [(2, "t1"), (2, "t2")] and new.by_id["E2-000000"].description == "plan E2-000000"
    assert not is_rebuilt(update(new, [case("t2 a10 v16", "n")])[0], new)  # counted anew from there
    other = store([topic(0, 8), topic(2, 8)])
    for step in range(4):  # one at a time: 1 of 17, 2 of 18, 3 of 19, 4 of 20
        before, other = other, update(other, [case(f"t0 a10 v{20 + step}", "n")], step=step)[0]
        assert is_rebuilt(other, before) == (step == 3)


def test_a_rebuild_gives_a_text_to_the_group_that_has_most_of_its_members():
    hek = store([[*topic(0, 7), *topic(1, 3, first=20)], [*topic(1, 7, first=10), *topic(0, 2, first=30)]])
    lessons = [case(title, "n") for title in topic(7, 5)]
    new, counts, asked = update(hek, lessons, abstractor=Abstractor(lambda _: "no"))
    assert counts["clustered"] == 1 and is_rebuilt(new, hek)
    names = {e.title: e.parent_id for e in new.levels[1]}
    assert names["t0 a10 v0"] == names["t0 a10 v30"] == "E2-000000"
    assert names["t1 a10 v10"] == names["t1 a10 v20"] == "E2-000001"
    assert names["t7 a10 v0"] is None and sorted(asked) == [(2, "t0"), (2, "t1"), (2, "t7")]


# --- strategies ---


def test_a_strategy_learns_the_new_id_of_a_pattern():
    patterns = [topic(i, 6) for i in range(12)]
    hek = store(patterns, [tuple(range(12))])
    new, _, asked = update(hek, [case("t3 a10 v20", "a"), case("t3 a10 v21", "b")], cfg=JOINED)
    assert asked == [(2, "t3")]  # 2 of 8 cases, but one of twelve patterns
    assert new.levels[3][0].id == "E3-000000" and new.levels[3][0].description == "rule 0"
    changed = set(hek.levels[3][0].child_ids) ^ set(new.levels[3][0].child_ids)
    assert changed == {"E2-000003", "E2-000012"} and new.by_id["E2-000012"].parent_id == "E3-000000"
    small = store(patterns[:4], [(0, 1, 2, 3)])
    new, _, asked = update(small, [case("t3 a10 v20", "a"), case("t3 a10 v21", "b")], cfg=JOINED)
    assert asked == [(2, "t3"), (3, "t0")] and [e.id for e in new.levels[3]] == ["E3-000001"]
    assert all(e.parent_id == "E3-000001" for e in new.levels[2])


@pytest.mark.parametrize("depth", [1, 2])
def test_a_shallower_build_leaves_deeper_levels_as_they_are_but_valid(depth):
    hek = store([topic(i, 6) for i in range(4)], [(0, 1), (2, 3)])
    cfg = replace(CFG, max_level=depth)
    abstractor = Abstractor()
    lessons = [case("t3 a10 v20", "a"), case("t3 a10 v21", "b")]
    made = next_version(hek, lessons, {f"E1-{i:06d}" for i in range(6)}, abstractor.reflector, {}, cfg, 0.97, 0)
    check_lineage(list(made[0].by_id.values()))
    assert abstractor.asked == ([(2, "t3")] if depth == 2 else [])
    assert [len(made[0].levels[level]) for level in LEVELS] == [20, 3, 2]
    assert [e.description for e in made[0].levels[3]] == ["rule 0", "rule 1"]


# --- versions ---


def tree(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def history(hek, folder=None):
    """Six versions of additions and removals; through files if a folder is given."""
    for step in range(6):
        lessons = [case(f"t{(step * k) % 7} a{8 + k} v{(11 * step + k) % 60}", f"s{step} k{k}") for k in range(1, 5)]
        gone = [e.id for e in hek.levels[1]][:: 5 + step][:3] + [e.id for e in hek.levels[2]][2:3]
        hek, _, _ = update(hek, lessons, gone, step=step)
        yield hek
        if folder is not None:
            hek.save(folder / f"v{step}")
            loaded = HEK.load(folder / f"v{step}", ENCODER, hek.cfg)
            assert loaded.by_id == hek.by_id and loaded.settings == hek.settings
            hek = loaded


def test_versions_from_files_are_those_from_memory_and_the_input_is_not_touched(tmp_path):
    hek = store([topic(0, 6), topic(1, 6), topic(2, 6)], [(0, 1, 2)]).with_asked([Asked("a", "t0 a0 v0", 0.5, 2)])
    before = copy.deepcopy((hek.levels, hek.by_id, hek.vectors, hek.settings))
    runs = [list(history(hek)), list(history(hek, tmp_path)), list(history(hek))]
    for a, b in zip((hek.levels, hek.by_id, hek.settings), (before[0], before[1], before[3]), strict=True):
        assert a == b
    assert all(np.array_equal(hek.vectors[n], before[2][n]) for n in LEVELS)
    for step, versions in enumerate(zip(*runs, strict=True)):
        for name, one in zip("ab", (versions[0], versions[2]), strict=True):
            one.save(tmp_path / f"{name}{step}")
            assert tree(tmp_path / f"{name}{step}") == tree(tmp_path / f"v{step}")
        assert versions[0].asked == hek.asked and versions[0].cfg == hek.cfg


def test_an_id_stands_for_one_text_in_all_versions():
    hek = store([topic(0, 6), topic(1, 6), topic(2, 6)], [(0, 1, 2)])
    texts, ended = defaultdict(set), set()
    for one in [hek, *history(hek)]:
        for e in one.by_id.values():
            texts[e.id].add((e.title, e.description if e.level > 1 else ""))  # a merge may shorten a case
        assert not ended & set(one.by_id)
        ended |= set(texts) - set(one.by_id)
    assert {len(found) for found in texts.values()} == {1} and len(ended) > 10
    newest = max(hek.levels[1], key=lambda e: e.id)
    gone, _, _ = update(hek, removed={newest.id})
    again, _, _ = update(gone, [replace(newest, parent_id=None)])
    assert newest.id not in again.by_id and "E1-000018" in again.by_id


def test_ids_of_another_make_are_left_alone():
    odd = Experience("lesson", 1, "mixed", "t0 a0 v0", "d", qa_groups=(("q", "?"),))
    hek = HEK([odd, replace(odd, id="E1-9", title="t1 a0 v0")], ENCODER)
    new, _, _ = update_odd(hek, [case("t4 a0 v0", "x")])
    assert set(new.by_id) >= {"lesson", "E1-9", "E1-000010"}


def update_odd(hek, lessons):
    return *next_version(hek, lessons, (), Abstractor().reflector, {}, CFG, 0.97, 0), None


def test_a_store_that_began_empty_grows_levels():
    hek = HEK((), ENCODER)
    hek, counts, asked = update(hek, [case("t0 a0 v0", "x")])
    assert (counts["level_1"], counts["level_2"], asked) == (1, 0, [])
    hek, _, asked = update(hek, [case(title, title) for number in (0, 1) for title in topic(number, 3)])
    assert sorted(asked) == [(2, "t0"), (2, "t1")] and [len(hek.levels[n]) for n in LEVELS] == [7, 2, 0]
    lone, _, _ = update(HEK((), ENCODER))
    assert len(lone) == 0 and lone.version == 1


def test_thresholds_are_those_of_the_build_until_a_rebuild_calibrates_them_anew():
    plain = replace(CFG, threshold_1=None, threshold_2=None)
    hek = store([topic(i, 8) for i in range(4)])
    levels = [{"level": 1, "threshold": 0.66}, {"level": 2, "threshold": 0.4}]
    hek = HEK(hek.by_id.values(), ENCODER, vectors=hek.vectors, settings={"report": {"levels": levels}})
    new, _, _ = update(hek, [case("t1 a47 v20", "x")], cfg=plain)  # mean cosine cos 10 * cos 47 = 0.67
    assert parents(new)["t1 a47 v20"] == "t1 a0 v0" and Book.of(new).thresholds == {"1": 0.66, "2": 0.4}
    new, counts, _ = update(hek, [case(title, "n") for title in topic(5, 8)], cfg=plain)
    assert counts["clustered"] >= 1 and Book.of(new).thresholds["1"] != 0.66
    assert {e.title.split()[0] for e in new.levels[2]} == {"t0", "t1", "t2", "t3", "t5"}


@settings(max_examples=25)
@given(
    steps=st.lists(
        st.tuples(
            st.lists(st.tuples(st.integers(0, 4), st.integers(0, 40), st.integers(0, 9)), max_size=6),
            st.lists(st.integers(0, 60), max_size=4),
            st.booleans(),
        ),
        min_size=1,
        max_size=5,
    ),
    is_calibrated=st.booleans(),
)
def test_any_sequence_of_lessons_and_removals_gives_valid_stores(steps, is_calibrated):
    cfg = replace(CFG, threshold_1=None, threshold_2=None) if is_calibrated else CFG
    hek, born = store([topic(0, 4), topic(1, 3)], [(0, 1)], loose=["t2 a0 v0"]), {}
    for number, (lessons, gone, fails) in enumerate(steps):
        names = sorted(hek.by_id)
        removed = {names[i % len(names)] for i in gone if names}
        cases = [case(f"t{t} a{a} v{v}", f"b{a % 3}", ("mixed", "pitfall")[v % 2], (f"n{number}.{i}", "?"))
                 for i, (t, a, v) in enumerate(lessons)]  # fmt: skip
        kept = {source for e in hek.levels[1] if e.id not in removed for source in e.qa_groups}
        new, counts, _ = update(hek, cases, removed, Abstractor((lambda _: "no") if fails else plan), cfg, step=number)
        assert {source for e in new.levels[1] for source in e.qa_groups} == kept | {c.qa_groups[0] for c in cases}
        assert not removed & set(new.by_id) and counts["added"] + counts["merged"] == len(cases)
        for e in new.by_id.values():
            assert born.setdefault(e.id, (number, e.title))[1] == e.title
            if e.id not in hek.by_id:
                assert Book.of(new).born[e.id] == number
        hek = new


# --- settings ---


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"every": -1}, "every=-1"),
        ({"groups": 0}, "groups=0"),
        ({"min_uses": 0}, "min_uses"),
        ({"unused_steps": 0}, "unused_steps"),
        ({"max_cases": 0}, "max_cases"),
        ({"gate_questions": -1}, "gate_questions"),
        ({"gate_samples": 0}, "gate_samples"),
        ({"gate_tolerance": -0.5}, "gate_tolerance"),
        ({"control": 0.0}, "control=0.0"),
        ({"control": 1.0}, "control=1.0"),
        ({"merge_threshold": 1.5}, "merge_threshold"),
    ],
)
def test_impossible_settings(change, key):
    with pytest.raises(ConfigError, match=key):
        RefreshConfig(**change)


def test_the_book_is_json_and_survives_it():
    new = update(store([topic(0, 5), *BALLAST]), [case("t0 a10 v9", "x")], step=3)[0]
    assert asdict(Book.of(new)) == new.settings["refresh"]
    assert Book.of(new).next == {"1": 38, "2": 3, "3": 0} and Book.of(new).born == {"E1-000037": 3}
    assert HashEncoder().dim != ENCODER.dim  # the width of an empty store is its encoder's
