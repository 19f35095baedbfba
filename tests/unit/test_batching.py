"""Where trained tokens stand and what they weigh. Must fail if `kept` is off by one or micro-batches take a mean."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hiexp.batching import Batch, Layout, micro_batches, trajectory_row, weigh
from hiexp.trajectory import Segment, Source, Trajectory

SOURCES = list(Source)


def trajectory(*parts: tuple[Source, list[int]], name: str = "q") -> Trajectory:
    one = Trajectory(name)
    for source, ids in parts:
        logprobs = tuple(-float(i) for i in ids) if source is Source.POLICY else ()
        one.append(Segment(source, tuple(ids), logprobs))
    return one


def with_tokens(count: int) -> Trajectory:
    return trajectory((Source.PROMPT, [1]), (Source.POLICY, [5] * count))


def pack(trajectories, advantages, budget: int, weighting: str, constant: int = 0, **layout) -> list[Batch]:
    rows = [trajectory_row(*pair) for pair in zip(trajectories, advantages, strict=True)]
    return micro_batches(weigh(rows, weighting, constant), Layout(budget, **layout))


def total(batches: list[Batch], values: list[float]) -> float:
    """Loss of sequences with one value each, in the order given."""
    return sum(float((b.token_weights * torch.tensor(values)[b.advantages.long()]).sum()) for b in batches)


def test_the_worked_example_of_the_module():
    one = trajectory(
        (Source.PROMPT, [11, 12]),
        (Source.POLICY, [31, 32]),
        (Source.DOCUMENT, [41]),
        (Source.POLICY, [33]),
        (Source.DOCUMENT, [42]),
    )
    (batch,) = pack([one], [0.5], 100, "token")
    assert batch.input_ids.tolist() == [[11, 12, 31, 32, 41]]
    assert batch.kept.tolist() == [1, 2, 4]
    assert batch.targets.tolist() == [31, 32, 33]
    assert batch.sequence.tolist() == [0, 0, 0]
    assert batch.advantages.tolist() == [0.5] * 3
    assert batch.token_weights.tolist() == pytest.approx([1 / 3] * 3)
    assert batch.rollout_logprobs.tolist() == [-31.0, -32.0, -33.0]


def test_B23_only_policy_tokens_of_every_turn_are_targets():
    turns = [
        part
        for turn in range(3)
        for part in (
            (Source.POLICY, [100 + turn] * 3),
            (Source.DOCUMENT, [200 + turn] * 4),
            (Source.EXPERIENCE, [300]),
            (Source.NOTICE, [400]),
            (Source.POLICY, [110 + turn] * 2),
        )
    ]
    one = trajectory((Source.PROMPT, [1, 2]), (Source.EXPERIENCE, [3]), *turns)
    (batch,) = pack([one], [1.0], 100, "token")
    assert batch.targets.tolist() == [t for turn in range(3) for t in [100 + turn] * 3 + [110 + turn] * 2]


def test_padding_is_known_by_length_and_never_by_a_token():
    short, long = trajectory((Source.PROMPT, [0]), (Source.POLICY, [0, 7, 0])), with_tokens(6)
    (batch,) = pack([short, long], [1.0, 2.0], 100, "token")
    assert batch.input_ids.tolist() == [[1, 5, 5, 5, 5, 5], [0, 0, 7, 0, 0, 0]]
    assert batch.targets[batch.sequence == 1].tolist() == [0, 7, 0]  # the last token, 0 as any pad or end, is trained


@pytest.mark.parametrize("budget", [1, 100])
def test_B34_token_and_sequence_means_do_not_depend_on_the_split(budget):
    rows = [with_tokens(6), with_tokens(2)]
    tokens = pack(rows, [0.0, 1.0], budget, "token")
    assert len(tokens) == (2 if budget == 1 else 1)
    assert total(tokens, [1.0, 5.0]) == pytest.approx(2.0)
    assert total(pack(rows, [0.0, 1.0], budget, "sequence"), [1.0, 5.0]) == pytest.approx(3.0)


def test_B37_a_short_last_micro_batch_weighs_what_its_rows_weigh():
    rows = [with_tokens(4) for _ in range(7)]
    batches = pack(rows, [1.0] * 7, 12, "token")
    assert [len(batch.input_ids) for batch in batches] == [3, 3, 1]
    weights = torch.cat([batch.token_weights for batch in batches])
    torch.testing.assert_close(weights, torch.full((28,), 1 / 28))


def test_B32_B83_trajectories_without_policy_tokens_take_no_row_and_no_share():
    empty = trajectory((Source.PROMPT, [1, 2, 3]), (Source.NOTICE, [4]))
    for weighting in ("token", "sequence"):
        (batch,) = pack([empty, with_tokens(2)], [9.0, 1.0], 100, weighting)
        assert len(batch.input_ids) == 1
        assert batch.token_weights.tolist() == [0.5, 0.5]
    assert pack([empty, empty], [1.0, 1.0], 100, "token") == []


def test_weighting_constant_divides_by_rows_and_constant():
    (batch,) = pack([with_tokens(3), with_tokens(1)], [0.0, 1.0], 100, "constant", constant=8)
    assert batch.token_weights.tolist() == pytest.approx([1 / 16] * 4)


def test_errors_name_the_sample_and_the_mismatch():
    with pytest.raises(ValueError, match="q17"):
        pack([trajectory((Source.POLICY, [1, 2]), name="q17")], [1.0], 100, "token")
    with pytest.raises(ValueError):
        pack([with_tokens(2)], [1.0, 2.0], 100, "token")


part = st.tuples(st.sampled_from(SOURCES), st.lists(st.integers(0, 30), min_size=1, max_size=6))


@settings(deadline=None, max_examples=80)
@given(st.lists(st.lists(part, max_size=6), max_size=8), st.integers(1, 60), st.sampled_from(["token", "sequence"]))
def test_every_policy_token_is_a_target_once_and_the_weights_sum_to_one(rows, budget, weighting):
    trajectories = [trajectory((Source.PROMPT, [i, 99]), *row) for i, row in enumerate(rows)]
    batches = pack(trajectories, list(range(len(rows))), budget, weighting)
    seen: dict[int, list[int]] = {}
    for batch in batches:
        height, width = batch.input_ids.shape
        assert height == 1 or height * width <= budget
        flat = batch.input_ids.flatten()
        for row, position, target, owner in zip(
            batch.sequence.tolist(), batch.kept.tolist(), batch.targets.tolist(), batch.advantages.tolist(), strict=True
        ):
            ids = trajectories[int(owner)].token_ids
            column = position - row * width
            assert 0 <= column < width
            assert batch.input_ids[row, : column + 1].tolist() == ids[: column + 1]  # everything before, nothing after
            assert ids[column + 1] == target and flat[position] == ids[column]
            seen.setdefault(int(owner), []).append(column + 1)
    wanted = {i: [p for p, kept in enumerate(one.response_mask) if kept] for i, one in enumerate(trajectories)}
    assert seen == {i: positions for i, positions in wanted.items() if positions}
    if batches:
        assert float(torch.cat([batch.token_weights for batch in batches]).sum()) == pytest.approx(1.0, abs=1e-5)
        shares = torch.zeros(len(rows))
        for batch in batches:
            shares.index_add_(0, batch.advantages.long(), batch.token_weights)
        if weighting == "sequence":
            assert shares[shares > 0].tolist() == pytest.approx([1 / len(seen)] * len(seen), abs=1e-5)
