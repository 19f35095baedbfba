"""One job of the lab study, a process of its own: python -m hiexp.study_job FOLDER (study.py writes FOLDER/job.json).

A job reads only what its needs have left on disk, so it may be killed and started again. A training run that was told
to stop goes on from its checkpoint, one that was killed begins anew; both give the same numbers. FOLDER/done.json says
that it is finished, and what it cost.
"""

import contextlib
import importlib
import json
import os
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from hiexp.assemble import Agent, Config, engine_only, open_agent, start_engine
from hiexp.checkpoint import save_policy
from hiexp.config import ConfigError, load
from hiexp.data import Sample, read_samples, write_samples
from hiexp.encoder import TfidfEncoder
from hiexp.hek import HEK, HEKConfig, refuse_evaluation_questions
from hiexp.lab import LabConfig, WorldConfig, write_world
from hiexp.lab_policy import WarmStartConfig, build_model, build_tokenizer, warm_start
from hiexp.resume import seed_everything
from hiexp.rewards import score
from hiexp.search import open_search
from hiexp.search_types import SearchBackend
from hiexp.study import STUDY, alone
from hiexp.study_arms import ARMS, TRAINED, Arm, clip_settings
from hiexp.study_plan import SizeConfig, StudyConfig, grid, split_of, start_policy, store_folder, tune_jobs
from hiexp.study_stores import MADE
from hiexp.tracking import write_json

ROOT = Path(__file__).resolve().parents[1]
OTHER_WORLD = 5000
"""added to the seed of the second world, in which the arms are tested and nothing is trained"""
OTHER_QUESTIONS = 4
"""of each family there"""
TUNING_SAMPLES = 4
"""sampled attempts at each validation question"""
DEV_EVERY = 8


class Stopped(Exception):
    """Training was told to stop and has saved; the argument is its exit code."""


class Place:
    """Where a job of a study finds things."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.out = folder, folder.parents[len(Path(name).parts) - 1]
        self.cfg = load(StudyConfig, [str(self.out / "study.yaml")])
        self.size: SizeConfig = self.cfg.size

    def world(self, seed: int) -> Path:
        return self.out / f"s{seed}" / "world"

    def settings(self, warm: int, seed: int, *more: str) -> Config:
        """Of one of the three scripts, for the policy `warm` in the world `seed`."""
        config, world, size = self.cfg.config, self.world(seed), self.size
        arguments = (
            config if Path(config).is_file() else str(ROOT / config),
            f"out={_quoted(self.folder / 'run')}", f"seed={seed}", f"eval.seed={seed}", "threads=1",
            f"model.path={_quoted(self.out / f'w{warm}' / 'policy' / 'policy')}",
            *(f"data.{split}={_quoted(world / f'{split}.jsonl')}" for split in ("train", "dev", "test")),
            f"encoder.path={_quoted(world / 'encoder.json')}", f"search.corpus=[{_quoted(world / 'corpus.jsonl')}]",
            f"rollout.group_size={size.group}", f"build.questions={size.build_questions}",
            f"train.steps={size.steps}", f"train.prompts_per_step={size.prompts}",
            f"train.dev_every={DEV_EVERY}", "train.show_every=0", "train.save_every=0", "checkpoint.every=0",
            *self.cfg.overrides, *more,
        )  # fmt: skip
        return load(Config, arguments)

    def script(self, name: str, cfg: Config) -> None:
        """Run a script's main in this process, unless its run is finished. Raises Stopped if it was told to stop."""
        if (Path(cfg.out) / "summary.json").exists():
            return
        code = importlib.import_module(name).main(cfg) or 0
        if code:
            raise Stopped(code)


def warm(place: Place, told: dict[str, Any]) -> dict[str, Any]:
    """A policy that knows the protocol; with `width` and `layers`, the larger one that stands for a teacher."""
    torch.set_num_threads(1)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, told["seed"], told.get("width", 128), told.get("layers", 3))
    metrics = warm_start(model, tokenizer, WarmStartConfig(steps=place.size.warm_steps), told["seed"])
    save_policy(model, tokenizer, place.folder / "policy")
    return {"loss": metrics["sft/loss"], "parameters": sum(p.numel() for p in model.parameters())}


