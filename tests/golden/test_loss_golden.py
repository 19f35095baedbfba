"""The objective against reference_loss.py: values and slopes, logits to gradient, and a whole update of a real Qwen2.

Must fail when: the sign of the advantage is flipped, a mean is taken per micro-batch, the KL arguments are swapped, old
log-probs are taken after the first mini-batch's step, a token is scored at its own instead of the preceding position,
the temperature is left out, a correction is applied to the wrong term or an algorithm has another one's settings.
"""

import copy
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_loss import RECIPES, Attempt, Setting, advantages, head, loss, weights
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from hiexp import trainer
from hiexp.advantages import ADVANTAGES, group_advantages
from hiexp.batching import TokenView
from hiexp.fused import fused_loss
from hiexp.loss import ALGORITHMS, KL, MISMATCH, LossConfig, policy_loss
from hiexp.trainer import OptimConfig, update_policy
from hiexp.trajectory import Segment, Source, Trajectory


def config(setting: Setting) -> LossConfig:
    keys = {"clip_low": setting.low, "clip_high": setting.high, "dual_clip": setting.dual, "kl_estimator": setting.kl}
    same = ("algorithm", "weighting", "kl_coef", "entropy_coef", "mismatch", "mismatch_low", "mismatch_high")
    keys |= {name: getattr(setting, name) for name in same}
    return LossConfig(**keys, constant_tokens=setting.constant)


def view(attempts: list[Attempt], dtype: torch.dtype = torch.float64) -> TokenView:
    index = torch.arange(len(attempts)).repeat_interleave(torch.tensor([len(one.new) for one in attempts]))
    values = torch.tensor([one.advantage for one in attempts], dtype=dtype)[index]
    engine = [float("nan") if value is None else value for one in attempts for value in one.engine]
    old, ref = ([value for one in attempts for value in column(one)] for column in (lambda a: a.old, lambda a: a.ref))
    return TokenView(values, index, *(torch.tensor(column, dtype=dtype) for column in (engine, old, ref)))


def shares(attempts: list[Attempt], setting: Setting) -> Tensor:
    """The weight of every token, in double precision."""
    each = weights([len(one.new) for one in attempts], setting.weighting, setting.constant)
    return torch.tensor([w for w, one in zip(each, attempts, strict=True) for _ in one.new], dtype=torch.float64)


def flat(rows: list[list[float]]) -> list[float]:
    return [value for row in rows for value in row]


def test_every_algorithm_has_the_settings_of_its_paper():
    assert set(RECIPES) == set(ALGORITHMS)
    for name, (mode, setting) in RECIPES.items():
        cfg = LossConfig(name)
        got = (cfg.advantage, cfg.weighting, cfg.clip_low, cfg.clip_high, cfg.dual_clip, cfg.kl_coef)
        assert got == (mode, setting.weighting, setting.low, setting.high, setting.dual, setting.kl_coef), name


gap = st.one_of(st.none(), st.floats(-1.5, 1.5))
token = st.tuples(st.floats(-3, -0.01), st.floats(-0.7, 0.7), st.floats(-1.5, 3.5), gap, st.floats(0, 3))
attempt = st.tuples(st.lists(token, max_size=5), st.sampled_from([-1.5, -0.3, 0.0, 0.4, 2.0]))
kinds = st.sampled_from(
    [(name, way) for name in RECIPES for way in ("token", "constant") if name != "gspo"]
    + [(name, "sequence") for name in RECIPES]
)


def built(drawn) -> list[Attempt]:
    rows = []
    for tokens, advantage in drawn:
        new, old = [t[0] for t in tokens], [t[0] - t[1] for t in tokens]
        engine = [None if t[3] is None else before + t[3] for t, before in zip(tokens, old, strict=True)]
        rows.append(Attempt(new, old, [t[0] + t[2] for t in tokens], engine, [t[4] for t in tokens], advantage))
    return rows


