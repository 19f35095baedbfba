"""Which acceptance gives the better of experience on and off? Sampled EM of lab policies under each of them.

    python bench/acceptance.py runs/lab [runs/lab-1 ...] [--quick] [--json] [key=value ...]

Needs folders of finished `make demo` runs (their world, store and policies; nothing is written there). Whatever is
calibrated or fitted is so on the training questions, with the policy that is then tested; EM is of the test questions.
"Wrong" is a hint whose sources are mostly of another family than the question, which the world knows and no arm does.
Intervals are paired by question, which says nothing about another world.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from hiexp.assemble import Agent, Config, engine_only, open_agent, open_samples, start_engine  # noqa: E402
from hiexp.config import ConfigError, load  # noqa: E402
from hiexp.data import Sample  # noqa: E402
from hiexp.effects import Forecast, noise  # noqa: E402
from hiexp.evaluation import difference, evaluate  # noqa: E402
from hiexp.hek import HEK  # noqa: E402
from hiexp.records import Attempt  # noqa: E402
from hiexp.rewards import score  # noqa: E402
from hiexp.trajectory import Trajectory, groups_of  # noqa: E402
from hiexp.uplift import Tried, entry_effects, improve, mine, records_of  # noqa: E402

POLICIES = ("policy", "grpo/policy", "grpo_hiexp/policy")
LOOSE = {"case_threshold": 0.8, "strategy_threshold": 0.5}
"""under which the gate's records are made: it must see what should not be shown"""


@dataclass(frozen=True)
class Arm:
    settings: Mapping[str, Any] = field(default_factory=dict)
    """changes of the hek section of the lab"""
    store: str = "built"
    """built; tried: with the table of questions; mended: with not_when too, and without harmful entries"""


ARMS = {
    "fixed 0.8": Arm({"case_threshold": 0.8, "strategy_threshold": 0.8}),
    "fixed": Arm(),
    "zscore": Arm({"accept": "zscore"}),
    "zscore+csls": Arm({"accept": "zscore", "csls": True}),
    "gate": Arm({"accept": "gate"}),
    "max_success": Arm(store="tried"),
    "min_uplift": Arm({"min_uplift": 0.0}, "tried"),
    "not_when": Arm(store="mended"),
    "min_uplift+not_when": Arm({"min_uplift": 0.0}, "mended"),
}
QUICK = ("fixed", "min_uplift")
GROUPS = ("all", "taught", "held_back")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="+", help="folders of finished demos, then settings key=value")
    parser.add_argument("--quick", action="store_true", help="one policy, two arms, few questions")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--policies", default=",".join(POLICIES), help="of these, those that are compared")
    parser.add_argument("--arms", default=",".join(ARMS), help="of these, those that are compared; fixed always is")
    arguments = parser.parse_args()
    arms = ["fixed", *(name for name in (QUICK if arguments.quick else arguments.arms.split(",")) if name != "fixed")]
    policies = POLICIES[:1] if arguments.quick else arguments.policies.split(",")
    if unknown := {*arms, *policies} - {*ARMS, *POLICIES}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    folders = [Path(word) for word in arguments.folder if "=" not in word]
    overrides = [word for word in arguments.folder if "=" in word]
    result: dict[str, Any] = {}
    for folder in folders:
        for policy in policies:
            start = time.process_time()
            found = compare(settings(folder, policy, overrides), arms, arguments.quick)
            seconds = round(time.process_time() - start, 1)
            result[f"{folder.name} {policy}"] = {"cpu_seconds": seconds, "arms": found}
            if not arguments.json:
                print(table(f"{folder.name} {policy} ({seconds:.0f} CPU seconds)", found), flush=True)
    if arguments.json:
        print(json.dumps(result))


