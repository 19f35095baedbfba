"""Answers to problems: reported faults by number, a pool whose time limit holds, and what is left behind (nothing).

Must fail if a box is cut at its first brace, small numbers are all alike, a hung comparison blocks or costs a worker, a
worker imports torch, or a process survives its parent.
"""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("math_verify")

from hiexp import math_check, math_worker
from hiexp.config import ConfigError
from hiexp.math_check import MathPool, Verdict, check_all, count_reasons, math_equal
from hiexp.metrics import METRICS, explain

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data" / "math"
TOWER = r"9^{9^{9^{9^9}}}"
"""math-verify does not come back from it"""


def verdicts(*pairs):
    return [verdict.correct for verdict in check_all([(prediction, [gold]) for gold, prediction in pairs])]


def test_B71_a_box_is_read_to_its_own_closing_brace():
    assert verdicts(
        (r"\frac{3}{7}", r"so \boxed{\frac{3}{7}}"),
        (r"\frac{3}{7}", r"so \boxed{\frac{3}{8}}"),
        (r"\frac{3}{7}", r"\boxed{\dfrac{3}{7}} is it"),
    ) == [True, False, True]
    cut = check_all([(r"\boxed{3} hence \boxed{\frac{3}{7", ["3"]), (r"\boxed{42", ["42"]), ("", ["0"])])
    assert [(v.correct, v.reason) for v in cut] == [(True, ""), (False, "no answer"), (False, "no answer")]
    assert math_equal(r"\boxed{1} no, \boxed{2}", ["2"]) and not math_equal(r"\boxed{1} no, \boxed{2}", ["1"])


def test_B73_brackets_sets_approximations_and_small_numbers():
    assert verdicts(
        ("[2,5)", "(2,5]"),
        ("[2,5)", "[2,5)"),
        ("1/3", "0.33"),
        (r"\{3,1\}", r"\{1,3\}"),
        ("(1,3)", "(3,1)"),
        ("1.77e-6", "2e-6"),
        ("1.77e-6", r"1.77 \times 10^{-6}"),
        ("2.88e-19", "1.325e-27"),
        ("1e-8", "0"),
        ("0.00000177", "0.000002"),
    ) == [False, True, False, True, False, False, True, False, False, False]


def test_B76_leading_zeros_and_golds_that_are_numbers():
    assert math_equal(r"\boxed{033}", [33]) and math_equal("7", ["007"]) and not math_equal("330", [33])
    assert math_equal("142", [142.0]) and math_equal("142.0", [142]) and math_equal("0", [0])


@pytest.mark.parametrize(
    ("gold", "prediction", "expected"),
    [
        (r"336^\circ", "336", True),
        ("336", r"\boxed{336^{\circ}}", True),
        (r"\frac{270}7\text{ degrees}", r"\frac{270}{7}", True),
        ("$69$,$84$", "84, 69", True),
        ("$69$,$84$", "69", False),
        ("1,3,5", "5,3,1", True),
        (r"$(1,8,19), (2,7,13), (4,5,7)$", "(2,7,13), (1,8,19), (4,5,7)", True),
        (r"$90^{\circ}$,$60^{\circ}$", r"60^\circ, 90^\circ", True),
        ("B", r"\text{B}", True),
        ("B", "(B)", True),
        ("B", "B.", True),
        ("B", "C", False),
        (r"\text{(C)}", "C", True),
        (r"\text{east}", "east", True),
        (r"\text{east}", "seat", False),  # no product of letters
        ("x=5", "5", True),
        ("5", "x = 5", True),
        (r"10,\!080", "10080", True),
        (r"\$18.90", "18.9", True),
        ("4.5e33", r"4.5 \times 10^{33}", True),
        ("np.arcsin(10/13)", r"\arcsin(\frac{10}{13})", True),
        ("-1./3", r"-\frac{1}{3}", True),
        (r"10\%", "0.1", True),
        ("2k+2", "2(k+1)", True),
        ("42", "The answer is 42.", True),
        ("42", r"It is \(42\)", True),
        ("2", "two", False),
    ],
)
def test_notations_of_the_six_benchmarks(gold, prediction, expected):
    assert math_equal(prediction, [gold]) is expected
    assert math_equal(prediction, ["no such answer 77", gold]) is expected


