"""What a run leaves for later: models in Hugging Face layout, and checkpoints from which training goes on bit for bit.

    checkpoints/step_000123/rank_00000.safetensors   rows of model and optimiser that rank 0 held (shards.py)
    checkpoints/step_000123/manifest.json            sizes and sha256 of the files, where which rows are, all else
    checkpoints/latest                               a name for people; loading goes by the manifests

A folder is complete and new, or complete and old, never half of each. Nothing is unpickled.
"""

import contextlib
import json
import re
import shutil
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import nn
from torch.optim import Optimizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as hf_logging

from hiexp import resume, shards
from hiexp.config import ConfigError
from hiexp.distributed import Context
from hiexp.model import full_parameters
from hiexp.trainer import Optimizers

STEP = re.compile(r"step_(\d{6,12})", re.ASCII)


@dataclass(frozen=True)
class CheckpointConfig:
    every: int = 20
    "write a checkpoint every so many steps, besides at the end and when told to stop; 0 = only then"
    keep: int = 2
    "how many to keep; each takes three times the trained weights in float32"
    async_save: bool = False
    "copy to host memory and write while training goes on; needs that memory once more"
    on_error: Literal["stop", "warn"] = "stop"
    "when one cannot be written (disk full): end the run, or warn and train on from the last good one"

    def __post_init__(self) -> None:
        if self.every < 0:
            raise ConfigError(f"every={self.every} must be 0 (only at the end) or above")
        if self.keep < 1:
            raise ConfigError(f"keep={self.keep} must be at least 1")


