"""Hand values and limits of loss.py; the equations as a whole are in tests/golden/test_loss_golden.py."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from hiexp.config import ConfigError
from hiexp.loss import KL, LossConfig
from hiexp.loss import policy_loss as whole_loss


@dataclass
class Inputs:
    advantages: torch.Tensor
    sequence: torch.Tensor
    old_logprobs: torch.Tensor | None
    ref_logprobs: torch.Tensor | None
    rollout_logprobs: torch.Tensor


def inputs(advantages, old, ref=None, sequence=None, rollout=None) -> Inputs:
    """`old` None: the trainer's log-probs are those of now; `rollout` defaults to -1 for every token."""
    count = len(advantages)
    rows = torch.zeros(count, dtype=torch.long) if sequence is None else torch.tensor(sequence)
    before, reference = (None if values is None else torch.tensor(values) for values in (old, ref))
    engine = torch.full((count,), -1.0) if rollout is None else torch.tensor(rollout)
    return Inputs(torch.tensor(advantages), rows, before, reference, engine)


def policy_loss(cfg, logprobs, batch, entropy=None):
    return whole_loss(cfg, logprobs, torch.zeros_like(logprobs) if entropy is None else entropy, batch)


def test_B27_a_group_without_advantage_gives_no_policy_gradient():
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    loss, _ = policy_loss(LossConfig(), logprobs, inputs([0.0, 0.0], [-1.3, -1.0]))
    loss.sum().backward()
    assert logprobs.grad is not None and (logprobs.grad == 0).all()


@pytest.mark.parametrize(("new", "ref", "wanted"), [(-1.0, -1.5, 0.106531), (-1.5, -1.0, 0.148721), (-2.0, -2.0, 0.0)])
def test_B38_k3_has_the_right_direction(new, ref, wanted):
    cfg = LossConfig(kl_coef=0.5)
    loss, metrics = policy_loss(cfg, torch.tensor([new]), inputs([0.0], [new], [ref]))
    assert metrics["loss/kl"].item() == pytest.approx(wanted, abs=1e-6)
    assert loss.item() == pytest.approx(0.5 * wanted, abs=1e-6)


def test_B38_every_estimator_is_its_own():
    wanted = {"k1": 0.5, "k2": 0.125, "k3": 0.106531}
    for name, value in wanted.items():
        cfg = LossConfig(kl_coef=1.0, kl_estimator=name)
        loss, metrics = policy_loss(cfg, torch.tensor([-1.0]), inputs([0.0], [-1.0], [-1.5]))
        assert metrics["loss/kl"].item() == loss.item() == pytest.approx(value, abs=1e-6)
    assert set(wanted) == set(KL)


def test_B38_k3_is_the_kl_of_policy_from_reference_in_the_mean():
    policy, reference = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.6, 0.1, 0.3])
    _, metrics = policy_loss(
        LossConfig(), policy.log(), inputs([0.0] * 3, policy.log().tolist(), reference.log().tolist())
    )
    assert (metrics["loss/kl"] >= 0).all()
    exact = float((policy * (policy / reference).log()).sum())
    assert float((policy * metrics["loss/kl"]).sum()) == pytest.approx(exact, abs=1e-6)


def test_a_positive_advantage_raises_the_log_prob():
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    loss, _ = policy_loss(LossConfig(), logprobs, inputs([2.0, -2.0], [-1.0, -1.0]))
    loss.sum().backward()
    assert logprobs.grad is not None and logprobs.grad.tolist() == pytest.approx([-2.0, 2.0])


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.5, 1.0, -1.28, 0.0),  # clipped above: 1 + 0.28
        (0.5, 1.0, -0.5, -0.5),  # may always be raised again
        (0.5, -1.0, 0.8, 0.0),  # clipped below: 1 - 0.2
        (1.5, -1.0, 1.5, 1.5),
        (5.0, -1.0, 3.0, 0.0),  # dual clip
        (1.1, 1.0, -1.1, -1.1),
    ],
)
def test_clip_and_dual_clip_hand_values(ratio, advantage, loss, gradient):
    old = -2.0
    new = torch.tensor([old + float(np.log(ratio))], requires_grad=True)
    got, metrics = policy_loss(LossConfig(clip_high=0.28), new, inputs([advantage], [old]))
    got.sum().backward()
    assert new.grad is not None
    assert (got.item(), new.grad.item()) == (pytest.approx(loss, rel=1e-5), pytest.approx(gradient, rel=1e-5))
    assert metrics["loss/clip_frac"].item() == float(gradient == 0)
    assert metrics["loss/ratio_max"].item() == pytest.approx(ratio, rel=1e-5)


