"""Packed, padded and alone are one computation, for every attention that runs on a CPU.

Must fail if packed sequences see each other, if positions run on, if a mask is aligned to the wrong corner, or if
gradients leak between sequences.
"""

import itertools

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from hiexp import attention
from hiexp.attention import varlen_attention
from hiexp.batching import Batch, Layout, Row, halves, micro_batches
from hiexp.fused import fused_loss
from hiexp.model import head_weight, hidden_states, kept_logprobs

attention.register()
attention.register()  # changes nothing
NAMES = ["eager", "sdpa", "varlen"]


def tiny(name: str, key_heads: int = 2) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": key_heads, "max_position_embeddings": 64}
    config = Qwen2Config(**sizes, **heads, tie_word_embeddings=True, initializer_range=0.3)
    config._attn_implementation = name
    return Qwen2ForCausalLM(config).eval()


def rows(*lengths: int) -> list[Row]:
    g = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, 40, (length,), generator=g).tolist() for length in lengths]
    trained = [[p for p in range(1, length) if p % 3 or p + 1 == length] for length in lengths]
    return [
        Row(f"row{i}", x, t, float(i), [-0.1 * i - 0.01 * p for p in t], weight=1 / (i + 1))
        for i, (x, t) in enumerate(zip(ids, trained, strict=True))
    ]


def batches(data: list[Row], packed: bool, budget: int = 1000) -> list[Batch]:
    return micro_batches(data, Layout(budget, packed))


def gradient(model: Qwen2ForCausalLM, parts: list[Batch]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    for batch in parts:
        weights = batch.token_weights
        objective = lambda logprobs, entropy, at, weights=weights: (weights[at] * (entropy - logprobs), {})  # noqa: E731
        hidden = hidden_states(model, batch)
        fused_loss(hidden, head_weight(model), batch.kept, batch.targets, objective).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def by_row(model: Qwen2ForCausalLM, parts: list[Batch]) -> dict[int, list[float]]:
    values: dict[int, list[float]] = {}
    for batch in parts:
        logprobs = kept_logprobs(model, batch, 0.7)[0]
        for owner in batch.advantages.unique():
            values[int(owner)] = logprobs[batch.advantages == owner].tolist()
    return values


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_bug_49_packed_padded_and_alone_are_equal_with_their_gradients(name, key_heads):
    model, data = tiny(name, key_heads), rows(4, 3, 19, 2, 11)
    alone = [batch for row in data for batch in batches([row], packed=False)]
    wanted, slopes = by_row(model, alone), gradient(model, alone)
    judge = by_row(tiny("eager", key_heads), alone)
    for packed, budget in ((False, 1000), (True, 1000), (True, 20), (False, 40)):
        parts = batches(data, packed, budget)
        got = by_row(model, parts)
        for index in range(len(data)):
            assert got[index] == pytest.approx(wanted[index], abs=1e-5)
            assert got[index] == pytest.approx(judge[index], abs=1e-5)
        for parameter, slope in gradient(model, parts).items():
            torch.testing.assert_close(slope, slopes[parameter], rtol=1e-5, atol=1e-5 * float(slope.abs().max()))


@pytest.mark.parametrize("name", NAMES)
def test_bug_49_a_packed_neighbour_can_be_anything(name):
    model, data = tiny(name), rows(6, 6)
    (batch,) = batches(data, packed=True)
    before = kept_logprobs(model, batch, 1.0)[0]
    batch.input_ids[0, :5] = 39  # the first sequence; the second must not notice
    after = kept_logprobs(model, batch, 1.0)[0]
    assert torch.equal(before[batch.sequence == 1], after[batch.sequence == 1])
    assert not torch.equal(before[batch.sequence == 0], after[batch.sequence == 0])


def test_bug_49_bug_50_positions_restart_and_boundaries_are_those_of_the_rows():
    (batch,) = batches(rows(5, 4), packed=True)
    assert batch.position_ids is not None and batch.cu_seqlens is not None
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2]]  # four and three positions: the last is only a target
    assert batch.cu_seqlens.tolist() == [0, 4, 7] and batch.cu_seqlens.dtype == torch.int32
    (padded,) = batches(rows(5, 4), packed=False)
    assert padded.position_ids is None and padded.cu_seqlens is None and padded.input_ids.shape == (2, 4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("pads", [0, 5])
def test_bug_50_pads_on_the_right_change_no_log_prob(name, pads):
    model, (row,) = tiny(name), rows(9)
    (batch,) = batches([row], packed=False)
    wanted = kept_logprobs(model, batch, 1.0)[0]
    padded = torch.nn.functional.pad(batch.input_ids, (0, pads), value=7)
    got = kept_logprobs(model, Batch(**(batch.tensors() | {"input_ids": padded})), 1.0)[0]
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)


