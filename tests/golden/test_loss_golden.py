"""loss.py against reference_loss.py: values and gradients, and a whole update through a real Qwen2.

Must fail when: the sign of the advantage is flipped, a mean is taken per micro-batch, the KL arguments are swapped, old
log-probs are taken after the first mini-batch's step, a token is scored at its own instead of the preceding position.
"""

import copy
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_loss import Sequence_, advantages, loss
from transformers import Qwen2Config, Qwen2ForCausalLM

from hiexp.loss import LossConfig, group_advantages, policy_loss
from hiexp.trainer import OptimConfig, update_policy
from hiexp.trajectory import Segment, Source, Trajectory


@dataclass
class Inputs:
    advantages: torch.Tensor
    sequence: torch.Tensor
    old_logprobs: torch.Tensor
    ref_logprobs: torch.Tensor
    token_weights: torch.Tensor


def inputs(sequences: list[Sequence_], weighting: str) -> tuple[torch.Tensor, Inputs]:
    lengths = torch.tensor([len(sequence[0]) for sequence in sequences])
    share = (
        torch.full((len(lengths),), 1 / int(lengths.sum())) if weighting == "token" else 1 / (lengths * len(lengths))
    )
    new, old, ref = (
        torch.tensor([x for s in sequences for x in s[column]], dtype=torch.float64) for column in range(3)
    )
    index = torch.arange(len(lengths)).repeat_interleave(lengths)
    values = torch.tensor([sequence[3] for sequence in sequences], dtype=torch.float64)
    return new.requires_grad_(), Inputs(values[index], index, old, ref, share.double()[index])


logprob = st.floats(-3, -0.01)
token = st.tuples(logprob, st.floats(-0.7, 0.7), st.floats(-1.5, 3.5))
sequence = st.tuples(st.lists(token, min_size=1, max_size=5), st.sampled_from([-1.5, -0.3, 0.0, 0.4, 2.0]))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(sequence, min_size=1, max_size=4),
    st.sampled_from([("grpo", "token"), ("grpo", "sequence"), ("gspo", "sequence")]),
    st.sampled_from([(0.2, 0.28, 3.0), (0.2, 0.2, 0.0), (3e-4, 4e-4, 1.2)]),
    st.sampled_from([0.0, 1e-3, 0.5]),
)
def test_loss_and_gradient_equal_the_equations(drawn, kind, bounds, kl_coef):
    sequences = [([t[0] for t in ts], [t[0] - t[1] for t in ts], [t[0] + t[2] for t in ts], a) for ts, a in drawn]
    (algorithm, weighting), (low, high, dual) = kind, bounds
    wanted, gradients, parts = loss(sequences, algorithm, weighting, low, high, dual, kl_coef)
    cfg = LossConfig(algorithm, clip_low=low, clip_high=high, dual_clip=dual, kl_coef=kl_coef, weighting=weighting)
    new, batch = inputs(sequences, weighting)
    per_token, metrics = policy_loss(cfg, new, batch)
    total = (batch.token_weights * per_token).sum()
    total.backward()
    size = float((batch.token_weights * per_token.abs()).sum())  # terms of both signs cancel, in float32
    assert total.item() == pytest.approx(wanted, rel=1e-6, abs=1e-6 * size + 1e-9)
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([x for row in gradients for x in row], rel=1e-6, abs=1e-9)
    for name, key in (("loss/policy", "policy"), ("loss/kl", "kl"), ("loss/clip_frac", "clip")):
        assert float((batch.token_weights * metrics[name]).sum()) == pytest.approx(
            parts[key], rel=1e-6, abs=1e-6 * size + 1e-7
        )


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sampled_from([0.0, 0.1, 0.25, 1.0]), min_size=1, max_size=8), st.booleans())
def test_advantages_equal_the_equations(rewards, with_std):
    mode = "group_std" if with_std else "group_mean"
    got = group_advantages(torch.tensor([rewards]), mode)[0].tolist()
    assert got == pytest.approx(advantages(rewards, with_std), rel=1e-4, abs=1e-6)


def tiny(seed: int, tied: bool = True) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, tie_word_embeddings=tied, initializer_range=0.3)).eval()


