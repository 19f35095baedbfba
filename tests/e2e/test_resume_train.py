"""train.py itself, killed or told to stop, and started again by the same command (PERF 7, faults 1-5 and 15).

Every run is a process of its own on an untrained lab policy, with rewards made of the sampled tokens so that there is
something to learn. Must fail if any of weights, AdamW, sampler, engine version, learning rate, logs or exported policy
depends on the interruption.
"""

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hiexp.checkpoint import save_policy
from hiexp.data import write_samples
from hiexp.encoder import TfidfEncoder
from hiexp.lab_policy import build_model, build_tokenizer
from hiexp.lab_world import build_world, questions

pytestmark = pytest.mark.slow
STEPS = 5


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    place = tmp_path_factory.mktemp("lab")
    world = build_world(0)
    write_samples(place / "train.jsonl", questions(world, {"train": 1}, 0)["train"])
    lines = [json.dumps({"id": key, "title": d.title, "text": d.text}) + "\n" for key, d in world.passages()]
    (place / "corpus.jsonl").write_text("".join(lines))
    tokenizer = build_tokenizer()
    save_policy(build_model(tokenizer, 0), tokenizer, place / "model")
    TfidfEncoder.fit(["who is which the of was in"]).save(place / "encoder.json")
    return [
        "configs/lab.yaml",
        f"model.path={place / 'model'}",
        f"data.train={place / 'train.jsonl'}",
        f"encoder.path={place / 'encoder.json'}",
        f"search.corpus=[{place / 'corpus.jsonl'}]",
        "rollout.max_turn_tokens=8",
        "rollout.group_size=2",
        f"train.steps={STEPS}",
        "train.prompts_per_step=6",
        "train.dev_every=0",
        "train.show_every=1",
        "checkpoint.every=1",
        "optim.schedule=constant",
    ]


def child(arguments: list[str], fault: tuple[str, int] | None, errors: str) -> None:
    import torch

    import train
    from hiexp import shards
    from hiexp.assemble import Config
    from hiexp.config import run_script

    torch.set_num_threads(1)
    sys.stderr = Path(errors).open("w", buffering=1)  # noqa: SIM115 (for the life of the process)
    kind, at = fault or ("", 0)

    def score(trajectories: Any, *_: Any) -> None:
        for one in trajectories:
            one.reward = sum(one.token_ids) % 7 / 7
        if kind == "kill after rollout" and trajectories[0].policy_version == at:
            os.kill(os.getpid(), signal.SIGKILL)

    def write_shard(path: Path, pieces: Any) -> tuple[int, str]:
        if kind == "kill in save" and path.parent.name == f"step_{at:06d}.tmp":
            write(path, pieces)
            os.truncate(path, 1000)
            os.kill(os.getpid(), signal.SIGKILL)
        return write(path, pieces)

    def collect(*arguments: Any) -> Any:
        nonlocal step
        step = arguments[4]
        return gather(*arguments)

    class Stop(train.StopSignal):
        def check(self, *arguments: Any) -> None:
            if kind == "stop in rollout" and step == at:
                os.kill(os.getpid(), signal.SIGTERM)
            super().check(*arguments)

    if any(one.startswith("refresh.every") for one in arguments):
        teach((lambda name: name == f"v{at:04d}") if kind == "kill after version" else lambda _: False)
    write, shards.write_shard = shards.write_shard, write_shard
    step, gather, train.collect = 0, train.collect, collect
    train.score, train.StopSignal = score, Stop
    os._exit(run_script(train.main, Config, arguments, ""))


def teach(is_last: Callable[[str], bool]) -> None:
    """An untrained policy succeeds at nothing and writes no lesson: judge, lessons, plans and the gate's rewards are
    made of what it sampled. Its own replies are asked for all the same. Dies when a version that `is_last` is written.
    """
    import torch

    from hiexp import hek_update, refresh
    from hiexp.experience import Experience
    from hiexp.hek_build import sources_of

    def is_success(trajectory: Any, *_: Any, **__: Any) -> bool:
        return sum(trajectory.token_ids) % 2 == 1

    def reflect(_: Any, pairs: Any, __: Any) -> list[Any]:
        return [
            Experience(
                "", 1, "mixed", " ".join(one.sample.question.split()[:4]),
                f"label {len(one.right.turns)} city {len(one.wrong.turns)} {one.sample.id[-1]}",
                qa_groups=((one.sample.id, one.sample.question),),
            )
            for one in pairs
        ]  # fmt: skip

    def abstract(writer: Any, clusters: Any, rows: Any, level: int, *more: Any) -> list[Any]:
        real(writer, clusters, rows, level, *more)
        named = [(one, (one[0].title, f"city {len(one)} {one[-1].description}")) for one in clusters]
        return [
            Experience("", level, "plan", *text, qa_groups=sources_of(one), child_ids=tuple(e.id for e in one))
            for one, text in named
        ]

    def score(trajectories: Any, samples: Any, cfg: Any, size: int, judge: Any = None) -> Any:
        return torch.tensor([sum(one.token_ids) % 7 / 7 for one in trajectories]).reshape(len(samples), size)

    def move(folder: Path, place: Path) -> None:
        rename(folder, place)
        if is_last(place.name):
            os.kill(os.getpid(), signal.SIGKILL)

    real, rename = hek_update.abstract, refresh._move
    refresh.is_success, refresh.reflect, refresh.score, refresh._move = is_success, reflect, score, move
    hek_update.abstract = abstract


def start(arguments: list[str], fault: tuple[str, int] | None = None, errors: Path = Path(os.devnull)) -> int:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train"])
    process = context.Process(target=child, args=(arguments, fault, str(errors)))
    process.start()
    process.join(120)
    assert process.exitcode is not None
    return process.exitcode


