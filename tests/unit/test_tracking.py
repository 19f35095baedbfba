"""Must fail when another run's folder is reused, a full disk is seen late, or TensorBoard can stop a run."""

import errno
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hiexp import tracking
from hiexp.config import ConfigError
from hiexp.tracking import (
    Timer,
    finish_run,
    open_run_folder,
    progress,
    read_trajectories,
    timed,
    write_json,
    write_trajectories,
)
from hiexp.trajectory import Document, Segment, Source, Status, Trajectory, Turn


@dataclass(frozen=True)
class Inner:
    lr: float = 1e-6


@dataclass(frozen=True)
class Config:
    seed: int = 0
    optim: Inner = field(default_factory=Inner)


def contents(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name != ".lock"}


def test_a_new_folder_holds_everything_needed_to_repeat_the_run(tmp_path):
    folder = open_run_folder(tmp_path / "runs" / "a", Config(seed=3))
    assert set(contents(folder)) == {"config.yaml", "run.json"}
    assert "seed: 3" in (folder / "config.yaml").read_text()
    record = json.loads((folder / "run.json").read_text())
    assert record["packages"]["torch"].startswith("2.") and Path(sys.argv[0]).name in record["command"]


def test_another_run_is_never_overwritten(tmp_path):
    folder = open_run_folder(tmp_path / "a", Config(optim=Inner(lr=9.0)))
    open_run_folder(folder, Config())  # claimed, but nothing was produced: a failed start does not block its folder
    (folder / "metrics.jsonl").write_text("")
    before = contents(folder)
    with pytest.raises(ConfigError, match=r"other settings.*choose another out=.* or delete"):
        open_run_folder(folder, Config(optim=Inner(lr=2e-6)))
    assert contents(folder) == before
    open_run_folder(folder, Config())  # interrupted and equal: may start anew
    finish_run(folder, {"seconds": 1.5})
    before = contents(folder)
    with pytest.raises(ConfigError, match=r"finished run.*choose another out="):
        open_run_folder(folder, Config())
    assert contents(folder) == before and json.loads(before["summary.json"]) == {"seconds": 1.5}


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(ConfigError, match="not of a run"):
        open_run_folder(tmp_path, Config())
    assert set(contents(tmp_path)) == {"thesis.tex"}


def test_places_that_cannot_be_written_are_told_in_one_line(tmp_path):
    file = tmp_path / "file"
    file.write_text("x")
    places = [file, file / "run", Path("/proc/hiexp/run"), Path("/no-such-disk/runs/a")]
    for place in places:
        with pytest.raises(ConfigError, match="another out=") as caught:
            open_run_folder(place, Config())
        assert "\n" not in str(caught.value) and str(place) in str(caught.value)
    assert file.read_text() == "x" and not Path("/no-such-disk").exists()


def test_a_full_disk_is_found_before_any_work(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tracking.os, "fsync", full)
    with pytest.raises(ConfigError, match=r"No space left on device.*free some space"):
        open_run_folder(tmp_path / "a", Config())
    assert not any((tmp_path / "a").iterdir())


@pytest.mark.parametrize("fault", [FileNotFoundError("git"), subprocess.CalledProcessError(128, "git")])
def test_no_git_is_no_failure(tmp_path, monkeypatch, fault):
    def fail(*arguments, **options):
        raise fault

    monkeypatch.setattr(tracking.subprocess, "run", fail)
    folder = open_run_folder(tmp_path / "a", Config())
    assert json.loads((folder / "run.json").read_text())["commit"] is None


def test_trajectories_round_trip_and_are_written_whole(tmp_path):
    first = Trajectory("q1", 1, strategies=("E2-1",), status=Status.ANSWERED, answer="Oslo \u2028 x", reward=0.5)
    first.segments.append(Segment(Source.POLICY, (3, 4), (-0.5, -1.25)))
    first.turns.append(Turn("t", "search", "q", (Document("a", "b"),), ("E1-1",)))
    path = tmp_path / "trajectories.jsonl"
    write_trajectories(path, [first, Trajectory("q2")])
    assert read_trajectories(path) == [first, Trajectory("q2")]

    def cut():
        yield first
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        write_trajectories(path, cut())
    assert len(read_trajectories(path)) == 2 and len(list(tmp_path.iterdir())) == 1
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(tmp_path / "x.json", {"x": math.nan})


def test_timers_tell_waiting_from_computing():
    metrics = {}
    with timed(metrics, "rollout"):
        time.sleep(0.3)
    waited = metrics["time/rollout"]
    assert waited >= 0.3 and metrics["time/rollout_cpu"] < waited / 2  # threads of other tests may be at work
    with timed(metrics, "rollout") as timer:
        end = time.process_time() + 0.1
        while time.process_time() < end:
            pass
    assert timer.cpu >= 0.1 and metrics["time/rollout_cpu"] >= 0.1 and metrics["time/rollout"] >= 0.2
    with pytest.raises(KeyError), Timer() as timer:
        raise KeyError
    assert timer.wall > 0


def test_without_a_terminal_progress_is_a_line_now_and_then(capsys, monkeypatch):
    assert list(progress(range(5), label="short")) == list(range(5))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(tracking, "QUIET_SECONDS", 0.1)
    with progress(total=8, label="rollout", unit="row") as bar:
        for _ in range(8):
            time.sleep(0.06)
            bar.update(1)
    written = capsys.readouterr()
    lines = written.err.splitlines()
    assert written.out == "" and 2 <= len(lines) <= 6
    assert all(line.startswith("rollout:") for line in lines) and "\r" not in written.err and "8/8" in lines[-1]


def test_a_folder_of_another_script_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["somewhere/train.py"])
    folder = open_run_folder(tmp_path / "a", Config())
    (folder / "metrics.jsonl").write_text("")
    monkeypatch.setattr(sys, "argv", ["evaluate.py"])
    with pytest.raises(ConfigError, match=r"holds a run of train\.py"):
        open_run_folder(folder, Config())
