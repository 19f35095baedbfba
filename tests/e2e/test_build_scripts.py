"""build_hek.py as a user starts it, with the lab's policy: another model folder, an endpoint, and its own logs.

Must fail if the wrong model writes, if what a run left cannot be built from again, or if the two ways to the same
attempts give different lessons.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from endpoint import serve

from hiexp.encoder import TfidfEncoder
from hiexp.hek import HEK
from hiexp.tracking import read_trajectories

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
FEW = ["build.questions=64", "build.rollouts_per_question=6", "rollout.group_size=6"]


def run(*arguments):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "no_proxy": "127.0.0.1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "build_hek.py"), *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return done


def texts(hek):
    """Everything but who wrote it."""
    return [
        (entry.id, entry.title, entry.description, entry.qa_groups, entry.parent_id, entry.child_ids)
        for entry in sorted(hek.by_id.values(), key=lambda entry: entry.id)
    ]


@pytest.fixture(scope="module")
def encoder(lab):
    return TfidfEncoder.load(lab / "world/encoder.json")


@pytest.fixture(scope="module")
def built(lab, settings, tmp_path_factory):
    """Lessons by another folder, which holds the same weights as the policy: what it writes is known."""
    place = tmp_path_factory.mktemp("built")
    shutil.copytree(lab / "policy", place / "teacher")
    run(*settings, *FEW, f"build.reflector.model={place / 'teacher'}", f"out={place / 'run'}")
    return place


def test_another_model_folder_writes_the_cases_and_the_policy_the_rest(built, settings, encoder, tmp_path):
    hek = HEK.load(built / "run/hek", encoder)
    assert hek.levels[1] and hek.levels[2]
    assert {entry.source_model for entry in hek.levels[1]} == {str(built / "teacher")}
    policy = next(word.partition("=")[2] for word in settings if word.startswith("model.path="))
    assert {entry.source_model for level in (2, 3) for entry in hek.levels[level]} == {policy}
    run(*settings, *FEW, f"out={tmp_path / 'own'}")
    assert texts(HEK.load(tmp_path / "own/hek", encoder)) == texts(hek)
    page = (built / "run/report.html").read_text()
    assert "From questions to pairs" in page and hek.levels[1][0].id in page and str(built / "teacher") in page


def test_a_runs_own_trajectories_are_logs(built, settings, encoder, tmp_path):
    more = [f"build.logs={built / 'run/trajectories.jsonl'}", f"build.reflector.model={built / 'teacher'}"]
    more += ["build.questions=0", "search.corpus=[]"]
    done = run(*settings, *more, f"out={tmp_path / 'again'}")
    assert "rollouts:" not in done.stderr
    assert texts(HEK.load(tmp_path / "again/hek", encoder)) == texts(HEK.load(built / "run/hek", encoder))


def test_an_endpoint_writes_from_logs_without_a_policy(built, lab, tmp_path):
    golds = {}
    for line in (lab / "world/train.jsonl").read_text().splitlines():
        record = json.loads(line)
        golds[record["id"]] = record
    groups = {}
    for one in read_trajectories(built / "run/trajectories.jsonl"):
        steps = [{"text": t.text, "query": t.argument} for t in one.turns if t.action == "search"]
        steps.append({"text": "done", "answer": one.answer or "-"})
        groups.setdefault(one.sample_id, []).append((steps, one.reward))
    with (tmp_path / "logs.jsonl").open("w") as file:
        for name, group in groups.items():
            attempts, rewards = zip(*group, strict=True)
            line = {"id": name, "question": golds[name]["question"], "trajectories": attempts, "rewards": rewards}
            file.write(json.dumps(line) + "\n")

    def lesson(prompt, seed, n):
        return json.dumps({"title": prompt.splitlines()[1].partition(" : ")[2], "description": "look twice"})

    with serve(lesson) as endpoint:
        run(
            str(ROOT / "configs/logs.yaml"),
            f"build.logs={tmp_path / 'logs.jsonl'}",
            f"build.reflector.url={endpoint.url}",
            "build.prompts=compact",
            "build.max_level=1",
            "build.max_attempts=1",
            "build.merge_threshold=null",
            "encoder.kind=tfidf",
            f"encoder.path={lab / 'world/encoder.json'}",
            f"out={tmp_path / 'run'}",
        )
    report = json.loads((tmp_path / "run/summary.json").read_text())
    before = json.loads((built / "run/summary.json").read_text())
    counts = ("questions", "all_right", "all_wrong", "pairs")
    assert [report[name] for name in counts] == [before[name] for name in counts]
    assert sum(report["replies"]["1"].values()) == len(endpoint.asked) == report["pairs"]
