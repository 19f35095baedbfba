"""Fault 45: a canary must appear in nothing that is written or printed; ordinary settings must survive."""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from hiexp.config import dump, load
from hiexp.redact import HIDDEN, redact, redact_values

CANARY = "CANARY9x7Qz4"
ROOT = Path(__file__).resolve().parents[2]

SECRETS = [
    "api_key={}",
    "judge.api_key={}",
    "train.py llm.api-key='{} and more' out=runs/a",
    '{{"api_key": "{}", "x": 1}}',
    '{{\\"api_key\\": \\"{}\\"}}',
    "OPENAI_API_KEY: {}",
    "--hf-token {} --steps 3",
    "--password={}",
    "password: {}",
    "https://user:{}@host/index",
    "http://{}@host:8000/v1",
    "see https://me:pa@{}@host/x",
    "GET http://host/search?q=a&access_token={}&k=3",
    "Authorization: Bearer {}",
    "headers={{'authorization': 'Basic {}'}}",
    "401 for Bearer {}abcdefgh",
    "key sk-proj-{}abcdefghi was refused",
    "hf_{}abcdefghijkl",
    "client_secret = {}",
    "private_key: {}",
]


@pytest.mark.parametrize("text", SECRETS)
def test_fault_45_a_secret_is_hidden_in_every_place(text):
    hidden = redact(text.format(CANARY))
    assert CANARY not in hidden and HIDDEN in hidden
    assert redact(hidden) == hidden
    if "steps 3" in text or "out=" in text:
        assert hidden.endswith(("--steps 3", "out=runs/a")), "what stands behind it is kept"


ORDINARY = [
    "train.py configs/lab.yaml rollout.max_turn_tokens=512 hek.case_key=question_query out=runs/a",
    "eos_token: '<|im_end|>', pad_token: <|endoftext|>, tokens: 12345678, tokenizer: path/to/tokenizer",
    "loss per token: 0.25",
    "mail someone@example.org about http://host/path?q=user@example",
    "no such file: data/secrets.jsonl; the key case_top_k is unknown",
    "KeyError: 'answer'",
    "password='' api_key=\"\" secret=",
    "The password was never found. A bearer of news, a secret: ",
]


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_text_is_left_alone(text):
    assert redact(text) == text


def test_fault_45_values_of_the_environment_are_hidden_wherever_they_stand(monkeypatch):
    monkeypatch.setenv("SEARCH_SERVICE_KEY", CANARY)
    monkeypatch.setenv("WANDB_TOKEN", CANARY + "-longer")
    monkeypatch.setenv("SHORT_KEY", "the")
    assert redact(f"the answer of {CANARY}-longer, of x{CANARY}x") == f"the answer of {HIDDEN}, of x{HIDDEN}x"


def test_settings_keep_their_types_and_lose_their_secrets():
    settings = {
        "judge": {"api_key": CANARY, "url": f"http://u:{CANARY}@h/v1", "timeout": 3.5},
        "tokens": [CANARY],
        "keys": {"secret": [CANARY, CANARY], "token": "", "password": None},
    }
    assert redact_values(settings) == {
        "judge": {"api_key": HIDDEN, "url": f"http://{HIDDEN}@h/v1", "timeout": 3.5},
        "tokens": [CANARY],
        "keys": {"secret": [HIDDEN, HIDDEN], "token": "", "password": None},
    }


def test_a_long_text_takes_no_time():
    started = time.process_time()
    for text in ("a" * 200_000, "token" * 40_000, "http://" + "@" * 100_000, "api_key " * 20_000, "://a" * 50_000):
        redact(text)
    assert time.process_time() - started < 2


@dataclass(frozen=True)
class Judge:
    api_key: str = ""
    url: str = ""


@dataclass(frozen=True)
class Config:
    steps: int = 1
    judge: Judge = field(default_factory=Judge)


def test_fault_45_the_config_of_a_run_is_redacted_and_still_loads(tmp_path):
    dump(load(Config, [f"judge.api_key={CANARY}", f"judge.url=http://a:{CANARY}@h"]), tmp_path / "config.yaml")
    text = (tmp_path / "config.yaml").read_text()
    assert CANARY not in text and yaml.safe_load(text)["steps"] == 1
    assert load(Config, [str(tmp_path / "config.yaml")]).judge == Judge(HIDDEN, f"http://{HIDDEN}@h")


SCRIPT = """
import sys
from tests_config import Config
from hiexp.config import ConfigError, run_script
def main(cfg):
    import warnings
    warnings.warn(f"no answer from {cfg.judge.url}")
    if cfg.steps == 2:
        raise ConfigError(f"bad key api_key={cfg.judge.api_key}")
    raise RuntimeError(f"refused: http://u:{cfg.judge.api_key}@h")
sys.exit(run_script(main, Config, sys.argv[1:], None))
"""


@pytest.mark.parametrize("steps", [1, 2])
def test_fault_45_errors_warnings_and_tracebacks_are_redacted(tmp_path, steps):
    source = Path(__file__).read_text()
    classes = source[
        source.index("@dataclass(frozen=True)\nclass Judge") : source.index("def test_fault_45_the_config")
    ]
    (tmp_path / "tests_config.py").write_text("from dataclasses import dataclass, field\n" + classes)
    (tmp_path / "script.py").write_text(SCRIPT)
    settings = [f"steps={steps}", f"judge.api_key={CANARY}", f"judge.url=http://me:{CANARY}@h"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py"), *settings],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert CANARY not in said and said.count(HIDDEN) >= 2 and "no answer from" in said
    assert done.returncode == (2 if steps == 2 else 1)
    assert ("error: bad key" if steps == 2 else "RuntimeError: refused") in said


def test_json_of_redacted_values_is_json():
    assert (
        json.loads(json.dumps(redact_values({"command": f"x.py api_key='{CANARY} b'"})))["command"].count(HIDDEN) == 1
    )
