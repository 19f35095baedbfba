"""Whose folder it is, what may change on resuming, and when to stop (PERF 7, faults 5, 7, 15, 44, 54).

Must fail if two processes get one folder, if a killed process blocks its folder, if a setting that matters may change
unnoticed, or if the launcher's echo of a signal kills the save.
"""

import contextlib
import fcntl
import json
import multiprocessing
import os
import random
import signal
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hiexp import assemble, resume
from hiexp.config import ConfigError, load
from hiexp.distributed import Context
from hiexp.resume import StopRequested, StopSignal, folder_hash, rng_state, set_rng_state
from hiexp.tracking import finish_run, open_run_folder


@dataclass(frozen=True)
class Train:
    steps: int = 10
    save_every: int = 1


@dataclass(frozen=True)
class Optim:
    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    schedule: str = "constant"


@dataclass(frozen=True)
class Checkpoint:
    keep: int = 2


@dataclass(frozen=True)
class Config:
    out: str = ""
    threads: int = 1
    resume_changed: bool = False
    api_key: str = ""
    train: Train = field(default_factory=Train)
    optim: Optim = field(default_factory=Optim)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)


@pytest.fixture
def interrupted(tmp_path):
    folder = open_run_folder(tmp_path / "run", Config(), resumable=True)
    (folder / "metrics.jsonl").write_text("")
    return folder


def refused(folder: Path, config: Config, resumable: bool = True) -> str:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ConfigError) as error:
        open_run_folder(folder, config, resumable)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before and "\n" not in str(error.value)
    return str(error.value)


def test_fault_15_changed_settings_are_listed_and_those_that_matter_refused(interrupted):
    changed = Config(threads=2, optim=Optim(3e-6, (0.9, 0.95)), checkpoint=Checkpoint(5))
    message = refused(interrupted, changed)
    assert "optim.lr 1e-06 -> 3e-06" in message and "optim.betas [0.9, 0.999] -> [0.9, 0.95]" in message
    assert "threads" not in message and "keep" not in message and "resume_changed=true" in message
    open_run_folder(interrupted, replace(changed, resume_changed=True), resumable=True)
    former = json.loads((interrupted / "run.json").read_text())["former"]
    assert former[-1]["changed_after"]["optim.lr"] == [1e-6, 3e-6]
    open_run_folder(interrupted, changed, resumable=True)  # now they are the run's own


def test_fault_15_harmless_changes_are_accepted(interrupted):
    harmless = Config("elsewhere", 4, train=Train(20, 3), checkpoint=Checkpoint(9))
    open_run_folder(interrupted, harmless, resumable=True)
    assert "train.steps 20 -> 19" in refused(interrupted, replace(harmless, train=Train(19, 3)))
    assert "keep: 9" in (interrupted / "config.yaml").read_text()


def test_fault_15_more_steps_are_another_experiment_where_the_learning_rate_depends_on_them(tmp_path):
    linear = Optim(schedule="linear")
    folder = open_run_folder(tmp_path / "run", Config(optim=linear), resumable=True)
    finish_run(folder, {})
    longer = Config(train=Train(20), optim=linear)
    assert "train.steps 10 -> 20" in refused(folder, longer)
    open_run_folder(folder, replace(longer, resume_changed=True), resumable=True)


def test_every_harmless_setting_exists():
    known = list(resume._flatten(asdict(load(assemble.Config, ["out=x", "model.path=x"]))))
    for pattern in resume.HARMLESS:
        assert any(resume.fnmatch.fnmatchcase(key, pattern) for key in known), pattern


def test_fault_15_other_scripts_start_anew_with_equal_settings_only(interrupted):
    open_run_folder(interrupted, Config())
    message = refused(interrupted, Config(checkpoint=Checkpoint(9)), resumable=False)
    assert "checkpoint.keep 2 -> 9" in message and "resume_changed" not in message


def test_a_finished_run_is_refused_unless_more_steps_are_asked_for(interrupted):
    finish_run(interrupted, {"steps": 10})
    assert "finished run" in refused(interrupted, Config())
    assert "finished run" in refused(interrupted, Config(threads=3))
    assert "optim.lr" in refused(interrupted, Config(train=Train(20), optim=Optim(1.0)))
    assert (interrupted / "summary.json").exists()
    open_run_folder(interrupted, Config(train=Train(20)), resumable=True)
    assert not (interrupted / "summary.json").exists()


