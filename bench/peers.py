"""The policy-loss heads that bench/loss.py and bench/gpu.py compare, on the same inputs and with the same objective.

Each head is a function of a `Problem` that returns the loss, ready for backward. Those of other libraries are read from
their installed packages (requirements-bench.txt); nothing of a trainer is imported.
"""

import importlib.util
import sys
import types
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from hiexp.batching import TokenView
from hiexp.fused import fused_loss, token_logprobs
from hiexp.loss import LossConfig, policy_loss

KL = 1e-3
CLIP = {"token": (0.2, 0.2), "sequence": (3e-4, 4e-4)}
LOSS = {"token": LossConfig("grpo", dual_clip=0.0), "sequence": LossConfig("gspo")}


@dataclass
class Problem:
    """S sequences of L positions, of which the same number is trained in each."""

    hidden: Tensor  # [S, L, H]
    weight: Tensor  # [V, H]
    mask: Tensor  # [S, L] trained
    targets: Tensor  # [S, L]
    advantages: Tensor  # [S]
    old: Tensor  # [S, L] log-probs before the update; 0 where not trained
    ref: Tensor  # [S, L] the reference's
    mode: str
    """token: GRPO, mean over tokens; sequence: GSPO, mean over sequences"""
    temperature: float = 1.0
    entropy_coef: float = 0.0
    kl: float = KL

    @property
    def kept(self) -> Tensor:
        return self.mask.flatten().nonzero()[:, 0]


def make_problem(
    vocabulary: int,
    hidden: int,
    sequences: int,
    length: int,
    share: float,
    dtype: torch.dtype,
    mode: str,
    device: str = "cpu",
    **settings: float,
) -> Problem:
    """Random hidden states and weights whose logits have a standard deviation of 1; seed 0.

    A CPU rounds the product of bfloat16 matrices to bfloat16, for every head alike: the error grows with the logits.
    """
    rng = torch.Generator(device).manual_seed(0)
    normal = {"generator": rng, "device": device}
    h = torch.randn(sequences, length, hidden, **normal).to(dtype)
    w = (torch.randn(vocabulary, hidden, **normal) * hidden**-0.5).to(dtype)
    order = torch.rand(sequences, length, **normal).argsort(1)
    mask = order < max(1, round(share * length))
    targets = torch.randint(vocabulary, (sequences, length), **normal)
    advantages = torch.randn(sequences, **normal)
    problem = Problem(h, w, mask, targets, advantages, h.new_zeros(0), h.new_zeros(0), mode, **settings)
    now = token_logprobs(h.flatten(0, 1), w, problem.kept, targets[mask], problem.temperature)[0]
    full = torch.zeros(sequences, length, device=device)
    # The KL term keeps clipped rows in the products, so the noise does not decide how much work there is.
    problem.old = full.masked_scatter(mask, now + 0.1 * torch.randn(len(now), **normal))
    problem.ref = full.masked_scatter(mask, now + 0.1 * torch.randn(len(now), **normal))
    h.requires_grad_()
    w.requires_grad_()
    return problem


def objective(logprobs: Tensor, entropy: Tensor | None, problem: Problem) -> Tensor:
    """The loss as its papers and the other trainers write it, from log-probs [S, L] of which masked ones may hold
    anything finite."""
    mask, advantages = problem.mask, problem.advantages[:, None]
    low, high = CLIP[problem.mode]
    log_ratio = (logprobs - problem.old).masked_fill(~mask, 0.0)
    count = mask.sum(1, keepdim=True)
    if problem.mode == "sequence":
        log_ratio = (log_ratio.sum(1, keepdim=True) / count).expand_as(mask)
    ratio = log_ratio.exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    gap = (problem.ref - logprobs).masked_fill(~mask, 0.0)
    loss = loss + problem.kl * (gap.exp() - gap - 1)
    if problem.entropy_coef and entropy is not None:
        loss = loss - problem.entropy_coef * entropy
    weight = mask / mask.sum() if problem.mode == "token" else mask / (count * len(mask))
    return (loss.masked_fill(~mask, 0.0) * weight).sum()