@settings(deadline=None, max_examples=150)
@given(
    st.lists(attempt, min_size=1, max_size=4).filter(lambda rows: any(tokens for tokens, _ in rows)),
    kinds,
    st.sampled_from([(0.2, 0.28, 3.0), (0.2, 0.2, 0.0), (3e-4, 4e-4, 1.2), (1.0, 1.5, 0.0)]),
    st.tuples(st.sampled_from([0.0, 1e-3, 0.5]), st.sampled_from(list(KL)), st.sampled_from([0.0, 0.3])),
    st.tuples(st.sampled_from(list(MISMATCH)), st.sampled_from([(0.5, 2.0), (0.9, 1.1)])),
)
def test_loss_and_slopes_equal_the_equations(drawn, kind, bounds, terms, correction):
    attempts, limits = built(drawn), correction[1]
    setting = Setting(*kind, *bounds, *terms, 7, correction[0], *limits)
    wanted = loss(attempts, setting)
    new = torch.tensor(flat([one.new for one in attempts]), dtype=torch.float64, requires_grad=True)
    entropy = torch.tensor(flat([one.entropy for one in attempts]), dtype=torch.float64, requires_grad=True)
    per_token, metrics = policy_loss(config(setting), new, entropy, view(attempts))
    share = shares(attempts, setting)
    total = (share * per_token).sum()
    slopes = torch.autograd.grad(total, (new, entropy), allow_unused=True, materialize_grads=True)
    size = float((share * per_token.detach().abs()).sum())  # terms of both signs cancel
    assert total.item() == pytest.approx(wanted.loss, rel=1e-9, abs=1e-9 * size + 1e-12)
    assert slopes[0].tolist() == pytest.approx(flat(wanted.by_new), rel=1e-9, abs=1e-12)
    assert slopes[1].tolist() == pytest.approx(flat(wanted.by_entropy), rel=1e-9, abs=1e-12)
    parts = {"loss/policy": wanted.policy, "loss/clip_frac": wanted.clip}
    parts |= {"loss/kl": wanted.kl} if setting.kl_coef else {}
    for name, value in parts.items():
        assert float((share * metrics[name]).sum()) == pytest.approx(value, rel=1e-6, abs=1e-6), name


@settings(deadline=None, max_examples=80)
@given(st.integers(1, 5), st.lists(st.sampled_from([0.0, 0.1, 0.25, 1.0]), min_size=1, max_size=15))
def test_advantages_equal_the_equations(size, rewards):
    groups = [rewards[start : start + size] for start in range(0, len(rewards) - size + 1, size)] or [rewards]
    for mode in ADVANTAGES:
        got = group_advantages(torch.tensor(groups), mode).tolist()
        for row, wanted in zip(got, advantages(groups, mode), strict=True):
            assert row == pytest.approx(wanted, rel=1e-4, abs=1e-6), mode