def world(place: Place, told: dict[str, Any]) -> dict[str, Any]:
    """Questions and passages of a world, without training questions of the families that are held out, and another."""
    size = place.size
    per_family = WorldConfig(size.train_per_family, size.dev_per_family, size.test_per_family)
    write_world(LabConfig("", told["seed"], world=per_family), place.folder)
    write_world(LabConfig("", told["seed"] + OTHER_WORLD, world=per_family), place.folder / "other")
    counts = {}
    for split in ("train", "dev"):
        kept = [s for s in read_samples(place.folder / f"{split}.jsonl") if s.family not in size.held_out]
        write_samples(place.folder / f"{split}.jsonl", kept)
        counts[split] = len(kept)
    # names are drawn from one pool: a question of the other world may read like one that is trained on here
    known = {s.question for split in ("train", "dev", "test") for s in read_samples(place.folder / f"{split}.jsonl")}
    other = [s for s in read_samples(place.folder / "other/test.jsonl") if s.question not in known]
    other = [s for s in other if _split(s, size) == "in_domain"]
    few = [s for s in other if sum(o.family == s.family for o in other[: other.index(s)]) < OTHER_QUESTIONS]
    write_samples(place.folder / "other/test.jsonl", few)
    return counts | {"other": len(few)}


def build(place: Place, told: dict[str, Any]) -> dict[str, Any]:
    """build_hek.py on the policy's own attempts; the lessons by it, or by the teacher."""
    reflector = (
        [f"build.reflector.model={_quoted(place.out / told['reflector'] / 'policy')}"] if "reflector" in told else []
    )
    if reflector:  # who abstracts is the teacher too: its whole knowledge against the policy's own
        reflector.append(reflector[0].replace("reflector", "abstractor", 1))
    cfg = place.settings(told["warm"], told["seed"], *reflector, *told.get("settings", ()))
    seed_everything(cfg.seed, 0)
    place.script("build_hek", cfg)
    return {"entries": json.loads((place.folder / "run/summary.json").read_text())["entries"]}


def make(place: Place, told: dict[str, Any]) -> dict[str, Any]:
    """A store that is made from the built one."""
    encoder = TfidfEncoder.load(place.world(told["seed"]) / "encoder.json")
    hek = HEK.load(store_folder(place.out, f"w{told['warm']}s{told['seed']}", "self"), encoder)
    MADE[told["store"]](hek, told["seed"]).save(place.folder / "hek", overwrite=True)
    return {}


def measure(place: Place, told: dict[str, Any]) -> dict[str, Any]:
    """hiexp.uplift on training questions with the policy that training starts from."""
    store = store_folder(place.out, f"w{told['warm']}s{told['seed']}", "self")
    cfg = place.settings(told["warm"], told["seed"], f"hek.path={_quoted(store)}", "uplift.questions=0")
    seed_everything(cfg.seed, 0)
    if not (place.folder / "run/summary.json").exists():
        importlib.import_module("hiexp.uplift").main(cfg)
    return {}


def rft(place: Place, told: dict[str, Any]) -> dict[str, Any]:
    """hiexp/sft.py on the right attempts that the cell's own store was built from."""
    attempts = place.out / f"w{told['warm']}s{told['seed']}" / "self/run/trajectories.jsonl"
    cfg = place.settings(told["warm"], told["seed"], f"sft.train={_quoted(attempts)}")
    place.script("hiexp.sft", cfg)
    shutil.rmtree(place.folder / "run/checkpoints", ignore_errors=True)
    return {"rows": json.loads((place.folder / "run/summary.json").read_text())["rows"]}


