"""What only the scripts themselves can get wrong, seen on an untrained model in seconds.

Must fail if the engine keeps old weights, if trainer and engine use different temperatures, if the reference is the
policy itself, if an evaluation arm has the wrong store or decoding, or if the HEK is built from guided rollouts.
"""

import json

import pytest
import torch

import build_hek
import evaluate
import train
from hiexp.assemble import Config, load_models
from hiexp.config import ConfigError, load
from hiexp.data import read_samples
from hiexp.judge import rule_score
from hiexp.tracking import read_metrics, read_trajectories
from hiexp.trajectory import Source
from tests.untrained import untrained_lab


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """Command line for a random policy in a real world, with one pattern that fits everything."""
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    return untrained_lab(tmp_path)


def run(main, settings, *more):
    main(load(Config, [*settings, *more]))


def sources(path):
    return {segment.source for trajectory in read_trajectories(path) for segment in trajectory.segments}


def test_engine_and_trainer_stay_one_policy_and_the_reference_stays_behind(settings, tmp_path, monkeypatch):
    draws = torch.Generator().manual_seed(0)

    def score(trajectories, *_):
        for one in trajectories:
            one.reward = float(torch.rand((), generator=draws))

    monkeypatch.setattr(train, "score", score)
    more = ("rollout.temperature=0.7", "train.steps=3", "optim.lr=1e-3")
    run(train.main, settings, f"out={tmp_path / 'run'}", *more)
    metrics = read_metrics(tmp_path / "run")
    for line in metrics:
        assert line["rollout/mismatch_max"] < 1e-4
        assert line["rollout/trained_tokens"] > 50
    assert metrics[0]["loss/kl"] < metrics[1]["loss/kl"] < metrics[2]["loss/kl"]
    assert [t.policy_version for t in read_trajectories(tmp_path / "run/trajectories.jsonl")[::12]] == [0, 1, 2]
    assert Source.EXPERIENCE in sources(tmp_path / "run/trajectories.jsonl")
    before = (tmp_path / "model/model.safetensors").read_bytes()
    assert (tmp_path / "run/policy/model.safetensors").read_bytes() != before


def test_policy_engine_and_reference_are_three_models(settings, tmp_path):
    cfg = load(Config, [*settings, f"out={tmp_path / 'run'}"])
    models = load_models(cfg, with_reference=True)
    for parameters in zip(*(model.parameters() for model in models), strict=True):
        assert len({parameter.data_ptr() for parameter in parameters}) == 3
        assert [parameter.requires_grad for parameter in parameters] == [True, False, False]
        assert all(torch.equal(parameters[0], other) for other in parameters)
    assert load_models(cfg, with_reference=False)[2] is None


def test_evaluation_arms_have_the_store_and_decoding_of_their_names(settings, tmp_path):
    more = ("eval.samples_per_question=2", "eval.temperature=1.0")
    for name in ("one", "two"):
        run(evaluate.main, settings, f"out={tmp_path / name}", *more, f"eval.seed={len(name + 'x' * (name == 'two'))}")
    for store in ("hek_off", "hek_on"):
        greedy, again, sampled = (
            [t.token_ids for t in read_trajectories(tmp_path / place / f"trajectories_{store}_{decoding}.jsonl")]
            for place, decoding in (("one", "greedy"), ("two", "greedy"), ("one", "sampled"))
        )
        assert greedy == again, "greedy does not depend on the seed"
        assert greedy != sampled
        found = sources(tmp_path / "one" / f"trajectories_{store}_greedy.jsonl")
        assert (Source.EXPERIENCE in found) == (store == "hek_on")
    settings_of = json.loads((tmp_path / "one/evaluation.json").read_text())["arms"]
    assert settings_of["hek_off_greedy"]["setting"]["hek"] == "none" != settings_of["hek_on_greedy"]["setting"]["hek"]


def test_a_hek_is_built_from_rollouts_without_experience(settings, tmp_path):
    with pytest.raises(ConfigError, match="no HEK can be built"):
        run(build_hek.main, settings, f"out={tmp_path / 'built'}", "build.questions=0", "build.rollouts_per_question=2")
    assert Source.EXPERIENCE not in sources(tmp_path / "built/trajectories.jsonl")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("rollout.temperature=0", "set it above 0"),
        ("rollout.temperature=.nan", "greedy"),
        ("search.backend=none", "searches, but"),
        ("loss.kl_coef=.nan", "kl_coef"),
        ("loss.clip_high=.inf", "clip_high"),
        ("optim.lr=.inf", "lr=inf"),
        ("optim.betas=[2, 2]", "betas"),
        ("optim.weight_decay=-1", "weight_decay"),
        ("seed=-1", "seed=-1"),
        ("threads=-1", "threads=-1"),
        ("data.limit=-1", "limit=-1"),
        ("train.show_every=-1", "show_every=-1"),
        ("build.questions=-5", "questions=-5"),
        ("build.max_new_tokens=0", "max_new_tokens=0"),
    ],
)
def test_settings_that_cannot_work_are_told_first(settings, tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        run(train.main, settings, f"out={tmp_path / 'run'}", change)
    assert not (tmp_path / "run").exists()


def test_a_start_that_failed_does_not_block_its_folder(settings, tmp_path):
    out = f"out={tmp_path / 'run'}"
    with pytest.raises(ConfigError, match="float32"):
        run(train.main, settings, out, "model.dtype=bfloat16", "train.steps=1")
    run(train.main, settings, out, "train.steps=1")
    with pytest.raises(ConfigError, match="other settings"):
        run(train.main, settings, out, "train.steps=2", "optim.lr=1e-5")


def test_unhelpful_group_sizes_are_warned_of(settings, tmp_path):
    with pytest.warns(UserWarning, match="group_size=1"):
        run(train.main, settings, f"out={tmp_path / 'a'}", "rollout.group_size=1", "train.steps=1")
    with pytest.warns(UserWarning, match="more than the 16 questions"):
        run(train.main, settings, f"out={tmp_path / 'b'}", "train.prompts_per_step=17", "train.steps=1")


def test_a_judge_gives_the_reward_and_is_needed_at_once(settings, tmp_path):
    judged = ("reward.metric=judge", "reward.format_floor=0", "train.steps=1")
    with pytest.raises(ConfigError, match=r"judge\.first\.model is empty"):
        run(train.main, settings, f"out={tmp_path / 'none'}", *judged)
    assert not (tmp_path / "none").exists()
    run(train.main, settings, f"out={tmp_path / 'run'}", *judged, "judge.first.model=rule")
    golds = {sample.id: sample.answers for sample in read_samples(tmp_path / "train.jsonl")}
    for one in read_trajectories(tmp_path / "run/trajectories.jsonl"):
        assert one.reward == (rule_score(golds[one.sample_id], one.answer) / 5 if one.answer.strip() else 0)
