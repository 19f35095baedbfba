"""The store: retrieval against brute force, files against every kind of damage. Broken on purpose, each of
these failed: `>` for `>=`, ties by position, exclusion by any source at level 2, vectors in another order."""

import json
import re
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hiexp.config import ConfigError
from hiexp.encoder import HashEncoder, unit_rows
from hiexp.hek import HEK, Experience, HEKConfig
from hiexp.hits import fill


class TableEncoder:
    """Text -> a given vector, normalised."""

    def __init__(self, table, name="table"):
        self.table, self.fingerprint = table, name
        self.dim = len(next(iter(table.values())))

    def encode(self, texts, kind):
        assert kind == "query"  # titles and queries are alike: symmetric
        return unit_rows(np.array([self.table[text] for text in texts], float).reshape(len(texts), self.dim))


def case(number, title, *qids, level=1, **fields):
    sources = tuple((qid, f"question {qid}") for qid in qids)
    return Experience(f"E{level}-{number:06d}", level, "mixed", title, f"do {number}", qa_groups=sources, **fields)


def words(text):
    return len(text.split())


def ids(hits):
    return [hit.experience.id for hit in hits]


def case_blocks(hek, queries, samples, shown, budget):
    return [fill(hits, words, budget, cut=True) for hits in hek.cases(queries, samples, shown)]


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_retrieve_equals_brute_force(data):
    """Small integer vectors: many exact ties and zero rows. The reference is plain Python."""
    vector = st.tuples(*[st.integers(-2, 2)] * 3)
    keys = data.draw(st.lists(vector, min_size=1, max_size=12))
    queries = data.draw(st.lists(vector, min_size=1, max_size=4))
    threshold = data.draw(st.sampled_from([-1.0, 0.0, 0.5, 0.8, 1.0]))
    top_k = data.draw(st.integers(1, 5))
    table = {f"t{i}": key for i, key in enumerate(keys)} | {f"q{i}": query for i, query in enumerate(queries)}
    order = data.draw(st.permutations(range(len(keys))))
    entries = [case(i, f"t{i}", f"s{i % 3}") for i in order]
    hek = HEK(entries, TableEncoder(table), HEKConfig(case_threshold=threshold))
    exclude = [f"s{i % 4}" for i in range(len(queries))]
    found = hek.retrieve([f"q{i}" for i in range(len(queries))], 1, top_k, exclude)

    def score(a, b):
        length = np.sqrt(np.dot(a, a) * np.dot(b, b))
        return float(np.dot(a, b) / length) if length else 0.0

    for i, query in enumerate(queries):
        mine = {j: score(query, key) for j, key in enumerate(keys) if f"s{j % 3}" != exclude[i] and any(query)}
        got = [int(hit.experience.id[3:]) for hit in found[i]]
        left = [value for j, value in mine.items() if j not in got]
        assert len(got) <= top_k and set(got) <= set(mine) and all(hit.accepted for hit in found[i])
        assert [hit.score for hit in found[i]] == pytest.approx([mine[j] for j in got], abs=1e-6)
        assert all(mine[j] >= threshold - 2e-6 for j in got)
        assert all(v < threshold if len(got) < top_k else v <= mine[got[-1]] + 2e-6 for v in left)
        for a, b in pairwise(got):
            assert mine[a] > mine[b] - 2e-6 and (keys[a] != keys[b] or a < b)


def test_B45_threshold_is_inclusive_and_on_cosines():
    table = {"far": (3, 4), "edge": (4, 3), "same": (50, 0), "q": (1, 0)}
    hek = HEK([case(1, "far"), case(2, "edge"), case(3, "same")], TableEncoder(table))
    assert ids(hek.retrieve(["q"], 1, 3)[0]) == ["E1-000003", "E1-000002"]  # 1.0, and 0.8 exactly
    everything = hek.retrieve(["q"], 1, 3, include_rejected=True)[0]
    assert [(round(hit.score, 6), hit.accepted) for hit in everything] == [
        (1.0, True),
        (0.8, True),
        (0.6, False),
    ]
    above = HEK(hek.levels[1], hek.encoder, HEKConfig(case_threshold=0.80001))
    assert ids(above.retrieve(["q"], 1, 3)[0]) == ["E1-000003"]


