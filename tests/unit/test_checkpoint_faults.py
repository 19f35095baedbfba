"""Checkpoints that are damaged, too large for the disk, of another model, or malicious (PERF 7, faults 6, 8-14, 44).

Must fail if a damaged file is read, if a failed save harms the one before, if the last good checkpoint is removed, if
state goes by index and not by name, or if anything on disk can run code.
"""

import errno
import json
import os
import pickle
import random
import re
import resource
import shutil
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import build_tiny_model

from hiexp import shards
from hiexp.checkpoint import CheckpointConfig, Checkpoints
from hiexp.config import ConfigError
from hiexp.data import PromptSampler, Sample

STATE = {"sampler": {"position": 3}}


def build(seed: int = 0, **changes):
    model = build_tiny_model(seed=seed, **changes)
    return model, torch.optim.AdamW(model.parameters(), 0.01, fused=True)


def train(model, optimizer, seed: int = 0) -> None:
    ids = torch.randint(0, 250, (2, 5), generator=torch.Generator().manual_seed(seed))
    model(input_ids=ids).logits.logsumexp(-1).sum().backward()
    for one in optimizer if isinstance(optimizer, list) else [optimizer]:
        one.step()
        one.zero_grad()


def tensors(model, optimizer) -> dict[str, torch.Tensor]:
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    state, _, _ = shards.optimizer_tensors(optimizers, model)
    return {name: value.clone() for name, value in (shards.model_tensors(model) | state).items()}


def equal(one, other) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def saved(tmp_path):
    """(folder, {step: tensors}) with checkpoints of steps 1, 2 and 3."""
    model, optimizer = build()
    checkpoints, wanted = Checkpoints(tmp_path, CheckpointConfig(keep=3)), {}
    for step in (1, 2, 3):
        train(model, optimizer, step)
        checkpoints.save(step, model, optimizer, STATE)
        wanted[step] = tensors(model, optimizer)
    return tmp_path / "checkpoints", wanted


def resume(folder: Path) -> tuple[int, dict[str, torch.Tensor]]:
    model, optimizer = build(seed=9)
    found = Checkpoints(folder.parent, CheckpointConfig()).load_latest(model, optimizer)
    assert found is not None and found[1] == STATE
    return found[0], tensors(model, optimizer)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_is_safetensors_and_json_that_others_can_read(saved):
    folder, wanted = saved
    assert (folder / "latest").read_text() == "step_000003\n"
    assert names(folder / "step_000003") == ["manifest.json", "rank_00000.safetensors"]
    assert equal(load_file(folder / "step_000003/rank_00000.safetensors"), wanted[3])
    assert not any(name.endswith("lm_head.weight") for name in wanted[3])  # tied: once
    step, got = resume(folder)
    assert step == 3 and equal(got, wanted[3])
    assert Checkpoints(folder.parent / "new", CheckpointConfig()).load_latest(*build()) is None


def test_training_goes_on_with_the_very_bits(saved):
    folder, _ = saved
    model, optimizer = build()
    for step in (1, 2, 3, 4):
        train(model, optimizer, step)
    again, its_optimizer = build(seed=9)
    Checkpoints(folder.parent, CheckpointConfig()).load_latest(again, its_optimizer)
    train(again, its_optimizer, 4)
    assert equal(tensors(again, its_optimizer), tensors(model, optimizer))


def damage_truncate(folder: Path) -> str:
    path = folder / "rank_00000.safetensors"
    os.truncate(path, path.stat().st_size - 100)
    return "rank_00000.safetensors has .* bytes instead of"


def damage_flip(folder: Path) -> str:
    path = folder / "rank_00000.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    return "rank_00000.safetensors has other content"


def damage_missing(folder: Path) -> str:
    (folder / "manifest.json").unlink()
    return "manifest.json: No such file"


def damage_garbled(folder: Path) -> str:
    path = folder / "manifest.json"
    path.write_bytes(path.read_bytes()[:-200])
    return "manifest.json is not the JSON"


def damage_manifest_byte(folder: Path) -> str:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"step": 3', '"step": 8'))
    return "own digest"


def damage_lost_shard(folder: Path) -> str:
    (folder / "rank_00000.safetensors").unlink()
    return "rank_00000.safetensors: No such file"


