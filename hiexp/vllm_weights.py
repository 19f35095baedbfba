"""The trainer's tensors and vLLM's: which rows are which, what may be sent, and whether it has arrived."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from hiexp.config import ConfigError

COMPARED_ROWS = 16
"""rows of every tensor that are compared after a sync"""


class WeightMap:
    """Where each tensor of a Hugging Face model lies in vLLM's, which keeps q, k and v as rows of one matrix."""

    def __init__(self, skeleton: Any, model: Any) -> None:
        parameters = dict(skeleton.named_parameters(remove_duplicate=False))
        self.shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        first: dict[int, str] = {}
        self.first = {name: first.setdefault(id(parameter), name) for name, parameter in parameters.items()}
        """name -> the first of the names that are tied with it"""
        self.places = {name: self._place(name, model.packed_modules_mapping) for name in parameters}
        strange = {target for target, _, _ in self.places.values()} - set(_parameters(model))
        if strange:
            raise ConfigError(
                f"vLLM's {type(model).__name__} has no {min(strange)}; this model needs engine.kind=torch"
            )

    def checked(
        self, named_tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype, version: int, sent: dict[str, Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """Pass tensors on to vLLM, each once; `sent` gets a sample of each. ValueError as TorchEngine.load_weights."""
        for name, tensor in named_tensors:
            if self.shapes.get(name) != tuple(tensor.shape):
                raise ValueError(
                    f"weight {name} of shape {tuple(tensor.shape)} does not fit the engine's model "
                    f"({self.shapes.get(name, 'absent')})"
                )
            if (first := self.first[name]) not in sent:
                tensor = tensor.detach().to(dtype)
                sent[first] = tensor[_sampled_rows(tensor, version)].clone()
                yield first, tensor
        missing = sorted(set(self.first.values()) - set(sent))
        if missing:
            raise ValueError(f"weights not given: {', '.join(missing[:3])} ({len(missing)} in all)")

    def compare(self, model: Any, version: int, sent: dict[str, Tensor]) -> None:
        """RuntimeError if a sampled row differs from what was sent, bit for bit.

        Of tensors that are split among tensor-parallel ranks a rank holds a part: there the whole ones (the norms) are
        compared. [untested]
        """
        held = _parameters(model)
        for name, shape in self.shapes.items():
            target, offset, rows = self.places[name]
            weight, sample = held[target], sent[self.first[name]]
            if weight.shape[0] < rows or weight.shape[1:] != shape[1:]:
                continue
            part = weight[offset : offset + shape[0]]
            if not torch.equal(part[_sampled_rows(part, version)].to(sample.device), sample):
                raise RuntimeError(f"sync to version {version}: the engine's {name} is not what the trainer sent")

    def _place(self, name: str, packed: dict[str, list[str]]) -> tuple[str, int, int]:
        """(vLLM's name, first row there, rows there in all)."""
        for fused, parts in packed.items():
            for i, part in enumerate(parts):
                if f".{part}." in name:
                    siblings = [name.replace(f".{part}.", f".{other}.") for other in parts]
                    rows = [self.shapes[other][0] for other in siblings]
                    return name.replace(f".{part}.", f".{fused}."), sum(rows[:i]), sum(rows)
        return name, 0, self.shapes[name][0]


def skeleton_of(folder: str) -> Any:
    """The Hugging Face model of a folder without its weights: names, shapes, ties, eos."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    if (Path(folder) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model


def _sampled_rows(tensor: Tensor, version: int) -> Tensor:
    """Row numbers, evenly spread, other ones for every version."""
    count = len(tensor)
    spread = torch.arange(min(COMPARED_ROWS, count), device=tensor.device) * count // min(COMPARED_ROWS, count)
    return (spread + version) % count


def _parameters(model: Any) -> dict[str, Tensor]:
    return dict(model.named_parameters(remove_duplicate=False))
