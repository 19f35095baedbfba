"""Acceptance against plain numpy and scikit-learn. Broken on purpose, each of these failed: the mean for the median,
no floor of the spread, own entries among the mismatched, `>=` for `>` at z*, margin over the own cluster, hidden
entries as rivals, a query that was helped among the mined."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from support import ToySearch

from hiexp.acceptance import (
    FEATURES,
    Gate,
    Record,
    Standard,
    conformal_bound,
    fit_gate,
    margins,
    mine_not_when,
    ranked,
    read_records,
)
from hiexp.config import ConfigError
from hiexp.data import Sample
from hiexp.encoder import HashEncoder, unit_rows
from hiexp.eval_run import acceptance
from hiexp.experience import Asked
from hiexp.hek import HEK, Experience, HEKConfig, refuse_evaluation_questions
from hiexp.protocols import PROTOCOLS
from hiexp.rollout import RolloutConfig, run_rollouts


class TableEncoder:
    """Text -> a given vector, normalised."""

    def __init__(self, table):
        self.table, self.fingerprint = table, "table"
        self.dim = len(next(iter(table.values())))

    def encode(self, texts, kind):
        return unit_rows(np.array([self.table[text] for text in texts], float).reshape(len(texts), self.dim))


def case(number, title, *qids, level=1, **fields):
    sources = fields.pop("qa_groups", tuple((qid, f"question {qid}") for qid in qids))
    return Experience(f"E{level}-{number:06d}", level, "mixed", title, f"do {number}", qa_groups=sources, **fields)


def ids(hits):
    return [hit.experience.id for hit in hits]


def unit(rng, *shape):
    return unit_rows(rng.normal(size=shape))


def plain_z(query, key, background, questions, csls):
    """One number at a time."""

    def near(vector):
        return sum(sorted((float(vector @ other) for other in questions), reverse=True)[:10]) / min(10, len(questions))

    def place(vector):
        scores = [score(vector, other) for other in background]
        middle = sorted(scores)[len(scores) // 2]  # odd lengths only
        return middle, 1.4826 * sorted(abs(s - middle) for s in scores)[len(scores) // 2]

    def score(vector, other):
        cosine = float(vector @ other)
        return 2 * cosine - 0.37 - near(other) if csls else cosine  # 0.37: any r_q, it must cancel

    spreads = sorted(place(question)[1] for question in questions)
    middle, spread = place(query)
    return (score(query, key) - middle) / max(spread, spreads[len(spreads) // 2])


@pytest.mark.parametrize("csls", [False, True])
def test_z_equals_a_plain_computation(csls):
    rng = np.random.default_rng(1)
    background, keys, questions, queries = unit(rng, 31, 5), unit(rng, 7, 5), unit(rng, 13, 5), unit(rng, 4, 5)
    got = Standard(background, keys, questions, csls)(queries, queries @ keys.T)
    want = [[plain_z(query, key, background, questions, csls) for key in keys] for query in queries]
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_nothing_stands_out_of_a_background_that_is_equally_near():
    same = np.eye(3, dtype=np.float32)[[0, 0, 0]]
    assert Standard(same, same, same, False)(same[:1], same[:1] @ same.T).tolist() == [[0, 0, 0]]


def test_conformal_bound_is_the_rank_that_keeps_false_accepts_below_alpha():
    assert conformal_bound(range(1, 20), 0.05) == 19 and conformal_bound(range(1, 40), 0.05) == 38
    assert conformal_bound([5, 1, 3], 0.5) == 3
    with pytest.raises(ValueError, match=r"18 questions are too few for alpha=0\.05, 19 are needed"):
        conformal_bound(range(18), 0.05)
    rng = np.random.default_rng(0)
    draws = rng.exponential(size=(4000, 40))
    above = np.mean([row[-1] > conformal_bound(row[:-1], 0.1) for row in draws])
    assert 0.085 < above <= 0.11


def world(rng, families=12, questions=6, dim=16):
    """A store of one pattern a family over one case a question, and a vector for every text."""
    centres = unit(rng, families, dim)
    table, entries = {}, []
    for f, centre in enumerate(centres):
        children = []
        for q in range(questions):
            number = f * questions + q
            table[f"ask {number}"] = centre + 0.15 * rng.normal(size=dim)
            table[f"title {number}"] = centre + 0.15 * rng.normal(size=dim)
            source = ((f"s{number}", f"ask {number}"),)
            fields = {"parent_id": f"E2-{f:06d}", "qa_groups": source}
            children.append(replace(case(number, f"title {number}"), **fields, description=f"plan {f}"))
        table[f"pattern {f}"] = centre
        sources = tuple(pair for child in children for pair in child.qa_groups)
        parent = case(f, f"pattern {f}", level=2, child_ids=tuple(child.id for child in children))
        entries += [*children, replace(parent, qa_groups=sources, description=f"pattern text {f}")]
    return entries, table


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("csls", [False, True])
def test_zscore_store_equals_brute_force(level, csls):
    rng = np.random.default_rng(level)
    entries, table = world(rng)
    table |= {f"q{i}": rng.normal(size=16) if i % 2 else table[f"title {i}"] + 0.1 for i in range(10)}
    encoder = TableEncoder(table)
    hek = HEK(entries, encoder, HEKConfig(accept="zscore", alpha=0.1, csls=csls))

    everything = unit_rows(np.array([table[entry.title] for entry in entries]))
    questions = unit_rows(np.array([table[f"ask {n}"] for n in range(72)]))
    here = [entry for entry in entries if entry.level == level]
    keys = unit_rows(np.array([table[entry.title] for entry in here]))

    def u(a, b):
        return 2 * a @ b.T - np.sort(b @ questions.T, axis=1)[:, -10:].mean(axis=1) if csls else a @ b.T

    def deviation(a):
        behind = u(a, everything)
        middle = np.median(behind, axis=1, keepdims=True)
        return middle, 1.4826 * np.median(np.abs(behind - middle), axis=1, keepdims=True)

    floor = np.median(deviation(questions)[1])

    def z(a):
        middle, spread = deviation(a)
        return (u(a, keys) - middle) / np.maximum(spread, floor)

    family = np.array([int(entry.id[3:]) // (6 if level == 1 else 1) for entry in here])
    best = [row[family != n // 6].max() for n, row in enumerate(z(questions))]
    bound = np.sort(best)[math.ceil(73 * 0.9) - 1]
    queries = [f"q{i}" for i in range(10)]
    scores = z(encoder.encode(queries, "query"))
    found = hek.retrieve(queries, level, 2)
    assert any(found) and not all(found)
    for hits, row in zip(found, scores, strict=True):
        want = [here[j].id for j in np.argsort(-row)[:2] if row[j] > bound]
        assert ids(hits) == want
        assert [hit.value for hit in hits] == pytest.approx(sorted(row, reverse=True)[: len(want)], abs=1e-3)
        assert all(hit.threshold == pytest.approx(bound, abs=1e-3) and hit.reason.startswith("z ") for hit in hits)
    assert HEK(entries[::-1], encoder, hek.cfg).retrieve(queries, level, 2) == found  # reproducible


def test_entries_that_say_the_same_are_no_mismatch():
    """A family asked in two wordings has two patterns; each fits the other's questions."""
    entries, table = world(np.random.default_rng(0))
    told = [replace(e, description=f"plan {int(e.id[3:]) // 2}") if e.level == 2 else e for e in entries]
    strict, fair = (HEK(store, TableEncoder(table), HEKConfig(accept="zscore")) for store in (entries, told))
    table |= {f"pattern {f}": table[f"pattern {f - f % 2}"] for f in range(12)}
    strict, fair = (HEK(store, TableEncoder(table), HEKConfig(accept="zscore")) for store in (entries, told))
    low, high = (hek.retrieve(["ask 0"], 2, 1, include_rejected=True)[0][0].threshold for hek in (fair, strict))
    assert low < high - 1


