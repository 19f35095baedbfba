"""Trajectories -> padded micro-batches in which the trained tokens, and only those, are addressed.

Rows of similar length share a micro-batch and are padded on the right: under a causal mask a real token never
sees the padding, so no attention mask is needed and nothing is ever compared with a pad id. Worked example:

    token_ids     = [11, 12, 31, 32, 41, 33, 42]    prompt, policy, document, policy, unanswered document
    response_mask = [ F,  F,  T,  T,  F,  T,  F]
    input_ids     = [11, 12, 31, 32, 41]            up to the last token that predicts a trained one
    kept          = [     1,  2,      4]            where the hidden state stands that predicts ...
    targets       = [    31, 32,     33]            ... this token: the one shift in the code base
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from hiexp.trajectory import Trajectory


@dataclass
class Batch:
    """R rows of one forward pass and the K tokens in them that are trained; floats are float32."""

    input_ids: Tensor  # [R, L] padded on the right with 0
    kept: Tensor  # [K] index into the flattened [R * L] positions
    targets: Tensor  # [K] token predicted there
    sequence: Tensor  # [K] row, 0..R-1
    advantages: Tensor  # [K]
    token_weights: Tensor  # [K] sum to 1 over all micro-batches of a mini-batch
    rollout_logprobs: Tensor  # [K] the sampler's, for diagnostics
    old_logprobs: Tensor | None = None  # [K] filled by the trainer
    ref_logprobs: Tensor | None = None  # [K] filled by the trainer

    def tensors(self) -> dict[str, Tensor]:
        """The fields that are filled."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class Row:
    """One sequence of token ids and the positions in it that are trained, in order."""

    name: str
    token_ids: Sequence[int]
    trained: Sequence[int]
    advantage: float = 1.0
    rollout_logprobs: Sequence[float] = ()

    def __post_init__(self) -> None:
        if self.trained and self.trained[0] == 0:
            raise ValueError(f"{self.name}: the first token of a sequence cannot be trained")


def micro_batches(
    trajectories: Sequence[Trajectory],
    advantages: Sequence[float],
    token_budget: int,
    weighting: str,
    skip_zero_advantage: bool = False,
    device: torch.device | str = "cpu",
) -> list[Batch]:
    """Pack one mini-batch; `advantages` has one value per trajectory.

    Trajectories without a policy token get no row. With `skip_zero_advantage` neither do those that cannot
    move the policy; they keep their share in the denominators, so the gradient is the same.
    """
    rows = [_row(one, advantage) for one, advantage in zip(trajectories, advantages, strict=True)]
    return pack(rows, token_budget, weighting, skip_zero_advantage, device)


def pack(
    rows: Sequence[Row],
    token_budget: int,
    weighting: str,
    skip_zero_advantage: bool = False,
    device: torch.device | str = "cpu",
) -> list[Batch]:
    """Sort rows by length, cut them into micro-batches of at most `token_budget` positions (or one row)."""
    rows = [row for row in rows if row.trained]
    tokens, sequences = sum(len(row.trained) for row in rows), len(rows)
    if skip_zero_advantage:
        rows = [row for row in rows if row.advantage != 0.0]
    batches: list[Batch] = []
    pending: list[Row] = []
    for row in sorted(rows, key=lambda row: -row.trained[-1]):
        if pending and (len(pending) + 1) * pending[0].trained[-1] > token_budget:
            batches.append(_batch(pending, weighting, tokens, sequences, device))
            pending = []
        pending.append(row)
    if pending:
        batches.append(_batch(pending, weighting, tokens, sequences, device))
    return batches


def _row(trajectory: Trajectory, advantage: float) -> Row:
    trained = [position for position, kept in enumerate(trajectory.response_mask) if kept]
    logprobs = trajectory.rollout_logprobs
    return Row(trajectory.sample_id, trajectory.token_ids, trained, float(advantage), logprobs)


def _batch(rows: Sequence[Row], weighting: str, tokens: int, sequences: int, device: torch.device | str) -> Batch:
    length = rows[0].trained[-1]  # the last trained token is only a target
    counts = torch.tensor([len(row.trained) for row in rows])
    inputs = torch.zeros(len(rows), length, dtype=torch.long)
    for index, row in enumerate(rows):
        end = row.trained[-1]
        inputs[index, :end] = torch.tensor(row.token_ids[:end])
    share = torch.full((len(rows),), 1 / tokens) if weighting == "token" else 1 / (sequences * counts.float())
    kept = [index * length + position - 1 for index, row in enumerate(rows) for position in row.trained]
    batch = Batch(
        input_ids=inputs,
        kept=torch.tensor(kept),
        targets=torch.tensor([row.token_ids[position] for row in rows for position in row.trained]),
        sequence=torch.arange(len(rows)).repeat_interleave(counts),
        advantages=torch.tensor([row.advantage for row in rows]).repeat_interleave(counts),
        token_weights=share.repeat_interleave(counts),
        rollout_logprobs=torch.tensor([value for row in rows for value in row.rollout_logprobs]),
    )
    return Batch(**{name: value.to(device) for name, value in batch.tensors().items()})