@pytest.mark.parametrize(("dim", "count"), [(37, 33), (37, 257), (128, 5), (384, 101), (768, 1001)])
def test_equal_titles_come_in_order_of_id_wherever_they_stand(dim, count):
    """A matrix product need not give equal columns equal last bits: at these shapes some of them differ."""
    rng = np.random.default_rng(0)
    table = {"near": rng.normal(size=dim), "far": rng.normal(size=dim)}
    table |= {f"q{i}": table["near"] + 0.3 * rng.normal(size=dim) for i in range(9)}
    entries = [case(i, "far" if i % 3 else "near") for i in rng.permutation(count)]
    hek = HEK(entries, TableEncoder(table), HEKConfig(case_threshold=-1))
    order = [i for rest in ((0,), (1, 2)) for i in range(count) if i % 3 in rest]
    for hits in [*hek.retrieve([f"q{i}" for i in range(9)], 1, count), *hek.retrieve(["q0"], 1, count)]:
        assert ids(hits) == [f"E1-{i:06d}" for i in order]


def test_own_question_is_hidden_at_level_1_always_above_only_as_sole_source():
    table = {"t": (1, 0), "q": (1, 0)}
    entries = [
        case(1, "t", "a", "b"), case(2, "t", "b"),
        case(1, "t", "a", level=2), case(2, "t", "a", "b", level=2), case(1, "t", "a", level=3),
    ]  # fmt: skip
    hek = HEK(entries, TableEncoder(table))
    assert ids(hek.retrieve(["q"], 1, 9, ["a"])[0]) == ["E1-000002"]
    assert ids(hek.retrieve(["q"], 2, 9, ["a"])[0]) == ["E2-000002"]
    assert ids(hek.retrieve(["q"], 3, 9, ["a"])[0]) == []
    assert ids(hek.retrieve(["q"], 1, 9, ["c"])[0]) == ["E1-000001", "E1-000002"]
    paper = HEK(entries, hek.encoder, HEKConfig(exclude_self=False))
    assert len(paper.retrieve(["q"], 1, 9, ["a"])[0]) == 2
    with pytest.raises(ValueError, match="for 1 queries"):
        hek.retrieve(["q"], 1, 9, ["a", "b"])


def test_each_query_has_its_own_exclusion():
    hek = HEK([case(i, "t", f"s{i}") for i in range(3)], TableEncoder({"t": (1, 0), "q": (1, 0)}))
    found = hek.retrieve(["q", "q", "q"], 1, 1, ["s0", "", "s1"])
    assert [ids(hits) for hits in found] == [["E1-000001"], ["E1-000000"], ["E1-000000"]]


def test_what_was_said_is_not_said_again_and_nothing_worse_takes_its_place():
    said = replace(case(1, "t"), description="do it")
    same_words = [replace(case(2, "t"), description="do it"), replace(case(3, "t", level=2), description="do it")]
    other = replace(case(4, "u"), description="else")
    table = {"t": (1, 0), "u": (9, 1), "q": (1, 0)}
    hek = HEK([said, *same_words, other], TableEncoder(table), HEKConfig(case_top_k=1))
    for shown in ({"E1-000001"}, {"E1-000002"}, {"E2-000003"}):
        assert case_blocks(hek, ["q"], ["s"], [shown], 9) == [("", ())]
    two = HEK([said, other], TableEncoder(table), HEKConfig(case_top_k=2))
    assert case_blocks(two, ["q"], ["s"], [{"E1-000001"}], 9) == [("- u: else", ("E1-000004",))]


