"""The runner: order, resumption, failures, and the folder it refuses. Jobs here are one line of Python each."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hiexp.config import ConfigError, load
from hiexp.study import Runner, is_done, run_study
from hiexp.study_plan import Job, StudyConfig
from hiexp.tracking import write_json

DONE = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
job = json.loads((folder / "job.json").read_text())
with (folder.parent / "order.txt").open("a") as order: order.write(job["name"] + "\\n")
if job["told"].get("fails"): sys.exit("it broke")
(folder / "done.json").write_text(json.dumps({"told": job["told"], "cpu_seconds": 1.0}))
"""


@dataclass
class Toy(Runner):
    stop_after: int = 99
    script: str = DONE
    ended: list[str] = field(default_factory=list)

    def command(self, folder: Path) -> list[str]:
        return [sys.executable, "-c", self.script, str(folder)]

    def _collect(self) -> None:
        super()._collect()
        if len(self.finished) >= self.stop_after:
            self._note(signal.SIGTERM, None)


def order(out):
    return (out / "order.txt").read_text().split()


CHAIN = [Job("a", "x"), Job("c", "x", ("b",)), Job("b", "x", ("a",), {"n": 1}), Job("d", "x", ("c",))]


def test_a_job_waits_for_what_it_needs(tmp_path):
    assert Toy(tmp_path, CHAIN, 2).run() == 0
    assert order(tmp_path) == ["a", "b", "c", "d"]


def test_a_stopped_study_goes_on_and_repeats_nothing(tmp_path):
    assert Toy(tmp_path, CHAIN, 1, stop_after=2).run() == 128 + signal.SIGTERM
    first = order(tmp_path)
    assert len(first) in (2, 3) and first[:2] == ["a", "b"]
    assert Toy(tmp_path, CHAIN, 1).run() == 0
    counts = [order(tmp_path).count(name) for name in ("a", "b")]
    assert counts == [1, 1]
    before = order(tmp_path)
    assert Toy(tmp_path, CHAIN, 1).run() == 0
    assert order(tmp_path) == before, "a finished study starts nothing"


def test_a_job_told_something_else_runs_again(tmp_path):
    Toy(tmp_path, CHAIN[:1], 1).run()
    changed = Job("a", "x", (), {"n": 2})
    assert is_done(tmp_path, CHAIN[0]) and not is_done(tmp_path, changed)
    (tmp_path / "a" / "summary.json").write_text("of the other settings")
    Toy(tmp_path, [changed], 1).run()
    assert order(tmp_path) == ["a", "a"]
    assert not (tmp_path / "a" / "summary.json").exists(), "or a job would take it for its own"


def test_a_job_that_was_killed_finds_what_it_has_left(tmp_path):
    Toy(tmp_path, CHAIN[:1], 1).run()
    (tmp_path / "a" / "done.json").unlink()
    (tmp_path / "a" / "checkpoint").write_text("half of it")
    Toy(tmp_path, CHAIN[:1], 1).run()
    assert order(tmp_path) == ["a", "a"] and (tmp_path / "a" / "checkpoint").exists()


def test_half_a_done_file_does_not_count(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "done.json").write_text('{"told": {')
    assert not is_done(tmp_path, CHAIN[0])


def test_a_failure_takes_down_those_that_need_it_alone(tmp_path, capsys):
    jobs = [Job("bad", "x", (), {"fails": True}), Job("never", "x", ("bad",)), Job("good", "x")]
    runner = Toy(tmp_path, jobs, 1)
    assert runner.run() == 1
    assert order(tmp_path) == ["bad", "good"]
    assert "it broke" in runner.failed["bad"] and "it broke" in capsys.readouterr().out
    repaired = [Job("bad", "x"), *jobs[1:]]
    assert Toy(tmp_path, repaired, 1).run() == 0
    assert order(tmp_path) == ["bad", "good", "bad", "never"]


SLOW = """
import pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
def save(*_):
    (folder / "saved").touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
(folder / "began").touch()
time.sleep(600)
"""


def test_jobs_are_told_to_save_when_the_study_is_stopped(tmp_path):
    script = (
        "import sys; from pathlib import Path; import test_study_run as t\n"
        f"sys.exit(t.Toy(Path({str(tmp_path)!r}), [t.Job('s', 'x')], 1, script=t.SLOW).run())"
    )
    here = Path(__file__)
    paths = f"{here.parents[2]}:{here.parents[1]}:{here.parent}"
    process = subprocess.Popen([sys.executable, "-c", script], env={"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"})
    for _ in range(1200):
        if (tmp_path / "s" / "began").exists():
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    assert (tmp_path / "s" / "saved").exists()
    assert not (tmp_path / "s" / "done.json").exists()


def tiny(out, *more):
    return load(StudyConfig, [f"out={out}", "jobs=0", *more])


def test_a_folder_holds_one_choice_of_sizes(tmp_path):
    out = tmp_path / "study"
    assert run_study(tiny(out)) == 0
    assert {"study.yaml", "results.jsonl", "summary.json", "report.html"} <= {path.name for path in out.iterdir()}
    assert run_study(tiny(out, "set=full")) == 0, "more arms may join"
    with pytest.raises(ConfigError, match=r"size.steps: 24 there, 25 asked for"):
        run_study(tiny(out, "size.steps=25"))
    with pytest.raises(ConfigError, match="overrides"):
        run_study(tiny(out, "overrides=[optim.mini_batches=1]"))


def test_mistakes_are_told_before_anything_runs(tmp_path):
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(ConfigError, match="not a study"):
        run_study(tiny(tmp_path))
    with pytest.raises(ConfigError, match="did you mean"):
        tiny(tmp_path / "x", "arms=[grp]")
    with pytest.raises(ConfigError, match=r"optim.rl|unknown key"):
        run_study(tiny(tmp_path / "y", "overrides=[optim.rl=1]"))
    assert not (tmp_path / "y").exists()


def test_two_studies_never_share_a_folder(tmp_path):
    run_study(tiny(tmp_path / "s"))
    import fcntl

    with (tmp_path / "s" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another study"):
            run_study(load(StudyConfig, [f"out={tmp_path / 's'}", "jobs=1", "arms=[base]"]))


def test_job_files_say_what_ran(tmp_path):
    Toy(tmp_path, CHAIN[:1], 1).run()
    assert json.loads((tmp_path / "a" / "job.json").read_text())["kind"] == "x"
    assert str(tmp_path / "a") in (tmp_path / "a" / "log.txt").read_text()
    write_json(tmp_path / "a" / "done.json", {"told": {"n": 3}})
    assert not is_done(tmp_path, CHAIN[0])
