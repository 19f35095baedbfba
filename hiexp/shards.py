"""Tensors of a model and its optimisers as safetensors files: every rank writes the rows it holds, any number reads.

Letters: W ranks. What is sharded (FSDP2: rows of dimension 0) is written by the rank that holds the rows, once; with
replicas (HSDP) by the first of them. Everything else is equal on all ranks and written by rank 0. `layout` says which
file holds which rows, so W may differ between writing and reading: each rank reads the slices that it needs.

Worked example, W = 2, a weight of 5 rows: rank 0 writes rows [0, 3) and rank 1 rows [3, 5); read by one process, the
weight is the two pieces one below the other; read by three ranks, the middle one takes row 2 of the first file and
row 3 of the second.

State is addressed by parameter NAME: `model/<name>` and `optimizer/<name>/<key>`. Frozen parameters are not written:
they come from the model folder.
"""

import hashlib
import json
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from hiexp.config import ConfigError

Layout = Mapping[str, Mapping[str, Any]]
"""name -> {"shape": [...], "dtype": "F32", "pieces": [[rank, first row, rows], ...]}"""
MANIFEST, FORMAT = "manifest.json", 1
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


@dataclass(frozen=True)
class Piece:
    """Rows [first_row, first_row + len(rows)) of a tensor; a scalar is one row."""

    name: str
    shape: tuple[int, ...]
    first_row: int
    rows: Tensor


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The trainable parameters (tied ones once) and the persistent buffers, in module order."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # after a forward without backward, the root still shows its cast, gathered copies
    tensors = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    persistent = model.state_dict(keep_vars=True)
    tensors |= {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return {f"model/{name}": tensor for name, tensor in tensors.items()}


def optimizer_tensors(
    optimizers: Sequence[Optimizer], model: nn.Module
) -> tuple[dict[str, Tensor], list[list[dict[str, Any]]], dict[str, Any]]:
    """(state tensors by name, param groups of each optimiser as plain values, state that is no tensor)."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    names = _names(model)
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for key, value in sorted(state.items()):  # whatever order loading left them in: equal bytes
                name = f"optimizer/{names[parameter]}/{key}"
                if not isinstance(value, Tensor):
                    values[name] = value
                    continue
                alike = isinstance(value, DTensor) or not isinstance(parameter, DTensor) or value.numel() == 1
                if not alike:  # each rank would hold something else, and only rank 0 would write its own
                    raise NotImplementedError(f"{name} is neither a scalar nor sharded like its parameter")
                tensors[name] = value.detach()
    return tensors, [[_plain_group(g, o, names) for g in o.param_groups] for o in optimizers], values


def local_pieces(tensors: Mapping[str, Tensor], is_main: bool) -> list[Piece]:
    """What this rank writes."""
    pieces = []
    for name, tensor in tensors.items():
        rows, first_row, writes = _local_rows(tensor, is_main)
        if writes and (rows.numel() or not isinstance(tensor, DTensor)):
            pieces.append(Piece(name, tuple(tensor.shape), first_row, rows))
    return pieces


def write_shard(path: Path, pieces: Iterable[Piece]) -> tuple[int, str]:
    """Write one safetensors file and flush it to the disk; (bytes, sha256). One tensor at a time is in host memory."""
    header: dict[str, Any] = {}
    end = 0
    pieces = list(pieces)
    for piece in pieces:
        begin, end = end, end + piece.rows.numel() * piece.rows.element_size()
        shape = list(piece.rows.shape)
        header[piece.name] = {"dtype": DTYPES[piece.rows.dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the format aligns the data
    digest = hashlib.sha256()
    size = 0
    with path.open("wb") as file:
        for part in (struct.pack("<Q", len(text)), text, *(piece.rows for piece in pieces)):
            data = memoryview(_bytes(part)) if isinstance(part, Tensor) else memoryview(part)
            digest.update(data)
            file.write(data)
            size += data.nbytes
        file.flush()
        os.fsync(file.fileno())
    return size, digest.hexdigest()


def describe(pieces: Iterable[Piece]) -> list[tuple[str, tuple[int, ...], str, int, int]]:
    """The pieces without their data, to be gathered: (name, shape, dtype, first row, rows)."""
    return [(p.name, p.shape, DTYPES[p.rows.dtype], p.first_row, _length(p.rows.shape)) for p in pieces]


def layout(described: Sequence[Sequence[tuple[str, tuple[int, ...], str, int, int]]]) -> dict[str, dict[str, Any]]:
    """Put the ranks' descriptions together; RuntimeError if the rows of a tensor are not all there exactly once."""
    entries: dict[str, dict[str, Any]] = {}
    for rank, pieces in enumerate(described):
        for name, shape, dtype, first, rows in pieces:
            entry = entries.setdefault(name, {"shape": list(shape), "dtype": dtype, "pieces": []})
            entry["pieces"].append([rank, first, rows])
    for name, entry in entries.items():
        end = 0
        for _, first, rows in sorted(entry["pieces"], key=lambda piece: piece[1]):
            if first != end:
                raise RuntimeError(f"{name}: rows {end} to {first} are held by no rank, or by two")
            end += rows
        if end != _length(entry["shape"]):
            raise RuntimeError(f"{name}: {end} of {entry['shape'][0]} rows are held by the ranks")
    return entries


def shard_name(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


class Shards:
    """Reads the tensors of a checkpoint folder, whichever file holds their rows."""

    def __init__(self, folder: Path, entries: Layout) -> None:
        self.folder, self.entries = folder, entries
        self._files: dict[int, Any] = {}

    def read(self, name: str, first: int, stop: int) -> Tensor:
        """Rows [first, stop) of a tensor; all of a scalar."""
        entry = self.entries[name]
        if not entry["shape"]:
            return self._file(entry["pieces"][0][0]).get_tensor(name)
        parts = []
        for rank, begin, rows in sorted(entry["pieces"], key=lambda piece: piece[1]):
            low, high = max(first, begin), min(stop, begin + rows)
            if low < high:
                parts.append(self._file(rank).get_slice(name)[low - begin : high - begin])
        if not parts:
            dtype = next(dtype for dtype, text in DTYPES.items() if text == entry["dtype"])
            return torch.empty(0, *entry["shape"][1:], dtype=dtype)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def fill(self, name: str, target: Tensor) -> None:
        """Copy the rows that this rank holds of `target` into it."""
        rows, first, _ = _local_rows(target.detach(), True)
        rows.copy_(self.read(name, first, first + _length(rows.shape)))

    def _file(self, rank: int) -> Any:
        if rank not in self._files:
            self._files[rank] = safe_open(self.folder / shard_name(rank), framework="pt")
        return self._files[rank]


def check_model(entries: Layout, now: Mapping[str, Tensor]) -> None:
    """ConfigError naming the first parameter that the checkpoint has otherwise, or not, or that only it has."""
    for name, tensor in now.items():
        label, entry = name.removeprefix("model/"), entries.get(name)
        if entry is None:
            raise ConfigError(f"the checkpoint is of another model: it has no {label}")
        shape, dtype = list(tensor.shape), DTYPES[tensor.dtype]
        if entry["shape"] != shape or entry["dtype"] != dtype:
            saved = f"{entry['dtype']} {entry['shape']}"
            raise ConfigError(f"the checkpoint is of another model: {label} is {saved} there, {dtype} {shape} here")
    extra = [name for name in entries if name.startswith("model/") and name not in now]
    if extra:
        raise ConfigError(f"the checkpoint is of another model: {extra[0].removeprefix('model/')} is unknown here")


def load_optimizers(
    optimizers: Sequence[Optimizer],
    model: nn.Module,
    groups: Sequence[Sequence[Mapping[str, Any]]],
    values: Mapping[str, Any],
    shards: Shards,
) -> None:
    """Fill the optimisers' state by parameter name. A learning rate and the like continue where a schedule had them,
    unless the constructor was given another value than before: then the new one holds.

    ConfigError for other parameters, other groups, or a state of another shape, before anything is changed.
    """
    states = _saved_states(shards.entries, values)
    names, parameters = _names(model), dict(model.named_parameters())
    now = [[[names[p] for p in group["params"]] for group in o.param_groups] for o in optimizers]
    saved = [[group["names"] for group in one] for one in groups]
    _check_groups(saved, now)
    _check_states(states, parameters, shards.entries)
    for optimizer, saved_groups in zip(optimizers, groups, strict=True):
        state, index = {}, 0
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                found = states.get(names[parameter])
                if found:
                    state[index] = {key: _restore(value, parameter, shards) for key, value in found.items()}
                index += 1
        plain = optimizer.state_dict()["param_groups"]
        merged = [_merge(*pair, optimizer) for pair in zip(plain, saved_groups, strict=True)]
        optimizer.load_state_dict({"state": state, "param_groups": merged})


def _check_states(states: Mapping[str, Mapping[str, Any]], parameters: Mapping[str, Tensor], entries: Layout) -> None:
    for name, keys in states.items():
        wanted = list(parameters[name].shape)
        for key, value in keys.items():
            shape = entries[value]["shape"] if isinstance(value, _Stored) else []
            if shape in (wanted, [], [1]):
                continue
            if isinstance(parameters[name], DTensor) or len(shape) == len(wanted):
                raise ConfigError(f"the optimiser's {key} of {name} has shape {shape}, the parameter has {wanted}")


class _Stored(str):
    """Name of a tensor in the files, as opposed to a value that is the state itself."""


def _saved_states(entries: Layout, values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    found = {name: _Stored(name) for name in entries if name.startswith("optimizer/")} | dict(values)
    states: dict[str, dict[str, Any]] = {}
    for full, value in found.items():
        name, key = full.removeprefix("optimizer/").rsplit("/", 1)
        states.setdefault(name, {})[key] = value
    return states


def _restore(value: Any, parameter: Tensor, shards: Shards) -> Any:
    if not isinstance(value, _Stored):
        return value
    entry = shards.entries[value]
    if entry["shape"] != list(parameter.shape):
        return shards.read(value, 0, _length(entry["shape"]))
    dtype = next(dtype for dtype, text in DTYPES.items() if text == entry["dtype"])
    tensor = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)  # sharded and placed as the parameter is
    shards.fill(value, tensor)
    return tensor


def _check_groups(saved: Sequence[Sequence[Sequence[str]]], now: Sequence[Sequence[Sequence[str]]]) -> None:
    if [len(one) for one in saved] != [len(one) for one in now]:
        raise ConfigError(
            f"the checkpoint has {len(saved)} optimisers with {[len(one) for one in saved]} parameter groups, "
            f"this run {len(now)} with {[len(one) for one in now]}"
        )
    flat = [(old, new) for olds, news in zip(saved, now, strict=True) for old, new in zip(olds, news, strict=True)]
    for old, new in flat:
        if list(old) != list(new):
            differing = sorted(set(old) ^ set(new)) or [a for a, b in zip(old, new, strict=True) if a != b]
            raise ConfigError(f"the optimiser's parameters differ from the checkpoint's, first {differing[0]}")


def _merge(now: dict[str, Any], saved: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    merged = dict(now)
    for key, (given, value) in saved["settings"].items():
        if key in now and _plain(optimizer.defaults.get(key)) == given:
            merged[key] = tuple(value) if isinstance(now[key], tuple) else value
    return merged


def _plain_group(group: Mapping[str, Any], optimizer: Optimizer, names: Mapping[Tensor, str]) -> dict[str, Any]:
    """{"names": [...], "settings": {key: [as constructed, as it is now]}}; values that are not plain stay behind."""
    settings = {
        key: [_plain(optimizer.defaults.get(key)), _plain(value)]
        for key, value in group.items()
        if key != "params" and isinstance(value, (bool, int, float, str, tuple, list, type(None)))
    }
    return {"names": [names[parameter] for parameter in group["params"]], "settings": settings}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _names(model: nn.Module) -> dict[Tensor, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def _local_rows(tensor: Tensor, is_main: bool) -> tuple[Tensor, int, bool]:
    """(rows held here, index of the first of them, whether this rank is the one that writes them)."""
    if not isinstance(tensor, DTensor):
        return tensor, 0, is_main
    first, writes, sharded = 0, True, False
    coordinates = tensor.device_mesh.get_coordinate() or []
    for dim, (placement, here) in enumerate(zip(tensor.placements, coordinates, strict=True)):
        if placement.is_replicate():
            writes = writes and here == 0
        elif isinstance(placement, Shard) and placement.dim == 0 and not sharded:
            share = -(-tensor.shape[0] // tensor.device_mesh.size(dim))  # as torch.chunk and FSDP2 split
            first, sharded = min(here * share, tensor.shape[0]), True
        else:
            raise NotImplementedError(f"a checkpoint of a tensor that is placed as {tensor.placements}")
    return tensor.to_local(), first, writes


def _bytes(tensor: Tensor) -> Any:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()


def _length(shape: Sequence[int]) -> int:
    return shape[0] if shape else 1


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write manifest.json with a digest of itself, flushed to the disk together with the folder."""
    whole = {"format": FORMAT, **manifest}
    write_durably(folder / MANIFEST, _json(whole | {"digest": _digest(whole)}))
    sync(folder)


def read_manifest(folder: Path) -> tuple[dict[str, Any], str]:
    """(manifest, ""), or ({}, what is wrong with it)."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest.pop("digest") != _digest(manifest):
            return {}, f"{MANIFEST} does not match its own digest"
        if manifest["format"] != FORMAT:
            return {}, f"{MANIFEST} has format {manifest['format']}, this program reads {FORMAT}"
        ranks = range(len(manifest["files"]))
        if sorted(manifest["files"]) != [shard_name(rank) for rank in ranks]:
            return {}, f"{MANIFEST} names files other than rank_00000.safetensors and so on"
        if any(piece[0] not in ranks for entry in manifest["tensors"].values() for piece in entry["pieces"]):
            return {}, f"{MANIFEST} has rows in files that it does not name"
    except OSError as error:
        return {}, f"{MANIFEST}: {reason(error)}"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}, f"{MANIFEST} is not the JSON that was written"
    return manifest, ""


def wrong_file(path: Path, expected: Mapping[str, Any]) -> str:
    """ "" if the file has the bytes that were written, else what is wrong with it."""
    try:
        if path.is_symlink():
            return f"{path.name} is a link"
        if path.stat().st_size != expected["bytes"]:
            return f"{path.name} has {path.stat().st_size} bytes instead of {expected['bytes']}"
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return f"{path.name}: {reason(error)}"
    return "" if digest == expected["sha256"] else f"{path.name} has other content than was written (sha256)"


def write_durably(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def reason(error: Exception) -> str:
    """One line; the system's own words where it has some."""
    text = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
    return " ".join(str(text).split())[:300]


def _json(value: Any) -> str:
    return json.dumps(value, allow_nan=False, sort_keys=True) + "\n"


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(_json(manifest).encode()).hexdigest()
