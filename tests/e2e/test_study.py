"""A study from end to end, as small as it goes: it resumes, repeats itself to the digit, and writes its page."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hiexp import study_job
from hiexp.config import load
from hiexp.encoder import TfidfEncoder
from hiexp.hek import HEK
from hiexp.model import load_tokenizer
from hiexp.study_arms import ARMS
from hiexp.study_plan import StudyConfig, plan
from hiexp.study_stores import oracle
from hiexp.trajectory import Segment, Source, Status, Trajectory

ROOT = Path(__file__).resolve().parents[2]
SIZES = (
    "seeds=1", "warm_starts=1", "steps=2", "prompts=2", "group=2", "train_per_family=1", "dev_per_family=1",
    "test_per_family=3", "samples=1", "warm_steps=3", "tune_steps=1", "lrs=[3e-4]", "build_questions=12",
)  # fmt: skip


def study(out, arms):
    command = [sys.executable, "-m", "hiexp.lab", "study", f"out={out}", "jobs=2", f"arms=[{arms}]"]
    done = subprocess.run(
        [*command, *(f"size.{size}" for size in SIZES)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr


def told(out, name):
    cfg = load(StudyConfig, [str(out / "study.yaml"), "set=full"])
    return next(job.told for job in plan(cfg) if job.name == name)


def results(out, job):
    return (out / job / "results.jsonl").read_text()


def attempt(tokenizer, name, reward):
    asked, answered = (
        tokenizer(text, add_special_tokens=False)["input_ids"]
        for text in (f"question : who founded {name} ?", f"<answer> {name} </answer>")
    )
    segments = [Segment(Source.PROMPT, tuple(asked)), Segment(Source.POLICY, tuple(answered), (0.0,) * len(answered))]
    return Trajectory(name, segments=segments, status=Status.ANSWERED, reward=reward)


def job(out, name, kind, told):
    """Run a job in this process."""
    (out / name).mkdir(parents=True, exist_ok=True)
    (out / name / "job.json").write_text(json.dumps({"name": name, "kind": kind, "told": told}))
    assert study_job.main([str(out / name)]) == 0
    return json.loads((out / name / "done.json").read_text())


def arms_after_fine_tuning_start_from_it(out, monkeypatch):
    """On a finished study: the right attempts behind the store are learned, and RL begins there, or ends there."""
    warm, cell = out / "w0/policy/policy", {"warm": 0, "seed": 0}
    attempts = [attempt(load_tokenizer(str(warm)), f"town{i}", float(i < 3)) for i in range(5)]
    lines = "".join(json.dumps(one.to_json()) + "\n" for one in attempts)
    (out / "w0s0/self/run/trajectories.jsonl").write_text(lines)
    assert job(out, "w0s0/rft_start", "rft", cell)["rows"] == 3
    start, weights = out / "w0s0/rft_start/run/policy", "model.safetensors"
    assert (start / weights).read_bytes() != (warm / weights).read_bytes()

    for i in range(2):
        (out / f"tune/w0/rft_grpo/{i}").mkdir(parents=True)
        (out / f"tune/w0/rft_grpo/{i}/done.json").write_text('{"score": 0.5}')
    tested = []

    class Tests:
        def __init__(self, place, cfg):
            self.policy = cfg.model.path

        def lines(self, arm, told, cfg, hek):
            tested.append((arm, hek, self.policy, cfg.hek.path))
            return iter(())

    monkeypatch.setattr(study_job, "Tests", Tests)
    store = str(out / "w0s0/self/run/hek")
    for arm, policy in (("rft", start), ("rft_grpo", out / "w0s0/rft_grpo/run/policy")):
        job(out, f"w0s0/{arm}", "arm", cell | {"arm": arm})
        assert tested == [(arm, "on", str(policy), store), (arm, "off", str(policy), store)]
        tested.clear()
    assert not (out / "w0s0/rft/run").exists()
    assert f"path: {start}" in (out / "w0s0/rft_grpo/run/config.yaml").read_text()


def a_policy_is_tested_without_a_store_whatever_it_was_trained_with(out):
    """`half_uplift` asks for a store that knows how questions fare with it; the test without one has none."""
    place, told = study_job.Place(out / "w0s0/half_uplift", "w0s0/half_uplift"), {"warm": 0, "seed": 0}
    cfg = place.settings(0, 0, *ARMS["half_uplift"].overrides)
    lines = list(study_job.Tests(place, cfg).lines("half_uplift", told, cfg, "off"))
    assert {(line["hek"], line["shown"]) for line in lines} == {("off", 0.0)}


@pytest.mark.slow
def test_a_tiny_study(tmp_path, monkeypatch):
    out = tmp_path / "a study, ours"
    study(out, "grpo_half")
    # a policy of three steps has no success to learn from: the store that it would have built is put in its place
    built = out / "w0s0" / "self"
    encoder = TfidfEncoder.load(out / "s0" / "world" / "encoder.json")
    oracle(HEK((), encoder), 0).save(built / "run" / "hek")
    (built / "done.json").write_text(json.dumps({"told": told(out, "w0s0/self"), "cpu_seconds": 0.0}))
    first = results(out, "w0s0/grpo_half")

    study(out, "base,free_e2,free_filler")
    for arm, shown in (("base", 0.0), ("free_e2", 1.0)):
        lines = [json.loads(line) for line in results(out, f"w0s0/{arm}").splitlines()]
        assert {(line["arm"], line["shown"]) for line in lines} == {(arm, shown)}
    assert results(out, "w0s0/grpo_half") == first, "what has finished is not run again"
    page = (out / "report.html").read_text()
    assert "free_filler / on" in page and "by_teacher / on" not in page

    shutil.rmtree(out / "w0s0" / "grpo_half")
    study(out, "grpo_half")
    assert results(out, "w0s0/grpo_half") == first, "the same seeds give the same numbers"
    metrics = [json.loads(line) for line in (out / "w0s0/grpo_half/run/metrics.jsonl").read_text().splitlines()]
    assert len(metrics) == 2 and metrics[0]["group/drawn"] == 1
    a_policy_is_tested_without_a_store_whatever_it_was_trained_with(out)
    arms_after_fine_tuning_start_from_it(out, monkeypatch)