def test_B45_a_score_that_ties_with_the_calibrated_bound_is_rejected():
    """Whatever the size of the batch does to the last bits of a product."""
    entries, table = world(np.random.default_rng(0))
    hek = HEK(entries, TableEncoder(table), HEKConfig(accept="zscore"))
    asked = [f"ask {n}" for n in range(72)]
    bound = hek.retrieve(["ask 0"], 2, 1, include_rejected=True)[0][0].threshold
    ties = 0
    for n, query in enumerate(asked):
        for batch in ([query], asked):
            for hit in hek.retrieve(batch, 2, 12, include_rejected=True)[batch.index(query)]:
                if abs(hit.value - bound) < 1e-5:
                    ties += 1
                    assert not hit.accepted and int(hit.experience.id[3:]) != n // 6
    assert ties == 2


def test_a_level_that_cannot_be_calibrated_is_refused_when_it_is_asked():
    entries, table = world(np.random.default_rng(0), families=3, questions=4)
    hek = HEK(entries, TableEncoder(table), HEKConfig(accept="zscore"))
    with pytest.raises(ConfigError, match=r"level 2: 12 questions are too few for alpha=0.05.*raise hek.alpha"):
        hek.retrieve(["ask 0"], 2, 1)
    assert HEK(entries, hek.encoder, HEKConfig(accept="zscore", alpha=0.2)).retrieve(["ask 0"], 2, 1)


