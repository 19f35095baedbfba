"""What a store of experience really does, measured, and a store without what does harm.

    python -m hiexp.uplift configs/lab.yaml out=runs/uplift hek.path=runs/lab/hek/hek
    python evaluate.py configs/lab.yaml out=runs/eval hek.path=runs/uplift/hek hek.min_uplift=0
    python -m hiexp.uplift --help

The training questions are answered with and without experience from the same seeds, nothing shown that stems from the
question itself. Writes

    records.jsonl    {"query", "entry", "uplift", "sample_id"}: by what was an entry found, and what its question gained
    effects.json     per entry the uplift and its interval
    gate.json        hek.accept=gate hek.gate=..., where some entries helped and some did not
    hek/             the store with a table of the questions (hek.min_uplift, hek.max_success), with not_when, and
                     without the entries that are proven to do harm

A question's gain is that of its whole group: the attempts that came to a certain query are a selection. Rollouts are
kept: after a crash the same command goes on where it was. A store serves the policy it was measured with; entries are
best measured under a loose hek.case_threshold, for what is never shown has no uplift.
"""

import dataclasses
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hiexp.acceptance import Record, mine_not_when
from hiexp.assemble import Config, open_agent, open_samples, reward_judge
from hiexp.config import ConfigError, run_script
from hiexp.data import Sample, subset
from hiexp.effects import Effect, Forecast, Outcome, effects, noise
from hiexp.experience import Asked, without
from hiexp.hek import HEK
from hiexp.hek_stages import Models, forget_rollouts, roll_out
from hiexp.metrics import bootstrap_interval
from hiexp.resume import folder_hash
from hiexp.rewards import score
from hiexp.tracking import finish_run, open_run_folder, write_json, write_trajectories
from hiexp.trajectory import Trajectory, groups_of


@dataclass(frozen=True)
class Tried:
    """A question in both arms."""

    sample: Sample
    off: Sequence[Trajectory]
    on: Sequence[Trajectory]

    @property
    def off_reward(self) -> float:
        return sum(one.reward for one in self.off) / len(self.off)

    @property
    def on_reward(self) -> float:
        return sum(one.reward for one in self.on) / len(self.on)

    @property
    def gain(self) -> float:
        return self.on_reward - self.off_reward

    @property
    def variance(self) -> float:
        """Of the gain, for the attempts that were made."""
        return noise(self.off_reward, len(self.off)) + noise(self.on_reward, len(self.on))

    def shown(self, case_key: str) -> list[tuple[str, str]]:
        """(what it was found by, entry), each pair once."""
        question = self.sample.question
        pairs = [(question, entry) for one in self.on for entry in one.strategies]
        for turn in (turn for one in self.on for turn in one.turns):
            key = f"{question} {turn.argument}" if case_key == "question_query" else turn.argument
            pairs += [(key, entry) for entry in turn.cases]
        return list(dict.fromkeys(pairs))

    @property
    def shares(self) -> dict[str, float]:
        """Entry -> share of the attempts that saw it."""
        seen = Counter(entry for one in self.on for entry in _entries(one))
        return {entry: count / len(self.on) for entry, count in seen.items()}


def main(cfg: Config) -> None:
    if not cfg.hek.path:
        raise ConfigError("hek.path is not set; name the store that is to be measured")
    if not cfg.hek.exclude_self:
        raise ConfigError(
            "hek.exclude_self=false would show questions the lessons written with their answers; set true"
        )
    # the groups that these would leave out are the ones to be measured
    cfg = dataclasses.replace(cfg, hek=dataclasses.replace(cfg.hek, max_success=1.0, min_uplift=None))
    samples = subset(open_samples(cfg.data, "train"), cfg.uplift.questions, cfg.seed)
    agent, judge = open_agent(cfg), reward_judge(cfg)
    out = open_run_folder(cfg.out, cfg, resumable=True)
    models, size = Models(agent, cfg), cfg.uplift.attempts
    arms = []
    store = json.dumps([folder_hash(cfg.hek.path), dataclasses.asdict(cfg.hek)])
    for name, hek, key in (("off", None, ""), ("on", agent.hek, store)):
        trajectories = roll_out(models, samples, out, size, hek, key)
        score(trajectories, samples, cfg.reward, size, judge=judge)
        write_trajectories(out / f"trajectories_{name}.jsonl", trajectories)
        arms.append(groups_of(trajectories, size))
    tried = [Tried(*three) for three in zip(samples, *arms, strict=True)]
    summary = measure(tried, agent.hek, cfg, out)
    finish_run(out, summary)
    forget_rollouts(out)
    print(report(summary))


