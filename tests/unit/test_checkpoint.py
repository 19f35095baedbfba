"""A model folder is complete and new, or complete and old. Must fail if files are written into the target directly."""

import resource
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from hiexp.checkpoint import save_policy
from hiexp.config import ConfigError
from hiexp.model import ModelConfig, load_causal_lm, load_tokenizer


def tiny(seed: int) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    return Qwen2ForCausalLM(
        Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
    )


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="?")


def assert_holds(folder: Path, seed: int) -> None:
    loaded = load_causal_lm(ModelConfig(str(folder)))
    for (name, got), wanted in zip(loaded.named_parameters(), tiny(seed).parameters(), strict=True):
        assert torch.equal(got, wanted), name
    assert load_tokenizer(str(folder)).convert_tokens_to_ids("b") == 1
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]  # no .tmp, no .old


def test_saving_creates_and_replaces_a_model_that_loads_again(tokenizer, tmp_path):
    folder = tmp_path / "runs" / "model"
    save_policy(tiny(0), tokenizer, folder)
    assert_holds(folder, 0)
    (folder.parent / "model.tmp").mkdir()  # what a killed process may have left
    (folder.parent / "model.tmp" / "half").touch()
    save_policy(tiny(1), tokenizer, str(folder))
    assert_holds(folder, 1)
    assert not (folder / "half").exists()


def test_a_full_disk_is_one_line_and_leaves_the_old_model(tokenizer, tmp_path):
    folder = tmp_path / "model"
    save_policy(tiny(0), tokenizer, folder)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))  # the system refuses the weights half way
    try:
        with pytest.raises(ConfigError, match=r"cannot save the model to .*model: .*free space") as error:
            save_policy(tiny(1), tokenizer, folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(error.value)
    assert_holds(folder, 0)


def test_a_failure_at_any_later_point_leaves_the_old_model(tokenizer, tmp_path, monkeypatch):
    folder = tmp_path / "model"
    save_policy(tiny(0), tokenizer, folder)

    def no_space(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", no_space)
    with pytest.raises(ConfigError, match="No space left on device"):
        save_policy(tiny(1), tokenizer, folder)
    assert_holds(folder, 0)
    monkeypatch.undo()
    rename = Path.replace

    def fail_on_the_new_one(self, target):
        return no_space() if self.name == "model.tmp" else rename(self, target)

    monkeypatch.setattr(Path, "replace", fail_on_the_new_one)
    with pytest.raises(ConfigError, match="No space left on device"):
        save_policy(tiny(1), tokenizer, folder)
    assert_holds(folder, 0)


def test_an_unwritable_place_is_one_line(tokenizer, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot save the model to .*below") as error:
        save_policy(tiny(0), tokenizer, tmp_path / "file" / "below")
    assert "\n" not in str(error.value)


def test_a_folder_that_holds_something_else_is_never_replaced(tokenizer, tmp_path):
    folder = tmp_path / "papers"
    folder.mkdir()
    (folder / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="is not a model folder"):
        save_policy(tiny(0), tokenizer, folder)
    assert (folder / "thesis.tex").read_text() == "years of work"
    with pytest.raises(ConfigError, match="is not a model folder"):
        save_policy(tiny(0), tokenizer, folder / "thesis.tex")
    (folder / "thesis.tex").unlink()
    save_policy(tiny(0), tokenizer, folder)
    assert_holds(folder, 0)