def test_margin_is_over_other_clusters_and_over_what_is_not_hidden():
    table = {"a": (10, 1), "b": (10, 2), "c": (10, 3), "q": (10, 0)}
    entries = [
        case(1, "a", "s1", parent_id="E2-000001"), case(2, "b", "s2", parent_id="E2-000001"), case(3, "c", "s3"),
        case(1, "a", "s1", "s2", level=2, child_ids=("E1-000001", "E1-000002")),
    ]  # fmt: skip
    cosines = [10 / math.hypot(10, y) for y in (1, 2, 3)]
    encoder = TableEncoder(table)
    for margin, want in ((0, [1, 2, 3]), (0.02, [1, 2]), (cosines[0] - cosines[2] - 1e-4, [1]), (0.05, [])):
        hek = HEK(entries, encoder, HEKConfig(margin=margin))
        assert ids(hek.retrieve(["q"], 1, 9)[0]) == [f"E1-{n:06d}" for n in want]
    hits = hek.retrieve(["q"], 1, 9, include_rejected=True)[0]
    assert "another cluster is too near: margin 0.037 < 0.05" in hits[0].reason and "margin -0.037" in hits[2].reason
    assert ids(hek.retrieve(["q"], 1, 9, ["s3"])[0]) == ["E1-000001", "E1-000002"]  # the rival is hidden


def test_margins_equal_a_plain_computation():
    rng = np.random.default_rng(0)
    for _ in range(200):
        values, clusters = rng.integers(0, 5, 6).astype(float), rng.integers(0, 3, 6)
        want = []
        for value, cluster in zip(values, clusters, strict=True):
            rivals = [v for v, c in zip(values, clusters, strict=True) if c != cluster]
            lead = clusters[int(np.argmax(values))]
            want.append(min(value - max(rivals), 10) if rivals else 10)
            if cluster != lead:
                want[-1] = value - values.max()
        assert margins(values, clusters).tolist() == want


def test_ranked_is_a_stable_sort_whatever_is_sorted_first():
    rng = np.random.default_rng(0)
    for first in (1, 3, 9, 10, 50):
        values = rng.integers(0, 4, 10).astype(float)
        assert list(ranked(values, first)) == sorted(range(10), key=lambda i: (-values[i], i))


