"""Must fail if an arm is left out or repeated, if a crash costs an attempt or changes a later one, if ranks share their
questions wrongly, or if a mistake in the plan is told after the first question.
"""

import json
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import evaluate
from hiexp import eval_run
from hiexp.assemble import Config
from hiexp.config import ConfigError, load
from hiexp.records import read_attempts
from tests.untrained import untrained_lab

ROOT = Path(__file__).resolve().parents[2]
METHODS = "eval.methods=[agent, direct, vanilla_rag, ircot, search_o1_condensed, search_r1_v0.3]"
QUICK = ("data.limit=5", "eval.samples_per_question=2", "eval.temperature=1.0")


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lab")
    return [*untrained_lab(folder), *QUICK]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)


def run(lab, out, *more):
    evaluate.main(load(Config, [*lab, f"out={out}", *more]))


def lines(out):
    """{file: lines} of the samples, without times."""
    files = sorted(out.glob("samples_*.jsonl"))
    return {file.name: [replace(one, seconds=0.0) for one in read_attempts(file)] for file in files}


@pytest.mark.filterwarnings("ignore")
def test_every_method_runs_with_experience_and_without_and_all_is_recorded(lab, tmp_path):
    run(lab, tmp_path / "run", METHODS, "eval.price_in=2", "eval.price_out=8", "eval.judged=true",
        "judge.first.model=rule")  # fmt: skip
    arms = json.loads((tmp_path / "run/evaluation.json").read_text())["arms"]
    plain = {f"hek_{store}_{way}" for store in ("off", "on") for way in ("greedy", "sampled")}
    names = ("direct", "vanilla_rag", "ircot", "search_o1_condensed", "search_r1_v0.3")
    assert set(arms) == plain | {f"{name}.{arm}" for name in names for arm in plain}
    for name, arm in arms.items():
        attempts = read_attempts(tmp_path / "run" / f"samples_{name}.jsonl")
        size = 2 if arm["decoding"] == "sampled" else 1
        assert [(one.id, one.member) for one in attempts] == [
            (one.id, member) for one in attempts[::size] for member in range(size)
        ]
        assert len(attempts) == 5 * size and arm["overall"]["num_samples"] == 5 * size
        for one in attempts:
            assert one.cost == pytest.approx((2 * one.prompt_tokens + 8 * one.policy_tokens) / 1e6)
            assert one.question and one.calls and one.requests == sum(call.requests for call in one.calls)
            assert one.scores["lasj"] == {True: 1.0}.get(bool(one.scores["em"]), one.scores["lasj"])
            assert any(source == "experience" for call in one.calls for source, _ in call.pieces) == arm["hek"]
    assert {arm["label"] for arm in arms.values()} >= {"IRCoT", "IRCoT + HiExp", "Search-R1-v0.3", "Agent + HiExp"}
    hashes = json.loads((tmp_path / "run/run.json").read_text())["hashes"]
    assert all(len(value) == 64 for value in (hashes["model"], hashes["hek"], hashes["questions"]["data.test"]))
    assert (tmp_path / "run/report.html").stat().st_size > 10_000


def test_a_crash_costs_no_attempt_and_changes_none(lab, tmp_path, monkeypatch):
    run(lab, tmp_path / "whole", "eval.methods=[agent, vanilla_rag]")
    kept, limit = [], 13

    def keep(self, outcome, trajectory):
        if len(kept) == limit:
            raise RuntimeError("the power is gone")
        kept.append((self._arm.name, outcome.sample_id, outcome.member))
        real(self, outcome, trajectory)

    real = eval_run.Ledger.keep
    monkeypatch.setattr(eval_run.Ledger, "keep", keep)
    with pytest.raises(RuntimeError, match="power"):
        run(lab, tmp_path / "broken", "eval.methods=[agent, vanilla_rag]")
    first, limit = list(kept), 10**6
    kept.clear()
    run(lab, tmp_path / "broken", "eval.methods=[agent, vanilla_rag]")
    again = {one for one in kept if one in first}
    assert len(first) == 13 and {one[:2] for one in again} <= {one[:2] for one in first}
    assert len(again) <= 2, "only siblings of an attempt that was missing are made anew"
    assert lines(tmp_path / "whole") == lines(tmp_path / "broken")
    with pytest.raises(ConfigError, match="finished"):
        run(lab, tmp_path / "broken", "eval.methods=[agent, vanilla_rag]")