def eager(query, key, value, scaling, bounds):
    """One sequence at a time, all scores, the causal mask by hand."""
    parts = []
    for start, end in itertools.pairwise(bounds):
        q, k, v = (x[:, :, start:end].double() for x in (query, key, value))
        repeat = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        scores = q @ k.transpose(-1, -2) * scaling
        later = torch.ones(end - start, end - start, dtype=torch.bool).triu(1)
        parts.append(scores.masked_fill(later, -torch.inf).softmax(-1) @ v)
    return torch.cat(parts, dim=2).transpose(1, 2)


@pytest.mark.parametrize("bounds", [[0, 7], [0, 4, 7], [0, 1, 2, 7]])
def test_varlen_attention_is_causal_attention_within_each_sequence(bounds):
    g = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 7, 8, generator=g, requires_grad=True) for heads in (4, 2, 2))
    boundaries = {"cu_seq_lens_q": torch.tensor(bounds, dtype=torch.int32), "max_length_q": 7}
    out, _ = varlen_attention(torch.nn.Module(), query, key, value, None, scaling=0.3, **boundaries, dropout=0.0)
    wanted = eager(query, key, value, 0.3, bounds)
    assert out.shape == (1, 7, 4, 8)
    torch.testing.assert_close(out, wanted.float(), rtol=0, atol=1e-5)
    weight = torch.randn(out.shape, generator=g)
    got = torch.autograd.grad((out * weight).sum(), (query, key, value))
    for a, b in zip(got, torch.autograd.grad((wanted * weight).sum(), (query, key, value)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_varlen_attention_without_boundaries_takes_each_row_for_itself():
    g = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(3, heads, 5, 8, generator=g) for heads in (4, 2, 2))
    out, _ = varlen_attention(torch.nn.Module(), query, key, value, None, scaling=0.3)
    torch.testing.assert_close(out, eager(query, key, value, 0.3, [0, 5]).float(), rtol=0, atol=1e-5)


def test_bug_104_unequal_lengths_and_masks_are_refused():
    query, key = torch.randn(1, 2, 2, 8), torch.randn(1, 2, 5, 8)
    with pytest.raises(ValueError, match="no cache"):
        varlen_attention(torch.nn.Module(), query, key, key, None)
    with pytest.raises(ValueError, match="no mask"):
        varlen_attention(torch.nn.Module(), key, key, key, torch.ones(1, 1, 5, 5))


@pytest.mark.parametrize("packed", [True, False])
def test_halves_are_the_same_sequences_with_what_was_filled_in(packed):
    data = rows(4, 3, 19, 2, 11)
    (batch,) = batches(data, packed)
    batch.old_logprobs = torch.arange(len(batch.kept)).float()
    parts = halves(batch)
    assert [len(part.input_ids) if not packed else len(part.cu_seqlens) - 1 for part in parts] == [2, 3]
    model = tiny("varlen")
    for name, values in batch.tensors().items():
        if name not in ("input_ids", "kept", "sequence", "cu_seqlens", "position_ids"):
            assert torch.equal(torch.cat([getattr(part, name) for part in parts]), values), name
    got = torch.cat([kept_logprobs(model, part, 1.0)[0] for part in parts])
    torch.testing.assert_close(got, kept_logprobs(model, batch, 1.0)[0], rtol=0, atol=1e-5)
    for part in parts:
        assert part.sequence.unique().tolist() == list(range(int(part.sequence.max()) + 1))
        if part.cu_seqlens is not None and part.position_ids is not None:
            lengths = part.cu_seqlens.diff().tolist()
            assert part.cu_seqlens[0] == 0 and sum(lengths) == part.input_ids.shape[1]
            assert part.position_ids[0].tolist() == [p for length in lengths for p in range(length)]
    quarters = [quarter for part in parts for quarter in halves(part)]
    (single,) = halves(quarters[0])
    assert single is quarters[0] and len(quarters) == 4
    slopes = gradient(model, [batch])
    for name, slope in gradient(model, quarters).items():
        torch.testing.assert_close(slope, slopes[name], rtol=1e-5, atol=1e-6 * float(slope.abs().max()) + 1e-6)