def test_an_entry_is_not_shown_to_what_is_nearer_to_its_not_when(tmp_path):
    table = {"t": (10, 0), "no": (10, 4), "q": (10, 1), "bad": (10, 3), "half": (10, 0), "u": (9, 9)}
    entries = [replace(case(1, "t"), not_when=("no",)), case(2, "u")]
    hek = HEK(entries, TableEncoder(table), HEKConfig(case_threshold=0.5))
    assert ids(hek.retrieve(["q"], 1, 9)[0]) == ["E1-000001", "E1-000002"]
    assert ids(hek.retrieve(["bad"], 1, 9)[0]) == ["E1-000002"]
    first = hek.retrieve(["bad"], 1, 9, include_rejected=True)[0][0]
    assert not first.accepted and first.reason == "nearer (0.996) to its not_when 'no'"
    assert ids(
        HEK([replace(entries[0], not_when=("half",))], hek.encoder).retrieve(["q"], 1, 9)[0]
    )  # as near as the title
    hek.save(tmp_path / "hek")
    loaded = HEK.load(tmp_path / "hek", TableEncoder(table), hek.cfg)
    assert loaded.levels == hek.levels and ids(loaded.retrieve(["bad"], 1, 9)[0]) == ["E1-000002"]
    lines = (tmp_path / "hek" / "level1.jsonl").read_text().splitlines()
    assert ["not_when" in json.loads(line) for line in lines] == [True, False]  # stores without any are as they were


def test_mined_are_near_queries_without_uplift_that_cost_no_good_one():
    table = {"t": (10, 0), "bad": (10, 4), "worse": (10, -4), "far": (0, 10), "good": (10, 1), "good2": (10, -5)}
    encoder = TableEncoder(table | {"u": (1, 1)})
    hek = HEK([case(1, "t"), case(2, "u")], encoder, HEKConfig(case_threshold=0.5))
    effects = [("bad", -0.2), ("worse", -0.9), ("far", -1.0), ("good", 0.3), ("good", -0.1), ("bad", 0.0)]
    records = [Record(query, "E1-000001", uplift) for query, uplift in effects]

    def mine(*more, **options):
        return mine_not_when([*records, *more], hek.by_id, lambda t: encoder.encode(t, "query"), 0.8, **options)

    assert mine() == {"E1-000001": ("worse", "bad")}
    assert mine(per_entry=1) == {"E1-000001": ("worse",)}
    assert mine(Record("good2", "E1-000001", 0.5)) == {"E1-000001": ("bad",)}  # "worse" would take good2 from it
    with pytest.warns(UserWarning, match="1 of 7 records name entries that are gone"):
        assert mine(Record("bad", "E1-000009", -1)) == {"E1-000001": ("worse", "bad")}
    better = hek.with_not_when(mine())
    assert better.by_id["E1-000001"].not_when == ("worse", "bad") and hek.by_id["E1-000001"].not_when == ()
    assert ids(better.retrieve(["good", "bad"], 1, 1)[0]) == ["E1-000001"]
    assert ids(better.retrieve(["bad"], 1, 1)[0]) == ["E1-000002"]


def gate_world():
    """Which entry helps depends on the cosine alone: above 0.9 it does."""
    rng = np.random.default_rng(0)
    entries, table = world(rng)
    for i in range(300):
        table[f"r{i}"] = 2.2 * unit_rows(table[f"title {i % 72}"][None])[0] + (i % 4) * unit(rng, 1, 16)[0]
    encoder = TableEncoder(table)
    plain = HEK(entries, encoder)
    found = []
    for i in range(300):
        a, b = encoder.encode([f"r{i}", f"title {i % 72}"], "query")
        found.append(Record(f"r{i}", f"E1-{i % 72:06d}", float(a @ b) - 0.9))
    return plain, found


def test_gate_is_scikit_learns_and_decides_what_it_was_taught(tmp_path):
    plain, found = gate_world()
    gate = plain.fit_gate(found)
    gate.save(tmp_path / "gate.json")
    loaded = Gate.load(tmp_path / "gate.json", "table", False)
    assert loaded == gate
    hek = HEK(plain.by_id.values(), plain.encoder, HEKConfig(accept="gate", gate=str(tmp_path / "gate.json")))
    right = total = 0
    for record in found:
        hit = next(h for h in hek.retrieve([record.query], 1, 72, include_rejected=True)[0]
                   if h.experience.id == record.entry)  # fmt: skip
        right, total = right + (hit.accepted == (record.uplift > 0)), total + 1
        assert hit.accepted == (hit.value >= 0.5) and hit.reason.startswith("gate ")
        assert (record.entry in ids(hek.retrieve([record.query], 1, 72)[0])) == hit.accepted
    assert right / total > 0.93