def test_every_verdict_holds_a_second_opinion():
    found = check_all([("2", ["2"]), ("0", ["0"]), ("2(k+1)", ["2k+2"]), ("3", ["2"]), ("", ["2"])])
    assert [(v.correct, v.second) for v in found] == [
        (True, True), (True, True), (True, False), (False, False), (False, False)
    ]  # fmt: skip
    assert count_reasons(found) == {"correct": 3, "disagreed": 1, "no answer": 1}
    assert explain("math", r"\boxed{0.5}", [r"\frac12"]) == r"1: '0.5' equals '\\frac12' by math-verify"
    assert "notation says otherwise" in explain("math", "2(k+1)", ["2k+2"])
    assert "no answer" in explain("math", r"\boxed{", ["2"])


def test_B77_a_hung_comparison_costs_its_own_time_and_no_worker():
    pairs = [(TOWER if i == 41 else str(700 + i), [str(700 + i + (i % 3 == 0))]) for i in range(100)]
    expected = [i != 41 and math_worker.compare(*pairs[i])["correct"] for i in range(100)]
    pool = math_check.shared_pool()
    assert sum(expected) > 10
    check_all([(f"{i}", ["600"]) for i in range(600, 604)], workers=4)
    began = time.monotonic()
    with ThreadPoolExecutor(8) as threads:
        found = [v for part in threads.map(lambda i: check_all([pairs[i]], 2.0, workers=4), range(100)) for v in part]
    assert time.monotonic() - began < 30
    assert [verdict.correct for verdict in found] == expected
    assert found[41] == Verdict(False, "timeout", False)
    assert [v.reason for i, v in enumerate(found) if i != 41] == [""] * 99
    size = len(pool.pids)
    assert 1 <= size <= max(4, math_check.default_workers())
    assert all(is_running(pid) for pid in pool.pids)
    began = time.monotonic()
    found = check_all([(TOWER + f"+{i}", ["1"]) for i in range(4)], 1.0, workers=4)
    assert [verdict.reason for verdict in found] == ["timeout"] * 4 and time.monotonic() - began < 15
    assert all(math_equal(str(i), [i]) for i in range(900, 908)) and len(pool.pids) >= size


def test_equal_pairs_are_compared_once_and_order_is_kept(monkeypatch):
    asked = []
    ask = math_check._Worker.ask
    monkeypatch.setattr(math_check._Worker, "ask", lambda self, pair, t: (asked.append(pair), ask(self, pair, t))[1])
    pairs = [("11.5", ["23/2"]), ("12.5", ["23/2"])] * 40
    assert [verdict.correct for verdict in check_all(pairs)] == [True, False] * 40
    assert sorted(pair[0] for pair in asked) == ["11.5", "12.5"]
    check_all(pairs)
    assert len(asked) == 2


def test_a_worker_that_dies_is_replaced_and_counted():
    pool = MathPool()
    try:
        assert pool.check([("1", ("1",))], 5.0, 1) == {("1", ("1",)): (True, "")}
        (pid,) = pool.pids
        os.kill(pid, signal.SIGSTOP)  # so that it cannot answer first
        threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
        assert pool.check([("2", ("2",))], 20.0, 1) == {("2", ("2",)): (False, "crashed")}
        assert pool.pids != [pid] and pool.check([("3", ("3",))], 20.0, 1)["3", ("3",)] == (True, "")
    finally:
        pool.close()
    assert pool.pids == []
    with pytest.raises(RuntimeError, match="closed"):
        pool.check([("4", ("4",))], 5.0, 1)


def test_hostile_answers_are_wrong_and_nothing_worse():
    hostile = [
        "\\frac{" * 300, "(" * 3000, "x" * 3999, "\x00\ud800", "\\" * 999, "$" * 999, "{}" * 999, "\n", "9" * 3000,
        "\\boxed{" * 500, "1" * 5000,
    ]  # fmt: skip
    found = check_all([(text, ["7", "\x00"]) for text in hostile], timeout=3.0)
    assert not any(verdict.correct for verdict in found)
    assert found[-1].reason == "too long"
    assert math_equal("1", ["1"])
    for golds in ("5", [], [None]):
        with pytest.raises(ValueError):
            METRICS["math"]("5", golds)
    assert METRICS["math"](None, ["5"]) == METRICS["math"](" ", ["5"]) == 0.0


