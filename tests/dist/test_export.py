"""The model that training leaves: complete, loadable by transformers and by the engine, whatever the sharding.

Must fail if rows of another rank are lost, if a tied head comes apart, if an untied one is left out, or if config.json
names a dtype or class that is not the weights'.
"""

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from dist.harness import run_ranks
from support import build_byte_tokenizer, build_tiny_model

from hiexp.checkpoint import save_policy
from hiexp.config import ConfigError
from hiexp.distributed import Context
from hiexp.engine import TorchEngine
from hiexp.fsdp import ShardConfig, shard
from hiexp.model import ModelConfig, load_causal_lm, load_tokenizer
from hiexp.sampling import Sampling

pytestmark = pytest.mark.dist


def export(ctx: Context, folder: Path, tied: bool, dtype: torch.dtype | None) -> None:
    model = shard(build_tiny_model(tie_word_embeddings=tied), ShardConfig(), ctx)
    save_policy(model, build_byte_tokenizer(), folder, ctx, dtype)


@pytest.mark.parametrize(("tied", "dtype"), [(True, None), (False, None), (True, torch.bfloat16)])
def test_a_sharded_policy_is_exported_whole(tmp_path, tied, dtype):
    run_ranks(export, 2, tmp_path / "policy", tied, dtype)
    wanted = build_tiny_model(tie_word_embeddings=tied).to(dtype or torch.float32)
    loaded = load_causal_lm(ModelConfig(str(tmp_path / "policy"), str(dtype or torch.float32).removeprefix("torch.")))
    for (name, got), parameter in zip(loaded.named_parameters(), wanted.parameters(), strict=True):
        assert torch.equal(got, parameter), name
    is_shared = loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert is_shared == tied
    config = json.loads((tmp_path / "policy/config.json").read_text())
    assert config["architectures"] == ["Qwen2ForCausalLM"] and config["tie_word_embeddings"] == tied
    assert config["dtype"] == str(dtype or torch.float32).removeprefix("torch.")
    tokenizer = load_tokenizer(str(tmp_path / "policy"))
    assert tokenizer.encode("ab") == build_byte_tokenizer().encode("ab")
    engine = TorchEngine(loaded, tokenizer)
    engine.submit("row", tokenizer.encode("ab"), 4, Sampling(temperature=0.0))
    ids = engine.step()[0][1].token_ids
    if dtype:
        return  # in bfloat16 the next token is a toss-up
    whole = wanted.generate(torch.tensor([tokenizer.encode("ab")]), max_new_tokens=4, do_sample=False)
    assert list(ids) == whole[0, 2 : 2 + len(ids)].tolist()


def export_to_full_disk(ctx: Context, folder: Path) -> str:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if ctx.is_main:
        os.fsync = full
    try:
        export(ctx, folder, True, None)
    except ConfigError as error:
        return str(error)
    return "saved"


def test_a_full_disk_is_told_on_all_ranks(tmp_path):
    said = run_ranks(export_to_full_disk, 2, tmp_path / "policy")
    assert said[0] == said[1] and "No space left on device" in said[0] and not list(tmp_path.iterdir())
