"""How much experience a step gives: schedules in plain arithmetic, and whole groups without any through the real
collection of a step. Must fail if part of a group goes without, if the draw depends on ranks or on the other questions,
if a schedule ends a step too late, if control groups give way to a schedule, or if budgets are not shortened.
"""

import math
from dataclasses import replace

import pytest
from support import ScriptedEngine, ToySearch, build_byte_tokenizer

import train
from hiexp.assemble import Agent, Config
from hiexp.config import ConfigError, load
from hiexp.data import PromptSampler, Sample
from hiexp.distributed import Context
from hiexp.dosage import DosageConfig, Dose, dose
from hiexp.encoder import HashEncoder
from hiexp.hek import HEK, Experience
from hiexp.protocols import PROTOCOLS
from hiexp.resume import StopSignal, refused
from hiexp.trajectory import Source

SAMPLES = [Sample(f"q{i}", f"who founded label number{i}", ("Oslo",)) for i in range(40)]
LINES = {
    "E1-000000": Experience(
        "E1-000000", 1, "mixed", "label", "a case of forty letters and some more of them", parent_id="E2-000000"
    ),
    "E2-000000": Experience(
        "E2-000000", 2, "pattern", "who founded", "find the founder", (), "", (("x", "?"),), ("E1-000000",)
    ),
}


# --- schedules ---


def test_linear_moves_by_equal_steps_from_the_first_to_the_last_of_the_schedule():
    cfg = DosageConfig(dropout=0.1, dropout_end=0.9, tokens=1.0, tokens_end=0.2, start=3, steps=5)
    shares = {3: 0.1, 4: 0.3, 5: 0.5, 6: 0.7, 7: 0.9}
    lengths = {3: 1.0, 4: 0.8, 5: 0.6, 6: 0.4, 7: 0.2}
    for step in range(12):
        found, near = dose(cfg, step, 12), min(max(step, 3), 7)
        assert found.withheld == pytest.approx(shares[near]) and found.tokens == pytest.approx(lengths[near])


def test_cosine_is_half_a_wave():
    cfg = DosageConfig(dropout_end=0.8, start=2, steps=9, shape="cosine")
    for step in range(20):
        x = (min(max(step, 2), 10) - 2) / 8
        assert dose(cfg, step, 20).withheld == pytest.approx(0.8 * (0.5 - 0.5 * math.cos(math.pi * x)), abs=1e-12)
        assert dose(cfg, step, 20).tokens == 1.0
    slow = dose(cfg, 3, 20).withheld
    assert 0 < slow < dose(replace(cfg, shape="linear"), 3, 20).withheld


def test_without_a_length_the_schedule_ends_with_the_last_step_of_the_run():
    cfg = DosageConfig(dropout_end=1.0, start=4)
    assert [dose(cfg, step, 9).withheld for step in range(9)] == pytest.approx([0, 0, 0, 0, 0, 0.25, 0.5, 0.75, 1])
    assert dose(cfg, 8, 100).withheld < 0.1
    assert dose(DosageConfig(dropout_end=1.0, start=9), 5, 9).withheld == 0  # begins after the end
    assert dose(DosageConfig(dropout_end=1.0), 0, 1).withheld in (0, 1)  # one step: no division by zero


def test_without_an_end_nothing_moves():
    cfg = DosageConfig(dropout=0.3, tokens=0.5)
    assert {dose(cfg, step, 50) for step in range(50)} == {Dose(0.3, 0.5)}
    assert dose(DosageConfig(), 7, 50) == Dose(0.0, 1.0)


