"""Which rank takes which rows, and that the number of ranks changes neither rows nor weights nor the gradient.

Must fail if a row is lost or doubled, if ranks get unequal numbers of micro-batches, if a budget is exceeded, or if a
mean is taken over ranks or micro-batches.
"""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen2Config, Qwen2ForCausalLM

from hiexp.batching import Batch, Layout, Row, karmarkar_karp, micro_batches, plan, weigh
from hiexp.fused import fused_loss
from hiexp.model import head_weight, hidden_states

lengths = st.lists(st.integers(1, 40), max_size=24)


@settings(max_examples=150)
@given(lengths, st.integers(1, 8), st.integers(1, 90), st.booleans())
def test_a_plan_gives_every_row_once_and_every_rank_as_many_micro_batches(sizes, world, budget, packed):
    pairs = [(size, size * (size + 20.0)) for size in sizes]
    layout = Layout(budget, packed, world_size=world)
    got = plan(pairs, layout)
    assert len(got) == world and len({len(parts) for parts in got}) == 1
    assert sorted(index for parts in got for part in parts for index in part) == list(range(len(sizes)))
    for part in (part for parts in got for part in parts):
        used = [sizes[index] for index in part]
        assert len(used) <= 1 or (sum(used) if packed else len(used) * max(used)) <= budget
    for parts in got:
        assert [] not in parts or all(
            len(part) <= 1 for part in parts
        )  # halved as long as there was something to halve
    assert got == plan(pairs, layout)
    other = plan(pairs, Layout(budget, packed, rank=world - 1, world_size=world))
    assert other == got  # every rank plans the same for all


def test_a_plan_packs_and_does_not_make_micro_batches_without_need():
    pairs = [(10, 10.0)] * 12
    assert [len(parts) for parts in plan(pairs, Layout(40, packed=True))] == [3]
    assert [len(parts) for parts in plan(pairs, Layout(40, world_size=3))] == [1, 1, 1]
    mixed = [(30, 30.0), (20, 20.0), (10, 10.0), (10, 10.0), (10, 10.0)]
    assert len(plan(mixed, Layout(40, packed=True))[0]) == 2  # 30 + 10, 20 + 10 + 10: without a hole
    assert len(plan(mixed, Layout(60))[0]) == 2  # 30 + 20 in rows of 30, then three rows of 10


def test_a_rank_without_enough_rows_halves_and_then_takes_empty_ones():
    pairs = [(10, 12.0), (10, 12.0), (4, 9.0), (4, 9.0), (4, 9.0)]  # one rank gets two long rows, one three short ones
    got = plan(pairs, Layout(12, world_size=2))
    assert sorted(sorted(map(len, parts)) for parts in got) == [[1, 1], [1, 2]]
    got = plan([(5, 5.0)], Layout(10, world_size=3))
    assert sorted(parts for parts in got) == [[[]], [[]], [[0]]]
    assert plan([], Layout(10, world_size=2)) == [[], []]


def greedy(costs: list[float], parts: int) -> list[float]:
    sums = [0.0] * parts
    for cost in sorted(costs, reverse=True):
        sums[sums.index(min(sums))] += cost
    return sums


@pytest.mark.parametrize("world", [2, 3, 8])
def test_karmarkar_karp_is_as_even_as_greedy_or_better(world):
    draw, better, worse = random.Random(0), 0, 0
    for _ in range(60):
        costs = [draw.lognormvariate(7, 0.8) for _ in range(draw.randint(2 * world, 12 * world))]
        groups = karmarkar_karp(costs, world)
        assert sorted(index for group in groups for index in group) == list(range(len(costs)))
        assert groups == karmarkar_karp(costs, world)
        heaviest, other = max(sum(costs[i] for i in group) for group in groups), max(greedy(costs, world))
        lower_bound = max(max(costs), sum(costs) / world)
        assert heaviest <= 4 / 3 * lower_bound + 1e-6
        assert heaviest <= 1.05 * other
        better += heaviest < other * (1 - 1e-9)
        worse += heaviest > other * (1 + 1e-9)
    assert better > 2 * worse


def test_karmarkar_karp_of_nothing_of_one_and_of_equals():
    assert karmarkar_karp([], 3) == [[], [], []]
    assert karmarkar_karp([5.0, 1.0], 1) == [[0, 1]]
    assert sorted(map(len, karmarkar_karp([1.0] * 12, 4))) == [3, 3, 3, 3]
    groups = karmarkar_karp([8.0, 7.0, 6.0, 5.0, 4.0], 2)  # the classic example: 16 and 14
    assert sorted(sum([8.0, 7.0, 6.0, 5.0, 4.0][i] for i in group) for group in groups) == [14.0, 16.0]