def measure(tried: Sequence[Tried], hek: HEK, cfg: Config, out: Path) -> dict[str, Any]:
    """Write everything but the trajectories; returns the summary."""
    level = cfg.uplift.level
    records = records_of(tried, cfg.rollout.case_key)
    lines = [json.dumps(dataclasses.asdict(record), ensure_ascii=False) + "\n" for record in records]
    (out / "records.jsonl").write_text("".join(lines), encoding="utf-8")
    found = entry_effects(tried, level)
    write_json(out / "effects.json", {entry: dataclasses.asdict(effect) for entry, effect in found.items()})
    gate = ""
    try:
        hek.fit_gate(records).save(out / "gate.json")
    except ConfigError as error:
        gate = str(error)
    harmful = sorted(entry for entry, effect in found.items() if effect.high < 0)
    mined = mine(tried, hek, cfg.rollout.case_key)
    improve(hek, tried, mined, harmful).save(out / "hek", overwrite=True)
    gains = [one.gain for one in tried]
    return {
        "hek": str(out / "hek"),
        "questions": len(tried),
        "attempts": cfg.uplift.attempts,
        "off": float(np.mean([one.off_reward for one in tried])),
        "on": float(np.mean([one.on_reward for one in tried])),
        "uplift": [float(np.mean(gains)), *bootstrap_interval(gains, cfg.seed)],
        "better": sum(gain > 0 for gain in gains),
        "worse": sum(gain < 0 for gain in gains),
        "level": level,
        "entries": {"shown": len(found), "help": sum(effect.low > 0 for effect in found.values()), "dropped": harmful},
        "not_when": {entry: len(queries) for entry, queries in mined.items()},
        "records": len(records),
        "gate": gate or str(out / "gate.json"),
    }


def records_of(tried: Sequence[Tried], case_key: str) -> list[Record]:
    """One for each question, entry and key that the entry was found by."""
    pairs = ((one, *pair) for one in tried for pair in one.shown(case_key))
    return [Record(key, entry, one.gain, one.sample.id) for one, key, entry in pairs]


def entry_effects(tried: Sequence[Tried], level: float) -> dict[str, Effect]:
    """Every entry that was shown."""
    outcomes = [Outcome(one.sample.id, 0, one.off_reward, True, one.on_reward, one.shares) for one in tried]
    return effects(outcomes, level, paired=True)


def mine(tried: Sequence[Tried], hek: HEK, case_key: str) -> dict[str, tuple[str, ...]]:
    """not_when for each entry: what it was found by where it did harm, as far as its questions together prove that.

    A single question of a few attempts proves nothing. An entry's gains are smoothed over the keys it was found by, and
    count as far as they are beyond two standard errors.
    """
    by_entry: dict[str, list[tuple[str, Tried]]] = defaultdict(list)
    for one in tried:
        for key, entry in one.shown(case_key):
            by_entry[entry].append((key, one))
    sure = []
    for entry, pairs in by_entry.items():
        keys, asked = [key for key, _ in pairs], [one for _, one in pairs]
        rows, gains = hek.embed(keys), np.array([one.gain for one in asked])
        forecast = Forecast(rows, gains, np.array([one.variance for one in asked]))
        means, errors = forecast(rows, range(len(keys)))
        for key, one, mean, error in zip(keys, asked, means, errors, strict=True):
            proven = float(np.sign(mean) * max(abs(mean) - 2 * error, 0.0))
            sure.append(Record(key, entry, proven, one.sample.id))
    return mine_not_when(sure, hek.by_id, hek.embed, least_cosine=-1.0, most_uplift=-1e-9)


def improve(hek: HEK, tried: Sequence[Tried], mined: Mapping[str, Sequence[str]], harmful: Sequence[str]) -> HEK:
    """The store without the harmful entries, with what was mined, and with both arms in its table of questions."""
    better = hek.with_not_when(mined)
    gone = set(harmful)
    entries = without(better.by_id.values(), gone)
    vectors = {
        level: better.vectors[level][[i for i, entry in enumerate(rows) if entry.id not in gone]]
        for level, rows in better.levels.items()
    }
    table = {(one.id, one.question): one for one in hek.asked}
    for one in tried:
        name = (one.sample.id, one.sample.question)
        rewards = ([t.reward for t in one.off], [t.reward for t in one.on])
        table[name] = table.get(name, Asked(*name)).after(*rewards)
    return HEK(entries, hek.encoder, hek.cfg, vectors, hek.settings).with_asked(list(table.values()))


def report(summary: Mapping[str, Any]) -> str:
    """One line a fact."""
    mean, low, high = summary["uplift"]
    entries, mined, dropped = summary["entries"], summary["not_when"], len(summary["entries"]["dropped"])
    asked = f"{summary['questions']} questions x {summary['attempts']} attempts"
    lines = [
        f"{asked}: reward {summary['off']:.3f} without experience, {summary['on']:.3f} with; uplift {mean:+.3f} "
        f"[{low:+.3f}, {high:+.3f}] (95%); better on {summary['better']} questions, worse on {summary['worse']}",
        f"{entries['shown']} entries were shown: {entries['help']} proven to help, {dropped} proven to do harm and "
        f"dropped (level {summary['level']:g}); {sum(mined.values())} not_when at {len(mined)} entries",
        f"gate: {summary['gate']} ({summary['records']} records)",
        f"store: {summary['hek']}",
    ]
    return "\n".join(lines)


def _entries(trajectory: Trajectory) -> set[str]:
    return {*trajectory.strategies, *(entry for turn in trajectory.turns for entry in turn.cases)}


if __name__ == "__main__":
    sys.exit(run_script(main, Config, sys.argv[1:], __doc__))
