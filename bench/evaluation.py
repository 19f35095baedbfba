"""What an evaluation costs beside generating: the same completions by the engine alone and with all around them.

    python bench/evaluation.py configs/hotpotqa_cpu.yaml [--questions 32] [--rounds 3] [--quick] [--json]

Around the engine are prompts, parsing, searching, retrieval of experience, scoring, and the ledger that writes every
attempt to disk. One pass of evaluate.py's own loop is recorded: which ids were submitted before which step. Then, round
by round, that loop runs again, and the recording is played to the engine alone: the same prompts, seeds, batches and
completions (compared, and must be equal). `throughput` is CPU seconds alone / CPU seconds of the loop, the median over
rounds: 1 = everything else costs nothing. --quick: the lab's world and an untrained policy of its size, which is a
thousandth of a real model, so that what stands around it weighs as much as it ever can.
"""

import argparse
import json
import statistics
import sys
import tempfile
import warnings
from collections.abc import Hashable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from hiexp.assemble import Config, engine_only, open_agent, start_engine  # noqa: E402
from hiexp.config import load  # noqa: E402
from hiexp.distributed import Context  # noqa: E402
from hiexp.engine import Completion, Engine  # noqa: E402
from hiexp.eval_run import Ledger, open_benches, plan, run_arm  # noqa: E402
from hiexp.sampling import Sampling  # noqa: E402
from hiexp.tracking import Timer  # noqa: E402
from tests.untrained import untrained_lab  # noqa: E402

Batch = list[tuple[Hashable, list[int], int, Sampling]]


class Recorder:
    """An engine that remembers what was submitted before each step, and what came of it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.batches: list[Batch] = [[]]
        self.completions: list[dict[Hashable, tuple[int, ...]]] = []
        self.forgotten: list[list[Hashable]] = []

    def submit(self, key: Hashable, prompt_ids: list[int], max_tokens: int, sampling: Sampling) -> None:
        self.batches[-1].append((key, list(prompt_ids), max_tokens, sampling))
        self._engine.submit(key, prompt_ids, max_tokens, sampling)

    def step(self) -> list[tuple[Any, Completion]]:
        found = self._engine.step()
        self.completions.append({key: one.token_ids for key, one in found})
        self.batches.append([])
        return found

    def forget(self, keys: Iterable[Hashable]) -> None:
        self._engine.forget(keys)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def play(engine: Engine, recorded: Recorder) -> None:
    """The recorded requests, to the engine alone."""
    keys = set()
    for batch, wanted in zip(recorded.batches, recorded.completions, strict=False):
        for key, ids, max_tokens, sampling in batch:
            engine.submit(key, ids, max_tokens, sampling)
            keys.add(key)
        found = {key: one.token_ids for key, one in engine.step()}
        if found != wanted:
            raise RuntimeError("the engine alone did not write what it wrote before; nothing can be compared")
    engine.forget(keys)


def run(cfg: Config, rounds: int) -> dict[str, Any]:
    """Seconds of each side and their ratio, over the rounds."""
    benches = open_benches(cfg)
    arms = plan(cfg, benches)
    agent = open_agent(cfg)
    engine = start_engine(agent, cfg, *engine_only(cfg))
    whole, alone = [], []

    def evaluate() -> None:
        with tempfile.TemporaryDirectory() as folder:
            for arm in arms:
                run_arm(arm, cfg, agent, None, Ledger(Path(folder), arm, cfg, Context()), Context())

    agent.engine = recorded = Recorder(engine)  # type: ignore[assignment]
    evaluate()
    agent.engine = engine
    for _ in range(rounds):
        with Timer() as timer:
            evaluate()
        whole.append(timer.cpu)
        with Timer() as timer:
            play(engine, recorded)
        alone.append(timer.cpu)
    engine.close()
    tokens = sum(len(ids) for found in recorded.completions for ids in found.values())
    return {
        "throughput": round(statistics.median(a / b for a, b in zip(alone, whole, strict=True)), 4),
        "rounds": [round(a / b, 4) for a, b in zip(alone, whole, strict=True)],
        "cpu_seconds": round(statistics.median(whole), 2),
        "cpu_seconds_alone": round(statistics.median(alone), 2),
        "attempts": sum(len(arm.bench.samples) * arm.decoding.samples for arm in arms),
        "written_tokens": tokens,
        "arms": [arm.name for arm in arms],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", help="YAML file and key=value, as of evaluate.py")
    parser.add_argument("--questions", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        settings = [*untrained_lab(Path(folder)), "rollout.max_turn_tokens=40"] if given.quick else given.settings
        if not settings:
            parser.error("name a YAML file, or --quick")
        cfg = load(Config, [*settings, f"out={folder}/out", f"data.limit={given.questions}"])
        cfg = replace(cfg, eval=replace(cfg.eval, methods=("agent",)))
        result = run(cfg, given.rounds)
    print(json.dumps(result) if given.json else "\n".join(f"{name}: {value}" for name, value in result.items()))


if __name__ == "__main__":
    main()
