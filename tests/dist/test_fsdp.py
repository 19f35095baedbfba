"""Sharded models among real processes against one plain process: weights, gradients, norms, steps.

Must fail if a rank's gradient is dropped or counted twice, if the head is its own unit, if tied weights come apart, if
masters are bfloat16, if checkpointing recomputes another function, or if a gathered weight misses rows.
"""

from copy import deepcopy
import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from dist.harness import run_ranks
from safetensors.torch import load_file, save_file
from support import build_tiny_model
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from hiexp import model as model_module
from hiexp.config import ConfigError
from hiexp.distributed import Context
from hiexp.fsdp import ShardConfig, load_sharded, shard
from hiexp.fused import fused_loss
from hiexp.model import (
    ModelConfig,
    full_parameters,
    head_weight,
    load_causal_lm,
    release,
    run_body,
)

pytestmark = pytest.mark.dist
VOCABULARY = 41  # odd: the last rank holds fewer rows, with 4 of them by 2
ROWS = [(5, 3.0), (17, 1.0), (2, 2.0), (9, 0.5), (12, 0.0), (3, 0.0), (7, 1.5), (30, 0.25)]
"""(length, weight of its tokens) of the sequences of a step; rank r of W takes the ones from r * 8 // W on"""


def tiny(tied: bool = True, **changes: Any) -> Any:
    return build_tiny_model(VOCABULARY, tie_word_embeddings=tied, initializer_range=0.1, **changes)


