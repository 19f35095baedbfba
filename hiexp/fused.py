"""The fused token-mask head: hidden states in, loss and gradients out, and never a [tokens, vocabulary] tensor.

Only kept rows meet the head, a chunk at a time: logits -> softmax in place -> the objective, plain PyTorch on log-probs
and entropies, whose gradient autograd finds -> gradients of hidden states and head at once, while the chunk is there.
That is three matrix products a row, whatever the objective says. An objective over whole sequences gets chunks that
hold them whole; a sequence beyond the limit costs a fourth product, as its logits are computed twice.

Letters: T positions, K kept rows, C rows of a chunk, V vocabulary, H hidden size. Log-probs, entropies and loss are
float32 whatever the model's dtype; the head's gradient is summed over chunks in float32.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

CHUNK_ROWS = 1024
"""rows whose logits exist at one time: enough to keep a processor busy, 0.6 GB for 152k float32 logits"""
SEQUENCE_CHUNKS = 4
"""a sequence of up to so many chunks' rows is kept in one, where the objective needs it whole"""
BLOCK_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 24}
"""logits that the softmax works on at a time: on a CPU they stay in its cache, on a GPU its temporaries stay small"""

Objective = Callable[[Tensor, Tensor, slice], tuple[Tensor, dict[str, Tensor]]]
"""(log-probs [C], entropies [C], which rows) -> (loss per row [C], to be summed; metrics [C])"""


@dataclass
class HeadOutput:
    """What a forward pass through the fused head leaves: the summed loss, with its gradient, and values per row."""

    loss: Tensor  # []
    logprobs: Tensor  # [K]
    entropy: Tensor  # [K]
    metrics: dict[str, Tensor]  # [K] each


@dataclass
class _Job:
    """The rows of one call and what is known of them so far."""

    kept: Tensor
    targets: Tensor
    objective: Objective
    temperature: float
    whole: Tensor | None
    chunk_rows: int
    logprobs: list[Tensor] = field(default_factory=list)
    entropy: list[Tensor] = field(default_factory=list)
    metrics: list[dict[str, Tensor]] = field(default_factory=list)


def fused_loss(
    hidden: Tensor,  # [T, H]
    weight: Tensor,  # [V, H]
    kept: Tensor,  # [K] distinct rows of hidden
    targets: Tensor,  # [K]
    objective: Objective,
    temperature: float = 1.0,
    sequence: Tensor | None = None,  # [K] non-decreasing; given where the objective needs whole sequences
    chunk_rows: int = CHUNK_ROWS,
) -> HeadOutput:
    """The summed objective over softmax(hidden weight^T / temperature) at the kept rows.

    `loss.backward()` hands out gradients that were formed on the way (once: a second call raises). Rows that are not
    kept are never read and get a gradient of exactly 0.
    """
    job = _Job(kept, targets, objective, temperature, sequence, chunk_rows)
    loss: Tensor = _FusedHead.apply(hidden, weight, job)  # type: ignore[assignment]
    names = job.metrics[0] if job.metrics else {}
    metrics = {name: torch.cat([values[name] for values in job.metrics]) for name in names}
    return HeadOutput(loss, _cat(job.logprobs, hidden), _cat(job.entropy, hidden), metrics)


@torch.no_grad()
def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    kept: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    chunk_rows: int = CHUNK_ROWS,
) -> tuple[Tensor, Tensor]:
    """Log-probs [K] and entropies [K] alone, by the same chunks; no gradient."""
    logprobs, entropy = [], []
    buffer = _buffer(weight, min(len(kept), chunk_rows))
    for rows in _chunks(len(kept), None, chunk_rows):
        probs = _logits(hidden[kept[rows]], weight, buffer)
        values = _softmax_(probs, targets[rows], temperature)
        logprobs.append(values[0])
        entropy.append(values[1])
    return _cat(logprobs, hidden), _cat(entropy, hidden)


