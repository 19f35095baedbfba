"""The runner: order, resumption, failures, and the folder it refuses. Jobs here are one line of Python each."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from hiexp.config import ConfigError, load
from hiexp.study import Runner, is_done, of_folder, run_study
from hiexp.study_plan import Job, StudyConfig, plan
from hiexp.tracking import write_json

ROOT = str(Path(__file__).resolve().parents[2])
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


def test_a_job_is_not_run_beside_one_that_was_left_behind(tmp_path):
    """Of two processes in one folder the second waits; whoever takes the folder away waits too."""
    (tmp_path / "a").mkdir()
    write_json(tmp_path / "a" / "job.json", {"told": {"n": 1}})
    code = (
        "import sys, time; from pathlib import Path; from hiexp.study import alone; place = Path(sys.argv[1])\n"
        "with alone(place): (place / 'held').touch(); time.sleep(1.5); (place / 'left').touch()"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "a")], env={"PYTHONPATH": ROOT})
    for _ in range(1200):
        if (tmp_path / "a" / "held").exists():
            break
        time.sleep(0.05)
    began = time.monotonic()
    Toy(tmp_path, [Job("a", "x", (), {"n": 2})], 1).run()
    assert process.wait(60) == 0, "its folder was not taken away under it"
    assert time.monotonic() - began > 1 and not (tmp_path / "a" / "left").exists()


@pytest.mark.parametrize("early", [True, False])
def test_a_job_stops_when_its_study_is_gone(tmp_path, early):
    """Killed as soon as the job's process is there, and when the job is at work."""
    run_study(tiny(tmp_path / "study"))
    folder = tmp_path / "study" / "w0" / "policy"
    folder.mkdir(parents=True)
    write_json(folder / "job.json", {"name": "w0/policy", "kind": "warm", "told": {"seed": 0}})
    parent = (
        "import os, subprocess, sys, time\nfrom hiexp.study import STUDY\n"
        f"p = subprocess.Popen([sys.executable, '-m', 'hiexp.study_job', {str(folder)!r}],"
        " env=os.environ | {STUDY: str(os.getpid())}); print(p.pid, flush=True)\n"
        "time.sleep(600)"
    )
    environment = {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"}
    study = subprocess.Popen([sys.executable, "-c", parent], env=environment, stdout=subprocess.PIPE, text=True)
    job = int(study.stdout.readline())
    while not early and not (folder / ".lock").exists():
        time.sleep(0.1)
    study.kill()
    study.wait()
    for _ in range(600):
        if not Path(f"/proc/{job}").exists() or "Z" in Path(f"/proc/{job}/stat").read_text().split()[2]:
            break
        time.sleep(0.1)
    else:
        os.kill(job, signal.SIGKILL)
        pytest.fail("the job went on without its study")
    assert not (folder / "done.json").exists()


def tiny(out, *more):
    return load(StudyConfig, [f"out={out}", "jobs=0", *more])


def test_a_folder_holds_one_choice_of_sizes(tmp_path):
    out = tmp_path / "study"
    assert run_study(tiny(out)) == 0
    assert {"study.yaml", "results.jsonl", "summary.json", "report.html"} <= {path.name for path in out.iterdir()}
    assert run_study(tiny(out, "set=full")) == 0, "more arms may join"
    kept = (out / "study.yaml").read_bytes(), (out / "settings.yaml").read_bytes()
    with pytest.raises(ConfigError, match=r"size.steps: 24 there, 25 asked for"):
        run_study(tiny(out, "size.steps=25"))
    with pytest.raises(ConfigError, match="overrides"):
        run_study(tiny(out, "overrides=[optim.mini_batches=1]"))
    mine = tmp_path / "mine.yaml"
    mine.write_text((Path(ROOT) / "configs/lab.yaml").read_text().replace("epochs: 12", "epochs: 3"))
    with pytest.raises(ConfigError, match=r"sft.epochs: 12 there, 3 asked for"):
        run_study(tiny(out, f"config={mine}"))
    assert kept == ((out / "study.yaml").read_bytes(), (out / "settings.yaml").read_bytes())


def test_what_belongs_to_the_folder_need_not_be_said_again(tmp_path):
    out = tmp_path / "study"
    run_study(tiny(out, "size.steps=7", "overrides=[optim.mini_batches=1]", "set=full", "arms=[rft]", "worlds=[3]"))
    again = load(StudyConfig, of_folder([f"out={out}", "jobs=0"]))
    assert (again.size.steps, again.overrides) == (7, ("optim.mini_batches=1",))
    assert (again.set, again.arms, again.worlds) == ("core", (), ()), "what is asked for is asked for each time"
    assert run_study(again) == 0
    assert of_folder(["jobs=0"]) == ["jobs=0"] and of_folder([f"out={tmp_path}"]) == [f"out={tmp_path}"]


def test_the_report_has_all_that_has_finished_whatever_is_asked_for(tmp_path):
    cfg = tiny(tmp_path / "s", "size.seeds=2", "size.warm_starts=1")
    run_study(cfg)
    everything = replace(cfg, set="full", worlds=(0, 1, 7))
    for job in plan(everything):
        if job.kind == "arm" and job.told["arm"] in ("base", "free_e2", "rft"):
            folder = tmp_path / "s" / job.name
            folder.mkdir(parents=True)
            write_json(folder / "done.json", {"told": job.told, "cpu_seconds": 1.0})
            told = {key: job.told[key] for key in ("arm", "warm", "seed")}
            line = told | {
                "split": "in_domain",
                "hek": "off",
                "decoding": "sampled",
                "shown": 0.0,
                "scores": {"a-1": 1.0},
            }
            (folder / "results.jsonl").write_text(json.dumps(line) + "\n")
    (tmp_path / "s" / "s7").mkdir()

    def found(*more):
        assert run_study(tiny(tmp_path / "s", "size.seeds=2", "size.warm_starts=1", *more)) == 0
        lines = [json.loads(line) for line in (tmp_path / "s" / "results.jsonl").read_text().splitlines()]
        return sorted((line["arm"], line["seed"]) for line in lines)

    whole = sorted((arm, seed) for arm in ("base", "free_e2", "rft") for seed in (0, 1, 7))
    assert found() == found("set=full") == found("arms=[grpo]") == whole
    assert found("worlds=[7]") == [("base", 7), ("free_e2", 7), ("rft", 7)]


def test_mistakes_are_told_before_anything_runs(tmp_path):
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(ConfigError, match="not a study"):
        run_study(tiny(tmp_path))
    with pytest.raises(ConfigError, match="did you mean"):
        tiny(tmp_path / "x", "arms=[grp]")
    with pytest.raises(ConfigError, match=r"optim.rl|unknown key"):
        run_study(tiny(tmp_path / "y", "overrides=[optim.rl=1]"))
    with pytest.raises(ConfigError, match=r"rollout.group_size itself; set size.group"):
        run_study(tiny(tmp_path / "y", "overrides=[rollout.group_size=4]"))
    with pytest.raises(ConfigError, match=r"data.train itself; leave it out"):
        run_study(tiny(tmp_path / "y", "overrides=[data.train=x.jsonl]"))
    assert not (tmp_path / "y").exists()
    for override in ("optim={lr: 1e-5}", "other.yaml"):
        with pytest.raises(ConfigError, match="one key=value"):
            run_study(replace(tiny(tmp_path / "y"), overrides=(override,)))
    with pytest.raises(ConfigError, match="cannot write"):
        run_study(tiny(tmp_path / "notes" / "below"))
    with pytest.raises(ConfigError, match="is a file"):
        run_study(tiny(tmp_path / "notes"))


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
