"""The table of arms: every arm loads, and differs from the others in what it says and in nothing else."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from hiexp.assemble import Config
from hiexp.config import ConfigError, load
from hiexp.study_arms import ARMS, TRAINED, TUNED, UNTRAINED, chosen_arms, clip_settings
from hiexp.study_plan import SizeConfig, StudyConfig, grid, plan, split_of, start_policy, tune_jobs
from hiexp.study_stats import BY_SPLIT, CLAIMS, OURS
from hiexp.study_stores import STORES, VARIED

LAB = str(Path(__file__).resolve().parents[2] / "configs" / "lab.yaml")


def settings(name, *more):
    flat = {}

    def collect(prefix, node):
        for key, value in node.items():
            if isinstance(value, dict):
                collect(f"{prefix}{key}.", value)
            else:
                flat[prefix + key] = value

    collect("", asdict(load(Config, [LAB, *ARMS[name].overrides, *more])))
    return flat


def differs(one, other):
    return {key for key, value in settings(one).items() if settings(other)[key] != value}


def test_every_arm_loads_and_its_store_exists():
    for name, arm in ARMS.items():
        assert settings(name)
        assert arm.test_store in STORES
        assert set(arm.tests) <= {"on", "off"}
        assert arm.says


def test_no_two_arms_of_one_kind_are_the_same():
    for group in (TRAINED, UNTRAINED):
        seen = {}
        for name, arm in group.items():
            same = (arm.store, arm.steps, arm.prompts, arm.tuned_as)
            key = repr((sorted(settings(name).items(), key=str), same))
            assert key not in seen, (name, seen[key])
            seen[key] = name


@pytest.mark.parametrize(
    ("one", "other", "what"),
    [
        ("e2_e1", "e2", {"rollout.use_cases"}),
        ("e3_e1", "e3", {"rollout.use_cases"}),
        ("e2_e1", "e3_e1", {"rollout.strategy_level"}),
        ("half", "e2_e1", {"dosage.dropout"}),
        ("eighth", "half", {"dosage.dropout"}),
        ("leak", "e2_e1", {"hek.exclude_self"}),
        ("shuffled", "e2_e1", set()),
        ("filler", "e2_e1", set()),
        ("by_teacher", "e2_e1", set()),
        ("grpo_half", "grpo", set()),
        ("grpo_long", "grpo", set()),
        ("rft_e2", "e2", set()),
        ("rft_e2", "rft_grpo", set()),
        ("rft_e2", "rft_same", set()),
        ("e2_coarse", "e2", set()),
        ("e2_advice", "e2", set()),
        ("e2_loose", "e2", {"hek.strategy_threshold"}),
        ("half_e2", "half", {"rollout.use_cases"}),
        ("free_loose", "free_e2", {"hek.strategy_threshold"}),
    ],
)
def test_arms_differ_in_what_they_claim_to(one, other, what):
    assert differs(one, other) == what


def test_gspo_arms_differ_from_their_grpo_twins_by_the_algorithm_and_what_it_brings():
    assert differs("gspo_e2_e1", "e2_e1") == differs("gspo", "grpo")
    assert "loss.algorithm" in differs("gspo", "grpo")


def test_controls_differ_from_their_arm_in_store_or_dose_alone():
    assert (TRAINED["shuffled"].store, TRAINED["filler"].store) == ("shuffled", "filler")
    assert (TRAINED["grpo_half"].prompts, TRAINED["grpo_half"].steps) == (0.5, 1.0)
    assert TRAINED["grpo_cpu"].steps > 1 and TRAINED["grpo_cpu"].prompts == 1.0
    for control, arm in (("shuffled", "e2_e1"), ("filler", "e2_e1"), ("by_teacher", "e2_e1"), ("grpo_half", "grpo")):
        assert TRAINED[control].tuned_as == arm, "a control is trained at the learning rate of what it controls"


def changed(cfg, monkeypatch, edit):
    """Names of the jobs that are told something else after an edit, without their cell."""
    before = {job.name: job.told for job in plan(cfg)}
    edit()
    after = {job.name: job.told for job in plan(cfg)}
    monkeypatch.undo()
    return {name.split("/", 1)[1] for name in after if after[name] != before.get(name)}


def test_what_has_been_edited_is_run_again_with_all_that_came_of_it(monkeypatch):
    cfg = StudyConfig("out", set="full", size=SizeConfig(seeds=1, warm_starts=1))

    def set_arm(name, **to):
        monkeypatch.setitem(ARMS, name, replace(ARMS[name], **to))
        if name in TRAINED:
            monkeypatch.setitem(TRAINED, name, ARMS[name])

    grid_of = {f"w0/{{}}/{i}" for i in range(4)}
    for edit in ({"steps": 3.0}, {"overrides": ("loss.algorithm=gspo",)}, {"prompts": 0.5}):
        found = changed(cfg, monkeypatch, lambda edit=edit: set_arm("grpo", **edit))
        takes = {name for name, arm in ARMS.items() if arm.tuned_as == "grpo"}
        assert found == takes | {one.format("grpo") for one in grid_of}, "and those that take its learning rate"
    assert changed(cfg, monkeypatch, lambda: set_arm("leak", steps=2.0)) == {"leak"}
    assert changed(cfg, monkeypatch, lambda: set_arm("free_e2", overrides=())) == {"free_e2"}
    wider = changed(cfg, monkeypatch, lambda: monkeypatch.setitem(VARIED, "coarse", ("build.threshold_1=0.5",)))
    assert wider == {"coarse", "e2_coarse", "free_coarse"}
    assert changed(cfg, monkeypatch, lambda: None) == set()


def test_a_job_does_not_depend_on_what_else_was_asked_for():
    size = SizeConfig(seeds=1, warm_starts=1)
    everything = {job.name: job for job in plan(StudyConfig("out", set="full", size=size))}
    for arms in (("base",), ("free_e2", "grpo"), ("rft", "shuffled", "e2_coarse"), ("half_uplift", "by_teacher")):
        for job in plan(StudyConfig("out", arms=arms, size=size)):
            assert job == everything[job.name]


def test_worlds_may_be_named():
    some = plan(StudyConfig("out", arms=("grpo",), worlds=(7, 3)))
    assert [job.told["seed"] for job in some if job.kind == "arm"] == [7, 7, 3, 3]
    few = plan(StudyConfig("out", arms=("grpo",), size=SizeConfig(seeds=8)))
    assert {repr(job) for job in some} <= {repr(job) for job in few}, "the same jobs, whoever names them"
    for wrong in ((-1,), (1000,), (2, 2)):
        with pytest.raises(ConfigError, match="worlds"):
            StudyConfig("out", worlds=wrong)


def test_arms_after_fine_tuning_wait_for_it_and_start_from_it():
    cfg = StudyConfig("out", arms=("rft", "rft_grpo", "rft_e2", "e2"), size=SizeConfig(seeds=1, warm_starts=1))
    jobs = {job.name: job for job in plan(cfg)}
    assert jobs["w0s0/rft_start"].needs == ("w0s0/self",) and jobs["w0s1000/rft_start"].needs == ("w0s1000/self",)
    assert not any("tune" in need for need in jobs["w0s0/rft"].needs), "nothing is tuned for an arm without RL"
    for arm in ("rft", "rft_grpo", "rft_e2"):
        assert "w0s0/rft_start" in jobs[f"w0s0/{arm}"].needs
    assert "w0s1000/rft_start" in jobs["tune/w0/rft_e2/0"].needs
    assert "w0s0/rft_start" not in jobs["w0s0/e2"].needs
    names = list(jobs)
    assert all(names.index(need) < names.index(name) for name, job in jobs.items() for need in job.needs)
    assert start_policy(Path("o"), 1, 2, ARMS["rft_e2"]) == Path("o/w1s2/rft_start/run/policy")
    assert start_policy(Path("o"), 1, 2, ARMS["e2"]) == Path("o/w1/policy/policy")
    assert not any(job.kind == "rft" for job in plan(StudyConfig("out")))


def test_claims_say_each_thing_once():
    for claim in (*CLAIMS, *OURS):
        says = [row[0] for row in (*claim.rows, *claim.controls)]
        assert len(set(says)) == len(says), "the page and the table look rows up by what they say"


def test_sets_and_names():
    core, full = chosen_arms((), "core"), chosen_arms((), "full")
    assert set(core) < set(full) == set(ARMS)
    assert list(chosen_arms(("e2", "base"), "core")) == ["base", "e2"]
    with pytest.raises(ConfigError, match="e2_e1"):
        chosen_arms(("e2_e",), "core")


def test_claims_name_arms_of_the_core_set_that_are_tested_that_way():
    core = chosen_arms((), "core")
    rows = [row for claim in CLAIMS for row in (*claim.rows, *claim.controls)]
    for says, *sides in rows:
        for arm, hek in sides:
            assert hek in core[arm].tests, (says, arm, hek)
    for says, *sides in (*(row for one in OURS for row in (*one.rows, *one.controls)), *BY_SPLIT):
        for arm, hek in sides:
            assert hek in ARMS[arm].tests, (says, arm, hek)


def test_clip_settings():
    assert clip_settings("own") == ()
    cfg = load(Config, [LAB, *clip_settings("0.4")])
    assert (cfg.loss.clip_low, cfg.loss.clip_high) == (0.4, 0.4)
    for wrong in ("wide", "0", "1.5"):
        with pytest.raises(ConfigError, match="clip"):
            clip_settings(wrong)


def test_every_arm_gets_the_same_grid():
    size = SizeConfig()
    points = {name: len(tune_jobs(name, size)) for name in TUNED}
    assert set(points.values()) == {len(grid(size))}
    jobs = {job.name: job for job in plan(StudyConfig("x", set="full"))}
    tried = {(job.told["arm"], job.told["lr"], job.told["clip"]) for job in jobs.values() if job.kind == "tune"}
    assert tried == {(name, lr, clip) for name in TUNED for lr, clip in grid(size)}


@pytest.mark.parametrize("which", ["core", "full"])
def test_the_plan_is_sound(which):
    jobs = plan(StudyConfig("x", set=which))
    names = [job.name for job in jobs]
    assert len(set(names)) == len(names), "two jobs would share a folder"
    done = set()
    for job in jobs:  # in order, with one slot, nothing ever waits for what comes later
        assert set(job.needs) <= done, job
        done.add(job.name)
    trained = {(job.told["warm"], job.told["seed"], job.told["arm"]) for job in jobs if job.kind == "arm"}
    assert trained == {(w, s, name) for w in range(2) for s in range(5) for name in chosen_arms((), which)}
    tuning = {job.told["seed"] for job in jobs if job.kind == "tune"}
    assert not tuning & {seed for _, seed, _ in trained}, "tuned on a world of its own"


def test_a_plan_without_a_grid_tunes_nothing():
    size = SizeConfig(lrs=(1e-3,), clips=("own",))
    assert not [job for job in plan(StudyConfig("x", size=size)) if job.kind == "tune"]


def test_splits():
    assert split_of("a_b-test-3", "taught", ("a_b",)) == "held_out"
    assert split_of("a_b-test-3", "taught_new_wording", ("c",)) == "paraphrase"
    assert split_of("a_b-test-3", "held_back", ("c",)) == "in_domain"


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"teacher_width": 100}, "multiple of 32"),
        ({"prompts": 5}, "must be even"),
        ({"group": 1}, "at least 2"),
        ({"steps": 0}, "at least 1"),
        ({"held_out": ("director_spous",)}, "director_spouse"),
        ({"lrs": (1e-4, 1e-4)}, "each once"),
        ({"lrs": (-1.0,)}, "above 0"),
        ({"lrs": (float("nan"),)}, "finite"),
        ({"seeds": 1001}, "at most 1000"),
        ({"train_per_family": 11}, "training questions: 132"),
        ({"clips": ()}, "one value or more"),
    ],
)
def test_sizes_that_no_job_could_have(wrong, told):
    with pytest.raises(ConfigError, match=told):
        SizeConfig(**wrong)
