"""Settings: defaults < YAML < command line, and one-line errors that name key and remedy."""

from dataclasses import dataclass, field
from typing import Literal

import pytest

from hiexp.config import ConfigError, describe, dump, load, lookup, run_script


@dataclass(frozen=True)
class Inner:
    lr: float = 1e-6
    """learning rate"""
    betas: tuple[float, float] = (0.9, 0.999)
    names: tuple[str, ...] = ()
    mode: Literal["a", "b"] = "a"
    limit: int | None = None

    def __post_init__(self):
        if self.lr <= 0:
            raise ConfigError(f"lr={self.lr} must be above 0")


@dataclass(frozen=True)
class Outer:
    out: str
    """folder to write"""
    steps: int = 3
    fast: bool = False
    optim: Inner = field(default_factory=Inner)


def write(tmp_path, text):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    return str(path)


def test_command_line_wins_over_yaml_over_default(tmp_path):
    path = write(tmp_path, "out: a\nsteps: 5\noptim: {lr: 1e-3, names: [x, y]}\n")  # YAML 1.1: 1e-3 is a string
    cfg = load(Outer, [path, "steps=7", "optim.betas=[0.5, 0.6]", "optim.limit=4"])
    assert cfg == Outer("a", 7, False, Inner(1e-3, (0.5, 0.6), ("x", "y"), "a", 4))
    assert load(Outer, ["steps=7", path]).steps == 7, "the order of arguments does not matter"


def test_a_value_may_hold_equal_signs_and_slashes(tmp_path):
    assert load(Outer, ["out=a/b=c/d"]).out == "a/b=c/d"


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("optim.lrr=1", "optim.lrr; did you mean optim.lr"),
        ("lr=1", "unknown key lr; did you mean optim.lr"),
        ("steps=1.5", "steps must be int; got 1.5"),
        ("steps=true", "steps must be int"),
        ("fast=1", "fast must be bool"),
        ("optim.lr=fast", "optim.lr must be float; got 'fast'"),
        ("optim.lr=-1", "optim: lr=-1.0 must be above 0"),
        ("optim.betas=[1]", "optim.betas must be a list of 2 values"),
        ("optim.names=x", "optim.names must be a list"),
        ("optim.mode=c", "optim.mode must be one of a, b"),
        ("optim=3", "optim is a section"),
        ("steps.x=3", "'steps' is a value, not a section|steps must be int"),
        ("out=", ""),
    ],
)
def test_mistakes_are_told_in_one_line(argument, message):
    if argument == "out=":
        assert load(Outer, ["out="]).out == ""
        return
    with pytest.raises(ConfigError, match=message) as error:
        load(Outer, ["out=x", argument])
    assert "\n" not in str(error.value)


def test_missing_file_and_missing_key(tmp_path):
    write(tmp_path, "out: a")
    with pytest.raises(ConfigError, match=r"no such config file.*did you mean .*x\.yaml"):
        load(Outer, [str(tmp_path / "y.yaml")])
    with pytest.raises(ConfigError, match="out is required"):
        load(Outer, ["steps=1"])


@pytest.mark.parametrize("text", ["- a\n", "out: [", "!!python/object/apply:os.system ['true']", ""])
def test_only_plain_mappings_are_read(tmp_path, text):
    with pytest.raises(ConfigError, match=r"x\.yaml"):
        load(Outer, [write(tmp_path, text)])


def test_dump_reads_back_equal(tmp_path):
    cfg = Outer("a", 7, True, Inner(1e-7, (0.1, 0.2), ("x",), "b", None))
    dump(cfg, tmp_path / "c.yaml")
    assert load(Outer, [str(tmp_path / "c.yaml")]) == cfg


def test_describe_lists_every_key_with_its_documentation():
    text = describe(Outer)
    assert "out" in text and "folder to write" in text and "required" in text
    assert "optim.lr" in text and "learning rate" in text and "1e-06" in text


def test_lookup_suggests_and_lists():
    with pytest.raises(ConfigError, match=r"unknown fruit 'appel'; did you mean 'apple'\? known: apple, pear"):
        lookup({"apple": 1, "pear": 2}, "appel", "fruit")


def test_run_script_returns_2_for_a_users_mistake_and_keeps_the_rest(capsys):
    def broken(cfg):
        raise ZeroDivisionError

    assert run_script(lambda cfg: None, Outer, ["out=x"], "doc") == 0
    assert run_script(lambda cfg: None, Outer, ["outt=x"], "doc") == 2
    assert capsys.readouterr().err == "error: unknown key outt; did you mean out?\n"
    assert run_script(broken, Outer, ["--help"], "doc") == 0
    with pytest.raises(ZeroDivisionError):
        run_script(broken, Outer, ["out=x"], "doc")


def test_fault_42_a_yaml_file_runs_no_code(tmp_path):
    canary = tmp_path / "canary"
    path = tmp_path / "evil.yaml"
    path.write_text(f"out: !!python/object/apply:os.mkdir ['{canary}']\n")
    with pytest.raises(ConfigError, match=r"evil\.yaml"):
        load(Outer, [str(path)])
    assert not canary.exists()
