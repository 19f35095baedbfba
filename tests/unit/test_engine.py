"""TorchEngine against `model.generate`, cache-free forwards and hand values. Broken on purpose once: suffix not masked,
positions off by one, cache kept over a weight update, log-probs without the temperature, eos not in the ids."""

import random

import numpy as np
import pytest
import torch
from support import build_ambiguous_tokenizer, build_byte_tokenizer, build_tiny_model

from hiexp.config import ConfigError
from hiexp.engine import Endings, EngineConfig, Row, Sampling, TorchEngine, decode
from hiexp.sampling import derive_seed, sample, uniforms

GREEDY = Sampling(temperature=0)


def generate(model, ids, count, eos=None):
    """HF's own greedy continuation."""
    attention = torch.ones(1, len(ids), dtype=torch.long)
    output = model.generate(
        torch.tensor([ids]),
        attention_mask=attention,
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=0,
    )
    return output[0, len(ids) :].tolist()


def rescored(model, prompt, ids, temperature):
    """Log-probs of ids after prompt, from one forward without any cache."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + list(ids)])).logits[0].float()
    rows = torch.arange(len(prompt) - 1, len(prompt) + len(ids) - 1)
    return (logits / temperature).log_softmax(-1)[rows, torch.tensor(ids)]


def run(engine, requests):
    for key, (ids, count, sampling) in requests.items():
        engine.submit(key, ids, count, sampling)
    return dict(engine.step())


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("heads", [2, 4])
def test_many_turns_equal_generate_and_a_forward_without_cache(attention, heads):
    """Rows of different lengths, rows that sit a turn out, equal prompts, prompts that do not extend the cache."""
    model, draw = build_tiny_model(258, attention, num_key_value_heads=heads), random.Random(heads)
    engine = TorchEngine(model, build_byte_tokenizer())
    rows = {i: [draw.randrange(256) for _ in range(3 + draw.randrange(90))] for i in range(9)}
    rows[3], rows[5] = list(rows[2]), list(rows[2])
    for turn in range(4):
        requests = {
            k: (list(ids), 1 + draw.randrange(25)) for k, ids in rows.items() if draw.random() < 0.8 or turn == 0
        }
        sampling = {k: Sampling(temperature=0 if k % 2 else 0.7, top_p=0.9, seed=turn) for k in requests}
        done = run(engine, {k: (*request, sampling[k]) for k, request in requests.items()})
        assert set(done) == set(requests)
        for key, (prompt, count) in requests.items():
            ids = done[key].token_ids
            wanted = rescored(model, prompt, ids, 1.0 if key % 2 else 0.7)
            torch.testing.assert_close(torch.tensor(done[key].logprobs), wanted, atol=1e-4, rtol=0)
            if key in (1, 3):
                assert list(ids) == generate(model, prompt, count, eos=257)[: len(ids)]
                assert len(ids) == count or ids[-1] == 257
            rows[key] = prompt + list(ids) + [draw.randrange(256) for _ in range(draw.randrange(30))]
        rows[4][len(rows[4]) // 2] ^= 1  # not an extension of what is cached
        engine.forget([6])


def test_small_prefill_chunks_change_nothing(monkeypatch):
    draw = random.Random(0)
    prompts = {i: ([draw.randrange(256) for _ in range(5 + 7 * i)], 6, GREEDY) for i in range(7)}
    whole = run(TorchEngine(build_tiny_model(258), build_byte_tokenizer()), prompts)
    monkeypatch.setattr("hiexp.engine.PREFILL_TOKENS", 20)
    assert {
        k: c.token_ids for k, c in run(TorchEngine(build_tiny_model(258), build_byte_tokenizer()), prompts).items()
    } == {k: c.token_ids for k, c in whole.items()}


def test_only_new_tokens_are_fed(monkeypatch):
    engine = TorchEngine(build_tiny_model(258), build_byte_tokenizer())
    fed = []
    forward = engine._forward
    monkeypatch.setattr(engine, "_forward", lambda ids, *rest: (fed.append(tuple(ids.shape)), forward(ids, *rest))[1])
    first = run(engine, {"a": ([1, 2, 3, 4, 5], 4, GREEDY), "b": ([1, 2, 3, 4, 5], 4, GREEDY)})
    assert fed == [(1, 5), (2, 1), (2, 1), (2, 1)]  # equal prompts once, then both rows
    fed.clear()
    run(engine, {"a": ([1, 2, 3, 4, 5, *first["a"].token_ids, 9, 9], 1, GREEDY)})
    assert fed == [(1, 3)]  # the last id of the first turn and the two new ones


def test_eos_ends_a_row_and_is_among_its_ids():
    model, prompt = build_tiny_model(258), [5, 6, 7]
    ids = generate(model, prompt, 8)
    model.generation_config.eos_token_id = [ids[3]]
    done = run(TorchEngine(model, build_byte_tokenizer()), {0: (prompt, 8, GREEDY)})[0]
    first = ids.index(ids[3])
    assert (list(done.token_ids), done.finish) == (ids[: first + 1], "eos")


def test_B52_stop_ends_with_the_token_that_completes_it():
    """The stop string spans tokens, and the completing token may hold more text: it is kept whole."""
    tokenizer = build_ambiguous_tokenizer()
    model = build_tiny_model(len(tokenizer))
    prompt = [65, 66]
    free = generate(model, prompt, 30)
    text = decode(tokenizer, free)
    for start in range(3, 8):
        stop = text[start : start + 3]
        count = next(n for n in range(1, 31) if stop in decode(tokenizer, free[:n]))
        done = run(
            TorchEngine(build_tiny_model(len(tokenizer)), tokenizer),
            {0: (prompt, 30, Sampling(0, stop=(stop, "\x00\x00")))},
        )[0]
        assert (list(done.token_ids), done.finish) == (free[:count], "stop")


@pytest.mark.parametrize(
    ("text", "stop", "finish"),
    [
        ("x\u00e9", "\u00e9", "stop"),  # two bytes, neither of which is the character
        ("a </search>", "</search>", "stop"),
        ("a </search", "</search>", ""),
        ("a >", "</search>", ""),
        ("a </search> b", "</answer>", ""),
    ],
)
def test_stop_strings_of_several_tokens(byte_tokenizer, text, stop, finish):
    endings = Endings(byte_tokenizer, None)
    row = Row("a", [1], 99, Sampling(stop=("never", stop)))
    states = []
    for token in byte_tokenizer.encode(text):
        row.ids.append(token)
        states.append(endings.finish(row))
    assert states[-1] == finish and not any(states[:-1])


def test_phantom_id_is_reported_not_replaced():
    """Head of 300, tokenizer of 258: id 299 has no token."""
    model = build_tiny_model(300, tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight[299] = (
            model.model.norm.weight * 0 + 50 * model.model(torch.tensor([[3]])).last_hidden_state[0, 0]
        )
    done = run(TorchEngine(model, build_byte_tokenizer()), {0: ([3], 5, GREEDY), 1: ([9, 9, 9], 2, GREEDY)})
    assert (done[0].token_ids, done[0].finish) == ((299,), "broken")
    assert len(done[0].logprobs) == 1


def test_B54_temperature_scales_logits_and_top_p_does_not_touch_logprobs():
    logits = torch.tensor([[2.0, 0.0]])
    for top_p in (1.0, 0.5):
        ids, logprobs = sample(
            logits, torch.tensor([0.5]), torch.tensor([top_p]), torch.tensor([0.1], dtype=torch.float64)
        )
        assert ids.item() == 0 and logprobs.item() == pytest.approx(-0.018150, abs=1e-6)
    _, greedy = sample(logits, torch.tensor([0.0]), torch.tensor([1.0]), torch.tensor([0.9], dtype=torch.float64))
    assert greedy.item() == pytest.approx(-0.126928, abs=1e-6)


@pytest.mark.parametrize("vocabulary", [5, 400])
@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.3])
def test_draws_follow_the_nucleus(vocabulary, top_p):
    """An even grid of uniforms must reproduce the renormalised nucleus, also where 64 tokens do not hold top_p."""
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    probs = logits.softmax(-1).numpy().astype(float)
    order = np.argsort(-probs)
    kept = order[: int((np.cumsum(probs[order]) < top_p - 1e-9).sum()) + 1]
    wanted = np.zeros(vocabulary)
    wanted[kept] = probs[kept] / probs[kept].sum()
    grid = 20_000
    uniform = (torch.arange(grid, dtype=torch.float64) + 0.5) / grid
    ids, _ = sample(logits.expand(grid, -1), torch.ones(grid), torch.full((grid,), top_p), uniform)
    drawn = np.bincount(ids.numpy(), minlength=vocabulary) / grid
    assert set(np.flatnonzero(drawn)) <= set(kept)
    np.testing.assert_allclose(drawn, wanted, atol=2 / grid)


def test_sample_does_not_depend_on_the_batch():
    prompts = {i: ([i + 1, 2, 3 + i], 12, Sampling(1.0, 0.9, seed=i)) for i in range(6)}
    together = run(TorchEngine(build_tiny_model(258), build_byte_tokenizer()), prompts)
    for key, request in prompts.items():
        alone = run(TorchEngine(build_tiny_model(258), build_byte_tokenizer()), {key: request})
        assert alone[key].token_ids == together[key].token_ids
    other = {0: ([1, 2, 3], 12, Sampling(1.0, 0.9, seed=99))}
    assert run(TorchEngine(build_tiny_model(258), build_byte_tokenizer()), other)[0].token_ids != together[0].token_ids


def test_uniforms_are_splitmix64():
    """Against a pure-Python splitmix64 whose first output for seed 1234567 is the published 6457827717110365317."""

    def mix(z):
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    golden = 0x9E3779B97F4A7C15
    assert mix((1234567 + golden) % 2**64) == 6457827717110365317
    for seed, count in [(0, 0), (1, 5), (2**63 + 11, 3)]:
        wanted = mix((mix(seed) + (count + 1) * golden) % 2**64) >> 11
        assert uniforms(np.array([seed], np.uint64), np.array([count], np.uint64))[0] * 2**53 == wanted
    state = 0
    for number in (3, 0, 7):
        state = mix((state + number + golden) % 2**64)
    assert derive_seed(3, 0, 7) == state
    assert len({derive_seed(a, b, c) for a in range(9) for b in range(9) for c in range(9)}) == 729
    many = uniforms(np.arange(20_000, dtype=np.uint64), np.zeros(20_000, np.uint64))
    assert abs(many.mean() - 0.5) < 0.01 and many.min() >= 0 and many.max() < 1


@pytest.mark.parametrize("tied", [True, False])
def test_B56_weights_replace_everything_that_was_cached(tied):
    prompt, tokenizer = [7, 8, 9, 10], build_byte_tokenizer()
    engine = TorchEngine(build_tiny_model(258, tie_word_embeddings=tied), tokenizer)
    before = run(engine, {0: (prompt, 10, GREEDY)})[0]
    other = build_tiny_model(258, seed=5, tie_word_embeddings=tied)
    engine.load_weights(other.named_parameters(), version=4)
    assert engine.version == 4
    for follow in (prompt, prompt + list(before.token_ids) + [3]):
        after = run(engine, {0: (follow, 10, GREEDY)})[0]
        fresh = run(
            TorchEngine(build_tiny_model(258, seed=5, tie_word_embeddings=tied), tokenizer), {0: (follow, 10, GREEDY)}
        )[0]
        assert after.token_ids == fresh.token_ids
        assert after.logprobs == pytest.approx(fresh.logprobs, abs=1e-4)
    assert after.token_ids != before.token_ids


def test_weights_that_do_not_fit_are_refused(tiny_model, byte_tokenizer):
    engine = TorchEngine(tiny_model, byte_tokenizer)
    weights = {name: tensor.clone() for name, tensor in tiny_model.named_parameters()}
    with pytest.raises(ValueError, match=r"unheard\.of"):
        engine.load_weights([("unheard.of", torch.ones(1))], 1)
    with pytest.raises(ValueError, match="does not fit"):
        engine.load_weights([("model.norm.weight", torch.ones(3))], 1)
    del weights["model.norm.weight"]
    with pytest.raises(ValueError, match=r"not given: model\.norm\.weight"):
        engine.load_weights(weights.items(), 1)
    assert engine.version == 0


def test_requests_that_cannot_be_served(tiny_model, byte_tokenizer):
    engine = TorchEngine(tiny_model, byte_tokenizer)
    assert engine.step() == []
    for ids, count, message in [([], 4, "prompt tokens"), ([1], 0, "max_tokens=0"), ([1] * 500, 13, "window of 512")]:
        with pytest.raises(ValueError, match=message):
            engine.submit("a", ids, count, GREEDY)
    engine.submit("a", [1] * 500, 12, GREEDY)
    with pytest.raises(ValueError, match="pending already"):
        engine.submit("a", [1], 1, GREEDY)
    assert len(dict(engine.step())["a"].token_ids) == 12  # an exact fit


def test_non_finite_logits_stop_the_run(tiny_model, byte_tokenizer):
    engine = TorchEngine(tiny_model, byte_tokenizer)
    with torch.no_grad():
        tiny_model.model.norm.weight.fill_(float("nan"))
    engine.submit(0, [1, 2], 3, Sampling())
    with pytest.raises(FloatingPointError, match="version 0"):
        engine.step()


def test_forgotten_slots_are_used_again(tiny_model, byte_tokenizer):
    engine = TorchEngine(tiny_model, byte_tokenizer)
    for batch in range(3):
        run(engine, {(batch, i): ([1, 2, i], 3, GREEDY) for i in range(4)})
        engine.forget([(batch, i) for i in range(4)])
        engine.forget(["never seen"])
    assert engine._cache.slots == 4 and not engine._cached


def test_models_that_are_not_understood(byte_tokenizer):
    window = build_tiny_model(258, use_sliding_window=True, sliding_window=8, max_window_layers=0)
    with pytest.raises(ConfigError, match="full attention"):
        TorchEngine(window, byte_tokenizer)
    flex = build_tiny_model(258, "flex_attention")
    with pytest.raises(ConfigError, match="eager or sdpa"):
        TorchEngine(flex, byte_tokenizer)
    for changes in ({"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.5}):
        with pytest.raises(ConfigError):
            Sampling(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "vllmm"}, "must be torch or vllm"),
        ({"kind": "vllm", "tensor_parallel": 0}, "tensor_parallel=0 must be at least 1"),
        ({"tensor_parallel": 2}, "needs kind=vllm"),
        ({"gpu_memory_fraction": 1.0}, r"gpu_memory_fraction=1\.0 must be between 0 and 1"),
    ],
)
def test_engine_settings_that_cannot_work(changes, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**changes)


def test_a_forgotten_row_is_not_sampled(tiny_model, byte_tokenizer):
    engine = TorchEngine(tiny_model, byte_tokenizer)
    for key in "ab":
        engine.submit(key, [1, 2], 3, GREEDY)
    engine.forget(["a"])
    assert engine.pending == 1 and list(dict(engine.step())) == ["b"] and engine.pending == 0