def sequences(rank: int, world_size: int, rows: list = ROWS) -> list[tuple[Tensor, Tensor]]:
    """This rank's (ids [1, L], global weight per predicted token [L - 1])."""
    total = sum(weight * (length - 1) for length, weight in rows)
    mine = []
    for index in range(rank * len(rows) // world_size, (rank + 1) * len(rows) // world_size):
        length, weight = rows[index]
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(0, VOCABULARY, (1, length), generator=generator)
        mine.append((ids, torch.full((length - 1,), weight / total)))
    return mine


def plain_loss(model: Any, ids: Tensor, weights: Tensor) -> Tensor:
    """Independent: the model's own forward and a cross-entropy."""
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    return (weights * torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")).sum()


def head_loss(model: Any, ids: Tensor, weights: Tensor, fused: bool = True) -> Tensor:
    """As the trainer does it: body by `run_body`, head outside of any forward."""
    body = getattr(model, "run_body", None)
    inputs = {"input_ids": ids, "use_cache": False}
    hidden = (body(**inputs) if body else run_body(model, **inputs))[0, :-1]
    if fused:
        objective = lambda logprobs, entropy, rows: (-weights[rows] * logprobs, {})  # noqa: E731
        return fused_loss(hidden, head_weight(model), torch.arange(len(hidden)), ids[0, 1:], objective).loss
    return (weights * torch.nn.functional.cross_entropy((hidden @ head_weight(model).T).float(), ids[0, 1:])).sum()


def backward(model: Any, ctx: Context, rows: list = ROWS, loss: Any = head_loss) -> float:
    total = 0.0
    for ids, weights in sequences(ctx.rank, ctx.world_size, rows):
        value = loss(model, ids, weights)
        (value * ctx.world_size).backward()  # FSDP averages over the ranks
        total += float(value.detach())
    return ctx.sum([total])[0]


def full(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: full(parameter.grad).clone() for name, parameter in model.named_parameters()}


def worst(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert list(one) == list(other)
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def clip_and_step(model: Any) -> float:
    parameters = list(model.parameters())
    norm = full(torch.nn.utils.clip_grad_norm_(parameters, 0.05))
    torch.optim.AdamW(parameters, 0.01, fused=True).step()
    return float(norm)


def compare_step(ctx: Context, tied: bool, options: dict) -> None:
    alone = tiny(tied)
    loss = backward(alone, Context(), loss=plain_loss)
    model = shard(tiny(tied), ShardConfig(**options), ctx)
    if options["replicas"] > 1:
        assert model.lm_head.weight.placements == (Replicate(), Shard(0))
        assert model.lm_head.weight.device_mesh.shape == (options["replicas"], ctx.world_size // options["replicas"])
    assert backward(model, ctx) == pytest.approx(loss, abs=1e-6)
    assert worst(gradients(model), gradients(alone)) < 1e-6
    wanted = float(torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.05))
    assert wanted > 0.1  # so that it clips
    torch.optim.AdamW(alone.parameters(), 0.01, fused=True).step()
    assert clip_and_step(model) == pytest.approx(wanted, rel=1e-6)
    # Adam divides by the gradient's size, which makes much of the last bit of a tiny one.
    assert worst(dict(full_parameters(model)), {n: p.detach() for n, p in alone.named_parameters()}) < 1e-4
    model.zero_grad()
    assert backward(model, ctx) == pytest.approx(backward(alone, Context(), loss=plain_loss), abs=1e-4)


def compare_steps(ctx: Context, replicas: int) -> None:
    for tied in (True, False):
        compare_step(ctx, tied, {"replicas": replicas})
    compare_step(ctx, True, {"replicas": replicas, "checkpoint_layers": True, "cpu_offload": True})


@pytest.mark.parametrize(("world_size", "replicas"), [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_bug_34_35_gradient_and_clip_norm_equal_one_process(world_size, replicas):
    """Uneven data: 32 and 52 positions on two ranks; with four, the third has no weight at all."""
    run_ranks(compare_steps, world_size, replicas)


def only_zero_weights(ctx: Context) -> None:
    rows = [(5, 3.0), (9, 0.0)]
    alone, model = tiny(), shard(tiny(), ShardConfig(), ctx)
    backward(alone, Context(), rows, plain_loss)
    backward(model, ctx, rows)
    assert worst(gradients(model), gradients(alone)) < 1e-6
    before = dict(full_parameters(model))
    clip_and_step(model)
    after = dict(full_parameters(model))
    assert all(not torch.equal(before[name], after[name]) for name in before)


def test_fault_18_a_rank_without_weight_still_takes_part_in_the_step():
    run_ranks(only_zero_weights, 2)


def tied_parts(ctx: Context) -> None:
    body, head = tiny(), tiny()
    # The parts of the gradient apart: an untied model whose two matrices start equal.
    split = tiny(tied=False)
    split.load_state_dict(body.state_dict())
    backward(split, Context(), loss=plain_loss)
    parts = split.model.embed_tokens.weight.grad, split.lm_head.weight.grad
    model = shard(head, ShardConfig(), ctx)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    backward(model, ctx)
    got = full(model.model.embed_tokens.weight.grad)
    assert float((got - parts[0] - parts[1]).abs().max()) < 1e-6 < float(parts[0].abs().max())
    clip_and_step(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    names = [name for name, _ in full_parameters(model)]
    assert "lm_head.weight" not in names and names.count("model.embed_tokens.weight") == 1


def head_is_plain(ctx: Context, tied: bool) -> None:
    model = shard(tiny(tied), ShardConfig(param_dtype="bfloat16"), ctx)
    assert isinstance(head_weight(model), DTensor)
    units = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    assert units == ["", "model.layers.0", "model.layers.1"]
    ids, weights = sequences(0, 1)[0]
    loss = head_loss(model, ids, weights)
    assert all(isinstance(parameter, DTensor) for parameter in model.model.layers.parameters())  # freed again
    head = head_weight(model)
    assert type(head) is torch.nn.Parameter and head.shape == (VOCABULARY, 32) and head.dtype == torch.bfloat16
    loss.backward()
    assert isinstance(head_weight(model), DTensor) and head_weight(model).dtype == torch.float32


def test_bug_57_tied_weights_stay_one_and_get_both_parts_of_the_gradient():
    run_ranks(tied_parts, 2)


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_is_a_plain_full_parameter_between_forward_and_backward(tied):
    run_ranks(head_is_plain, 2, tied)


def move_at_a_small_rate(ctx: Context) -> list[float]:
    """Share of the weights that one AdamW step at 1e-6 moves: float32 masters under bfloat16, bfloat16 masters."""
    shares = []
    for dtype in (torch.float32, torch.bfloat16):
        model = shard(tiny().to(dtype), ShardConfig(param_dtype="bfloat16"), ctx)
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        before = dict(full_parameters(model))
        backward(model, ctx)
        assert {parameter.grad.dtype for parameter in model.parameters()} == {dtype}
        torch.optim.AdamW(model.parameters(), 1e-6, weight_decay=0.0, fused=True).step()
        after = dict(full_parameters(model))
        moved = sum(int((before[name] != after[name]).sum()) for name in before)
        shares.append(moved / sum(tensor.numel() for tensor in before.values()))
    return shares


@pytest.mark.parametrize("world_size", [1, 2])
def test_masters_are_float32_and_move_where_bfloat16_ones_do_not(world_size):
    for master, rounded in run_ranks(move_at_a_small_rate, world_size):
        assert master > 0.9 and rounded < 0.1


def checkpointed_is_identical(ctx: Context) -> None:
    results = []
    for on in (False, True):
        model = shard(tiny(), ShardConfig(checkpoint_layers=on), ctx)
        calls = []
        model.model.layers[1].mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        loss = backward(model, ctx)
        results.append((loss, gradients(model), len(calls), [name for name, _ in model.named_parameters()]))
        assert not model.training
        with torch.no_grad():
            head_loss(model, *sequences(0, 1)[0])
        assert len(calls) == results[-1][2] + 1
    (loss, grads, calls, names), (other_loss, other_grads, other_calls, other_names) = results
    assert loss == other_loss and worst(grads, other_grads) == 0.0 and names == other_names
    assert other_calls == 2 * calls  # it did compute again


@pytest.mark.parametrize("world_size", [1, 2])
def test_checkpointed_layers_give_the_same_bits(world_size):
    run_ranks(checkpointed_is_identical, world_size)


def test_a_copy_of_a_checkpointed_model_runs_its_own_layers():
    model = shard(tiny(), ShardConfig(checkpoint_layers=True), Context())
    copy = deepcopy(model)
    with torch.no_grad():
        before = run_body(copy, input_ids=torch.tensor([[1, 2, 3]]))
        for parameter in model.model.layers.parameters():
            parameter.zero_()
        assert torch.equal(run_body(copy, input_ids=torch.tensor([[1, 2, 3]])), before)


def gather_all(ctx: Context) -> tuple[list[str], int]:
    wanted = dict(tiny(tied=False).named_parameters())
    model = tiny(tied=False)
    model.register_parameter("plain", torch.nn.Parameter(torch.arange(3.0)))  # as an ignored one would be
    plain, wanted["plain"] = model.plain, model.plain.detach()
    del model.plain
    shard(model, ShardConfig(replicas=max(1, ctx.world_size // 2)), ctx)
    model.register_parameter("plain", plain)
    calls = []
    gather = torch.distributed.all_gather
    torch.distributed.all_gather = lambda *args: (calls.append(ctx.rank), gather(*args))
    model_module.GATHER_BYTES = 30_000
    got = {}
    for name, tensor in full_parameters(model):
        if ctx.is_main and len(got) % 7 == 0:
            time.sleep(0.1)  # while the others already ask for the next bucket
        got[name] = tensor
    assert set(got) == set(wanted) and all(torch.equal(got[name], wanted[name]) for name in wanted)
    assert all(tensor.dtype == torch.bfloat16 for _, tensor in full_parameters(model, torch.bfloat16))
    return list(got), len(calls)


@pytest.mark.parametrize("world_size", [2, 4])
def test_bug_58_gathered_weights_are_exact_in_one_order_with_plain_tensors_and_a_slow_receiver(world_size):
    (names, calls), *others = run_ranks(gather_all, world_size)
    assert all(other == (names, calls) for other in others)
    assert 2 * 3 <= calls <= 2 * 5 < len(names)  # 105 kB in buckets of 30, twice


def stale_root(ctx: Context) -> None:
    model = shard(tiny(), ShardConfig(param_dtype="bfloat16"), ctx)
    ids, weights = sequences(0, 1)[0]
    with torch.no_grad():
        before = head_loss(model, ids, weights)
        assert not isinstance(head_weight(model), DTensor)
        assert {tensor.dtype for _, tensor in full_parameters(model)} == {torch.float32}  # releases, too
        head_loss(model, ids, weights)
        release(model)
        for parameter in model.parameters():
            parameter.zero_()
        assert head_loss(model, ids, weights) != before
        uniform = float(weights.sum()) * math.log(VOCABULARY)
        assert float(head_loss(model, ids, weights)) == pytest.approx(uniform, rel=1e-5)
    release(tiny())


def test_weights_changed_after_scoring_are_the_next_forwards():
    run_ranks(stale_root, 2)


def other_architectures() -> list[Any]:
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    scaled = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaled |= {"original_max_position_embeddings": 16, "rope_theta": 500.0}
    torch.manual_seed(0)
    return [
        Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=8, tie_word_embeddings=True)),
        MistralForCausalLM(MistralConfig(**shape, head_dim=8, sliding_window=None)),
        LlamaForCausalLM(LlamaConfig(**shape, rope_parameters=scaled, max_position_embeddings=128)),
    ]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """One file and several, tied and not, stored as float32 and bfloat16, with a head beside the tied embedding."""
    root, paths = tmp_path_factory.mktemp("models"), []
    for index, model in enumerate([tiny(), tiny(tied=False).bfloat16(), *other_architectures()]):
        paths.append(str(root / str(index)))
        model.save_pretrained(paths[-1], max_shard_size="5KB" if index % 2 else "1GB")
    assert (root / "1/model.safetensors.index.json").is_file() and not (root / "1/model.safetensors").exists()
    weights = load_file(root / "0/model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    tiny().save_pretrained(root / "both")
    save_file(weights, root / "both/model.safetensors", {"format": "pt"})
    del weights["model.embed_tokens.weight"]
    tiny().save_pretrained(root / "head")
    save_file(weights, root / "head/model.safetensors", {"format": "pt"})
    return [*paths, str(root / "both"), str(root / "head")]


def load_like_transformers(ctx: Context, paths: list[str]) -> None:
    ids = torch.arange(12)[None]
    for path in paths:
        for dtype in ("float32", "bfloat16"):
            whole = load_causal_lm(ModelConfig(path, dtype))
            # bfloat16 layers, so that one process is sharded, too; and offload, which brings its own device
            model = load_sharded(ModelConfig(path, dtype), ShardConfig("bfloat16", cpu_offload=True), ctx)
            assert all(isinstance(parameter, DTensor) for parameter in model.parameters()) and not model.training
            got, wanted = dict(full_parameters(model)), dict(whole.named_parameters())
            assert list(got) == list(wanted)
            assert all(torch.equal(got[name], wanted[name]) and got[name].dtype == wanted[name].dtype for name in got)
            buffers, others = dict(model.named_buffers()), dict(whole.named_buffers())
            assert all(torch.equal(buffers[name], others[name]) for name in others) and list(buffers) == list(others)
            assert (head_weight(model) is model.model.embed_tokens.weight) == model.config.tie_word_embeddings
            with torch.no_grad():
                half = load_causal_lm(ModelConfig(path, "bfloat16"))
                assert torch.equal(model.run_body(input_ids=ids), run_body(half, input_ids=ids))


@pytest.mark.parametrize("world_size", [1, 2])
def test_bug_57_lean_loading_equals_transformers_bit_for_bit(world_size, folders):
    run_ranks(load_like_transformers, world_size, folders)


def train_after_lean_loading(ctx: Context, path: str) -> None:
    alone = load_causal_lm(ModelConfig(path))
    backward(alone, Context(), loss=plain_loss)
    model = load_sharded(ModelConfig(path), ShardConfig(), ctx)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, fused=True)  # made before the first forward
    backward(model, ctx)
    assert worst(gradients(model), gradients(alone)) < 1e-6
    before = dict(full_parameters(model))
    optimizer.step()
    assert all(not torch.equal(before[name], tensor) for name, tensor in full_parameters(model))
    assert head_weight(model) is model.model.embed_tokens.weight


def test_a_leanly_loaded_model_trains_and_stays_tied(folders):
    run_ranks(train_after_lean_loading, 2, folders[0])


class Largest(TorchDispatchMode):
    """Remembers the bytes of the largest tensor that took memory of its own (a slice of a mapped file does not)."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        takes_memory = func.__name__.startswith(("empty", "zeros", "new_", "clone", "_to_copy", "cat"))
        for tensor in tree_leaves(result) if takes_memory else []:
            if type(tensor) is Tensor and tensor.device.type != "meta":
                self.largest = max(self.largest, tensor.nbytes)
        return result


def never_whole(ctx: Context, path: str) -> tuple[int, int, int]:
    with Largest() as seen:
        model = load_sharded(ModelConfig(path), ShardConfig(), ctx)
    mine = sum(parameter.to_local().numel() for parameter in model.parameters())
    return seen.largest, mine, model.num_parameters()


def test_no_rank_ever_holds_a_whole_matrix(folders):
    for largest, mine, total in run_ranks(never_whole, 2, folders[0]):
        assert 0 < largest <= 64 * 32 * 4 / 2  # half of a feed-forward matrix, float32
        assert mine < 0.55 * total


def spoil(path: Path, change: Any) -> str:
    tiny().save_pretrained(path)
    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return str(path)


def refusals(ctx: Context, paths: list[str]) -> list[str]:
    messages = []
    for path in paths:
        try:
            load_sharded(ModelConfig(path), ShardConfig(), ctx)
        except ConfigError as error:
            messages.append(str(error))
    return messages


def test_a_folder_that_lacks_weights_is_refused_on_all_ranks_as_when_loaded_whole(tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"
    missing = spoil(tmp_path / "missing", lambda weights: weights.pop(name))
    shape = spoil(tmp_path / "shape", lambda weights: weights.update({name: torch.zeros(64, 31)}))
    apart = spoil(tmp_path / "apart", lambda w: w.update({"lm_head.weight": torch.zeros(VOCABULARY, 32)}))
    cut = Path(spoil(tmp_path / "cut", lambda weights: None))
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:-100])
    empty = Path(spoil(tmp_path / "empty", lambda weights: None))
    (empty / "model.safetensors").unlink()
    softcap = tmp_path / "softcap"
    tiny().save_pretrained(softcap)
    (softcap / "config.json").write_text(
        json.dumps(json.loads((softcap / "config.json").read_text()) | {"logit_scale": 2})
    )
    paths = [missing, shape, apart, str(cut), str(empty), str(softcap), str(tmp_path / "nowhere")]
    messages, others = run_ranks(refusals, 2, paths)
    assert messages == others and len(messages) == len(paths)
    with pytest.raises(ConfigError) as error:
        load_causal_lm(ModelConfig(missing))
    assert messages[0] == str(error.value)
    assert name in messages[1] and "[64, 31]" in messages[1] and "[64, 32]" in messages[1]
    assert "two different tensors" in messages[2]
    for message, words in zip(
        messages[3:], ("cannot load", "cannot load", "logit_scale", "does not exist"), strict=True
    ):
        assert words in message and "\n" not in message


def wrong_replicas(ctx: Context) -> str:
    with pytest.raises(ConfigError) as error:
        shard(tiny(), ShardConfig(replicas=3), ctx)
    return str(error.value)


def test_settings_that_cannot_work_are_refused(tmp_path):
    assert run_ranks(wrong_replicas, 2) == ["replicas=3 does not divide the 2 processes"] * 2
    for changes in ({"replicas": 0}, {"param_dtype": "float16"}):
        with pytest.raises(ConfigError, match=next(iter(changes))):
            ShardConfig(**changes)
    with pytest.raises(ConfigError, match=r"no base_model\.layers"):
        shard(GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=9)), ShardConfig(), Context())
    torch.manual_seed(0)
    shape = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 8,
    }
    gemma = Gemma3ForCausalLM(Gemma3TextConfig(vocab_size=9, num_key_value_heads=1, **shape))
    gemma.save_pretrained(tmp_path)  # its embedding keeps a scale, which no file holds
    with pytest.raises(ConfigError, match="no rule to rebuild the buffers of Gemma3TextScaledWordEmbedding"):
        load_sharded(ModelConfig(str(tmp_path)), ShardConfig("bfloat16"), Context())
