"""GRPO and GSPO straight from their equations: plain Python floats, sequence by sequence, gradients by hand.

Independent of the package on purpose. A sequence is a tuple (new, old, ref, advantage): three lists of log-probs of its
policy tokens and one number. Gradients are with respect to the new log-probs.
"""

import math
from collections.abc import Sequence

Sequence_ = tuple[list[float], list[float], list[float], float]


def advantages(rewards: Sequence[float], with_std: bool = True) -> list[float]:
    """(r - mean) / (std + 1e-6), unbiased std; identical rewards give 0; a group of one keeps its reward."""
    if len(rewards) == 1:
        return list(rewards)
    if all(reward == rewards[0] for reward in rewards):
        return [0.0 for _ in rewards]
    mean = sum(rewards) / len(rewards)
    std = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
    return [(reward - mean) / ((std + 1e-6) if with_std else 1.0) for reward in rewards]


def weights(sequences: Sequence[Sequence_], weighting: str) -> list[float]:
    """Weight of each token of each sequence; sequences without tokens do not count."""
    lengths = [len(sequence[0]) for sequence in sequences]
    if weighting == "token":
        return [1 / sum(lengths) for _ in lengths]
    filled = sum(length > 0 for length in lengths)
    return [1 / (filled * length) if length else 0.0 for length in lengths]


def surrogate(ratio: float, advantage: float, low: float, high: float, dual: float) -> tuple[float, float, bool]:
    """The PPO objective of one ratio, its derivative with respect to log(ratio), and whether a bound acted."""
    plain = ratio * advantage
    bounded = min(max(ratio, 1 - low), 1 + high) * advantage
    value = min(plain, bounded)
    if dual and advantage < 0:
        value = max(value, dual * advantage)
    acted = value != plain
    return value, 0.0 if acted else plain, acted


def k3(new: float, ref: float) -> tuple[float, float]:
    """exp(D) - D - 1 for D = ref - new, cut at 10, and its derivative with respect to new."""
    difference = ref - new
    value = math.exp(difference) - difference - 1
    return (10.0, 0.0) if value > 10 else (value, 1 - math.exp(difference))


def loss(
    sequences: Sequence[Sequence_],
    algorithm: str,
    weighting: str,
    low: float,
    high: float,
    dual: float,
    kl_coef: float,
) -> tuple[float, list[list[float]], dict[str, float]]:
    """Loss of one optimiser step, its gradients, and the weighted means of policy term, KL and clip indicator."""
    total = {"policy": 0.0, "kl": 0.0, "clip": 0.0}
    gradients: list[list[float]] = []
    for (new, old, ref, advantage), weight in zip(sequences, weights(sequences, weighting), strict=True):
        logs = [a - b for a, b in zip(new, old, strict=True)]
        if algorithm == "grpo":
            terms = [surrogate(math.exp(log), advantage, low, high, dual) for log in logs]
            slopes = [slope for _, slope, _ in terms]
        else:  # one term of weight 1 / S, and d log s / d new_t = 1 / |o|: together that is `weight`
            value, slope, acted = surrogate(math.exp(sum(logs) / max(len(logs), 1)), advantage, low, high, dual)
            terms = [(value, slope, acted)] * len(logs)
            slopes = [slope] * len(logs)
        total["policy"] -= weight * sum(value for value, _, _ in terms)
        total["clip"] += weight * sum(acted for _, _, acted in terms)
        divergences = [k3(a, b) for a, b in zip(new, ref, strict=True)]
        total["kl"] += weight * sum(value for value, _ in divergences)
        pairs = zip(slopes, divergences, strict=True)
        gradients.append([weight * (kl_coef * kl_slope - slope) for slope, (_, kl_slope) in pairs])
    return total["policy"] + kl_coef * total["kl"], gradients, total
