"""The language model as the trainer sees it: load it, score tokens with it, hand its weights out.

Nothing is ever downloaded: a model is a folder. Models are loaded in evaluation mode and stay there:
dropout would make the log-probs of one token differ between two passes over the same weights.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as hf_logging

from hiexp.attention import register as register_varlen
from hiexp.batching import Batch
from hiexp.config import ConfigError, lookup
from hiexp.fused import token_logprobs
from hiexp.lora import merged


@dataclass(frozen=True)
class ModelConfig:
    path: str
    "folder with config.json, weights and tokenizer in Hugging Face layout"
    dtype: str = "float32"
    "float32 or bfloat16; log-probs and loss are float32 either way"
    attention: str = "sdpa"
    "sdpa or eager; varlen (torch's flash kernel on a GPU) or flash_attention_2 (its package) for optim.packed"

    def __post_init__(self) -> None:
        lookup(DTYPES, self.dtype, "dtype")
        lookup(ATTENTIONS, self.attention, "attention")


def load_causal_lm(cfg: ModelConfig) -> PreTrainedModel:
    """The model of a folder; ConfigError if the folder, its weights or the attention kernel are not there."""
    folder = model_folder(cfg.path)
    hf_logging.disable_progress_bar()  # bars of milliseconds; what takes time has ours
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=DTYPES[cfg.dtype],
            attn_implementation=attention_name(cfg),
            local_files_only=True,
            trust_remote_code=False,  # explicit: left out, transformers asks on the terminal
            output_loading_info=True,
        )
    except LOAD_ERRORS as error:
        raise load_error(cfg.path, error) from error
    model, report = loaded
    missing = sorted(report["missing_keys"])
    if missing:  # transformers would go on with random values
        raise missing_weights(cfg.path, missing)
    refuse_logit_transforms(cfg.path, model)
    return model.eval()


LOAD_ERRORS = (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError)


def load_error(path: str, error: Exception) -> ConfigError:
    return ConfigError(f"cannot load a language model from {path}: {_one_line(error)}")


def missing_weights(path: str, names: Sequence[str]) -> ConfigError:
    return ConfigError(f"{path} lacks {len(names)} weights ({names[0]}, ...); copy all of it")


def refuse_logit_transforms(path: str, model: PreTrainedModel) -> None:
    """ConfigError for a model whose logits are not the plain head's, which is all that the loss applies."""
    transforms = [name for name in _LOGIT_TRANSFORMS if getattr(model.config, name, None) not in (None, 1)]
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        transforms.append("the bias of its head")
    if transforms:
        raise ConfigError(f"{path}: {transforms[0]} changes the logits after the head: not supported")


def attention_name(cfg: ModelConfig) -> str:
    """What transformers calls it; makes our own known to it."""
    register_varlen()
    return ATTENTIONS[cfg.attention]


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder; ConfigError if there is none."""
    folder = model_folder(path)
    try:
        return _tokenizer_class(folder).from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise ConfigError(f"cannot load a tokenizer from {path}: {_one_line(error)}") from error


def _tokenizer_class(folder: Path) -> Any:
    """AutoTokenizer, except for a generic tokenizer.json: transformers 5 would put the model type's own class over it,
    whose splitting rules silently give other ids (a word-level tokenizer beside a Qwen2 model, for example)."""
    file = folder / "tokenizer_config.json"
    name = json.loads(file.read_text(encoding="utf-8")).get("tokenizer_class") if file.is_file() else None
    is_generic = name in ("TokenizersBackend", "PreTrainedTokenizerFast") and (folder / "tokenizer.json").is_file()
    return PreTrainedTokenizerFast if is_generic else AutoTokenizer


def run_body(model: PreTrainedModel, **inputs: Any) -> Tensor:
    """Hidden states [R, L, H] after the last norm, head not applied. `fsdp.shard` makes a forward method of it."""
    return model.base_model(**inputs).last_hidden_state


def hidden_states(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Hidden states [positions, H] of a batch, padded or packed, flattened as `batch.kept` indexes them."""
    # No mask: with right padding the causal one is exact, and packed rows are told apart by their positions. No cache:
    # it costs memory, and transformers 5.19 mixes packed rows without a warning when it has one.
    inputs: dict[str, Any] = {"input_ids": batch.input_ids, "use_cache": False}
    if batch.cu_seqlens is not None:
        longest = int(batch.cu_seqlens.diff().max())
        inputs |= {"position_ids": batch.position_ids, "max_length_q": longest, "max_length_k": longest}
        inputs |= {"cu_seq_lens_q": batch.cu_seqlens, "cu_seq_lens_k": batch.cu_seqlens}
    body = getattr(model, "run_body", None)
    return (body(**inputs) if body else run_body(model, **inputs)).flatten(0, 1)


