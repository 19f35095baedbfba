"""Loading, and log-probs against the whole Hugging Face model one row at a time.

Must fail if padding is attended to, if the head sees other positions, or if missing weights are accepted.
"""

import json
import socket
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PhiConfig, PhiForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from hiexp.batching import Batch, Layout, Row, micro_batches
from hiexp.config import ConfigError
from hiexp.distributed import Context
from hiexp.fsdp import ShardConfig, load_sharded
from hiexp.model import ModelConfig, full_parameters, kept_logprobs, load_causal_lm, load_tokenizer


def tiny(tied: bool = True, **changes) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = Qwen2Config(**sizes, **heads, tie_word_embeddings=tied, initializer_range=0.3, **changes)
    return Qwen2ForCausalLM(config).eval()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny().save_pretrained(tmp_path / "model")
    inner = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="?").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def rows(*lengths: int) -> list[Row]:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, 40, (length,), generator=generator).tolist() for length in lengths]
    return [Row(f"row{i}", x, [p for p in range(2, len(x)) if p % 3], advantage=i) for i, x in enumerate(ids)]


def pack(data: list[Row]) -> Batch:
    (batch,) = micro_batches(data, Layout(1000))
    return batch


def alone(model: Qwen2ForCausalLM, row: Row, temperature: float) -> tuple[list[float], list[float]]:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([row.token_ids]), use_cache=False).logits[0]
    distribution = torch.distributions.Categorical(logits=logits.double() / temperature)
    scores, entropies = distribution.logits, distribution.entropy()
    wanted = [(position - 1, row.token_ids[position]) for position in row.trained]
    return [float(scores[p, token]) for p, token in wanted], [float(entropies[p]) for p, _ in wanted]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_B49_B50_log_probs_are_those_of_each_row_alone(attention, tied, temperature):
    model = tiny(tied)
    model.set_attn_implementation(attention)
    data = rows(5, 19, 30, 12)
    batch = pack(data)
    logprobs, entropy = kept_logprobs(model, batch, temperature)
    for index, row in enumerate(data):
        mine = batch.advantages == index
        scores, entropies = alone(model, row, temperature)
        assert logprobs[mine].tolist() == pytest.approx(scores, abs=1e-4)
        assert entropy[mine].tolist() == pytest.approx(entropies, abs=1e-4)
    assert not logprobs.requires_grad and not entropy.requires_grad


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_B50_what_the_padding_holds_does_not_matter(attention):
    model = tiny()
    model.set_attn_implementation(attention)
    batch = pack(rows(6, 20))
    other = batch.input_ids.clone()
    other[1, 5:] = 39
    with torch.no_grad():
        before = kept_logprobs(model, batch, 1.0)[0]
        after = kept_logprobs(model, Batch(**(batch.tensors() | {"input_ids": other})), 1.0)[0]
    assert torch.equal(before, after)


def test_B54_the_temperature_scales_logits():
    class Two(torch.nn.Module):
        base_model = staticmethod(
            lambda input_ids, use_cache: type("Output", (), {"last_hidden_state": torch.ones(1, 1, 1)})
        )

        def get_output_embeddings(self):
            return type("Head", (), {"weight": torch.tensor([[2.0], [0.0]])})

    assert kept_logprobs(Two(), pack([Row("q", [0, 0], [1])]), 0.5)[0].item() == pytest.approx(-0.018150, abs=1e-6)


def test_a_saved_model_loads_with_its_weights_dtype_and_attention(folder):
    model = load_causal_lm(ModelConfig(str(folder), attention="eager"))
    for (name, got), wanted in zip(model.named_parameters(), tiny().parameters(), strict=True):
        assert torch.equal(got, wanted), name
    assert not model.training and model.config._attn_implementation == "eager"
    half = load_causal_lm(ModelConfig(str(folder), dtype="bfloat16"))
    assert half.dtype == torch.bfloat16
    batch = pack(rows(9))
    assert kept_logprobs(half, batch, 1.0)[0].dtype == torch.float32
    assert load_tokenizer(str(folder)).convert_tokens_to_ids(["b", "a"]) == [1, 0]


