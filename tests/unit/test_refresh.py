"""The closed loop over simulated and scripted rollouts: what leaves the store, what enters it, and what is rejected.

Must fail if an entry of easy questions is taken for a useful one, if a harmful version is taken or changes the store,
if the comparison of versions is not paired, if one of its questions is trained on, if the oldest groups are reflected
on, or if a checkpoint forgets what a later refresh depends on.
"""

import json
import math
import warnings
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from support import ScriptedEngine, ToySearch, build_byte_tokenizer
from writers import asked_of, lesson, members_of, scripted_reflector

from hiexp import refresh, resume
from hiexp.assemble import Agent, Config
from hiexp.config import ConfigError, load
from hiexp.data import Sample
from hiexp.distributed import Context
from hiexp.effects import Effect, Outcome
from hiexp.encoder import HashEncoder
from hiexp.experience import Asked
from hiexp.hek import HEK, Experience
from hiexp.hek_update import Book, RefreshConfig, next_version
from hiexp.protocols import PROTOCOLS
from hiexp.refresh import ClosedLoop, held_out, mean_and_error, unhelpful
from hiexp.trajectory import Segment, Source, Status, Trajectory, Turn

SAMPLES = [Sample(f"q{i}", f"who founded label number{i}", ("Oslo",)) for i in range(24)]
ENCODER = HashEncoder()


