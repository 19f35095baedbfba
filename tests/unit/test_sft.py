"""Supervised fine-tuning from its command line's settings to its exported policy, on untrained models.

Must fail if the loss is not the cross-entropy of the learned tokens, if a row is left out or seen twice in an epoch, if
a short last step weighs less, if an interrupted run goes on elsewhere, or if the number of ranks shows.
"""

import json
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dist.harness import run_ranks
from support import ScriptedEngine, build_byte_tokenizer, build_tiny_model
from transformers import GenerationConfig

from hiexp import sft
from hiexp.assemble import Config, engine_only, open_agent, open_samples, start_engine
from hiexp.checkpoint import save_policy
from hiexp.config import ConfigError, load
from hiexp.data import Sample, write_samples
from hiexp.demonstrations import read_demonstrations
from hiexp.distributed import Context
from hiexp.lab_policy import build_model, build_tokenizer
from hiexp.model import ModelConfig, load_causal_lm
from hiexp.rewards import score
from hiexp.tracking import read_metrics, write_trajectories
from hiexp.trainer import OptimConfig

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
STEPS_PER_EPOCH = 3
"""ten rows, four a step: the last one has two"""


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)


@pytest.fixture
def settings(tmp_path: Path) -> list[str]:
    """A tiny random chat model, ten pairs and three of other lengths for validation."""
    save_policy(build_tiny_model(), build_byte_tokenizer(), tmp_path / "model")
    for name, words in (("train", WORDS), ("dev", ["eleven", "a", "six"])):
        lines = [json.dumps({"question": f"{word}?", "target": word * (1 + i % 3)}) for i, word in enumerate(words)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return [
        f"model.path={tmp_path / 'model'}",
        f"sft.train={tmp_path / 'train.jsonl'}",
        f"sft.dev={tmp_path / 'dev.jsonl'}",
        "sft.epochs=2",
        "sft.rows_per_step=4",
        "optim.lr=0.003",
        "optim.schedule=linear",
        "optim.warmup_steps=1",
        "optim.tokens_per_micro_batch=120",
    ]


def run(settings: list[str], out: Path, *more: str) -> int:
    return sft.main(load(Config, [*settings, f"out={out}", *more]))


def rows_of(settings: list[str], split: str = "train") -> list[tuple[list[int], list[bool]]]:
    cfg = load(Config, [*settings, "out=x"])
    path = cfg.sft.train if split == "train" else cfg.sft.dev
    return [row.row() for row in read_demonstrations(path, build_byte_tokenizer(), cfg.sft, 512).rows]


def reference_loss(model: Any, rows: list[tuple[list[int], list[bool]]]) -> float:
    """What transformers computes: labels of -100 where nothing is learned, rows padded on the right."""
    longest = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in rows])
    pad = [[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in rows]
    labels = [
        [one if on else -100 for one, on in zip(ids, mask, strict=True)] + [-100] * (longest - len(ids))
        for ids, mask in rows
    ]
    with torch.no_grad():
        return model(ids, attention_mask=torch.tensor(pad), labels=torch.tensor(labels)).loss.item()


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(load_causal_lm(ModelConfig(str(folder / "policy"))).state_dict())


def lines(out: Path) -> list[dict]:
    """metrics.jsonl without what a clock wrote."""
    return [{key: value for key, value in one.items() if "time/" not in key} for one in read_metrics(out)]


@pytest.mark.parametrize(("count", "per_step"), [(10, 4), (2, 256), (12, 4), (1, 1)])
def test_bug_102_every_epoch_takes_each_row_once_in_its_own_order(count, per_step):
    order = sft.EpochOrder(count, per_step, seed=3)
    steps = order.steps_per_epoch
    epochs = [[order.rows(epoch * steps + step) for step in range(steps)] for epoch in range(3)]
    for epoch in epochs:
        assert sorted(index for rows in epoch for index in rows) == list(range(count))
        assert [len(rows) for rows in epoch[:-1]] == [min(per_step, count)] * (steps - 1) or steps == 1
    assert count < 3 or epochs[0] != epochs[1] != epochs[2]
    assert count < 3 or sft.EpochOrder(count, per_step, seed=4).rows(0) != order.rows(0)


@pytest.mark.parametrize("packed", ["true", "false"])
def test_bug_37_102_every_step_is_the_mean_cross_entropy_of_its_own_rows(settings, tmp_path, packed):
    """A learning rate too small to change a weight: each step shows the loss of the first model on its rows."""
    more = ["optim.lr=1e-30", f"optim.packed={packed}", "sft.dev_every=1", "optim.weight_decay=0"]
    assert run(settings, tmp_path / "out", *more, "optim.tokens_per_micro_batch=60") == 0
    model, rows, dev = build_tiny_model(), rows_of(settings), rows_of(settings, "dev")
    order = sft.EpochOrder(10, 4, 0)
    metrics = read_metrics(tmp_path / "out")
    assert len(metrics) == 2 * STEPS_PER_EPOCH
    for step, line in enumerate(metrics):
        taken = [rows[index] for index in order.rows(step)]
        assert len(taken) == (2 if step % 3 == 2 else 4)
        assert line["sft/tokens"] == sum(sum(mask) for _, mask in taken)
        assert line["loss/total"] == pytest.approx(reference_loss(model, taken), rel=2e-5)
        assert line["dev/loss"] == pytest.approx(reference_loss(model, dev), rel=2e-5)
        assert line["sft/epoch"] == pytest.approx((step + 1) / 3)


@pytest.mark.parametrize("at_once", [1, 4, 256])
def test_bug_102_the_dev_loss_counts_each_row_once(settings, at_once):
    cfg = load(Config, [*settings, "out=x"])
    found = read_demonstrations(cfg.sft.train, build_byte_tokenizer(), cfg.sft, 512)
    model = build_tiny_model()
    loss = sft.mean_loss(model, found.rows, at_once, OptimConfig(tokens_per_micro_batch=100), Context())
    assert loss == pytest.approx(reference_loss(model, rows_of(settings)), rel=2e-5)


def test_a_run_learns_and_leaves_a_model_log_and_checkpoint(settings, tmp_path, capsys):
    more = ["sft.dev_every=4", "sft.epochs=12", "sft.max_tokens=40"]
    assert run(settings, tmp_path / "out", *more) == 0
    metrics, policy = read_metrics(tmp_path / "out"), load_causal_lm(ModelConfig(str(tmp_path / "out/policy")))
    assert sum(m["loss/total"] for m in metrics[-3:]) < 0.7 * sum(m["loss/total"] for m in metrics[:3])
    assert [line["step"] for line in metrics if "dev/loss" in line][:2] == [3, 7] and "dev/loss" in metrics[-1]
    assert metrics[-1]["dev/loss"] == pytest.approx(reference_loss(policy, rows_of(settings, "dev")), rel=1e-4)
    assert metrics[0]["optim/lr"] == 0.0015 and metrics[-1]["optim/lr"] < 0.0002
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert summary["rows"] < 10 and summary["steps"] == len(metrics)
    told = capsys.readouterr().err
    assert "train.jsonl: 9 pairs (question -> target); " in told and "left out: 1 longer than 40 tokens" in told


@pytest.mark.parametrize("kill_at", [2, 5])
def test_a_run_that_is_stopped_within_an_epoch_ends_with_the_same_bits(settings, tmp_path, monkeypatch, kill_at):
    assert run(settings, tmp_path / "whole") == 0
    real, calls = sft.sft_step, []

    def step_and_stop(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == kill_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*args)

    monkeypatch.setattr(sft, "sft_step", step_and_stop)
    assert run(settings, tmp_path / "cut") == 143
    assert len(calls) == kill_at and not (tmp_path / "cut/policy").exists()
    assert not (tmp_path / "cut/summary.json").exists()
    assert run(settings, tmp_path / "cut") == 0
    assert len(calls) == 2 * STEPS_PER_EPOCH
    assert lines(tmp_path / "cut") == lines(tmp_path / "whole")
    for name, value in weights(tmp_path / "whole").items():
        assert torch.equal(value, weights(tmp_path / "cut")[name]), name


def test_a_run_that_dies_between_its_last_checkpoint_and_the_export_still_exports(settings, tmp_path, monkeypatch):
    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sft, "save_policy", die)
        with pytest.raises(KeyboardInterrupt):
            run(settings, tmp_path / "out")
    assert run(settings, tmp_path / "out") == 0
    assert len(lines(tmp_path / "out")) == 6 and weights(tmp_path / "out")