def one_line(error: pytest.ExceptionInfo) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("load", [lambda path: load_causal_lm(ModelConfig(path)), load_tokenizer])
def test_a_wrong_folder_is_one_line_and_never_a_download(load, tmp_path, monkeypatch):
    def no_network(*_):
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    for path in ("Qwen/Qwen2.5-7B-Instruct", str(tmp_path / "nowhere")):
        with pytest.raises(ConfigError, match="does not exist") as error:
            load(path)
        assert path in one_line(error)
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load(str(tmp_path))
    file = tmp_path / "weights"
    file.touch()
    with pytest.raises(ConfigError, match="cannot be read: Not a directory"):
        load(str(file))
    monkeypatch.setattr(Path, "iterdir", lambda self: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    with pytest.raises(ConfigError, match="cannot be read: Permission denied"):
        load(str(tmp_path))


def test_broken_folders_are_one_line(folder):
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    name = next(key for key in tensors if "q_proj.weight" in key)
    save_file({key: value for key, value in tensors.items() if key != name}, weights, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks 1 weight.*q_proj"):
        load_causal_lm(ModelConfig(str(folder)))
    weights.write_bytes(weights.read_bytes()[:500])
    with pytest.raises(ConfigError, match="cannot load a language model") as error:
        load_causal_lm(ModelConfig(str(folder)))
    assert str(folder) in one_line(error)
    weights.unlink()
    with pytest.raises(ConfigError, match="cannot load a language model") as error:
        load_causal_lm(ModelConfig(str(folder)))
    one_line(error)
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError) as error:
        load_causal_lm(ModelConfig(str(folder)))
    one_line(error)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="cannot load a tokenizer") as error:
        load_tokenizer(str(folder))
    one_line(error)


def test_a_model_that_bends_its_logits_after_the_head_is_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"final_logit_softcapping": 30.0}))
    with pytest.raises(ConfigError, match="final_logit_softcapping"):
        load_causal_lm(ModelConfig(str(folder)))


def test_unknown_names_are_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"unknown dtype 'float23'; did you mean 'float32'\?"):
        ModelConfig("x", dtype="float23")
    with pytest.raises(ConfigError, match="unknown attention 'sdp'"):
        ModelConfig("x", attention="sdp")


@pytest.mark.parametrize("tied", [True, False])
def test_B57_published_parameters_make_another_copy_equal(tied):
    source, target = tiny(tied), tiny(tied)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter += 0.1
    published = dict(full_parameters(source))
    assert ("lm_head.weight" in published) is not tied
    assert not any(tensor.requires_grad for tensor in published.values())
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            parameter.copy_(published[name])
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(source(input_ids=ids).logits, target(input_ids=ids).logits)


def test_a_generic_tokenizer_beside_a_qwen2_model_is_not_replaced_by_qwen2s_own(tmp_path):
    """transformers 5 maps the model type to a tokenizer class that brings its own splitting rules."""
    core = Tokenizer(models.WordLevel({"<unk>": 0, "alpha": 1, "beta": 2}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>").save_pretrained(tmp_path)
    Qwen2Config(vocab_size=3).save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).encode("beta alpha gamma") == [2, 1, 0]


def test_fault_46_a_model_that_brings_code_is_refused_and_the_code_not_run(folder, tmp_path):
    canary, config = tmp_path / "canary", json.loads((folder / "config.json").read_text())
    (folder / "evil.py").write_text(f"import pathlib\npathlib.Path({str(canary)!r}).touch()\n")
    names = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M", "AutoTokenizer": ["evil.T", None]}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "evil", "auto_map": names}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "T", "auto_map": names}))
    for load in (lambda: load_causal_lm(ModelConfig(str(folder))), lambda: load_tokenizer(str(folder))):
        with pytest.raises(ConfigError, match=str(folder)):
            load()
    assert not canary.exists()


def test_every_attention_that_this_machine_has_loads_by_its_name(folder):
    (batch,) = micro_batches(rows(9, 6), Layout(1000, packed=True))
    scores = {}
    for name in ("eager", "sdpa", "varlen"):
        for model in (
            load_causal_lm(ModelConfig(str(folder), attention=name)),
            load_sharded(ModelConfig(str(folder), attention=name), ShardConfig(), Context()),
        ):
            scores[name] = kept_logprobs(model, batch, 1.0)[0]
            torch.testing.assert_close(scores[name], scores["eager"], atol=1e-5, rtol=0)


@pytest.mark.parametrize("load", [load_causal_lm, lambda cfg: load_sharded(cfg, ShardConfig("bfloat16"), Context())])
def test_a_head_with_a_bias_is_refused(tmp_path, load):
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    PhiForCausalLM(PhiConfig(**sizes, num_attention_heads=4)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="bias of its head"):
        load(ModelConfig(str(tmp_path)))