def arm(place: Place, told: dict[str, Any]) -> dict[str, Any]:
    """One arm in one cell: train.py unless it has no RL, then every test split, with and without experience."""
    one, cell = ARMS[told["arm"]], f"w{told['warm']}s{told['seed']}"
    lr, clip = choice(place.out, one.tuned_as, place.size)
    cfg = _trained(place, told, one, lr, clip, place.size.steps)
    policy, store = cfg.model.path, ""
    if one.steps:
        place.script("train", cfg)
        policy = str(place.folder / "run/policy")
        store = json.loads((place.folder / "run/summary.json").read_text())["hek"]
    if not store and "on" in one.tests:
        store = str(store_folder(place.out, cell, one.test_store))
    tested = replace(cfg, model=replace(cfg.model, path=policy), hek=replace(cfg.hek, path=store))
    tests = Tests(place, tested)
    with _whole(place.folder / "results.jsonl") as add:
        for hek in one.tests:
            add(tests.lines(told["arm"], told, tested, hek))
    shutil.rmtree(place.folder / "run/checkpoints", ignore_errors=True)  # three times the weights, for 150 runs
    return {"lr": lr, "clip": clip} if one.steps else {}


def tune(place: Place, told: dict[str, Any]) -> dict[str, Any]:
    """One point of the grid: a shorter run, scored by sampled EM on validation questions."""
    arm = TRAINED[told["arm"]]
    cfg = _trained(place, told, arm, told["lr"], told["clip"], place.size.tune_steps, "train.dev_every=0")
    place.script("train", cfg)
    tested = replace(cfg, model=replace(cfg.model, path=str(place.folder / "run/policy")))
    samples, agent = read_samples(tested.data.dev), open_agent(tested)
    start_engine(agent, tested, *engine_only(tested))
    hek = agent.hek if arm.store else HEK.empty()
    found, _ = _asked(agent, samples, agent.search, hek, cfg, told["seed"], TUNING_SAMPLES, 1.0)
    shutil.rmtree(place.folder / "run/checkpoints", ignore_errors=True)
    return {"score": fmean(found.values()), "lr": told["lr"], "clip": told["clip"]}


def choice(out: Path, tuned_as: str, size: SizeConfig) -> tuple[float, str]:
    """The point of the grid with the best mean score over warm starts; the first of equals, or for no RL."""
    points = grid(size)
    if len(points) == 1 or not tuned_as:
        return points[0]
    scores = [
        fmean(json.loads((out / run / "done.json").read_text())["score"] for run in runs)
        for runs in tune_jobs(tuned_as, size)
    ]
    return points[scores.index(max(scores))]


class Tests:
    """The test questions of a cell and the policy that answers them."""

    def __init__(self, place: Place, cfg: Config) -> None:
        self.size, self.agent = place.size, open_agent(replace(cfg, hek=HEKConfig()))
        self.agent.encoder = TfidfEncoder.load(cfg.encoder.path)
        start_engine(self.agent, cfg, *engine_only(cfg))
        other = place.world(cfg.seed) / "other"
        away = open_search(replace(cfg.search, corpus=(str(other / "corpus.jsonl"),)), None)
        self.places = {"home": (read_samples(cfg.data.test), self.agent.search)}
        self.places["away"] = (read_samples(other / "test.jsonl"), away)

    def lines(self, arm: str, told: dict[str, Any], cfg: Config, hek: str) -> Iterator[dict[str, Any]]:
        """A result for every split and decoding, with the store and the rollout settings of `cfg` or without any."""
        store = HEK.empty()
        if hek == "on":
            assert self.agent.encoder is not None
            store = HEK.load(cfg.hek.path, self.agent.encoder, cfg.hek)
        for where, (samples, search) in self.places.items():
            refuse_evaluation_questions(store, samples)
            for decoding, attempts, temperature in (("greedy", 1, 0.0), ("sampled", self.size.samples, 1.0)):
                found, shown = _asked(self.agent, samples, search, store, cfg, cfg.seed, attempts, temperature)
                parts: dict[str, dict[str, float]] = {}
                for sample in samples:
                    split = _split(sample, self.size) if where == "home" else "second_world"
                    parts.setdefault(split, {})[sample.id] = found[sample.id]
                for split, scores in parts.items():
                    mean = fmean(scores.values())
                    key = {"arm": arm, "warm": told["warm"], "seed": told["seed"], "split": split, "hek": hek}
                    yield key | {"decoding": decoding, "em": mean, "shown": shown, "scores": scores}


