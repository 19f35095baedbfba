"""Effects of entries and of questions against plain numpy and simulations. Broken on purpose, each of these failed: no
question error (coverage), no time buckets (credit for a better policy), a slope on the prior (an entry of easy
questions), a plain mean, the question's own record left out, weights without precision."""

import json
from dataclasses import replace

import numpy as np
import pytest

from hiexp.config import ConfigError
from hiexp.data import Sample
from hiexp.effects import BUCKETS, COMMON, DRIFT, INJECTED, MOST, OWN, Forecast, Outcome, Outlook, UpliftConfig, effects
from hiexp.effects import noise as noise_of
from hiexp.encoder import HashEncoder, unit_rows
from hiexp.experience import Asked, Experience, check_lineage, without
from hiexp.hek import HEK, HEKConfig, refuse_evaluation_questions


def run_of(seed, groups=600, entries=30, control=8, drift=0.3, size=8):
    """A training run: useless entry 0 on easy questions, useful 1 and harmful 2 on hard ones, others anywhere."""
    rng = np.random.default_rng(seed)
    true = np.concatenate([[0.0, 0.3, -0.3], rng.normal(0.05, 0.12, entries - 3)])
    base = rng.uniform(0.15, 0.75, 200)
    prior = rng.binomial(size, base) / size
    entry = rng.integers(3, entries, 200)
    entry[(base > 0.6) & (rng.random(200) < 0.7)] = 0
    hard = (base < 0.45) & (rng.random(200) < 0.4)
    entry[hard] = rng.integers(1, 3, hard.sum())
    outcomes = []
    for group in range(groups):
        q, step = int(rng.integers(200)), group // 12
        hinted = bool(rng.integers(control)) if control else True
        p = base[q] + drift * (1 - base[q]) * step / (groups // 12) + (true[entry[q]] if hinted else 0)
        shown = {f"e{entry[q]}": 1.0} if hinted else {}
        reward = rng.binomial(size, min(max(p, 0), 1)) / size
        outcomes.append(Outcome(f"q{q}", step, prior[q], hinted, reward, shown))
    return outcomes, true


def test_useless_useful_and_harmful_entries_are_told_apart_where_a_plain_mean_is_fooled():
    found, plain, helpful = {0: [], 1: [], 2: []}, {"useless": [], "helpful": []}, []
    for seed in range(12):
        outcomes, true = run_of(seed)
        got = effects(outcomes)
        for entry in found:
            found[entry].append(got[f"e{entry}"])
        good = {f"e{i}" for i in range(3, len(true)) if true[i] > 0.05}
        for name, entries in (("useless", {"e0"}), ("helpful", good)):
            plain[name] += [one.reward for one in outcomes if entries & one.shown.keys()]
        helpful += [got[name].uplift for name in good & got.keys()]
    assert np.mean(plain["useless"]) > np.mean(plain["helpful"]) + 0.02  # it is shown with easy questions
    assert np.mean(helpful) > np.mean([one.uplift for one in found[0]]) + 0.1
    useless, useful, harmful = (np.mean([one.uplift for one in found[entry]]) for entry in range(3))
    assert abs(useless) < 0.06 and abs(useful - 0.3) < 0.06 and abs(harmful + 0.3) < 0.08
    assert sum(one.low > 0 for one in found[1]) == sum(one.high < 0 for one in found[2]) == 12
    assert sum(one.low <= 0 <= one.high for one in found[0]) >= 8


def test_intervals_hold_what_they_promise():
    for level in (0.5, 0.9):
        held = []
        for seed in range(40):
            outcomes, true = run_of(100 + seed)
            held += [one.low <= true[int(name[1:])] <= one.high for name, one in effects(outcomes, level).items()]
        assert len(held) > 900 and abs(np.mean(held) - level) < 0.05


def test_a_policy_that_gets_better_is_not_credited_to_late_entries():
    late, early = [], []
    for seed in range(10):
        rng, outcomes = np.random.default_rng(seed), []
        for step in range(80):
            for i in range(6):
                hinted, entry = i != 0, "late" if step >= 40 else "early"
                reward = rng.binomial(8, 0.2 + 0.6 * step / 80) / 8
                outcomes.append(Outcome(f"{step} {i}", step, 0.2, hinted, reward, {entry: 1.0} if hinted else {}))
        got = effects(outcomes)
        late.append(got["late"].uplift)
        early.append(got["early"].uplift)
    assert abs(np.mean(late)) < 0.02 and abs(np.mean(early)) < 0.02
    without_control = effects([one for one in outcomes if one.hinted])
    assert all(one.low < 0 < one.high for one in without_control.values())  # they cannot be told from time


def closed_form(outcomes, names, variance):
    """Posterior of `uplift` from dense matrices, for groups of different questions."""
    first, length = outcomes[0].step, outcomes[-1].step - outcomes[0].step + 1
    rows = np.zeros((len(outcomes), 2 + BUCKETS + len(names)))
    for row, one in zip(rows, outcomes, strict=True):
        row[0] = row[1 + (one.step - first) * BUCKETS // length] = 1
        row[1 + BUCKETS] = max(one.shown.values(), default=0)
        for name, share in one.shown.items():
            row[2 + BUCKETS + names.index(name)] = share
    prior = np.diag([COMMON**-2, *[DRIFT**-2] * BUCKETS, INJECTED**-2, *[OWN**-2] * len(names)])
    covariance = np.linalg.inv(rows.T @ rows / variance + prior)
    mean = covariance @ rows.T @ [one.reward - one.prior for one in outcomes] / variance
    pick = np.zeros((len(names), len(mean)))
    pick[:, 1 + BUCKETS], pick[np.arange(len(names)), 2 + BUCKETS + np.arange(len(names))] = 1, 1
    return pick @ mean, np.sqrt(np.diag(pick @ covariance @ pick.T))


def test_equals_the_closed_form_when_the_variances_are_known(monkeypatch):
    rng = np.random.default_rng(3)
    outcomes = []
    for i in range(60):
        shown = {f"e{j}": float(rng.choice([0.5, 1.0])) for j in rng.choice(4, int(rng.integers(0, 3)), replace=False)}
        outcomes.append(Outcome(f"q{i}", i // 4, float(rng.random()), bool(shown), float(rng.random()), shown))
    monkeypatch.setattr("hiexp.effects._variances", lambda *_: (0.04, 0.0))
    got = effects(outcomes, 0.9)
    mean, error = closed_form(outcomes, [f"e{j}" for j in range(4)], 0.04)
    for j in range(4):
        one = got[f"e{j}"]
        wanted = (mean[j], mean[j] - 1.6448536 * error[j], mean[j] + 1.6448536 * error[j])
        np.testing.assert_allclose((one.uplift, one.low, one.high), wanted, atol=1e-6)
        assert one.uses == sum(f"e{j}" in outcome.shown for outcome in outcomes)


def test_the_error_of_a_question_equals_a_dense_covariance(monkeypatch):
    rng = np.random.default_rng(4)
    outcomes = [
        Outcome(f"q{i % 5}", 0, 0.0, bool(i % 3), float(rng.random()), {"e": 1.0} if i % 3 else {}) for i in range(30)
    ]
    monkeypatch.setattr("hiexp.effects._variances", lambda *_: (0.04, 0.1))
    got = effects(outcomes)["e"]
    same = np.array([[a.sample_id == b.sample_id for b in outcomes] for a in outcomes])
    shown = np.array([[bool(one.shown)] * 2 for one in outcomes], float)
    rows = np.hstack([np.ones((30, 2)), shown])
    inverse = np.linalg.inv(0.04 * np.eye(30) + 0.1 * same)
    prior = np.diag(np.array([COMMON, DRIFT, INJECTED, OWN]) ** -2.0)
    covariance = np.linalg.inv(rows.T @ inverse @ rows + prior)
    mean = covariance @ rows.T @ inverse @ [one.reward for one in outcomes]
    pick = np.array([0, 0, 1, 1])
    assert got.uplift == pytest.approx(pick @ mean) and got.high - got.uplift == pytest.approx(
        1.6448536 * np.sqrt(pick @ covariance @ pick), rel=1e-6
    )


def test_no_outcomes_one_outcome_and_entries_that_are_always_shown_together():
    assert effects([]) == {}
    control = Outcome("q", 0, 0.5, False, 0.5, {})
    assert effects([control]) == {} and effects([replace(control, hinted=True, shown={"e": 0.0})]) == {}
    assert effects([replace(control, shown={"e": 1.0})]) == {}  # a control group saw nothing, whatever is said of it
    one = effects([replace(control, hinted=True, shown={"e": 1.0}, reward=1.0)])["e"]
    assert one.low < 0 < one.uplift < 0.5 and one.uses == 1
    rng = np.random.default_rng(0)
    both = [replace(control, step=i, sample_id=str(i), reward=rng.binomial(8, 0.5) / 8) for i in range(100)]
    both += [
        replace(control, step=i, sample_id=f"h{i}", hinted=True, shown={"a": 1.0, "b": 1.0}, reward=0.9)
        for i in range(100)
    ]
    got = effects(both)
    assert got["a"].uplift == pytest.approx(got["b"].uplift) and got["a"].high - got["a"].low > 0.3
    with pytest.raises(ValueError, match="level=1"):
        effects(both, level=1)


def test_paired_outcomes_need_no_control_groups():
    outcomes = [Outcome(f"q{i}", 0, 0.25, True, 0.25 + 0.25 * (i % 3), {"e": 1.0}) for i in range(60)]
    paired, alone = effects(outcomes, paired=True)["e"], effects(outcomes)["e"]
    assert paired.uplift == pytest.approx(0.25, abs=0.01) and 0 < paired.low < 0.25
    assert alone.high - alone.low > 5 * (paired.high - paired.low)


def test_thousands_of_entries_take_bounded_memory(monkeypatch):
    monkeypatch.setattr("hiexp.effects.MOST", 20)
    rng = np.random.default_rng(0)
    names = [f"e{i}" for i in rng.integers(0, 500, 4000)] + ["often"] * 300
    outcomes = [
        Outcome(str(i), i // 10, 0.5, True, 0.9 if name == "often" else 0.5, {name: 1.0})
        for i, name in enumerate(names)
    ]
    outcomes += [Outcome(f"c{i}", i, 0.5, False, 0.5, {}) for i in range(430)]
    got = effects(outcomes)
    assert len(got) == len(set(names)) and MOST > 1000
    assert got["often"].uplift > 0.3 and got["often"].low > 0
    rare = min(got.values(), key=lambda one: one.uses)
    assert rare.low < -0.3 < rare.uplift < 0.1  # it keeps its prior


def plain_forecast(key, vectors, values, variances, own, forecast):
    top = bottom = 0.0
    for i, (vector, value, variance) in enumerate(zip(vectors, values, variances, strict=True)):
        weight = np.exp((key @ vector - 1) / forecast.reach) / (variance + forecast.alone * forecast.between)
        weight = 1 / variance if i == own else weight
        top, bottom = top + weight * value, bottom + weight
    bottom += 1 / forecast.between
    weight = np.array([1 / (variance + forecast.between) for variance in variances])
    middle, share = weight @ values / weight.sum(), 1 / forecast.between / bottom
    return top / bottom + share * middle, (1 / bottom + share**2 / weight.sum()) ** 0.5


def families(seed, count=6, each=20, dim=24):
    """Unit vectors of kinds of questions, and the kind of each."""
    rng = np.random.default_rng(seed)
    centres = unit_rows(rng.normal(size=(count, dim)))
    kind = np.repeat(np.arange(count), each)
    return unit_rows(centres[kind] + 0.1 * rng.normal(size=(len(kind), dim))), kind, rng


def test_forecast_equals_a_plain_computation():
    vectors, kind, rng = families(0, count=3, each=10)
    values, variances = kind / 3 + rng.normal(0, 0.1, 30), np.full(30, 0.01)
    forecast = Forecast(vectors, values, variances)
    keys, own = np.concatenate([vectors[:4], unit_rows(rng.normal(size=(2, 24)))]), [0, None, 2, None, None, None]
    mean, error = forecast(keys, own)
    wanted = [
        plain_forecast(key, vectors, values, variances, row, forecast) for key, row in zip(keys, own, strict=True)
    ]
    np.testing.assert_allclose(np.stack([mean, error], 1), wanted, rtol=1e-5, atol=1e-6)


def test_forecast_learns_what_kinds_of_questions_have_in_common_and_knows_its_error():
    inside, gaps = [], []
    for seed in range(10):
        vectors, kind, rng = families(seed)
        of_kind = rng.normal(0, 0.3, 6)
        true = of_kind[kind] + rng.normal(0, 0.05, len(kind))
        variances = np.full(len(kind), 0.06)
        half = np.arange(len(kind)) % 2 == 0
        values = true + rng.normal(0, 0.06**0.5, len(kind))
        forecast = Forecast(vectors[half], values[half], variances[half])
        mean, error = forecast(vectors[~half], [None] * int((~half).sum()))
        gaps.append(np.mean((mean - of_kind[kind[~half]]) ** 2))
        inside.append(np.mean(np.abs(mean - of_kind[kind[~half]]) < 1.645 * error))
    assert np.mean(gaps) < 0.02  # one measurement alone: 0.06; the mean of all: 0.09
    assert 0.75 < np.mean(inside) <= 1


def test_a_few_noisy_questions_prove_nothing():
    sure = []
    for seed in range(200):
        rng = np.random.default_rng(seed)
        rows = unit_rows(np.eye(6)[[0] * 12] + 0.05 * rng.normal(size=(12, 6)))
        forecast = Forecast(rows, rng.normal(0, 0.3, 12), np.full(12, 0.09))
        mean, error = forecast(rows, range(12))
        sure.append(np.mean(np.abs(mean) > 2 * error))
    assert np.mean(sure) < 0.1


def test_forecast_has_nothing_to_say_of_noise():
    vectors, _, rng = families(1)
    forecast = Forecast(vectors, rng.normal(0.1, 0.3, 120), np.full(120, 0.09))
    mean, _ = forecast(vectors, [None] * 120)
    assert np.std(mean) < 0.1 and abs(np.mean(mean) - 0.1) < 0.1


def table(kind, off, on, count=8):
    return [
        Asked(f"s{i}", f"question {i} of kind {k}", off[k], count, on[k], count if on[k] is not None else 0)
        if on[k] is not None
        else Asked(f"s{i}", f"question {i} of kind {k}", off[k], count)
        for i, k in enumerate(kind)
    ]


def test_outlook_shows_experience_where_it_helps_and_everywhere_when_nothing_is_known():
    vectors, kind, _ = families(2, count=3)
    asked = table(kind, off=[0.9, 0.2, 0.2], on=[0.5, 0.7, None])
    outlook, strangers = Outlook(asked, vectors), [("x", "y")] * len(kind)
    wants = np.array(outlook.wants(vectors, strangers, 1.0, 0.0))
    assert not wants[kind == 0].any() and wants[kind == 1].all()
    assert np.array(outlook.wants(vectors, strangers, 0.6, None)).tolist() == (kind != 0).tolist()
    untried = Outlook(table(kind, [0.5] * 3, [None] * 3), vectors)
    assert all(untried.wants(vectors, strangers, 1.0, 0.0))
    assert Outlook([], np.zeros((0, 24))).wants(vectors[:1], [("x", "y")], 0.1, 0.9) == [True]


def test_a_questions_own_record_outweighs_its_neighbours():
    vectors, kind, _ = families(3, count=2, each=60)
    asked = table(kind, off=[0.2, 0.9], on=[0.9, 0.3], count=4)
    asked[0] = replace(asked[0], off_reward=0.9, on_reward=0.0, off_count=64, on_count=64)
    outlook = Outlook(asked, vectors)
    assert outlook.wants(vectors[:1], [("other", asked[0].question)], 1.0, 0.0) == [True]
    assert outlook.wants(vectors[:1], [(asked[0].id, asked[0].question)], 1.0, 0.0) == [False]


def test_noise_is_the_variance_of_a_mean_and_never_zero():
    assert noise_of(0.0, 0) == np.inf and 0 < noise_of(0.0, 8) < noise_of(0.5, 8) == pytest.approx(0.25 / 8)
    assert noise_of(1.0, 8) == pytest.approx(noise_of(0.0, 8)) and noise_of(-1.0, 1) > 0 < noise_of(3.0, 1)


def test_more_attempts_at_a_question():
    one = Asked("a", "?").after(off=[1.0, 0.0]).after(on=[1.0]).after(off=[0.0, 0.0], on=[0.0])
    assert one == Asked("a", "?", 0.25, 4, 0.5, 2)
    assert Asked("a", "?").after() == Asked("a", "?")


@pytest.fixture
def store():
    entries = [
        Experience("E1-1", 1, "mixed", "a", "do a", qa_groups=(("s1", "one"),), parent_id="E2-1"),
        Experience("E1-2", 1, "mixed", "b", "do b", qa_groups=(("s2", "two"),), parent_id="E2-1"),
        Experience("E2-1", 2, "pattern", "ab", "do ab", qa_groups=(("s1", "one"),), child_ids=("E1-1", "E1-2")),
    ]
    asked = [Asked("s1", "one\u2028line", 0.5, 8), Asked("s2", "zw\u00f6lf", 0.25, 8, 1.0, 4)]
    return HEK(entries, HashEncoder(32), HEKConfig(min_uplift=0.0)).with_asked(asked)


def test_the_table_survives_files_and_changes(store, tmp_path):
    store.save(tmp_path / "hek")
    read = HEK.load(tmp_path / "hek", HashEncoder(32), store.cfg)
    assert read.asked == store.asked == read.with_not_when({"E1-1": ["no"]}).asked
    wanted = store.wants(["one\u2028line", "new"], ["s1", "s9"])
    assert wanted == read.wants(["one\u2028line", "new"], ["s1", "s9"])
    read.save(tmp_path / "hek", overwrite=True)
    assert HEK.load(tmp_path / "hek", HashEncoder(32)).with_asked([]).asked == ()


def test_an_old_store_has_no_table_and_wants_everything(store, tmp_path):
    store.with_asked([]).save(tmp_path / "hek")
    assert not (tmp_path / "hek" / "questions.jsonl").exists()
    read = HEK.load(tmp_path / "hek", HashEncoder(32), HEKConfig(min_uplift=0.5, max_success=0.0))
    assert read.wants(["one", "two"], ["s1", "s2"]) == [True, True] and HEK.empty().wants(["x"], ["y"]) == [True]


@pytest.mark.parametrize("damage", ["reward", "cut", "gone", "vectors", "length", "field"])
def test_a_damaged_table_is_refused(store, tmp_path, damage):
    store.save(tmp_path / "hek")
    file, rows = tmp_path / "hek" / "questions.jsonl", tmp_path / "hek" / "questions.npy"
    text = file.read_text(encoding="utf-8")
    if damage == "gone":
        file.unlink()
    elif damage == "vectors":
        np.save(rows, np.load(rows)[:1])
    elif damage == "length":
        np.save(rows, 2 * np.load(rows))
    else:
        changes = {"reward": ("0.25", "0.75"), "cut": ("\n", ""), "field": ("off_count", "of_count")}
        file.write_text(text.replace(*changes[damage]), encoding="utf-8")
    with pytest.raises(ConfigError, match="questions"):
        HEK.load(tmp_path / "hek", HashEncoder(32))
    header = json.loads((tmp_path / "hek" / "header.json").read_text())
    del header["questions"]  # the remedy that the message names
    (tmp_path / "hek" / "header.json").write_text(json.dumps(header))
    assert HEK.load(tmp_path / "hek", HashEncoder(32)).asked == ()


def test_an_evaluation_question_in_the_table_is_refused(store):
    with pytest.raises(ConfigError, match="same words"):
        refuse_evaluation_questions(store, [Sample("t1", "ZW\u00d6LF", ("a",))])
    refuse_evaluation_questions(store, [Sample("t1", "dreizehn", ("a",))])


def test_dropped_entries_leave_a_sound_lineage(store):
    left = without(store.by_id.values(), {"E1-1"})
    check_lineage(left)
    assert [entry.id for entry in left] == ["E1-2", "E2-1"]
    assert left[1].child_ids == ("E1-2",) and left[1].qa_groups == (("s1", "one"),)
    orphans = without(store.by_id.values(), {"E2-1"})
    check_lineage(orphans)
    assert [entry.parent_id for entry in orphans] == [None, None]


@pytest.mark.parametrize("settings", [{"max_success": 1.5}, {"min_uplift": -2.0}])
def test_impossible_limits(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        HEKConfig(**settings)


@pytest.mark.parametrize("settings", [{"questions": -1}, {"attempts": 0}, {"level": 1.0}])
def test_impossible_measurements(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        UpliftConfig(**settings)
