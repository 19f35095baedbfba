"""How token ids are drawn from logits: a row's draw depends on its own seed and numbers alone.

Letters: n rows, V vocabulary.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hiexp.config import ConfigError

NUCLEUS = 64
"""Top-p looks at this many best tokens and sorts the whole vocabulary only for rows where they hold too little."""


@dataclass(frozen=True)
class Sampling:
    """How one completion is drawn."""

    temperature: float = 1.0
    """0 = greedy"""
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    """strings that end the completion; the token that completes one is kept whole"""
    seed: int = 0
    """a row's draw depends on this and the row's own logits, not on the batch it is in"""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature={self.temperature} must be 0 (greedy) or above")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p} must be in (0, 1]; 1 keeps every token")


def sample(logits: Tensor, temperature: Tensor, top_p: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one id per row of logits [n, V] by inverse CDF; (ids [n], log-probs [n] at temperature, before top-p).

    A row depends on its own numbers alone: `uniform` [n] in [0, 1) decides, temperature 0 takes the largest logit.
    """
    greedy = temperature == 0
    logprobs = (logits.float() / torch.where(greedy, 1.0, temperature)[:, None]).log_softmax(-1)
    ids = logits.argmax(-1)
    drawn = (~greedy).nonzero()[:, 0]
    if len(drawn):
        ids[drawn] = _draw(logprobs[drawn].exp(), top_p[drawn], uniform[drawn])
    return ids, logprobs.gather(1, ids[:, None])[:, 0]


def _draw(probs: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
    ids = torch.empty(len(probs), dtype=torch.long, device=probs.device)
    whole = (top_p >= 1).nonzero()[:, 0]
    if len(whole):
        ids[whole] = _invert(probs[whole], torch.ones_like(top_p[whole]), uniform[whole])
    cut = (top_p < 1).nonzero()[:, 0]
    if len(cut):
        best, index = probs[cut].topk(min(NUCLEUS, probs.shape[1]))
        enough = best.double().sum(-1) >= top_p[cut]
        choice = _invert(best, top_p[cut], uniform[cut])
        ids[cut] = index.gather(1, choice[:, None])[:, 0]
        flat = cut[~enough]
        if len(flat):
            best, index = probs[flat].sort(descending=True)
            choice = _invert(best, top_p[flat], uniform[flat])
            ids[flat] = index.gather(1, choice[:, None])[:, 0]
    return ids


def _invert(probs: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
    """Column where the cumulative sum of probs [n, V], cut once it reaches top_p, passes uniform's share of it."""
    total = probs.double().cumsum(-1)
    kept = (total - probs < top_p[:, None]).sum(-1, keepdim=True)  # the token that crosses top_p still counts
    mass = total.gather(1, kept - 1)
    return (total <= uniform[:, None] * mass).sum(-1).clamp(max=kept[:, 0] - 1)


def uniforms(seeds: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Counter-based numbers in [0, 1): the `counts`-th output of splitmix64 started at each seed; both uint64 [n]."""
    mixed = _splitmix(_splitmix(seeds) + (counts + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def derive_seed(*numbers: int) -> int:
    """One 64-bit seed from several numbers, each of which matters, in order."""
    state = np.zeros(1, dtype=np.uint64)
    for number in numbers:
        state = _splitmix(state + np.array([number % 2**64], dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15))
    return int(state[0])


def _splitmix(state: np.ndarray) -> np.ndarray:
    """The output function of splitmix64 (Steele, Lea and Flood 2014)."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
