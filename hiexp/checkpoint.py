"""Models on disk: a folder is either the complete old one or the complete new one, never half of each."""

import shutil
from pathlib import Path

from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as hf_logging

from hiexp.config import ConfigError


def save_policy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: str | Path) -> Path:
    """Write model and tokenizer in Hugging Face layout, replacing `folder` in one rename at the very end.

    ConfigError if the place cannot be written or the disk is full; what was in `folder` is then untouched. A process
    killed between the last two renames leaves the former model as `<folder>.old`.
    """
    target = Path(folder)
    fresh, old = target.with_name(f"{target.name}.tmp"), target.with_name(f"{target.name}.old")
    if target.exists() and not (target / "config.json").is_file() and not _is_empty_folder(target):
        raise ConfigError(f"{target} exists and is not a model folder; choose another folder, it would be replaced")
    try:
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        hf_logging.disable_progress_bar()
        model.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
        _swap(fresh, target, old)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(fresh, ignore_errors=True)
        reason = " ".join(str(error).split())
        advice = "free space or choose another folder"
        raise ConfigError(f"cannot save the model to {target}: {reason}; {advice}") from error
    return target


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _swap(fresh: Path, target: Path, old: Path) -> None:
    if not target.exists():
        fresh.replace(target)
        return
    shutil.rmtree(old, ignore_errors=True)
    target.replace(old)  # a folder that is not empty cannot be replaced in one call
    try:
        fresh.replace(target)
    except OSError:
        old.replace(target)
        raise
    shutil.rmtree(old, ignore_errors=True)