def outcome(out: Path) -> dict[str, Any]:
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    manifest = json.loads((out / f"checkpoints/step_{STEPS:06d}/manifest.json").read_text())
    return {
        "metrics": [{key: value for key, value in line.items() if not key.startswith("time/")} for line in metrics],
        "trajectories": (out / "trajectories.jsonl").read_text(),
        "policy": {path.name: path.read_bytes() for path in sorted((out / "policy").iterdir())},
        "tensors": manifest["files"],
        "state": manifest["state"],
        "hek": {
            str(path.relative_to(out)): path.read_bytes()
            for path in sorted(out.glob("hek/[vr]*/*"))  # versions, and those that were rejected
        },
        "finished": json.loads((out / "summary.json").read_text())["steps"],
    }


@pytest.fixture(scope="module")
def whole(settings, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    assert start([*settings, f"out={out}"]) == 0
    found = outcome(out)
    assert len({line["optim/grad_norm"] for line in found["metrics"]}) == STEPS  # something is learned
    return found


@pytest.mark.parametrize(
    ("fault", "code", "newest", "more"),
    [
        (("kill after rollout", 2), -signal.SIGKILL, 2, ()),
        (("kill in save", 3), -signal.SIGKILL, 2, ()),
        (("kill in save", 3), -signal.SIGKILL, None, ("checkpoint.async_save=true",)),
        (("stop in rollout", 3), 143, 3, ("checkpoint.every=2",)),  # so that the save of the dropped step is its own
    ],
    ids=["fault_04", "fault_01", "fault_01_async", "fault_05"],
)
def test_faults_01_04_05_the_same_command_ends_with_the_same_bytes(
    settings, whole, tmp_path, fault, code, newest, more
):
    out = tmp_path / "run"
    command = [*settings, f"out={out}", *more]
    assert start(command, fault) == code
    found = sorted(path.name for path in (out / "checkpoints").glob("step_*") if path.suffix != ".tmp")
    assert not (out / "summary.json").exists() and found
    assert newest is None or found[-1] == f"step_{newest:06d}"
    assert start(command) == 0
    assert outcome(out) == whole


def test_fault_15_changed_settings_and_more_steps(settings, whole, tmp_path):
    out = tmp_path / "run"
    command = [*settings, f"out={out}"]
    assert start([*command, "train.steps=3"]) == 0
    assert start([*command, "train.steps=3"], None, errors := tmp_path / "errors") == 2
    assert "finished run" in errors.read_text()
    assert start([*command, "optim.lr=1.0"], None, errors) == 2
    assert "optim.lr 0.0003 -> 1.0" in errors.read_text()
    assert start([*command, "checkpoint.keep=1"]) == 0  # longer, and a change that does not matter
    assert outcome(out) == whole


def test_fault_10_a_run_whose_checkpoints_are_all_damaged_does_not_start_anew(settings, tmp_path):
    out = tmp_path / "run"
    command = [*settings, f"out={out}"]
    assert start(command, ("kill after rollout", 1)) == -signal.SIGKILL
    (out / "checkpoints/step_000001/manifest.json").write_text("{")
    assert start(command, None, errors := tmp_path / "errors") == 2
    assert "step_000001 is damaged" in errors.read_text() and "no checkpoint in" in errors.read_text()


@pytest.fixture(scope="module")
def refreshing(settings):
    """A run that begins without a store and refreshes it after its second and fourth step."""
    return [
        *settings,
        "refresh.every=2",
        "refresh.gate_questions=4",
        "refresh.gate_tolerance=100",
        "refresh.control=0.3",
        "refresh.merge_threshold=null",
        "build.threshold_1=0.5",
        "refresh.unused_steps=3",
        "hek.strategy_threshold=-1",
        "dosage.tokens_end=0.5",
        "dosage.steps=5",
        "build.max_attempts=1",
        "build.max_new_tokens=4",
    ]


@pytest.fixture(scope="module")
def refreshed(refreshing, tmp_path_factory):
    out = tmp_path_factory.mktemp("refreshed") / "run"
    assert start([*refreshing, f"out={out}"]) == 0
    found = outcome(out)
    assert [line["hek/version"] for line in found["metrics"]] == [0, 1, 1, 2, 2]
    assert {name.split("/")[1] for name in found["hek"]} == {"v0000", "v0001", "v0002"}
    lines = [json.loads(line) for line in found["trajectories"].splitlines()]
    assert {line["hek_version"] for line in lines} == {-1, 0, 1, 2}
    assert any(line["strategies"] for line in lines) and found["metrics"][3]["refresh/gate_difference"]
    assert len({line["sample_id"] for line in lines}) <= 12  # 16 questions, of which 4 compare versions
    return found


@pytest.mark.parametrize(
    ("fault", "newest", "more"),
    [
        (("kill after version", 2), 3, ()),
        (("kill after rollout", 4), 3, ("checkpoint.every=3",)),  # the second refresh is done again
        (("kill after version", 1), None, ("checkpoint.every=3",)),  # so is the first, from the very start
    ],
    ids=["before_the_checkpoint", "long_before_the_checkpoint", "before_any_checkpoint"],
)
def test_fault_04_a_run_that_refreshes_its_hek_ends_with_the_same_bytes(
    refreshing, refreshed, tmp_path, fault, newest, more
):
    out = tmp_path / "run"
    command = [*refreshing, f"out={out}", *more]
    assert start(command, fault) == -signal.SIGKILL
    found = sorted(path.name for path in (out / "checkpoints").glob("step_*"))
    assert found[-1:] == ([f"step_{newest:06d}"] if newest else [])
    assert (out / "hek/v0001/header.json").is_file()
    assert start(command) == 0
    assert outcome(out) == refreshed