def test_control_groups_are_the_least_that_goes_without():
    cfg = DosageConfig(dropout=0.0, dropout_end=0.5, start=0, steps=6)
    found = [dose(cfg, step, 6, control=0.25).withheld for step in range(6)]
    assert found == pytest.approx([0.25, 0.25, 0.25, 0.3, 0.4, 0.5])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dropout": 1.5}, "dropout=1.5"),
        ({"dropout": -0.1}, "dropout"),
        ({"dropout_end": 2.0}, "dropout_end=2.0"),
        ({"tokens": 1.01}, "tokens=1.01"),
        ({"tokens_end": -1.0}, "tokens_end"),
        ({"dropout": math.nan}, "dropout=nan"),
        ({"start": -1, "dropout_end": 0.5}, "start=-1"),
        ({"steps": -2, "dropout_end": 0.5}, "steps=-2"),
        ({"steps": 10}, "nothing is scheduled"),
        ({"start": 10}, "nothing is scheduled"),
    ],
)
def test_impossible_settings(change, message):
    with pytest.raises(ConfigError, match=message):
        DosageConfig(**change)


def test_more_steps_are_another_experiment_where_the_schedule_follows_them():
    def longer(*more):
        cfg = load(Config, ["out=x", "model.path=x", "optim.schedule=constant", *more])
        return refused({"train.steps": (10, 20)}, cfg)

    assert longer() == {} == longer("dosage.dropout=0.5")
    assert longer("dosage.dropout_end=0.5") == longer("dosage.tokens_end=0") == {"train.steps": (10, 20)}
    assert longer("dosage.dropout_end=0.5", "dosage.steps=5") == {}
    assert refused({"dosage.dropout": (0.0, 0.5)}, load(Config, ["out=x", "model.path=x"]))


# --- which groups ---


def test_the_share_without_experience_is_the_one_asked_for_at_any_step_and_over_steps():
    for share in (0.0, 0.125, 0.5, 0.9, 1.0):
        given = Dose(share, 1.0)
        bound = 4 * math.sqrt(share * (1 - share) / 20_000) + 1e-12  # four standard errors
        many = [Sample(f"s{i}", "?", ()) for i in range(20_000)]
        assert abs(given.hinted(many, 0, 5).count(False) / 20_000 - share) <= bound
        over_steps = [given.hinted(many[:1], 0, step)[0] for step in range(20_000)]
        assert abs(over_steps.count(False) / 20_000 - share) <= bound  # no question is always in one arm


def test_the_draw_of_a_question_depends_on_seed_step_and_id_alone():
    given = Dose(0.5, 1.0)
    whole = given.hinted(SAMPLES, 3, 11)
    for ranks in (1, 2, 3, 7):
        parts = [Context(rank, ranks).share(len(SAMPLES)) for rank in range(ranks)]
        assert [one for first, last in parts for one in given.hinted(SAMPLES[first:last], 3, 11)] == whole
    assert given.hinted(SAMPLES[::-1], 3, 11)[::-1] == whole
    assert given.hinted([replace(s, question="other words") for s in SAMPLES], 3, 11) == whole
    others = [given.hinted(SAMPLES, 4, 11), given.hinted(SAMPLES, 3, 12)]
    for other in others:  # neither equal nor the opposite
        assert 0.2 < sum(a == b for a, b in zip(whole, other, strict=True)) / len(SAMPLES) < 0.8
    less = Dose(0.25, 1.0).hinted(SAMPLES, 3, 11)
    assert all(b or not a for a, b in zip(whole, less, strict=True))  # a smaller share withholds from some of the same


# --- through a step's collection ---


def agent_of(cfg):
    tokenizer = build_byte_tokenizer(chat=False)
    engine = ScriptedEngine(
        tokenizer,
        lambda key, ids: (
            "<answer> Oslo </answer>" if "information" in tokenizer.decode(ids) else "<search> label </search>"
        ),
    )
    hek = HEK(LINES.values(), HashEncoder(), cfg.hek)
    return Agent(cfg.rollout, tokenizer, PROTOCOLS["compact"], ToySearch(), hek.encoder, hek, engine)


def collected(*more, rank=None):
    """Groups of step 2 by sample id; with `rank`, of that one of two alone."""
    cfg = load(
        Config,
        [
            "out=x",
            "model.path=x",
            "rollout.protocol=compact",
            "rollout.group_size=3",
            "hek.strategy_threshold=-1",
            "train.prompts_per_step=40",
            "train.steps=5",
            *more,
        ],
    )
    ctx, metrics = Context() if rank is None else Part(rank, 2), {}
    agent = agent_of(cfg)
    collection = train.collect(agent, PromptSampler(SAMPLES, 0), cfg, ctx, 2, metrics, StopSignal())
    assert collection is not None
    found, rewards, _ = collection
    assert len(found) == (120 if rank is None else 60) and (rank is not None or rewards.shape == (40, 3))
    return {one.sample_id: [t for t in found if t.sample_id == one.sample_id] for one in found}, agent.tokenizer


