"""What one GPU must hold while the policy is updated, from formulas: the largest micro-batch that fits, per model.

    python bench/memory.py [--json]                                   # the table of docs/gpu_node.md
    python bench/memory.py --model Qwen2.5-7B --gpus 8 --gpu-gb 96    # one line with all its parts
    python bench/memory.py --model path/to/config.json --gpus 8

Computed, not measured on a GPU; tests/unit/test_bench.py holds weights and activations against small models on a CPU.
1 GB = 1e9 bytes. P parameters, W GPUs, R replicas, so P R / W on each; H hidden, D layers, A = query heads x head
width, B = key-value heads x head width, I MLP width, V vocabulary, T positions of a micro-batch; s = 2 bytes, the dtype
that layers compute in.

    state       P R / W (4 weights + 4 gradient + 8 AdamW), and 4 for the reference where there is a KL term; in host
                memory with shard.cpu_offload
    gathered    s E: embedding and head (E = V H, twice if not tied) stay whole from forward to backward, with their
                gradient again s E; two layers of P_l parameters: 2 s P_l, their gradient s P_l, sent as 4 P_l
    head        C V (4 + s) + V H 4 + V H s, C = 1,024 rows (fused.py)
    per token   D x saved layer + 8 H + 2 s H (last norm, hidden states and their gradient)
    saved layer two norms, each its input in float32 and two results: 2 (4 H + 2 s H); query, key, value, output of
                attention and what the output product keeps: s (3 A + 2 B); MLP: 4 s I. With shard.checkpoint_layers
                only s H, and one whole layer while it is computed again. Gradients on their way through a layer: a
                third of a saved layer (measured on a CPU)
    not counted 8% of the card for fragments, 4 GB for CUDA, NCCL and a sleeping engine (assumed)

The engine is asleep during the update. While it samples, it shares the card with the trainer's state (without
gradients, which are gone by then): `engine` is the largest engine.gpu_memory_fraction, and `kv tokens` what is left of
it after its own s P / (tensor parallel) of weights, at 2 s B D / (tensor parallel) bytes a token.
"""

import argparse
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

GB = 1e9
LOST_SHARE = 0.08
RESERVED = 4 * GB
CHUNK_ROWS = 1024


