"""update_policy and sft_step on a real two-layer Qwen2; tests/golden/test_loss_golden.py has the values.

Must fail if: a hidden state off the mask reaches the loss, a non-finite gradient reaches the weights, groups are split
over mini-batches, stale or interleaved trajectories are accepted, skipped rows change the denominators.
"""

import copy
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import Qwen2Config, Qwen2ForCausalLM

from hiexp import trainer
from hiexp.config import ConfigError
from hiexp.loss import LossConfig
from hiexp.trainer import OptimConfig, make_optimizer, sft_step, update_policy
from hiexp.trajectory import Segment, Source, Trajectory

OPTIM = OptimConfig(lr=1e-2, max_grad_norm=1e9)
STRICT = OptimConfig(lr=1e-2, max_grad_norm=1e9, max_nonfinite=0)
REWARDS = torch.tensor([[0.0, 1.0], [1.0, 1.0], [0.0, 0.0], [0.3, 0.9]])


def tiny(seed: int = 0) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, tie_word_embeddings=True, initializer_range=0.3)).eval()


def trajectory(sample: int, member: int, turns: int = 2, trailing: int = 0, version: int = 0) -> Trajectory:
    generator = torch.Generator().manual_seed(100 * sample + member)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, 40, (count,), generator=generator).tolist())

    one = Trajectory(f"q{sample}", member, policy_version=version)
    one.append(Segment(Source.PROMPT, ids(3 + sample)))
    one.append(Segment(Source.EXPERIENCE, ids(2)))
    for _ in range(turns):
        one.append(Segment(Source.POLICY, ids(2 + member), (-3.0,) * (2 + member)))
        one.append(Segment(Source.DOCUMENT, ids(4)))
    if turns:
        one.append(Segment(Source.POLICY, ids(2), (-3.0, -3.0)))
    one.append(Segment(Source.DOCUMENT, (7,) * trailing))
    return one


def groups(**settings) -> list[Trajectory]:
    return [trajectory(sample, member, **settings) for sample in range(4) for member in range(2)]


