"""The closed loop: while a policy trains, what it finds out goes back into the HEK, and what does not help leaves it.

    each step            groups with a success and a failure are kept (their rollouts exist already), and of every
                         group what it was shown and how it fared; some whole groups get no experience, for comparison
    every N steps   1    the policy as it is now reflects on the newest kept groups
                    2    lessons join the store; entries go whose uplift is not above zero, or that nothing asks for
                    3    patterns and strategies follow where their members changed (hek_update.py)
                    4    held-out training questions are answered with the old version and with the new one; the new
                         one is taken unless it is worse by more than chance

    <out>/hek/v0000, v0001, ...      every version, immutable; a trajectory names the one it could be shown
    <out>/hek/rejected_step000050    one that was not taken
    <out>/hek/kept                   replies of the reflector; a cap on calls or tokens is for all refreshes together

Old log-probs stay valid across a swap, because what was shown is in a trajectory's own tokens.
"""

import math
import shutil
import statistics
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hiexp.api_client import AGAIN, BudgetReached
from hiexp.assemble import Agent, Config
from hiexp.config import ConfigError
from hiexp.data import Sample
from hiexp.distributed import Context
from hiexp.effects import Effect, Outcome, effects
from hiexp.experience import Asked
from hiexp.hek import HEK
from hiexp.hek_build import Pair, contrastive_pairs, reflect
from hiexp.hek_report import BuildReport
from hiexp.hek_stages import Models, open_reflectors, say
from hiexp.hek_update import Book, RefreshConfig, in_a_new_run, next_version
from hiexp.rewards import score
from hiexp.shards import sync
from hiexp.success import is_success
from hiexp.tracking import timed
from hiexp.trajectory import Trajectory, groups_of

FADE = 0.5
"""weight of what was known of a question without experience, each time that it is answered without it again"""
PRIOR_ATTEMPTS = 4.0
"""attempts that the mean over all questions counts as, in a question's own mean"""