class _FusedHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, job: _Job) -> Tensor:  # type: ignore[override]
        chunks = list(_chunks(len(job.kept), job.whole, job.chunk_rows))
        limit = job.chunk_rows * (1 if job.whole is None else SEQUENCE_CHUNKS)
        sizes = [rows.stop - rows.start for rows in chunks]
        buffer = _buffer(weight, max((size if size <= limit else job.chunk_rows for size in sizes), default=0))
        wanted, is_sum = ctx.needs_input_grad[:2], len(job.kept) > len(buffer)
        ctx.gradients = (
            torch.zeros_like(hidden) if wanted[0] else None,
            torch.zeros_like(weight, dtype=torch.float32 if is_sum else None) if wanted[1] else None,
        )
        loss = torch.zeros((), device=hidden.device)
        for rows in chunks:
            loss += _chunk(job, rows, hidden, weight, buffer, ctx.gradients)
        return loss

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor):  # type: ignore[override]
        if ctx.gradients is None:
            raise RuntimeError("the fused loss hands out its gradients once; compute it anew for a second backward")
        (d_hidden, d_weight), ctx.gradients = ctx.gradients, None
        scale = grad_outputs[0]
        return (
            None if d_hidden is None else d_hidden.mul_(scale),
            None if d_weight is None else d_weight.mul_(scale),
            None,
        )


def _chunk(
    job: _Job,
    rows: slice,
    hidden: Tensor,
    weight: Tensor,
    buffer: Tensor,
    gradients: tuple[Tensor | None, Tensor | None],
) -> Tensor:
    """Forward and gradient of some rows; in parts, with the logits computed twice, if they do not fit the buffer."""
    parts = [slice(at, min(at + len(buffer), rows.stop)) for at in range(rows.start, rows.stop, len(buffer))]
    scores, probs = [], buffer
    for part in parts:
        probs = _logits(hidden[job.kept[part]], weight, buffer)
        scores.append(_softmax_(probs, job.targets[part], job.temperature))
    logprobs, entropy = (torch.cat(values) for values in zip(*scores, strict=True))
    loss, d_logprobs, d_entropy = _objective(job, logprobs, entropy, rows)
    for part in parts if any(gradient is not None for gradient in gradients) else []:
        if len(parts) > 1:
            probs = _logits(hidden[job.kept[part]], weight, buffer)
            _softmax_(probs, job.targets[part], job.temperature)
        inner = slice(part.start - rows.start, part.stop - rows.start)
        slope = None if d_entropy is None else d_entropy[inner]
        _backward(
            job, part, probs, logprobs[inner], entropy[inner], d_logprobs[inner], slope, hidden, weight, gradients
        )
    return loss


def _objective(job: _Job, logprobs: Tensor, entropy: Tensor, rows: slice) -> tuple[Tensor, Tensor, Tensor | None]:
    """The summed loss of the rows, its slope in each log-prob [C], and in each entropy if it depends on them."""
    with torch.enable_grad():
        leaves = (logprobs.detach().requires_grad_(), entropy.detach().requires_grad_())
        losses, metrics = job.objective(*leaves, rows)
        total = losses.sum()
        slopes = torch.autograd.grad(total, leaves, allow_unused=True) if total.requires_grad else (None, None)
    job.logprobs.append(logprobs)
    job.entropy.append(entropy)
    job.metrics.append(metrics)
    return total.detach(), torch.zeros_like(logprobs) if slopes[0] is None else slopes[0], slopes[1]


def _backward(
    job: _Job,
    rows: slice,
    probs: Tensor,  # [C, V] consumed
    logprobs: Tensor,
    entropy: Tensor,
    d_logprobs: Tensor,
    d_entropy: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    gradients: tuple[Tensor | None, Tensor | None],
) -> None:
    """d loss / d logits in place of the probabilities, then the two products with it."""
    index, targets = job.kept[rows], job.targets[rows]
    moving = d_logprobs != 0 if d_entropy is None else (d_logprobs != 0) | (d_entropy != 0)
    if moving.float().mean() < 0.7:  # clipped tokens and those without an advantage: not worth a product
        chosen = moving.nonzero()[:, 0]
        index, targets, probs = index[chosen], targets[chosen], probs[chosen]
        logprobs, entropy, d_logprobs = logprobs[chosen], entropy[chosen], d_logprobs[chosen]
        d_entropy = None if d_entropy is None else d_entropy[chosen]
    if len(index) == 0:
        return
    d_logits, scale = _d_logits_(probs, targets, logprobs, entropy, d_logprobs, d_entropy, job.temperature)
    d_logits, (d_hidden, d_weight) = d_logits.to(weight.dtype), gradients
    if d_hidden is not None:
        d_hidden[index] = ((d_logits @ weight) * scale).to(weight.dtype)
    if d_weight is not None:
        _add_product(d_weight, d_logits, (hidden[index] * scale).to(weight.dtype))


