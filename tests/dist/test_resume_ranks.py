"""A run that is killed anywhere, any number of times, ends with the very bits of one that was not (PERF 7, faults 1-5).

Processes die by SIGKILL at chosen calls inside the real save. Must fail if a random number generator, a moment of AdamW
or the sampler is forgotten, if the manifest is written before the shards, or a half-written folder is ever read.
"""

import os
import signal
from pathlib import Path

import pytest
from dist import tiny_run
from dist.harness import launch, run_ranks

from hiexp.checkpoint import CheckpointConfig
from hiexp.distributed import Context

pytestmark = [pytest.mark.dist, pytest.mark.slow]
STEPS = 6
TARGETS = ("tensor", "fsync", "replace")


def train(ctx: Context, out: Path, steps: int = STEPS, every: int = 1, async_save: bool = False) -> int:
    return tiny_run.train(ctx, out, steps, CheckpointConfig(every=every, async_save=async_save))


def finish(ctx: Context, out: Path, every: int = 1, async_save: bool = False) -> dict:
    """What the same command ends with."""
    assert train(ctx, out, STEPS, every, async_save) == 0
    return tiny_run.outcome(ctx, out)


def train_and_die(ctx: Context, out: Path, target: str, number: int, async_save: bool = False) -> None:
    """Dies at the `number`-th call of `target` after step 3's update: inside the save of step_000003."""

    def arm(step: int) -> None:
        if step == 2:
            tiny_run.kill_at(target, number)

    tiny_run.train(ctx, out, STEPS, CheckpointConfig(every=1, async_save=async_save), after=arm)