def test_gate_probabilities_equal_predict_proba():
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(200, len(FEATURES))) * [1, 2, 3, 0, 5, 9] + 4
    helped = rows[:, 0] + rng.normal(size=200) > 4
    gate = fit_gate(rows, helped.tolist(), "e", True)
    scale = np.where(rows.std(axis=0) > 0, rows.std(axis=0), 1)
    scaled = (rows - rows.mean(axis=0)) / scale
    want = LogisticRegression().fit(scaled, helped).predict_proba(scaled)[:, 1]
    np.testing.assert_allclose(gate.probability(rows), want, rtol=1e-9)
    for labels in (helped | True, helped & False):
        with pytest.raises(ConfigError, match="some of each kind"):
            fit_gate(rows, labels.tolist(), "e", True)


def test_B47_a_gate_of_other_scores_or_damaged_is_refused(tmp_path):
    nothing = (0.0,) * len(FEATURES)
    gate = Gate("one", False, nothing, nothing, nothing, 0.0)
    gate.save(tmp_path / "gate.json")
    for encoder, csls in (("two", False), ("one", True)):
        with pytest.raises(ConfigError, match="was fitted with encoder 'one', csls=False"):
            Gate.load(tmp_path / "gate.json", encoder, csls)
    for text in ("", "[]", "{}", json.dumps({"encoder": "one"})):
        (tmp_path / "gate.json").write_text(text)
        with pytest.raises(ConfigError, match="no gate of this version"):
            Gate.load(tmp_path / "gate.json", "one", False)
    replace(gate, features=("cosine",)).save(tmp_path / "gate.json")
    with pytest.raises(ConfigError, match="no gate of this version"):
        Gate.load(tmp_path / "gate.json", "one", False)


def test_records_are_read_and_a_wrong_line_is_named(tmp_path):
    file = tmp_path / "uplift.jsonl"
    first = '{"query": "q", "entry": "E1-1", "uplift": 1}\n'
    file.write_text(first + first.replace("1}", '-1, "sample_id": "s"}'))
    assert read_records(file) == [Record("q", "E1-1", 1.0), Record("q", "E1-1", -1.0, "s")]
    for line in ('{"query": "q", "entry": "E1-1"}', '{"query": 3, "entry": "E1-1", "uplift": 1}',
                 '{"query": "q", "entry": "E1-1", "uplift": NaN}'):  # fmt: skip
        file.write_text(line + "\n")
        with pytest.raises(ConfigError, match=r"uplift.jsonl.*1.*mend the line"):
            read_records(file)


def test_back_off_shows_the_pattern_where_no_case_is_near():
    table = {"t": (10, 0), "p": (7, 7), "q": (10, 1), "r": (6, 7), "off": (-9, 1)}
    entries = [case(1, "t", "s"), case(1, "p", "a", "b", level=2)]
    hek = HEK(entries, TableEncoder(table), HEKConfig(case_threshold=0.9, strategy_threshold=0.9, back_off=True))
    found = hek.cases(["q", "r", "off", "r"], ["x", "x", "x", "x"], [(), (), (), ("E2-000001",)])
    assert [ids(hits) for hits in found] == [["E1-000001"], ["E2-000001"], [], []]
    off = HEK(entries, hek.encoder, replace(hek.cfg, back_off=False))
    assert [ids(hits) for hits in off.cases(["q", "r"], ["x", "x"], [(), ()])] == [["E1-000001"], []]
    assert ids(hek.cases(["q"], ["s"], [()])[0]) == []  # its own case is hidden, and the pattern is far