def test_a_secret_that_the_file_hides_is_no_change(tmp_path):
    config = Config(api_key="sk-abcdefghijklmnop")
    folder = open_run_folder(tmp_path / "run", config, resumable=True)
    (folder / "metrics.jsonl").write_text("")
    assert "sk-abc" not in (folder / "config.yaml").read_text()
    open_run_folder(folder, config, resumable=True)


def test_a_config_of_another_version_is_told_by_its_key(interrupted):
    (interrupted / "config.yaml").write_text("lerning_rate: 1\n")
    assert "lerning_rate" in refused(interrupted, Config())


def forked(target, *args):
    """A second process that says "ready" when it has run `target`, and then does nothing."""
    context = multiprocessing.get_context("fork")
    ready = context.Event()

    def body():
        with target(*args):
            ready.set()
            while True:
                time.sleep(0.05)

    process = context.Process(target=body, daemon=True)
    process.start()
    assert ready.wait(30)
    return process


@contextlib.contextmanager
def holding(folder: Path):
    resume.lock_run(folder)
    resume.sign_lock(folder, "train.py")
    yield


def test_fault_54_a_second_run_is_refused_with_pid_and_host_and_a_killed_one_blocks_nobody(tmp_path):
    other = forked(holding, tmp_path)
    (tmp_path / "config.yaml").write_text("{}\n")
    message = refused(tmp_path, Config())
    assert f"in use by process {other.pid} on {resume.socket.gethostname()} (train.py)" in message
    other.kill()
    other.join()
    open_run_folder(tmp_path, Config(), resumable=True)
    assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()


@pytest.mark.parametrize(
    ("owner", "blocks"),
    [
        ({"pid": os.getppid(), "host": resume.socket.gethostname()}, True),
        ({"pid": 2**22 + 1, "host": resume.socket.gethostname()}, False),
        ({"pid": 2**22 + 1, "host": "another-node"}, True),
        ({}, False),
    ],
)
def test_fault_54_without_locks_of_the_file_system_pid_and_host_decide(tmp_path, monkeypatch, owner, blocks):
    def none(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "lockf", none)
    (tmp_path / ".lock").write_text(json.dumps(owner) if owner else "")
    if blocks:
        with pytest.raises(ConfigError, match=r"in use by process .*delete .*\.lock"):
            open_run_folder(tmp_path, Config())
    else:
        open_run_folder(tmp_path, Config())


def test_fault_07_a_place_that_cannot_be_written_is_refused_at_once(tmp_path):
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file/run", Path("/proc/run"), Path("/no-such-disk/runs/a")):
        with pytest.raises(ConfigError, match="another out="):
            open_run_folder(place, Config(), resumable=True)


def test_fault_05_the_first_signal_is_noted_and_its_echo_is_the_same_request():
    former = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with StopSignal() as stop:
        stop.check()
        assert not stop.requested(Context())
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)  # what a launcher sends on
        assert stop.requested(Context()) and stop.exit_code == 130
        with pytest.raises(StopRequested):
            stop.check("any", "arguments")
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == former


def test_fault_05_a_signal_that_another_rank_got_does_not_count_as_the_first_one_here():
    class Peers(Context):
        def max(self, values, phase="max"):
            return [float(signal.SIGTERM)]

    with StopSignal() as stop:
        assert stop.requested(Peers())
        stop.check()  # this rank's own rollout is not interrupted
        os.kill(os.getpid(), signal.SIGTERM)  # would exit if it were taken for the second
        assert stop.exit_code == 143


def test_fault_05_a_second_signal_exits_at_once():
    process = forked(StopSignal)
    assert process.pid
    os.kill(process.pid, signal.SIGTERM)
    process.join(resume.SAME_REQUEST_SECONDS + 0.2)
    assert process.is_alive()
    os.kill(process.pid, signal.SIGINT)
    process.join(10)
    assert process.exitcode == 130


def test_all_random_number_generators_continue_where_they_were():
    def draw():
        return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), float(torch.rand(()))

    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    random.gauss(0, 1), np.random.randn()  # both keep a second number for later
    state = json.loads(json.dumps(rng_state()))
    first = draw()
    assert draw() != first
    set_rng_state(state)
    assert draw() == first


def test_a_folders_hash_tells_names_and_contents_and_passes_over_hidden_files(tmp_path):
    (tmp_path / "a").write_text("1")
    first = folder_hash(tmp_path)
    (tmp_path / ".hidden").write_text("x")
    assert folder_hash(tmp_path) == first != folder_hash("") == ""
    (tmp_path / "a").rename(tmp_path / "b")
    assert folder_hash(tmp_path) != first