def make_rows(count: int, seed: int = 0) -> list[Row]:
    draw, rows = random.Random(seed), []
    for index in range(count):
        ids = [draw.randrange(30) for _ in range(draw.randint(3, 18))]
        trained = sorted(draw.sample(range(1, len(ids)), draw.randint(0, len(ids) // 2)))
        rows.append(Row(f"r{index}", ids, trained, draw.choice([-1.0, 0.5, 2.0]), [-1.0 - index] * len(trained)))
    return rows


def contents(batch: Batch) -> list[tuple]:
    """(target, advantage, weight, log-prob of the engine, the token before) of every trained token that counts."""
    before = batch.input_ids.flatten()[batch.kept]
    columns = (batch.targets, batch.advantages, batch.token_weights, batch.rollout_logprobs, before)
    return [row for row in zip(*(column.tolist() for column in columns), strict=True) if row[2] > 0]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("weighting", ["token", "sequence", "constant"])
def test_bug_34_the_number_of_ranks_changes_no_token_and_no_weight(weighting, packed):
    rows = weigh(make_rows(11), weighting, 9)
    (whole,) = micro_batches(rows, Layout(10**6))
    wanted = sorted(contents(whole))
    for world in range(1, 9):
        got, counts = [], set()
        for rank in range(world):
            mine = micro_batches(rows, Layout(30, packed, rank, world))
            counts.add(len(mine))
            got += [row for batch in mine for row in contents(batch)]
            assert all(len(batch.kept) for batch in mine)
        assert sorted(got) == wanted and len(counts) == 1


def tiny() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 30, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    return Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, tie_word_embeddings=True, initializer_range=0.3)).eval()


def gradient(model: Qwen2ForCausalLM, rows: list[Row], packed: bool, rank: int, world: int) -> torch.Tensor:
    """The gradient of one rank's part, all parameters in one vector."""
    model.zero_grad()
    for batch in micro_batches(rows, Layout(25, packed, rank, world)):
        slope = batch.token_weights * batch.advantages
        objective = lambda logprobs, entropy, at, slope=slope: (-slope[at] * logprobs, {})  # noqa: E731
        hidden = hidden_states(model, batch)
        fused_loss(hidden, head_weight(model), batch.kept, batch.targets, objective).loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("packed", [False, True])
def test_bug_35_fault_18_the_gradients_of_all_ranks_add_up_to_that_of_one(packed):
    """In one process; tests/dist has the averaging. With eight ranks some have nothing but padding."""
    model, rows = tiny(), weigh(make_rows(7), "token")
    wanted = gradient(model, rows, packed, 0, 1)
    for world in (2, 3, 8):
        parts = [gradient(model, rows, packed, rank, world) for rank in range(world)]
        torch.testing.assert_close(torch.stack(parts).sum(0), wanted, rtol=1e-5, atol=5e-7)
        assert world < 8 or any((part == 0).all() for part in parts)


@settings(max_examples=60)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=10), st.integers(1, 50))
def test_bug_37_the_weights_sum_to_what_their_name_says(counts, constant):
    rows = [Row(f"r{i}", [0] * (count + 1), list(range(1, count + 1))) for i, count in enumerate(counts)]
    filled = [count for count in counts if count]
    for weighting in ("token", "sequence", "constant"):
        got = weigh(rows, weighting, constant)
        assert [len(row.trained) for row in got] == filled
        shares = [row.weight * len(row.trained) for row in got]
        total = sum(filled) / (len(filled) * constant) if weighting == "constant" and filled else 1.0
        assert math.fsum(shares) == pytest.approx(total if filled else 0.0)
        if weighting == "sequence" and filled:
            assert shares == pytest.approx([1 / len(filled)] * len(filled))
        elif filled:
            assert len({row.weight for row in got}) == 1


def test_fault_18_a_rank_without_rows_gets_padding_of_no_weight():
    (row,) = weigh([Row("only", [5, 6, 7], [1, 2], 1.0, [-0.1, -0.2])], "token")
    for packed in (False, True):
        (real,), (ghost,) = (micro_batches([row], Layout(10, packed, rank, 2)) for rank in (0, 1))
        if not (real.token_weights > 0).any():
            real, ghost = ghost, real
        assert real.token_weights.tolist() == [0.5, 0.5]
        assert ghost.token_weights.tolist() == [0.0] and ghost.input_ids.tolist() == [[5]]
    assert micro_batches([], Layout(10, world_size=2)) == []
