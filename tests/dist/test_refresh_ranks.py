"""Steps with control groups and refreshes of the HEK, on one process and on two: the same store and the same metrics.

Must fail if a rank draws its own control groups, if the comparison of versions counts a rank's part alone, if ranks end
with different versions, or if rank 0 moves a version while another rank still reads it.
"""

import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dist.harness import run_ranks
from support import ScriptedEngine, ToySearch, build_byte_tokenizer
from writers import lesson, members_of, scripted_reflector

from hiexp.data import PromptSampler, Sample
from hiexp.distributed import Context
from hiexp.encoder import HashEncoder

pytestmark = pytest.mark.dist
SAMPLES = [Sample(f"q{i}", f"who founded label number{i}", ("Oslo",)) for i in range(24)]
STEPS, EVERY = 7, 3


def reply(prompt: str) -> str:
    if "<abstract>" in prompt:
        return lesson(members_of(prompt)[0][0], f"a plan of {len(members_of(prompt))}")
    number = prompt.split("number")[1].split()[0]
    return lesson(f"who founded the label {'abc'[int(number) % 3]}", f"do {'xyz'[int(number) // 3 % 3]}")


def open_loop(ctx: Context, out: Path, gate_questions: int) -> Any:
    """A closed loop over a policy that answers by a digest of its prompt and of the row's place in the step."""
    from hiexp import refresh
    from hiexp.assemble import Agent, Config
    from hiexp.config import load
    from hiexp.hek import HEK
    from hiexp.protocols import PROTOCOLS

    tokenizer, encoder = build_byte_tokenizer(chat=False), HashEncoder()
    choices = {
        "out": out,
        "model.path": "x",
        "rollout.protocol": "compact",
        "rollout.group_size": 2,
        "train.prompts_per_step": 7,
        "train.steps": STEPS,
        "hek.strategy_threshold": -1,
        "build.threshold_1": 0.6,
        "build.threshold_2": 0.6,
        "refresh.every": EVERY,
        "refresh.control": 0.3,
        "refresh.gate_questions": gate_questions,
        "refresh.gate_tolerance": 100,
        "refresh.merge_threshold": "null",
        "dosage.tokens_end": 0.5,
    }
    cfg = load(Config, [f"{name}={value}" for name, value in choices.items()])

    def turn(key: Any, ids: list[int]) -> str:
        place = zlib.crc32(f"{key} {tokenizer.decode(ids)}".encode()) % 5
        return "<answer> Oslo </answer>" if place < 2 else "<answer> Rome </answer>"

    parts = (tokenizer, PROTOCOLS["compact"], ToySearch(), encoder, HEK((), encoder, cfg.hek))
    agent = Agent(cfg.rollout, *parts, ScriptedEngine(tokenizer, turn))
    writer = scripted_reflector(reply, encoder)
    refresh.open_reflectors = lambda *_: (writer, writer)
    loop = refresh.ClosedLoop(agent, cfg, SAMPLES, ctx)
    loop.open()
    return loop


def train_steps(ctx: Context, out: Path, gate_questions: int, slow: int | None = None) -> dict[str, Any]:
    import train
    from hiexp import refresh
    from hiexp.resume import StopSignal

    loop, lines, seen = open_loop(ctx, out / str(ctx.world_size), gate_questions), [], []
    sampler = PromptSampler(loop.trained, 0)
    if ctx.rank == slow:
        refresh.HEK.load = slowly(refresh.HEK.load)
    for step in range(STEPS):
        metrics: dict[str, float] = {}
        found = train.collect(loop.agent, sampler, loop.cfg, ctx, step, metrics, StopSignal())
        assert found is not None
        seen += [(one.sample_id, one.hek_version, one.strategies, one.reward) for one in found[0]]
        metrics |= loop.after_step(step, found[0])
        lines.append({name: value for name, value in metrics.items() if not name.startswith("time/")})
    asked = len({key for key, *_ in loop.agent.engine.requests})
    return {
        "metrics": lines,
        "trajectories": seen,
        "state": loop.state(),
        "places": asked,
        "path": Path(loop.path).name,
    }


def slowly(load: Callable[..., Any]) -> Callable[..., Any]:
    def late(*arguments: Any) -> Any:
        time.sleep(0.3)
        return load(*arguments)

    return late


def versions(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("hek/*/*")) if path.is_file()}


def test_two_ranks_end_with_the_store_and_the_metrics_of_one(tmp_path):
    [one] = run_ranks(train_steps, 1, tmp_path, 5)
    both = run_ranks(train_steps, 2, tmp_path, 5)
    assert one["path"] == "v0002" and {version for _, version, _, _ in one["trajectories"]} == {-1, 0, 1, 2}
    assert any(shown for _, _, shown, _ in one["trajectories"])
    assert one["metrics"][2]["refresh/gate_difference"] and one["metrics"][2]["refresh/abstracted"]
    for rank in both:
        assert rank["places"] < one["places"]  # it answered a part of the questions
        assert {name: rank[name] for name in rank if name != "places"} == {
            name: one[name] for name in one if name != "places"
        }
    assert versions(tmp_path / "2") == versions(tmp_path / "1") != {}


def test_a_rank_that_reads_slowly_still_finds_the_version(tmp_path):
    """With no questions to compare versions on, nothing but the barrier holds rank 0 back."""
    for rank in run_ranks(train_steps, 2, tmp_path, 0, 1):
        assert rank["path"] == "v0002"