class Part(Context):
    """A rank whose peers have nothing to say, so that its own part is what comes back."""

    def gather(self, value, phase="gather"):
        return [value]


def experience(group, tokenizer):
    """Per attempt, the texts of its experience segments."""
    return [[tokenizer.decode(list(s.token_ids)) for s in t.segments if s.source is Source.EXPERIENCE] for t in group]


def test_whole_groups_go_without_and_the_others_get_all(monkeypatch):
    groups, tokenizer = collected("dosage.dropout=0.5")
    wanted = dict(zip([s.id for s in SAMPLES], Dose(0.5, 1.0).hinted(SAMPLES, 0, 2), strict=True))
    assert 5 < sum(wanted.values()) < 35
    full = [LINES["E2-000000"].line(), LINES["E1-000000"].line()]
    for name, group in groups.items():
        assert len(group) == 3
        assert experience(group, tokenizer) == [full if wanted[name] else []] * 3
        assert {t.hek_version for t in group} == {0 if wanted[name] else -1}
        assert {t.strategies for t in group} == {("E2-000000",) if wanted[name] else ()}
    assert all(t.hek_version == 0 for group in collected()[0].values() for t in group)
    assert all(t.hek_version == -1 for group in collected("dosage.dropout=1")[0].values() for t in group)
    monkeypatch.setattr(train, "score", lambda *_: None)  # which wants the groups of all ranks
    for rank in (0, 1):
        for name, group in collected("dosage.dropout=0.5", rank=rank)[0].items():
            assert {t.hek_version for t in group} == {0 if wanted[name] else -1}


def test_control_groups_are_there_while_the_hek_is_refreshed():
    withheld = [name for name, group in collected("refresh.every=5", "refresh.control=0.4")[0].items() if
                group[0].hek_version < 0]  # fmt: skip
    plan = Dose(0.4, 1.0).hinted(SAMPLES, 0, 2)
    assert sorted(withheld) == sorted(s.id for s, one in zip(SAMPLES, plan, strict=True) if not one) != []
    assert all(group[0].hek_version == 0 for group in collected("refresh.control=0.4")[0].values())


def test_token_budgets_shorten_what_is_shown():
    line, case = LINES["E2-000000"].line(), LINES["E1-000000"].line()  # a byte is a token
    for share in (1.0, 0.5, 0.25, 0.0):
        groups, tokenizer = collected(f"dosage.tokens={share}", "rollout.strategy_tokens=64", "rollout.case_tokens=80")
        strategy, shown = 64 * share, 80 * share
        for group in groups.values():
            for texts in experience(group, tokenizer):
                wanted = [line] if len(line) <= strategy else []  # a pattern that does not fit is left out
                rest = texts[len(wanted) :]
                assert texts[: len(wanted)] == wanted
                assert (rest == [case]) if len(case) <= shown else all(len(t) <= shown for t in rest)
                assert not rest or case.startswith(rest[0])  # a case is cut
        assert {t.hek_version for group in groups.values() for t in group} == {0}
    assert Dose(0.0, 0.5).budgets(255, 128) == {"strategy_tokens": 128, "case_tokens": 64}


def test_the_budget_follows_the_schedule_from_step_to_step():
    more = ("dosage.tokens_end=0", "dosage.start=1", "dosage.steps=3", "rollout.strategy_tokens=60")
    groups, tokenizer = collected(*more)  # step 2 is the middle: 30 tokens, one too few for the pattern
    texts = [text for group in groups.values() for one in experience(group, tokenizer) for text in one]
    assert LINES["E2-000000"].line() not in texts
    assert all(t.strategies == () for group in groups.values() for t in group)