def settings(folder: Path, policy: str, overrides: Sequence[str]) -> Config:
    world, seed = folder / "world", json.loads((folder / "summary.json").read_text())["seed"]
    given = [
        str(ROOT / "configs/lab.yaml"),
        f"seed={seed}",
        f"eval.seed={seed}",
        f"model.path={folder / policy}",
        *(f"data.{split}={world / split}.jsonl" for split in ("train", "test")),
        f"encoder.path={world / 'encoder.json'}",
        f"search.corpus=[{world / 'corpus.jsonl'}]",
        f"hek.path={folder / 'hek' / 'hek'}",
    ]
    return load(Config, [*given, *overrides])


def compare(cfg: Config, arms: Sequence[str], quick: bool) -> dict[str, Any]:
    """Per arm its scores, its differences to off and to fixed, and what it showed."""
    agent = open_agent(cfg)
    start_engine(agent, cfg, *engine_only(cfg))
    train, test = (open_samples(cfg.data, split)[:: 8 if quick else 1] for split in ("train", "test"))
    families = {sample.id: sample.family for sample in train}
    size = 1 if quick else cfg.eval.samples_per_question

    def ask(samples: Sequence[Sample], hek: HEK, seed: int) -> list[Trajectory]:
        found = agent.rollout_all(samples, seed, "rollouts", hek, group_size=size)
        score(found, samples, cfg.reward, size)
        return found

    def measured(hek: HEK) -> list[list[Trajectory]]:
        return groups_of(ask(train, hek, cfg.seed), size)

    with tempfile.TemporaryDirectory() as place:
        stores = prepare(cfg, agent, train, measured, arms, Path(place))
        runs = {"off": ask(test, HEK.empty(), cfg.eval.seed)}
        for name in (arm for arm in arms if arm in stores):
            runs[name] = ask(test, stores[name], cfg.eval.seed)
    scores = {name: evaluate(run, test, cfg.eval, size).attempts for name, run in runs.items()}
    return {
        name: {
            "em": {group: mean_em(attempts, group) for group in GROUPS},
            "to_off": {group: gap(scores["off"], attempts, group) for group in GROUPS},
            "to_fixed": {group: gap(scores["fixed"], attempts, group) for group in GROUPS},
            **hints(runs[name], test, families, agent.hek),
        }
        for name, attempts in scores.items()
    }


def prepare(
    cfg: Config,
    agent: Agent,
    train: Sequence[Sample],
    ask: Callable[[HEK], list[list[Trajectory]]],
    arms: Sequence[str],
    place: Path,
) -> dict[str, HEK]:
    """The store of each arm, all that it needs learned from training questions (which see nothing of their own)."""
    assert agent.encoder
    off = ask(HEK.empty())
    tried, gate = [Tried(*three) for three in zip(train, off, ask(agent.hek), strict=True)], ""
    if "gate" in arms:
        seen = ask(HEK.load(cfg.hek.path, agent.encoder, replace(cfg.hek, **LOOSE)))
        loose = [Tried(*three) for three in zip(train, off, seen, strict=True)]
        try:
            agent.hek.fit_gate(records_of(loose, cfg.rollout.case_key)).save(gate := str(place / "gate.json"))
        except ConfigError as error:
            print(f"no gate: {error}", file=sys.stderr)
    harmful = [entry for entry, effect in entry_effects(tried, cfg.uplift.level).items() if effect.high < 0]
    mined = mine(tried, agent.hek, cfg.rollout.case_key)
    improve(agent.hek, tried, {}, []).save(place / "tried")
    improve(agent.hek, tried, mined, harmful).save(place / "mended")
    most, paths = best_limit(tried, agent.hek), {"built": Path(cfg.hek.path)}
    facts = f"{len(harmful)} harmful entries, {sum(map(len, mined.values()))} not_when, max_success {most}"
    print(f"{cfg.model.path}: {facts}", file=sys.stderr)
    stores = {}
    for name, arm in ARMS.items():
        extra = {"gate": {"gate": gate}, "max_success": {"max_success": most}}.get(name, {})
        if name != "gate" or gate:
            changed = replace(cfg.hek, **{**arm.settings, **extra})
            stores[name] = HEK.load(paths.get(arm.store, place / arm.store), agent.encoder, changed)
    return stores