def ours(problem: Problem, chunk_rows: int | None = None) -> Tensor:
    """hiexp/fused.py with hiexp/loss.py, as the trainer calls them."""
    mask, mode = problem.mask, problem.mode
    cfg = replace(LOSS[mode], entropy_coef=problem.entropy_coef, kl_coef=problem.kl)
    sequence = mask.nonzero()[:, 0]
    old, ref, advantages = problem.old[mask], problem.ref[mask], problem.advantages[sequence]
    count = mask.sum(1)[sequence]
    weights = torch.ones_like(old) / len(old) if mode == "token" else 1 / (count * len(mask))

    def page(logprobs: Tensor, entropy: Tensor, at: slice) -> tuple[Tensor, dict[str, Tensor]]:
        view = TokenView(advantages[at], sequence[at], old[at], old[at], ref[at])
        losses, metrics = policy_loss(cfg, logprobs, entropy, view)
        return weights[at] * losses, metrics

    extra = {} if chunk_rows is None else {"chunk_rows": chunk_rows}
    whole = sequence if cfg.whole_sequences else None
    flat = problem.hidden.flatten(0, 1)
    at = (problem.kept, problem.targets[mask])
    return fused_loss(flat, problem.weight, *at, page, problem.temperature, whole, **extra).loss


def naive(problem: Problem, dtype: torch.dtype = torch.float32) -> Tensor:
    """All logits, log-softmax in float32 (or float64), autograd."""
    logits = problem.hidden.flatten(0, 1).to(problem.weight.dtype) @ problem.weight.t()
    logprobs = (logits.to(dtype) / problem.temperature).log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1).view_as(problem.mask) if problem.entropy_coef else None
    chosen = logprobs.gather(1, problem.targets.flatten()[:, None])
    return objective(chosen.view_as(problem.mask), entropy, problem)


def trl(problem: Problem) -> Tensor:
    """GRPOTrainer's head as it runs without Triton: every row is scored."""
    targets = problem.targets.flatten()
    logprobs, *_ = _trl_kernel()(problem.hidden.flatten(0, 1), targets, problem)
    return objective(logprobs.view_as(problem.mask), None, problem)


def trl_kept(problem: Problem) -> Tensor:
    """The same kernel on trained rows alone (AsyncGRPO; the strongest peer)."""
    hidden = problem.hidden.flatten(0, 1)[problem.kept]
    logprobs, *_ = _trl_kernel()(hidden, problem.targets[problem.mask], problem)
    return objective(spread(logprobs, problem), None, problem)


def liger(problem: Problem) -> Tensor:
    """LigerFusedLinearGRPOLoss with all sequences in one chunk, its fastest setting; its default is one at a time."""
    return _liger(problem.hidden, problem.targets, problem.mask, problem.old, problem.ref, problem)


def liger_kept(problem: Problem) -> Tensor:
    """The same on trained rows alone, which its trainers do not do."""
    shape = (len(problem.mask), -1)
    hidden = problem.hidden.flatten(0, 1)[problem.kept].view(*shape, problem.hidden.shape[2])
    parts = [tensor[problem.mask].view(shape) for tensor in (problem.targets, problem.mask, problem.old, problem.ref)]
    return _liger(hidden, *parts, problem)


def verl(problem: Problem) -> Tensor:
    """verl's fused torch kernel; its trainer scores every unpadded token."""
    logprobs, _ = _verl_kernel()(problem.hidden.flatten(0, 1), problem.weight, problem.targets.flatten(), 1.0, 512)
    return objective(logprobs.view_as(problem.mask), None, problem)


def verl_kept(problem: Problem) -> Tensor:
    """The same kernel on trained rows alone."""
    hidden = problem.hidden.flatten(0, 1)[problem.kept]
    logprobs, _ = _verl_kernel()(hidden, problem.weight, problem.targets[problem.mask], 1.0, 512)
    return objective(spread(logprobs, problem), None, problem)


HEADS: dict[str, Callable[[Problem], Tensor]] = {
    "ours": ours,
    "naive": naive,
    "trl": trl,
    "trl_kept": trl_kept,
    "liger": liger,
    "liger_kept": liger_kept,
    "verl": verl,
    "verl_kept": verl_kept,
}


def missing() -> dict[str, str]:
    """Heads that cannot run here -> why."""
    reasons = {}
    for name, kernel in (("trl", _trl_kernel), ("liger", _liger_loss), ("verl", _verl_kernel)):
        try:
            kernel()
        except Exception as error:  # whatever a package of others does at import
            reason = f"{type(error).__name__}: {error}"
            reasons |= {name: reason, f"{name}_kept": reason}
    return reasons