FAULTS = {
    "fault_08_truncated": damage_truncate,
    "fault_09_flipped_byte": damage_flip,
    "fault_10_no_manifest": damage_missing,
    "fault_10_garbled_manifest": damage_garbled,
    "fault_10_edited_manifest": damage_manifest_byte,
    "fault_08_lost_shard": damage_lost_shard,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_08_09_10_the_file_is_named_and_the_checkpoint_before_is_taken(saved, capsys, fault):
    folder, wanted = saved
    message = FAULTS[fault](folder / "step_000003")
    step, got = resume(folder)
    assert step == 2 and equal(got, wanted[2])
    err = capsys.readouterr().err
    assert "checkpoint step_000003 is damaged and passed over" in err
    assert re.search(message, err), err


def test_fault_09_any_flipped_byte_of_any_file_is_noticed_or_harmless(saved):
    folder, wanted = saved
    draw = random.Random(0)
    for path in sorted((folder / "step_000003").iterdir()):
        whole = path.read_bytes()
        for _ in range(10):
            data = bytearray(whole)
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            path.write_bytes(data)
            step, got = resume(folder)
            assert equal(got, wanted[step])
            assert step == 2 or path.name == "manifest.json"
        path.write_bytes(whole)


def test_fault_10_all_damaged_is_an_error_and_not_a_new_start(saved):
    folder, _ = saved
    for step in (1, 2, 3):
        damage_flip(folder / f"step_00000{step}")
    with pytest.raises(ConfigError, match=r"no checkpoint in .* is whole"):
        resume(folder)


@pytest.mark.parametrize("content", ["step_000009\n", "", "../../etc\n", "\x00", None])
def test_faults_03_11_the_newest_is_found_whatever_latest_says(saved, capsys, content):
    folder, wanted = saved
    (folder / "latest").unlink()
    if content is not None:
        (folder / "latest").write_text(content)
    step, got = resume(folder)
    assert step == 3 and equal(got, wanted[3])
    assert ("which is not there" in capsys.readouterr().err) == (content is not None)


def test_faults_01_02_leftovers_of_a_killed_save_are_ignored_and_removed(saved):
    folder, _ = saved
    shutil.copytree(folder / "step_000003", folder / "step_000004.tmp")  # killed between manifest and rename
    (folder / "step_000005.tmp").mkdir()
    (folder / "step_000005.tmp/rank_00000.safetensors").write_bytes(b"half")
    assert resume(folder)[0] == 3
    assert names(folder) == ["latest", "step_000001", "step_000002", "step_000003"]


class Bomb:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self):
        return (Path.touch, (self.canary,))


def test_fault_12_a_pickle_in_place_of_any_file_is_not_run(saved, tmp_path):
    folder, _ = saved
    canary = tmp_path / "canary"
    bomb = pickle.dumps(Bomb(canary))
    pickle.loads(bomb)
    assert canary.exists()  # it would work
    canary.unlink()
    for name in ("manifest.json", "rank_00000.safetensors"):
        target = folder / "step_000003" / name
        whole = target.read_bytes()
        target.write_bytes(bomb)
        assert resume(folder)[0] == 2
        target.write_bytes(whole)
    shard = folder / "step_000003/rank_00000.safetensors"
    torch.save({"x": Bomb(canary)}, shard)
    manifest, _ = shards.read_manifest(shard.parent)
    digest = shards.hashlib.sha256(shard.read_bytes()).hexdigest()
    manifest["files"] = {shard.name: {"bytes": shard.stat().st_size, "sha256": digest}}
    shards.write_manifest(shard.parent, manifest)  # even with a manifest that fits
    with pytest.raises(ConfigError, match=r"step_000003.*safetensors"):
        resume(folder)
    assert not canary.exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 48}, r"model.embed_tokens.weight is F32 \[258, 32\] there, F32 \[258, 48\] here"),
        ({"num_hidden_layers": 3}, "it has no model.layers.2.self_attn.q_proj.weight"),
        ({"num_hidden_layers": 1}, r"model.layers.1.*unknown here"),
    ],
)
def test_fault_13_another_model_is_refused_naming_the_first_parameter(saved, changes, message):
    model, optimizer = build(seed=9, **changes)
    before = tensors(model, optimizer)
    with pytest.raises(ConfigError, match=message):
        Checkpoints(saved[0].parent, CheckpointConfig()).load_latest(model, optimizer)
    assert equal(tensors(model, optimizer), before)


def test_fault_13_optimiser_state_of_another_size_or_of_other_parameters_is_refused(saved):
    folder, _ = saved
    model, optimizer = build(seed=9)
    manifest, _ = shards.read_manifest(folder / "step_000003")
    entries = dict(manifest["tensors"])
    name = "optimizer/model.layers.0.mlp.up_proj.weight/exp_avg"
    entries[name] = entries[name] | {"shape": [64, 48]}
    reader = shards.Shards(folder / "step_000003", entries)
    with pytest.raises(ConfigError, match=r"exp_avg of model.layers.0.mlp.up_proj.weight has shape \[64, 48\]"):
        shards.load_optimizers([optimizer], model, manifest["groups"], manifest["values"], reader)
    fewer = torch.optim.AdamW(list(model.parameters())[1:])
    with pytest.raises(ConfigError, match=r"differ from the checkpoint's, first model.embed_tokens.weight"):
        Checkpoints(folder.parent, CheckpointConfig()).load_latest(model, fewer)
    with pytest.raises(ConfigError, match=r"1 optimisers with .* this run 2"):
        Checkpoints(folder.parent, CheckpointConfig()).load_latest(model, [optimizer, fewer])