def test_strategies_fill_the_budget_in_rank_order_and_abstain_below_the_threshold():
    table = {"a": (10, 1), "b": (10, 2), "c": (6, 8), "off": (-1, 9), "q": (1, 0)}  # c at 0.6
    entries = [
        replace(case(i, title, level=2), description=text)
        for i, (title, text) in enumerate([("a", "one two"), ("b", "x " * 20), ("c", "three"), ("off", "never")])
    ]
    hek = HEK(entries, TableEncoder(table), HEKConfig(strategy_threshold=0.5))
    [(text, shown)] = hek.strategy_block(["q"], ["s"], 2, words, 8)
    assert text == "- a: one two\n- c: three" and shown == ("E2-000000", "E2-000002")
    assert hek.strategy_block(["q"], ["s"], 2, words, 3) == [("- c: three", ("E2-000002",))]
    assert hek.strategy_block(["off", "q"], ["s", "s"], 2, words, 3)[0] == ("- off: never", ("E2-000003",))
    assert hek.strategy_block(["q"], ["s"], 3, words, 99) == [("", ())]
    assert hek.strategy_block(["q"], ["s"], 0, words, 99) == [("", ())]
    top1 = HEK(entries, hek.encoder, HEKConfig(strategy_top_k=1))
    assert top1.strategy_block(["q"], ["s"], 2, words, 99)[0][1] == ("E2-000000",)


def test_a_case_is_cut_to_its_budget_and_shown_once():
    entry = replace(case(1, "t"), description="one two three four")
    hek = HEK([entry], TableEncoder({"t": (1, 0), "q": (1, 0)}))
    assert case_blocks(hek, ["q"], ["s"], [set()], 4) == [("- t: one two", ("E1-000001",))]
    assert case_blocks(hek, ["q"], ["s"], [{"E1-000001"}], 4) == [("", ())]
    assert case_blocks(hek, ["q"], ["s"], [set()], 1) == [("", ())]


def test_a_query_that_the_encoder_knows_nothing_of_finds_nothing():
    hek = HEK([case(1, "t", level=2)], TableEncoder({"t": (1, 0), "?": (0, 0)}))
    assert hek.retrieve(["?"], 2, 5) == [[]]


def test_empty_store_answers_with_nothing_and_is_not_saved(tmp_path):
    hek = HEK.empty()
    assert len(hek) == 0 and hek.retrieve(["a", "b"], 1, 3, ["x", "y"]) == [[], []]
    assert hek.strategy_block(["a"], ["x"], 2, words, 9) == case_blocks(hek, ["a"], ["x"], [()], 9) == [("", ())]
    with pytest.raises(ValueError, match="not saved"):
        hek.save(tmp_path / "hek")


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([case(1, "t"), case(1, "t")], "same id"),
        ([case(1, "t", level=4)], "level 4"),
        ([case(1, "t", level=2, child_ids=("E1-000009",))], "child E1-000009"),
        ([case(1, "t"), case(1, "t", level=2, child_ids=("E1-000001",))], "child E1-000001"),
        ([case(1, "t", parent_id="E2-000001"), case(1, "t", level=2)], "parent E2-000001"),
    ],
)
def test_lineage_must_agree_in_both_directions(entries, message):
    with pytest.raises(ValueError, match=message):
        HEK(entries, HashEncoder(8))


@pytest.mark.parametrize("settings_", [{"case_threshold": 80}, {"strategy_top_k": 0}])
def test_impossible_settings(settings_):
    with pytest.raises(ConfigError, match=next(iter(settings_))):
        HEKConfig(**settings_)


def small_hek(encoder):
    entries = [
        case(2, "who founded a city \u2028 line", "b", parent_id="E2-000001", tags=("x", "y"), thinking="why"),
        case(1, "when was a band made", "a", parent_id="E2-000001"),
        case(3, "where is it", "c"),
        case(1, "who or when", "a", "b", level=2, child_ids=("E1-000001", "E1-000002")),
    ]
    return HEK(entries, encoder, settings={"threshold_1": 0.4})