def _d_logits_(
    probs: Tensor,
    targets: Tensor,
    logprobs: Tensor,
    entropy: Tensor,
    d_logprobs: Tensor,
    d_entropy: Tensor | None,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """softmax -> d loss / d logits, in place, but for a factor per row [C, 1], which the caller has cheaper places for:
    (d_logprob (1[target] - p) - d_entropy p (log p + entropy)) / T."""
    not_target = -torch.expm1(logprobs)  # from the float32 log-prob: 1 - p of a bfloat16 p is noise
    slope = (d_logprobs / temperature)[:, None]
    if d_entropy is None:
        return probs.scatter_(1, targets[:, None], -not_target[:, None].to(probs.dtype)), -slope
    d_entropy = (d_entropy / temperature)[:, None]
    at_target = slope[:, 0] * not_target - d_entropy[:, 0] * logprobs.exp() * (logprobs + entropy)
    for block in _blocks(probs):
        p = probs[block].float()
        bend = torch.special.entr(p).sub_(p * entropy[block, None]).mul_(d_entropy[block])
        probs[block] = bend.sub_(p.mul_(slope[block])).to(probs.dtype)
    return probs.scatter_(1, targets[:, None], at_target[:, None].to(probs.dtype)), torch.ones_like(slope)


def _softmax_(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Turn logits [C, V] into probabilities in place; float32 log-probs [C] of the targets and entropies [C]."""
    parts = [_softmax_block_(logits[block], targets[block], temperature) for block in _blocks(logits)]
    logprobs, entropy = (torch.cat(values) for values in zip(*parts, strict=True))
    return logprobs, entropy


def _softmax_block_(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    z = logits.float()  # the same memory if it is float32 already
    z = z.mul_(1 / temperature) if temperature != 1.0 else z
    z.sub_(z.amax(-1, keepdim=True))
    target = z.gather(1, targets[:, None])[:, 0]
    p = z.exp()
    total = p.sum(-1)
    log_total = total.log()
    entropy = log_total - z.mul_(p).sum(-1) / total
    logits.copy_(p.div_(total[:, None]))
    return target - log_total, entropy


def _blocks(logits: Tensor) -> Iterator[slice]:
    """Rows that are worked on together."""
    size = max(1, BLOCK_ELEMENTS[logits.device.type] // logits.shape[1])
    for start in range(0, len(logits), size):
        yield slice(start, start + size)


def _logits(hidden: Tensor, weight: Tensor, buffer: Tensor) -> Tensor:
    if weight.is_cuda and weight.dtype != torch.float32:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)  # not rounded; a CPU has no such product
    return torch.mm(hidden, weight.t(), out=buffer[: len(hidden)])


def _buffer(weight: Tensor, rows: int) -> Tensor:
    """Room for the logits of so many rows, used again for every chunk; none where `_logits` makes its own."""
    makes_its_own = weight.is_cuda and weight.dtype != torch.float32
    return weight.new_empty(rows, 0 if makes_its_own else len(weight))


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total [V, H] += left [C, V]^T right [C, H]; into float32 without rounding where the device can do that."""
    if left.dtype == total.dtype:
        total.addmm_(left.t(), right)
    elif left.is_cuda:
        torch.addmm(total, left.t(), right, out_dtype=torch.float32, out=total)
    else:
        for start in range(0, len(total), 8192):  # a part of the vocabulary at a time: no second [V, H]
            part = slice(start, start + 8192)
            total[part] += torch.mm(left[:, part].t(), right)


def _chunks(count: int, sequence: Tensor | None, chunk_rows: int) -> Iterator[slice]:
    """Rows a chunk at a time; with `sequence`, as many whole sequences as fit one, or a single longer one."""
    if sequence is None:
        yield from (slice(start, min(start + chunk_rows, count)) for start in range(0, count, chunk_rows))
        return
    start = end = 0
    for length in torch.unique_consecutive(sequence, return_counts=True)[1].tolist():
        if end > start and end - start + length > chunk_rows:
            yield slice(start, end)
            start = end
        end += length
    if end > start:
        yield slice(start, end)


def _cat(parts: list[Tensor], like: Tensor) -> Tensor:
    return torch.cat(parts) if parts else torch.zeros(0, device=like.device)