def best_limit(tried: Sequence[Tried], hek: HEK) -> float:
    """The max_success under which the training questions fare best, each half judged by the other."""
    rows, reward = hek.embed([one.sample.question for one in tried]), np.array([one.off_reward for one in tried])
    variances = np.array([noise(one.off_reward, len(one.off)) for one in tried])
    expected, half = np.zeros(len(tried)), np.arange(len(tried)) % 2 == 0
    for known in (half, ~half):
        forecast = Forecast(rows[known], reward[known], variances[known])
        expected[~known] = forecast(rows[~known], [None] * int((~known).sum()))[0]
    gains, limits = np.array([one.gain for one in tried]), np.arange(10, -1, -1) / 10  # of equals the loosest
    return float(limits[np.argmax([np.mean(gains * (expected <= limit)) for limit in limits])])


def of(attempts: Sequence[Attempt], group: str) -> list[Attempt]:
    return [one for one in attempts if group == "all" or one.family_group.startswith(group)]


def mean_em(attempts: Sequence[Attempt], group: str) -> float:
    return float(np.mean([one.scores["em"] for one in of(attempts, group)]))


def gap(first: Sequence[Attempt], second: Sequence[Attempt], group: str) -> list[float]:
    """Mean, low, high."""
    found = difference(of(first, group), of(second, group), "em")
    return [found.mean, found.low, found.high]


def hints(
    run: Sequence[Trajectory], samples: Sequence[Sample], families: Mapping[str, str], hek: HEK
) -> dict[str, Any]:
    """E2: share of questions that are shown a pattern, share of its sources that are of the question's family, share of
    questions whose pattern is mostly of another. E1: the same share of the cases, by attempt and case."""
    asked = {sample.id: sample.family for sample in samples}

    def fit(entry: str, sample_id: str) -> float:
        sources = [families[source] == asked[sample_id] for source in hek.by_id[entry].sample_ids if source in families]
        return sum(sources) / max(len(sources), 1)

    plans = {one.sample_id: [fit(entry, one.sample_id) for entry in one.strategies] for one in run}
    shown = [fits for fits in plans.values() if fits]
    cases = [fit(entry, one.sample_id) for one in run for turn in one.turns for entry in turn.cases]
    return {
        "coverage": len(shown) / len(samples),
        "purity": float(np.mean([np.mean(fits) for fits in shown])) if shown else None,
        "wrong": sum(np.mean(fits) < 0.5 for fits in shown) / len(samples),
        "cases": len(cases) / len(run),
        "wrong_cases": float(np.mean(np.array(cases) < 0.5)) if cases else None,
    }


def table(title: str, arms: Mapping[str, Any]) -> str:
    """Percent."""

    def percent(value: float | None) -> str:
        return "   -" if value is None else f"{100 * value:4.0f}"

    def change(values: Sequence[float]) -> str:
        return "{:+5.1f} [{:+5.1f},{:+5.1f}]".format(*(100 * value for value in values))

    head = f"{'arm':<20}  all taught held  to off: all         taught              held back           to fixed: all"
    lines = [title, f"{head}        E2 seen pure wrong   E1 a try wrong"]
    for name, arm in arms.items():
        scores = " ".join(f"{100 * arm['em'][group]:5.1f}" for group in GROUPS)
        gaps = " ".join(change(arm["to_off"][group]) for group in GROUPS)
        patterns = " ".join(percent(arm[key]) for key in ("coverage", "purity", "wrong"))
        cases = f"{arm['cases']:5.2f} {percent(arm['wrong_cases'])}"
        lines.append(f"{name:<20} {scores}  {gaps} {change(arm['to_fixed']['all'])}  {patterns}  {cases}")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
