"""`make demo` from end to end, small: what it leaves, that it repeats exactly, and what it refuses."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

import build_hek
import evaluate
import train
from hiexp.assemble import Config
from hiexp.config import ConfigError, load
from hiexp.encoder import HashEncoder, TfidfEncoder
from hiexp.experience import Experience
from hiexp.hek import HEK
from hiexp.tracking import read_metrics, read_trajectories
from hiexp.trajectory import Source

pytestmark = pytest.mark.slow
ARMS = {"base", "base_hek", "grpo", "grpo_hiexp", "attempts_grpo"}


def test_the_summary_has_every_arm_with_hek_on_and_off(lab):
    summary = json.loads((lab / "summary.json").read_text())
    assert summary["seconds"] > 0 and summary["seed"] == 1 and summary["reflector"].startswith("self")
    assert set(summary["arms"]) == ARMS
    for arm in summary["arms"].values():
        for scores in (arm["hek_off"], arm["hek_on"]):
            assert {"em_sampled", "em_greedy", "f1", "cem"} <= set(scores)
            assert set(scores["by_family_group"]) == {
                "taught", "taught_new_wording", "held_back", "held_back_new_wording",
            }  # fmt: skip
            assert all(0 <= scores[name] <= 1 for name in ("em_sampled", "em_greedy", "f1", "cem"))
    for panel in summary["stability"].values():
        assert {"within_group_var", "all_right_groups", "all_wrong_groups", "grad_norm_mean", "grad_norm_var"} <= set(
            panel
        )


def test_scores_in_the_summary_are_those_of_the_attempts(lab):
    summary = json.loads((lab / "summary.json").read_text())
    golds = {}
    for line in (lab / "world/test.jsonl").read_text().splitlines():
        record = json.loads(line)
        golds[record["id"]] = record["answers"][0]
    for store in ("hek_off", "hek_on"):
        lines = (lab / f"eval_grpo/samples_{store}_sampled.jsonl").read_text().splitlines()
        attempts = [json.loads(line) for line in lines]
        assert len(attempts) == 2 * len(golds)
        right = sum(attempt["prediction"] == golds[attempt["id"]] for attempt in attempts)
        assert summary["arms"]["grpo"][store]["em_sampled"] == pytest.approx(right / len(attempts))


def test_the_page_the_logs_and_the_store_are_there(lab):
    page = (lab / "report.html").read_text()
    assert "<svg" in page and "E1-0" in page and "http-equiv" not in page and "<script" not in page
    for arm in ("grpo", "grpo_hiexp", "attempts_grpo"):
        assert list((lab / arm / "tb").glob("events*"))
        assert len(read_metrics(lab / arm)) == 3
    hek = HEK.load(lab / "hek/hek", TfidfEncoder.load(lab / "world/encoder.json"))
    assert hek.levels[1] and all(entry.qa_groups for level in hek.levels.values() for entry in level)


def test_experience_reaches_the_rollouts_and_is_not_trained(lab):
    trajectories = read_trajectories(lab / "grpo_hiexp/trajectories.jsonl")
    sources = {segment.source for trajectory in trajectories for segment in trajectory.segments}
    assert Source.EXPERIENCE in sources and Source.DOCUMENT in sources
    for trajectory in trajectories:
        for segment in trajectory.segments:
            assert bool(segment.logprobs) == (segment.source is Source.POLICY)
    plain = read_trajectories(lab / "grpo/trajectories.jsonl")
    assert Source.EXPERIENCE not in {segment.source for trajectory in plain for segment in trajectory.segments}


def test_the_attempts_behind_the_store_are_learned_before_rl(lab):
    right = [t.sample_id for t in read_trajectories(lab / "hek/trajectories.jsonl") if t.reward >= 1]
    rows = json.loads((lab / "attempts/summary.json").read_text())["rows"]
    assert len(set(right)) <= rows <= sum(min(2, right.count(one)) for one in set(right))
    started = load(Config, [str(lab / "attempts_grpo/config.yaml")])
    assert started.model.path.endswith("attempts/policy") and not started.hek.path
    weights = [(lab / name / "model.safetensors").read_bytes() for name in ("policy", "attempts/policy")]
    assert weights[0] != weights[1]
    assert Source.EXPERIENCE not in {
        segment.source for t in read_trajectories(lab / "attempts_grpo/trajectories.jsonl") for segment in t.segments
    }


def test_no_question_is_shown_what_was_distilled_from_itself(lab):
    hek = HEK.load(lab / "hek/hek", TfidfEncoder.load(lab / "world/encoder.json"))
    shown = 0
    for trajectory in read_trajectories(lab / "grpo_hiexp/trajectories.jsonl"):
        for turn in trajectory.turns:
            for case in turn.cases:
                shown += 1
                assert trajectory.sample_id not in hek.by_id[case].sample_ids
    assert shown


def run(main, settings, *more):
    main(load(Config, [*settings, *more]))


def test_training_repeats_itself_bit_for_bit(lab, settings, tmp_path):
    for name in ("first", "second"):
        run(
            train.main,
            settings,
            f"out={tmp_path / name}",
            "train.steps=2",
            "train.dev_every=0",
            f"hek.path={lab}/hek/hek",
        )
    first, second = (read_metrics(tmp_path / name) for name in ("first", "second"))
    for one, other in zip(first, second, strict=True):
        assert {k: v for k, v in one.items() if "time/" not in k} == {
            k: v for k, v in other.items() if "time/" not in k
        }
    weights = [(tmp_path / name / "policy/model.safetensors").read_bytes() for name in ("first", "second")]
    assert weights[0] == weights[1]
    run(train.main, settings, f"out={tmp_path / 'other'}", "train.steps=2", "seed=9", "train.dev_every=0")
    assert (tmp_path / "other/policy/model.safetensors").read_bytes() != weights[0]


def refused(match, main, settings, *more):
    with pytest.raises(ConfigError, match=match) as error:
        run(main, settings, *more)
    assert "\n" not in str(error.value)


def test_bad_input_is_told_before_any_work(lab, settings, tmp_path, monkeypatch):
    out = f"out={tmp_path / 'run'}"
    monkeypatch.setattr(torch.nn.Module, "__call__", lambda *_: pytest.fail("the model ran"))
    for main in (train.main, build_hek.main, evaluate.main):
        refused("no_such", main, settings, out, "model.path=no_such_model")
        refused("corpus", main, settings, out, "search.corpus=[no_corpus.jsonl]")
    refused(r"train2?\.jsonl", train.main, settings, out, f"data.train={lab}/world/train2.jsonl")
    (tmp_path / "empty.jsonl").write_text("")
    refused("empty", evaluate.main, settings, out, f"data.test={tmp_path}/empty.jsonl")
    refused("known: cispo, dapo", train.main, settings, out, "loss.algorithm=gpro")
    refused("did you mean 'compact'", train.main, settings, out, "rollout.protocol=compct")
    refused(r"hek\.path", train.main, settings, out, "hek.path=no_such_hek")
    other = HEK([Experience("E2-0", 2, "pattern", "who founded the label", "label")], HashEncoder())
    other.save(tmp_path / "hek")
    refused("embedded by encoder", train.main, settings, out, f"hek.path={tmp_path / 'hek'}")
    refused("strategy_level=3", train.main, [*settings, "encoder.kind=hash"], out, f"hek.path={tmp_path / 'hek'}",
            "rollout.strategy_level=3")  # fmt: skip
    assert not (tmp_path / "run").exists()


def test_a_folder_of_another_run_is_left_alone(lab, settings, tmp_path):
    before = {path: path.read_bytes() for path in (lab / "grpo").rglob("*") if path.is_file()}
    for main in (train.main, build_hek.main, evaluate.main):
        refused("holds a", main, settings, f"out={lab / 'grpo'}")
    assert before == {path: path.read_bytes() for path in (lab / "grpo").rglob("*") if path.is_file()}
    (tmp_path / "file").write_text("mine")
    refused("cannot write", train.main, settings, f"out={tmp_path / 'file'}")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_told_at_once(settings, tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/.probe").symlink_to("/dev/full")
    refused("No space left", train.main, settings, f"out={tmp_path / 'run'}")


def test_a_policy_that_is_never_right_gives_a_clear_message(settings, tmp_path):
    questions = tmp_path / "impossible.jsonl"
    questions.write_text('{"id": "a", "question": "who founded the label ?", "answers": ["nobody"]}\n')
    with pytest.raises(ConfigError, match=r"0 were answered rightly every time and 1 never.*more questions"):
        run(build_hek.main, settings, f"out={tmp_path / 'hek'}", f"data.train={questions}", "build.questions=0")
    refused("questions=192", build_hek.main, settings, f"out={tmp_path / 'other'}", f"data.train={questions}")
    assert (tmp_path / "hek/trajectories.jsonl").exists(), "the rollouts are kept"


def test_a_second_demo_keeps_the_first(lab, tmp_path, monkeypatch):
    from hiexp.lab_demo import Stages, _keep_old

    shutil.copytree(lab / "world", tmp_path / "lab/world")
    stages = Stages(tmp_path / "lab", str(Path(train.__file__).parent / "configs/lab.yaml"), 0, [])
    _keep_old(tmp_path / "lab", stages)
    assert (tmp_path / "lab-1/world/train.jsonl").exists() and not (tmp_path / "lab").exists()
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/notes.txt").write_text("mine")
    for other in (tmp_path / "thesis", tmp_path / "thesis/notes.txt"):
        with pytest.raises(ConfigError, match="not a demo"):
            _keep_old(other, stages)
    with pytest.raises(ConfigError, match=r"optim\.lrr; did you mean optim\.lr"):
        Stages(tmp_path / "lab", str(Path(train.__file__).parent / "configs/lab.yaml"), 0, ["optim.lrr=1"])


def test_a_failing_stage_stops_the_demo_and_names_its_log(tmp_path):
    from hiexp.lab_demo import Stages

    stages = Stages(tmp_path, str(Path(train.__file__).parent / "configs/lab.yaml"), 0, [])
    with pytest.raises(ConfigError, match=r"grpo failed: error: .*no such.*grpo\.log|grpo failed: error: .*grpo\.log"):
        stages.script("grpo", "train.py")
    assert sys.executable in (tmp_path / "logs/grpo.log").read_text()
