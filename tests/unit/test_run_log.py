"""The log of a run; must fail if a view can stop the run, a resumed run says a step twice, or a secret is written."""

import json
import math
import subprocess
import sys
import time
import types
import warnings
from dataclasses import dataclass, field

import pytest

from hiexp import run_log, tracking
from hiexp.config import ConfigError
from hiexp.redact import HIDDEN
from hiexp.run_log import LogConfig, RunLog, rollout_histograms
from hiexp.tracking import (
    Timer,
    append_trajectories,
    cut_after,
    finish_run,
    iter_trajectories,
    open_run_folder,
    progress,
    read_metrics,
    read_trajectories,
    timed,
)
from hiexp.trajectory import Segment, Source, Status, Trajectory, Turn

CANARY = "CANARY9x7Qz4"


class Letters:
    def decode(self, ids):
        return "".join(map(chr, ids))


def attempt(name="q1", reward=0.5, text="hello"):
    trajectory = Trajectory(name, status=Status.ANSWERED, answer="x", reward=reward)
    trajectory.segments.append(Segment(Source.POLICY, tuple(map(ord, text)), (-0.5,) * len(text)))
    trajectory.turns.append(Turn(text, "search", "q"))
    return trajectory


def events(folder):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    sizes = {"tensors": 0, "histograms": 0, "scalars": 0}
    return accumulator.EventAccumulator(str(folder / "tb"), size_guidance=sizes).Reload()


def steps(found):
    return [event.step for event in found]


def test_metrics_are_on_disk_at_once_and_valid_json(tmp_path):
    log = RunLog(tmp_path)
    log.log(0, {"reward/mean": 0.5, "loss/kl": math.nan})
    log.log(1, {"reward/mean": 1, "loss/kl": math.inf})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()  # before close
    strict = [json.loads(line, parse_constant=lambda name: pytest.fail(name)) for line in lines]
    assert strict == read_metrics(tmp_path) == [
        {"step": 0, "reward/mean": 0.5, "loss/kl": None},
        {"step": 1, "reward/mean": 1.0, "loss/kl": None},
    ]  # fmt: skip
    log.close()


def test_tensorboard_holds_numbers_distributions_and_samples(tmp_path):
    tried = [attempt("q1", 0.0, "bad <b>"), attempt("q2", 1.0, "good"), attempt("q3", 0.5, "neither")]
    with RunLog(tmp_path) as log:
        for step in range(3):
            log.log(step, {"reward/mean": step / 2}, rollout_histograms(tried, [-1.0, math.nan, 0.5]))
            log.show(step, tried, Letters())
        log.show(3, [], Letters())
    found = events(tmp_path)
    assert [(e.step, e.value) for e in found.Scalars("reward/mean")] == [(0, 0.0), (1, 0.5), (2, 1.0)]
    counts = {name: found.Histograms(f"distribution/{name}")[0].histogram_value for name in ("reward", "advantage")}
    assert (counts["reward"].num, counts["reward"].sum) == (3, 1.5)
    assert (counts["advantage"].num, counts["advantage"].sum) == (2, -0.5), "what is not finite is left out"
    assert found.Histograms("distribution/response_tokens")[0].histogram_value.sum == 7 + 4 + 7
    assert found.Histograms("distribution/searches")[0].histogram_value.sum == 3
    texts = {n: found.Tensors(f"trajectory/{n}/text_summary")[0].tensor_proto.string_val[0] for n in ("best", "worst")}
    assert texts["best"].decode() == "    q2, answered, reward 1.000\n    [policy]good"
    assert "bad <b>" in texts["worst"].decode()


def test_a_resumed_run_says_every_step_once(tmp_path):
    with RunLog(tmp_path) as log:
        for step in range(6):
            log.log(step, {"x": step})
            log.show(step, [attempt(f"q{step}"), attempt(f"r{step}")], Letters())
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "x"')  # killed while writing
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 1, 2, 3, 4, 5], "a half line is no line"
    with RunLog(tmp_path, resume_step=2) as log:
        for step in (3, 4):
            log.log(step, {"x": 10 * step})
            log.show(step, [attempt(f"again{step}")], Letters())
    assert [(line["step"], line["x"]) for line in read_metrics(tmp_path)] == [(0, 0), (1, 1), (2, 2), (3, 30), (4, 40)]
    found = events(tmp_path)
    assert [(e.step, e.value) for e in found.Scalars("x")] == [(0, 0), (1, 1), (2, 2), (3, 30), (4, 40)]
    names = [(step, one.sample_id) for step, one in iter_trajectories(tmp_path / "trajectories.jsonl")]
    assert names == [(0, "q0"), (0, "r0"), (1, "q1"), (1, "r1"), (2, "q2"), (2, "r2"), (3, "again3"), (4, "again4")]
    with RunLog(tmp_path) as log:
        log.log(0, {"x": 7})
    assert read_metrics(tmp_path) == [{"step": 0, "x": 7.0}]
    assert read_trajectories(tmp_path / "trajectories.jsonl") == []


