"""The lab's policy: a word-level tokenizer built from the world, a tiny Qwen2 model, and its warm start."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from hiexp.lab_teacher import Row, practice_families, practice_rows
from hiexp.lab_world import ATTRIBUTES, YEARS, name_pool, num_names
from hiexp.rollout import NOTICES
from hiexp.tracking import progress
from hiexp.trainer import OptimConfig, sft_step
from hiexp.trajectory import Source

PIECE = r'"(?:title|description)"|</?[a-z_]+>|[A-Za-z0-9]+|[^\sA-Za-z0-9]'
"""a letter of another script is a word"""
ACCENTED = r"\u00c0-\u024f"
TAGS = ("strategy", "think", "search", "information", "experience", "notice", "answer", "reflect", "abstract")
GLUE = 'question gold right wrong level plan is one two earlier someone year 2 3 "title" "description"'


def build_tokenizer(languages: Sequence[str] = ("en",)) -> PreTrainedTokenizerFast:
    """One token a word; text and ids correspond one to one, up to the spaces between words."""
    families = practice_families(tuple(languages))
    words = set(GLUE.split()) | set(" ".join(NOTICES).split()) | set(YEARS) | set(name_pool(num_names()))
    words |= {w for table in ATTRIBUTES.values() for name in table for w in name.split()}
    words |= {w for f in families for wording in f.wordings for w in wording.split() if not w.startswith("{")}
    marks = [f"<{slash}{tag}>" for tag in TAGS for slash in ("", "/")] + list('{}":,.;?|-')
    vocabulary = {w: i for i, w in enumerate(["<pad>", "<unk>", "<end>", *marks, *sorted(words - set(marks))])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    # English alone keeps the pattern, and with it every byte, of the tokenizers that there are
    piece = PIECE.replace("A-Za-z", "A-Za-z" + ACCENTED) if families != practice_families(("en",)) else PIECE
    core.pre_tokenizer = pre_tokenizers.Split(Regex(piece), "removed", invert=True)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<end>",
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int, width: int = 128, layers: int = 3) -> Qwen2ForCausalLM:
    """Heads of 32, tied embeddings; 3 layers of 128 have about 0.6M parameters."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config)
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=0.08)  # 0.02 is for widths in the thousands
    return model


def encode_row(tokenizer: Any, row: Row) -> tuple[list[int], list[bool]]:
    """Token ids of a trace and, for each, whether the policy is to learn to write it."""
    ids: list[int] = []
    mask: list[bool] = []
    for source, text in row:
        piece = tokenizer.encode(text, add_special_tokens=False)
        ids += piece
        mask += [source is Source.POLICY] * len(piece)
    return ids, mask


@dataclass(frozen=True)
class WarmStartConfig:
    steps: int = 800
    """optimiser steps on practice traces"""
    rows_per_step: int = 32
    """traces in one step"""
    matrix_lr: float = 0.01
    """peak learning rate of Muon, which trains the matrices of the body"""
    lr: float = 2e-3
    """peak learning rate of AdamW, which trains embeddings, norms and biases"""


def warm_start(
    model: Qwen2ForCausalLM, tokenizer: Any, cfg: WarmStartConfig, seed: int, languages: Sequence[str] = ("en",)
) -> dict[str, float]:
    """Teach the policy the protocol from practice traces (lab_teacher.py); returns the last step's metrics."""
    families = practice_families(tuple(languages))
    rng, optimizers = random.Random(seed), _optimizers(model, cfg)
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    optim_cfg, metrics = OptimConfig(lr=cfg.lr, tokens_per_micro_batch=1500), {}
    for step in progress(range(cfg.steps), label="warm start", unit="step"):
        rise, fall = (step + 1) / 20, (cfg.steps - step) / (0.4 * cfg.steps)
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * min(1.0, rise, fall)
        rows = [encode_row(tokenizer, row) for row in practice_rows(rng, cfg.rows_per_step, families)]
        metrics = sft_step(model, optimizers, rows, optim_cfg)
    return metrics


def _optimizers(model: Qwen2ForCausalLM, cfg: WarmStartConfig) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the body, AdamW for embeddings, norms and biases."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in named if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=cfg.matrix_lr, weight_decay=0.0, momentum=0.95),
        torch.optim.AdamW(others, lr=cfg.lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
