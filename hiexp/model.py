"""The language model as the trainer sees it: load it, score tokens with it, hand its weights out.

Nothing is ever downloaded: a model is a folder. Models are loaded in evaluation mode and stay there:
dropout would make the log-probs of one token differ between two passes over the same weights.
"""

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as hf_logging

from hiexp.batching import Batch
from hiexp.config import ConfigError, lookup


@dataclass(frozen=True)
class ModelConfig:
    path: str
    "folder with config.json, weights and tokenizer in Hugging Face layout"
    dtype: str = "float32"
    "float32 or bfloat16; log-probs and loss are float32 either way"
    attention: str = "sdpa"
    "sdpa (5 % faster than eager on a CPU, and linear memory) or eager"

    def __post_init__(self) -> None:
        lookup(DTYPES, self.dtype, "dtype")
        lookup(ATTENTIONS, self.attention, "attention")


def load_causal_lm(cfg: ModelConfig) -> PreTrainedModel:
    """The model of a folder; ConfigError if the folder, its weights or the attention kernel are not there."""
    folder = _model_folder(cfg.path)
    hf_logging.disable_progress_bar()  # bars of milliseconds; what takes time has ours
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=DTYPES[cfg.dtype],
            attn_implementation=ATTENTIONS[cfg.attention],
            local_files_only=True,
            trust_remote_code=False,  # explicit: left out, transformers asks on the terminal
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        raise ConfigError(f"cannot load a language model from {cfg.path}: {_one_line(error)}") from error
    model, report = loaded
    missing = sorted(report["missing_keys"])
    if missing:  # transformers would go on with random values
        raise ConfigError(f"{cfg.path} lacks {len(missing)} weights ({missing[0]}, ...); copy all of it")
    transforms = [name for name in _LOGIT_TRANSFORMS if getattr(model.config, name, None) not in (None, 1)]
    if transforms:  # kept_logprobs applies the plain head
        raise ConfigError(f"{cfg.path}: {transforms[0]} changes the logits after the head: not supported")
    return model.eval()


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder; ConfigError if there is none."""
    folder = _model_folder(path)
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


def frozen_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A reference: the same weights in other memory, never trained."""
    return copy.deepcopy(model).requires_grad_(False).eval()


def kept_logprobs(model: PreTrainedModel, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs [K] of the trained tokens under softmax(logits / temperature), and the entropies [K] there.

    The body runs over all positions, the head over the kept ones only. The entropy carries no gradient.
    """
    # No mask: with right padding the causal one is exact. No cache: it costs memory, and transformers 5.19 mixes
    # packed rows without a warning when it has one.
    hidden = model.base_model(input_ids=batch.input_ids, use_cache=False).last_hidden_state
    head = model.get_output_embeddings()
    assert head is not None
    logits = head(hidden.flatten(0, 1)[batch.kept]).float()
    logprobs = torch.log_softmax(logits / temperature if temperature != 1.0 else logits, dim=-1)
    with torch.no_grad():
        entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
    return logprobs.gather(1, batch.targets[:, None]).squeeze(1), entropy


def full_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every parameter, for `Engine.load_weights`; a tied head comes once, as embedding."""
    for name, parameter in model.named_parameters():
        yield name, parameter.detach()


def _model_folder(path: str) -> Path:
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


_LOGIT_TRANSFORMS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ATTENTIONS: dict[str, Any] = {name: name for name in ("eager", "sdpa")}
