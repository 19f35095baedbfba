"""Measuring a store: what is written of it, and what a mended store no longer shows. Broken on purpose, each of these
failed: uplift of single attempts, the question itself as the key of a case, not_when from one noisy question, a dropped
entry still named by its pattern, limits of the config at work while measuring, a second run that samples anew."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hiexp import uplift
from hiexp.acceptance import read_records
from hiexp.assemble import Config
from hiexp.checkpoint import save_policy
from hiexp.config import ConfigError, load
from hiexp.data import Sample, write_samples
from hiexp.encoder import HashEncoder, TfidfEncoder, unit_rows
from hiexp.experience import Asked, Experience, check_lineage
from hiexp.hek import HEK
from hiexp.lab_policy import build_model, build_tokenizer
from hiexp.lab_world import build_world, questions
from hiexp.trajectory import Trajectory, Turn
from hiexp.uplift import Tried, entry_effects, improve, mine, records_of

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import acceptance as bench


def attempt(sample_id, reward, strategies=(), **cases):
    """`cases`: query -> ids shown beside its documents."""
    turns = [Turn(query, "search", query, cases=tuple(found)) for query, found in cases.items()]
    return Trajectory(sample_id, strategies=tuple(strategies), turns=turns, reward=reward)


def tried(number, off, on, strategies=(), **cases):
    sample = Sample(f"s{number}", f"ask {number}", ("a",))
    return Tried(
        sample,
        [attempt(sample.id, float(i < off)) for i in range(4)],
        [attempt(sample.id, float(i < on), strategies, **(cases if i < 2 else {})) for i in range(4)],
    )


def test_records_name_the_key_that_was_used_and_the_gain_of_the_whole_group():
    one = tried(1, off=1, on=4, strategies=("E2-1",), where=("E1-1", "E1-2"), who=("E1-1",))
    got = {(record.query, record.entry) for record in records_of([one], "query")}
    assert got == {("ask 1", "E2-1"), ("where", "E1-1"), ("where", "E1-2"), ("who", "E1-1")}
    both = records_of([one], "question_query")
    assert {record.query for record in both} == {"ask 1", "ask 1 where", "ask 1 who"}
    assert {record.uplift for record in both} == {0.75} and {record.sample_id for record in both} == {"s1"}
    assert one.shares == {"E2-1": 1.0, "E1-1": 0.5, "E1-2": 0.5}


def test_effects_are_of_the_difference_not_of_the_reward():
    easy = [tried(i, off=4, on=4, strategies=("E2-easy",)) for i in range(20)]
    hard = [tried(20 + i, off=0, on=2, strategies=("E2-hard",)) for i in range(20)]
    harmful = [tried(40 + i, off=4, on=1, strategies=("E2-harm",)) for i in range(20)]
    got = entry_effects([*easy, *hard, *harmful], 0.95)
    assert abs(got["E2-easy"].uplift) < 0.05 and got["E2-hard"].low > 0.3 and got["E2-harm"].high < -0.4
    assert got["E2-easy"].low < 0 < got["E2-easy"].high


class Table:
    """A vector for each text that is asked for: the kind is its last word."""

    fingerprint, dim = "table", 12

    def encode(self, texts, kind):
        rows = []
        for text in texts:
            word = text.split()[-1]
            noise = np.random.default_rng(sum(map(ord, text))).normal(size=12)
            rows.append(4 * np.eye(12)["abc".index(word)] + 0.3 * noise)
        return unit_rows(np.array(rows).reshape(len(rows), 12))


def kind(number, word, off, on):
    one = tried(number, off, on, strategies=("E2-1",))
    return replace(one, sample=Sample(f"s{number}", f"{number} {word}", ("a",)))


def test_not_when_holds_the_kind_of_question_that_is_harmed_and_nothing_that_may_be_noise():
    entry = Experience("E2-1", 2, "pattern", "title a", "do", qa_groups=(("x", "y"),))
    hek = HEK([entry], Table())
    helped = [kind(i, "a", off=0, on=3) for i in range(12)]
    harmed = [kind(20 + i, "b", off=4, on=1) for i in range(12)]
    assert set(mine([*helped, *harmed], hek, "query")["E2-1"]) <= {one.sample.question for one in harmed}
    noisy = [kind(40 + i, "c", off=2 + (i < 3), on=2) for i in range(12)]
    assert mine(noisy, hek, "query") == mine([*helped, *noisy], hek, "query") == {}
    assert mine([*helped, kind(60, "c", off=3, on=2)], hek, "query") == {}
    mended = improve(hek, [*helped, *harmed], mine([*helped, *harmed], hek, "query"), [])
    mended = HEK(mended.by_id.values(), Table(), replace(hek.cfg, strategy_threshold=-1.0), mended.vectors)
    found = mended.retrieve(["new a", "new b"], 2, 1)
    assert len(found[0]) == 1 and found[1] == []


def test_a_mended_store_keeps_its_lineage_vectors_and_earlier_rewards():
    entries = [
        Experience("E1-1", 1, "mixed", "one", "do 1", qa_groups=(("s1", "ask 1"),), parent_id="E2-1"),
        Experience("E1-2", 1, "mixed", "two", "do 2", qa_groups=(("s2", "ask 2"),), parent_id="E2-1"),
        Experience("E2-1", 2, "pattern", "both", "do", qa_groups=(("s1", "ask 1"),), child_ids=("E1-1", "E1-2")),
    ]
    hek = HEK(entries, HashEncoder(32)).with_asked([Asked("s1", "ask 1", 0.5, 8), Asked("s9", "old", 1.0, 8)])
    mended = improve(hek, [tried(1, off=0, on=4), tried(2, off=1, on=2)], {"E1-2": ["no"]}, ["E1-1"])
    check_lineage(list(mended.by_id.values()))
    assert sorted(mended.by_id) == ["E1-2", "E2-1"] and mended.by_id["E1-2"].not_when == ("no",)
    np.testing.assert_array_equal(mended.vectors[1], HashEncoder(32).encode(["two"], "query"))
    assert {one.id: one for one in mended.asked} == {
        "s1": Asked("s1", "ask 1", 4 / 12, 12, 1.0, 4),
        "s2": Asked("s2", "ask 2", 0.25, 4, 0.5, 4),
        "s9": Asked("s9", "old", 1.0, 8),
    }


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """Command line for a random policy in a real world, with one pattern that fits everything."""
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    world = build_world(0)
    train = questions(world, {"train": 1}, 0)["train"]
    write_samples(tmp_path / "train.jsonl", train)
    lines = [json.dumps({"id": key, "title": d.title, "text": d.text}) + "\n" for key, d in world.passages()]
    (tmp_path / "corpus.jsonl").write_text("".join(lines))
    tokenizer = build_tokenizer()
    save_policy(build_model(tokenizer, 0), tokenizer, tmp_path / "model")
    encoder = TfidfEncoder.fit(["who is which the of was in"])
    encoder.save(tmp_path / "encoder.json")
    own = (train[0].id, train[0].question)
    hek = HEK([Experience("E2-0", 2, "pattern", "who which", "label", qa_groups=(own,))], encoder)
    hek.with_asked([Asked("old", "who ?", 1.0, 8)]).save(tmp_path / "hek")
    return [
        "configs/lab.yaml",
        f"out={tmp_path / 'run'}",
        f"model.path={tmp_path / 'model'}",
        f"data.train={tmp_path / 'train.jsonl'}",
        f"encoder.path={tmp_path / 'encoder.json'}",
        f"search.corpus=[{tmp_path / 'corpus.jsonl'}]",
        f"hek.path={tmp_path / 'hek'}",
        "hek.strategy_threshold=-1",
        "hek.max_success=0",
        "rollout.max_turn_tokens=8",
        "uplift.attempts=2",
    ]


def test_the_command_measures_and_goes_on_after_a_crash(settings, tmp_path, monkeypatch, capsys):
    rewards = iter(range(10_000))

    def score(trajectories, *_, **__):
        for one in trajectories:
            one.reward = float(bool(one.strategies) and next(rewards) % 3 > 0)

    def crash(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(uplift, "score", score)
    cfg, measure = load(Config, settings), uplift.measure
    monkeypatch.setattr(uplift, "measure", crash)
    with pytest.raises(KeyboardInterrupt):
        uplift.main(cfg)
    sampled = (tmp_path / "run/trajectories_on.jsonl").read_text()
    monkeypatch.setattr(uplift, "measure", measure)
    monkeypatch.setattr("hiexp.hek_stages.start_engine", crash)  # every rollout is there already
    uplift.main(cfg)
    assert len((tmp_path / "run/trajectories_on.jsonl").read_text()) == len(sampled)
    told = capsys.readouterr().out
    assert "16 questions x 2 attempts: reward 0.000 without experience" in told and "1 entries were shown" in told
    records = read_records(tmp_path / "run/records.jsonl")
    assert len(records) == 15  # the entry is hidden from its own question, and max_success is not at work here
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["uplift"][0] == pytest.approx(np.mean([record.uplift for record in records]) * 15 / 16)
    effect = json.loads((tmp_path / "run/effects.json").read_text())["E2-0"]
    assert effect["low"] < np.mean([record.uplift for record in records]) < effect["high"] and effect["uses"] == 15
    store = HEK.load(tmp_path / "run/hek", TfidfEncoder.load(tmp_path / "encoder.json"))
    assert [(one.off_count, one.on_count) for one in store.asked] == [(8, 0), *[(2, 2)] * 16]
    assert not (tmp_path / "run/kept/rollouts.jsonl").exists()


@pytest.mark.parametrize(("change", "message"), [("hek.path=", "hek.path"), ("hek.exclude_self=false", "exclude_self")])
def test_what_cannot_be_measured_is_told_first(settings, change, message):
    with pytest.raises(ConfigError, match=message):
        uplift.main(load(Config, [*settings, change]))


def test_the_bench_counts_hints_by_the_family_of_their_sources():
    entries = [
        Experience("E2-1", 2, "pattern", "p", "do", qa_groups=(("a1", "?"), ("a2", "?"), ("b1", "?"))),
        Experience("E2-2", 2, "pattern", "q", "do", qa_groups=(("b1", "?"),)),
        Experience("E1-1", 1, "mixed", "c", "do", qa_groups=(("b1", "?"),)),
    ]
    samples = [Sample(f"t{i}", "?", ("x",), family) for i, family in enumerate("aabb")]
    run = [attempt("t0", 1.0, ["E2-1"]), attempt("t0", 1.0, ["E2-1"], q=["E1-1"])]
    run += [attempt("t1", 1.0, ["E2-2"])] * 2 + [attempt("t2", 1.0)] * 2 + [attempt("t3", 1.0, q=["E1-1"])] * 2
    got = bench.hints(run, samples, {"a1": "a", "a2": "a", "b1": "b"}, HEK(entries, HashEncoder(16)))
    wanted = {"coverage": 0.5, "purity": (2 / 3 + 0) / 2, "wrong": 0.25, "cases": 3 / 8, "wrong_cases": 1 / 3}
    assert got == pytest.approx(wanted)


def test_the_bench_finds_the_limit_that_training_questions_want():
    hek = HEK([Experience("E2-1", 2, "pattern", "title a", "do", qa_groups=(("x", "y"),))], Table())
    easy = [kind(i, "a", off=4, on=2) for i in range(12)]
    hard = [kind(20 + i, "b", off=1, on=3) for i in range(12)]
    assert 0.2 < bench.best_limit([*easy, *hard], hek) < 0.95
    assert bench.best_limit(hard, hek) == 1.0 and bench.best_limit(easy, hek) < 0.95