def trajectory(sample: int, member: int) -> Trajectory:
    generator = torch.Generator().manual_seed(100 * sample + member)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, 40, (count,), generator=generator).tolist())

    one = Trajectory(f"q{sample}", member)
    one.append(Segment(Source.PROMPT, ids(2 + sample)))
    for turn in range(1 + (sample + member) % 3):
        one.append(Segment(Source.POLICY, ids(2 + member), (-3.0,) * (2 + member)))
        one.append(Segment(Source.DOCUMENT, ids(3 + turn)))
    one.append(Segment(Source.POLICY, ids(2), (-3.0, -3.0)))
    return one


def logprobs(model: Qwen2ForCausalLM, one: Trajectory, temperature: float) -> torch.Tensor:
    """One row at a time, the whole head, the mask straight from the segments: nothing shared with the package."""
    ids = torch.tensor([one.token_ids])
    scores = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0].double() / temperature, dim=-1)
    wanted = [i for i, source in enumerate(one.sources) if source is Source.POLICY]
    return torch.stack([scores[i - 1, one.token_ids[i]] for i in wanted])


def reference_update(
    policy, reference, groups, rewards, cfg: LossConfig, mini_batches: int, lr: float, temperature: float
):
    """Plain SGD on the equations: old and reference log-probs of everything first, then one step per mini-batch."""
    with torch.no_grad():
        old = {id(one): logprobs(policy, one, temperature).tolist() for group in groups for one in group}
        ref = {id(one): logprobs(reference, one, temperature).tolist() for group in groups for one in group}
    for first in range(mini_batches):
        rows, new = [], []
        for group, values in list(zip(groups, rewards, strict=True))[first::mini_batches]:
            for one, advantage in zip(group, advantages(values), strict=True):
                new.append(logprobs(policy, one, temperature))
                rows.append((new[-1].tolist(), old[id(one)], ref[id(one)], advantage))
        bounds = (cfg.clip_low, cfg.clip_high, cfg.dual_clip, cfg.kl_coef)
        _, slopes, _ = loss(rows, cfg.algorithm, cfg.weighting, *bounds)
        policy.zero_grad()
        torch.autograd.backward(new, [torch.tensor(slope, dtype=torch.float64) for slope in slopes])
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter -= lr * parameter.grad


@pytest.mark.parametrize("budget", [1, 60, 10_000])
@pytest.mark.parametrize(
    ("algorithm", "weighting", "clip"), [("grpo", "token", 0.2), ("grpo", "sequence", 0.02), ("gspo", "sequence", 1e-3)]
)
def test_B34_a_whole_update_equals_the_equations_for_every_micro_batch_size(
    algorithm, weighting, clip, budget, tmp_path
):
    cfg = LossConfig(algorithm, clip_low=clip, clip_high=clip, kl_coef=0.05, weighting=weighting)
    groups = [[trajectory(sample, member) for member in range(3)] for sample in range(4)]
    rewards = [[0.0, 1.0, 0.0], [1.0, 1.0, 1.0], [0.1, 0.6, 1.0], [0.0, 0.0, 1.0]]
    policy, reference = tiny(0, tied=algorithm == "grpo"), tiny(1, tied=algorithm == "grpo")
    wanted = copy.deepcopy(policy)
    reference_update(wanted, reference, groups, rewards, cfg, mini_batches=2, lr=0.05, temperature=0.8)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.05)
    optim = OptimConfig(max_grad_norm=1e9, mini_batches=2, tokens_per_micro_batch=budget)
    flat = [one for group in groups for one in group]
    metrics = update_policy(policy, reference, optimizer, flat, torch.tensor(rewards), cfg, optim, 0.8, tmp_path, 0)
    assert metrics["loss/ratio_max"] > 1.05  # the second mini-batch has left the old policy
    if clip < 0.2:
        assert metrics["loss/clip_frac"] > 0
    start = tiny(0, tied=algorithm == "grpo")
    for (name, got), expected in zip(policy.named_parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}")
    assert not torch.allclose(policy.model.norm.weight, start.model.norm.weight, atol=1e-3)
