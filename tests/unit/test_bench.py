"""The benches measure what they say: same objective for every head, honest ratios, formulas that hold on small models.

Must fail if a head gets another objective, if the float64 reference is wrong, if counts of rows or products grow, if a
missed target is not reported, or if the memory formulas leave the measured truth.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import loss as loss_bench  # noqa: E402
import memory  # noqa: E402
import peers  # noqa: E402

from hiexp import fused  # noqa: E402

OTHERS = [name for name in peers.HEADS if name not in ("ours", "naive")]


def small_problem(mode="token", dtype=torch.float32, **settings):
    return peers.make_problem(64, 16, 4, 10, 0.5, dtype, mode, **settings)


@pytest.mark.parametrize("mode", ["token", "sequence"])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.6, "entropy_coef": 0.1}, {"kl": 0.0}])
def test_the_float64_reference_is_the_gradient_of_the_naive_loss(mode, settings):
    """`exact` forms its gradients by hand; autograd over full float64 logits must agree to rounding."""
    problem = small_problem(mode, **settings)
    double = peers.Problem(**vars(problem))
    double.hidden = problem.hidden.detach().double().requires_grad_()
    double.weight = problem.weight.detach().double().requires_grad_()
    loss = peers.naive(double, torch.float64)
    loss.backward()
    truth = peers.exact(problem)
    assert float(loss.detach() - truth[0]) == pytest.approx(0.0, abs=1e-12)
    torch.testing.assert_close(double.hidden.grad, truth[1], atol=1e-12, rtol=1e-10)
    torch.testing.assert_close(double.weight.grad, truth[2], atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("mode", ["token", "sequence"])
@pytest.mark.parametrize("name", list(peers.HEADS))
def test_every_head_that_is_installed_has_the_same_objective(name, mode):
    if reason := peers.missing().get(name):
        pytest.skip(reason)
    problem = small_problem(mode)
    truth = peers.exact(problem)
    found = peers.gradients(peers.HEADS[name], problem)
    assert float(found[0]) == pytest.approx(float(truth[0]), rel=1e-4)
    assert peers.gradient_error(found, truth) < 3e-6


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 2e-6), (torch.bfloat16, 5e-3)])
@pytest.mark.parametrize("mode", ["token", "sequence"])
def test_gradients_of_the_fused_head_are_within_their_bound(dtype, limit, mode):
    problem = peers.make_problem(2048, 128, 4, 64, 0.4, dtype, mode)
    assert peers.gradient_error(peers.gradients(peers.ours, problem), peers.exact(problem)) < limit


class Products(TorchDispatchMode):
    """Rows of every matrix product that has the vocabulary on one side."""

    def __init__(self, vocabulary):
        super().__init__()
        self.vocabulary, self.shapes = vocabulary, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            left, right = [a for a in args if isinstance(a, torch.Tensor)][-2:]
            if self.vocabulary in (*left.shape, *right.shape):
                self.shapes.append((*left.shape, right.shape[1]))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode, chunk_rows, times", [("token", 7, 3), ("sequence", 7, 3), ("sequence", 1, 4)])
def test_head_rows_are_the_kept_rows_and_meet_the_head_three_times(mode, chunk_rows, times):
    """Three products of kept rows each; a fourth where a sequence (5 rows) exceeds 4 chunks of 1."""
    problem = small_problem(mode)
    kept = len(problem.kept)
    with Products(64) as products:
        peers.gradients(lambda p: peers.ours(p, chunk_rows), problem)
    work = sum(a * b * c for a, b, c in products.shapes)
    assert kept == 20 and work == times * kept * 64 * 16


def test_the_peak_is_that_of_a_chunk_whatever_the_number_of_tokens(monkeypatch):
    """No tensor with the vocabulary on one side has more than a chunk's rows on the other (the head's own apart)."""
    seen = set()

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(tensor, torch.Tensor) and 997 in tensor.shape:
                    seen.add(tuple(tensor.shape))
            return result

    problem = peers.make_problem(997, 16, 8, 40, 0.5, torch.float32, "token")
    with Sizes():
        peers.gradients(lambda p: peers.ours(p, 32), problem)
    assert {shape for shape in seen if 16 not in shape} and max(min(shape) for shape in seen) <= 32


def test_a_missed_target_is_reported_and_an_absent_peer_decides_nothing():
    ratio = dict.fromkeys(OTHERS) | {"naive": 0.95, "trl": 2.0, "trl_kept": 1.3}
    case = {"V": 1, "kept": 30, "dtype": "fp32", "mode": "token", "ratio": ratio, "grad_err": 1e-6}
    case["peak_mb"] = {"ours": 116.0, "formula": 100.0}
    found = loss_bench.failures({"cases": [case], "accuracy": [{"mode": "x", "dtype": "bf16", "grad_err": 6e-3}]})
    assert [line.split(": ")[1].split()[0] for line in found] == ["trl", "peak", "gradient"]


def test_ratios_are_theirs_over_ours_and_the_first_round_is_dropped(monkeypatch):
    clock = iter([0, 100, 100, 200, 0, 2, 10, 16, 0, 1, 10, 12])  # start and end of ours, naive, per round
    monkeypatch.setattr(loss_bench.time, "process_time", lambda: next(clock))
    case = loss_bench.Case(64, 40, 50, "fp32", "token")
    row = loss_bench.measure(case, ["ours", "naive"], 2)
    assert row["ratio"]["naive"] == 2.5 and row["ratio"]["trl"] is None and row["cpu_s"] == 1.5


@pytest.mark.slow
def test_the_quick_loss_bench_prints_one_json_object(tmp_path, monkeypatch):
    monkeypatch.setattr(loss_bench, "cases", lambda quick: [loss_bench.Case(4096, 128, 50, "fp32", "token")])
    monkeypatch.setattr(loss_bench, "accuracy", list)
    result = loss_bench.run(True, 1, lambda text: None)
    case = json.loads(json.dumps(result))["cases"][0]
    assert {"V", "kept", "dtype", "mode", "ratio", "grad_err", "peak_mb"} <= set(case)
    assert {"trl", "trl_kept", "liger", "naive"} <= set(case["ratio"]) and case["peak_mb"]["ours"] > 0


@pytest.mark.parametrize("name", ["Qwen2.5-0.5B", "Qwen2.5-7B", "Qwen2.5-32B"])
def test_parameters_are_those_of_transformers(name):
    from transformers import AutoModelForCausalLM, Qwen2Config

    shape = memory.SHAPES[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen2Config(**vars(shape)))
    assert sum(p.numel() for p in model.parameters()) == shape.parameters


MEASURE = """
import json, sys, torch
from pathlib import Path
sys.path[:0] = [{root!r}, {bench!r}]
import loss, memory
from transformers import Qwen2Config, Qwen2ForCausalLM
from hiexp import attention
from hiexp.batching import Layout, Row, micro_batches
from hiexp.distributed import Context
from hiexp.fsdp import ShardConfig, shard
from hiexp.model import hidden_states