def test_fixed_hits_say_why():
    hek = HEK([case(1, "t")], TableEncoder({"t": (4, 3), "q": (1, 0), "r": (0, 1)}))
    yes, no = (hek.retrieve([query], 1, 1, include_rejected=True)[0][0] for query in "qr")
    assert (yes.reason, no.reason) == ("cosine 0.800 >= 0.800", "cosine 0.600 < 0.800")
    assert (yes.value, yes.threshold) == (yes.score, 0.8)


@pytest.mark.parametrize(
    "settings",
    [{"csls": True}, {"accept": "gate"}, {"alpha": 0.0}, {"alpha": 1.0}, {"margin": -1.0}, {"gate_probability": 1.5}],
)
def test_impossible_acceptance(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        HEKConfig(**settings)


def test_evaluation_questions_among_the_sources_are_refused():
    source = Experience("E1-1", 1, "mixed", "t", "d", qa_groups=(("train-1", "Who founded  Rome?"), ("x", "And when?")))
    hek = HEK([source], HashEncoder(16))
    fresh = Sample("test-1", "Who founded Paris?", ("a",))
    refuse_evaluation_questions(hek, [fresh])
    refuse_evaluation_questions(HEK.empty(), [Sample("train-1", "Who founded Rome?", ("a",))])
    with pytest.raises(ConfigError, match=r"1 of the 2 evaluation questions, first 'test-2' \(same words"):
        refuse_evaluation_questions(hek, [fresh, Sample("test-2", "who founded ROME", ("a",))])
    with pytest.raises(ConfigError, match=r"first 'x' \(same id"):
        refuse_evaluation_questions(hek, [Sample("x", "Something else?", ("a",))])


def test_a_question_that_is_better_off_alone_is_shown_nothing_in_a_rollout(scripted_engine):
    questions = ["which one", "where then"]
    entry = Experience("E2-1", 2, "pattern", "which one where then", "do it", qa_groups=(("x", "y"),))
    case_ = Experience("E1-1", 1, "mixed", "which one where then", "look", qa_groups=(("x", "y"),))
    asked = [Asked("a", questions[0], 0.9, 64, 0.1, 64), Asked("b", questions[1], 0.1, 64, 0.9, 64)]
    cfg = HEKConfig(min_uplift=0.0, strategy_threshold=-1.0, case_threshold=-1.0)
    hek = HEK([entry, case_], HashEncoder(64), cfg).with_asked(asked)
    samples = [Sample("a", questions[0], ("Oslo",)), Sample("b", questions[1], ("Oslo",))]
    turns = ["<search> where </search>", "<answer> Oslo </answer>"]

    def shown(hek, hinted=None):
        engine, compact = scripted_engine(turns * 2), PROTOCOLS["compact"]
        settings = RolloutConfig(group_size=1, protocol="compact")
        rows = run_rollouts(engine, engine.tokenizer, compact, ToySearch(), hek, samples, settings, 0, hinted=hinted)
        return [(row.strategies, {case for turn in row.turns for case in turn.cases}, row.hek_version) for row in rows]

    assert shown(hek) == [((), set(), -1), (("E2-1",), {"E1-1"}, 0)]
    assert shown(hek, [True, False]) == [((), set(), -1)] * 2
    assert shown(HEK([entry, case_], HashEncoder(64), replace(cfg, min_uplift=None)).with_asked(asked))[0][0]
    limited = HEK([entry, case_], HashEncoder(64), replace(cfg, min_uplift=None, max_success=0.5)).with_asked(asked)
    assert [row[0] for row in shown(limited)] == [(), ("E2-1",)]


def test_a_results_setting_tells_every_key_of_acceptance_and_the_gates_content(tmp_path):
    (tmp_path / "gate.json").write_text("one")
    cfg = HEKConfig(path="here", accept="gate", gate=str(tmp_path / "gate.json"), min_uplift=0.1)
    told = acceptance(cfg)
    assert told["min_uplift"] == 0.1 and told["accept"] == "gate" and told["gate"] == "one" and "path" not in told
    (tmp_path / "gate.json").write_text("two")
    assert acceptance(cfg) != told and acceptance(replace(cfg, path="there")) == acceptance(cfg)
