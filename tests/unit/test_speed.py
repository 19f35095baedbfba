"""Costs against torch's FLOP counter; must fail if a weight matrix, the causal half or the backward pass is lost."""

import pytest
import torch
from support import build_tiny_model
from torch.utils.flop_counter import FlopCounterMode

from hiexp.speed import CostModel, cost_model, peak_flops, speed_metrics


def counted(model, length, kept):
    """(body and head, attention) FLOPs of one forward and backward pass as torch counts them; attention in full."""
    ids = torch.randint(0, model.config.vocab_size, (1, length))
    with FlopCounterMode(display=False) as counter:
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        model.lm_head(hidden[0, :kept]).sum().backward()
    by_operator = counter.get_flop_counts()["Global"]
    attention = sum(count for operator, count in by_operator.items() if "bmm" in str(operator))
    return counter.get_total_flops() - attention, attention


@pytest.mark.parametrize("shape", [{}, {"num_key_value_heads": 4, "num_hidden_layers": 3, "vocab_size": 999}])
def test_costs_are_those_that_torch_counts(shape):
    model = build_tiny_model(**shape)
    costs = cost_model(model.config)
    for length, kept in ((48, 12), (96, 96)):
        matrices, attention = counted(model, length, kept)
        assert costs.body_per_token * length + costs.head_per_kept * kept == pytest.approx(matrices, rel=1e-12)
        # eager attention also forms the half that the causal mask hides; rotary tables are a sliver of a product
        assert costs.attention_per_token_squared * length**2 == pytest.approx(attention / 2, rel=0.01)


def test_a_head_width_of_its_own_counts():
    model = build_tiny_model()
    plain = cost_model(model.config)
    model.config.head_dim = 16  # twice 32 / 4
    wide = cost_model(model.config)
    assert wide.attention_per_token_squared == 2 * plain.attention_per_token_squared
    assert wide.body_per_token - plain.body_per_token == 6 * 2 * (2 * 32 * 32 + 2 * 32 * 16)


def test_cost_of_a_sequence_adds_its_three_parts():
    assert CostModel(10.0, 0.5, 100.0).cost(length=8, kept=3) == 80 + 32 + 300


def test_a_device_is_known_by_whole_words():
    names = {
        "NVIDIA H200": 989.5e12,
        "NVIDIA H20": 148e12,
        "NVIDIA H100 80GB HBM3": 989.5e12,
        "NVIDIA H100 PCIe": 756e12,
        "NVIDIA A100-SXM4-80GB": 312e12,
        "NVIDIA B200": 2250e12,
        "NVIDIA GB200": 2500e12,
        "NVIDIA GeForce RTX 3060": None,
        "cpu": None,
    }
    assert {name: peak_flops(name) for name in names} == names


def test_rates_of_a_step():
    spent = {"time/update": 5.0, "time/logprobs": 1.0}
    rates = speed_metrics(spent, 10.0, flops=8 * 989.5e12, trained=300, tokens=1000, devices=4, name="NVIDIA H200")
    assert rates == {
        "time/step": 10.0,
        "time/tokens_per_second": 100.0,
        "time/trained_tokens_per_second": 30.0,
        "time/mfu": 0.5,
    }
    assert "time/mfu" not in speed_metrics(spent, 10.0, 1e12, 300, 1000, 1, "cpu")
    assert "time/mfu" not in speed_metrics({}, 10.0, 1e12, 300, 1000, 1, "NVIDIA H200"), "nothing was updated"
