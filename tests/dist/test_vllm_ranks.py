"""Two FSDP2 ranks on gloo, each with a vLLM engine of its own in the same process: sample, train, sync, again.

Must fail if a rank's engine misses an update, takes a shard for the whole, or joins the wrong process group.
"""

import importlib.util

import pytest
import torch
from dist.harness import run_ranks
from support import build_ambiguous_tokenizer, build_tiny_model

from hiexp.distributed import Context
from hiexp.engine import EngineConfig, Sampling
from hiexp.fsdp import ShardConfig, shard
from hiexp.model import full_parameters
from hiexp.vllm_engine import open_engine

pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="needs vLLM's CPU build, which `make test` could not install"
    ),
]
ROUNDS = 3


def build(tied: bool):
    shape = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": tied}
    return build_tiny_model(len(build_ambiguous_tokenizer()), **shape)


def scores(model, prompt: list[int], ids: tuple[int, ...]) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *ids]])).logits[0].float()
    rows = torch.arange(len(prompt) - 1, len(prompt) + len(ids) - 1)
    return logits.log_softmax(-1)[rows, torch.tensor(ids)]


def rounds(ctx: Context, folders: dict[bool, str]) -> dict[bool, list]:
    """tied -> per round: (error against this round's weights, against the last round's, ids of a shared row)."""
    engines, result = [], {}
    for tied, folder in folders.items():
        policy = shard(build(tied), ShardConfig(), ctx)
        weights = full_parameters(policy)
        tokenizer = build_ambiguous_tokenizer()
        engine = open_engine(EngineConfig("vllm"), folder, None, tokenizer, weights, Sampling(), "float32")
        result[tied] = play(ctx, policy, engine, build(tied), build(tied))
        engines.append(engine)
    ctx.barrier("before the engines close")
    for engine in engines:
        engine.close()
    return result


def play(ctx: Context, policy, engine, whole, before) -> list[tuple]:
    rounds, optimizer = [], torch.optim.SGD(policy.parameters(), lr=0.5)
    for version in range(ROUNDS):
        before.load_state_dict(whole.state_dict())
        whole.load_state_dict(dict(full_parameters(policy)), strict=False)  # the name of a tied head is absent
        requests = {"shared": [7, 8, 9]} | {i: [ctx.rank, i, 5] for i in range(3 + 2 * ctx.rank)}  # uneven on purpose
        for key, prompt in requests.items():
            engine.submit(key, prompt, 10, Sampling(seed=version))
        done = {}
        while engine.pending:
            done |= dict(engine.step())
        errors = [
            max(
                float((scores(model, requests[k], c.token_ids) - torch.tensor(c.logprobs)).abs().max())
                for k, c in done.items()
            )
            for model in (whole, before)
        ]
        rounds.append((*errors, done["shared"].token_ids))
        ids = torch.tensor([[*requests[0], *done[0].token_ids]])
        policy.run_body(input_ids=ids, use_cache=False).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.sleep()
        engine.load_weights(full_parameters(policy), version + 1)
    return rounds


def test_B57_every_rank_samples_from_the_weights_of_the_round(tmp_path):
    folders = {tied: str(tmp_path / f"tied_{tied}") for tied in (True, False)}
    for tied, folder in folders.items():
        build(tied).config.save_pretrained(folder)
    ranks = run_ranks(rounds, 2, folders, timeout_s=100, limit_s=200)
    for tied in folders:
        first, second = (rank[tied] for rank in ranks)
        for version in range(ROUNDS):
            for error, error_before, _ in (first[version], second[version]):
                assert error < 2e-4
                assert version == 0 or error_before > 20 * error
            assert first[version][2] == second[version][2]
        assert len({ids for _, _, ids in first}) == ROUNDS
