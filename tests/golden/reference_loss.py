"""The training objective straight from its equations: plain Python floats, sequence by sequence, slopes by hand.

Independent of the package on purpose (METHOD section 6.2 and 6.3 and the papers of the algorithms' names). A slope is
the derivative of the loss by a token's new log-prob or by its entropy; `head` leads from logits to those two.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Attempt:
    """One trajectory's policy tokens: log-probs of the trainer now, the trainer before, the reference, the engine."""

    new: list[float]
    old: list[float]
    ref: list[float]
    engine: list[float | None]
    entropy: list[float]
    advantage: float


@dataclass(frozen=True)
class Setting:
    algorithm: str = "grpo"
    weighting: str = "token"
    low: float = 0.2
    high: float = 0.2
    dual: float = 0.0
    kl_coef: float = 0.0
    kl: str = "k3"
    entropy_coef: float = 0.0
    constant: int = 10
    mismatch: str = "none"
    mismatch_low: float = 0.5
    mismatch_high: float = 2.0


@dataclass(frozen=True)
class Result:
    loss: float
    by_new: list[list[float]]
    by_entropy: list[list[float]]
    policy: float
    kl: float
    clip: float
    """weighted means of the policy term before any correction, of the KL term, and of "a bound acted" """


RECIPES = {
    "grpo": ("group_std", Setting("grpo", "token", 0.2, 0.2, 3.0, 1e-3)),
    "gspo": ("group_std", Setting("gspo", "sequence", 3e-4, 4e-4)),
    "dr_grpo": ("group_mean", Setting("dr_grpo", "constant", 0.2, 0.2)),
    "dapo": ("group_std", Setting("dapo", "token", 0.2, 0.28)),
    "cispo": ("group_std", Setting("cispo", "token", 1.0, 4.0)),
    "reinforce_pp": ("batch", Setting("reinforce_pp", "token", 0.2, 0.2, 0.0, 1e-3)),
}
"""How an attempt is compared, and the settings, of each algorithm."""


def advantages(groups: Sequence[Sequence[float]], mode: str = "group_std") -> list[list[float]]:
    """Rewards of groups of one size -> advantages.

    group_std: (r - mean) / (std + 1e-6) over siblings; group_mean: r - mean; batch_std: the mean of siblings, the std
    of all; batch: both of all. Stds are unbiased; rewards that are compared and identical give 0, and a group of one
    keeps its reward unless all groups are compared.
    """
    everyone = [reward for group in groups for reward in group]
    result = []
    for group in groups:
        mean_of = everyone if mode == "batch" else group
        std_of = everyone if mode in ("batch", "batch_std") else group
        if len(mean_of) == 1 and mode != "batch":
            result.append(list(group))
        elif min(mean_of) == max(mean_of):
            result.append([0.0 for _ in group])
        else:
            mean = sum(mean_of) / len(mean_of)
            around = sum(std_of) / len(std_of)
            std = math.sqrt(sum((reward - around) ** 2 for reward in std_of) / (len(std_of) - 1))
            scale = 1.0 if mode == "group_mean" else std + 1e-6
            result.append([(reward - mean) / scale for reward in group])
    return result


def weights(lengths: Sequence[int], weighting: str, constant: int) -> list[float]:
    """Weight of each token of each attempt; attempts without tokens do not count."""
    filled = sum(length > 0 for length in lengths)
    of = {
        "token": lambda length: 1 / sum(lengths),
        "sequence": lambda length: 1 / (filled * length),
        "constant": lambda length: 1 / (filled * constant),
    }
    return [of[weighting](length) if length else 0.0 for length in lengths]


def surrogate(ratio: float, advantage: float, setting: Setting) -> tuple[float, float, bool]:
    """The PPO objective of one ratio, its derivative by log(ratio), and whether a bound acted."""
    plain = ratio * advantage
    value = min(plain, min(max(ratio, 1 - setting.low), 1 + setting.high) * advantage)
    if setting.dual and advantage < 0:
        value = max(value, setting.dual * advantage)
    acted = value != plain
    return value, 0.0 if acted else plain, acted