ATTEMPTS = [  # clipped on both sides, dual clip, an advantage of 0, engine unknown, gaps inside and outside the bounds
    ([0.5, -0.1, 0.02], [0.1, -1.2, None], [0.2, -0.4, 1.0], 1.3),
    ([-0.6, 0.1], [0.3, -0.2], [0.0, 0.3], -0.7),
    ([1.3, 0.05, -0.3, 0.0], [1.4, 0.2, 0.9, 1.1], [-0.5, 0.1, 0.2, 3.0], -1.1),
    ([0.2], [0.05], [0.4], 0.0),
]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("mismatch", list(MISMATCH))
@pytest.mark.parametrize("algorithm", list(RECIPES))
def test_from_logits_to_gradient_through_the_fused_head(algorithm, mismatch, temperature):
    """With the unit matrix for a head, hidden states are logits: their gradient is d loss / d logits by hand."""
    generator = torch.Generator().manual_seed(3)
    kl = {"grpo": "k1", "gspo": "k2"}.get(algorithm, "k3")
    bounds = (0.02, 0.03) if algorithm == "gspo" else (RECIPES[algorithm][1].low, RECIPES[algorithm][1].high)
    weighting = RECIPES[algorithm][1].weighting
    setting = Setting(algorithm, weighting, *bounds, 3.0, 0.2, kl, 0.1, 7, mismatch, 0.6, 1.8)
    logits = torch.randn(10, 6, generator=generator).mul(2)
    targets = torch.randint(0, 6, (10,), generator=generator)
    rows = [
        head(values, target, temperature)
        for values, target in zip(logits.double().tolist(), targets.tolist(), strict=True)
    ]
    attempts, at = [], 0
    for steps, gaps, refs, advantage in ATTEMPTS:
        part = rows[at : at + len(steps)]
        new, entropy, at = [row[0] for row in part], [row[1] for row in part], at + len(steps)
        old = [value - step for value, step in zip(new, steps, strict=True)]
        engine = [None if gap is None else value - gap for value, gap in zip(old, gaps, strict=True)]
        ref = [value + step for value, step in zip(new, refs, strict=True)]
        attempts.append(Attempt(new, old, ref, engine, entropy, advantage))
    wanted = loss(attempts, setting)
    slopes = zip(flat(wanted.by_new), flat(wanted.by_entropy), rows, strict=True)
    gradient = [[a * x + b * y for x, y in zip(row[2], row[3], strict=True)] for a, b, row in slopes]
    batch, cfg, share = view(attempts, torch.float32), config(setting), shares(attempts, setting).float()

    def objective(logprobs: Tensor, entropy: Tensor, at: slice):
        cut = (batch.advantages, batch.sequence, batch.rollout_logprobs, batch.old_logprobs, batch.ref_logprobs)
        losses, metrics = policy_loss(cfg, logprobs, entropy, TokenView(*(column[at] for column in cut)))
        return share[at] * losses, metrics

    for chunk in (1, 3, 100):
        hidden = logits.clone().requires_grad_()
        whole = batch.sequence if cfg.whole_sequences else None
        output = fused_loss(hidden, torch.eye(6), torch.arange(10), targets, objective, temperature, whole, chunk)
        output.loss.backward()
        assert output.loss.item() == pytest.approx(wanted.loss, rel=2e-6, abs=2e-6)
        torch.testing.assert_close(hidden.grad, torch.tensor(gradient), rtol=2e-5, atol=1e-6)
        assert output.logprobs.tolist() == pytest.approx([row[0] for row in rows], abs=2e-6)
        assert output.entropy.tolist() == pytest.approx([row[1] for row in rows], abs=2e-6)


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
        one.append(Segment(Source.POLICY, ids(2 + member), (-5.0,) * (2 + member)))
        one.append(Segment(Source.DOCUMENT, ids(3 + turn)))
    one.append(Segment(Source.POLICY, ids(2), (-5.0, -5.0)))
    return one