def test_a_missing_package_is_told_with_the_remedy(monkeypatch):
    monkeypatch.setattr(math_check.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"requirements-eval\.txt"):
        MathPool()


def test_a_worker_imports_neither_torch_nor_hiexp():
    code = (
        f"import sys; sys.argv = ['x']; sys.path.insert(0, {str(ROOT / 'hiexp')!r})\n"
        "import math_worker; math_worker.compare('1', ['1'])\n"
        "print([m for m in ('torch', 'numpy', 'hiexp') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


SCRIPT = """
import os, signal, sys, threading, time
sys.path.insert(0, {root!r})
from hiexp.math_check import check_all, shared_pool

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits that it is ignored

def say():
    print(*shared_pool().pids, flush=True)

def both_halves():
    pid = os.fork()
    found = check_all([(str(i), [str(i)]) for i in range(50, 90)], workers=2)
    is_right = all(verdict.correct for verdict in found)
    if pid == 0:
        sys.exit(not is_right)  # as a script ends, with what is registered for it
    sys.exit(not (is_right and os.waitstatus_to_exitcode(os.wait()[1]) == 0))

def main():
    check_all([("1", ["1"]), ("2", ["2"])], workers=2)
    {do}

if __name__ == "__main__":
    main()
"""


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


@pytest.mark.parametrize(
    ("do", "end", "code"),
    [
        ("say()", None, 0),
        ("say(); raise SystemExit(3)", None, 3),
        (f"say(); check_all([({TOWER!r}, ['1'])], 600)", signal.SIGINT, -signal.SIGINT),
        (f"say(); check_all([({TOWER!r}, ['1'])], 2)", signal.SIGKILL, -signal.SIGKILL),
        ("say(); time.sleep(600)", signal.SIGKILL, -signal.SIGKILL),
        ("say(); both_halves()", None, 0),
    ],
    ids=["end", "exit", "ctrl-c", "killed-while-hung", "killed-while-idle", "fork"],
)
def test_no_worker_survives_its_parent(do, end, code):
    script = SCRIPT.format(root=str(ROOT), do=do)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert (pids and process.poll() is None) or end is None
        if end:
            time.sleep(1.0)
            process.send_signal(end)
        began = time.monotonic()
        try:
            assert process.wait(20) == code
        finally:
            process.kill()
        assert time.monotonic() - began < 10
    assert wait_until(lambda: not any(is_running(pid) for pid in pids)), pids


@pytest.mark.skipif(not DATA.exists(), reason="needs the real benchmark files")
@pytest.mark.parametrize("name", ["aime24", "aime25", "amc", "math500", "minerva", "olympiadbench"])
def test_real_golds_equal_themselves_and_not_each_other(name):
    lines = (DATA / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    golds = [str(json.loads(line)["answer"]) for line in lines][:: 1 if len(lines) < 100 else 4]
    answers = [f"Hence \\boxed{{{gold}}}." for gold in golds]
    same = check_all([(answer, [gold]) for answer, gold in zip(answers, golds, strict=True)], timeout=60.0)
    wrong = [gold for gold, verdict in zip(golds, same, strict=True) if not verdict.correct]
    assert len(wrong) <= 1 + len(golds) // 100, wrong  # a gold or two is no sound LaTeX
    other = golds[1:] + golds[:1]
    crossed = check_all([(answer, [gold]) for answer, gold in zip(answers, other, strict=True)], timeout=60.0)
    for a, b, verdict in zip(golds, other, crossed, strict=True):
        assert not verdict.correct or math_check.equals(a, [b]) or "=" in a + b, (a, b)


def test_the_share_of_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(64))
    assert math_check.default_workers() == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "32")
    assert math_check.default_workers() == 2
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(4))
    assert math_check.default_workers() == 1
    assert math.isclose(math_worker.limits(2e-6)[0], 11)