def tree(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def store(*titles, per=1):
    """A pattern for each title, over `per` cases."""
    entries = []
    for i, title in enumerate(titles):
        ids = tuple(f"E1-{i * per + k:06d}" for k in range(per))
        source = (("other", "?"),)
        entries += [Experience(name, 1, "mixed", title, f"case {name}", (), "", source, (), f"E2-{i:06d}")
                    for name in ids]  # fmt: skip
        entries.append(Experience(f"E2-{i:06d}", 2, "pattern", title, f"plan {title}", (), "", source, ids))
    return HEK(entries, ENCODER)


def settings(out, *more):
    return load(
        Config,
        [
            f"out={out}",
            "model.path=x",
            "rollout.protocol=compact",
            "rollout.group_size=2",
            "reward.metric=em",
            "reward.format_floor=0",
            "hek.strategy_threshold=-1",
            "hek.strategy_top_k=1",
            "build.prompts=compact",
            "build.threshold_1=0.6",
            "build.threshold_2=0.6",
            "refresh.every=4",
            "refresh.gate_questions=0",
            *more,
        ],
    )


class Loop(ClosedLoop):
    engine: ScriptedEngine
    asked: list[str]
    """requests of the writers"""


def open_loop(monkeypatch, cfg, hek=None, samples=SAMPLES, reply=None, most=None, answers=None):
    """A loop over scripted writers; `answers(question, hint)` is what the policy says."""
    tokenizer = build_byte_tokenizer(chat=False)
    hek = hek or HEK((), ENCODER, cfg.hek)
    hek = HEK(hek.by_id.values(), ENCODER, cfg.hek, hek.vectors, hek.settings, hek.asked)

    def turn(_, ids):
        hint, _, question = str(tokenizer.decode(ids)).rpartition("question : ")
        assert answers is not None
        return f"<answer> {answers(question.strip(), hint)} </answer>"

    engine = ScriptedEngine(tokenizer, turn)
    agent = Agent(cfg.rollout, tokenizer, PROTOCOLS["compact"], ToySearch(), ENCODER, hek, engine)
    loop = Loop(agent, cfg, samples, Context())
    loop.engine = engine
    writer = scripted_reflector(reply or (lambda _: "no"), ENCODER, most)
    monkeypatch.setattr(refresh, "open_reflectors", lambda models, encoder, out: (writer, writer))
    loop.asked = asked_of(writer)
    loop.open()
    return loop


def group(sample, rewards, version=0, shown=(), answers=("", ""), queries=()):
    """Siblings with their rewards; an answer other than "" is given."""
    turns = [Turn(f"<search> {q} </search>", "search", q) for q in queries]
    return [
        Trajectory(
            sample.id, i, 0, tuple(shown), version, [Segment(Source.POLICY, (1,), (0.0,))], list(turns),
            Status.ANSWERED if answer else Status.TRUNCATED, answer, reward,
        )
        for i, (reward, answer) in enumerate(zip(rewards, answers, strict=True))
    ]  # fmt: skip


def mixed(sample, version=-1, note=""):
    """One right and one wrong attempt; the note is a query of both."""
    return group(sample, (1.0, 0.0), version, (), ("Oslo", "Rome"), [f"{sample.id} {note}".strip()])


# --- what leaves ---


def simulate(loop, steps, effect, first=0, control=0.25, seed=0, show=None):
    """Steps of 8 groups. A question has its own difficulty, the policy grows better, and each entry its own effect."""
    rng, seen = np.random.default_rng(seed), {name: [] for name in effect}
    ease = {s.id: 0.1 + 0.6 * i / len(loop.trained) for i, s in enumerate(loop.trained)}
    metrics = {}
    for step in range(first, first + steps):
        trajectories = []
        for i in rng.choice(len(loop.trained), 8, replace=False):
            sample, hinted = loop.trained[i], rng.random() >= control
            name = show(rng, ease[sample.id], step) if show else list(effect)[int(rng.integers(len(effect)))]
            p = ease[sample.id] + 0.002 * step + (effect[name] if hinted else 0.0)
            rewards = (rng.random(2) < min(max(p, 0), 1)).astype(float)
            trajectories += group(sample, rewards, 0 if hinted else -1, (name,) if hinted else ())
            if hinted:
                seen[name].append(rewards.mean())
        metrics = loop.after_step(step, trajectories)
    return metrics, {name: float(np.mean(values)) for name, values in seen.items()}


def test_a_planted_useless_entry_is_evicted_and_a_planted_useful_one_survives(monkeypatch, tmp_path):
    hek = store("useful", "useless", per=2)
    loop = open_loop(monkeypatch, settings(tmp_path, "refresh.every=80"), hek)

    def show(rng, ease, step):  # the useless one goes to easy questions and, as both do, to later and better steps
        return "E2-000001" if rng.random() < (0.95 if ease > 0.4 else 0.05) else "E2-000000"

    metrics, plain = simulate(loop, 80, {"E2-000000": 0.2, "E2-000001": 0.0}, show=show)
    assert plain["E2-000001"] > plain["E2-000000"]  # what a plain mean says
    assert set(loop.agent.hek.by_id) == {"E1-000000", "E1-000001", "E2-000000"}
    assert metrics["refresh/removed"] == 3 and metrics["refresh/accepted"] == 1 and metrics["hek/version"] == 1
    assert tree(tmp_path / "hek/v0000") == saved(hek, tmp_path / "copy") != tree(tmp_path / "hek/v0001")
    assert metrics["reward/hinted"] >= 0 and 0 < metrics["hek/hinted_frac"] <= 1


def saved(hek, folder):
    hek.save(folder, overwrite=True)
    return tree(folder)


@pytest.mark.parametrize("effect", [-0.3, 0.0])
def test_an_entry_with_too_few_uses_is_not_judged_and_a_harmful_one_goes(monkeypatch, tmp_path, effect):
    for uses, stays in ((5, False), (10_000, True)):
        more = ("refresh.every=60", f"refresh.min_uses={uses}")
        loop = open_loop(monkeypatch, settings(tmp_path / str(uses), *more), store("a", "b"))
        metrics, _ = simulate(loop, 60, {"E2-000000": 0.3, "E2-000001": effect})
        assert ("E2-000001" in loop.agent.hek.by_id) == stays and "E2-000000" in loop.agent.hek.by_id
        assert metrics["refresh/accepted"] == (not stays)


def test_with_a_pattern_go_the_lessons_it_was_made_of_but_not_those_that_are_proven():
    hek, cfg = store("a", "b", per=3), RefreshConfig(min_uses=20)
    bad, good = Effect(0.0, -0.1, 0.1, 30), Effect(0.2, 0.1, 0.3, 20)
    found = {
        "E2-000000": bad,
        "E1-000000": good,
        "E1-000001": replace(good, uses=19),
        "E1-000003": replace(bad, uses=19),
    }
    assert unhelpful(hek, found, [], 0, 0, cfg) == {"E2-000000", "E1-000001", "E1-000002"}
    exact = {"E2-000000": Effect(0.1, 0.0, 0.2, 50), "E1-000004": Effect(0.0, -1e-9, 0.1, 20)}
    assert unhelpful(hek, exact, [], 0, 0, cfg) == {"E1-000004"}


def outcome(step, *shown):
    return Outcome("q0", step, 0.0, True, 0.5, dict.fromkeys(shown, 1.0))


def test_what_neither_itself_nor_above_it_was_shown_for_long_leaves():
    base = [*store("a", "b", "c").by_id.values()]
    strategy = Experience("E3-000000", 3, "strategy", "s", "d", (), "", (("other", "?"),), ("E2-000002",))
    entries = [replace(e, parent_id="E3-000000") if e.id == "E2-000002" else e for e in base]
    hek, cfg = HEK([*entries, strategy], ENCODER), RefreshConfig(unused_steps=10)
    names = lambda step, *outcomes: unhelpful(hek, {}, outcomes, step, 0, cfg)  # noqa: E731
    assert names(8) == set() and names(9) == {"E1-000000", "E1-000001", "E1-000002"}
    assert names(9, outcome(3, "E1-000000"), outcome(4, "E2-000001")) == {"E1-000002"}
    assert names(9, outcome(3, "E3-000000")) == {"E1-000000", "E1-000001"}
    late = HEK(hek.by_id.values(), ENCODER, settings={"refresh": {"next": {}, "clustered": {}, "abstracted": {},
                                                                  "born": {"E1-000000": 5}}})  # fmt: skip
    assert unhelpful(late, {}, [], 13, 0, cfg) == {"E1-000001", "E1-000002"}
    assert "E1-000000" in unhelpful(late, {}, [], 14, 0, cfg)


def test_unused_entries_leave_through_the_loop_when_the_last_use_is_long_ago(monkeypatch, tmp_path):
    loop = open_loop(
        monkeypatch, settings(tmp_path, "refresh.unused_steps=6", "refresh.min_uses=1000"), store("a", "b")
    )
    for step in range(8):  # both at step 1, then a alone; refreshed after steps 3 and 7
        shown = ("E2-000000", "E2-000001") if step == 1 else ("E2-000000",)
        metrics = loop.after_step(step, group(loop.trained[step], (0.0, 0.0), 0, shown))
        if step == 3:
            assert metrics["refresh/removed"] == 0 and metrics["hek/version"] == 0
    assert set(loop.agent.hek.by_id) == {"E1-000000", "E2-000000"}
    assert min(one[1] for one in loop.state()["outcomes"]) == 2  # 6 steps are remembered


def test_beyond_max_cases_those_of_the_least_uplift_leave():
    hek = store("a", "b", per=4)
    found = {f"E1-{i:06d}": Effect(value, -1, 1, 1) for i, value in enumerate((0.3, -0.2, 0.1, -0.1))}
    # the untried count as 0, ties by id
    order = ["E1-000001", "E1-000003", "E1-000004", "E1-000005", "E1-000006", "E1-000007", "E1-000002", "E1-000000"]
    for most, incoming, gone in ((8, 0, 0), (10, 2, 0), (8, 3, 3), (2, 0, 6), (1, 9, 8)):
        cfg = RefreshConfig(max_cases=most)
        assert unhelpful(hek, found, [outcome(0, "E2-000000", "E2-000001")], 0, incoming, cfg) == set(order[:gone])


# --- what enters ---


def write(note, plan="ask for the founder"):
    """Lessons that name the note of the pair's query, and a plan for all of them."""

    def reply(prompt):
        if "<abstract>" in prompt:
            return lesson(members_of(prompt)[0][0], plan)
        return lesson(f"who founded a label {note}", "look up the label first")

    return reply


def gate_table(loop, hint, good):
    """What the policy answers: `good` of the held-out questions with the hint, others without."""
    number = {sample.question: i for i, sample in enumerate(loop.held_out)}

    def answers(question, text):
        return "Oslo" if number[question] in (good if hint in text else range(3)) else "Rome"

    return answers


def refreshed(monkeypatch, tmp_path, good, *more, plan="the plan"):
    """A loop that has learned a plan with which the held-out questions `good` are answered, of which 0, 1, 2 were."""
    holder = SimpleNamespace(answers=None)
    cfg = settings(tmp_path, "refresh.gate_questions=10", "build.min_cluster=1", *more)
    loop = open_loop(monkeypatch, cfg, reply=write("x", plan), answers=lambda *found: holder.answers(*found))
    holder.answers = gate_table(loop, plan, good)
    before = loop.agent.hek
    for step in range(4):
        metrics = loop.after_step(step, [one for i in range(2) for one in mixed(loop.trained[2 * step + i])])
    return loop, metrics, before


def test_a_harmful_refresh_is_rejected_and_leaves_the_hek_untouched(monkeypatch, tmp_path):
    loop, metrics, before = refreshed(monkeypatch, tmp_path, [])
    assert loop.agent.hek is before and len(before) == 0 and metrics["hek/version"] == metrics["refresh/accepted"] == 0
    assert metrics["refresh/added"] == 1 and metrics["refresh/merged"] == 7
    folders = sorted(path.name for path in (tmp_path / "hek").iterdir())
    assert folders == ["rejected_step000004", "v0000"]
    assert tree(tmp_path / "hek/v0000") == saved(HEK((), ENCODER), tmp_path / "empty")
    assert len(HEK.load(tmp_path / "hek/rejected_step000004", ENCODER)) == 2
    assert loop.state()["pairs"] == [] and loop.path == str(tmp_path / "hek/v0000")
    for step in range(4, 8):  # the same groups do not come again
        metrics = loop.after_step(step, group(loop.trained[0], (0.0, 0.0)))
    assert "refresh/gate_difference" not in metrics and len(loop.asked) == 8 + 1


def test_a_good_refresh_is_taken_and_is_next_version_of_its_lessons(monkeypatch, tmp_path):
    loop, metrics, before = refreshed(monkeypatch, tmp_path, range(8), "refresh.merge_threshold=null")
    assert metrics["hek/version"] == metrics["refresh/accepted"] == loop.agent.hek.version == 1 != before.version
    assert loop.path == str(tmp_path / "hek/v0001") and not (tmp_path / "hek/candidate").exists()
    text = ("who founded a label x", "look up the label first")
    lessons = [
        Experience("", 1, "mixed", *text, qa_groups=((s.id, s.question),), source_model="scripted", language="en")
        for s in loop.trained[:8][::-1]  # the newest first
    ]
    golds = {s.id: s.answers for s in SAMPLES}
    made = (scripted_reflector(write("x", "the plan"), ENCODER), golds, loop.cfg.build, None, 3)
    again, counts = next_version(before, lessons, (), *made)
    again = again.with_asked(
        sorted((Asked(s.id, s.question, 0.5, 2) for s in loop.trained[:8]), key=lambda one: one.id)
    )
    assert tree(tmp_path / "hek/v0001") == saved(again, tmp_path / "again")
    assert metrics | {f"refresh/{name}": value for name, value in counts.items()} == metrics


@pytest.mark.parametrize("tolerance", [0.0, 1.1, 2.0])
def test_the_gate_is_the_paired_mean_against_its_standard_error(monkeypatch, tmp_path, tolerance):
    old = np.array([1, 1, 1, 0, 0, 0, 0, 0, 0, 0], float)
    for number, good in enumerate(([0, 1, 2], [0, 1], [0], [0, 3], [5, 6, 7], [0, 1, 2, 3], range(10))):
        new = np.isin(np.arange(10), list(good)).astype(float)
        place = tmp_path / str(number)
        loop, metrics, _ = refreshed(monkeypatch, place, good, f"refresh.gate_tolerance={tolerance}")
        difference, error = np.mean(new - old), np.std(new - old, ddof=1) / np.sqrt(10)
        assert metrics["refresh/gate_difference"] == pytest.approx(difference, abs=1e-6)
        assert metrics["refresh/gate_error"] == pytest.approx(error, abs=1e-6)
        assert metrics["refresh/accepted"] == (difference >= -tolerance * error) == loop.agent.hek.version


def test_mean_and_error_of_few():
    assert mean_and_error(np.array([-1.0])) == (-1.0, math.inf)
    assert mean_and_error(np.array([0.5, 0.5, 0.5])) == (0.5, 0.0)
    values = np.random.default_rng(0).normal(size=33)
    assert mean_and_error(values) == pytest.approx(
        (values.mean(), np.sqrt(np.sum((values - values.mean()) ** 2) / 32 / 33))
    )


def test_both_versions_answer_each_held_out_question_from_the_same_seeds(monkeypatch, tmp_path):
    loop, _, _ = refreshed(monkeypatch, tmp_path, range(10), "refresh.gate_samples=3")
    requests = loop.engine.requests
    assert len(requests) == 2 * 10 * 3
    halves = [[(key, sampling.seed) for key, _, _, sampling in part] for part in (requests[:30], requests[30:])]
    assert halves[0] == halves[1] and len({seed for _, seed in halves[0]}) == 30
    prompts = [loop.agent.tokenizer.decode(ids) for _, ids, _, _ in requests]
    assert ["the plan" in prompt for prompt in prompts] == [False] * 30 + [True] * 30
    assert {sample.question for sample in loop.held_out} == {p.rpartition("question : ")[2].strip() for p in prompts}


def test_without_held_out_questions_every_version_is_taken(monkeypatch, tmp_path):
    loop = open_loop(monkeypatch, settings(tmp_path), reply=write("x"))
    for step in range(4):
        metrics = loop.after_step(step, mixed(SAMPLES[step]))
    assert metrics["refresh/accepted"] == 1 and not loop.engine.requests
    assert metrics["refresh/gate_difference"] == metrics["refresh/gate_error"] == 0


def test_questions_that_compare_versions_never_train():
    for seed in range(5):
        cfg = RefreshConfig(every=3, gate_questions=9)
        gate, rest = held_out(SAMPLES, cfg, seed)
        assert len(gate) == 9 and {s.id for s in gate}.isdisjoint(s.id for s in rest)
        assert sorted([*gate, *rest], key=SAMPLES.index) == SAMPLES
        assert [s for s in SAMPLES if s in rest] == rest  # in their order, so that the sampler's draw is the usual one
        assert (gate, rest) == held_out(SAMPLES, cfg, seed)
    assert held_out(SAMPLES, cfg, 0) != held_out(SAMPLES, cfg, 1)
    assert held_out(SAMPLES, RefreshConfig(gate_questions=9), 0) == ([], SAMPLES)  # no refresh
    assert len(held_out(SAMPLES, RefreshConfig(every=1, gate_questions=12), 0)[0]) == 12
    with pytest.raises(ConfigError, match=r"gate_questions=13.*24 training questions.*lower it"):
        held_out(SAMPLES, RefreshConfig(every=1, gate_questions=13), 0)


# --- the pool ---


def test_the_pool_keeps_the_newest_group_of_each_question_and_the_newest_questions(monkeypatch, tmp_path):
    loop = open_loop(monkeypatch, settings(tmp_path, "refresh.groups=3", "refresh.every=6"))
    for step, i in enumerate((0, 1, 2, 0, 3)):
        loop.after_step(step, mixed(SAMPLES[i], note=f"step{step}"))
    state = loop.state()
    assert [name for name, _ in state["pairs"]] == ["q2", "q0", "q3"]
    assert [pair[0]["turns"][0]["argument"] for _, pair in state["pairs"]] == ["q2 step2", "q0 step3", "q3 step4"]
    assert all(not one["segments"] for _, pair in state["pairs"] for one in pair)
    alike = group(SAMPLES[4], (1.0, 1.0), -1, (), ("Oslo", "Oslo")) + group(SAMPLES[5], (0.0, 0.0), -1, (), ("a", "b"))
    loop.after_step(5, alike)
    asked = [prompt.split("right : ")[1].split(" | ")[0] for prompt in loop.asked]
    assert asked == ["q3 step4", "q0 step3", "q2 step2"]  # the newest first, nothing of one-sided groups
    assert loop.state()["pairs"] == []


def test_a_question_is_worth_what_it_brought_without_experience(monkeypatch, tmp_path):
    loop = open_loop(monkeypatch, settings(tmp_path, "refresh.every=100"))
    draws, known, overall = np.random.default_rng(0), {}, [0.0, 0.0]
    for step in range(20):
        chosen = [SAMPLES[i] for i in draws.choice(6, 3, replace=False)]
        rewards, hinted = draws.random((3, 2)), draws.random(3) < 0.5
        groups = [group(s, r, 0 if h else -1) for s, r, h in zip(chosen, rewards.tolist(), hinted, strict=True)]
        wanted = []
        for sample in chosen:  # before the step's own groups are counted
            total, count = known.get(sample.id, (0.0, 0.0))
            middle = overall[0] / overall[1] if overall[1] else 0.0
            wanted.append((total + 4 * middle) / (count + 4))
        loop.after_step(step, [one for one_group in groups for one in one_group])
        newest = loop.state()["outcomes"][-3:]
        assert [one[2] for one in newest] == pytest.approx(wanted)
        assert [one[3] for one in newest] == hinted.tolist()
        assert [one[4] for one in newest] == pytest.approx(rewards.mean(axis=1).tolist())
        plain = [(s.id, r.sum()) for s, r, h in zip(chosen, rewards, hinted, strict=True) if not h]
        for name, total in plain:
            known[name] = tuple(0.5 * a + b for a, b in zip(known.get(name, (0, 0)), (total, 2), strict=True))
            overall = [(1 - 0.1 / len(plain)) * a + b for a, b in zip(overall, (total, 2), strict=True)]
    assert 0 < loop.state()["overall"][0] < loop.state()["overall"][1]


def test_what_was_shown_counts_by_attempts_in_the_prompt_and_beside_documents(monkeypatch, tmp_path):
    loop = open_loop(monkeypatch, settings(tmp_path), store("a"))
    first, second = group(SAMPLES[0], (1.0, 0.0), 0, ("E2-000000",))
    first.turns = [Turn("", "search", "x", (), ("E1-000000",)), Turn("", "search", "y", (), ("E1-000000", "E2-000000"))]
    loop.after_step(0, [first, second])
    assert loop.state()["outcomes"][0][5] == {"E1-000000": 0.5, "E2-000000": 1.0}


def test_without_a_refresh_only_the_rewards_of_both_arms_are_told(monkeypatch, tmp_path):
    loop = open_loop(monkeypatch, settings(tmp_path, "refresh.every=0", "hek.path=some/hek"), store("a"))
    pair = [*group(SAMPLES[0], (1.0, 0.5), 0), *group(SAMPLES[1], (0.5, 0.0), 0), *mixed(SAMPLES[2])]
    told = {"hek/hinted_frac": 2 / 3, "reward/hinted": 0.5, "reward/unhinted": 0.5}
    assert loop.after_step(3, pair) == pytest.approx(told) and loop.after_step(4, mixed(SAMPLES[2])) == {}
    assert not (tmp_path / "hek").exists() and loop.path == "some/hek" and loop.trained == SAMPLES
    assert not any(loop.state()[name] for name in ("pairs", "outcomes", "unaided", "version"))


# --- refreshes that do not happen ---


def test_a_cap_on_calls_skips_the_refresh_with_a_warning(monkeypatch, tmp_path):
    loop = open_loop(monkeypatch, settings(tmp_path), store("a"), reply=write("x"), most=2)
    before = loop.agent.hek
    for step in range(3):
        loop.after_step(step, mixed(SAMPLES[step]))
    with pytest.warns(
        UserWarning, match=r"step 3: the HEK was not refreshed, .*: build.reflector.max_calls is reached"
    ):
        metrics = loop.after_step(3, mixed(SAMPLES[3]))
    assert loop.agent.hek is before and metrics["refresh/accepted"] == 0 == metrics["hek/version"]
    assert sorted(path.name for path in (tmp_path / "hek").iterdir()) == ["v0000"]


@pytest.mark.parametrize("url", ["", "http://127.0.0.1:9/v1"])
def test_an_endpoint_that_fails_costs_a_refresh_and_not_the_run(monkeypatch, tmp_path, url):
    named = ("build.reflector.model=m", f"build.reflector.url={url}") if url else ()
    loop = open_loop(monkeypatch, settings(tmp_path, *named), store("a"))

    def fail(*_):
        raise ConfigError("it failed")

    monkeypatch.setattr(refresh, "reflect", fail)
    for step in range(3):
        loop.after_step(step, mixed(SAMPLES[step]))
    if not url:  # then nothing passes by itself
        with pytest.raises(ConfigError, match="it failed"):
            loop.after_step(3, mixed(SAMPLES[3]))
        return
    with pytest.warns(UserWarning, match="not refreshed, the next refresh tries again: it failed"):
        loop.after_step(3, mixed(SAMPLES[3]))
    assert loop.agent.hek.version == 0 and len(loop.state()["pairs"]) == 4  # nothing is lost


def test_the_table_of_questions_is_in_order_whatever_order_a_checkpoint_gives_back(monkeypatch, tmp_path):
    loop = open_loop(monkeypatch, settings(tmp_path), store("a"))
    for i in (3, 1, 2):
        loop.after_step(i - 1, mixed(SAMPLES[i]))
    before = loop._asked()
    loop.load_state(json.loads(json.dumps(loop.state(), sort_keys=True)))
    assert loop._asked() == before == sorted(before, key=lambda one: one.id)


def test_nothing_to_learn_makes_no_version(monkeypatch, tmp_path):
    loop = open_loop(monkeypatch, settings(tmp_path), store("a"))
    before = loop.agent.hek
    for step in range(4):
        metrics = loop.after_step(step, mixed(SAMPLES[step]))  # the writer has no usable reply
    assert loop.agent.hek is before and len(loop.asked) == 4
    assert (metrics["refresh/pairs"], metrics["refresh/lessons"], metrics["refresh/accepted"]) == (4, 0, 0)
    assert sorted(path.name for path in (tmp_path / "hek").iterdir()) == ["v0000"]


# --- versions and checkpoints ---


def run(loop, steps):
    """Groups whose rewards depend on what is shown, half of them mixed; entries are shown while they are there."""
    metrics = []
    for step in steps:
        rng, trajectories = np.random.default_rng([9, step]), []
        for i in rng.choice(len(loop.trained), 4, replace=False):
            sample, patterns = loop.trained[i], [e.id for e in loop.agent.hek.levels[2]]
            hinted = rng.random() < 0.7
            shown = (patterns[int(rng.integers(len(patterns)))],) if hinted and patterns else ()
            version = loop.agent.hek.version if hinted else -1
            if rng.random() < 0.5:
                trajectories += mixed(sample, version, f"w{rng.integers(3)}")
            else:
                trajectories += group(sample, rng.random(2).round(2), version, shown)
        found = loop.after_step(step, trajectories)
        metrics.append({name: value for name, value in found.items() if not name.startswith("time/")})
    return metrics


def by_note(prompt):
    if "<abstract>" in prompt:
        return lesson(members_of(prompt)[0][0], f"plan of {len(members_of(prompt))}")
    words = prompt.split("right : ")[1].split(" | ")[0]
    return lesson(f"who founded the first label of a band {words.split()[1]}", f"do {words}")


@pytest.mark.parametrize("start", [None, "a"])
def test_a_checkpoint_at_any_step_gives_the_same_later_versions(monkeypatch, tmp_path, start):
    hek = store(start) if start else None
    more = ("refresh.every=3", "refresh.min_uses=2", "refresh.unused_steps=5", "refresh.merge_threshold=null",
            "refresh.gate_questions=4", "refresh.gate_tolerance=100")  # fmt: skip
    answers = lambda question, hint: "Oslo" if (len(hint) + len(question)) % 3 else "Rome"  # noqa: E731
    whole = open_loop(monkeypatch, settings(tmp_path / "whole", *more), hek, reply=by_note, answers=answers)
    metrics = run(whole, range(15))
    versions = tree(tmp_path / "whole")
    assert whole.agent.hek.version >= 4 and len(whole.agent.hek.levels[2]) > 0
    assert any(one.get("refresh/removed") for one in metrics) and any(one.get("refresh/abstracted") for one in metrics)
    for stop in (3, 7):
        place = tmp_path / str(stop)
        first = open_loop(monkeypatch, settings(place, *more), hek, reply=by_note, answers=answers)
        told = run(first, range(stop))
        state = json.loads(json.dumps(first.state(), allow_nan=False))
        other = open_loop(monkeypatch, settings(place, *more), hek, reply=by_note, answers=answers)
        other.load_state(state)
        assert other.agent.hek.by_id == first.agent.hek.by_id and json.loads(json.dumps(other.state())) == state
        assert told + run(other, range(stop, 15)) == metrics
        assert tree(place) == versions
        assert json.dumps(other.state()) == json.dumps(whole.state())


def test_questions_that_are_gone_are_forgotten_on_resuming(monkeypatch, tmp_path):
    loop = open_loop(monkeypatch, settings(tmp_path))
    for step in range(3):
        loop.after_step(step, mixed(SAMPLES[step]))
    state = json.loads(json.dumps(loop.state()))
    fewer = open_loop(monkeypatch, settings(tmp_path), samples=SAMPLES[1:], reply=write("x"))
    fewer.load_state(state)
    assert fewer.after_step(3, mixed(SAMPLES[4]))["refresh/pairs"] == 3


def test_the_first_version_of_a_run_without_a_store_comes_from_nothing(monkeypatch, tmp_path):
    loop = open_loop(monkeypatch, settings(tmp_path), reply=by_note)
    assert loop.path.endswith("hek/v0000") and HEK.load(loop.path, ENCODER).version == 0
    for step in range(4):
        metrics = loop.after_step(step, mixed(SAMPLES[step], note=f"w{step}"))
    hek = HEK.load(tmp_path / "hek/v0001", ENCODER)
    assert [len(hek.levels[level]) for level in (1, 2, 3)] == [4, 1, 0] and metrics["refresh/level_1"] == 4
    assert hek.by_id == loop.agent.hek.by_id and loop.agent.hek.cfg == loop.cfg.hek


def test_a_run_that_begins_with_a_refreshed_store_writes_it_down_under_its_own_number(monkeypatch, tmp_path):
    base = store("a")
    base = HEK(base.by_id.values(), ENCODER, settings={"version": 5})
    loop = open_loop(monkeypatch, settings(tmp_path), base, reply=write("x"))
    assert loop.path.endswith("hek/v0005") and HEK.load(loop.path, ENCODER).version == 5
    for step in range(4):
        loop.after_step(step, mixed(SAMPLES[step]))
    assert loop.path.endswith("hek/v0006") and HEK.load(loop.path, ENCODER).version == 6


def test_a_version_that_a_killed_run_left_is_replaced_by_the_same(monkeypatch, tmp_path):
    for _ in range(2):
        loop = open_loop(monkeypatch, settings(tmp_path), store("a"), reply=write("x"))
        for step in range(4):
            loop.after_step(step, mixed(SAMPLES[step]))
        (tmp_path / "hek/v0001/level1.jsonl").open("a").write("half a line")
    again = open_loop(monkeypatch, settings(tmp_path), store("a"), reply=write("x"))
    for step in range(4):
        again.after_step(step, mixed(SAMPLES[step]))
    assert HEK.load(tmp_path / "hek/v0001", ENCODER).by_id == again.agent.hek.by_id


def test_share_of_what_is_shown_that_is_old(monkeypatch, tmp_path):
    hek = store("a", "b")
    book = {"next": {"1": 2, "2": 2, "3": 0}, "clustered": {"1": 2, "2": 2, "3": 0}, "abstracted": {}, "thresholds": {},
            "born": {"E2-000001": 6}}  # fmt: skip
    hek = HEK(hek.by_id.values(), ENCODER, settings={"version": 1, "refresh": book})
    loop = open_loop(monkeypatch, settings(tmp_path, "refresh.unused_steps=10", "refresh.every=100"), hek)
    assert Book.of(loop.agent.hek).born == {}  # all were there when this run began
    loop.agent.hek = hek
    both = [*group(SAMPLES[0], (0.0, 0.0), 1, ("E2-000000",)), *group(SAMPLES[1], (0.0, 0.0), 1, ("E2-000001",))]
    assert [loop.after_step(step, both)["hek/staleness"] for step in (9, 10, 15, 16)] == [0.0, 0.5, 0.5, 1.0]
    assert "hek/staleness" not in loop.after_step(17, group(SAMPLES[0], (0.0, 0.0), 1))


def test_what_shapes_lessons_may_not_change_on_resuming_a_run_that_refreshes():
    changes = {"build.threshold_1": (0.6, 0.7), "build.reflector.max_calls": (5, 9), "build.reflector.model": ("", "m")}
    frozen = load(Config, ["out=x", "model.path=x"])
    moving = load(Config, ["out=x", "model.path=x", "refresh.every=5"])
    assert resume.refused(changes, frozen) == {}
    assert set(resume.refused(changes, moving)) == {"build.threshold_1", "build.reflector.model"}
    known = resume._flatten({"build": vars(moving.build) | {"reflector": vars(moving.build.reflector)}})
    assert all(any(resume.fnmatch.fnmatchcase(key, pattern) for key in known) for pattern in resume.WRITERS)


def test_no_warning_is_given_where_all_is_well(monkeypatch, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        refreshed(monkeypatch, tmp_path, range(10))