def test_a_run_does_not_go_on_with_other_demonstrations(settings, tmp_path, monkeypatch):
    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sft, "save_policy", die)
        with pytest.raises(KeyboardInterrupt):
            run(settings, tmp_path / "out")
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write(json.dumps({"question": "more?", "target": "more"}) + "\n")
    with pytest.raises(ConfigError, match=r"sft.train=.* other rows than before step 6 .*resume_changed=true"):
        run(settings, tmp_path / "out")
    assert run(settings, tmp_path / "out", "resume_changed=true") == 0


def test_bug_88_steps_that_are_not_finite_are_passed_over_then_end_the_run_naming_rows(settings, tmp_path, monkeypatch):
    def broken(*_: Any) -> dict[str, float]:
        raise FloatingPointError("supervised step: loss nan")

    monkeypatch.setattr(sft, "sft_step", broken)
    with pytest.raises(FloatingPointError, match=r"step 2: .*loss nan; so were 3 steps in a row: .*train.jsonl:\d"):
        run(settings, tmp_path / "out")
    assert [line["optim/nonfinite"] for line in read_metrics(tmp_path / "out")] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("sft.train=", "sft.train is not set; name a file"),
        ("sft.train=nowhere.jsonl", "no such file: nowhere.jsonl"),
        ("sft.max_tokens=513", "sft.max_tokens=513 is beyond the model's window of 512; lower it"),
    ],
)
def test_what_cannot_work_is_told_before_a_folder_is_made(settings, tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        run(settings, tmp_path / "out", change)
    assert not (tmp_path / "out").exists()


def test_an_end_that_sampling_does_not_stop_at_is_told(settings, tmp_path):
    tokenizer = build_byte_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<s>"})
    tokenizer.save_pretrained(tmp_path / "model")
    with pytest.warns(UserWarning, match=r"answers end with <\|im_end\|>, at which sampling does not stop: add id 257"):
        sft.open_demonstrations(load(Config, [*settings, "out=x"]), tokenizer, Context())
    GenerationConfig(eos_token_id=[257, 258]).save_pretrained(tmp_path / "model")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sft.open_demonstrations(load(Config, [*settings, "out=x"]), tokenizer, Context())


def train_on_ranks(ctx: Context, settings: list[str], out: Path) -> int:
    sft.init, sft.close = lambda: ctx, lambda _: None  # the harness has made the group, and ends it
    return run(settings, out, "sft.dev_every=2")


@pytest.mark.dist
def test_two_ranks_learn_what_one_does(settings, tmp_path):
    assert run_ranks(train_on_ranks, 2, settings, tmp_path / "two", timeout_s=60, limit_s=100) == [0, 0]
    assert run(settings, tmp_path / "one", "sft.dev_every=2") == 0
    for one, two in zip(lines(tmp_path / "one"), lines(tmp_path / "two"), strict=True):
        assert one.keys() == two.keys()
        for key, value in one.items():
            assert two[key] == pytest.approx(value, rel=1e-4), key
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    start = build_tiny_model().state_dict()
    for name, value in one.items():
        assert float((value - two[name]).norm()) < 1e-3 * float((value - start[name]).norm() + 1e-6), name


def answer_rows(agent: Any, samples: list[Sample], cfg: Config) -> list[Any]:
    """Two attempts at each question by a scripted policy: one answers rightly, the other with another's answer."""

    def turn(key: Any, _: Any) -> str:
        index, member = key
        return f"<answer> {samples[(index + member) % len(samples)].answers[0]} </answer>"

    agent.engine = ScriptedEngine(agent.tokenizer, turn)
    trajectories = agent.rollout(samples, 0, group_size=2)
    score(trajectories, samples, cfg.reward, 2, cfg.rollout.max_response_tokens)
    return trajectories


@pytest.mark.slow
def test_in_the_lab_the_successful_attempts_of_others_are_learned(tmp_path):
    """Rejection sampling end to end: rollouts -> trajectories.jsonl -> policy -> greedy rollouts, 0 right -> all."""
    tokenizer = build_tokenizer()
    save_policy(build_model(tokenizer, 0), tokenizer, tmp_path / "model")
    names = ["Motan", "Ravel", "Lison", "Belos"]
    words = [word for word in tokenizer.get_vocab() if word[:1].isupper()][: 2 * len(names)]
    samples = [Sample(f"q{i}", f"who is the {words[i]} leader", (words[-1 - i],)) for i in range(len(names))]
    write_samples(tmp_path / "train.jsonl", samples)
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"id": "1", "title": "t", "text": "teacher"}) + "\n")
    off = ["hek.path=", "rollout.strategy_level=0", "rollout.use_cases=false", f"data.train={tmp_path}/train.jsonl"]
    settings = ["configs/lab.yaml", *off, f"search.corpus=[{tmp_path / 'corpus.jsonl'}]", "rollout.max_turn_tokens=12"]
    cfg = load(Config, [*settings, f"model.path={tmp_path / 'model'}", "out=x"])

    def greedy(path: Path) -> float:
        cfg = load(Config, [*settings, f"model.path={path}", "out=x"])
        agent = open_agent(cfg)
        start_engine(agent, cfg, *engine_only(cfg))
        trajectories = agent.rollout(samples, 0, group_size=1, temperature=0.0)
        score(trajectories, samples, cfg.reward, 1, cfg.rollout.max_response_tokens)
        return float(np.mean([one.reward for one in trajectories]))

    assert open_samples(cfg.data, "train") == samples
    trajectories = answer_rows(open_agent(cfg), samples, cfg)
    assert sorted({one.reward for one in trajectories}) == [0.0, 1.0]
    write_trajectories(tmp_path / "trajectories.jsonl", trajectories)
    more = [f"model.path={tmp_path / 'model'}", f"sft.train={tmp_path / 'trajectories.jsonl'}", "sft.min_reward=1"]
    assert run([*settings, *more], tmp_path / "out", "sft.epochs=40", "optim.lr=0.003") == 0
    losses = [line["loss/total"] for line in read_metrics(tmp_path / "out")]
    assert losses[0] > 5 and losses[-1] < 0.1
    assert (greedy(tmp_path / "model"), greedy(tmp_path / "out/policy")) == (0.0, 1.0)
