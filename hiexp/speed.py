"""What a training step costs in floating-point operations, and what is made of it: tokens per second and MFU.

The counts are those of the algorithm (a multiply and an add are two): what a kernel repeats, pads or recomputes
under activation checkpointing is not counted, so that a faster way to the same gradient shows as a higher number.
`CostModel` also weighs sequences against each other when work is spread over ranks.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CostModel:
    """FLOPs of forward and backward over one sequence, split by what they grow with; see `cost_model`."""

    body_per_token: float
    """matrix products of the decoder layers"""
    attention_per_token_squared: float
    """scores and weighted sums of causal attention"""
    head_per_kept: float
    """LM head, on trained tokens alone"""

    def cost(self, length: int, kept: int) -> float:
        """FLOPs of a sequence of `length` tokens of which `kept` are trained."""
        return self.body_per_token * length + self.attention_per_token_squared * length**2 + self.head_per_kept * kept


def cost_model(config: Any) -> CostModel:
    """The costs of a dense decoder with gated MLP and grouped attention (Qwen2, Qwen3, Llama, Mistral) from its
    Hugging Face config: hidden width H, D layers, A = query heads x head width, B = key-value heads x head width,
    MLP width I, vocabulary V.

    A weight matrix costs 2 FLOPs per parameter and token forward and twice that backward (gradient of its input and
    of itself): 6 in all. The body has D (2HA + 2HB + 3HI) such parameters, norms and biases apart. Attention forms
    the scores QK^T and the sums PV: 2 x 2A L^2 forward over L tokens, half of it causal, three times that with the
    backward pass: 6 D A L^2. The head has HV parameters and meets trained tokens alone: 6 HV each. Embedding
    look-ups are free. A frozen policy with LoRA saves the weight gradients (4 instead of 6); that is not counted.
    """
    hidden, layers, heads = config.hidden_size, config.num_hidden_layers, config.num_attention_heads
    head_width = getattr(config, "head_dim", None) or hidden // heads
    query, pairs = heads * head_width, (getattr(config, "num_key_value_heads", None) or heads) * head_width
    layer = 2 * hidden * query + 2 * hidden * pairs + 3 * hidden * config.intermediate_size
    return CostModel(6.0 * layers * layer, 6.0 * layers * query, 6.0 * hidden * config.vocab_size)


def peak_flops(device_name: str) -> float | None:
    """Dense bfloat16 FLOP/s of a GPU as torch.cuda.get_device_name() calls it; None for one that is not in PEAK."""
    words = set(re.split(r"[^A-Z0-9]+", device_name.upper()))
    return next((peak for model, peak in PEAK.items() if set(model.split()) <= words), None)


def speed_metrics(
    metrics: Mapping[str, float], step_seconds: float, flops: float, trained: int, tokens: int, devices: int, name: str
) -> dict[str, float]:
    """Rates of one step from its counts over all ranks.

    `flops`: sum of `CostModel.cost` over the sequences that were trained on; `trained`: policy tokens among all the
    `tokens` of the step's trajectories; `name`: of the device, all `devices` being alike. MFU is `flops` over what the
    devices could have done while the policy was updated: metrics["time/update"] without the scoring passes inside it
    (metrics["time/logprobs"]). It is left out for a device that PEAK does not know, a CPU for example.
    """
    rates = {
        "time/step": step_seconds,
        "time/tokens_per_second": tokens / step_seconds,
        "time/trained_tokens_per_second": trained / step_seconds,
    }
    peak = peak_flops(name)
    learning = metrics.get("time/update", 0.0) - metrics.get("time/logprobs", 0.0)
    if peak and learning > 0:
        rates["time/mfu"] = flops / (learning * devices * peak)
    return rates


PEAK = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "GH200": 989.5e12,
    "H200": 989.5e12,
    "H20": 148e12,
    "H800": 989.5e12,
    "H100 PCIE": 756e12,
    "H100 NVL": 835e12,
    "H100": 989.5e12,
    "A800": 312e12,
    "A100": 312e12,
}
"""Words of the device name -> FLOP/s of dense bfloat16 matrix products (NVIDIA's data sheets, without sparsity)."""