def scores(model: Qwen2ForCausalLM, one: Trajectory, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies one row at a time, the whole head, the mask straight from the segments."""
    ids = torch.tensor([one.token_ids])
    logs = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0].double() / temperature, dim=-1)
    wanted = [i for i, source in enumerate(one.sources) if source is Source.POLICY]
    return (
        torch.stack([logs[i - 1, one.token_ids[i]] for i in wanted]),
        torch.stack([-(logs[i - 1].exp() * logs[i - 1]).sum() for i in wanted]),
    )


def reference_update(policy, reference, groups, by_attempt, setting: Setting, lr: float, temperature: float):
    """Plain SGD on the equations: old and reference log-probs of everything first, then a step for each of two
    mini-batches."""
    with torch.no_grad():
        old = {id(one): scores(policy, one, temperature)[0].tolist() for group in groups for one in group}
        ref = {id(one): scores(reference, one, temperature)[0].tolist() for group in groups for one in group}
    for first in range(2):
        rows, outputs = [], []
        for group, values in list(zip(groups, by_attempt, strict=True))[first::2]:
            for one, advantage in zip(group, values, strict=True):
                new, entropy = scores(policy, one, temperature)
                outputs += [new, entropy]
                fixed = (old[id(one)], ref[id(one)], one.rollout_logprobs, entropy.tolist(), advantage)
                rows.append(Attempt(new.tolist(), *fixed))
        result = loss(rows, setting)
        slopes = [slope for pair in zip(result.by_new, result.by_entropy, strict=True) for slope in pair]
        policy.zero_grad()
        torch.autograd.backward(outputs, [torch.tensor(slope, dtype=torch.float64) for slope in slopes])
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter -= lr * parameter.grad


CASES = {
    "grpo": ("group_std", Setting("grpo", "token", 0.2, 0.2, 3.0, 0.05)),
    "grpo by sequence": ("batch_std", Setting("grpo", "sequence", 0.02, 0.02, 3.0, 0.05, "k2")),
    "grpo, tokens dropped": ("group_std", Setting("grpo", "token", 0.2, 0.2, mismatch="mask", entropy_coef=0.02)),
    "gspo": ("group_std", Setting("gspo", "sequence", 1e-3, 1e-3, 0.0, 0.05)),
    "gspo, sequences dropped": ("group_std", Setting("gspo", "sequence", 1e-3, 1e-3, mismatch="sequence")),
    "dr_grpo": ("group_mean", Setting("dr_grpo", "constant", 0.02, 0.02)),
    "dapo": ("group_std", Setting("dapo", "token", 0.01, 0.02, mismatch="truncate", entropy_coef=0.1)),
    "cispo": ("group_std", Setting("cispo", "token", 1.0, 0.05, mismatch="sequence")),
    "reinforce_pp": ("batch", Setting("reinforce_pp", "token", 0.2, 0.2, 0.0, 0.1, "k1")),
}


@pytest.mark.parametrize(("budget", "packed", "chunk"), [(1, True, 1024), (60, False, 1024), (60, True, 3)])
@pytest.mark.parametrize("case", list(CASES))
def test_bug_34_a_whole_update_equals_the_equations_for_every_micro_batch_size(
    case, budget, packed, chunk, tmp_path, monkeypatch
):
    monkeypatch.setattr(trainer, "fused_loss", partial(fused_loss, chunk_rows=chunk))
    mode, setting = CASES[case]
    groups = [[trajectory(sample, member) for member in range(3)] for sample in range(4)]
    rewards = [[0.0, 1.0, 0.0], [1.0, 1.0, 1.0], [0.1, 0.6, 1.0], [0.0, 0.0, 1.0]]
    tied = setting.algorithm != "gspo"
    policy, reference, start = tiny(0, tied), tiny(1, tied), tiny(0, tied)
    wanted = copy.deepcopy(policy)
    lr = 0.5 if setting.algorithm == "dr_grpo" else 0.05
    reference_update(wanted, reference, groups, advantages(rewards, mode), setting, lr, temperature=0.8)
    optim = OptimConfig(max_grad_norm=1e9, mini_batches=2, tokens_per_micro_batch=budget, packed=packed)
    cfg = LossConfig(**(vars(config(setting)) | {"advantage": mode}))
    flat = [one for group in groups for one in group]
    parts = (torch.optim.SGD(policy.parameters(), lr=lr), flat, torch.tensor(rewards), cfg, optim, 0.8, tmp_path, 0)
    metrics = update_policy(policy, reference, *parts)
    assert metrics["loss/ratio_max"] > 1.02  # the second mini-batch has left the old policy
    assert metrics["loss/clip_frac"] > 0 or setting.low == 0.2 or case == "gspo, sequences dropped"
    assert setting.mismatch in ("none", "truncate") or 0 < metrics["loss/is_dropped_frac"] < 1
    for (name, got), expected in zip(policy.named_parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}")
    assert not torch.allclose(policy.model.norm.weight, start.model.norm.weight, atol=1e-3)
