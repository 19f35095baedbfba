"""The fused head against logits in float64, what it must never read, and how many matrix products it makes.

Must fail if a gradient is wrong for some algorithm, correction, entropy bonus, temperature or chunk size, if a row off
the mask is read, or if the head is applied more often than three times a row.
"""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from hiexp.batching import Layout, Row, TokenView, micro_batches
from hiexp.fused import SEQUENCE_CHUNKS, HeadOutput, fused_loss, token_logprobs
from hiexp.loss import ALGORITHMS, MISMATCH, LossConfig, policy_loss
from hiexp.model import head_weight, hidden_states

LENGTHS = [3, 1, 9, 4, 1, 6]


class Case:
    """Random rows, of which some are kept, and a loss over them; old log-probs are near the present ones."""

    def __init__(self, cfg: LossConfig, hidden=16, vocab=37, temperature=1.0, scale=1.0, lengths=LENGTHS, seed=0):
        g = torch.Generator().manual_seed(seed)
        kept = sum(lengths)
        total = 2 * kept + 3
        self.cfg, self.temperature = cfg, temperature
        self.hidden = torch.randn(total, hidden, generator=g)
        self.weight = torch.randn(vocab, hidden, generator=g) * scale / math.sqrt(hidden)
        self.kept = torch.randperm(total, generator=g)[:kept].sort().values
        self.targets = torch.randint(0, vocab, (kept,), generator=g)
        self.sequence = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        self.weights = torch.rand(kept, generator=g) / kept
        advantages = torch.tensor([1.0, -0.7, 0.0, 1.6, -2.0, 0.4]).repeat(4)[: len(lengths)][self.sequence]
        spread = 0.002 if cfg.algorithm == "gspo" else 0.25
        now = naive_scores(self.hidden, self.weight, self.kept, self.targets, temperature)[0].float()
        old, ref, engine = (now + torch.randn(kept, generator=g) * s for s in (spread, 0.5, 0.5))
        engine[::5] = math.nan
        self.view = TokenView(advantages, self.sequence, engine, old, ref)

    def part(self, at: slice, dtype: torch.dtype) -> TokenView:
        names = ("advantages", "rollout_logprobs", "old_logprobs", "ref_logprobs")
        values = {name: getattr(self.view, name)[at].to(dtype) for name in names}
        return TokenView(sequence=self.sequence[at], **values)

    def objective(self, logprobs: Tensor, entropy: Tensor, at: slice) -> tuple[Tensor, dict[str, Tensor]]:
        losses, metrics = policy_loss(self.cfg, logprobs, entropy, self.part(at, logprobs.dtype))
        return self.weights[at].to(logprobs.dtype) * losses, metrics

    def fused(self, hidden=None, weight=None, chunk=1024) -> tuple[HeadOutput, Tensor, Tensor]:
        """Output and the leaves, after backward."""
        h = (self.hidden if hidden is None else hidden).clone().requires_grad_()
        w = (self.weight if weight is None else weight).clone().requires_grad_()
        whole = self.sequence if self.cfg.whole_sequences else None
        output = fused_loss(h, w, self.kept, self.targets, self.objective, self.temperature, whole, chunk)
        output.loss.backward()
        return output, h.grad, w.grad  # type: ignore[return-value]

    def naive(self, hidden=None, weight=None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Loss, log-probs, entropies and both gradients, in float64, all logits at once."""
        h = (self.hidden if hidden is None else hidden).double().requires_grad_()
        w = (self.weight if weight is None else weight).double().requires_grad_()
        logprobs, entropy = naive_scores(h, w, self.kept, self.targets, self.temperature)
        loss = self.objective(logprobs, entropy, slice(None))[0].sum()
        return loss.detach(), logprobs.detach(), entropy.detach(), *torch.autograd.grad(loss, (h, w))


def naive_scores(hidden: Tensor, weight: Tensor, kept: Tensor, targets: Tensor, temperature: float):
    logs = torch.log_softmax(hidden[kept].double() @ weight.double().T / temperature, dim=-1)
    return logs.gather(1, targets[:, None])[:, 0], -(logs.exp() * logs).sum(-1)


def apart(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_bug_85_fused_equals_float64_logits_for_every_setting(algorithm):
    kinds = itertools.product(MISMATCH, (0.0, 0.1), (1.0, 0.7))
    for (mismatch, entropy_coef, temperature), chunk in zip(kinds, itertools.cycle((1, 2, 7, 1024, 3))):
        cfg = LossConfig(algorithm, kl_coef=0.1, entropy_coef=entropy_coef, mismatch=mismatch)
        case = Case(cfg, temperature=temperature)
        loss, logprobs, entropy, by_hidden, by_weight = case.naive()
        assert by_hidden.abs().max() > 1e-3
        output, d_hidden, d_weight = case.fused(chunk=chunk)  # 1 and 2: nine rows are beyond the limit of 4 and 8
        assert float(output.loss.detach()) == pytest.approx(float(loss), rel=2e-6, abs=1e-7)
        assert apart(output.logprobs, logprobs) < 2e-6 and apart(output.entropy, entropy) < 2e-6
        assert apart(d_hidden, by_hidden) < 2e-6, (mismatch, entropy_coef, temperature, chunk)
        assert apart(d_weight, by_weight) < 2e-6, (mismatch, entropy_coef, temperature, chunk)
        assert output.metrics.keys() >= {"loss/policy", "loss/kl"} and len(output.metrics["loss/kl"]) == 24


@pytest.mark.parametrize("chunk", [1, 64, 1024])  # 1: a sum of 240 parts, which must not be rounded on the way
@pytest.mark.parametrize("algorithm", ["grpo", "gspo", "cispo"])
def test_bug_85_bfloat16_inputs_stay_within_their_rounding(algorithm, chunk):
    """The clip is out of reach: a token on its boundary would make the comparison a matter of luck."""
    low = 1.0 if algorithm == "cispo" else 0.9
    cfg = LossConfig(algorithm, clip_low=low, clip_high=9.0, dual_clip=0.0, kl_coef=0.05, entropy_coef=0.01)
    case = Case(cfg, hidden=256, vocab=1000, temperature=0.9, lengths=[20] * 12)
    hidden, weight = case.hidden.bfloat16(), case.weight.bfloat16()
    loss, logprobs, entropy, by_hidden, by_weight = case.naive(hidden, weight)
    output, d_hidden, d_weight = case.fused(hidden, weight, chunk)
    assert (output.logprobs.dtype, output.entropy.dtype, d_hidden.dtype) == (torch.float32,) * 2 + (torch.bfloat16,)
    assert apart(output.logprobs, logprobs) < 5e-3 and apart(output.entropy, entropy) < 5e-3
    size = float(case.objective(logprobs, entropy, slice(None))[0].abs().sum())  # terms of both signs cancel
    assert float(output.loss.detach()) == pytest.approx(float(loss), abs=5e-3 * size)
    assert apart(d_hidden, by_hidden) < 5e-3 and apart(d_weight, by_weight) < 5e-3


@pytest.mark.parametrize(("algorithm", "mismatch"), [("grpo", "truncate"), ("gspo", "none")])
def test_finite_differences_of_the_naive_judge_agree_with_its_own_gradient(algorithm, mismatch):
    case = Case(LossConfig(algorithm, kl_coef=0.1, entropy_coef=0.1, mismatch=mismatch), hidden=5, vocab=7)
    case.weights = 1 / torch.bincount(case.sequence)[case.sequence].double()  # GSPO is a loss for equal weights only
    *_, by_hidden, by_weight = case.naive()
    step = 1e-6
    for name, gradient, places in (("hidden", by_hidden, case.kept[:4].tolist()), ("weight", by_weight, [0, 3])):
        for row, column in itertools.product(places, (0, 4)):
            values = []
            for sign in (1, -1):
                moved = getattr(case, name).double().clone()
                moved[row, column] += sign * step
                values.append(float(case.naive(**{name: moved})[0]))
            assert (values[0] - values[1]) / (2 * step) == pytest.approx(float(gradient[row, column]), abs=1e-8)


sizes = st.lists(st.integers(1, 12), min_size=1, max_size=8)


@settings(max_examples=25)
@given(st.sampled_from(["grpo", "gspo"]), sizes, st.integers(1, 30), st.integers(0, 99))
def test_the_chunk_size_and_rows_off_the_mask_change_nothing(algorithm, lengths, chunk, seed):
    case = Case(LossConfig(algorithm, kl_coef=0.1, entropy_coef=0.1), hidden=8, vocab=11, lengths=lengths, seed=seed)
    wanted, d_hidden, d_weight = case.fused()
    off = torch.ones(len(case.hidden), dtype=torch.bool).index_fill(0, case.kept, False)
    poisoned = case.hidden.masked_fill(off[:, None], math.nan)
    got, p_hidden, p_weight = case.fused(poisoned, chunk=chunk)
    assert float(got.loss.detach()) == pytest.approx(float(wanted.loss.detach()), rel=1e-5, abs=1e-6)
    assert (p_hidden[off] == 0).all() and (d_hidden[off] == 0).all()
    torch.testing.assert_close(p_hidden, d_hidden, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(p_weight, d_weight, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(got.logprobs, wanted.logprobs)
    torch.testing.assert_close(got.entropy, wanted.entropy)


@settings(max_examples=8)
@given(st.sampled_from(["grpo", "gspo"]), st.permutations(range(6)))
def test_the_order_of_sequences_does_not_matter(algorithm, order):
    case = Case(LossConfig(algorithm, kl_coef=0.1))
    wanted, d_hidden, d_weight = case.fused()
    rows = torch.cat([(case.sequence == index).nonzero()[:, 0] for index in order])
    case.kept, case.targets, case.weights = case.kept[rows], case.targets[rows], case.weights[rows]
    places = torch.tensor([order.index(index) for index in range(6)])
    values = (None if v is None else v[rows] for v in vars(case.view).values())
    case.view = TokenView(*values)  # type: ignore[arg-type]
    case.sequence = places[case.sequence[rows]]
    got, p_hidden, p_weight = case.fused(chunk=2)
    assert float(got.loss.detach()) == pytest.approx(float(wanted.loss.detach()), rel=1e-5, abs=1e-7)
    torch.testing.assert_close(p_hidden, d_hidden, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(p_weight, d_weight, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("algorithm", ["grpo", "gspo"])
def test_bug_32_fault_19_no_kept_row_is_a_loss_of_nothing_with_zero_gradients(algorithm):
    case = Case(LossConfig(algorithm, kl_coef=0.1), lengths=[2])
    case.kept, case.targets, case.sequence = case.kept[:0], case.targets[:0], case.sequence[:0]
    output, d_hidden, d_weight = case.fused()
    assert float(output.loss.detach()) == 0.0 and len(output.logprobs) == len(output.entropy) == 0
    assert (d_hidden == 0).all() and (d_weight == 0).all() and d_weight.shape == case.weight.shape
    assert len(token_logprobs(case.hidden, case.weight, case.kept, case.targets)[0]) == 0


def test_the_gradient_scales_with_what_comes_from_above_and_is_handed_out_once():
    case = Case(LossConfig())
    _, d_hidden, d_weight = case.fused()
    hidden, weight = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
    loss = fused_loss(hidden, weight, case.kept, case.targets, case.objective).loss * -2.5
    loss.backward(retain_graph=True)
    torch.testing.assert_close(hidden.grad, -2.5 * d_hidden)
    torch.testing.assert_close(weight.grad, -2.5 * d_weight)
    with pytest.raises(RuntimeError, match="once"):
        loss.backward()


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_side_gets_no_gradient_and_the_other_the_same(frozen):
    case = Case(LossConfig(entropy_coef=0.1))
    _, *gradients = case.fused()
    leaves = {name: getattr(case, name).clone().requires_grad_(name != frozen) for name in ("hidden", "weight")}
    fused_loss(*leaves.values(), case.kept, case.targets, case.objective).loss.backward()
    for (name, leaf), wanted in zip(leaves.items(), gradients, strict=True):
        assert leaf.grad is None if name == frozen else torch.equal(leaf.grad, wanted)


def tiny(tied: bool) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, tie_word_embeddings=tied, initializer_range=0.3)).eval()


@pytest.mark.parametrize("tied", [True, False])
def test_tied_embeddings_get_both_parts_of_their_gradient(tied):
    rows = [Row("a", [3, 9, 4, 9, 30], [2, 4]), Row("b", [7, 8, 9], [1, 2])]
    (batch,) = micro_batches(rows, Layout(100))
    fused, plain = tiny(tied), tiny(tied)
    objective = lambda logprobs, entropy, at: (logprobs + 0.1 * entropy, {})  # noqa: E731
    hidden = hidden_states(fused, batch)
    fused_loss(hidden, head_weight(fused), batch.kept, batch.targets, objective).loss.backward()
    logs = torch.log_softmax(plain(input_ids=batch.input_ids).logits.flatten(0, 1)[batch.kept], dim=-1)
    (logs.gather(1, batch.targets[:, None]).sum() - 0.1 * (logs.exp() * logs).sum()).backward()
    for (name, got), wanted in zip(fused.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad, wanted.grad, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    assert (fused.model.embed_tokens.weight.grad[[1, 2]].abs().sum() > 0) == tied  # no input: the head's part alone


class CountProducts(TorchDispatchMode):
    """How many rows meet the head, by forward, gradient of hidden, gradient of weight."""

    def __init__(self, vocab: int, width: int) -> None:
        super().__init__()
        self.vocab, self.width = vocab, width
        self.forward: list[int] = []
        self.by_hidden: list[int] = []
        self.by_weight: list[int] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.split(".")[0]
        assert name not in ("bmm", "matmul", "linear", "einsum", "baddbmm", "mv")
        if name in ("mm", "addmm", "addmm_"):
            (rows, inner), (_, columns) = (tuple(x.shape) for x in args[-2:])
            if (inner, columns) == (self.width, self.vocab):
                self.forward.append(rows)
            elif (inner, columns) == (self.vocab, self.width):
                self.by_hidden.append(rows)
            else:
                assert (rows, columns) == (self.vocab, self.width)
                self.by_weight.append(inner)
        return function(*args, **(kwargs or {}))


def count(case: Case, chunk: int, objective=None) -> CountProducts:
    hidden, weight = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
    whole = case.sequence if case.cfg.whole_sequences else None
    with CountProducts(*case.weight.shape) as products:
        fused_loss(
            hidden, weight, case.kept, case.targets, objective or case.objective, case.temperature, whole, chunk
        ).loss.backward()
    return products


@pytest.mark.parametrize("mismatch", ["none", "truncate"])
@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_every_algorithm_costs_three_products_a_kept_row(algorithm, mismatch):
    case = Case(LossConfig(algorithm, kl_coef=0.1, entropy_coef=0.1, mismatch=mismatch))
    products = count(case, chunk=5)
    assert sum(products.forward) == len(case.kept) == 24 < len(case.hidden)
    assert products.by_hidden == products.by_weight == products.forward
    assert max(products.forward) <= (5 * SEQUENCE_CHUNKS if algorithm == "gspo" else 5)


def test_a_sequence_beyond_the_limit_costs_a_fourth_product_and_never_more_rows_at_once():
    case = Case(LossConfig("gspo", kl_coef=0.1), lengths=[2, 30, 3])
    products = count(case, chunk=6)  # limit 24: chunks of 2, 30 and 3 rows, of which only the second must be redone
    assert max(products.forward) <= 6
    assert sum(products.by_hidden) == sum(products.by_weight) == 35
    assert sum(products.forward) == 35 + 30


@pytest.mark.parametrize(
    ("lengths", "wanted"),
    [([4, 4, 1], [8, 1]), ([4, 5, 3], [4, 8]), ([8, 8], [8, 8]), ([2, 9, 1, 1], [2, 9, 2])],
)
def test_chunks_of_whole_sequences_are_filled_and_only_a_single_one_may_be_longer(lengths, wanted):
    products = count(Case(LossConfig("gspo", kl_coef=0.1), lengths=lengths), chunk=8)
    assert products.forward == products.by_hidden == products.by_weight == wanted


def test_scoring_without_gradients_costs_one_product_a_row():
    case = Case(LossConfig())
    with CountProducts(*case.weight.shape) as products:
        logprobs, entropy = token_logprobs(case.hidden, case.weight, case.kept, case.targets, 0.7, chunk_rows=10)
    assert products.forward == [10, 10, 4] and not products.by_hidden and not products.by_weight
    wanted = naive_scores(case.hidden, case.weight, case.kept, case.targets, 0.7)
    assert apart(logprobs, wanted[0]) < 2e-6 and apart(entropy, wanted[1]) < 2e-6
    with CountProducts(*case.weight.shape) as products, torch.no_grad():
        fused_loss(case.hidden, case.weight, case.kept, case.targets, case.objective)
    assert products.forward == [24] and not products.by_hidden and not products.by_weight
    with CountProducts(*case.weight.shape) as products, torch.no_grad():  # a sequence beyond the limit is not redone
        rows = (case.kept, case.targets, case.objective, 1.0, torch.zeros(24, dtype=torch.long), 2)
        fused_loss(case.hidden, case.weight, *rows)
    assert products.forward == [2] * 12


def test_rows_without_a_slope_skip_the_last_two_products():
    case = Case(LossConfig(kl_coef=0.0))
    case.view.advantages = torch.zeros(24)
    products = count(case, chunk=24)
    assert products.forward == [24] and not products.by_hidden and not products.by_weight
    case.view.advantages[:5] = 1.0
    case.view.old_logprobs = None
    case.part = lambda at, dtype: TokenView(case.view.advantages[at], case.sequence[at], case.weights[at], None, None)
    assert count(case, chunk=24).by_weight == [5]
    _, logprobs, _, by_hidden, by_weight = case.naive()
    output, d_hidden, d_weight = case.fused(chunk=24)
    assert apart(d_hidden, by_hidden) < 2e-6 and apart(d_weight, by_weight) < 2e-6
    assert (d_hidden[case.kept[5:]] == 0).all() and apart(output.logprobs, logprobs) < 2e-6


def test_a_new_objective_is_plain_pytorch():
    """A soft gate instead of a clip (as SAPO), weighted by the policy's own entropy, with gradient through both."""
    case = Case(LossConfig())

    def sapo(logprobs: Tensor, entropy: Tensor, at: slice) -> tuple[Tensor, dict[str, Tensor]]:
        part = case.part(at, logprobs.dtype)
        ratio = (logprobs - part.old_logprobs).exp()
        rate = torch.where(part.advantages > 0, 1.0, 1.05)
        gate = torch.sigmoid(rate * (ratio - 1)) * 4 / rate
        return -gate * part.advantages * (1 + 0.1 * entropy), {"gate": gate.detach()}

    case.objective = sapo
    loss, _, _, by_hidden, by_weight = case.naive()
    output, d_hidden, d_weight = case.fused(chunk=7)
    assert float(output.loss.detach()) == pytest.approx(float(loss), rel=2e-6)
    assert apart(d_hidden, by_hidden) < 2e-6 and apart(d_weight, by_weight) < 2e-6
    assert len(output.metrics["gate"]) == 24
    products = count(case, chunk=7, objective=sapo)
    assert products.forward == [7, 7, 7, 3] and products.by_hidden == products.by_weight


def test_a_nan_in_a_kept_row_is_seen_and_never_skipped():
    case = Case(LossConfig())
    case.hidden[case.kept[3]] = math.nan
    output, d_hidden, d_weight = case.fused()
    assert output.loss.isnan() and d_hidden[case.kept[3]].isnan().all() and d_weight.isnan().any()


def test_extreme_logits_stay_exact():
    hidden = torch.tensor([[300.0], [-300.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [0.0]], requires_grad=True)
    objective = lambda logprobs, entropy, at: (-logprobs - 0.1 * entropy, {})  # noqa: E731
    output = fused_loss(hidden, weight, torch.arange(2), torch.zeros(2, dtype=torch.long), objective)
    output.loss.backward()
    assert output.logprobs.tolist() == [0.0, -300.0] and output.entropy.tolist() == [0.0, 0.0]
    assert hidden.grad.tolist() == [[0.0], [-1.0]] and weight.grad.isfinite().all()
