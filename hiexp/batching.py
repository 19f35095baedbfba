"""Trajectories -> micro-batches in which the trained tokens, and only those, are addressed.

Two layouts: rows of similar length padded on the right (under a causal mask a real token never sees the padding, so no
attention mask is needed and nothing is ever compared with a pad id), or rows end to end without padding (`packed`),
each starting at position 0 and blind to its neighbours. What comes later cannot tell which: hidden states are
flattened and `kept` indexes them. Worked example:

    token_ids     = [11, 12, 31, 32, 41, 33, 42]    prompt, policy, document, policy, unanswered document
    response_mask = [ F,  F,  T,  T,  F,  T,  F]
    input_ids     = [11, 12, 31, 32, 41]            up to the last token that predicts a trained one
    kept          = [     1,  2,      4]            where the hidden state stands that predicts ...
    targets       = [    31, 32,     33]            ... this token: the one shift in the code base
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from hiexp.trajectory import Trajectory


@dataclass
class Batch:
    """S sequences of one forward pass and the K tokens in them that are trained; floats are float32."""

    input_ids: Tensor  # [S, L] padded on the right with 0, or [1, T] end to end
    kept: Tensor  # [K] index into the flattened positions
    targets: Tensor  # [K] token predicted there
    sequence: Tensor  # [K] 0..S-1, ascending
    advantages: Tensor  # [K]
    token_weights: Tensor  # [K] of all micro-batches and ranks together: see `weigh`
    rollout_logprobs: Tensor  # [K] the engine's
    cu_seqlens: Tensor | None = None  # [S + 1] int32, where each sequence starts; packed only
    position_ids: Tensor | None = None  # [1, T] packed only
    old_logprobs: Tensor | None = None  # [K] filled by the trainer
    ref_logprobs: Tensor | None = None  # [K] filled by the trainer

    def tensors(self) -> dict[str, Tensor]:
        """The fields that are filled."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def tokens(self, rows: slice) -> "TokenView":
        """What a loss reads, of some of the trained tokens."""
        cut = (None if value is None else value[rows] for value in (self.old_logprobs, self.ref_logprobs))
        return TokenView(self.advantages[rows], self.sequence[rows], self.rollout_logprobs[rows], *cut)


POSITIONS = ("input_ids", "cu_seqlens", "position_ids")
"""the fields of a batch that are not per trained token"""


@dataclass
class TokenView:
    """A part of a batch's trained tokens: `loss.LossInputs`."""

    advantages: Tensor
    sequence: Tensor
    rollout_logprobs: Tensor
    old_logprobs: Tensor | None
    ref_logprobs: Tensor | None


@dataclass(frozen=True)
class Row:
    """One sequence of token ids and the positions in it that are trained, in order."""

    name: str
    token_ids: Sequence[int]
    trained: Sequence[int]
    advantage: float = 1.0
    rollout_logprobs: Sequence[float] = ()
    weight: float = 0.0
    """of each of its trained tokens"""

    def __post_init__(self) -> None:
        if self.trained and self.trained[0] == 0:
            raise ValueError(f"{self.name}: the first token of a sequence cannot be trained")

    @property
    def length(self) -> int:
        """Positions of a forward pass: the last trained token is only a target."""
        return self.trained[-1]


@dataclass(frozen=True)
class Layout:
    """How rows become micro-batches."""

    token_budget: int
    """positions in one micro-batch, padding included; a longer row is one by itself"""
    packed: bool = False
    rank: int = 0
    world_size: int = 1
    device: torch.device | str = "cpu"
    cost: Callable[[int, int], float] = lambda length, kept: float(length)
    """what a row of so many positions and trained tokens costs, in any unit"""


def trajectory_row(trajectory: Trajectory, advantage: float) -> Row:
    """The row of a trajectory; one without a policy token has none that is trained."""
    trained = [position for position, kept in enumerate(trajectory.response_mask) if kept]
    return Row(trajectory.sample_id, trajectory.token_ids, trained, float(advantage), trajectory.rollout_logprobs)


def weigh(rows: Sequence[Row], weighting: str, constant: int = 0) -> list[Row]:
    """Rows with token weights such that a mini-batch's loss is a plain sum over all of its micro-batches and ranks.

    token: 1 / trained tokens of the mini-batch; sequence: 1 / (rows * the row's tokens); constant: 1 / (rows *
    constant). Rows without a trained token are left out, here and in the counts.
    """
    rows = [row for row in rows if row.trained]
    total = sum(len(row.trained) for row in rows)
    of = {
        "token": lambda row: 1 / total,
        "sequence": lambda row: 1 / (len(rows) * len(row.trained)),
        "constant": lambda row: 1 / (len(rows) * constant),
    }
    return [replace(row, weight=of[weighting](row)) for row in rows]


def micro_batches(rows: Sequence[Row], layout: Layout) -> list[Batch]:
    """This rank's micro-batches of a mini-batch; every rank has the same number of them, and none if there is no row.

    `rows` are those of all ranks, in the same order everywhere: each rank plans for all and takes its part. A rank
    with too few rows gets batches of weight 0, so that all take part in every collective call.
    """
    if not rows:
        return []
    parts = plan([(row.length, layout.cost(row.length, len(row.trained))) for row in rows], layout)
    shortest = min(rows, key=lambda row: row.length)
    ghost = Row("padding", shortest.token_ids[:2], [1], 0.0, [0.0])
    mine = [[rows[index] for index in part] or [ghost] for part in parts[layout.rank]]
    return [_batch(part, layout.packed, layout.device) for part in mine]