def count(ctx: Context, out: Path) -> dict[str, int]:
    """Calls inside one save."""
    train(ctx, out, 2)
    return tiny_run.count_calls(TARGETS, lambda: train(ctx, out, 3))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The outcome of an uninterrupted run, by world size."""
    results = {}
    for world in (1, 2):
        results[world] = run_ranks(finish, world, tmp_path_factory.mktemp("whole"))[0]
    return results


def test_the_plain_run_is_one_that_could_go_wrong(whole):
    """Six lines, three epochs, noise that differs from step to step."""
    for world in (1, 2):
        assert whole[world]["step"] == STEPS and whole[world]["state"]["sampler"]["epoch"] == 2
        assert len(set(whole[world]["metrics"].splitlines())) == STEPS and whole[world]["left"] == []
    assert whole[1]["metrics"] == whole[2]["metrics"]


def names(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").iterdir())


def test_faults_01_02_03_sigkill_at_every_point_inside_a_save(whole, tmp_path):
    counts = run_ranks(count, 1, tmp_path)[0]
    assert counts["replace"] >= 3 and counts["fsync"] >= 6 and counts["tensor"] > 50, counts
    points = [("fsync", n + 1) for n in range(counts["fsync"])] + [("replace", n + 1) for n in range(counts["replace"])]
    points += [("tensor", n) for n in (1, counts["tensor"] // 2, counts["tensor"])]
    seen = set()
    for number, (target, at) in enumerate(points):
        out = tmp_path / str(number)
        out.mkdir()
        died = launch(train_and_die, 1, out, target, at)[0]
        assert died.code == -signal.SIGKILL, (target, at, died.error)
        found = names(out)
        seen.add(tuple(found))
        done = "step_000003" in found
        assert "step_000002" in found or done, (target, at, found)
        if done and (out / "checkpoints/latest").read_text() != "step_000003\n":
            seen.add("fault 3")
        if "step_000003.tmp" in found:
            seen.add("fault 2" if (out / "checkpoints/step_000003.tmp/manifest.json").exists() else "fault 1")
        assert run_ranks(finish, 1, out)[0] == whole[1], (target, at, found)
    assert {"fault 1", "fault 2", "fault 3"} <= seen


@pytest.mark.parametrize(
    ("target", "number", "async_save"), [("tensor", 40, False), ("fsync", 2, True), ("replace", 1, True)]
)
def test_fault_01_with_two_ranks_and_with_an_asynchronous_save(whole, tmp_path, target, number, async_save):
    died = launch(train_and_die, 2, tmp_path, target, number, async_save, timeout_s=10, limit_s=30)
    assert any(one.code == -signal.SIGKILL for one in died)
    assert run_ranks(finish, 2, tmp_path, 1, async_save)[0] == whole[2]


def die_after_update(ctx: Context, out: Path) -> None:
    def die(step: int) -> None:
        if step == 4:
            os.kill(os.getpid(), signal.SIGKILL)

    tiny_run.train(ctx, out, STEPS, CheckpointConfig(every=3), after=die)


def test_fault_04_sigkill_between_optimiser_step_and_checkpoint_replays_the_steps(whole, tmp_path):
    assert launch(die_after_update, 1, tmp_path)[0].code == -signal.SIGKILL
    assert names(tmp_path) == ["latest", "step_000003"]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4  # one line that will be written again
    assert run_ranks(finish, 1, tmp_path, 3)[0] == whole[1]


def stop_in_step(ctx: Context, out: Path, number: int, rank: int | None, times: int = 1) -> int:
    def send(step: int) -> None:
        if step == 2 and rank in (None, ctx.rank):
            for _ in range(times):
                os.kill(os.getpid(), number)

    return tiny_run.train(ctx, out, STEPS, CheckpointConfig(every=0), before=send)


@pytest.mark.parametrize(
    ("number", "rank", "code"), [(signal.SIGTERM, None, 143), (signal.SIGINT, 1, 130), (signal.SIGTERM, 0, 143)]
)
def test_fault_05_a_signal_to_all_ranks_or_to_one_stops_all_after_one_save(whole, tmp_path, number, rank, code):
    assert run_ranks(stop_in_step, 2, tmp_path, number, rank) == [code, code]
    assert names(tmp_path) == ["latest", "step_000003"]
    assert run_ranks(finish, 2, tmp_path, 0)[0] == whole[2]


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3)])
def test_fault_14_any_number_of_ranks_reads_what_any_other_wrote(tmp_path, before, after):
    run_ranks(train, before, tmp_path, 3)
    first = run_ranks(tiny_run.outcome, before, tmp_path)[0]
    second = run_ranks(tiny_run.outcome, after, tmp_path)
    for one in second:
        assert (one["tensors"], one["state"], one["step"]) == (first["tensors"], first["state"], 3)
    run_ranks(train, after, tmp_path, 5)
    assert run_ranks(tiny_run.outcome, before, tmp_path)[0]["step"] == 5


def save_replicated(ctx: Context, out: Path) -> str:
    from hiexp.checkpoint import Checkpoints
    from hiexp.data import PromptSampler

    model, optimizer = tiny_run.build(ctx, replicas=2)
    tiny_run.step_once(model, optimizer, PromptSampler(tiny_run.SAMPLES, 0))
    Checkpoints(out, CheckpointConfig(), ctx).save(1, model, optimizer, {})
    return tiny_run.fingerprint(ctx, model, optimizer)


def test_with_replicas_every_row_is_written_once(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    written = run_ranks(save_replicated, 4, tmp_path)
    assert run_ranks(tiny_run.outcome, 1, tmp_path)[0]["tensors"] == written[0] == written[3]
    sizes = [(tmp_path / f"checkpoints/step_000001/rank_0000{rank}.safetensors").stat().st_size for rank in range(4)]
    assert max(sizes[2:]) < 100 < min(sizes[:2])  # the second replica's files hold nothing


def save_with_full_disk(ctx: Context, out: Path, on_error: str) -> str:
    """Rank 1 cannot write the checkpoint of step 2."""
    import errno

    from hiexp import shards
    from hiexp.config import ConfigError

    def fill(step: int) -> None:
        if step == 1 and ctx.rank == 1:

            def full(_: object) -> None:
                shards._bytes = original
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            original = shards._bytes
            shards._bytes = full

    try:
        tiny_run.train(ctx, out, 3, CheckpointConfig(every=1, on_error=on_error), after=fill)  # type: ignore[arg-type]
    except ConfigError as error:
        return str(error)
    return "trained on"


def test_fault_06_one_rank_with_a_full_disk_stops_or_warns_on_all_ranks(tmp_path):
    for policy in ("stop", "warn"):
        out = tmp_path / policy
        out.mkdir()
        said = run_ranks(save_with_full_disk, 2, out, policy)
        assert said[0] == said[1]
        if policy == "stop":
            assert "rank 1: No space left on device" in said[0] and "step_000002" in said[0]
            assert names(out) == ["latest", "step_000001"]
        else:
            assert said[0] == "trained on" and names(out) == ["latest", "step_000001", "step_000003"]
