"""A study from end to end, as small as it goes: it resumes, repeats itself to the digit, and writes its page."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hiexp.encoder import TfidfEncoder
from hiexp.hek import HEK
from hiexp.study_stores import oracle

ROOT = Path(__file__).resolve().parents[2]
SIZES = (
    "seeds=1", "warm_starts=1", "steps=2", "prompts=2", "group=2", "train_per_family=1", "dev_per_family=1",
    "test_per_family=3", "samples=1", "warm_steps=3", "tune_steps=1", "lrs=[3e-4]",
)  # fmt: skip


def study(out, arms):
    command = [sys.executable, "-m", "hiexp.lab", "study", f"out={out}", "jobs=2", f"arms=[{arms}]"]
    done = subprocess.run(
        [*command, *(f"size.{size}" for size in SIZES)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr


def results(out, job):
    return (out / job / "results.jsonl").read_text()


@pytest.mark.slow
def test_a_tiny_study(tmp_path):
    out = tmp_path / "study"
    study(out, "grpo_half")
    # a policy of three steps has no success to learn from: the store that it would have built is put in its place
    built = out / "w0s0" / "self"
    encoder = TfidfEncoder.load(out / "s0" / "world" / "encoder.json")
    oracle(HEK((), encoder), 0).save(built / "run" / "hek")
    (built / "done.json").write_text(json.dumps({"told": {"warm": 0, "seed": 0}, "cpu_seconds": 0.0}))
    first = results(out, "w0s0/grpo_half")

    study(out, "base,free_e2,free_filler,grpo_half")
    lines = [json.loads(line) for line in results(out, "w0s0/base").splitlines()]
    assert {line["arm"] for line in lines} == {"base", "free_e2", "free_filler"}
    assert {line["shown"] for line in lines if line["arm"] == "base"} == {0.0}
    assert all(line["shown"] == 1.0 for line in lines if line["arm"] == "free_e2")
    assert results(out, "w0s0/grpo_half") == first, "what has finished is not run again"
    page = (out / "report.html").read_text()
    assert "free_filler / on" in page and "by_teacher / on" not in page

    shutil.rmtree(out / "w0s0" / "grpo_half")
    study(out, "grpo_half")
    assert results(out, "w0s0/grpo_half") == first, "the same seeds give the same numbers"
    metrics = [json.loads(line) for line in (out / "w0s0/grpo_half/run/metrics.jsonl").read_text().splitlines()]
    assert len(metrics) == 2 and metrics[0]["group/drawn"] == 1