def test_save_and_load_give_an_equal_store(tmp_path):
    encoder = HashEncoder(64)
    hek = small_hek(encoder)
    hek.save(tmp_path / "runs" / "hek")
    loaded = HEK.load(tmp_path / "runs" / "hek", encoder)
    assert loaded.levels == hek.levels and loaded.settings == {"threshold_1": 0.4}
    for level, rows in hek.vectors.items():
        np.testing.assert_array_equal(loaded.vectors[level], rows)
        for entry, row in zip(loaded.levels[level], loaded.vectors[level], strict=True):
            np.testing.assert_array_equal(row, encoder.encode([entry.title], "query")[0])
    assert loaded.retrieve(["when was a band made"], 1, 1) == hek.retrieve(["when was a band made"], 1, 1)
    header = json.loads((tmp_path / "runs" / "hek" / "header.json").read_text())
    assert header["normalised"] is True and header["counts"] == {"1": 3, "2": 1, "3": 0}
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == ["hek"]


def test_another_encoders_store_is_refused_naming_both(tmp_path):
    small_hek(HashEncoder(64)).save(tmp_path / "hek")
    with pytest.raises(ConfigError, match=r"hash:none:64.*hash:none:32"):
        HEK.load(tmp_path / "hek", HashEncoder(32))


def edit(name, change):
    def damage(folder):
        file = folder / name
        file.write_text(change(file.read_text(encoding="utf-8")), encoding="utf-8")

    return damage


def rows(change):
    def damage(folder):
        table = np.load(folder / "level1.npy")
        np.save(folder / "level1.npy", change(table))

    return damage


def poke(table, value):
    table[1, 3] = value
    return table


def pickled(folder):
    np.save(folder / "level1.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)


DAMAGE = {
    "no header": (lambda f: (f / "header.json").unlink(), "no HEK in"),
    "header cut": (edit("header.json", lambda t: t[:40]), "header.json"),
    "header of another kind": (edit("header.json", lambda t: "[]"), "header.json"),
    "other format": (edit("header.json", lambda t: t.replace('"format": 1', '"format": 7')), "format 7"),
    "no records": (lambda f: (f / "level2.jsonl").unlink(), "level2.jsonl"),
    "no vectors": (lambda f: (f / "level1.npy").unlink(), "level1.npy"),
    "empty vectors": (lambda f: (f / "level1.npy").write_bytes(b""), "level1.npy"),
    "pickled vectors": (pickled, "level1.npy is missing, cut off or not plain numbers"),
    "bad line": (
        edit("level1.jsonl", lambda t: t.replace('{"id": "E1-000002"', '{"id" "E1-000002"')),
        "level1.jsonl:2",
    ),
    "missing field": (
        edit("level1.jsonl", lambda t: t.replace('"title": "where is it", ', "")),
        "level1.jsonl:3",
    ),
    "unknown field": (edit("level1.jsonl", lambda t: t.replace('"title"', '"titel"', 1)), "level1.jsonl:1"),
    "wrong level": (
        edit("level1.jsonl", lambda t: t.replace('"level": 1', '"level": 2', 1)),
        "level1.jsonl:1",
    ),
    "cut at the end": (edit("level1.jsonl", lambda t: t[:-1]), "level1.jsonl:3"),
    "record lost": (edit("level1.jsonl", lambda t: t[: t.rindex('{"id"')]), "level1.jsonl holds 2.*says 3"),
    "row lost": (rows(lambda t: t[:-1]), "level1.npy"),
    "wrong type": (rows(lambda t: t.astype(np.float64)), "float64"),
    "nan": (rows(lambda t: poke(t, np.nan)), "level1.npy.*finite"),
    "inf": (rows(lambda t: poke(t, np.inf)), "level1.npy.*finite"),
    "not unit": (rows(lambda t: t * 2), "level1.npy.*length 1"),
    "title edited": (edit("level1.jsonl", lambda t: t.replace("where is it", "where was it")), "titles"),
    "orphan": (edit("level1.jsonl", lambda t: t.replace('"E2-000001"', "null", 1)), "child"),
}


@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.filterwarnings("ignore:overflow")
def test_a_damaged_store_is_refused_by_name(tmp_path, name):
    damage, message = DAMAGE[name]
    encoder = HashEncoder(64)
    small_hek(encoder).save(tmp_path / "hek")
    damage(tmp_path / "hek")
    with pytest.raises(ConfigError) as error:
        HEK.load(tmp_path / "hek", encoder)
    assert re.search(message, str(error.value)) and "\n" not in str(error.value)


def test_a_description_may_be_edited_by_hand(tmp_path):
    encoder = HashEncoder(64)
    small_hek(encoder).save(tmp_path / "hek")
    edit("level1.jsonl", lambda t: t.replace("do 3", "do better"))(tmp_path / "hek")
    assert HEK.load(tmp_path / "hek", encoder).by_id["E1-000003"].description == "do better"


def test_nothing_is_overwritten_unless_told(tmp_path):
    encoder, folder = HashEncoder(64), tmp_path / "hek"
    small_hek(encoder).save(folder)
    before = (folder / "level1.jsonl").read_bytes()
    one = HEK([case(7, "other")], encoder)
    with pytest.raises(ConfigError, match="exists already"):
        one.save(folder)
    assert (folder / "level1.jsonl").read_bytes() == before
    one.save(folder, overwrite=True)
    assert len(HEK.load(folder, encoder)) == 1
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="exists already"):
        one.save(tmp_path / "thesis", overwrite=True)  # not a HEK
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hek", "thesis"]
    (tmp_path / "fresh").mkdir()
    one.save(tmp_path / "fresh")


