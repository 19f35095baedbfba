"""The sharding plan, written out: FSDP2 per decoder layer, embedding, final norm and head in the root group.

After the root's forward the head weight is a plain, full Parameter until the backward has passed, so that a loss may
use it outside of any forward. A head that is its own FSDP unit gives a wrong gradient there, silently.
After a forward WITHOUT a backward the root stays gathered: see `model.release`.
"""

import json
import types
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from hiexp.config import ConfigError, lookup
from hiexp.distributed import Context, ensure_group
from hiexp.lora import LoraConfig, insert_lora, start_values
from hiexp.model import (
    DTYPES,
    LOAD_ERRORS,
    ModelConfig,
    attention_name,
    load_causal_lm,
    load_error,
    missing_weights,
    model_folder,
    refuse_logit_transforms,
    run_body,
)


@dataclass(frozen=True)
class ShardConfig:
    param_dtype: str = "float32"
    "float32 or bfloat16: what the layers compute in; trained weights, gradients and AdamW stay float32"
    checkpoint_layers: bool = False
    "keep only each layer's input and compute the rest again in the backward: less memory, about a third more time"
    cpu_offload: bool = False
    "weights, gradients and optimiser state in host memory, copied to the device layer by layer"
    replicas: int = 1
    "copies of the model, each sharded over world size / replicas processes (one per node: cheap traffic between them)"

    def __post_init__(self) -> None:
        lookup(DTYPES, self.param_dtype, "param_dtype")
        if self.replicas < 1:
            raise ConfigError(f"replicas={self.replicas} must be 1 or more")


def shard(model: PreTrainedModel, cfg: ShardConfig, ctx: Context) -> PreTrainedModel:
    """Shard in place over all ranks; names, tied weights and evaluation mode stay. Returns the model, on its device.

    A single process that computes in the model's own dtype and offloads nothing is left unsharded. ConfigError for a
    model without `base_model.layers` or a world size that the replicas do not divide.
    """
    layers = _decoder_layers(model)
    if cfg.checkpoint_layers:
        for layer in layers:
            # A bound method, which deepcopy binds to the copy; a closure would go on to run this layer.
            layer.forward = types.MethodType(_checkpointed, layer)
    if not _needs_sharding(cfg, ctx, model.dtype):
        return model if model.device.type == "meta" else model.to(ctx.device)  # type: ignore[arg-type]
    offload = CPUOffloadPolicy(pin_memory=ctx.device.type == "cuda") if cfg.cpu_offload else OffloadPolicy()
    options: dict[str, Any] = {
        "mesh": _mesh(cfg, ctx),
        "mp_policy": MixedPrecisionPolicy(DTYPES[cfg.param_dtype], reduce_dtype=torch.float32),
        "offload_policy": offload,
    }
    for layer in layers:
        fully_shard(layer, reshard_after_forward=True, **options)
    fully_shard(model, reshard_after_forward=False, **options)
    setattr(model, "run_body", types.MethodType(run_body, model))  # noqa: B010 (no declared attribute)
    register_fsdp_forward_method(model, "run_body")
    return model


def load_sharded(
    cfg: ModelConfig, shard_cfg: ShardConfig, ctx: Context, lora: LoraConfig | None = None, seed: int = 0
) -> PreTrainedModel:
    """`shard(load_causal_lm(cfg))` to the bit, but each rank reads only its own rows: no rank ever holds the model.

    Same errors for a folder that lacks weights. safetensors only, one file or several with an index. With `lora` all
    weights are frozen and updates, drawn from `seed`, are trained instead.
    """
    if not _needs_sharding(shard_cfg, ctx, DTYPES[cfg.dtype]):
        model = load_causal_lm(cfg)
        if lora and lora.rank:
            insert_lora(model, lora)
        _fill(model, start_values(model, seed))
        return shard(model, shard_cfg, ctx)
    with ExitStack() as files:
        try:  # every check comes before the first collective: ranks fail together or not at all
            model = _on_meta(cfg)
            refuse_logit_transforms(cfg.path, model)
            buffers = _computed_buffers(cfg.path, model)
            sources = _slices(cfg.path, model, _open(Path(cfg.path), files))
        except LOAD_ERRORS as error:
            raise load_error(cfg.path, error) from error
        if lora and lora.rank:
            insert_lora(model, lora)
        shard(model, shard_cfg, ctx)
        model.to_empty(device=torch.device("cpu") if shard_cfg.cpu_offload else ctx.device)
        _fill(model, sources | start_values(model, seed))
    for name, buffer in buffers.items():
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, buffer.to(ctx.device))
    return model.eval()


