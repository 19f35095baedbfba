"""Contexts and collectives among real processes, and what happens when one of them is late or dies.

Must fail if a rank's value is lost, if a stalled rank is not named, or if a crash leaves the others waiting.
"""

import math
import os
import time
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from dist.harness import launch, run_ranks
from support import build_tiny_model

from hiexp.config import ConfigError
from hiexp.distributed import Context, init
from hiexp.fsdp import ShardConfig, shard

pytestmark = pytest.mark.dist


def collectives(ctx: Context) -> tuple:
    ctx.barrier("start")
    sums = ctx.sum([ctx.rank + 0.1, 1e-17, math.nan if ctx.rank == 2 else 0.0])
    return sums, ctx.max([float(ctx.rank), -1.0]), ctx.gather({"rank": ctx.rank}), ctx.broadcast(f"from {ctx.rank}")


def test_collectives_reach_every_rank_in_order_and_in_float64():
    for sums, largest, gathered, word in run_ranks(collectives, 3):
        assert sums[:2] == pytest.approx([3.3, 3e-17], rel=1e-15) and math.isnan(sums[2])
        assert largest == [2.0, -1.0]
        assert gathered == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
        assert word == "from 0"


def test_a_single_process_needs_no_group(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    for ctx in (Context(), init()):
        assert ctx.is_main and ctx.world_size == 1 and ctx.device.type == "cpu"
        ctx.barrier("alone")
        assert ctx.sum([1.0]) == [1.0] and ctx.max([2.0]) == [2.0] and ctx.gather("x") == ["x"]
        assert ctx.broadcast("y") == "y" and not torch.distributed.is_initialized()


def raise_in_backward(ctx: Context) -> None:
    model = shard(build_tiny_model(), ShardConfig(), ctx)
    hidden = model.run_body(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False)
    if ctx.rank == 1:

        def fail(_: torch.Tensor) -> None:
            raise ValueError("a bad gradient on rank 1")

        hidden.register_hook(fail)
    hidden.sum().backward()
    ctx.barrier("optimiser step")


def test_fault_16_one_rank_raises_in_backward_and_all_exit_non_zero_in_time():
    start = time.monotonic()
    outcomes = launch(raise_in_backward, 2, timeout_s=15, limit_s=40)
    assert time.monotonic() - start < 30
    assert [outcome.code for outcome in outcomes] == [1, 1]
    assert "a bad gradient on rank 1" in outcomes[1].error


def stall(ctx: Context, rank: int) -> None:
    hasty = replace(ctx, timeout_s=1.5, control=dist.new_group(backend="gloo", timeout=timedelta(seconds=1.5)))
    ctx.barrier("start")  # at the same time, however slowly the processes came up
    if ctx.rank == rank:
        time.sleep(5)
    hasty.barrier("rollout")


@pytest.mark.parametrize("late", [0, 2])
def test_fault_17_a_stalled_rank_is_named_with_its_phase(late):
    outcomes = launch(stall, 3, late)
    others = [outcome for rank, outcome in enumerate(outcomes) if rank != late]
    assert all(outcome.code == 1 and "in phase 'rollout' (limit 1.5 s)" in outcome.error for outcome in others)
    # Rank 0 names the missing; if it is missing itself, the others name it.
    assert ("Ranks 2 failed to pass" if late else "waiting for send/recv from rank 0") in others[0].error


def hang(ctx: Context) -> None:
    if ctx.rank == 1:
        time.sleep(60)


def test_the_harness_kills_a_hanging_rank_and_shows_where_it_hung():
    start = time.monotonic()
    outcomes = launch(hang, 2, limit_s=3)
    assert time.monotonic() - start < 15 and not outcomes[0].error
    assert "not done after 3 s" in outcomes[1].error and "in hang" in outcomes[1].error
    with pytest.raises(AssertionError, match="a bad gradient on rank 1"):
        run_ranks(raise_in_backward, 2)


def torchrun(monkeypatch, **changes: str) -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in (environment | changes).items():
        monkeypatch.setenv(name, value)


def test_ranks_that_do_not_meet_are_told_in_one_line(monkeypatch):
    torchrun(monkeypatch, RANK="1")
    message = r"rank 1 of 2 cannot meet the others at 127.0.0.1:1 within 1 s; .*torchrun"
    with pytest.raises(ConfigError, match=message) as error:
        init(timeout_s=1)
    assert "\n" not in str(error.value) and not torch.distributed.is_initialized()
    torchrun(monkeypatch, RANK="zero")
    with pytest.raises(ConfigError, match="RANK='zero'"):
        init()
    torchrun(monkeypatch)
    monkeypatch.delenv("MASTER_ADDR")
    with pytest.raises(ConfigError, match="MASTER_ADDR"):
        init(timeout_s=1)
    assert os.environ["WORLD_SIZE"] == "2"


def test_more_processes_than_gpus_are_refused(monkeypatch):
    torchrun(monkeypatch, LOCAL_RANK="3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="LOCAL_RANK=3 but this machine has 2 GPUs"):
        init()
