"""A HEK from another agent's logs, by build_hek.py as a process of its own that sees no model, no search and no policy.

Must fail if a rollout is made, a reply that was paid for is asked again, a missing answer leaks, or a file that cannot
give a HEK is told only after something was asked.
"""

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from endpoint import serve

import build_hek
from hiexp.agent_logs import read_logs
from hiexp.assemble import Config
from hiexp.config import run_script
from hiexp.encoder import HashEncoder
from hiexp.hek import HEK
from hiexp.resume import folder_hash

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
FAMILIES = ("who founded the first label of a band", "when was the second film of a city made")
QUESTIONS = 12


def written(prompt, seed):
    """A lesson for a pair by the number in its question; every fourth reply is none."""
    if seed % 4 == 0:
        return "I cannot say."
    if found := re.search(r"^Question: which n(\d+)", prompt, re.MULTILINE):
        title = FAMILIES[int(found[1]) % 2] + (" so" if seed % 2 else "")
        return json.dumps({"type": "pitfall", "title": title, "tags": [], "thinking": "x", "description": f"d{seed}"})
    title = "any question" if "a rule that holds" in prompt else FAMILIES["film" in prompt]
    return json.dumps({"title": title, "tags": ["t"], "thinking": "x", "description": f"shared {seed}"})


def attempts(i):
    chat = [
        {"role": "user", "content": f"which n{i} is it?"},
        {"role": "assistant", "content": f"<search> n{i} </search>"},
        {"role": "tool", "content": f"about n{i}"},
        {"role": "assistant", "content": "Rome"},
    ]
    return [f"I know it.\nAnswer: Oslo{i}", {"messages": chat}]


def lines():
    return [
        {"id": f"s{i}", "question": f"which n{i} is it?", "trajectories": attempts(i), "rewards": [2, 0]}
        for i in range(QUESTIONS)
    ]