torch.set_num_threads(1)
attention.register()
shape = memory.Shape(192, 768, {layers}, 6, 2, 512, True)
model = Qwen2ForCausalLM(Qwen2Config(**vars(shape))).eval()
model.set_attn_implementation("varlen")
shard(model, ShardConfig(checkpoint_layers={checkpoint}), Context())

def step(tokens):
    rows = [Row(str(i), [1] * 257, range(1, 257), rollout_logprobs=[0.0] * 256) for i in range(tokens // 256)]
    batch = micro_batches(rows, Layout(tokens, packed=True))[0]
    hidden_states(model, batch).square().mean().backward()

step(256)  # gradients and libraries are there now
Path("/proc/self/clear_refs").write_text("5")
before = loss._status_mb("VmRSS")
step({tokens})
print(loss._status_mb("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from /proc")
@pytest.mark.parametrize("checkpoint", [False, True])
def test_activation_bytes_are_within_15_percent_of_what_is_measured(checkpoint):
    """Per token of a float32 micro-batch on a CPU; malloc gives large blocks back, so the peak is that of live ones."""
    layers, tokens = (16, 1024) if checkpoint else (6, 1024)
    code = MEASURE.format(
        root=str(ROOT), bench=str(ROOT / "bench"), layers=layers, checkpoint=checkpoint, tokens=tokens
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
    environment |= {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    shape = memory.Shape(192, 768, layers, 6, 2, 512, True)
    setting = memory.Setting(1, checkpoint_layers=checkpoint, size=4)
    formula = memory.token_bytes(shape, setting) * tokens / 1e6
    assert formula / 1.15 < float(done.stdout) < formula * 1.15


def test_the_memory_table_of_the_docs_is_the_one_that_the_script_prints():
    rows = memory.markdown(memory.table(9216)).splitlines()
    text = (ROOT / "docs/gpu_node.md").read_text(encoding="utf-8")
    assert all(row in text for row in rows)


def test_more_gpus_never_hold_less_and_offloading_leaves_no_state():
    shape = memory.SHAPES["Qwen2.5-7B"]
    tokens = [memory.fit("x", shape, memory.Setting(gpus))["tokens"] for gpus in (1, 2, 4, 8, 16)]
    assert tokens == sorted(tokens) and tokens[0] == 0 < tokens[2]
    offloaded = memory.fit("x", shape, memory.Setting(1, cpu_offload=True))
    assert offloaded["tokens"] > tokens[2] and offloaded["gb"]["optimiser"] == 0


def test_fused_constants_in_the_formulas_are_those_of_the_code():
    assert memory.CHUNK_ROWS == fused.CHUNK_ROWS