def test_cutting_keeps_whole_lines_up_to_the_step(tmp_path):
    path = tmp_path / "x.jsonl"
    cut_after(path, 3)
    assert not path.exists()
    lines = ['{"step": 3}\n', '{"step": 3, "a": 1}\n', '{"step": 14, "a": 1}\n', '{"step": 15']
    for step, kept in ((2, 0), (3, 2), (13, 2), (14, 3), (99, 3)):
        path.write_text("".join(lines))
        cut_after(path, step)
        assert path.read_text() == "".join(lines[:kept]), step


def test_trajectories_are_appended_and_what_was_there_is_not_read_again(tmp_path):
    path = tmp_path / "trajectories.jsonl"
    path.write_bytes(b"\xff not even text\n")
    append_trajectories(path, [attempt("q1"), attempt("q2")], 4)
    append_trajectories(path, [], 5)
    append_trajectories(path, [attempt("q3")], 6)
    first, *rest = path.read_bytes().splitlines(keepends=True)
    assert first == b"\xff not even text\n"
    path.write_bytes(b"".join(rest))
    assert list(iter_trajectories(path)) == [(4, attempt("q1")), (4, attempt("q2")), (6, attempt("q3"))]


def test_a_disk_that_fills_while_appending_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "trajectories.jsonl"
    append_trajectories(path, [attempt("q1")], 0)
    before = path.read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tracking.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        append_trajectories(path, [attempt("q2")], 1)
    assert path.read_bytes() == before


def test_a_log_that_is_not_enabled_leaves_no_trace(tmp_path, capsys):
    with RunLog(tmp_path / "a", enabled=False, cfg=LogConfig("x")) as log:
        log.log(0, {"x": 1.0}, {"y": [1.0]})
        log.show(0, [attempt()], Letters())
    assert not list(tmp_path.iterdir()) and capsys.readouterr().out == ""


