"""What goes wrong in training, provoked on purpose: non-finite numbers, empty steps, memory, wrong settings, ranks.

Must fail if a bad number reaches the weights, if a counter stays silent, if ranks disagree, or if a question is lost
when groups are drawn again.
"""

import copy
import math
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import train
from hiexp import trainer
from hiexp.assemble import Config
from hiexp.batching import Batch, Layout, TokenView, micro_batches, trajectory_row, weigh
from hiexp.config import ConfigError, load
from hiexp.data import PromptSampler, Sample
from hiexp.distributed import Context
from hiexp.dosage import DosageConfig
from hiexp.hek_update import RefreshConfig
from hiexp.loss import ALGORITHMS, MISMATCH, LossConfig, policy_loss
from hiexp.metrics import METRICS
from hiexp.resume import StopRequested, StopSignal
from hiexp.rewards import RewardConfig, score
from hiexp.run_log import LogConfig
from hiexp.step_metrics import StepTotals
from hiexp.trainer import OptimConfig, make_optimizer, set_learning_rate, update_policy
from hiexp.trajectory import Segment, Source, Status, Trajectory
from hiexp.watch import CollapseWatch, WatchConfig

OPTIM = OptimConfig(lr=0.05, max_grad_norm=1e9)
FREE = LossConfig(kl_coef=0.0)
REWARDS = torch.tensor([[0.0, 1.0], [1.0, 0.2], [0.0, 0.5], [0.3, 0.9]])


def tiny(seed: int = 0) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, tie_word_embeddings=True, initializer_range=0.3)).eval()


REFERENCE = tiny(1)  # made once: seeds are the process's, and ranks are threads here