def test_fault_44_links_and_foreign_names_are_never_followed(saved, tmp_path):
    folder, _ = saved
    elsewhere = tmp_path / "elsewhere"
    (folder / "step_000003").rename(elsewhere)
    (folder / "step_000003").symlink_to(elsewhere)
    (folder / "step_12").mkdir()
    (folder / "step_000007x").mkdir()
    assert resume(folder)[0] == 2
    (folder / "step_000003").unlink()
    elsewhere.rename(folder / "step_000003")
    shard = folder / "step_000003/rank_00000.safetensors"
    shard.rename(tmp_path / "shard")
    shard.symlink_to(tmp_path / "shard")
    assert resume(folder)[0] == 2
    shard.unlink()
    (tmp_path / "shard").rename(shard)
    manifest, _ = shards.read_manifest(shard.parent)
    manifest["files"] = {"../../shard": manifest["files"][shard.name]}
    shards.write_manifest(shard.parent, manifest)
    assert "names files other than" in shards.read_manifest(shard.parent)[1]
    assert resume(folder)[0] == 2


def fail_at(monkeypatch, owner, name: str, number: int) -> None:
    call, left = getattr(owner, name), [number]

    def failing(*args, **kwargs):
        left[0] -= 1
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return call(*args, **kwargs)

    monkeypatch.setattr(owner, name, failing)


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize(
    "point", [("_bytes", 1), ("_bytes", 20), ("fsync", 1), ("fsync", 3), ("fsync", 4), ("replace", 1)]
)
def test_fault_06_a_full_disk_is_told_and_leaves_what_was_there(saved, monkeypatch, point, async_save):
    folder, wanted = saved
    model, optimizer = build()
    checkpoints = Checkpoints(folder.parent, CheckpointConfig(keep=3, async_save=async_save))
    name, number = point
    with monkeypatch.context() as patch:
        fail_at(patch, shards if name == "_bytes" else os, name, number)
        with pytest.raises(
            ConfigError, match=r"cannot save checkpoint step_000004.*No space left on device.*free some"
        ):
            checkpoints.save(4, model, optimizer, STATE)
            checkpoints.finish()
    assert names(folder) == ["latest", "step_000001", "step_000002", "step_000003"]
    step, got = resume(folder)
    assert step == 3 and equal(got, wanted[3])
    checkpoints.save(4, model, optimizer, STATE)  # there is space again
    checkpoints.finish()
    assert resume(folder)[0] == 4


def test_fault_06_a_limit_of_the_system_and_the_policy_to_go_on(saved, capsys):
    folder, _ = saved
    model, optimizer = build()
    checkpoints = Checkpoints(folder.parent, CheckpointConfig(keep=3, on_error="warn"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        checkpoints.save(4, model, optimizer, STATE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "File too large; training goes on" in capsys.readouterr().err and resume(folder)[0] == 3
    checkpoints.save(4, model, optimizer, STATE)
    assert resume(folder)[0] == 4


def test_an_asynchronous_save_holds_the_moment_of_the_call(tmp_path, monkeypatch):
    model, optimizer = build()
    train(model, optimizer)
    wanted, gate, write = tensors(model, optimizer), threading.Event(), shards.write_shard
    monkeypatch.setattr(shards, "write_shard", lambda *args: gate.wait(20) and write(*args))
    checkpoints, state = Checkpoints(tmp_path, CheckpointConfig(async_save=True)), json.loads(json.dumps(STATE))
    checkpoints.save(1, model, optimizer, state)
    checkpoints.poll()
    assert names(tmp_path / "checkpoints") == ["step_000001.tmp"]
    train(model, optimizer, 1)
    state["sampler"]["position"] = 99
    gate.set()
    checkpoints.finish()
    step, got = resume(tmp_path / "checkpoints")
    assert step == 1 and equal(got, wanted)


def test_poll_completes_what_is_written(tmp_path):
    model, optimizer = build()
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(async_save=True))
    checkpoints.save(1, model, optimizer, STATE)
    assert checkpoints._pending
    checkpoints._pending.join()
    checkpoints.poll()
    assert names(tmp_path / "checkpoints") == ["latest", "step_000001"]


def test_an_error_in_the_writing_thread_is_not_lost(tmp_path, monkeypatch):
    def fail(*_):
        raise KeyError("a bug")

    monkeypatch.setattr(shards, "write_shard", fail)
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(async_save=True))
    checkpoints.save(1, *build(), STATE)
    with pytest.raises(ConfigError, match="a bug"):
        checkpoints.save(2, *build(), STATE)


def test_only_the_newest_are_kept_and_never_a_damaged_one_in_place_of_a_good_one(tmp_path, capsys):
    model, optimizer = build()
    checkpoints, folder = Checkpoints(tmp_path, CheckpointConfig(keep=2)), tmp_path / "checkpoints"
    for step in (1, 2, 3, 6):
        checkpoints.save(step, model, optimizer, STATE)
    assert names(folder) == ["latest", "step_000003", "step_000006"]
    damage_flip(folder / "step_000006")
    again = Checkpoints(tmp_path, CheckpointConfig(keep=1))
    found = again.load_latest(model, optimizer)
    assert found and found[0] == 3
    again.save(3, model, optimizer, STATE)  # it is there
    assert names(folder) == ["latest", "step_000003", "step_000006"]
    again.save(4, model, optimizer, STATE)
    assert names(folder) == ["latest", "step_000004"] and resume(folder)[0] == 4
    damage_flip(folder / "step_000004")
    shutil.copytree(folder / "step_000004", folder / "step_000005")
    Checkpoints(tmp_path, CheckpointConfig()).save(4, model, optimizer, STATE)  # takes the damaged one's place
    assert names(folder) == ["latest", "step_000004"] and resume(folder)[0] == 4


def test_an_old_checkpoint_that_cannot_be_removed_does_not_stop_the_run(tmp_path, monkeypatch, capsys):
    model, optimizer = build()
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep=1))
    checkpoints.save(1, model, optimizer, STATE)

    def busy(*_, **__):
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    monkeypatch.setattr(shutil, "rmtree", busy)
    checkpoints.save(2, model, optimizer, STATE)
    assert "step_000002 is saved, but" in capsys.readouterr().err
    assert (tmp_path / "checkpoints/latest").read_text() == "step_000002\n"


