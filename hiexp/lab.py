"""The CPU lab: the whole method on a small world, in minutes. `make demo` runs `python -m hiexp.lab demo`.

    python -m hiexp.lab world  out=runs/w          encyclopedia, questions and encoder
    python -m hiexp.lab policy out=runs/p          the warm-started policy
    python -m hiexp.lab demo   out=runs/lab seed=0 both, then build_hek.py, train.py in three ways, evaluate.py
    python -m hiexp.lab study  out=runs/study      many arms over worlds and warm starts (docs/lab_study.md)

The demo's later stages are the three scripts themselves with configs/lab.yaml, two at a time with one thread each.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from hiexp.checkpoint import save_policy
from hiexp.config import ConfigError, lookup, run_script
from hiexp.data import write_samples
from hiexp.encoder import TfidfEncoder
from hiexp.lab_demo import run_demo
from hiexp.lab_languages import languages
from hiexp.lab_policy import WarmStartConfig, build_model, build_tokenizer, warm_start
from hiexp.lab_teacher import mask
from hiexp.lab_world import build_world, questions
from hiexp.study import of_folder, run_study
from hiexp.study_plan import StudyConfig
from hiexp.tracking import finish_run, open_run_folder


@dataclass(frozen=True)
class WorldConfig:
    train_per_family: int = 24
    """questions of each family"""
    dev_per_family: int = 4
    """for validation while training"""
    test_per_family: int = 12
    """every third of them has a wording that no other split has"""
    languages: tuple[str, ...] = ("en",)
    """what every question is asked in: en, es, zh"""

    def __post_init__(self) -> None:
        if not self.languages or len(set(self.languages)) < len(self.languages):
            raise ConfigError(f"languages={list(self.languages)} must name one or more, each once")
        for code in self.languages:
            if code not in languages():
                raise ConfigError(f"languages: {code!r} is none of {', '.join(languages())}")
        for name in ("train_per_family", "dev_per_family", "test_per_family"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")


@dataclass(frozen=True)
class LabConfig:
    out: str
    """folder to write"""
    seed: int = 0
    """of the world, the questions, the policy and every later step"""
    threads: int = 1
    """threads of the warm start (two are slower than one as soon as anything else runs)"""
    config: str = "configs/lab.yaml"
    """settings of the three scripts (demo); looked for here, then in the checkout"""
    overrides: tuple[str, ...] = ()
    """more key=value settings for the three scripts (demo)"""
    world: WorldConfig = field(default_factory=WorldConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)

    def __post_init__(self) -> None:
        if self.seed < 0 or self.threads < 1:
            raise ConfigError(f"seed={self.seed} must not be negative and threads={self.threads} must be at least 1")


def write_world(cfg: LabConfig, out: Path) -> None:
    """corpus.jsonl, train.jsonl, dev.jsonl, test.jsonl, and encoder.json: TF-IDF of the training questions' wording."""
    world = build_world(cfg.seed)
    out.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"id": key, "title": d.title, "text": d.text}) + "\n" for key, d in world.passages()]
    (out / "corpus.jsonl").write_text("".join(lines), encoding="utf-8")
    per_family = {name: getattr(cfg.world, f"{name}_per_family") for name in SPLITS}
    splits = questions(world, per_family, cfg.seed, cfg.world.languages)
    for name, samples in splits.items():
        write_samples(out / f"{name}.jsonl", samples)
    _wording_encoder([mask(sample.question) for sample in splits["train"]]).save(out / "encoder.json")


def write_policy(cfg: LabConfig, out: Path) -> dict[str, float]:
    """The warm-started policy in Hugging Face layout; returns the metrics of its last step."""
    torch.set_num_threads(cfg.threads)
    tokenizer = build_tokenizer(cfg.world.languages)
    model = build_model(tokenizer, cfg.seed)
    metrics = warm_start(model, tokenizer, cfg.warm_start, cfg.seed, cfg.world.languages)
    save_policy(model, tokenizer, out)
    return metrics


def _wording_encoder(masked: Sequence[str]) -> TfidfEncoder:
    """Without the words that stand for names and years, a question and a lesson's title are the same to it."""
    fitted = TfidfEncoder.fit(masked)
    terms = [
        (term, idf)
        for term, idf in zip(fitted.vocabulary, fitted.idf, strict=True)
        if not {"someone", "year"} & set(term.split())
    ]
    return TfidfEncoder([term for term, _ in terms], [idf for _, idf in terms])


def _world(cfg: LabConfig) -> None:
    out = open_run_folder(cfg.out, cfg)
    write_world(cfg, out)
    finish_run(out, {"seed": cfg.seed})


def _policy(cfg: LabConfig) -> None:
    out = open_run_folder(cfg.out, cfg)
    finish_run(out, write_policy(cfg, out / "policy"))


def _demo(cfg: LabConfig) -> None:
    run_demo(
        Path(cfg.out),
        cfg.config,
        cfg.seed,
        cfg.overrides,
        lambda out: write_world(cfg, out),
        lambda out: write_policy(cfg, out),
    )


SPLITS = ("train", "dev", "test")
COMMANDS = {"world": _world, "policy": _policy, "demo": _demo}

if __name__ == "__main__":
    command, arguments = (sys.argv[1:2] or ["--help"])[0], sys.argv[2:]
    if command in ("-h", "--help"):
        command, arguments = "demo", ["--help"]
    if command == "study":
        sys.exit(run_script(run_study, StudyConfig, of_folder(arguments) or ["jobs=2"], run_study.__doc__))
    sys.exit(run_script(lambda cfg: lookup(COMMANDS, command, "command")(cfg), LabConfig, arguments, __doc__))
