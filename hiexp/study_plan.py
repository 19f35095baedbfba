"""The jobs of the lab study: which processes there are, what each needs, and in which order they come.

    <out>/w0/policy, w1/policy, teacher/policy      warm starts
    <out>/s0/world ...                              a world per seed, the same for all warm starts and arms
    <out>/w0s0/self, teacher, coarse ...            stores of one warm start in one world
    <out>/w0s0/made/shuffled ...                    stores made of its own, for controls
    <out>/w0s0/rft_start                            its policy after fine-tuning on the attempts behind its own store
    <out>/w0s0/base, free_e2, grpo ...              an arm: trained, unless it is not, then tested
    <out>/tune/w0/grpo/0 ...                        a point of the grid, trained in a world of its own

A pair of warm start and seed is a cell. Cells come one after the other, so that whatever is finished when a study is
stopped has all arms in the same cells, and every comparison is paired.

What a job is told ends in a digest of what the jobs that it needs were told. Whoever edits an arm, or a store, has it
and all that came of it run again.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

from hiexp.config import ConfigError, lookup
from hiexp.lab_world import FAMILIES
from hiexp.study_arms import TRAINED, Arm, chosen_arms, clip_settings
from hiexp.study_stores import MADE, VARIED

TUNING_SEED = 1000
"""world and questions of the tuning runs; no cell has them"""
TEACHER_SEED = 500


@dataclass(frozen=True)
class SizeConfig:
    """What decides the numbers: a folder holds one choice of it."""

    seeds: int = 5
    """worlds; each has its own questions, experience and order of training"""
    warm_starts: int = 2
    """policies that the arms start from, each trained from its own random weights"""
    steps: int = 24
    """training steps of an arm"""
    prompts: int = 10
    """questions of a step; even, since one arm has half of them"""
    group: int = 8
    """attempts at each"""
    train_per_family: int = 20
    """questions of each family that is trained on"""
    dev_per_family: int = 8
    """questions that learning rate and clip range are chosen on"""
    test_per_family: int = 12
    """a third of them in a wording that was never trained on"""
    held_out: tuple[str, ...] = ("director_spouse", "founder_birth_country", "seat_first_ruler", "first_leader_teacher")
    """families that neither experience nor training sees, two that the warm start knows and two that it does not"""
    samples: int = 2
    """sampled attempts at each test question, beside a greedy one"""
    build_questions: int = 144
    """training questions that experience is built from"""
    warm_steps: int = 800
    """steps of a warm start"""
    teacher_width: int = 192
    """of the teacher; the policy has 128"""
    teacher_layers: int = 4
    """of the teacher; the policy has 3"""
    tune_steps: int = 12
    """training steps of a point of the grid"""
    tune_warm_starts: int = 1
    """policies that the grid is tried on, at most warm_starts; what is chosen is used for all"""
    lrs: tuple[float, ...] = (1.5e-4, 3e-4)
    """learning rates of the grid"""
    clips: tuple[str, ...] = ("own", "0.4")
    """clip ranges of the grid: own is the algorithm's, a number is both bounds"""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, int) and value < 1:
                raise ConfigError(f"size.{name}={value} must be at least 1")
        if self.tune_warm_starts > self.warm_starts:
            raise ConfigError(
                f"size.tune_warm_starts={self.tune_warm_starts} is more than size.warm_starts={self.warm_starts}"
            )
        if self.group < 2:
            raise ConfigError(f"size.group={self.group} must be at least 2: an attempt is compared with its siblings")
        if self.prompts % 2:
            raise ConfigError(f"size.prompts={self.prompts} must be even: the arm grpo_half has half of them")
        for name in self.held_out:
            lookup(dict.fromkeys(family.name for family in FAMILIES), name, "size.held_out")
        if len(set(self.held_out)) == len(FAMILIES):
            raise ConfigError("size.held_out holds every family: nothing is left to train on")
        for name in ("lrs", "clips"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ConfigError(f"size.{name}={list(values)} must hold one value or more, each once")
        if not all(0 < lr < math.inf for lr in self.lrs):
            raise ConfigError(f"size.lrs={list(self.lrs)} must be above 0, and finite")
        if self.seeds > TUNING_SEED:
            raise ConfigError(f"size.seeds={self.seeds} must be at most {TUNING_SEED}")
        train = self.train_per_family * (len(FAMILIES) - len(set(self.held_out)))
        if self.build_questions > train:
            raise ConfigError(
                f"size.build_questions={self.build_questions} is more than there are training questions: {train}, "
                "size.train_per_family of each family that is not held out"
            )
        for clip in self.clips:
            clip_settings(clip)
        if self.teacher_width % 32:
            raise ConfigError(f"size.teacher_width={self.teacher_width} must be a multiple of 32, the width of a head")


@dataclass(frozen=True)
class StudyConfig:
    out: str
    """folder of the study; the same command goes on with what is missing there"""
    set: Literal["core", "full"] = "core"
    """core: the claims and their main controls; full: every arm"""
    arms: tuple[str, ...] = ()
    """only these (names of study_arms.py); empty = all of the set"""
    jobs: int = 2
    """processes at once, one thread each; 0 = only collect what is finished and write the report"""
    config: str = "configs/lab.yaml"
    """settings of every job; looked for here, then in the checkout"""
    worlds: tuple[int, ...] = ()
    """seeds of the worlds that are run or, with jobs=0, reported; empty = 0 to size.seeds - 1, and in reports all"""
    overrides: tuple[str, ...] = ()
    """more key=value settings, on top of config and below what an arm says; like size they belong to the folder"""
    size: SizeConfig = field(default_factory=SizeConfig)

    def __post_init__(self) -> None:
        if self.jobs < 0:
            raise ConfigError(f"jobs={self.jobs} must be 0 (report only) or above")
        for seed in self.worlds:
            if seed < 0 or seed == TUNING_SEED or self.worlds.count(seed) > 1:
                raise ConfigError(
                    f"worlds={list(self.worlds)}: {seed} must be a seed of 0 or above, named once, and not "
                    f"{TUNING_SEED}, the world that learning rates are chosen in"
                )
        chosen_arms(self.arms, self.set)

    @property
    def seeds(self) -> tuple[int, ...]:
        return self.worlds or tuple(range(self.size.seeds))


@dataclass(frozen=True)
class Job:
    """One process: what it is told, and the jobs that must have finished before."""

    name: str
    """its folder below the study's"""
    kind: str
    """a function of study_job.py"""
    needs: tuple[str, ...] = ()
    told: dict[str, Any] = field(default_factory=dict)


def plan(cfg: StudyConfig) -> list[Job]:
    """All jobs, in the order in which they should start: none before what it needs."""
    arms, size = chosen_arms(cfg.arms, cfg.set), cfg.size
    jobs = [Job(f"w{w}/policy", "warm", (), {"seed": w}) for w in range(size.warm_starts)]
    tuned = tuple(dict.fromkeys(arm.tuned_as for arm in arms.values() if arm.tuned_as))
    if tuned and len(grid(size)) > 1:
        jobs.append(_world(TUNING_SEED))
        for w in range(size.tune_warm_starts):
            jobs += _tuning(w, tuned, size)
    if any(arm.test_store == "teacher" for arm in arms.values()):
        shape = {"seed": TEACHER_SEED, "width": size.teacher_width, "layers": size.teacher_layers}
        jobs.append(Job("teacher/policy", "warm", (), shape))
    for seed in cfg.seeds:
        jobs.append(_world(seed))
        for w in range(size.warm_starts):
            jobs += _cell(w, seed, arms, size)
    return _chained(jobs)


def _chained(jobs: Sequence[Job]) -> list[Job]:
    """Each told what those before it were told."""
    digests: dict[str, str] = {}
    chained = []
    for job in jobs:
        told = job.told | ({"after": _digest([digests[name] for name in job.needs])} if job.needs else {})
        digests[job.name] = _digest(told)
        chained.append(replace(job, told=told))
    return chained


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def grid(size: SizeConfig) -> list[tuple[float, str]]:
    """Points (learning rate, clip range); the first is what a tie is given to."""
    return list(product(size.lrs, size.clips))


def tune_jobs(tuned_as: str, size: SizeConfig) -> list[list[str]]:
    """Per point of the grid, the names of its runs."""
    return [[f"tune/w{w}/{tuned_as}/{i}" for w in range(size.tune_warm_starts)] for i in range(len(grid(size)))]


def _world(seed: int) -> Job:
    return Job(f"s{seed}/world", "world", (), {"seed": seed})


def _store_jobs(cell: str, arm: Arm) -> tuple[str, ...]:
    """The job of the store that an arm trains or is tested with."""
    if arm.tests == ("off",) and not arm.store:
        return ()
    return (f"{cell}/made/{arm.test_store}" if arm.test_store in MADE else f"{cell}/{arm.test_store}",)


def _start_jobs(cell: str, arm: Arm) -> tuple[str, ...]:
    return (f"{cell}/rft_start",) if arm.rft else ()


def _stores(w: int, seed: int, arms: Sequence[Arm]) -> list[Job]:
    """Jobs for what these arms need: their stores, and the policy that has learned from the attempts behind one."""
    cell, ground, told = f"w{w}s{seed}", (f"w{w}/policy", f"s{seed}/world"), {"warm": w, "seed": seed}
    own = (f"{cell}/self",)
    wanted = {job for arm in arms for job in (*_store_jobs(cell, arm), *_start_jobs(cell, arm))}
    if not wanted:
        return []
    jobs = [Job(own[0], "build", ground, told)]
    possible = [
        Job(f"{cell}/teacher", "build", (*ground, "teacher/policy"), told | {"reflector": "teacher/policy"}),
        *(Job(f"{cell}/{name}", "build", ground, told | {"settings": list(more)}) for name, more in VARIED.items()),
        Job(f"{cell}/measured", "measure", own, told),
        *(Job(f"{cell}/made/{name}", "make", own, told | {"store": name}) for name in MADE),
        Job(f"{cell}/rft_start", "rft", own, told),
    ]
    return jobs + [job for job in possible if job.name in wanted]


def _cell(w: int, seed: int, arms: dict[str, Arm], size: SizeConfig) -> list[Job]:
    cell, jobs = f"w{w}s{seed}", _stores(w, seed, list(arms.values()))
    for name, arm in arms.items():
        needs = (f"w{w}/policy", f"s{seed}/world", *_store_jobs(cell, arm), *_start_jobs(cell, arm))
        if arm.tuned_as and len(grid(size)) > 1:
            needs += tuple(run for runs in tune_jobs(arm.tuned_as, size) for run in runs)
        told = {"warm": w, "seed": seed, "arm": name, "recipe": arm.recipe}
        jobs.append(Job(f"{cell}/{name}", "arm", needs, told))
    return jobs


def _tuning(w: int, tuned: Sequence[str], size: SizeConfig) -> list[Job]:
    """The grid of each arm, without experience where the arm has none in training."""
    cell, arms = f"w{w}s{TUNING_SEED}", {name: lookup(TRAINED, name, "tuned_as") for name in tuned}
    jobs = _stores(w, TUNING_SEED, [arm for arm in arms.values() if arm.store or arm.rft])
    for name, arm in arms.items():
        needs = (f"w{w}/policy", f"s{TUNING_SEED}/world")
        needs += (*(_store_jobs(cell, arm) if arm.store else ()), *_start_jobs(cell, arm))
        for i, (lr, clip) in enumerate(grid(size)):
            told = {"warm": w, "seed": TUNING_SEED, "arm": name, "recipe": arm.recipe, "lr": lr, "clip": clip}
            jobs.append(Job(f"tune/w{w}/{name}/{i}", "tune", needs, told))
    return jobs


def start_policy(out: Path, warm: int, seed: int, arm: Arm) -> Path:
    """What an arm is trained from."""
    return out / (f"w{warm}s{seed}/rft_start/run/policy" if arm.rft else f"w{warm}/policy/policy")


def store_folder(out: Path, cell: str, store: str) -> Path:
    """Where a store of a cell lies."""
    return out / cell / "made" / store / "hek" if store in MADE else out / cell / store / "run" / "hek"


def split_of(sample_id: str, group: str, held_out: Sequence[str]) -> str:
    """in_domain, paraphrase (a wording that was never trained on) or held_out (a family that was not)."""
    if sample_id.split("-")[0] in held_out:
        return "held_out"
    return "paraphrase" if group.endswith("_new_wording") else "in_domain"
