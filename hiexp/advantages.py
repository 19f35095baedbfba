"""Rewards to advantages: what an attempt is compared with. A new way is a name in ADVANTAGES and its line below."""

from torch import Tensor


def group_advantages(rewards: Tensor, mode: str) -> Tensor:
    """Rewards [N, G] -> advantages [N, G] (DeepSeekMath; stds are unbiased).

    Rewards that are identical where they are compared give exactly 0. A group of one has nothing to compare with: its
    advantage is its reward, unless the batch is compared.
    """
    if rewards.shape[1] == 1 and mode != "batch":
        return rewards.clone()
    whole = rewards.flatten()[None]
    of, over = (whole if mode == "batch" else rewards), (whole if mode.startswith("batch") else rewards)
    advantages = rewards - of.mean(dim=1, keepdim=True)
    if mode != "group_mean" and over.shape[1] > 1:
        advantages = advantages / (over.std(dim=1, keepdim=True) + 1e-6)
    identical = (of == of[:, :1]).all(dim=1, keepdim=True)  # the mean is rounded
    return advantages.masked_fill(identical, 0.0)


ADVANTAGES = ("group_std", "group_mean", "batch_std", "batch")