def test_a_local_model_can_judge_and_what_it_cannot_say_is_no_score(lab, tmp_path, monkeypatch):
    """The untrained policy writes no grade: every answer is asked about again, and then has none."""
    real = eval_run.outcome_of
    given = iter(["Oslo", "", "Bern", "Lima", "Rome"] * 2)
    monkeypatch.setattr(eval_run, "outcome_of", lambda *parts: replace(real(*parts), answer=next(given)))
    model = next(one.split("=")[1] for one in lab if one.startswith("model.path="))
    judge = ("eval.judged=true", f"judge.first.model={model}", "judge.retries=1", "judge.max_tokens=4", "hek.path=")
    run(lab, tmp_path / "run", *judge, "judge.max_failures=1", "eval.samples_per_question=0")
    arm = json.loads((tmp_path / "run/evaluation.json").read_text())["arms"]["hek_off_greedy"]
    assert arm["overall"]["num_scored"]["lasj"] == 1, "no answer is 0, unasked"
    assert (arm["judges"]["judged"], arm["judges"]["failed"]) == ([1], [4])
    assert sum(len(file.read_text().splitlines()) for file in (tmp_path / "run/verdicts").iterdir()) == 8
    with pytest.raises(ConfigError, match=r"judge.first .* no readable verdict on 4 of 5 .*judge.max_failures"):
        run(lab, tmp_path / "strict", *judge, "eval.samples_per_question=0")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["eval.methods=[irc0t]"], "did you mean 'ircot'.*known: .*vanilla_rag"),
        (["eval.methods=[ircot+hiexp]", "hek.path="], r"ircot\+hiexp, but hek.path is not set"),
        (["eval.methods=[research]", "eval.endpoint.url=http://x/v1", "eval.endpoint.model=m"], "speaks its protocol"),
        (["eval.methods=[]"], "methods is empty"),
        (["eval.metrics=[emm]"], "did you mean 'em'"),
        (["eval.benchmarks={hotpot: x.json}"], "did you mean 'hotpotqa'"),
        (["eval.prompt_files={research: x.txt}"], "not among eval.methods: agent"),
        (["eval.methods=[research]", "eval.prompt_files={research: gone.txt}"], "gone.txt"),
        (["eval.methods=[deepresearcher]"], "method deepresearcher cannot be asked here: .*ChatML"),
        (["eval.judged=true"], "judge.first.model is empty"),
        (["eval.endpoint.url=http://x/v1", "eval.endpoint.model=m", "eval.methods=[direct]",
          "eval.endpoint.api_key_env=NOT_THERE_KEY"], "NOT_THERE_KEY, but there is no such environment variable"),
        (["eval.price_in=-1"], "price_in=-1.0 must be a number that is not negative"),
        (["eval.price_out=.nan"], "price_out=nan must be"),
        (["eval.seed=-1"], "seed=-1 must not be negative"),
        (["rollout.protocol=direct", "search.backend=none", "eval.methods=[ircot]"], "ircot searches"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_mistakes_are_told_before_the_first_question(lab, tmp_path, monkeypatch, change, message):
    monkeypatch.setattr(evaluate, "run_arm", lambda *_: pytest.fail("a question was asked"))
    with pytest.raises(ConfigError, match=message):
        run(lab, tmp_path / "run", *change)
    assert not (tmp_path / "run").exists()


def test_a_file_that_was_changed_afterwards_fills_no_table(lab, tmp_path, capsys):
    questions = next(one.split("=")[1] for one in lab if one.startswith("data.test="))
    benchmark = ["eval.benchmarks={bamboogle: " + questions + "}", "hek.path=", "eval.samples_per_question=0"]
    run(lab, tmp_path / "run", *benchmark)
    table = ["table1", str(tmp_path / "run"), "--out", str(tmp_path / "tables")]
    assert evaluate.make_tables(table) == 0
    file = tmp_path / "run/samples_bamboogle.hek_off_greedy.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    for changed in ("".join(lines[:-1]), file.read_text().replace('"em": 0.0', '"em": 1.0', 1)):
        assert changed != "".join(lines)
        file.write_text(changed)
        assert evaluate.make_tables(table) == 2
        assert "was changed after the evaluation wrote it" in capsys.readouterr().err
    assert evaluate.make_tables(["table7"]) == 2 and "did you mean 'table" in capsys.readouterr().err
    assert (
        evaluate.is_command("table7") and not evaluate.is_command("configs/lab.yaml") and not evaluate.is_command("-h")
    )


def test_no_search_is_needed_where_none_is_made(lab, tmp_path):
    run(
        lab,
        tmp_path / "run",
        "search.backend=none",
        "eval.methods=[direct]",
        "eval.samples_per_question=0",
        "data.limit=1",
    )
    assert json.loads((tmp_path / "run/evaluation.json").read_text())["arms"]


def test_a_prompt_in_our_words_is_warned_of(lab, tmp_path):
    with pytest.warns(UserWarning, match="eval.prompt_files.research=FILE"):
        eval_run.plan(load(Config, [*lab, "out=x", "eval.methods=[research]"]), [])


@pytest.mark.dist
def test_ranks_share_the_questions_and_score_what_one_process_would(lab, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", f"--master-port={port}"]
    more = ["eval.methods=[agent, vanilla_rag]", f"out={tmp_path / 'two'}", "threads=1"]
    done = subprocess.run([*command, "evaluate.py", *lab, *more], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    run(lab, tmp_path / "one", "eval.methods=[agent, vanilla_rag]")
    parts = [sorted((tmp_path / "two/parts").glob(f"vanilla_rag.hek_on_greedy.{rank}.jsonl")) for rank in (0, 1)]
    assert [len(part[0].read_text().splitlines()) for part in parts] == [2, 3]
    assert lines(tmp_path / "one") == lines(tmp_path / "two")
