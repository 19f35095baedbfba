"""Hand values of advantages.py; the equations are in tests/golden. Must fail if groups or divisors are mixed up."""

import math

import numpy as np
import pytest
import torch

from hiexp.advantages import ADVANTAGES, group_advantages


@pytest.mark.parametrize("mode", ADVANTAGES)
def test_bug_27_fault_21_identical_rewards_have_exactly_no_advantage(mode):
    for value in (1.0, 0.0, 0.1, 0.7, 1 / 3):  # the mean of seven thirds is not a third in float32
        assert (group_advantages(torch.full((2, 7), value), mode) == 0).all()
    rewards = torch.tensor([[1.0] * 4, [0.0] * 4, [0.1] * 4, [0.7] * 4, [0.0, 1.0, 0.0, 0.1]])
    advantages = group_advantages(rewards, mode)
    assert advantages.isfinite().all() and (advantages[4] != 0).all()
    assert (advantages[:4] == 0).all() == (mode != "batch")  # there, other groups are compared with too


@pytest.mark.parametrize("mode", ADVANTAGES)
def test_bug_29_fault_21_groups_of_one_are_finite(mode):
    got = group_advantages(torch.tensor([[1.0], [0.0]]), mode)
    assert got.flatten().tolist() == pytest.approx([0.7071, -0.7071] if mode == "batch" else [1.0, 0.0], abs=1e-4)
    assert group_advantages(torch.tensor([[0.4]]), mode).item() == pytest.approx(0.0 if mode == "batch" else 0.4)


def test_bug_29_the_std_is_unbiased():
    root = math.sqrt(0.5)
    pair = group_advantages(torch.tensor([[1.0, 0.0]]), "group_std")[0].tolist()
    assert pair == pytest.approx([root, -root], abs=1e-4)
    four = [0.0, 0.0, 1.0, 0.0]
    wanted = (np.array(four) - np.mean(four)) / np.std(four, ddof=1)
    assert group_advantages(torch.tensor([four]), "group_std")[0].tolist() == pytest.approx(wanted.tolist(), abs=1e-4)


def test_bug_90_each_scaling_reproduces_its_hand_value():
    rewards = torch.tensor([[0.0, 1.0, 2.0], [0.0, 10.0, 20.0]])  # std 1 and 10, of all 8.0436; mean of all 5.5
    over_all = 8.04363
    by_hand = {
        "group_std": [[-1.0, 0.0, 1.0], [-1.0, 0.0, 1.0]],
        "group_mean": [[-1.0, 0.0, 1.0], [-10.0, 0.0, 10.0]],
        "batch_std": [[-1 / over_all, 0.0, 1 / over_all], [-10 / over_all, 0.0, 10 / over_all]],
        "batch": [[(r - 5.5) / over_all for r in row] for row in ((0.0, 1.0, 2.0), (0.0, 10.0, 20.0))],
    }
    assert set(by_hand) == set(ADVANTAGES)
    for mode, wanted in by_hand.items():
        torch.testing.assert_close(group_advantages(rewards, mode), torch.tensor(wanted), atol=1e-5, rtol=0)


@pytest.mark.parametrize("mode", ADVANTAGES)
def test_bug_30_advantages_follow_a_permutation_of_groups_and_members(mode):
    rewards = torch.tensor([[0.0, 1.0, 0.3], [0.2, 0.2, 0.9], [1.0, 1.0, 1.0]])
    groups, members = torch.tensor([2, 0, 1]), torch.tensor([1, 2, 0])
    moved = group_advantages(rewards[groups][:, members], mode)
    torch.testing.assert_close(moved, group_advantages(rewards, mode)[groups][:, members])


@pytest.mark.parametrize("mode", ["group_std", "group_mean"])
def test_bug_30_a_group_does_not_see_its_neighbours(mode):
    rewards = torch.tensor([[0.0, 1.0, 0.3], [0.2, 0.2, 0.9]])
    both = group_advantages(rewards, mode)
    assert torch.equal(both[:1], group_advantages(rewards[:1], mode))
    assert torch.equal(both[1:], group_advantages(rewards[1:], mode))


def test_the_rewards_given_are_left_alone():
    rewards = torch.tensor([[1.0], [2.0]])
    group_advantages(rewards, "group_std").add_(1.0)
    assert rewards.flatten().tolist() == [1.0, 2.0]
