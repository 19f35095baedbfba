"""What the training core does on one GPU: ceilings, loss heads, packing, a whole update, sharding and checkpoints.

    bench/gpu.sh [--cpu] [--only loss7b,packing]      # 7 minutes on an H200; --cpu, or no CUDA: the same blocks, small

Times are medians of 10 runs after 3, by CUDA events (fewer where one takes long); peaks are max_memory_allocated above
what was there. `error` is of both gradients against float64 on a problem of 512 rows of the same sizes. `floor` is
three matrix products of the trained rows at the measured ceiling. A block that fails is reported and the rest goes on;
one that runs out of its seconds stops between two measurements. Everything is in $OUT/gpu.json too.
"""

import argparse
import functools
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

import peers  # noqa: E402
import torch  # noqa: E402

from hiexp import fused  # noqa: E402


class OutOfTime(Exception):
    pass


@dataclass
class Bench:
    device: str
    out: Path
    rows: list[dict[str, Any]] = field(default_factory=list)
    deadline: float = 0.0
    ceiling: float = 0.0
    """FLOP/s of large bfloat16 products"""

    @property
    def small(self) -> bool:
        return self.device == "cpu"

    def add(self, block: str, case: str, **values: Any) -> None:
        """A row of the table, written at once."""
        row = {"block": block, "case": case, **values}
        self.rows.append(row)
        shown = "  ".join(
            f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in values.items()
        )
        print(f"{block:<9} {case:<44} {shown}", flush=True)
        (self.out / "gpu.json").write_text(json.dumps(self.rows, indent=1))

    def floor(self, operations: float) -> float:
        """Milliseconds of so many operations at the measured ceiling."""
        return operations / self.ceiling * 1e3 if self.ceiling else 0.0

    def clock(self, run: Callable[[], Any], repeats: int = 10) -> dict[str, float]:
        """Median milliseconds and peak MB of `run`; OutOfTime when the block's seconds are spent."""
        if time.monotonic() > self.deadline:
            raise OutOfTime
        first = self._once(run)
        repeats = 2 if self.small else max(2, min(repeats, int(1500 / max(first[0], 1e-3))))
        for _ in range(2 if repeats > 3 else 0):
            self._once(run)
        times = [self._once(run)[0] for _ in range(repeats)]
        return {"ms": statistics.median(times)} | ({} if self.small else {"peak_mb": first[1]})

    def _once(self, run: Callable[[], Any]) -> tuple[float, float]:
        if self.small:
            start = time.perf_counter()
            run()
            return (time.perf_counter() - start) * 1e3, 0.0
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end), (torch.cuda.max_memory_allocated() - before) / 1e6


def ceilings(bench: Bench) -> None:
    """What the device can do: a large product, a large copy."""
    n = 1024 if bench.small else 8192
    a, b = (torch.randn(n, n, device=bench.device, dtype=torch.bfloat16) for _ in range(2))
    bench.ceiling = 2 * n**3 / (bench.clock(lambda: a @ b)["ms"] / 1e3)
    bench.add("ceilings", f"{n}^3 bfloat16 product", tflops=bench.ceiling / 1e12)
    elements = 1 << (24 if bench.small else 31)
    source = torch.ones(elements, device=bench.device)
    target = torch.empty_like(source)
    seconds = bench.clock(lambda: target.copy_(source))["ms"] / 1e3
    bench.add("ceilings", f"copy of {elements * 4 / 1e9:.2f} GB", gb_per_s=elements * 8 / seconds / 1e9)


def loss7b(bench: Bench) -> None:
    """The heads at the sizes of Qwen2.5-7B."""
    heads(bench, "loss7b", 3584, 152064)


def loss05b(bench: Bench) -> None:
    """The heads at the sizes of Qwen2.5-0.5B."""
    heads(bench, "loss05b", 896, 151936)