class ClosedLoop:
    """State of the loop, and the refreshes. Without refresh.every there is none, only the reward of either arm."""

    def __init__(self, agent: Agent, cfg: Config, samples: Sequence[Sample], ctx: Context) -> None:
        self.agent, self.cfg, self.ctx, self.folder = agent, cfg, ctx, Path(cfg.out) / "hek"
        is_math = cfg.build.prompts == "math"
        self._judge = partial(is_success, max_words=cfg.build.success_max_words, is_math=is_math)
        self.held_out, self.trained = held_out(samples, cfg.refresh, cfg.seed)
        self._samples = {sample.id: sample for sample in samples}
        self._pairs: dict[str, list[Any]] = {}  # sample id -> right and wrong as JSON, the newest question last
        self._outcomes: list[list[Any]] = []  # Outcome fields
        self._unaided: dict[str, list[float]] = {}  # sample id -> [sum of rewards, attempts], fading
        self._overall = [0.0, 0.0]  # the same over all questions
        self._rewards: dict[str, list[list[float]]] = {}  # sample id -> without and with experience, since a refresh

    def open(self) -> None:
        """Write down the store that the run begins with, and begin with what it knows of the questions."""
        if not self.cfg.refresh.every:
            return
        self.agent.hek = in_a_new_run(self.agent.hek)
        for asked in self.agent.hek.asked:
            self._unaided[asked.id] = [asked.off_reward * asked.off_count, float(asked.off_count)]
        self._overall = [float(sum(known)) for known in zip(*self._unaided.values(), strict=True)] or [0.0, 0.0]
        self.ctx.on_main(lambda: self.agent.hek.save(self.path, overwrite=True), "hek")

    @property
    def path(self) -> str:
        """Folder of the store in use; empty if there is none."""
        return str(self._version_folder(self.agent.hek.version)) if self.cfg.refresh.every else self.cfg.hek.path

    def after_step(self, step: int, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Harvest a step's groups (all that were drawn, trained on or not), refresh if it is time, and report."""
        groups, every = groups_of(trajectories, self.cfg.rollout.group_size), self.cfg.refresh.every
        metrics = arm_rewards(groups)
        if not every:
            return metrics
        metrics |= self._staleness(step, groups)
        self._harvest(step, groups)
        if (step + 1) % every == 0:
            with timed(metrics, "refresh"):
                metrics |= self._refresh(step)
        return metrics | {"hek/version": float(self.agent.hek.version)}

    def state(self) -> dict[str, Any]:
        return {
            "version": self.agent.hek.version,
            "pairs": list(self._pairs.items()),  # their order counts
            "outcomes": list(self._outcomes),
            "unaided": dict(self._unaided),
            "overall": list(self._overall),
            "rewards": {key: [list(arm) for arm in arms] for key, arms in self._rewards.items()},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint, with the version of the store that it was trained with."""
        if state["version"] != self.agent.hek.version:
            assert self.agent.encoder is not None
            self.agent.hek = HEK.load(self._version_folder(state["version"]), self.agent.encoder, self.cfg.hek)
        self._pairs = {name: pair for name, pair in state["pairs"] if name in self._samples}
        self._outcomes = [list(one) for one in state["outcomes"]]
        self._unaided = {key: list(value) for key, value in state["unaided"].items()}
        self._overall = list(state["overall"])
        self._rewards = {
            key: [list(arm) for arm in arms] for key, arms in state["rewards"].items() if key in self._samples
        }

    def _harvest(self, step: int, groups: Sequence[Sequence[Trajectory]]) -> None:
        """Keep what a refresh will need of a step's groups."""
        unaided: list[tuple[str, float, int]] = []
        for group in groups:
            sample, mean, hinted = self._samples[group[0].sample_id], _mean_reward(group), _is_hinted(group)
            self._outcomes.append([sample.id, step, self._prior(sample.id), hinted, mean, shown_shares(group)])
            if not hinted:
                unaided.append((sample.id, mean, len(group)))
            self._rewards.setdefault(sample.id, [[], []])[hinted] += [one.reward for one in group]
            for pair in contrastive_pairs([group], [sample], self._judge):
                self._pairs.pop(sample.id, None)
                self._pairs[sample.id] = [replace(one, segments=[]).to_json() for one in (pair.right, pair.wrong)]
        for sample_id, mean, attempts in unaided:
            _count(self._unaided.setdefault(sample_id, [0.0, 0.0]), mean, attempts, FADE)
            _count(self._overall, mean, attempts, 1 - 0.1 / len(unaided))
        since = step - self.cfg.refresh.unused_steps
        self._outcomes = [one for one in self._outcomes if one[1] > since]
        while len(self._pairs) > self.cfg.refresh.groups:
            del self._pairs[next(iter(self._pairs))]

    def _staleness(self, step: int, groups: Sequence[Sequence[Trajectory]]) -> dict[str, float]:
        """Share of what was shown that is older than refresh.unused_steps."""
        born = self.agent.hek.settings.get("refresh", {}).get("born", {})
        shown = [(name, share) for group in groups for name, share in shown_shares(group).items()]
        old = sum(share for name, share in shown if step - born.get(name, 0) >= self.cfg.refresh.unused_steps)
        return {"hek/staleness": old / sum(share for _, share in shown)} if shown else {}

    def _prior(self, sample_id: str) -> float:
        """Mean reward that a question is worth without experience, as far as is known."""
        total, attempts = self._unaided.get(sample_id, (0.0, 0.0))
        overall = self._overall[0] / self._overall[1] if self._overall[1] else 0.0
        return (total + PRIOR_ATTEMPTS * overall) / (attempts + PRIOR_ATTEMPTS)

    def _refresh(self, step: int) -> dict[str, float]:
        """A new version, if there is anything to learn and it is not worse than the old one."""
        candidate = self.folder / "candidate"
        counts = self.ctx.on_main(lambda: self._write_candidate(step, candidate), "refresh")
        if not counts:
            return {"refresh/accepted": 0.0}
        if not is_new(counts):
            self._pairs.clear()
            return {f"refresh/{name}": float(value) for name, value in {**counts, "accepted": False}.items()}
        encoder = self.agent.encoder
        assert encoder is not None
        new = HEK.load(candidate, encoder, self.cfg.hek)
        self.ctx.barrier("refresh")  # before rank 0 moves what the others are reading
        difference, error = self._compare(new, step)
        is_accepted = difference >= 0 or difference >= -self.cfg.refresh.gate_tolerance * error
        place = self._version_folder(new.version) if is_accepted else self.folder / f"rejected_step{step + 1:06d}"
        self.ctx.on_main(lambda: _move(candidate, place), "refresh")
        if is_accepted:
            self.agent.hek = new
            self._rewards.clear()
        self._pairs.clear()  # a rejected version would come again from the same groups
        if self.ctx.is_main:
            what = ", ".join(f"{int(counts[name])} {name}" for name in ("added", "merged", "removed", "abstracted"))
            verdict = f"reward on held-out questions {difference:+.3f} (standard error {error:.3f})"
            say(f"step {step}: {place.name}: {what}; {verdict}: {'taken' if is_accepted else 'not taken'}")
        gate = {"gate_difference": difference, "gate_error": error, "accepted": float(is_accepted)}
        return {f"refresh/{name}": float(value) for name, value in (counts | gate).items()}

    def _write_candidate(self, step: int, folder: Path) -> dict[str, float]:
        """Reflect, remove, merge and abstract; no counts where an endpoint failed or a cap is reached. Rank 0 alone."""
        agent, hek = self.agent, self.agent.hek
        assert hek.encoder is not None
        seed = (self.cfg.seed * 1_000_003 + step) % 2**40
        writers = open_reflectors(Models(agent, replace(self.cfg, seed=seed)), hek.encoder, self.folder)
        reflector, abstractor = (replace(writer, progress=None, say=lambda _: None) for writer in writers)
        report, golds = BuildReport(), {sample.id: sample.answers for sample in self._samples.values()}
        try:
            lessons = reflect(reflector, self._newest_pairs(), report)
            outcomes = [Outcome(*one) for one in self._outcomes]
            gone = unhelpful(hek, effects(outcomes), outcomes, step, len(lessons), self.cfg.refresh)
            made = (abstractor, golds, self.cfg.build, self.cfg.refresh.merge_threshold, step)
            new, counts = next_version(hek, lessons, gone, *made)
            new = new.with_asked(self._asked())
        except (BudgetReached, ConfigError) as stop:
            if isinstance(stop, ConfigError) and not (self.cfg.build.reflector.url or self.cfg.build.abstractor.url):
                raise
            # the store is as good as it was, and hours of training are not to be lost to somebody else's server
            why = str(stop).removesuffix(AGAIN)
            warnings.warn(f"step {step}: the HEK was not refreshed, the next refresh tries again: {why}", stacklevel=2)
            return {}
        if is_new(counts):
            new.save(folder, overwrite=True)
        return {"pairs": len(self._pairs), "lessons": len(lessons), **counts}

    def _asked(self) -> list[Asked]:
        """The store's table of questions with the rewards since the last refresh; what is older counts half."""
        table = {one.id: one.faded() for one in self.agent.hek.asked}
        for name, (off, on) in self._rewards.items():
            table[name] = table.get(name, Asked(name, self._samples[name].question)).after(off, on)
        return sorted(table.values(), key=lambda one: one.id)

    def _newest_pairs(self) -> list[Pair]:
        """The newest question first."""
        found = list(self._pairs.items())[::-1]
        return [Pair(self._samples[name], *map(Trajectory.from_json, pair)) for name, pair in found]

    def _compare(self, new: HEK, step: int) -> tuple[float, float]:
        """Mean difference in reward, new - old, over the held-out questions, and its standard error; same seeds."""
        questions, tensor_parallel = self.held_out, self.cfg.engine.tensor_parallel
        if not questions:
            return 0.0, 0.0
        first, last = self.ctx.share(len(questions), tensor_parallel)
        part, size = questions[first:last], self.cfg.refresh.gate_samples
        means = []
        for hek in (self.agent.hek, new):
            found = self.agent.rollout(part, (self.cfg.seed * 1_000_003 + step), hek, first=first, group_size=size)
            rows = self.ctx.gather(found if self.ctx.leads(tensor_parallel) else [], "gate")
            attempts = [one for row in rows for one in row]
            means.append(score(attempts, questions, self.cfg.reward, size, judge=self.agent.judge).mean(dim=1).numpy())
        return mean_and_error(means[1] - means[0])

    def _version_folder(self, version: int) -> Path:
        return self.folder / f"v{version:04d}"


def is_new(counts: Mapping[str, float]) -> bool:
    """Whether a version differs from the one that it was made of."""
    return any(counts[name] for name in ("added", "merged", "removed", "abstracted"))


def held_out(samples: Sequence[Sample], cfg: RefreshConfig, seed: int) -> tuple[list[Sample], list[Sample]]:
    """(questions that compare versions, questions to train on); ConfigError if too few would be left."""
    count = cfg.gate_questions if cfg.every else 0
    if count > len(samples) // 2:
        raise ConfigError(
            f"refresh.gate_questions={count} would take more than half of the {len(samples)} training questions; "
            "lower it (0 = take every new version)"
        )
    chosen = set(np.random.default_rng([seed, 1]).permutation(len(samples))[:count].tolist())
    return [s for i, s in enumerate(samples) if i in chosen], [s for i, s in enumerate(samples) if i not in chosen]


def arm_rewards(groups: Sequence[Sequence[Trajectory]]) -> dict[str, float]:
    """Mean reward of the groups with experience and of those without; nothing where no group had any."""
    hinted = [_mean_reward(group) for group in groups if _is_hinted(group)]
    others = [_mean_reward(group) for group in groups if not _is_hinted(group)]
    if not hinted:
        return {}
    metrics = {"hek/hinted_frac": len(hinted) / len(groups), "reward/hinted": statistics.fmean(hinted)}
    return metrics | ({"reward/unhinted": statistics.fmean(others)} if others else {})


def shown_shares(group: Sequence[Trajectory]) -> dict[str, float]:
    """Entry id -> share of the group's attempts that saw it, in the prompt or beside documents."""
    seen = Counter(
        name for one in group for name in {*one.strategies, *(case for turn in one.turns for case in turn.cases)}
    )
    return {name: count / len(group) for name, count in sorted(seen.items())}


def unhelpful(
    hek: HEK,
    found: Mapping[str, Effect],
    outcomes: Sequence[Outcome],
    step: int,
    incoming: int,
    cfg: RefreshConfig,
) -> set[str]:
    """Ids that leave the store: without proven uplift after min_uses groups, unused, or beyond max_cases.

    With a pattern or strategy go the lessons that it was made of, save those whose own uplift is proven.
    """

    def is_tried(name: str) -> bool:
        return name in found and found[name].uses >= cfg.min_uses

    gone = {name for name in hek.by_id if is_tried(name) and found[name].low < 0}
    for level in (3, 2):
        for entry in hek.levels[level]:
            if entry.id in gone:
                gone |= {child for child in entry.child_ids if not is_tried(child) or found[child].low < 0}
    born, seen = Book.of(hek).born, {name for one in outcomes for name in one.shown}
    for case in hek.levels[1]:
        is_old = step + 1 - born.get(case.id, 0) >= cfg.unused_steps
        pattern = hek.by_id.get(case.parent_id or "")
        if is_old and not seen & {case.id, case.parent_id, pattern and pattern.parent_id}:
            gone.add(case.id)
    left = [case.id for case in hek.levels[1] if case.id not in gone]
    worst = sorted(left, key=lambda name: (found[name].uplift if name in found else 0.0, name))
    return gone | set(worst[: max(0, len(left) + incoming - cfg.max_cases)])


def mean_and_error(differences: np.ndarray) -> tuple[float, float]:
    """Of paired differences [N]: mean, and its standard error (infinite for a single one)."""
    if len(differences) == 1:
        return float(differences[0]), math.inf
    return float(differences.mean()), float(differences.std(ddof=1) / math.sqrt(len(differences)))


def _mean_reward(group: Sequence[Trajectory]) -> float:
    return statistics.fmean(one.reward for one in group)


def _is_hinted(group: Sequence[Trajectory]) -> bool:
    return group[0].hek_version >= 0


def _count(known: list[float], mean: float, attempts: int, fade: float) -> None:
    known[0], known[1] = fade * known[0] + mean * attempts, fade * known[1] + attempts


def _move(folder: Path, place: Path) -> None:
    """Into its place; a version of that name can only be the same one, from before a crash.

    On the disk before a checkpoint names it.
    """
    for path in (*folder.iterdir(), folder):
        sync(path)
    shutil.rmtree(place, ignore_errors=True)
    folder.rename(place)
    sync(place.parent)