def test_dual_clip_can_be_turned_off():
    got, _ = policy_loss(LossConfig(dual_clip=0.0), torch.tensor([0.0]), inputs([-1.0], [float(-np.log(5))]))
    assert got.item() == pytest.approx(5.0, rel=1e-5)


def test_gspo_equals_sequence_weighted_grpo_on_policy_and_takes_the_geometric_mean_off_policy():
    rows, old = [0, 0, 1], [-1.0, -2.0, -0.5]
    gradients = []
    for cfg in (LossConfig("gspo", weighting="sequence"), LossConfig("grpo", weighting="sequence")):
        new = torch.tensor(old, requires_grad=True)
        policy_loss(cfg, new, inputs([1.0, 1.0, -1.0], old, sequence=rows))[0].sum().backward()
        gradients.append(new.grad)
    torch.testing.assert_close(gradients[0], gradients[1])
    cfg = LossConfig("gspo", weighting="sequence", clip_low=0.5, clip_high=0.5)
    new = torch.tensor([-0.8, -2.1, -0.5])
    loss, _ = policy_loss(cfg, new, inputs([1.0, 1.0, -1.0], old, sequence=rows))
    mean = float(np.exp(0.05))
    assert loss.tolist() == pytest.approx([-mean, -mean, 1.0], rel=1e-5)


def test_B32_no_token_at_all_is_a_loss_of_nothing():
    for cfg in (LossConfig(), LossConfig("gspo", weighting="sequence")):
        loss, metrics = policy_loss(cfg, torch.zeros(0, requires_grad=True), inputs([], [], []))
        assert loss.sum().item() == 0.0
        assert all(value.numel() == 0 for value in metrics.values())


def test_extreme_log_ratios_stay_finite():
    new = torch.tensor([0.0, -200.0], requires_grad=True)
    loss, metrics = policy_loss(LossConfig(dual_clip=0.0), new, inputs([-1.0, 1.0], [-200.0, 0.0], [-200.0, 0.0]))
    loss.sum().backward()
    assert new.grad is not None and new.grad.isfinite().all() and loss.isfinite().all()
    assert all(not value.requires_grad for value in metrics.values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": "grpoo"}, "did you mean 'grpo'"),
        ({"advantage": "std"}, "known: batch, batch_std, group_mean, group_std"),
        ({"weighting": "tokens"}, "did you mean 'token'"),
        ({"algorithm": "gspo", "weighting": "token"}, "weighting=token"),
        ({"algorithm": "cispo", "clip_high": float("nan")}, "clip_high=nan"),
        ({"algorithm": "cispo", "clip_low": 1.5}, "clip_low=1.5"),
        ({"kl_estimator": "k4"}, "known: k1, k2, k3"),
        ({"mismatch": "tis"}, "known: mask, none, sequence, truncate"),
        ({"mismatch_low": 1.0}, "mismatch_low=1.0"),
        ({"mismatch_high": 0.9}, "mismatch_high=0.9"),
        ({"entropy_coef": float("nan")}, "entropy_coef=nan"),
        ({"constant_tokens": -1}, "constant_tokens=-1"),
        ({"clip_low": 1.5}, "clip_low=1.5"),
        ({"dual_clip": 0.5}, "dual_clip=0.5"),
        ({"kl_coef": -1.0}, "kl_coef=-1.0"),
    ],
)
def test_wrong_settings_are_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        LossConfig(**changes)