@dataclass(frozen=True)
class Shape:
    """A dense decoder; the names are those of config.json."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    tie_word_embeddings: bool

    @property
    def query(self) -> int:
        return self.hidden_size

    @property
    def pair(self) -> int:
        return self.hidden_size // self.num_attention_heads * self.num_key_value_heads

    @property
    def layer_parameters(self) -> int:
        """Products, the biases of query, key and value (Qwen2), two norms."""
        h, a, b = self.hidden_size, self.query, self.pair
        return 2 * h * a + 2 * h * b + a + 2 * b + 3 * h * self.intermediate_size + 2 * h

    @property
    def ends(self) -> int:
        """Embedding and head."""
        return self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)

    @property
    def parameters(self) -> int:
        return self.num_hidden_layers * self.layer_parameters + self.ends + self.hidden_size


# From the config.json of the models of these names.
SHAPES = {
    "Qwen2.5-0.5B": Shape(896, 4864, 24, 14, 2, 151936, True),
    "Qwen2.5-1.5B": Shape(1536, 8960, 28, 12, 2, 151936, True),
    "Qwen2.5-3B": Shape(2048, 11008, 36, 16, 2, 151936, True),
    "Qwen2.5-7B": Shape(3584, 18944, 28, 28, 4, 152064, False),
    "Qwen2.5-Math-7B": Shape(3584, 18944, 28, 28, 4, 152064, False),
    "Qwen2.5-14B": Shape(5120, 13824, 48, 40, 8, 152064, False),
    "Qwen2.5-32B": Shape(5120, 27648, 64, 40, 8, 152064, False),
}


@dataclass(frozen=True)
class Setting:
    gpus: int = 8
    replicas: int = 1
    gpu_gb: float = 96.0
    checkpoint_layers: bool = True
    reference: bool = True
    tensor_parallel: int = 1
    cpu_offload: bool = False
    size: int = 2
    """bytes of the dtype that layers compute in"""


def state_bytes(shape: Shape, setting: Setting) -> dict[str, float]:
    """What each GPU holds of model, reference and optimiser during the update; zeros if that is in host memory."""
    share = 0.0 if setting.cpu_offload else shape.parameters * setting.replicas / setting.gpus
    parts = {"weights": 4 * share, "gradient": 4 * share, "optimiser": 8 * share}
    return parts | {"reference": 4 * share if setting.reference else 0.0}


def fixed_bytes(shape: Shape, setting: Setting) -> dict[str, float]:
    """What an update takes besides, however long the micro-batch."""
    s, matrix = setting.size, shape.vocab_size * shape.hidden_size
    return {
        "gathered": 2 * s * shape.ends + shape.layer_parameters * (3 * s + 4),
        "head": CHUNK_ROWS * shape.vocab_size * (4 + s) + matrix * (4 + s),
    }


def layer_bytes(shape: Shape, size: int) -> float:
    """Saved for the backward of one layer, per token."""
    h, a, b, i = shape.hidden_size, shape.query, shape.pair, shape.intermediate_size
    norm = 4 * h + 2 * size * h  # in float32 the copy that the norm computes on is its input
    return 2 * norm + size * (3 * a + 2 * b) + 4 * size * i


def token_bytes(shape: Shape, setting: Setting) -> float:
    """Bytes per position of a micro-batch at the peak."""
    h, s, layer = shape.hidden_size, setting.size, layer_bytes(shape, setting.size)
    saved = shape.num_hidden_layers * (s * h if setting.checkpoint_layers else layer)
    again = layer if setting.checkpoint_layers else 0.0
    return saved + again + layer / 3 + 8 * h + 2 * s * h


def fit(name: str, shape: Shape, setting: Setting) -> dict[str, Any]:
    """All parts in GB, and the largest micro-batch in tokens (0: does not fit)."""
    usable = setting.gpu_gb * GB * (1 - LOST_SHARE) - RESERVED
    state, fixed = state_bytes(shape, setting), fixed_bytes(shape, setting)
    free = usable - sum(state.values()) - sum(fixed.values())
    engine = max(0.0, usable - sum(state.values()) + state["gradient"])
    weights = setting.size * shape.parameters / setting.tensor_parallel
    pair = 2 * setting.size * shape.pair * shape.num_hidden_layers / setting.tensor_parallel
    return {
        "model": name,
        **asdict(setting),
        "parameters": shape.parameters,
        "gb": {key: round(value / GB, 2) for key, value in (state | fixed).items()},
        "kb_per_token": round(token_bytes(shape, setting) / 1e3, 1),
        "tokens": max(0, int(free / token_bytes(shape, setting))),
        "engine": round(engine / (setting.gpu_gb * GB), 2),
        "kv_tokens": max(0, int((engine - weights) / pair)),
    }


ROWS = [
    ("Qwen2.5-0.5B", Setting(1, 1, 80)),
    ("Qwen2.5-1.5B", Setting(1, 1, 80)),
    ("Qwen2.5-3B", Setting(2, 1, 80)),
    ("Qwen2.5-7B", Setting(4, 1, 80)),
    ("Qwen2.5-7B", Setting(8, 1, 80)),
    ("Qwen2.5-7B", Setting(8, 1, 96)),
    ("Qwen2.5-7B", Setting(16, 2, 96)),
    ("Qwen2.5-14B", Setting(8, 1, 80, tensor_parallel=2)),
    ("Qwen2.5-32B", Setting(8, 1, 96, tensor_parallel=4)),
    ("Qwen2.5-32B", Setting(8, 1, 96, tensor_parallel=4, cpu_offload=True)),
    ("Qwen2.5-32B", Setting(8, 1, 141, tensor_parallel=4)),
    ("Qwen2.5-32B", Setting(16, 1, 96, tensor_parallel=4)),
    ("Qwen2.5-32B", Setting(32, 2, 96, tensor_parallel=4)),
]


def table(context: int) -> list[dict[str, Any]]:
    """The rows of docs/gpu_node.md, each with and without checkpoint_layers."""
    result = []
    for name, setting in ROWS:
        row = fit(name, SHAPES[name], setting)
        plain = fit(name, SHAPES[name], replace(setting, checkpoint_layers=False))
        result.append(row | {"tokens_plain": plain["tokens"], "fits": row["tokens"] >= context, "context": context})
    return result


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table, a model and its GPUs a line."""
    context = rows[0]["context"]
    lines = [
        "| model | GPUs x GB | replicas | state | fixed | kB a token | tokens | without checkpoint_layers | engine |"
        " KV tokens |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        gb = row["gb"]
        state = sum(gb[key] for key in ("weights", "gradient", "optimiser", "reference"))
        values = [
            row["model"],
            f"{row['gpus']} x {row['gpu_gb']:.0f}",
            str(row["replicas"]),
            "in host memory" if row["cpu_offload"] else f"{state:.1f} GB",
            f"{gb['gathered'] + gb['head']:.1f} GB",
            f"{row['kb_per_token']:.0f}",
            f"{_round(row['tokens'])}" + ("" if row["fits"] else f" (< {context:,})"),
            _round(row["tokens_plain"]),
            f"{row['engine']:.2f}, TP {row['tensor_parallel']}",
            _round(row["kv_tokens"]),
        ]
        lines.append("| " + " | ".join(values) + " |")
    return "\n".join(lines)


def _round(tokens: int) -> str:
    """Down to a multiple of 1,024 (of 1 below that)."""
    return f"{tokens // 1024 * 1024:,}" if tokens >= 1024 else "none"


def read_shape(name: str) -> Shape:
    """A name of SHAPES or a config.json."""
    if name in SHAPES:
        return SHAPES[name]
    values = json.loads(Path(name).read_text(encoding="utf-8"))
    return Shape(**{key: values[key] for key in Shape.__dataclass_fields__})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help=f"a config.json or one of {', '.join(SHAPES)}")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--replicas", type=int, default=1, help="shard.replicas")
    parser.add_argument("--gpu-gb", type=float, default=96.0)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--no-reference", action="store_true", help="loss.kl_coef=0")
    parser.add_argument("--no-checkpoint-layers", action="store_true")
    parser.add_argument("--cpu-offload", action="store_true")
    parser.add_argument("--context", type=int, default=9216, help="longest sequence, which is never split")
    parser.add_argument("--quick", action="store_true", help="as in the other benches; there is nothing to leave out")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    if arguments.model:
        chosen = (arguments.gpus, arguments.replicas, arguments.gpu_gb, not arguments.no_checkpoint_layers)
        setting = Setting(*chosen, not arguments.no_reference, arguments.tensor_parallel, arguments.cpu_offload)
        row = fit(Path(arguments.model).name, read_shape(arguments.model), setting)
        print(json.dumps(row) if arguments.json else "\n".join(f"{key:<18} {value}" for key, value in row.items()))
        return
    rows = table(arguments.context)
    print(json.dumps({"rows": rows}) if arguments.json else markdown(rows))


if __name__ == "__main__":
    main()