def state(model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def same(model, before: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def update(
    policy, trajectories, tmp_path, rewards=REWARDS, reference=None, loss=None, optim=OPTIM, step=0, temperature=1.0
):
    """One call with plain SGD, so that the change of the weights is the gradient."""
    optimizer = torch.optim.SGD(policy.parameters(), lr=optim.lr)
    cfg = loss or LossConfig(kl_coef=0.0)
    return update_policy(policy, reference, optimizer, trajectories, rewards, cfg, optim, temperature, tmp_path, step)


def values(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("time/")}


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_B23_hidden_states_off_the_mask_change_nothing_bit_for_bit(kl_coef, tmp_path):
    cfg, results, metrics = LossConfig(kl_coef=kl_coef), [], []
    for noisy in (False, True):
        policy, reference = tiny(0), tiny(1)
        if noisy:
            spoil_unkept(policy)
            spoil_unkept(reference)
        metrics.append(update(policy, groups(), tmp_path, reference=reference, loss=cfg))
        results.append(state(policy))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
    assert values(metrics[0]) == values(metrics[1])
    assert not same(tiny(0), results[0])


def spoil_unkept(model) -> None:
    """Add noise to every hidden state, after the last norm, that predicts no policy token of `groups()`."""
    kept: dict[tuple[int, ...], list[int]] = {}
    for one in groups():
        mask = one.response_mask
        kept[tuple(one.token_ids[:6])] = [position - 1 for position, on in enumerate(mask) if on]

    def spoil(module, arguments, keywords, output):
        noise = torch.randn_like(output.last_hidden_state)
        for row, ids in enumerate(keywords["input_ids"].tolist()):
            noise[row, kept[tuple(ids[:6])]] = 0.0
        output.last_hidden_state = output.last_hidden_state + noise
        return output

    model.model.register_forward_hook(spoil, with_kwargs=True)


def test_documents_that_nobody_answered_change_nothing(tmp_path):
    plain, trailing = tiny(), tiny()
    update(plain, groups(), tmp_path)
    update(trailing, groups(trailing=9), tmp_path)
    assert same(trailing, state(plain))


def test_the_update_raises_what_was_rewarded_and_lowers_the_rest(tmp_path):
    policy, pair = tiny(), [trajectory(0, 0), trajectory(0, 1)]

    def mean_logprob(one: Trajectory) -> float:
        scores = torch.log_softmax(policy(input_ids=torch.tensor([one.token_ids])).logits[0], dim=-1)
        wanted = [position for position, on in enumerate(one.response_mask) if on]
        return float(torch.stack([scores[p - 1, one.token_ids[p]] for p in wanted]).mean().detach())

    before = [mean_logprob(one) for one in pair]
    update(policy, pair, tmp_path, rewards=torch.tensor([[1.0, 0.0]]), optim=OptimConfig(lr=1e-3, max_grad_norm=1e9))
    after = [mean_logprob(one) for one in pair]
    assert after[0] > before[0] and after[1] < before[1]


def test_B27_groups_of_equal_rewards_move_nothing_without_kl_and_are_counted(tmp_path):
    policy = tiny()
    before = state(policy)
    rewards = torch.tensor([[1.0, 1.0], [0.0, 0.0], [0.1, 0.1], [1.0, 1.0]])
    metrics = update(policy, groups(), tmp_path, rewards=rewards)
    assert same(policy, before)
    assert metrics["group/zero_std_frac"] == 1.0
    assert (metrics["group/all_right_frac"], metrics["group/all_wrong_frac"]) == (0.5, 0.5)
    assert metrics["optim/skipped_mini_batches"] == 2 and metrics["optim/grad_norm"] == 0.0
    assert all(math.isfinite(value) for value in metrics.values())
    update(policy, groups(), tmp_path, rewards=rewards, reference=tiny(1), loss=LossConfig(kl_coef=0.1))
    assert not same(policy, before)  # they do carry the KL term


@pytest.mark.parametrize("weighting", ["token", "sequence", "constant"])
def test_skipping_rows_without_advantage_keeps_the_gradient(weighting, tmp_path):
    results = []
    for entropy_coef in (0.0, 1e-30):  # a term too small to move anything, but for its sake no row may be skipped
        cfg = LossConfig(kl_coef=0.0, weighting=weighting, constant_tokens=9, entropy_coef=entropy_coef)
        policy = tiny()
        results.append((policy, update(policy, groups(), tmp_path, loss=cfg)))
    (some, few), (every, all_) = results
    assert few["rollout/trained_tokens"] < all_["rollout/trained_tokens"]
    for got, wanted in zip(some.parameters(), every.parameters(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6)


def test_B32_B83_empty_trajectories_and_empty_steps_are_finite_and_counted(tmp_path):
    policy = tiny()
    before = state(policy)
    mixed = groups()
    mixed[0] = trajectory(0, 0, turns=0)
    metrics = update(policy, mixed, tmp_path, reference=tiny(1), loss=LossConfig())
    assert metrics["rollout/empty_sequences"] == 1.0
    assert all(math.isfinite(value) for value in metrics.values())
    assert not same(policy, before)
    before = state(policy)
    metrics = update(policy, groups(turns=0), tmp_path, reference=tiny(1), loss=LossConfig())
    assert same(policy, before)
    assert metrics["rollout/empty_sequences"] == 8.0 and metrics["optim/skipped_mini_batches"] == 2.0
    assert metrics["rollout/trained_tokens"] == 0.0 and metrics["loss/total"] == 0.0
    assert all(math.isfinite(value) for value in metrics.values())


def test_B30_siblings_must_be_adjacent_but_groups_may_come_in_any_order(tmp_path):
    one = groups()
    with pytest.raises(ValueError, match="siblings must be adjacent: q1"):
        update(tiny(), [one[0], one[2], one[1], one[3], *one[4:]], tmp_path)
    results, order = [], [3, 1, 0, 2]
    single = OptimConfig(lr=1e-2, max_grad_norm=1e9, mini_batches=1)
    for rows in (range(4), order):
        policy = tiny()
        moved = [one[2 * row + member] for row in rows for member in range(2)]
        update(policy, moved, tmp_path, rewards=REWARDS[list(rows)], optim=single)
        results.append(policy)
    for got, wanted in zip(*(policy.parameters() for policy in results), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("mini_batches", "wanted"), [(1, ["0123"]), (2, ["02", "13"]), (3, ["03", "1", "2"]), (9, list("0123"))]
)
def test_mini_batches_take_whole_groups_in_turn(mini_batches, wanted, tmp_path, monkeypatch):
    seen, pack = [], trainer.micro_batches

    def record(rows, *arguments):
        seen.append([(row.name, list(row.token_ids)) for row in rows])
        return pack(rows, *arguments)

    monkeypatch.setattr(trainer, "micro_batches", record)
    optim = OptimConfig(lr=1e-2, mini_batches=mini_batches)
    update(tiny(), groups(), tmp_path, loss=LossConfig(kl_coef=0.0, entropy_coef=1e-3), optim=optim)
    ids = {(one.sample_id, one.member): one.token_ids for one in groups()}
    assert seen == [[(f"q{n}", ids[f"q{n}", member]) for n in names for member in range(2)] for names in wanted]


def test_one_mini_batch_is_exactly_on_policy(tmp_path):
    optim = OptimConfig(lr=1e-2, mini_batches=1, tokens_per_micro_batch=40)
    metrics = update(tiny(), groups(), tmp_path, optim=optim)
    assert metrics["loss/ratio_max"] == 1.0 and metrics["loss/clip_frac"] == 0.0
    assert "loss/kl" not in metrics
    assert update(tiny(), groups(), tmp_path)["loss/ratio_max"] > 1.0


def test_mismatch_is_zero_for_the_trainers_own_log_probs_and_k3_otherwise(tmp_path):
    policy, exact = tiny(), []
    for one in groups():
        scores = torch.log_softmax(policy(input_ids=torch.tensor([one.token_ids])).logits[0] / 0.7, dim=-1)
        rest = iter(float(scores[p - 1, one.token_ids[p]].detach()) for p, on in enumerate(one.response_mask) if on)
        segments = [
            Segment(s.source, s.token_ids, tuple(next(rest) for _ in s.logprobs)) if s.logprobs else s
            for s in one.segments
        ]
        exact.append(Trajectory(one.sample_id, one.member, segments=segments))
    values = [value for one in exact for value in one.rollout_logprobs]
    loss = LossConfig()
    metrics = update(tiny(), exact, tmp_path, reference=tiny(), loss=loss, temperature=0.7)
    assert metrics["rollout/mismatch_kl"] == pytest.approx(0.0, abs=1e-7) and metrics["rollout/mismatch_max"] < 1e-4
    metrics = update(
        tiny(), groups(), tmp_path, reference=tiny(), loss=loss, temperature=0.7
    )  # these claim -3 everywhere
    gaps = np.array(values) + 3.0
    assert metrics["rollout/mismatch_kl"] == pytest.approx(float((np.exp(gaps) - gaps - 1).mean()), rel=1e-4)
    assert metrics["rollout/mismatch_max"] == pytest.approx(float(np.abs(gaps).max()), rel=1e-4)


def test_signal_metrics_and_the_identity_of_the_advantage_variance(tmp_path):
    rewards = torch.tensor([[0.0, 1.0, 0.0, 0.4], [1.0] * 4, [0.3, 0.9, 0.1, 0.0], [0.1] * 4])
    trajectories = [trajectory(sample, member) for sample in range(4) for member in range(4)]
    metrics = update(tiny(), trajectories, tmp_path, rewards=rewards)
    assert metrics["reward/within_group_var"] == pytest.approx(np.var(rewards.numpy(), axis=1).mean(), rel=1e-5)
    assert metrics["group/zero_std_frac"] == 0.5
    assert (metrics["group/all_right_frac"], metrics["group/all_wrong_frac"]) == (0.25, 0.25)
    assert metrics["advantage/var"] == pytest.approx((1 - 0.5) * (4 - 1) / 4, rel=1e-4)  # (1 - rho0)(G - 1)/G


def test_gradient_norms_are_those_before_clipping(tmp_path):
    free, bound = tiny(), tiny()
    single = OptimConfig(lr=1.0, max_grad_norm=1e9, mini_batches=1)
    metrics = update(free, groups(), tmp_path, optim=single)
    clipped = update(bound, groups(), tmp_path, optim=OptimConfig(lr=1.0, max_grad_norm=1e-3, mini_batches=1))
    norms = []
    for policy in (free, bound):
        start = state(tiny())
        norms.append(math.sqrt(sum(float(((p - start[n]) ** 2).sum().detach()) for n, p in policy.named_parameters())))
    assert metrics["optim/grad_norm"] == pytest.approx(norms[0], rel=1e-3)
    assert clipped["optim/grad_norm"] == pytest.approx(metrics["optim/grad_norm"], rel=1e-6)
    assert norms[1] == pytest.approx(1e-3, rel=1e-2)
    assert (metrics["optim/clip_frac"], clipped["optim/clip_frac"]) == (0.0, 1.0)


def test_gradient_cosine_of_equal_and_of_different_mini_batches(tmp_path):
    slow = OptimConfig(lr=1e-6)
    twins = [trajectory(0, member) for _ in range(2) for member in range(2)]
    metrics = update(tiny(), twins, tmp_path, rewards=torch.tensor([[0.0, 1.0]] * 2), optim=slow)
    assert metrics["optim/grad_cosine"] == pytest.approx(1.0, abs=1e-3)
    assert metrics["optim/grad_norm_0"] == pytest.approx(metrics["optim/grad_norm_1"], rel=1e-3)
    metrics = update(tiny(), twins, tmp_path, rewards=torch.tensor([[0.0, 1.0], [1.0, 0.0]]), optim=slow)
    assert metrics["optim/grad_cosine"] == pytest.approx(-1.0, abs=1e-3)


def test_the_same_step_twice_is_the_same_bit_for_bit(tmp_path):
    results = []
    for _ in range(2):
        policy = tiny()
        optimizer = make_optimizer(policy, OPTIM)
        update_policy(policy, tiny(1), optimizer, groups(), REWARDS, LossConfig(), OPTIM, 1.0, tmp_path, 0)
        results.append(policy)
    assert same(results[0], state(results[1])) and not same(results[0], state(tiny()))


def explode_loss(policy, reference):
    with torch.no_grad():
        reference.model.norm.weight[0] = math.nan


def explode_gradient(policy, reference):
    policy.model.layers[0].mlp.up_proj.weight.register_hook(lambda gradient: gradient * math.inf)


@pytest.mark.parametrize("explode", [explode_loss, explode_gradient])
def test_B88_a_non_finite_step_stops_with_unchanged_weights_and_a_file(explode, tmp_path):
    policy, reference = tiny(0), tiny(1)
    explode(policy, reference)
    before = state(policy)
    optimizer = make_optimizer(policy, OPTIM)
    trajectories, folder = groups(version=12), tmp_path / "bad"
    with pytest.raises(FloatingPointError, match="step 12, mini-batch 0") as error:
        update_policy(policy, reference, optimizer, trajectories, REWARDS, LossConfig(), STRICT, 1.0, folder, 12)
    assert same(policy, before) and not optimizer.state
    assert all(parameter.grad is None for parameter in policy.parameters())
    found = re.search(r"the batch is in (\S+)$", str(error.value))
    assert found is not None
    content = torch.load(found[1], weights_only=True)
    assert content["step"] == 12 and content["mini_batch"] == 0
    ids = {token for batch in content["batches"] for token in batch["targets"].tolist()}
    wanted = [one for index, one in enumerate(trajectories) if index // 2 % 2 == 0]
    assert ids == {t for one in wanted for t, on in zip(one.token_ids, one.response_mask, strict=True) if on}
    assert set(content["batches"][0]) >= {"input_ids", "kept", "old_logprobs", "ref_logprobs", "advantages"}


def test_B88_an_infinite_log_prob_is_not_hidden_by_the_clamps_of_the_loss(tmp_path, monkeypatch):
    real, calls = trainer.fused_loss, []

    def broken(*arguments):
        """-inf in the second mini-batch, whose old log-probs are finite: loss and gradient stay finite too."""
        calls.append(real(*arguments))
        if len(calls) == 2:
            calls[-1].logprobs[0] = -math.inf
        return calls[-1]

    monkeypatch.setattr(trainer, "fused_loss", broken)
    with pytest.raises(FloatingPointError, match="mini-batch 1: loss nan"):
        update(tiny(), groups(), tmp_path, optim=STRICT)


def test_metrics_are_means_over_the_tokens_of_each_mini_batch(tmp_path):
    policy, reference = tiny(0), tiny(1)
    means: dict[str, list[float]] = {"loss/entropy": [], "loss/kl": []}
    for start in range(2):  # groups 0 and 2, then 1 and 3
        entropies, divergences = [], []
        for one in [one for index, one in enumerate(groups()) if index // 2 % 2 == start]:
            ids = torch.tensor([one.token_ids])
            new, ref = (torch.log_softmax(m(input_ids=ids).logits[0].detach(), dim=-1) for m in (policy, reference))
            for position in [p for p, on in enumerate(one.response_mask) if on]:
                gap = float(ref[position - 1, ids[0, position]] - new[position - 1, ids[0, position]])
                divergences.append(min(math.exp(gap) - gap - 1, 10.0))
                entropies.append(float(-(new[position - 1].exp() * new[position - 1]).sum()))
        means["loss/entropy"].append(float(np.mean(entropies)))
        means["loss/kl"].append(float(np.mean(divergences)))
    slow = OptimConfig(lr=1e-9, tokens_per_micro_batch=40)
    metrics = update(policy, groups(), tmp_path, reference=reference, loss=LossConfig(), optim=slow)
    for name, values in means.items():
        assert metrics[name] == pytest.approx(np.mean(values), rel=1e-4), name


def test_B88_the_stop_does_not_depend_on_the_dump_being_writable(tmp_path):
    policy, reference = tiny(0), tiny(1)
    explode_loss(policy, reference)
    (tmp_path / "file").touch()
    with pytest.raises(FloatingPointError, match="could not be written"):
        update(policy, groups(), tmp_path / "file" / "below", reference=reference, loss=LossConfig(), optim=STRICT)


def test_what_cannot_be_trained_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="stale engine: step 3 got q0 of policy version 0"):
        update(tiny(), groups(), tmp_path, step=3)
    with pytest.raises(ValueError, match="8 trajectories do not fill rewards of shape 4 x 3"):
        update(tiny(), groups(), tmp_path, rewards=torch.zeros(4, 3))
    with pytest.raises(ValueError, match="the reward of q3 is not finite"):
        update(tiny(), groups(), tmp_path, rewards=torch.where(REWARDS == 0.9, math.nan, REWARDS))
    with pytest.raises(ConfigError, match="no reference model"):
        update(tiny(), groups(), tmp_path, loss=LossConfig())
    with pytest.raises(ConfigError, match="temperature=0"):
        update(tiny(), groups(), tmp_path, temperature=0.0)
    with pytest.raises(ConfigError, match="bfloat16"):
        make_optimizer(tiny().bfloat16(), OPTIM)
    with pytest.raises(ConfigError, match="mini_batches=0"):
        OptimConfig(mini_batches=0)


ROWS = [([1, 2, 3, 4, 5, 6], [False, False, True, True, False, True]), ([7, 8, 9], [False, True, True])]


@pytest.mark.parametrize("budget", [1, 1000])
def test_sft_is_cross_entropy_over_the_marked_tokens_only(budget):
    model, reference = tiny(), tiny()
    scores = [(reference(input_ids=torch.tensor([ids])).logits[0, :-1], ids, mask) for ids, mask in ROWS]
    logits = torch.cat([row[[position for position, on in enumerate(mask[1:]) if on]] for row, _, mask in scores])
    targets = torch.tensor([t for _, ids, mask in scores for t, on in zip(ids, mask, strict=True) if on])
    loss = cross_entropy(logits, targets)
    loss.backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optim = OptimConfig(max_grad_norm=1e9, tokens_per_micro_batch=budget)
    metrics = sft_step(model, optimizer, ROWS, optim)
    assert metrics["sft/loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert metrics["sft/tokens"] == 5.0
    for got, start in zip(model.parameters(), reference.parameters(), strict=True):
        assert start.grad is not None
        torch.testing.assert_close(got, start - 0.1 * start.grad, rtol=0, atol=2e-6)


def test_sft_takes_several_optimizers_and_learns():
    model = tiny()
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    rest = [p for n, p in model.named_parameters() if not (p.ndim == 2 and "embed" not in n)]
    optimizers = [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(rest, lr=1e-2)]
    before, losses = state(model), []
    for _ in range(15):
        losses.append(sft_step(model, optimizers, ROWS, OptimConfig())["sft/loss"])
    assert losses[-1] < 0.2 * losses[0]
    still = [name for name, p in model.named_parameters() if torch.equal(p, before[name])]
    assert not still


def test_B83_supervised_masks_that_are_all_false_raise():
    model = tiny()
    with pytest.raises(ValueError, match="masks are all False"):
        sft_step(model, torch.optim.SGD(model.parameters()), [([1, 2, 3], [False] * 3)], OPTIM)
    with pytest.raises(ValueError, match="row 1: the first token"):
        sft_step(model, torch.optim.SGD(model.parameters()), [ROWS[0], ([1, 2], [True, True])], OPTIM)
    with pytest.raises(ValueError):
        sft_step(model, torch.optim.SGD(model.parameters()), [([1, 2, 3], [False, True])], OPTIM)


def test_B88_a_non_finite_supervised_step_changes_nothing():
    model = tiny()
    explode_gradient(model, None)
    before = state(model)
    with pytest.raises(FloatingPointError, match="weights unchanged"):
        sft_step(model, torch.optim.SGD(model.parameters(), lr=0.1), ROWS, OPTIM)
    assert same(model, before)


def test_reference_and_trajectories_are_left_alone(tmp_path: Path):
    reference, trajectories = tiny(1), groups()
    frozen, kept = state(reference), copy.deepcopy(trajectories)
    update(tiny(), trajectories, tmp_path, reference=reference, loss=LossConfig())
    assert same(reference, frozen) and trajectories == kept