def settings(tmp_path, records, *more):
    (tmp_path / "logs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in records))
    fixed = (
        "encoder.kind=hash",
        "encoder.path=",
        "build.merge_threshold=null",
        "build.threshold_1=0.6",
        "build.threshold_2=-0.5",
    )
    return ["configs/logs.yaml", f"build.logs={tmp_path / 'logs.jsonl'}", *fixed, *more]


def run(arguments):
    """As a user would."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "no_proxy": "127.0.0.1"}
    command = [sys.executable, "build_hek.py", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=120)
    return done.returncode, done.stdout, done.stderr


def child(arguments):
    os.environ["no_proxy"] = "127.0.0.1"
    os._exit(run_script(build_hek.main, Config, arguments, ""))


def start(arguments):
    """A process too, but one that need not import everything first."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["build_hek", "torch", "transformers"])
    process = context.Process(target=child, args=(arguments,))
    process.start()
    return process


def main(arguments):
    """In this process."""
    return run_script(build_hek.main, Config, arguments, "")


@pytest.fixture(autouse=True)
def loopback(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.chdir(ROOT)


def code_of(process):
    process.join(120)
    return process.exitcode


def test_logs_and_an_endpoint_are_enough(tmp_path, capsys):
    """Dry run, a build that is killed while it pays, the same command again: each reply was asked once."""
    running, kill_at = [], [0]

    def reply(prompt, seed, n):
        if kill_at[0] and len(endpoint.asked) >= kill_at[0]:
            os.kill(running[0].pid, signal.SIGKILL)
            time.sleep(0.2)
        return written(prompt, seed)

    with serve(reply) as endpoint:
        one = [f"build.reflector.url={endpoint.url}", "build.reflector.concurrency=1"]
        base = settings(tmp_path, lines(), *one)
        assert main([*base, f"out={tmp_path / 'whole'}", "build.dry_run=true"]) == 0
        out = capsys.readouterr().out
        assert "24 attempts, no rollouts" in out and "counted: 12 of 12 questions" in out
        assert "~16 calls of reflector (0 kept)" in out and "abstractor" not in out and not endpoint.asked
        assert not (tmp_path / "whole").exists()

        code, out, err = run([*base, f"out={tmp_path / 'whole'}"])
        assert code == 0, err
        assert len(endpoint.asked) == len(set(endpoint.asked)) and "rollouts" not in err
        whole, total = folder_hash(tmp_path / "whole/hek"), len(endpoint.asked)
        endpoint.asked.clear()
        for kill_at[0] in (5, total - 2):
            running[:] = [start([*base, f"out={tmp_path / 'cut'}"])]
            assert code_of(running[0]) == -signal.SIGKILL
        kill_at[0] = 0
        assert code_of(start([*base, f"out={tmp_path / 'cut'}"])) == 0
        # the two that were under way when the process was killed were answered to nobody
        assert total <= len(endpoint.asked) <= total + 2 and len(set(endpoint.asked)) == total
        assert folder_hash(tmp_path / "cut/hek") == whole

    hek = HEK.load(tmp_path / "whole/hek", HashEncoder())
    assert all(hek.levels[level] for level in (1, 2, 3))
    assert {entry.source_model for entry in hek.by_id.values()} == {"teacher"}
    sources = {source for entry in hek.levels[1] for source in entry.qa_groups}
    assert sources <= {(f"s{i}", f"which n{i} is it?") for i in range(QUESTIONS)} and len(sources) > QUESTIONS // 2
    assert {(one.id, one.off_reward, one.off_count) for one in hek.asked} == {
        (f"s{i}", 1.0, 2) for i in range(QUESTIONS)
    }
    prompt = next(prompt for prompt, _ in endpoint.asked if "which n3 " in prompt)
    assert "Right answer: Oslo3\n" in prompt and "searched for: n3" in prompt and "found: : about n3" in prompt
    page = (tmp_path / "whole/report.html").read_text()
    assert "no_object" in page and "E3-0" in page and "<script" not in page
    assert not (tmp_path / "whole/trajectories.jsonl").exists()
    moved = tmp_path / "elsewhere.jsonl"
    moved.write_bytes((tmp_path / "logs.jsonl").read_bytes())
    with serve(lambda prompt, seed, n: written(prompt, seed)) as endpoint:
        again = [*base, f"build.logs={moved}", f"build.reflector.url={endpoint.url}", f"out={tmp_path / 'again'}"]
        assert main(again) == 0
    assert folder_hash(tmp_path / "again/hek") == whole, "the store names the content of the logs, not their place"


def test_an_answer_that_only_a_success_gave_must_not_be_told(tmp_path):
    def reply(prompt, seed, n):
        lesson = json.loads(written(prompt, seed | 1))
        return json.dumps(lesson | {"description": "it is Oslo3, I say" if "which n3 " in prompt else "look twice"})

    with serve(reply) as endpoint:
        more = (f"build.reflector.url={endpoint.url}", f"out={tmp_path / 'run'}", "build.max_level=1")
        assert main(settings(tmp_path, lines(), *more)) == 0
    report = json.loads((tmp_path / "run/summary.json").read_text())
    assert report["replies"]["1"] == {"accepted": QUESTIONS - 1, "gold_leak": 3} and report["given_up"]["1"] == 1


def test_the_example_of_the_documentation_works_as_it_stands(tmp_path, capsys):
    block = re.search(r"```jsonl\n(.*?)```", (ROOT / "docs/experience.md").read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "logs.jsonl").write_text(block[1])
    logs = read_logs(tmp_path / "logs.jsonl")
    assert [sample.id for sample in logs.samples] == ["q1", "q2"]
    found = [[(t.answer, t.num_searches, len(t.turns[0].documents), t.reward) for t in g] for g in logs.attempts()]
    assert found == [[("Oslo", 2, 1, 1), ("Milan", 1, 1, 0)], [("yes", 1, 1, 1), ("no", 1, 1, 0)]]
    with serve(lambda prompt, seed, n: written(prompt, 1)) as endpoint:
        records = [json.loads(line) for line in block[1].splitlines()]
        more = (f"build.reflector.url={endpoint.url}", "build.reflector.concurrency=1", f"out={tmp_path / 'run'}")
        assert main(settings(tmp_path, records, *more)) == 0
    prompts = [prompt for prompt, _ in endpoint.asked]
    assert "Right answer: Oslo" in prompts[0] and "Right answer: yes" in prompts[1]


@pytest.mark.parametrize(
    ("change", "more", "message"),
    [
        ({}, ["build.reflector.model="], "set build.reflector.model=FOLDER, or build.reflector.url"),
        ({"rewards": [0.5, 0.25]}, [], "lie between 0.25 and 0.5: set build.success_reward between them"),
        ({"rewards": [1]}, [], "logs.jsonl:1: 2 trajectories, 1 rewards"),
        ({"trajectories": [1, 2]}, [], "logs.jsonl:1: attempt 1 is a int"),
        ({}, ["build.questions=13"], "has 12 questions; lower it"),
        ({}, ["build.logs=nowhere.jsonl"], "no such file: nowhere.jsonl"),
        ({}, ["build.success_reward=.nan"], "success_reward=nan must be a number"),
        ({}, ["build.reflector.url="], "teacher"),
    ],
)
def test_what_cannot_give_a_hek_is_told_before_anything_is_asked(tmp_path, capsys, change, more, message):
    out = tmp_path / "run"
    records = [line | change for line in lines()]
    url = "build.reflector.url=http://127.0.0.1:9/v1"
    arguments = settings(tmp_path, records, *([] if "build.reflector.model=" in more else [url]), f"out={out}", *more)
    code, err = main(arguments), capsys.readouterr().err
    assert code == 2 and message in err and err.count("\n") == 1 and not out.exists(), err