class Checkpoints:
    """The checkpoints of one run, in `<out>/checkpoints`. Methods are collectives: all ranks call them alike.

    `step` counts finished steps. `state` is whatever else the loop needs (the sampler's position, say), as JSON; it is
    the same on all ranks. Log the step's metrics before saving: they are flushed to the disk with the checkpoint.
    """

    def __init__(self, out: str | Path, cfg: CheckpointConfig, ctx: Context | None = None) -> None:
        self.folder, self.cfg, self.ctx = Path(out) / "checkpoints", cfg, ctx or Context()
        self._pending: _Writer | None = None
        self._saved_step = -1

    def is_due(self, step: int) -> bool:
        return self.cfg.every > 0 and step % self.cfg.every == 0

    def save(
        self,
        step: int,
        policy: nn.Module,
        optimizer: Optimizers,
        state: Mapping[str, Any],
        rng: Mapping[str, Any] | None = None,
    ) -> None:
        """Write a checkpoint, or with async_save begin to; saving a step twice does nothing. `rng` defaults to now.

        ConfigError on all ranks if any cannot write (see on_error); what was there before is then untouched.
        """
        self.finish()
        if step == self._saved_step:
            return
        temporary = self.folder / f"{_name(step)}.tmp"
        if not self._agree(step, self._make_folder(temporary) if self.ctx.is_main else None):
            return
        optimizers = _as_list(optimizer)
        tensors = shards.model_tensors(policy)
        more, groups, values = shards.optimizer_tensors(optimizers, policy)
        pieces = shards.local_pieces(tensors | more, self.ctx.is_main)
        if self.cfg.async_save:
            pieces = [shards.Piece(p.name, p.shape, p.first_row, p.rows.to("cpu", copy=True)) for p in pieces]
        facts = {"step": step, "groups": groups, "values": values, "state": dict(state)}
        facts = json.loads(json.dumps(facts, allow_nan=False))  # as it is now, and it is JSON
        self._pending = _Writer(temporary, self.ctx.rank, pieces, dict(rng or resume.rng_state()), facts)
        if self.cfg.async_save:
            self._pending.start()
        else:
            self._pending.run()
            self.finish()

    def poll(self) -> None:
        """Complete an asynchronous checkpoint that all ranks have written; call it once a step."""
        if self._pending and not self.ctx.max([float(self._pending.is_alive())], "checkpoint")[0]:
            self.finish()

    def finish(self) -> None:
        """Wait for an asynchronous checkpoint and complete it; call it when the loop ends."""
        if self._pending is None:
            return
        writer, self._pending = self._pending, None
        if writer.ident is not None:
            writer.join()
        reports = self.ctx.gather(writer.report, "checkpoint files")
        errors = [f"rank {rank}: {report['error']}" for rank, report in enumerate(reports) if report["error"]]
        problem = "; ".join(errors) or None
        if self.ctx.is_main and not problem:
            problem = self._commit(writer, reports)
        if self._agree(writer.facts["step"], problem):
            self._saved_step = writer.facts["step"]

    def load_latest(self, policy: nn.Module, optimizer: Optimizers) -> tuple[int, dict[str, Any]] | None:
        """Restore weights, optimiser and random numbers from the newest checkpoint that is whole: (step, state).

        None if there is none at all. Damaged ones are named on stderr and passed over; ConfigError if all are damaged,
        or if it is of another model (naming the first parameter that differs). Saved by any number of ranks; random
        states are per rank, and ranks that the saving run did not have keep their own.
        """
        names = self.ctx.broadcast(self._candidates() if self.ctx.is_main else None, "checkpoint list")
        for name in names:
            manifest, problem = self._verify(name)
            if problem:
                self._say(f"checkpoint {name} is damaged and passed over: {problem}")
                continue
            self._restore(name, manifest, policy, _as_list(optimizer))
            return manifest["step"], manifest["state"]
        if names:
            raise ConfigError(
                f"no checkpoint in {self.folder} is whole; delete that folder to start anew, or restore a copy"
            )
        return None

    def _restore(self, name: str, manifest: dict[str, Any], policy: nn.Module, optimizers: list[Optimizer]) -> None:
        reader = shards.Shards(self.folder / name, manifest["tensors"])
        tensors = shards.model_tensors(policy)
        shards.check_model(reader.entries, tensors)
        try:
            shards.load_optimizers(optimizers, policy, manifest["groups"], manifest["values"], reader)
            for key, tensor in tensors.items():
                reader.fill(key, tensor)
        except SafetensorError as error:  # its digest fits, so nobody's disk did this
            raise ConfigError(f"{self.folder / name} is not in safetensors format: {shards.reason(error)}") from error
        if self.ctx.rank < len(manifest["rng"]):
            resume.set_rng_state(manifest["rng"][self.ctx.rank])
        self._saved_step = manifest["step"]

    def _candidates(self) -> list[str]:
        """Names of the step folders, newest first; leftovers of killed runs are removed."""
        if not self.folder.is_dir():
            return []
        for path in self.folder.glob("step_*.tmp"):
            _remove(path)
        names = [path.name for path in self.folder.iterdir() if STEP.fullmatch(path.name) and not path.is_symlink()]
        names.sort(key=lambda name: int(name[5:]), reverse=True)
        with contextlib.suppress(OSError, UnicodeDecodeError):
            latest = (self.folder / "latest").read_text(encoding="utf-8").strip()
            if latest not in names:
                self._say(f"{self.folder / 'latest'} names {latest[:40]!r}, which is not there; going by the folders")
        return names

    def _verify(self, name: str) -> tuple[dict[str, Any], str]:
        """(manifest, "" or what is wrong), the same on all ranks; each rank reads its share of the files."""
        found = shards.read_manifest(self.folder / name) if self.ctx.is_main else None
        manifest, problem = self.ctx.broadcast(found, "checkpoint manifest")
        if problem:
            return {}, problem
        files = manifest["files"]
        mine = sorted(files)[self.ctx.rank :: self.ctx.world_size]
        wrong = [problem for file in mine if (problem := shards.wrong_file(self.folder / name / file, files[file]))]
        found = self.ctx.gather(wrong, "checkpoint check")
        return manifest, "; ".join(problem for one in found for problem in one)

    def _make_folder(self, temporary: Path) -> str | None:
        try:
            _remove(temporary)
            temporary.mkdir(parents=True)
        except OSError as error:
            return shards.reason(error)
        return None

    def _commit(self, writer: "_Writer", reports: list[dict[str, Any]]) -> str | None:
        """Manifest, rename, `latest`, purge: the checkpoint exists from the rename on. Returns what went wrong."""
        try:
            manifest = {"world_size": self.ctx.world_size, **writer.facts}
            manifest["files"] = {shards.shard_name(rank): report["file"] for rank, report in enumerate(reports)}
            manifest["tensors"] = shards.layout([report["pieces"] for report in reports])
            manifest["rng"] = [report["rng"] for report in reports]
            shards.write_manifest(writer.folder, manifest)
            for log in self.folder.parent.glob("*.jsonl"):
                shards.sync(log)
            final = writer.folder.with_suffix("")
            _remove(final)  # a damaged one that was passed over
            writer.folder.replace(final)
        except (OSError, RuntimeError) as error:
            return shards.reason(error)
        try:
            shards.sync(self.folder)
            shards.write_durably(self.folder / ".latest.new", final.name + "\n")
            (self.folder / ".latest.new").replace(self.folder / "latest")
            self._purge(writer.facts["step"])
        except OSError as error:
            self._say(f"{final.name} is saved, but `latest` or an older one is not in order: {shards.reason(error)}")
        return None

    def _purge(self, newest: int) -> None:
        """Keep the `keep` newest up to the one just written; later ones were damaged, or of a run taken back."""
        steps = sorted(int(path.name[5:]) for path in self.folder.iterdir() if STEP.fullmatch(path.name))
        kept = [step for step in steps if step <= newest][-self.cfg.keep :]
        for step in set(steps) - set(kept):
            doomed = self.folder / f"{_name(step)}.tmp"  # a folder half removed must not look like a checkpoint
            _remove(doomed)
            (self.folder / _name(step)).replace(doomed)
            _remove(doomed)

    def _agree(self, step: int, problem: str | None) -> bool:
        """True if rank 0 has no problem; else remove what is half written and raise, or warn, on all ranks."""
        problem = self.ctx.broadcast(problem, "checkpoint")
        if not problem:
            return True
        if self.ctx.is_main:
            shutil.rmtree(self.folder / f"{_name(step)}.tmp", ignore_errors=True)
        message = f"cannot save checkpoint {_name(step)} in {self.folder}: {problem}"
        if self.cfg.on_error == "stop":
            raise ConfigError(f"{message}; free some space and start the same command again to go on from the last one")
        self._say(f"{message}; training goes on")
        return False

    def _say(self, message: str) -> None:
        if self.ctx.is_main:
            print(f"warning: {message}", file=sys.stderr, flush=True)