def plan(sizes: Sequence[tuple[int, float]], layout: Layout) -> list[list[list[int]]]:
    """Which of the rows, given as (positions, cost), each rank takes in each of its micro-batches: [rank][micro][row].

    Ranks are balanced by cost (Karmarkar-Karp). Their counts are made equal by halving what can be halved, then by
    empty micro-batches.
    """
    shares = karmarkar_karp([cost for _, cost in sizes], layout.world_size)
    result = [_fill(share, [length for length, _ in sizes], layout) for share in shares]
    count = max(len(parts) for parts in result)
    for parts in result:
        while len(parts) < count:
            parts.sort(key=lambda part: -sum(sizes[index][1] for index in part) if len(part) > 1 else 0.0)
            largest = parts.pop(0) if parts and len(parts[0]) > 1 else []
            half = len(largest) // 2
            parts += [largest[:half], largest[half:]] if largest else [[]]
    return result


def karmarkar_karp(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Indices in `parts` groups of nearly equal sums, by largest differencing (Karmarkar and Karp 1982)."""
    if parts == 1:
        return [list(range(len(costs)))]
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for index, cost in enumerate(costs):  # a partial solution: `parts` groups, the heaviest first
        groups = [(cost, [index])] + [(0.0, [])] * (parts - 1)
        heapq.heappush(heap, (-cost, index, groups))
    while len(heap) > 1:  # the two most uneven ones are laid over each other, heavy on light
        _, tie, one = heapq.heappop(heap)
        other = heapq.heappop(heap)[2]
        merged = [(a + b, left + right) for (a, left), (b, right) in zip(one, reversed(other), strict=True)]
        merged.sort(key=lambda group: -group[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], tie, merged))
    groups = heap[0][2] if heap else [(0.0, [])] * parts
    return [sorted(indices) for _, indices in groups]


def _fill(share: list[int], lengths: Sequence[int], layout: Layout) -> list[list[int]]:
    """Cut one rank's rows, longest first, into micro-batches within the budget."""
    parts: list[list[int]] = []
    for index in sorted(share, key=lambda index: -lengths[index]):
        for part in parts if layout.packed else parts[-1:]:
            used = sum(lengths[i] for i in part) if layout.packed else len(part) * lengths[part[0]]
            if used + lengths[index if layout.packed else part[0]] <= layout.token_budget:
                part.append(index)
                break
        else:
            parts.append([index])
    return parts


def halves(batch: Batch) -> list[Batch]:
    """The same sequences in two batches, with what the trainer filled in; [batch] if there is only one."""
    packed = batch.cu_seqlens is not None
    starts = batch.cu_seqlens.tolist() if batch.cu_seqlens is not None else list(range(len(batch.input_ids) + 1))
    middle = (len(starts) - 1) // 2
    if middle == 0:
        return [batch]
    result = []
    for first, last in ((0, middle), (middle, len(starts) - 1)):
        at, end = starts[first], starts[last]
        inside = (batch.sequence >= first) & (batch.sequence < last)
        values = {name: v[inside] for name, v in batch.tensors().items() if name not in POSITIONS}
        values["sequence"] = values["sequence"] - first
        values["kept"] = values["kept"] - (at if packed else at * batch.input_ids.shape[1])
        if batch.cu_seqlens is not None and batch.position_ids is not None:
            values["cu_seqlens"] = batch.cu_seqlens[first : last + 1] - at
            values["position_ids"] = batch.position_ids[:, at:end]
        values["input_ids"] = batch.input_ids[:, at:end] if packed else batch.input_ids[at:end]
        result.append(Batch(**values))
    return result


def _batch(rows: Sequence[Row], packed: bool, device: torch.device | str) -> Batch:
    ends = torch.tensor([0] + [row.length for row in rows]).cumsum(0)
    counts = torch.tensor([len(row.trained) for row in rows])
    if packed:
        inputs = torch.tensor([[token for row in rows for token in row.token_ids[: row.length]]])
        starts = ends[:-1].tolist()
    else:
        longest = max(row.length for row in rows)
        inputs = torch.zeros(len(rows), longest, dtype=torch.long)
        for index, row in enumerate(rows):
            inputs[index, : row.length] = torch.tensor(row.token_ids[: row.length])
        starts = [index * longest for index in range(len(rows))]
    values = [
        ("advantage", torch.tensor([row.advantage for row in rows])),
        ("weight", torch.tensor([row.weight for row in rows])),
        ("row", torch.arange(len(rows))),
    ]
    spread = {name: value.repeat_interleave(counts) for name, value in values}
    batch = Batch(
        input_ids=inputs,
        kept=torch.tensor([start + at - 1 for start, row in zip(starts, rows, strict=True) for at in row.trained]),
        targets=torch.tensor([row.token_ids[position] for row in rows for position in row.trained]),
        sequence=spread["row"],
        advantages=spread["advantage"],
        token_weights=spread["weight"],
        rollout_logprobs=torch.tensor([value for row in rows for value in row.rollout_logprobs]),
        cu_seqlens=ends.int() if packed else None,
        position_ids=torch.cat([torch.arange(row.length) for row in rows])[None] if packed else None,
    )
    return Batch(**{name: value.to(device) for name, value in batch.tensors().items()})