def policy_terms(one: Attempt, setting: Setting) -> list[tuple[float, float, bool]]:
    """Per token: objective to be raised, its slope in the new log-prob, whether a bound acted."""
    logs = [a - b for a, b in zip(one.new, one.old, strict=True)]
    if setting.algorithm == "gspo":  # one term per sequence; d log s / d new_t = 1 / |o| is in the token's weight
        return [surrogate(math.exp(sum(logs) / len(logs)), one.advantage, setting)] * len(logs) if logs else []
    if setting.algorithm == "cispo":
        bounded = [min(max(math.exp(log), 1 - setting.low), 1 + setting.high) for log in logs]
        return [
            (weight * one.advantage * new, weight * one.advantage, weight != math.exp(log))
            for weight, new, log in zip(bounded, one.new, logs, strict=True)
        ]
    return [surrogate(math.exp(log), one.advantage, setting) for log in logs]


def divergence(new: float, ref: float, kind: str) -> tuple[float, float]:
    """Estimate of KL(policy || reference) at one token and its slope in `new`; k3 is cut at 10."""
    if kind == "k1":
        return new - ref, 1.0
    if kind == "k2":
        return (new - ref) ** 2 / 2, new - ref
    value = math.exp(ref - new) - (ref - new) - 1
    return (10.0, 0.0) if value > 10 else (value, 1 - math.exp(ref - new))


def corrections(one: Attempt, setting: Setting) -> list[float]:
    """What each token's policy term is multiplied by: trainer probability / engine probability, bounded somehow."""
    pairs = list(zip(one.old, one.engine, strict=True))
    if setting.mismatch == "none":
        return [1.0 for _ in pairs]
    ratios = [0.0 if engine is None else math.exp(old - engine) for old, engine in pairs]
    if setting.mismatch == "truncate":
        return [min(ratio, setting.mismatch_high) for ratio in ratios]
    if setting.mismatch == "mask":
        return [ratio if setting.mismatch_low <= ratio <= setting.mismatch_high else 0.0 for ratio in ratios]
    gaps = [0.0 if engine is None else old - engine for old, engine in pairs]
    mean = math.exp(sum(gaps) / max(1, len(gaps)))
    inside = setting.mismatch_low <= mean <= setting.mismatch_high
    return [float(inside and engine is not None) for _, engine in pairs]


def loss(attempts: Sequence[Attempt], setting: Setting) -> Result:
    """Loss of one optimiser step, its slopes, and weighted means of its parts."""
    shares = weights([len(one.new) for one in attempts], setting.weighting, setting.constant)
    total = {"loss": 0.0, "policy": 0.0, "kl": 0.0, "clip": 0.0}
    by_new: list[list[float]] = []
    by_entropy: list[list[float]] = []
    for one, share in zip(attempts, shares, strict=True):
        by_new.append([])
        by_entropy.append([-share * setting.entropy_coef for _ in one.new])
        columns = (policy_terms(one, setting), corrections(one, setting), one.new, one.ref, one.entropy)
        for (value, slope, acted), factor, new, ref, entropy in zip(*columns, strict=True):
            kl, kl_slope = divergence(new, ref, setting.kl)
            total["policy"] -= share * value
            total["kl"] += share * kl
            total["clip"] += share * acted
            total["loss"] += share * (setting.kl_coef * kl - factor * value - setting.entropy_coef * entropy)
            by_new[-1].append(share * (setting.kl_coef * kl_slope - factor * slope))
    return Result(total["loss"], by_new, by_entropy, total["policy"], total["kl"], total["clip"])


def head(logits: Sequence[float], target: int, temperature: float) -> tuple[float, float, list[float], list[float]]:
    """Log-prob of the target and entropy under softmax(logits / temperature), and their slopes in the logits."""
    scaled = [logit / temperature for logit in logits]
    top = max(scaled)
    normaliser = top + math.log(sum(math.exp(value - top) for value in scaled))
    logs = [value - normaliser for value in scaled]
    probs = [math.exp(log) for log in logs]
    entropy = -sum(p * log for p, log in zip(probs, logs, strict=True))
    by_target = [((index == target) - p) / temperature for index, p in enumerate(probs)]
    by_entropy = [-p * (log + entropy) / temperature for p, log in zip(probs, logs, strict=True)]
    return logs[target], entropy, by_target, by_entropy
