"""LoRA alone and sharded: what is trained, what is handed out, and that the two agree.

Must fail if a base weight moves, if the merged weights are not what the model computes, or if ranks draw other updates.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from dist.harness import run_ranks
from support import build_tiny_model
from torch import Tensor

from hiexp.config import ConfigError
from hiexp.distributed import Context
from hiexp.fsdp import ShardConfig, load_sharded
from hiexp.lora import LoraConfig, insert_lora
from hiexp.model import ModelConfig, full_parameters, load_causal_lm, run_body

pytestmark = pytest.mark.dist
LORA = LoraConfig(rank=4, alpha=8.0)
IDS = torch.tensor([[1, 5, 9, 30, 2, 17]])


@pytest.fixture
def folder(tmp_path: Path) -> str:
    model = build_tiny_model(41, initializer_range=0.1)
    for layer in model.model.layers:  # Qwen2 starts with biases of 0, which would hide a lost one
        layer.self_attn.q_proj.bias.data.normal_()
    model.save_pretrained(tmp_path)
    return str(tmp_path)


def body(model: Any) -> Tensor:
    run = getattr(model, "run_body", None)
    return run(input_ids=IDS) if run else run_body(model, input_ids=IDS)


def train(model: Any, steps: int = 3) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.01, fused=True)
    for _ in range(steps):
        model.zero_grad()
        body(model).square()[..., 0].sum().backward()
        optimizer.step()
    model.zero_grad()


def train_sharded(ctx: Context, path: str, dtype: str, options: dict) -> dict[str, Tensor]:
    model = load_sharded(ModelConfig(path, dtype), ShardConfig(**options), ctx, LORA, seed=3)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if name.endswith(("lora_a", "lora_b"))}
    assert len(trained) == 2 * 7 * 2 and all(p.dtype == torch.float32 for p in model.parameters() if p.requires_grad)
    with torch.no_grad():
        base = load_causal_lm(ModelConfig(path, options.get("param_dtype", dtype)))
        assert torch.equal(body(model), body(base))  # B starts at 0
    train(model)
    got = dict(full_parameters(model))
    assert [(n, t.dtype, t.shape) for n, t in got.items()] == [
        (n, t.dtype, t.shape) for n, t in load_causal_lm(ModelConfig(path, dtype)).named_parameters()
    ]
    with torch.no_grad():
        wanted = body(model).float()
        plain = load_causal_lm(ModelConfig(path, dtype))
        assert not torch.equal(body(plain).float(), wanted)
        plain.load_state_dict(got, strict=False)
        assert float((body(plain).float() - wanted).abs().max()) < (1e-5 if dtype == "float32" else 0.05)
    return got


def test_merged_weights_are_what_the_model_computes_and_only_targets_move(folder):
    got = train_sharded(Context(), folder, "float32", {})
    for name, before in load_causal_lm(ModelConfig(folder)).named_parameters():
        moved = name.endswith("proj.weight")
        assert torch.equal(got[name], before) != moved, name
        if moved:
            assert torch.linalg.matrix_rank((got[name] - before).detach(), rtol=1e-4) <= LORA.rank


@pytest.mark.parametrize("world_size", [1, 2])
def test_sharded_lora_trains_as_alone_and_alike_on_all_ranks(folder, world_size):
    alone = train_sharded(Context(), folder, "float32", {})
    options = {"cpu_offload": True, "checkpoint_layers": True}
    for got in run_ranks(train_sharded, world_size, folder, "float32", options):
        assert all(float((got[name] - alone[name]).abs().max()) < 1e-5 for name in alone)


def test_a_bfloat16_base_trains_float32_updates(folder):
    first, second = run_ranks(train_sharded, 2, folder, "bfloat16", {"param_dtype": "bfloat16"})
    assert all(torch.equal(first[name], second[name]) for name in first)
    train_sharded(Context(), folder, "bfloat16", {"param_dtype": "bfloat16"})


def test_targets_that_are_not_there_are_refused_and_rank_0_is_off(folder):
    for target in ("qkv_proj", "lm_head"):  # the loss reads the head's weight, so an update there would be ignored
        with pytest.raises(ConfigError, match=f"{target} is no linear layer of the body; it has q_proj, k_proj"):
            insert_lora(build_tiny_model(), LoraConfig(4, targets=("q_proj", target)))
    for changes in ({"rank": -1}, {"alpha": 0.0}):
        with pytest.raises(ConfigError, match=next(iter(changes))):
            LoraConfig(**changes)
    model = load_sharded(ModelConfig(folder), ShardConfig(), Context(), LoraConfig())
    assert all(parameter.requires_grad for parameter in model.parameters())