def heads(bench: Bench, block: str, hidden: int, vocabulary: int) -> None:
    """Every head by share of trained rows, and our own settings; errors first, as a wrong head's time is nothing."""
    if bench.small:
        hidden, vocabulary = hidden // 28, 4096

    def problem(rows: int, share: float, mode: str = "token", **settings: float) -> Any:
        parts = (vocabulary, hidden, 8, rows // 8, share, torch.bfloat16, mode, bench.device)
        return peers.make_problem(*parts, **settings)

    functions = working_heads(bench, block, problem(256 if bench.small else 512, 0.5))
    large, little = (256, 128) if bench.small else (32768, 8192)
    compare(bench, block, problem, functions, [(large, 0.3), (large, 1.0)])
    own_settings(bench, block, problem, large)
    compare(bench, block, problem, functions, [(little, 0.3), (little, 1.0), (large, 0.4), (large, 0.2)])


def working_heads(bench: Bench, block: str, problem: Any) -> dict[str, Any]:
    """The heads that run here, after their gradients were compared with float64."""
    for name, reason in peers.missing().items():
        bench.add(block, f"{name} is left out", reason=reason[:80])
    candidates = {name: head for name, head in peers.HEADS.items() if name not in peers.missing()}
    candidates["ours_compiled"] = compiled(bench)
    if not bench.small:
        candidates |= {"liger_scaled_kept": liger_scaled, "cce_kept": cce}
    truth, working = peers.exact(problem), {}
    for name, head in candidates.items():
        try:
            found = peers.gradients(head, problem)
        except Exception as error:  # a kernel of others that this device or version cannot run
            bench.add(block, f"{name} fails", reason=f"{type(error).__name__}: {error}"[:80])
            continue
        bench.add(block, f"{name}, {problem.mask.numel()} rows", error=peers.gradient_error(found, truth))
        working[name] = head
    return working


def compare(
    bench: Bench,
    block: str,
    problem: Callable[..., Any],
    functions: dict[str, Any],
    sizes: Sequence[tuple[int, float]],
) -> None:
    for rows, share in sizes:
        one = problem(rows, share)
        products = 6 * one.weight.numel() * int(one.mask.sum())
        for name, head in functions.items():
            if name == "naive" and rows > 8192:
                continue  # 60 GB and more of logits
            result = bench.clock(lambda head=head, one=one: peers.gradients(head, one))
            bench.add(block, f"{name}, {rows} rows, {share:.0%} kept", **result, floor_ms=bench.floor(products))


def own_settings(bench: Bench, block: str, problem: Callable[..., Any], rows: int) -> None:
    """Ours alone, 30% kept: chunk size, sequence ratio, KL, entropy bonus."""
    variants: dict[str, tuple[dict[str, Any], int | None]] = {
        "sequence ratio": ({"mode": "sequence"}, None),
        "no KL term": ({"kl": 0.0}, None),
        "entropy bonus": ({"entropy_coef": 0.01}, None),
    }
    variants |= {f"chunks of {n}": ({}, n) for n in ((32, 64) if bench.small else (512, 1024, 2048, 4096))}
    for label, (changes, chunk) in variants.items():
        one, head = problem(rows, 0.3, **changes), functools.partial(peers.ours, chunk_rows=chunk)
        bench.add(block, f"ours, {rows} rows, {label}", **bench.clock(functools.partial(peers.gradients, head, one)))


def compiled(bench: Bench) -> Callable[[Any], torch.Tensor]:
    """Our head with the passes over the logits compiled (on a CPU traced only, which needs no compiler)."""
    plain, backend = fused._softmax_block_, "aot_eager" if bench.small else "inductor"
    fast = torch.compile(plain, dynamic=True, backend=backend)

    def head(problem: Any) -> torch.Tensor:
        fused._softmax_block_ = fast
        try:
            return peers.ours(problem)
        finally:
            fused._softmax_block_ = plain

    return head


def liger_scaled(problem: Any) -> torch.Tensor:
    """Liger's CUDA kernel for verl, on trained rows."""
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction  # type: ignore[import-not-found]

    rows = problem.hidden.flatten(0, 1)[problem.kept], problem.weight, problem.targets[problem.mask]
    nll, _ = LigerFusedLinearScaledCrossEntropyFunction.apply(*rows, 1.0, -100, 1, True)
    return peers.objective(peers.spread(-nll, problem), None, problem)


def cce(problem: Any) -> torch.Tensor:
    """Apple's cut cross-entropy in its exact form, on trained rows."""
    from cut_cross_entropy import linear_cross_entropy  # type: ignore[import-not-found]

    rows = problem.hidden.flatten(0, 1)[problem.kept], problem.weight, problem.targets[problem.mask]
    nll = linear_cross_entropy(*rows, reduction="none", impl="cce_exact")
    return peers.objective(peers.spread(-nll.float(), problem), None, problem)


def packing(bench: Bench) -> None:
    """Rows end to end against padded ones, forward and backward of a few layers; the hidden states are compared."""
    from hiexp import attention
    from hiexp.batching import Layout, micro_batches
    from hiexp.model import hidden_states

    attention.register()
    model = random_model(bench, layers=2 if bench.small else 4, dtype=torch.bfloat16)
    count, longest = (4, 64) if bench.small else (16, 4096)

    def run(batch: Any) -> torch.Tensor:
        model.zero_grad()
        hidden = hidden_states(model, batch)[batch.kept]
        hidden.float().square().mean().backward()
        return hidden.detach().float()

    kinds = {"padded": "sdpa", "packed": "varlen"} | ({} if bench.small else {"packed, flex": "flex_attention"})
    for waste in (0.37, 0.6):
        other = round(longest * (count * (1 - waste) - 1) / (count - 1))
        rows, padded = make_rows([longest] + [other] * (count - 1)), None
        for kind, implementation in kinds.items():
            model.set_attn_implementation(implementation)
            batch = micro_batches(rows, Layout(count * longest, kind != "padded", device=bench.device))[0]
            found = run(batch)
            padded = found if padded is None else padded
            gap = float((found - padded).norm() / padded.norm())
            bench.add("packing", f"{kind}, {waste:.0%} waste", **bench.clock(lambda b=batch: run(b)), difference=gap)


def update(bench: Bench) -> None:
    """A whole `update_policy` of a random model of the 0.5B shape, with the fused head and with full logits."""
    from hiexp import trainer

    for label, function in (("fused head", trainer.fused_loss), ("full logits", full_logits)):
        kept, trainer.fused_loss = trainer.fused_loss, function
        try:
            time_update(bench, "update", label, checkpoint_layers=False)
        finally:
            trainer.fused_loss = kept


def full_logits(
    hidden: Any, weight: Any, kept: Any, targets: Any, objective: Any, temperature: float = 1.0, sequence: Any = None
) -> fused.HeadOutput:
    """`fused_loss` as one would write it first."""
    scores = (hidden @ weight.t()).float().div(temperature).log_softmax(-1)[kept]
    logprobs = scores.gather(1, targets[:, None])[:, 0]
    entropy = -(scores.exp() * scores).sum(-1)
    losses, metrics = objective(logprobs, entropy, slice(0, len(kept)))
    return fused.HeadOutput(losses.sum(), logprobs.detach(), entropy.detach(), metrics)


def time_update(bench: Bench, block: str, label: str, checkpoint_layers: bool) -> tuple[Any, Any, Any]:
    """Updates in bfloat16 under FSDP2 (one rank) on 32,768 tokens; (model, optimiser, context) after them."""
    from hiexp import attention, trainer
    from hiexp.distributed import Context
    from hiexp.fsdp import ShardConfig, shard
    from hiexp.loss import LossConfig

    attention.register()
    ctx = Context(device=torch.device(bench.device))
    trajectories, rewards = make_trajectories(2, *((4, 96) if bench.small else (8, 2048)))
    cfg = trainer.OptimConfig(tokens_per_micro_batch=256 if bench.small else 16384, packed=True)
    model = random_model(bench, layers=2 if bench.small else 24, dtype=torch.float32)
    model.set_attn_implementation("varlen")
    model = shard(model, ShardConfig("bfloat16", checkpoint_layers), ctx)
    optimizer = trainer.make_optimizer(model, cfg)
    what = (trajectories, rewards, LossConfig("grpo", kl_coef=0.0), cfg, 1.0, bench.out, 0, ctx)
    result = bench.clock(lambda: trainer.update_policy(model, None, optimizer, *what), 3)
    rate = sum(one.num_tokens for one in trajectories) / result["ms"] * 1e3
    bench.add(block, f"{len(trajectories)} trajectories, {label}", **result, tokens_per_s=rate)
    return model, optimizer, ctx


def sharding(bench: Bench) -> None:
    """Activation checkpointing, and a checkpoint written and read back."""
    import shutil

    from hiexp.checkpoint import CheckpointConfig, Checkpoints

    model, optimizer, ctx = time_update(bench, "sharding", "checkpoint_layers", checkpoint_layers=True)
    folder = bench.out / "checkpoint_bench"
    folder.mkdir(exist_ok=True)
    checkpoints = Checkpoints(folder, CheckpointConfig(), ctx)
    start = time.perf_counter()
    checkpoints.save(1, model, optimizer, {})
    saved = time.perf_counter()
    megabytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6
    found = checkpoints.load_latest(model, optimizer) is not None
    loaded = time.perf_counter()
    shutil.rmtree(folder)
    bench.add("sharding", "checkpoint", save_s=saved - start, load_s=loaded - saved, mb=megabytes, found=found)


def random_model(bench: Bench, layers: int, dtype: torch.dtype) -> Any:
    """Qwen2.5-0.5B's shape (a 28th of its width on a CPU) with random weights."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 4096}
    if not bench.small:
        sizes = {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "vocab_size": 151936}
    torch.manual_seed(0)
    config = Qwen2Config(**sizes, num_hidden_layers=layers, num_key_value_heads=2, tie_word_embeddings=True)
    return Qwen2ForCausalLM(config).to(bench.device, dtype).eval()


def make_rows(lengths: Sequence[int]) -> list[Any]:
    from hiexp.batching import Row

    rng = torch.Generator().manual_seed(0)
    rows = []
    for index, length in enumerate(lengths):
        ids = torch.randint(4096, (length + 1,), generator=rng).tolist()
        rows.append(Row(str(index), ids, range(1, length + 1), rollout_logprobs=[0.0] * length, weight=1.0))
    return rows


def make_trajectories(groups: int, size: int, length: int) -> tuple[list[Any], torch.Tensor]:
    """Attempts of which 30% of the tokens are the policy's; rewards 0 and 1 in turn."""
    from hiexp.trajectory import Segment, Source, Status, Trajectory

    rng = torch.Generator().manual_seed(0)
    result = []
    for index in range(groups * size):
        ids = torch.randint(4096, (length,), generator=rng).tolist()
        one, at = Trajectory(str(index // size), index % size), 0
        for source, share in (
            (Source.PROMPT, 0.2),
            (Source.POLICY, 0.15),
            (Source.DOCUMENT, 0.5),
            (Source.POLICY, 0.15),
        ):
            part = tuple(ids[at : at + round(share * length)])
            one.append(Segment(source, part, (-1.0,) * len(part) if source is Source.POLICY else ()))
            at += len(part)
        one.status = Status.ANSWERED
        result.append(one)
    rewards = torch.tensor([float(index % 2) for index in range(groups * size)])
    return result, rewards.view(groups, size)


BLOCKS: dict[str, tuple[Callable[[Bench], None], int]] = {
    "ceilings": (ceilings, 30),
    "loss7b": (loss7b, 150),
    "loss05b": (loss05b, 60),
    "packing": (packing, 60),
    "update": (update, 60),
    "sharding": (sharding, 40),
}
"""name -> (what it does, its seconds)"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", "--quick", action="store_true", help="small sizes on the CPU even where CUDA is")
    parser.add_argument("--only", default="", help=f"some of {','.join(BLOCKS)}")
    parser.add_argument("--json", action="store_true", help="print one JSON object on standard output")
    arguments = parser.parse_args()
    output = sys.stdout
    if arguments.json:
        sys.stdout = sys.stderr
    device = "cpu" if arguments.cpu or not torch.cuda.is_available() else "cuda"
    if device == "cpu":
        torch.set_num_threads(1)  # the pieces of work are small
    out = Path(os.environ.get("OUT", "runs/bench"))
    out.mkdir(parents=True, exist_ok=True)
    bench = Bench(device, out)
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU, small sizes"
    bench.add("device", name, torch=torch.__version__)
    for block in [one for one in arguments.only.split(",") if one] or list(BLOCKS):
        function, seconds = BLOCKS[block]
        bench.deadline, start = time.monotonic() + seconds, time.monotonic()
        try:
            function(bench)
        except OutOfTime:
            bench.add(block, f"stopped after its {seconds} s")
        except Exception as error:
            traceback.print_exc(limit=4)
            bench.add(block, "FAILED", error_text=f"{type(error).__name__}: {error}"[:200])
        if device == "cuda":
            torch.cuda.empty_cache()
        bench.add(block, "done", seconds=time.monotonic() - start)
    if arguments.json:
        print(json.dumps({"rows": bench.rows}), file=output)


if __name__ == "__main__":
    main()