def gradients(head: Callable[[Problem], Tensor], problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, d hidden, d weight of one forward and backward."""
    problem.hidden.grad = problem.weight.grad = None
    loss = head(problem)
    loss.backward()
    assert problem.hidden.grad is not None and problem.weight.grad is not None
    return loss.detach(), problem.hidden.grad, problem.weight.grad


def exact(problem: Problem, rows: int = 128) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, d hidden, d weight in float64 from the same inputs, `rows` at a time (its own pass over the formula)."""
    h, w = problem.hidden.detach().flatten(0, 1)[problem.kept].double(), problem.weight.detach().double()
    targets, inverse = problem.targets[problem.mask], 1 / problem.temperature
    logprobs, entropy = [], []
    for at in range(0, len(h), rows):
        scores = (h[at : at + rows] @ w.t() * inverse).log_softmax(-1)
        logprobs.append(scores.gather(1, targets[at : at + rows, None])[:, 0])
        entropy.append(-(scores.exp() * scores).sum(-1))
    leaves = [torch.cat(values).requires_grad_() for values in (logprobs, entropy)]
    loss = objective(*(spread(leaf, problem) for leaf in leaves), problem)
    slope, bend = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    d_hidden, d_weight = torch.zeros_like(problem.hidden, dtype=torch.float64).flatten(0, 1), torch.zeros_like(w)
    for at in range(0, len(h), rows):
        part = slice(at, at + rows)
        scores = (h[part] @ w.t() * inverse).log_softmax(-1)
        one = torch.zeros_like(scores).scatter_(1, targets[part, None], 1.0)
        d = (one - scores.exp()) * slope[part, None] - bend[part, None] * scores.exp() * (scores + entropy_of(scores))
        d_hidden[problem.kept[part]] = d @ w * inverse
        d_weight += d.t() @ h[part] * inverse
    return loss.detach(), d_hidden.view_as(problem.hidden), d_weight


def entropy_of(logprobs: Tensor) -> Tensor:
    return -(logprobs.exp() * logprobs).sum(-1, keepdim=True)


def gradient_error(found: tuple[Tensor, ...], truth: tuple[Tensor, ...]) -> float:
    """The larger of the two gradients' ||found - truth|| / ||truth||."""
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(found[1:], truth[1:], strict=True))


def spread(values: Tensor, problem: Problem) -> Tensor:
    """Values [K] of trained rows at their places in [S, L], 0 elsewhere."""
    return torch.zeros(problem.mask.shape, dtype=values.dtype, device=values.device).masked_scatter(
        problem.mask, values
    )


def _liger(hidden: Tensor, targets: Tensor, mask: Tensor, old: Tensor, ref: Tensor, problem: Problem) -> Tensor:
    low, high = CLIP[problem.mode]
    loss = _liger_loss()(
        beta=problem.kl,
        compiled=False,
        use_ref_model=True,
        chunk_size=len(mask),
        epsilon_low=low,
        epsilon_high=high,
        loss_type="dapo" if problem.mode == "token" else "grpo",
        importance_sampling_level=problem.mode,
        temperature=problem.temperature,
    )
    arguments = {"ref_per_token_logps": ref, "old_per_token_logps": old}
    return loss(hidden, problem.weight, targets, mask.float(), problem.advantages, **arguments)[0]


def _trl_kernel() -> Callable[..., tuple[Tensor, ...]]:
    name = "hiexp_bench_trl.kernels.chunked_logprob"
    if name not in sys.modules:
        # Its backward imports one function of trl.trainer.utils, which would import the trainer; without ZeRO-3 it is
        # a null context.
        utils = types.ModuleType("hiexp_bench_trl.trainer.utils")
        utils.maybe_gather_lm_head_ctx = lambda *_: nullcontext()  # type: ignore[attr-defined]
        for package in ("hiexp_bench_trl", "hiexp_bench_trl.kernels", "hiexp_bench_trl.trainer"):
            sys.modules[package] = types.ModuleType(package)
        sys.modules[utils.__name__] = utils
        _load(name, _root("trl") / "kernels/chunked_logprob.py")
    function = sys.modules[name].ChunkedLogProbFunction
    return lambda hidden, targets, problem: function.apply(
        hidden, problem.weight, None, targets, problem.temperature, 32768, None, 1.0, ("log_probs", "entropy")
    )


def _liger_loss() -> type:
    from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOLoss  # type: ignore[import-not-found]

    return LigerFusedLinearGRPOLoss


def _verl_kernel() -> Callable[..., tuple[Tensor, Tensor]]:
    name = "hiexp_bench_verl"
    if name not in sys.modules:
        # It imports Liger's Triton kernel where it can, which then may not load; its torch kernel needs none.
        stub, known = types.ModuleType("liger_kernel.ops"), sys.modules.get("liger_kernel.ops")
        stub.LigerFusedLinearScaledCrossEntropyFunction = None  # type: ignore[attr-defined]
        sys.modules[stub.__name__] = stub
        try:
            _load(name, _root("verl") / "utils/experimental/torch_functional.py")
        finally:
            del sys.modules[stub.__name__]
            sys.modules.update({} if known is None else {stub.__name__: known})
    return sys.modules[name].FusedLinearForPPOFunction.apply


def _root(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ImportError(f"{package} is not installed")
    return Path(spec.origin).parent


def _load(name: str, path: Path) -> None:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