class _Writer(threading.Thread):
    """Writes this rank's shard; `report` is what rank 0 needs for the manifest. It raises nothing."""

    def __init__(
        self, folder: Path, rank: int, pieces: list[shards.Piece], rng: dict[str, Any], facts: dict[str, Any]
    ) -> None:
        super().__init__(name="checkpoint", daemon=True)  # a killed run need not wait for it
        self.folder, self.facts = folder, facts
        self._rank, self._pieces = rank, pieces
        self.report: dict[str, Any] = {"error": "unfinished", "pieces": shards.describe(pieces), "rng": rng}

    def run(self) -> None:
        try:
            size, digest = shards.write_shard(self.folder / shards.shard_name(self._rank), self._pieces)
            shards.sync(self.folder)
            self.report |= {"error": None, "file": {"bytes": size, "sha256": digest}}
        except Exception as error:  # raised on all ranks by `finish`, where they can agree
            self.report["error"] = shards.reason(error)
        self._pieces = []


def save_policy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    ctx: Context | None = None,
    dtype: torch.dtype | None = None,
) -> Path:
    """Write model and tokenizer in Hugging Face layout, replacing `folder` in one rename at the very end.

    A collective if the model is sharded; rank 0 writes. Weights keep their dtype unless one is given. ConfigError on
    all ranks if the place cannot be written or the disk is full; what was in `folder` is then untouched. A process
    killed between the last two renames leaves the former model as `<folder>.old`.
    """
    ctx, target = ctx or Context(), Path(folder)
    weights = {name: tensor.cpu() for name, tensor in full_parameters(model, dtype) if ctx.is_main}
    problem = None
    if ctx.is_main:
        try:
            _write_policy(model, tokenizer, target, weights)
        except ConfigError as error:
            problem = str(error)
    problem = ctx.broadcast(problem, "export")
    if problem:
        raise ConfigError(problem)
    return target


def _write_policy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, target: Path, weights: dict[str, torch.Tensor]
) -> None:
    fresh, old = target.with_name(f"{target.name}.tmp"), target.with_name(f"{target.name}.old")
    if target.exists() and not (target / "config.json").is_file() and not _is_empty_folder(target):
        raise ConfigError(f"{target} exists and is not a model folder; choose another folder, it would be replaced")
    try:
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        hf_logging.disable_progress_bar()
        dtype = next(iter(weights.values())).dtype
        model.save_pretrained(fresh, state_dict=weights)  # which empties the dict
        _set_dtype(fresh / "config.json", dtype)
        tokenizer.save_pretrained(fresh)
        for path in (*fresh.iterdir(), fresh):
            shards.sync(path)
        _swap(fresh, target, old)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(fresh, ignore_errors=True)
        advice = "free space or choose another folder"
        raise ConfigError(f"cannot save the model to {target}: {shards.reason(error)}; {advice}") from error


def _set_dtype(path: Path, dtype: torch.dtype) -> None:
    """transformers writes the dtype that the model has in memory, whatever it was given to save."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config["dtype"] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _swap(fresh: Path, target: Path, old: Path) -> None:
    if not target.exists():
        fresh.replace(target)
        return
    shutil.rmtree(old, ignore_errors=True)
    target.replace(old)  # a folder that is not empty cannot be replaced in one call
    try:
        fresh.replace(target)
    except OSError:
        old.replace(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _name(step: int) -> str:
    return f"step_{step:06d}"


def _as_list(optimizer: Optimizers) -> list[Optimizer]:
    return [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)


def _remove(path: Path) -> None:
    """A folder, or a link to one and not what it points to; nothing if it is not there."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)
