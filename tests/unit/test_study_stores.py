"""Stores for the controls: what changes and what must not."""

from collections import Counter

import numpy as np
import pytest

from hiexp.encoder import TfidfEncoder
from hiexp.hek import HEK, Experience, HEKConfig
from hiexp.lab import _wording_encoder
from hiexp.lab_policy import build_tokenizer
from hiexp.lab_teacher import mask
from hiexp.lab_world import FAMILIES, build_world, questions
from hiexp.study_stores import (
    MADE,
    STORES,
    advice,
    filler,
    mismatched,
    oracle,
    right_share,
    shuffled,
    titles,
)

TITLES = [mask(family.wordings[0].format(a="Zuko", b="Ritan", y="1912")) for family in FAMILIES[:8]]


@pytest.fixture
def encoder():
    return TfidfEncoder.fit(TITLES)


@pytest.fixture
def hek(encoder):
    cases = [
        Experience(f"E1-{i:06d}", 1, "mixed", title, f"step {i} , founder", qa_groups=((f"q{i}", "a question"),))
        for i, title in enumerate(TITLES)
    ]
    return HEK(cases, encoder, HEKConfig(case_threshold=0.9))


def texts(hek):
    return {entry.id: (entry.title, entry.description) for entry in hek.by_id.values()}


def test_shuffled_keeps_every_lesson_and_every_key_and_breaks_the_pairing(hek):
    made = shuffled(hek, 0)
    assert texts(made) == texts(hek)
    assert (shuffled(hek, 0).vectors[1] == made.vectors[1]).all()
    assert (shuffled(hek, 1).vectors[1] != made.vectors[1]).any()
    assert Counter(map(bytes, made.vectors[1])) == Counter(map(bytes, hek.vectors[1]))
    by_luck = 0
    for seed in range(40):
        hits = shuffled(hek, seed).retrieve(TITLES, 1, 1)
        assert all(hits), "as often shown as before"
        by_luck += sum(row[0].experience.title == asked for row, asked in zip(hits, TITLES, strict=True))
    assert 15 < by_luck < 75, "drawn, not forced wrong: one of eight keeps its own key on average"


def test_mismatched_keeps_titles_and_moves_advice(hek):
    made = mismatched(hek, 0)
    assert [e.title for e in made.by_id.values()] == [e.title for e in hek.by_id.values()]
    before, after = ([e.description for e in store.by_id.values()] for store in (hek, made))
    assert sorted(before) == sorted(after) and before != after
    assert np.array_equal(made.vectors[1], hek.vectors[1])


def test_filler_has_the_same_length_and_says_nothing(hek):
    tokenizer, made = build_tokenizer(), filler(hek, 0)
    known = {word for family in FAMILIES for step in family.plan for word in step.split()}
    for name, emptied in texts(made).items():
        for new, was in zip(emptied, texts(hek)[name], strict=True):
            assert len(tokenizer.encode(new)) == len(tokenizer.encode(was))
            assert tokenizer.unk_token_id not in tokenizer.encode(new)
            assert not known & set(new.split())
    assert np.array_equal(made.vectors[1], hek.vectors[1])


def test_half_of_a_lesson_is_emptied_and_the_other_half_stays(hek):
    whole, empty = texts(hek), texts(filler(hek, 0))
    for make, kept in ((advice, 1), (titles, 0)):
        made = make(hek, 0)
        assert np.array_equal(made.vectors[1], hek.vectors[1]), "found where it was"
        for name, text in texts(made).items():
            assert text[kept] == whole[name][kept] != empty[name][kept]
            assert text[1 - kept] != whole[name][1 - kept]
            assert len(text[1 - kept].split()) == len(whole[name][1 - kept].split())


def test_oracle_finds_the_right_plan_of_every_question(hek):
    world = build_world(0)
    asked = questions(world, {"train": 6, "test": 6}, 0)["test"]
    encoder = _wording_encoder([mask(w.format(a="Zuko", b="Ritan", y="1912")) for f in FAMILIES for w in f.wordings])
    made = oracle(HEK(hek.by_id.values(), encoder, HEKConfig(strategy_threshold=0.8, strategy_top_k=1)), 0)
    plans = {family.name: " , ".join(family.plan) for family in FAMILIES}
    hits = made.retrieve([sample.question for sample in asked], 2, 1)
    wrong = {
        sample.family
        for row, sample in zip(hits, asked, strict=True)
        if not row or row[0].experience.description != plans[sample.family]
    }
    assert wrong == set()
    assert {e.type for e in made.by_id.values()} == {"oracle"}


def test_stores_are_written_and_read_back(tmp_path, hek, encoder):
    assert set(MADE) < set(STORES)
    for name, make in MADE.items():
        made = make(hek, 3)
        made.save(tmp_path / name)
        read = HEK.load(tmp_path / name, encoder)
        assert texts(read) == texts(made)
        assert np.array_equal(read.vectors[1], made.vectors[1])


def test_the_share_of_right_plans_is_counted_by_source_question(tmp_path, encoder):
    wrong = "label , founder"  # right for label_founder
    plan = " , ".join(next(f.plan for f in FAMILIES if f.name == "director_spouse"))
    asked = [("director_spouse-train-1", "x"), ("label_founder-train-1", "y")]
    entries = [
        Experience("E1-0", 1, "mixed", TITLES[0], plan, qa_groups=(asked[0],), parent_id="E2-0"),
        Experience("E1-1", 1, "mixed", TITLES[1], plan, qa_groups=(asked[1],), parent_id="E2-0"),
        Experience("E1-2", 1, "mixed", TITLES[2], wrong, qa_groups=(asked[1],)),
        Experience("E2-0", 2, "pattern", TITLES[0], plan, qa_groups=tuple(asked), child_ids=("E1-0", "E1-1")),
    ]
    HEK(entries, encoder).save(tmp_path / "store")
    assert right_share(tmp_path / "store") == {"level 1": pytest.approx(2 / 3), "level 2": 0.5}