def trajectory(sample: int, member: int, tokens: int | None = None, engine: float = -3.0) -> Trajectory:
    """A prompt, policy tokens (4 to 7 of them if not told), a document between them."""
    g = torch.Generator().manual_seed(100 * sample + member)
    ids = torch.randint(0, 40, (24,), generator=g).tolist()
    count = 4 + (sample + 2 * member) % 4 if tokens is None else tokens
    one = Trajectory(f"q{sample}", member)
    one.append(Segment(Source.PROMPT, tuple(ids[: 3 + sample])))
    one.append(Segment(Source.POLICY, tuple(ids[8 : 8 + count // 2]), (engine,) * (count // 2)))
    one.append(Segment(Source.DOCUMENT, tuple(ids[20:])))
    rest = count - count // 2
    one.append(Segment(Source.POLICY, tuple(ids[12 : 12 + rest]), (engine,) * rest))
    return one


def groups(**settings: Any) -> list[Trajectory]:
    return [trajectory(sample, member, **settings) for sample in range(4) for member in range(2)]


def update(policy, trajectories, folder, rewards=REWARDS, loss=FREE, optim=OPTIM, optimizer=None, ctx=None, step=0):
    optimizer = optimizer or torch.optim.SGD(policy.parameters(), lr=optim.lr)
    parts = (optimizer, trajectories, rewards, loss, optim, 1.0, folder, step, ctx or Context())
    return update_policy(policy, copy.deepcopy(REFERENCE) if loss.kl_coef else None, *parts)


def weights(model) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])


def finite(metrics: dict[str, float]) -> bool:
    return all(math.isfinite(value) for value in metrics.values())


def test_fault_19_a_step_without_any_trained_token_is_skipped_and_counted(tmp_path):
    policy = tiny()
    optimizer, before = make_optimizer(policy, OPTIM), weights(policy)
    metrics = update(policy, groups(tokens=0), tmp_path, loss=LossConfig(), optimizer=optimizer)
    assert torch.equal(weights(policy), before) and not optimizer.state and finite(metrics)
    assert metrics["optim/skipped_mini_batches"] == 2 and metrics["rollout/empty_sequences"] == 8
    cfg = OptimConfig(lr=1.0, warmup_steps=9)
    assert set_learning_rate(optimizer, cfg, 3, 20) == pytest.approx(0.4)  # whatever happened in the steps before


def test_fault_20_an_empty_response_counts_in_the_group_and_nowhere_else(tmp_path):
    """Its sibling's advantage comes from both rewards; one that is a single token long is trained like any other."""
    trajectories = [trajectory(0, 0, tokens=0), trajectory(0, 1, tokens=1)]
    policy, wanted = tiny(), tiny()
    optim = OptimConfig(lr=0.05, max_grad_norm=1e9, mini_batches=1)
    metrics = update(policy, trajectories, tmp_path, rewards=torch.tensor([[0.0, 1.0]]), optim=optim)
    assert finite(metrics) and metrics["rollout/trained_tokens"] == 1 and metrics["rollout/empty_sequences"] == 1
    ids = torch.tensor([trajectories[1].token_ids])
    at = trajectories[1].response_mask.index(True)
    logprob = torch.log_softmax(wanted(input_ids=ids).logits[0, at - 1], dim=-1)[ids[0, at]]
    (-math.sqrt(0.5) * logprob).backward()
    torch.optim.SGD(wanted.parameters(), lr=0.05).step()
    torch.testing.assert_close(weights(policy), weights(wanted), rtol=0, atol=2e-6)


@pytest.mark.parametrize("mode", ["group_std", "group_mean", "batch_std", "batch"])
def test_fault_21_equal_rewards_move_nothing_and_groups_of_one_stay_finite(mode, tmp_path):
    cfg = LossConfig(kl_coef=0.0, advantage=mode)
    policy = tiny()
    before = weights(policy)
    metrics = update(policy, groups(), tmp_path, rewards=torch.full((4, 2), 0.3), loss=cfg)
    assert torch.equal(weights(policy), before) and metrics["group/zero_std_frac"] == 1 and finite(metrics)
    metrics = update(policy, groups()[::2], tmp_path, rewards=torch.tensor([[0.0], [1.0], [0.5], [0.1]]), loss=cfg)
    assert finite(metrics) and not torch.equal(weights(policy), before)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_fault_22_a_reward_that_is_not_finite_is_refused_by_name_before_anything_changes(value, tmp_path, monkeypatch):
    policy = tiny()
    before = weights(policy)
    rewards = REWARDS.clone()
    rewards[2, 0] = value
    with pytest.raises(ValueError, match="the reward of q2 is not finite"):
        update(policy, groups(), tmp_path, rewards=rewards)
    assert torch.equal(weights(policy), before)
    monkeypatch.setitem(METRICS, "f1", lambda *_: value)
    attempt = Trajectory("q", answer="x", status=Status.ANSWERED)
    with pytest.raises(ValueError, match="sample q"):
        score([attempt], [Sample("q", "?", ("x",))], RewardConfig(), 1)


def loop() -> train.Loop:
    closed_loop: Any = SimpleNamespace(state=dict, load_state=lambda _: None, open=lambda: None)
    sampler = PromptSampler([Sample("q", "?", ("a",))], 0)
    return train.Loop(sampler, CollapseWatch(WatchConfig(patience=0)), closed_loop, "hash")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_bug_88_fault_23_a_bad_gradient_is_skipped_counted_and_stops_the_run_when_it_lasts(value, tmp_path):
    policy, run = tiny(), loop()
    optimizer = make_optimizer(policy, OPTIM)
    handle = policy.model.layers[0].mlp.up_proj.weight.register_hook(lambda gradient: gradient * value)
    before = weights(policy)
    for step in range(3):
        metrics = update(policy, groups(), tmp_path, optimizer=optimizer)
        assert metrics["optim/nonfinite"] == 2 and metrics["optim/grad_norm"] == 0.0
        assert torch.equal(weights(policy), before) and not optimizer.state
        assert all(parameter.grad is None for parameter in policy.parameters())
        if step < OPTIM.max_nonfinite:
            run.judge(step, metrics, OPTIM.max_nonfinite)
    with pytest.raises(FloatingPointError, match="3 steps in a row, the last of them step 2"):
        run.judge(2, metrics, OPTIM.max_nonfinite)
    handle.remove()
    metrics = update(policy, groups(), tmp_path, optimizer=optimizer)
    run.judge(3, metrics, OPTIM.max_nonfinite)
    assert run.bad_steps == 0 and metrics["optim/nonfinite"] == 0 and not torch.equal(weights(policy), before)
    assert weights(policy).isfinite().all()


def test_fault_23_only_the_bad_mini_batch_is_left_out(tmp_path):
    policy, wanted = tiny(), tiny()
    seen = []

    def spoil(gradient):
        seen.append(gradient)
        return gradient * math.nan if len(seen) == 1 else gradient

    policy.model.norm.weight.register_hook(spoil)
    optim = OptimConfig(lr=0.05, max_grad_norm=1e9, mini_batches=2)
    metrics = update(policy, groups(), tmp_path, optim=optim)
    assert metrics["optim/nonfinite"] == 1 and len(seen) == 2
    second = [one for index, one in enumerate(groups()) if index // 2 % 2]
    single = OptimConfig(lr=0.05, max_grad_norm=1e9, mini_batches=1)
    update(wanted, second, tmp_path, rewards=REWARDS[1::2], optim=single)
    torch.testing.assert_close(weights(policy), weights(wanted), rtol=0, atol=2e-6)
    (dump,) = tmp_path.glob("nonfinite_step*.pt")
    assert torch.load(dump, weights_only=True)["mini_batch"] == 0


def test_a_run_that_goes_on_remembers_its_bad_steps_and_its_hek():
    run, again = loop(), loop()
    run.judge(4, {"optim/nonfinite": 1.0}, 2)
    cfg: Any = SimpleNamespace(resume_changed=False, hek=SimpleNamespace(path="bank"))
    assert again.resume((5, run.state()), cfg) == 5 and again.bad_steps == 1
    assert loop().resume(None, cfg) == 0
    again.hek_hash = "another"
    with pytest.raises(ConfigError, match=r"hek\.path=bank has changed since step 5"):
        again.resume((5, run.state()), cfg)
    cfg.resume_changed = True
    assert again.resume((5, run.state()), cfg) == 5


@pytest.mark.parametrize("value", [-math.inf, math.nan])
@pytest.mark.parametrize("mismatch", list(MISMATCH))
def test_fault_24_a_missing_log_prob_of_the_engine_is_left_out_and_counted(mismatch, value, tmp_path):
    trajectories = groups()
    first = trajectories[1].segments[1]
    trajectories[1].segments[1] = Segment(first.source, first.token_ids, (value, *first.logprobs[1:]))
    policy = tiny()
    before = weights(policy)
    cfg = LossConfig(kl_coef=0.0, mismatch=mismatch, mismatch_low=1e-9, mismatch_high=1e9)
    metrics = update(policy, trajectories, tmp_path, loss=cfg)
    assert metrics["rollout/unknown_logprobs"] == 1 and metrics["optim/nonfinite"] == 0 and finite(metrics)
    assert weights(policy).isfinite().all() and not torch.equal(weights(policy), before)
    if mismatch != "none":
        assert 0 < metrics["loss/is_dropped_frac"] < 0.1


@pytest.mark.parametrize("nats", [50.0, -50.0])
@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_fault_25_old_log_probs_that_are_stale_by_50_nats_give_a_finite_loss(algorithm, nats):
    new = torch.full((4,), -60.0, requires_grad=True)
    advantages, sequence = torch.tensor([1.0, 1.0, -1.0, -1.0]), torch.tensor([0, 0, 1, 1])
    for mismatch, kl in ((m, k) for m in MISMATCH for k in ("k1", "k2", "k3")):
        cfg = LossConfig(algorithm, kl_coef=0.1, kl_estimator=kl, mismatch=mismatch)
        stale = (new - nats).detach()
        view = TokenView(advantages, sequence, stale - nats, stale, stale)
        loss, metrics = policy_loss(cfg, new, torch.zeros(4), view)
        (gradient,) = torch.autograd.grad(loss.sum(), new)
        assert loss.isfinite().all() and gradient.isfinite().all()
        assert all(value.isfinite().all() for value in metrics.values())
        assert float(metrics["loss/ratio_max"].max()) <= math.exp(20) * 1.001


def no_memory_above(positions: int, monkeypatch) -> list[int]:
    """Let the head run out of memory for more than so many positions; returns those that it was asked for."""
    real, asked = trainer.fused_loss, []

    def fused(hidden, *arguments):
        asked.append(len(hidden))
        if len(hidden) > positions:
            raise torch.OutOfMemoryError("out of memory (patched)")
        return real(hidden, *arguments)

    monkeypatch.setattr(trainer, "fused_loss", fused)
    return asked


@pytest.mark.parametrize("loss", [FREE, LossConfig(kl_coef=0.1), LossConfig("gspo")], ids=lambda cfg: cfg.algorithm)
@pytest.mark.parametrize("packed", [False, True])
def test_fault_41_out_of_memory_halves_every_micro_batch_once_for_the_same_gradient(
    loss, packed, tmp_path, monkeypatch
):
    optim = OptimConfig(lr=0.05, max_grad_norm=1e9, mini_batches=2, tokens_per_micro_batch=1000, packed=packed)
    policy, wanted = tiny(), tiny()
    plain = update(wanted, groups(), tmp_path, loss=loss, optim=optim)
    asked = no_memory_above(40, monkeypatch)
    metrics = update(policy, groups(), tmp_path, loss=loss, optim=optim)
    assert metrics["optim/out_of_memory"] == 2 and plain["optim/out_of_memory"] == 0
    assert len(asked) == 6 and asked[0] > 40 and max(asked[1:3]) <= 40
    torch.testing.assert_close(weights(policy), weights(wanted), rtol=0, atol=2e-6)
    same = {"loss/total", "optim/grad_norm", "rollout/trained_tokens", "rollout/mismatch_kl", "loss/entropy"}
    for name in same:
        assert metrics[name] == pytest.approx(plain[name], rel=1e-4, abs=1e-6), name


def test_fault_41_what_cannot_be_halved_ends_with_one_clean_message(tmp_path, monkeypatch):
    policy = tiny()
    before = weights(policy)
    no_memory_above(0, monkeypatch)
    for budget, message in (
        (1, "in a micro-batch; lower optim.tokens_per_micro_batch=1"),
        (1000, "half a micro-batch"),
    ):
        optim = OptimConfig(lr=0.05, tokens_per_micro_batch=budget)
        with pytest.raises(RuntimeError, match=message) as error:
            update(policy, groups(), tmp_path, optim=optim)
        assert not isinstance(error.value, torch.OutOfMemoryError)
    two = Context(rank=0, world_size=2)
    with pytest.raises(RuntimeError, match=r"in a micro-batch; lower optim\.tokens_per_micro_batch=1000"):
        update(policy, groups(), tmp_path, optim=OptimConfig(lr=0.05, tokens_per_micro_batch=1000), ctx=two)
    assert torch.equal(weights(policy), before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("optim.lrr=1", "optim.lrr.*lr"),
        ("optim.lr=-1", "lr=-1"),
        ("optim.lr=fast", "optim.lr"),
        ("optim.schedule=cosin", "did you mean 'cosine'"),
        ("optim.mini_batches=0", "mini_batches=0"),
        ("optim.warmup_steps=-1", "warmup_steps=-1"),
        ("loss.algorithm=grppo", "did you mean 'grpo'"),
        ("loss.kl_estimator=k5", "k5"),
        ("train.refill=-1", "refill=-1"),
        ("reward.overlong_tokens=-5", "overlong_tokens=-5"),
        ("opti.lr=1", "opti"),
    ],
)
def test_fault_43_wrong_settings_are_named_with_the_nearest_key(change, message):
    with pytest.raises(ConfigError, match=message) as error:
        load(Config, ["configs/lab.yaml", change])
    assert "\n" not in str(error.value)


def test_bug_54_the_ratio_on_policy_is_one_at_every_temperature_and_a_cut_distribution_is_warned_of(tmp_path):
    policy = tiny()
    optim = OptimConfig(lr=0.05, mini_batches=1)
    metrics = update_policy(
        policy, None, torch.optim.SGD(policy.parameters()), groups(), REWARDS, FREE, optim, 0.6, tmp_path, 0
    )
    assert metrics["loss/ratio_max"] == 1.0
    rollout = SimpleNamespace(temperature=1.0, top_p=0.95, group_size=4)
    cfg: Any = SimpleNamespace(
        rollout=rollout,
        reward=RewardConfig(),
        loss=LossConfig(mismatch="truncate"),
        engine=SimpleNamespace(tensor_parallel=1),
        train=SimpleNamespace(prompts_per_step=1, refill=0),
        refresh=RefreshConfig(),
        shard=SimpleNamespace(replicas=1),
        log=LogConfig(),
    )
    with pytest.warns(UserWarning, match=r"top_p=0\.95"):
        train.check(cfg, Context(), 4)
    rollout.top_p = 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train.check(cfg, Context(), 4)
    cfg.engine.tensor_parallel = 2
    with pytest.raises(ConfigError, match="tensor_parallel=2 does not divide the 3 processes"):
        train.check(cfg, Context(world_size=3), 4)


def test_bug_80_the_trainer_learns_the_ids_that_were_sampled_and_no_others(ambiguous_tokenizer):
    canonical = ambiguous_tokenizer.encode("search", add_special_tokens=False)
    letters = (ambiguous_tokenizer.encode(letter, add_special_tokens=False) for letter in "search")
    sampled = tuple(token for part in letters for token in part)
    assert len(sampled) == 6 > len(canonical) and ambiguous_tokenizer.decode(sampled) == "search"
    one = Trajectory("q")
    one.append(Segment(Source.PROMPT, (1, 2)))
    one.append(Segment(Source.POLICY, sampled, tuple(-float(i) for i in range(6))))
    one.append(Segment(Source.DOCUMENT, (3,)))
    for packed in (False, True):
        (batch,) = micro_batches(weigh([trajectory_row(one, 1.0)], "token"), Layout(100, packed))
        assert tuple(batch.targets.tolist()) == sampled and batch.input_ids.tolist() == [[1, 2, *sampled[:-1]]]
        assert batch.rollout_logprobs.tolist() == [-float(i) for i in range(6)]


def test_bug_24_a_log_prob_short_or_long_is_refused_where_it_is_made():
    for logprobs in ((-1.0,), (-1.0, -1.0, -1.0)):
        with pytest.raises(ValueError, match="needs 2 log-probs"):
            Segment(Source.POLICY, (1, 2), logprobs)
    with pytest.raises(ValueError, match="needs 0 log-probs"):
        Segment(Source.DOCUMENT, (1, 2), (-1.0, -1.0))


class Peer(Context):
    """A rank that is a thread: collectives meet at a barrier (`control`) in one process."""

    def gather(self, value, phase="gather"):
        board, meeting = self.control
        board[self.rank] = value
        meeting.wait(60)
        values = list(board)
        meeting.wait(60)
        return values

    def barrier(self, phase):
        self.gather(None)

    def sum(self, values, phase="sum"):
        return [math.fsum(column) for column in zip(*self.gather(values), strict=True)]

    def max(self, values, phase="max"):
        return [max(column) for column in zip(*self.gather(values), strict=True)]


def on_ranks(world: int, call) -> list[Any]:
    """call(ctx) on every rank at once; the results in rank order."""
    control = ([None] * world, threading.Barrier(world))
    with ThreadPoolExecutor(world) as pool:
        jobs = [pool.submit(call, Peer(rank, world, control=control)) for rank in range(world)]
        return [job.result(120) for job in jobs]


class AveragingSGD(torch.optim.SGD):
    """What sharding does to gradients, then a step."""

    def __init__(self, model, lr: float, ctx: Context) -> None:
        super().__init__(model.parameters(), lr=lr)
        self.model, self.ctx = model, ctx

    def step(self, closure=None):
        for parameter in self.model.parameters():
            parts = self.ctx.gather(parameter.grad.clone())
            parameter.grad.copy_(torch.stack(parts).mean(0))
        super().step(closure)


@pytest.mark.parametrize(
    "loss",
    [FREE, LossConfig(kl_coef=0.1), LossConfig("gspo", mismatch="truncate"), LossConfig("dr_grpo", constant_tokens=9)],
    ids=["grpo", "grpo with kl", "gspo", "dr_grpo"],
)
@pytest.mark.parametrize("world", [2, 5])
def test_bug_35_fault_18_a_step_is_the_same_for_every_number_of_ranks(loss, world, tmp_path):
    """With five ranks and four rows in a mini-batch, some ranks have nothing but padding."""
    optim = OptimConfig(lr=0.05, max_grad_norm=1e9, mini_batches=2, tokens_per_micro_batch=30)
    alone = tiny()
    wanted = update(alone, groups(), tmp_path, loss=loss, optim=optim)

    def rank(ctx: Context):
        policy = tiny_of[ctx.rank]
        optimizer = AveragingSGD(policy, optim.lr, ctx)
        return weights(policy), update(policy, groups(), tmp_path, loss=loss, optim=optim, optimizer=optimizer, ctx=ctx)

    tiny_of = [tiny() for _ in range(world)]
    results = on_ranks(world, rank)
    for policy, (before, metrics) in zip(tiny_of, results, strict=True):
        torch.testing.assert_close(weights(policy), weights(alone), rtol=0, atol=2e-6)
        assert not torch.equal(weights(policy), before)
        assert set(metrics) - {"optim/grad_cosine"} == set(wanted) - {"optim/grad_cosine"}
        for name, value in wanted.items():
            if not name.startswith(("time/", "optim/grad", "optim/clip_frac")):  # norms are a rank's own here
                assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_fault_18_padding_of_a_rank_is_in_no_metric():
    """A rank with one real token, and one with nothing but padding."""
    tokens = {"targets": torch.tensor([1, 2]), "kept": torch.tensor([0, 1]), "sequence": torch.tensor([0, 1])}
    values = {"loss/ratio_max": torch.tensor([1.5, 7.0]), "loss/entropy": torch.tensor([0.5, 90.0])}
    results = []
    for weights in ([0.25, 0.0], [0.0, 0.0]):
        batch = Batch(
            input_ids=torch.zeros(1, 2, dtype=torch.long),
            advantages=torch.zeros(2),
            token_weights=torch.tensor(weights),
            rollout_logprobs=torch.tensor([-1.0, -50.0]),
            old_logprobs=torch.tensor([-1.0, -2.0]),
            **tokens,
        )
        results.append(StepTotals())
        results[-1].add(values, batch)
    got = on_ranks(2, lambda ctx: results[ctx.rank].metrics(1.0, ctx))
    assert got[0] == got[1]
    assert (got[0]["loss/ratio_max"], got[0]["loss/entropy"], got[0]["rollout/trained_tokens"]) == (1.5, 0.5, 1.0)
    assert got[0]["rollout/mismatch_max"] == 0.0


def test_bug_88_fault_23_one_rank_with_a_bad_loss_stops_the_step_on_all(tmp_path):
    models = [tiny(), tiny()]
    before = weights(models[0])

    def rank(ctx: Context):
        trajectories = groups()
        optim = OptimConfig(lr=0.05, mini_batches=1, tokens_per_micro_batch=30)
        policy = models[ctx.rank]
        if ctx.rank == 1:  # this rank's kernel fails; the others' losses are fine
            policy.model.norm.register_forward_hook(lambda module, inputs, output: output * math.nan)
        return update(policy, trajectories, tmp_path, optim=optim, optimizer=AveragingSGD(policy, 0.05, ctx), ctx=ctx)

    for policy, metrics in zip(models, on_ranks(2, rank), strict=True):
        assert metrics["optim/nonfinite"] == 1 and torch.equal(weights(policy), before)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"nonfinite_step000000_rank{r}.pt" for r in range(2)]


@pytest.mark.parametrize(
    ("schedule", "wanted"),
    [
        ("constant", {0: 0.2, 3: 0.8, 4: 1.0, 9: 1.0, 13: 1.0}),
        ("linear", {0: 0.2, 3: 0.8, 4: 1.0, 9: 0.5, 13: 0.1}),
        ("cosine", {0: 0.2, 3: 0.8, 4: 1.0, 9: 0.5, 13: 0.0244717}),
    ],
)
def test_the_learning_rate_by_hand(schedule, wanted):
    optimizer = torch.optim.SGD([{"params": [torch.zeros(1)]}, {"params": [torch.zeros(1)]}], lr=9.0)
    cfg = OptimConfig(lr=3.0, schedule=schedule, warmup_steps=4)
    for step in (13, 0, 9, 4, 3):  # in any order: the step alone decides
        assert set_learning_rate(optimizer, cfg, step, 14) == pytest.approx(3.0 * wanted[step], rel=1e-5)
        assert [group["lr"] for group in optimizer.param_groups] == [pytest.approx(3.0 * wanted[step], rel=1e-5)] * 2
    assert set_learning_rate(optimizer, OptimConfig(lr=3.0, schedule="linear"), 0, 1) == 3.0
    assert set_learning_rate(optimizer, OptimConfig(lr=3.0, warmup_steps=50), 3, 10) == pytest.approx(3.0 * 4 / 51)


def test_a_bfloat16_policy_is_refused_even_if_one_parameter_is_of_that_type():
    """At a learning rate of 1e-6 its updates would round to nothing: the reason is shown first."""
    weight = torch.full((1,), 0.02, dtype=torch.bfloat16)
    assert torch.equal(weight - 1e-6, weight) and not torch.equal(weight.float() - 1e-6, weight.float())
    with pytest.raises(ConfigError, match="bfloat16"):
        make_optimizer(tiny().bfloat16(), OPTIM)
    frozen = tiny().bfloat16().requires_grad_(False)
    frozen.model.norm.float().requires_grad_(True)
    assert len(make_optimizer(frozen, OPTIM).param_groups[0]["params"]) == 1


class ScriptedAgent:
    """Answers right, wrong or in part as the sample's id says, and keeps what it was asked."""

    judge = None

    def __init__(self) -> None:
        self.asked: list[tuple[list[str], int, int]] = []

    def rollout(self, samples, seed, progress, first, metrics, **_):
        self.asked.append(([sample.id for sample in samples], seed, first))
        progress(1)
        kinds = {"same": ("gold", "gold"), "none": ("no", "no"), "mixed": ("gold", "no")}
        return [
            Trajectory(sample.id, member, answer=answer, status=Status.ANSWERED)
            for sample in samples
            for member, answer in enumerate(kinds[sample.id.split("-")[0]])
        ]


def collect(kinds: list[str], prompts: int, refill: int, ctx: Context | None = None, agent=None, stop=None):
    """train.collect over samples of these kinds, drawn in this order."""
    samples = [Sample(f"{kind}-{index}", f"question {index}", ("gold",)) for index, kind in enumerate(kinds)]
    sampler = PromptSampler(samples, 0)
    sampler._order = list(range(len(samples)))
    cfg: Any = SimpleNamespace(
        seed=3,
        train=SimpleNamespace(prompts_per_step=prompts, refill=refill, steps=10),
        rollout=SimpleNamespace(group_size=2, max_response_tokens=9, strategy_tokens=5, case_tokens=5),
        engine=SimpleNamespace(tensor_parallel=1),
        reward=RewardConfig(),
        dosage=DosageConfig(),
        refresh=RefreshConfig(),
    )
    agent, metrics = agent or ScriptedAgent(), {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = train.collect(agent, sampler, cfg, ctx or Context(), 5, metrics, stop or StopSignal())
    return found, agent, metrics, sampler


def names(found) -> list[str]:
    trajectories, rewards, drawn = found
    ids = [id(one) for one in drawn]
    assert all(id(one) in ids for one in trajectories)
    assert [one.reward for one in trajectories] == pytest.approx(rewards.flatten().tolist())
    assert [one.member for one in trajectories] == [0, 1] * len(rewards)
    return [one.sample_id for one in trajectories][::2]


def test_groups_of_equal_rewards_give_way_to_other_questions():
    kinds = ["same", "mixed", "none", "mixed", "same", "mixed", "mixed"]
    found, agent, metrics, sampler = collect(kinds, prompts=3, refill=4)
    assert names(found) == ["mixed-1", "mixed-3", "mixed-5"]
    assert [ids for ids, _, _ in agent.asked] == [["same-0", "mixed-1", "none-2"], ["mixed-3", "same-4"], ["mixed-5"]]
    assert metrics["group/drawn"] == 6 and sampler.position == 6
    assert len({seed for _, seed, _ in agent.asked}) == 3  # a question drawn twice is not answered alike
    torch.testing.assert_close(found[1], torch.tensor([[1.0, 0.1]] * 3))


def test_without_rounds_left_a_step_is_smaller_and_where_all_are_equal_the_last_are_kept():
    found, _, metrics, _ = collect(["same", "mixed", "none", "same", "mixed"], prompts=3, refill=1)
    assert names(found) == ["mixed-1", "mixed-4"] and metrics["group/drawn"] == 5
    found, _, metrics, _ = collect(["same", "none", "same", "none"], prompts=2, refill=1)
    assert names(found) == ["same-2", "none-3"] and metrics["group/drawn"] == 4


def test_without_refill_every_group_is_kept():
    found, agent, metrics, _ = collect(["same", "mixed", "none"], prompts=3, refill=0)
    assert names(found) == ["same-0", "mixed-1", "none-2"] and metrics["group/drawn"] == 3 and len(agent.asked) == 1


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_ranks_share_the_questions_and_end_with_the_same_trajectories(world):
    kinds = ["same", "mixed", "none", "mixed", "same", "mixed", "mixed", "mixed"]
    alone, _, _, _ = collect(kinds, prompts=4, refill=3)
    agents = [ScriptedAgent() for _ in range(world)]
    results = on_ranks(world, lambda ctx: collect(kinds, 4, 3, ctx, agents[ctx.rank]))
    for found, _, metrics, sampler in results:
        assert names(found) == names(alone) and torch.equal(found[1], alone[1])
        assert (metrics["group/drawn"], sampler.position) == (7, 7)
    for round_ in range(len(agents[0].asked)):
        parts = [agent.asked[round_] for agent in agents]
        ids = [name for part, _, _ in parts for name in part]
        assert [first for _, _, first in parts] == [sum(len(p[0]) for p in parts[:rank]) for rank in range(world)]
        assert len({seed for _, seed, _ in parts}) == 1 and len(ids) == len(set(ids))


def test_fault_05_one_rank_that_is_told_to_stop_drops_the_step_on_all():
    class Stopped(StopSignal):
        def check(self, *_):
            raise StopRequested

    results = on_ranks(2, lambda ctx: collect(["mixed"] * 4, 4, 2, ctx, stop=Stopped() if ctx.rank else StopSignal()))
    assert [found for found, *_ in results] == [None, None]


def test_trajectories_are_left_alone_by_an_update(tmp_path):
    trajectories = groups()
    kept = copy.deepcopy(trajectories)
    update(tiny(), trajectories, tmp_path, loss=LossConfig(kl_coef=0.1))
    assert trajectories == kept
