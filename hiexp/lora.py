"""LoRA (Hu et al. 2021, arXiv 2106.09685): y = x W' + (alpha / rank) x A' B' with W frozen, A and B trained.

The base keeps its parameter names and `merged` folds A and B into it, so that engines and exports see a plain model.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hiexp.config import ConfigError


@dataclass(frozen=True)
class LoraConfig:
    rank: int = 0
    "width of the update; 0 trains all weights instead"
    alpha: float = 32.0
    "the update is scaled by alpha / rank"
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    "names of the linear layers that get one; never the head"

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ConfigError(f"rank={self.rank} must be 0 (off) or above")
        if self.rank and not self.targets:
            raise ConfigError("targets=[] leaves nothing to train; name linear layers, or set rank=0")
        if not 0 < self.alpha < math.inf:
            raise ConfigError(f"alpha={self.alpha} must be above 0")


class LoraLinear(nn.Linear):
    """A frozen `base` with a trained float32 update, which `start_values` are for."""

    def __init__(self, base: nn.Linear, cfg: LoraConfig) -> None:
        super().__init__(base.in_features, base.out_features, base.bias is not None, device="meta")
        self.weight, self.bias = base.weight, base.bias
        device = base.weight.device
        self.lora_a = nn.Parameter(torch.zeros(cfg.rank, base.in_features, dtype=torch.float32, device=device))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, cfg.rank, dtype=torch.float32, device=device))
        self.scale = cfg.alpha / cfg.rank

    def forward(self, input: Tensor) -> Tensor:
        update = nn.functional.linear(nn.functional.linear(input.to(self.lora_a.dtype), self.lora_a), self.lora_b)
        return super().forward(input) + (self.scale * update).to(input.dtype)


def insert_lora(model: PreTrainedModel, cfg: LoraConfig) -> None:
    """Freeze `model` in place and give its target layers an A and a B, both 0; ConfigError if a target is not there."""
    head = model.get_output_embeddings()
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear) and child is not head  # the loss reads the head's weight and calls no layer
    ]
    absent = sorted(set(cfg.targets) - {name for _, name, _ in found})
    if absent:
        known = ", ".join(dict.fromkeys(name for _, name, _ in found))
        raise ConfigError(f"targets={list(cfg.targets)}: {absent[0]} is no linear layer of the body; it has {known}")
    widest = min(min(c.in_features, c.out_features) for _, name, c in found if name in cfg.targets)
    if cfg.rank > widest:
        raise ConfigError(f"rank={cfg.rank} is above the {widest} of the narrowest target layer; lower it")
    model.requires_grad_(False)
    for parent, name, child in found:
        if name in cfg.targets:
            setattr(parent, name, LoraLinear(child, cfg))


def start_values(model: nn.Module, seed: int) -> dict[str, Tensor]:
    """name -> full tensor for every A (uniform, as nn.Linear draws its weights) and B (0): a step that starts as the
    base. The same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    values = {}
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            bound = module.in_features**-0.5
            values[f"{name}.lora_a"] = torch.empty(module.lora_a.shape).uniform_(-bound, bound, generator=generator)
            values[f"{name}.lora_b"] = torch.zeros(module.lora_b.shape)
    return values


def merged(model: nn.Module, parameters: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Named full parameters in module order -> the same without A and B, whose product is in the base weight."""
    scales = {name: module.scale for name, module in model.named_modules() if isinstance(module, LoraLinear)}
    held: dict[str, Tensor] = {}
    for name, tensor in parameters:
        layer, _, kind = name.rpartition(".")
        if layer not in scales:
            yield name, tensor
            continue
        held[kind] = tensor
        if kind == "lora_b":  # the last of its layer
            weight = held["weight"]
            update = scales[layer] * (tensor @ held["lora_a"])
            yield f"{layer}.weight", (weight.to(update.dtype) + update).to(weight.dtype)
            if "bias" in held:
                yield f"{layer}.bias", held["bias"]
            held = {}