def test_a_failed_write_leaves_the_old_store_and_no_rubbish(tmp_path, monkeypatch):
    encoder, folder = HashEncoder(64), tmp_path / "hek"
    small_hek(encoder).save(folder)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(ConfigError, match="No space left"):
        HEK([case(7, "other")], encoder).save(folder, overwrite=True)
    with pytest.raises(ConfigError, match="cannot write"):
        HEK([case(7, "other")], encoder).save(tmp_path / "new")
    assert len(HEK.load(folder, encoder)) == 4 and [p.name for p in tmp_path.iterdir()] == ["hek"]


def test_blocks_hide_what_was_distilled_from_the_asked_question():
    own, other = case(1, "t", "mine", level=2), case(2, "t", "yours", level=2)
    cases = [case(3, "t", "mine"), case(4, "t", "yours")]
    hek = HEK([own, other, *cases], TableEncoder({"t": (1, 0), "q": (1, 0)}), HEKConfig(strategy_top_k=9, case_top_k=9))
    [(_, shown)] = hek.strategy_block(["q"], ["mine"], 2, words, 99)
    assert shown == (other.id,)
    [(_, shown)] = case_blocks(hek, ["q"], ["mine"], [set()], 99)
    assert shown == (cases[1].id,)


def test_B41_two_entries_of_one_text_are_one_line():
    twins = [replace(case(i, "t", f"s{i}"), description="do it") for i in (1, 2)]
    hek = HEK([*twins, case(3, "t", "s3")], TableEncoder({"t": (1, 0), "q": (1, 0)}), HEKConfig(case_top_k=3))
    assert case_blocks(hek, ["q"], ["s"], [()], 99) == [("- t: do it\n- t: do 3", ("E1-000001", "E1-000003"))]


def test_many_entries_are_ranked_like_a_full_sort():
    """Only the nearest are sorted; hidden ones and rejected ones must not eat up what is left."""
    rng = np.random.default_rng(0)
    table = {f"t{i}": vector for i, vector in enumerate(rng.normal(size=(500, 4)))} | {"q": (1, 0, 0, 0)}
    entries = [replace(case(i, f"t{i}", f"s{i % 3}"), not_when=("q",) if i % 2 else ()) for i in range(500)]
    encoder = TableEncoder(table)
    hek = HEK(entries, encoder, HEKConfig(case_threshold=-1))
    scores = encoder.encode([f"t{i}" for i in range(500)], "query") @ encoder.encode(["q"], "query")[0]
    want = [i for i in np.argsort(-scores).tolist() if i % 2 == 0 and i % 3]
    for top_k in (1, 70, 400):
        assert ids(hek.retrieve(["q"], 1, top_k, ["s0"])[0]) == [f"E1-{i:06d}" for i in want[:top_k]]