def _decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ConfigError(f"{type(model).__name__} has no base_model.layers to shard; use a Qwen2, Llama or the like")
    return layers


def _needs_sharding(cfg: ShardConfig, ctx: Context, dtype: torch.dtype) -> bool:
    return ctx.world_size > 1 or cfg.cpu_offload or DTYPES[cfg.param_dtype] != dtype


def _mesh(cfg: ShardConfig, ctx: Context) -> DeviceMesh:
    ensure_group(ctx)
    if ctx.world_size % cfg.replicas:
        raise ConfigError(f"replicas={cfg.replicas} does not divide the {ctx.world_size} processes")
    if cfg.replicas == 1:
        return init_device_mesh(ctx.device.type, (ctx.world_size,))
    shape = (cfg.replicas, ctx.world_size // cfg.replicas)
    return init_device_mesh(ctx.device.type, shape, mesh_dim_names=("replicate", "shard"))


def _checkpointed(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    forward = types.MethodType(type(layer).forward, layer)
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    # There is no dropout (evaluation mode), so no random state to restore.
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def _on_meta(cfg: ModelConfig) -> PreTrainedModel:
    """The model without storage; ConfigError if no folder is there."""
    folder = model_folder(cfg.path)
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=DTYPES[cfg.dtype], attn_implementation=attention_name(cfg)
        )
    if (folder / "generation_config.json").is_file():  # it says where sampling ends, and an export has to keep it
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model


def _open(folder: Path, files: ExitStack) -> dict[str, Any]:
    """name -> file that holds it, for one safetensors file or several with an index."""
    index = folder / "model.safetensors.index.json"
    parts = ["model.safetensors"]
    if index.is_file():
        parts = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    found = {}
    for part in parts:
        handle = files.enter_context(safe_open(folder / Path(part).name, framework="pt"))
        found |= dict.fromkeys(handle.keys(), handle)
    return found


def _slices(path: str, model: PreTrainedModel, files: dict[str, Any]) -> dict[str, Any]:
    """Parameter name -> slice of its tensor; ConfigError if one is missing, misshaped, or tied to a different one."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    missing = sorted(group[0] for group in names.values() if not any(name in files for name in group))
    if missing:
        raise missing_weights(path, missing)
    slices = {}
    for name, parameter in model.named_parameters():
        first, *others = [other for other in names[id(parameter)] if other in files]
        slices[name] = found = files[first].get_slice(first)
        if list(parameter.shape) != found.get_shape():
            shapes = f"{found.get_shape()}, its config.json asks for {list(parameter.shape)}"
            raise ConfigError(f"cannot load a language model from {path}: {name} has shape {shapes}")
        for other in others:
            if not torch.equal(found[:], files[other].get_slice(other)[:]):
                remedy = "set tie_word_embeddings to false in its config.json"
                raise ConfigError(f"{path} ties {first} to {other}, but holds two different tensors; {remedy}")
    return slices


def _computed_buffers(path: str, model: PreTrainedModel) -> dict[str, Tensor]:
    """name -> value of the buffers that no file holds (rotary frequencies): their module computes them when built."""
    values = {}
    for owner, module in model.named_modules():
        if not list(module.buffers(recurse=False)):
            continue
        if not hasattr(module, "config"):
            raise ConfigError(f"{path}: no rule to rebuild the buffers of {type(module).__name__} on every process")
        fresh: Any = type(module)(module.config)  # type: ignore[call-arg]
        values |= {f"{owner}.{name}": buffer for name, buffer in fresh.named_buffers(recurse=False)}
    return values


@torch.no_grad()
def _fill(model: nn.Module, sources: Mapping[str, Any]) -> None:
    """Copy this rank's rows of `sources` (tensors or slices of files) into the parameters of these names.

    FSDP gives shard r the rows from r * c on, c = ceil(rows / shards).
    """
    parameters = dict(model.named_parameters())
    for name, source in sources.items():
        parameter = parameters[name]
        if isinstance(parameter, DTensor):
            mesh, local = parameter.device_mesh, parameter.to_local()
            start = mesh.get_local_rank(mesh.ndim - 1) * -(-parameter.shape[0] // mesh.size(mesh.ndim - 1))
        else:
            local, start = parameter, 0
        if len(local):
            local.copy_(source[start : start + len(local)])