def _asked(
    agent: Agent,
    samples: Sequence[Sample],
    search: SearchBackend,
    hek: HEK,
    cfg: Config,
    seed: int,
    attempts: int,
    temperature: float,
) -> tuple[dict[str, float], float]:
    """(question id -> mean EM of its attempts, share of the attempts that were shown anything)."""
    asking = replace(agent, search=search, cfg=cfg.rollout)
    draw = {"group_size": attempts, "temperature": temperature, "top_p": 1.0}
    tried = asking.rollout_all(samples, seed, "test", hek, **draw)
    rewards = score(tried, samples, replace(cfg.reward, metric="em", format_floor=0.0), attempts)
    means = {s.id: float(row) for s, row in zip(samples, rewards.double().mean(dim=1), strict=True)}
    return means, fmean(bool(t.strategies or any(turn.cases for turn in t.turns)) for t in tried)


def _trained(place: Place, told: dict[str, Any], arm: Arm, lr: float, clip: str, steps: int, *more: str) -> Config:
    cell = f"w{told['warm']}s{told['seed']}"
    return place.settings(
        told["warm"],
        told["seed"],
        f"model.path={_quoted(start_policy(place.out, told['warm'], told['seed'], arm))}",
        f"optim.lr={lr}",
        *clip_settings(clip),
        f"train.steps={max(1, round(steps * arm.steps))}",  # never run by an arm without RL
        f"train.prompts_per_step={round(place.size.prompts * arm.prompts)}",
        *_experience(place, cell, arm),
        *arm.overrides,
        *more,
    )


def _experience(place: Place, cell: str, arm: Arm) -> tuple[str, ...]:
    return (f"hek.path={_quoted(store_folder(place.out, cell, arm.test_store))}",) if arm.store else ()


def _quoted(path: Path) -> str:
    """A path as a value of a setting, whatever is in it."""
    return json.dumps(str(path))


def _split(sample: Sample, size: SizeConfig) -> str:
    return split_of(sample.id, sample.family_group, size.held_out)


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[Callable[[Iterator[dict[str, Any]]], None]]:
    """Lines of JSON that are there when all of them are written."""
    new = path.with_name(path.name + ".new")
    with new.open("w", encoding="utf-8") as file:
        yield lambda lines: file.writelines(json.dumps(line) + "\n" for line in lines)
    new.replace(path)


KINDS: dict[str, Callable[[Place, dict[str, Any]], dict[str, Any]]] = {
    "warm": warm, "world": world, "build": build, "make": make, "measure": measure,
    "rft": rft, "arm": arm, "tune": tune,
}  # fmt: skip


def main(argv: Sequence[str]) -> int:
    folder = Path(argv[0]).absolute()
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    sys.path.insert(0, str(ROOT))  # the three scripts stand beside the package
    with alone(folder):
        if (folder / "done.json").exists() and json.loads((folder / "done.json").read_text())["told"] == job["told"]:
            return 0
        try:
            result = KINDS[job["kind"]](Place(folder, job["name"]), job["told"])
        except Stopped as stop:
            return stop.args[0]
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        used = resource.getrusage(resource.RUSAGE_SELF)
        cost = {"cpu_seconds": round(used.ru_utime + used.ru_stime, 2), "megabytes": used.ru_maxrss // 1024}
        write_json(folder / "done.json", {"told": job["told"], **cost, **result})
    return 0


def _stop_without_parent(parent: int) -> None:
    """When the study is gone, nobody will tell this job to stop; it may have gone before this job could look."""
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    study = int(os.environ.get(STUDY, os.getppid()))
    threading.Thread(target=_stop_without_parent, args=(study,), daemon=True).start()
    sys.exit(main(sys.argv[1:]))