def test_one_line_per_step_and_not_more_than_one_in_five_seconds(tmp_path, monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr(run_log.time, "perf_counter", lambda: now[0])
    values = {
        "reward/mean": 0.4123, "rollout/searches": 2.125, "rollout/tokens": 311.7, "loss/total": 0.01234,
        "optim/grad_norm": 0.8211, "loss/kl": 9.0,
    }  # fmt: skip
    with RunLog(tmp_path) as log:
        for step, seconds in enumerate([7.5, 1.0, 1.0, 3.5, 20.0, 1.0, 1.0]):
            now[0] += seconds
            log.log(step, values if step == 0 else {"reward/mean": step / 10})
    assert capsys.readouterr().out.splitlines() == [
        "step 0  reward 0.412  searches 2.12  tokens 312  loss 0.0123  grad norm 0.821  7.5 s",
        "step 3  reward 0.300  3.5 s",
        "step 4  reward 0.400  20.0 s",
        "step 6  reward 0.600  1.0 s",  # the last step, at the end
    ]


def test_fault_52_an_unwritable_tensorboard_warns_once_and_the_run_goes_on(tmp_path, monkeypatch):
    (tmp_path / "tb").write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match="no TensorBoard"):
        log = RunLog(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        log.log(0, {"x": 1.0})
        log.show(0, [attempt()], Letters())
        log.close()
    (tmp_path / "tb").unlink()
    with RunLog(tmp_path) as log:
        writer = log._views["TensorBoard"]
        monkeypatch.setattr(writer, "add_scalar", lambda *a: (_ for _ in ()).throw(OSError("gone")))
        with pytest.warns(UserWarning, match="gone") as caught:
            log.log(0, {"x": 1.0})
            log.log(1, {"x": 2.0})
            log.show(1, [attempt()], Letters())
    assert len(caught) == 1 and [row["x"] for row in read_metrics(tmp_path)] == [1.0, 2.0]


def test_fault_52_a_tokenizer_that_throws_costs_the_view_alone(tmp_path):
    class Broken:
        def decode(self, ids):
            raise ValueError("no such id")

    with RunLog(tmp_path) as log, pytest.warns(UserWarning, match="no such id"):
        log.show(0, [attempt()], Broken())
    assert len(read_trajectories(tmp_path / "trajectories.jsonl")) == 1


def test_fault_53_durations_do_not_follow_a_clock_that_is_set_back(tmp_path, monkeypatch, capsys):
    ticks = iter(range(10**6, 0, -3600))
    monkeypatch.setattr(time, "time", lambda: float(next(ticks)))
    monkeypatch.setattr(tracking, "QUIET_SECONDS", 0.05)
    metrics = {}
    with timed(metrics, "rollout"), Timer() as timer:
        time.sleep(0.02)
    assert 0.02 <= metrics["time/rollout"] < 1 and 0.02 <= timer.wall < 1
    with progress(total=4, label="bar") as bar:
        for _ in range(4):
            time.sleep(0.04)
            bar.update(1)
    lines = capsys.readouterr().err.splitlines()
    assert lines and all("-" not in line.split("[")[1] for line in lines), lines
    with RunLog(tmp_path) as log:
        log.log(0, {"reward/mean": 1.0})
    assert 0 <= float(capsys.readouterr().out.split()[-2]) < 60


class FakeRun:
    def __init__(self, **settings):
        self.settings, self.logged, self.finished = settings, [], False

    def log(self, values, step):
        if self.settings["project"] == "down":
            raise ConnectionError("no route to http://u:pass@host")
        self.logged.append((step, values))

    def finish(self):
        self.finished = True


@pytest.fixture
def wandb(monkeypatch):
    runs = []
    module = types.ModuleType("wandb")
    module.__spec__ = types.SimpleNamespace()  # what find_spec looks at
    module.Settings = dict
    module.init = lambda **settings: runs.append(FakeRun(**settings)) or runs[-1]
    monkeypatch.setitem(sys.modules, "wandb", module)
    return runs


def test_wandb_gets_the_numbers_and_a_resumed_run_its_old_id(tmp_path, wandb):
    (tmp_path / "config.yaml").write_text("seed: 3\n")
    for resume in (None, 0):
        with RunLog(tmp_path, resume, cfg=LogConfig("hiexp")) as log:
            log.log(1, {"x": 1.0, "bad": math.nan})
    first, second = wandb
    assert first.logged == [(1, {"x": 1.0})] and first.finished
    assert first.settings["config"] == {"seed": 3} and first.settings["dir"] == str(tmp_path)
    assert first.settings["id"] == second.settings["id"] and len(first.settings["id"]) == 16
    assert first.settings["settings"]["console"] == "off" and first.settings["settings"]["x_disable_meta"]


def test_a_wandb_that_fails_warns_once_and_a_missing_one_is_told_before_the_run(tmp_path, wandb, monkeypatch):
    with RunLog(tmp_path, cfg=LogConfig("down")) as log, pytest.warns(UserWarning, match="no wandb logs") as caught:
        log.log(0, {"x": 1.0})
        log.log(1, {"x": 2.0})
    assert len(caught) == 1 and "pass@" not in str(caught[0].message) and len(read_metrics(tmp_path)) == 2
    monkeypatch.delitem(sys.modules, "wandb")
    monkeypatch.setattr(run_log.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"log\.wandb=x.*pip install wandb"):
        LogConfig("x").check()
    LogConfig().check()


def test_wandb_is_imported_only_when_asked_for():
    code = "import sys, hiexp.run_log, hiexp.tracking; assert 'wandb' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@dataclass(frozen=True)
class Judge:
    api_key: str = CANARY
    url: str = f"http://user:{CANARY}@host"


@dataclass(frozen=True)
class Config:
    judge: Judge = field(default_factory=Judge)


def test_fault_45_nothing_that_a_run_writes_holds_a_secret(tmp_path, monkeypatch, wandb, capsys):
    monkeypatch.setenv("JUDGE_API_KEY", CANARY)
    monkeypatch.setattr(
        sys, "argv", ["train.py", f"judge.api_key={CANARY}", f"judge.url=http://u:{CANARY}@h", "seed=1"]
    )
    folder = open_run_folder(tmp_path / "a", Config())
    with RunLog(folder, cfg=LogConfig("hiexp")) as log:
        log.log(0, {"reward/mean": 1.0})
        log.show(0, [attempt(text="asked http://h")], Letters())
        with pytest.warns(UserWarning) as caught:
            monkeypatch.setattr(log._views["TensorBoard"], "add_scalar", lambda *a: 1 / 0 if a[1] else None)
            monkeypatch.setattr(wandb[0], "log", lambda *a, **b: (_ for _ in ()).throw(OSError(f"key {CANARY}")))
            log.log(1, {"reward/mean": 1.0})
    with RunLog(tmp_path / "b") as log:
        secret_text = attempt(text=f"the key is {CANARY}, url http://u:{CANARY}@h")
        log._use("TensorBoard", lambda writer: run_log._write_samples(writer, 0, [secret_text], Letters()))
    finish_run(folder, {"steps": 1})
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"config.yaml", "run.json", "metrics.jsonl", "trajectories.jsonl"} <= {path.name for path in files}
    assert not [path for path in files if CANARY.encode() in path.read_bytes()]
    assert HIDDEN in (folder / "run.json").read_text() and "seed=1" in (folder / "run.json").read_text()
    assert CANARY not in str([str(w.message) for w in caught]) + str(wandb[0].settings) + str(capsys.readouterr())
    assert len(caught) == 2