def head_weight(model: PreTrainedModel) -> Tensor:
    """The head [V, H], the embedding itself where the two are tied. Sharded: valid after `hidden_states`."""
    head = model.get_output_embeddings()
    assert head is not None
    return head.weight


@torch.no_grad()
def kept_logprobs(model: PreTrainedModel, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs [K] of the trained tokens under softmax(logits / temperature), and the entropies [K] there."""
    hidden = hidden_states(model, batch)
    return token_logprobs(hidden, head_weight(model), batch.kept, batch.targets, temperature)


def release(model: nn.Module) -> None:
    """Free what a sharded model's last forward gathered; no-op for others.

    Needed after a forward that no backward follows: the root group stays gathered until then, so `parameters()` shows
    its cast copies, and the next forward would use them even if an optimiser or a checkpoint has changed the shards.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def full_parameters(model: nn.Module, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """(name, full tensor) of every parameter, for `Engine.load_weights` and export; LoRA merged into its base.

    A collective where the model is sharded: every rank must exhaust it, and gets the same names in the same order.
    A tied head comes once, as embedding. Shards are gathered `GATHER_BYTES` at a time, and a bucket is complete on all
    ranks before its first tensor is handed out, so a slow receiver holds no collective open (huggingface/trl#7103).
    """
    release(model)
    for name, tensor in merged(model, _gathered(model)):
        yield name, tensor if dtype is None else tensor.to(dtype)


def _gathered(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, parameter in model.named_parameters():
        bucket.append((name, parameter.detach()))
        size += parameter.numel() * parameter.element_size()
        if size >= GATHER_BYTES:
            yield from _gather(bucket)
            bucket, size = [], 0
    yield from _gather(bucket)


def _gather(bucket: list[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """One all-gather per dtype for the shards of a bucket; plain tensors pass as they are."""
    full: dict[str, Tensor] = {name: tensor for name, tensor in bucket if not isinstance(tensor, DTensor)}
    sharded = [(name, tensor) for name, tensor in bucket if isinstance(tensor, DTensor)]
    for dtype in dict.fromkeys(tensor.dtype for _, tensor in sharded):
        full |= _all_gather([(name, tensor) for name, tensor in sharded if tensor.dtype == dtype])
    for name, _ in bucket:
        yield name, full.pop(name)


def _all_gather(shards: list[tuple[str, DTensor]]) -> dict[str, Tensor]:
    """FSDP gives rank r the rows [r * c, (r + 1) * c) with c = ceil(rows / ranks): the last ranks' blocks are padded
    here, and the padding is at the end of the gathered rows."""
    mesh = shards[0][1].device_mesh
    group = mesh.get_group(mesh.ndim - 1)  # replicas of a 2-D mesh hold the same shards
    ranks = mesh.size(mesh.ndim - 1)
    blocks, shapes = [], []
    for _, tensor in shards:
        local = tensor.to_local().to(mesh.device_type)  # offloaded shards come to the device that gathers
        rows = -(-tensor.shape[0] // ranks)
        block = local.new_zeros((rows, *tensor.shape[1:]))
        block[: len(local)] = local
        blocks.append(block.flatten())
        shapes.append(tensor.shape)
    mine = torch.cat(blocks)
    everyone = mine.new_empty((ranks, len(mine)))
    dist.all_gather(list(everyone), mine, group)
    parts = everyone.split([len(block) for block in blocks], dim=1)
    names = [name for name, _ in shards]
    return {
        name: part.reshape(-1, *shape[1:])[: shape[0]] for name, part, shape in zip(names, parts, shapes, strict=True)
    }


def model_folder(path: str) -> Path:
    folder = Path(path)
    try:
        names = {child.name for child in folder.iterdir()}
    except FileNotFoundError:
        raise ConfigError(f"model folder {path} does not exist (nothing is ever downloaded)") from None
    except OSError as error:
        reason = error.strerror
        raise ConfigError(f"model folder {path} cannot be read: {reason}; check path and rights") from error
    if "config.json" not in names:
        raise ConfigError(f"model folder {path} has no config.json; give a folder in Hugging Face layout")
    return folder


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


GATHER_BYTES = 256 * 2**20
"Full size of what `full_parameters` gathers at once: few collectives, and two such buffers of memory."
_LOGIT_TRANSFORMS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ATTENTIONS: dict[str, Any] = {name: name for name in ("eager", "sdpa", "varlen", "flash_attention_2")}