def test_state_goes_by_name_for_several_optimisers(tmp_path):
    def two(model, lr=0.1):
        matrices = [p for p in model.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if p.ndim != 2]
        sgd = torch.optim.SGD([{"params": others}, {"params": matrices[:1], "lr": 0.5}], lr, momentum=0.9)
        return [sgd, torch.optim.AdamW(matrices[1:], 0.01)]

    model = build_tiny_model()
    optimizers = two(model)
    train(model, optimizers)
    optimizers[0].param_groups[0]["lr"] = 0.03  # where a schedule had come to
    Checkpoints(tmp_path, CheckpointConfig()).save(1, model, optimizers, STATE)
    for lr, now in ((0.1, 0.03), (0.2, 0.2)):  # a changed setting wins over the schedule
        other = build_tiny_model(seed=5)
        its = two(other, lr)
        Checkpoints(tmp_path, CheckpointConfig()).load_latest(other, its)
        assert equal(tensors(other, its), tensors(model, optimizers))
        assert its[0].param_groups[0]["lr"] == now and its[0].param_groups[1]["lr"] == 0.5
        assert its[1].param_groups[0]["betas"] == (0.9, 0.999)
    train(model, optimizers, 1), train(other, its, 1)
    assert not equal(tensors(other, its), tensors(model, optimizers))


def test_frozen_parameters_are_left_to_the_model_folder(tmp_path):
    model, _ = build()
    model.model.embed_tokens.weight.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    train(model, optimizer)
    Checkpoints(tmp_path, CheckpointConfig()).save(1, model, optimizer, STATE)
    written = load_file(tmp_path / "checkpoints/step_000001/rank_00000.safetensors")
    assert "model/model.embed_tokens.weight" not in written and equal(written, tensors(model, optimizer))


def test_bug_99_a_resume_at_an_epochs_end_trains_the_next_epoch(tmp_path):
    samples = [Sample(f"q{number}", "?", ("a",)) for number in range(12)]
    whole = PromptSampler(samples, 0)
    batches = [[sample.id for sample in whole.next(2)] for _ in range(12)]
    first, model_and_optimizer = PromptSampler(samples, 0), build()
    for _ in range(6):
        first.next(2)
    Checkpoints(tmp_path, CheckpointConfig()).save(6, *model_and_optimizer, {"sampler": first.state_dict()})
    second = PromptSampler(samples, 0)
    found = Checkpoints(tmp_path, CheckpointConfig()).load_latest(*model_and_optimizer)
    assert found and found[0] == 6
    second.load_state_dict(found[1]["sampler"])
    assert [[sample.id for sample in second.next(2)] for _ in range(6)] == batches[6:]


def test_settings_that_cannot_work_are_told():
    for wrong in ({"every": -1}, {"keep": 0}):
        with pytest.raises(ConfigError, match=r"at least|or above"):
            CheckpointConfig(**wrong)
