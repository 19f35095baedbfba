"""Rollouts that never wait, against lock-step ones: the time that the same trajectories take.

    python bench/rollout.py [--quick] [--json]

Lock-step is what a loop around `generate` does: every active row writes its turn, then all queries are searched as one
batch, then all rows go on. Here it is `LockStep` around the same engine: its step returns when every row is done, and
the search is called in between. Both modes run `hiexp.rollout.run_rollouts`.

lockstep_ratio: makespan of lock-step / makespan of submit and step, on a virtual clock, the median over draws. Assumed:
    256 trajectories (32 questions, groups of 8) of 1 to 8 turns, 3.2 on average, the last of them the answer;
    tokens of a turn are lognormal, median 150 and sigma 1 (mean 250), at most 4,096, drawn independently;
    the engine batches continuously: one step writes one token for each of n running rows in 15 ms + 0.05 ms * n, and
    a row that joins adds 4 ms (about 800 new tokens of documents to read at 200,000 tokens/s);
    a query takes 0.1 s, one of 20 takes 3 s; the queries of a batch are searched side by side, one batch at a time;
    everything else takes no time. A row that is ready is submitted between two tokens of the others.
    Two variants beside it: half of the log-lengths' variance is the trajectory's own, so that its turns are long
    together; no search is slow. `bound` is the longest trajectory alone on the engine.

With vLLM, in this process and on one thread (its CPU build, or a GPU); both sides run in every round, the first round
is dropped, and the median of the rounds' ratios is reported:
    lockstep_ratio_vllm: the same in wall seconds. 64 trajectories of 4 turns of a small random model; tokens of a turn
        are lognormal, median 30 and sigma 1, at most 400. The search sleeps 5 ms, for one query of 20 0.15 s. That is
        the mix above with a fifth of its tokens, at about 4 ms a token. A row costs the CPU build a thirtieth of a
        step, ten times what is assumed above, so less is won: that cost model predicts 1.5 to 1.8.
    vllm_overhead: CPU seconds of run_rollouts on 64 trajectories of one turn of 64 tokens / those of `LLM.generate`
        with the same weights, prompts, seeds and settings, less 1. The ids are compared, and must be the same.
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from hiexp.config import ConfigError  # noqa: E402
from hiexp.data import Sample  # noqa: E402
from hiexp.engine import Completion, EngineConfig  # noqa: E402
from hiexp.hek import HEK  # noqa: E402
from hiexp.model import full_parameters  # noqa: E402
from hiexp.protocols import PROTOCOLS, Action, Pieces  # noqa: E402
from hiexp.rollout import RolloutConfig, run_rollouts  # noqa: E402
from hiexp.sampling import Sampling, derive_seed  # noqa: E402
from hiexp.tracking import Timer  # noqa: E402
from hiexp.trajectory import Document, Source, Trajectory  # noqa: E402
from hiexp.vllm_engine import VLLMEngine  # noqa: E402

QUESTIONS, GROUP = 32, 8
MAX_TURNS, MEDIAN_TOKENS, SIGMA, MAX_TURN_TOKENS = 8, 150, 1.0, 4096
STEP_SECONDS, ROW_SECONDS, JOIN_SECONDS = 0.015, 0.00005, 0.004
SEARCH_SECONDS, SLOW_SECONDS, SLOW_SHARE = 0.1, 3.0, 0.05
VLLM_SEARCH_SECONDS, VLLM_SLOW_SECONDS = 0.005, 0.15
VARIANTS = {"as stated": {}, "long turns together": {"shared": 0.5}, "no slow search": {"slow_share": 0.0}}

Plan = dict[Any, list[int]]
"""(question, member) -> the tokens of each turn"""


class Clock:
    now = 0.0
    """seconds, which pass because someone says so"""


class VirtualEngine:
    """Continuous batching on a virtual clock. `plan[key]`: the tokens of each turn of a row, the last is the answer."""

    version, max_length, streams = 0, 1 << 20, True

    def __init__(self, clock: Clock, tokenizer: "Letters", plan: Plan) -> None:
        self.clock, self.tokenizer, self.plan = clock, tokenizer, plan
        self._turn = dict.fromkeys(plan, 0)
        self._left: dict[Any, int] = {}
        self._joined = 0

    @property
    def pending(self) -> int:
        return len(self._left)

    def submit(self, key: Hashable, prompt_ids: list[int], max_tokens: int, sampling: Sampling) -> None:
        self._left[key] = self.plan[key][self._turn[key]]
        self._joined += 1

    def step(self) -> list[tuple[Any, Completion]]:
        """One token for every running row."""
        if not self._left:
            return []
        self.clock.now += STEP_SECONDS + ROW_SECONDS * len(self._left) + JOIN_SECONDS * self._joined
        self._joined = 0
        self._left = {key: left - 1 for key, left in self._left.items()}
        done = [key for key, left in self._left.items() if not left]
        return [(key, self._finish(key)) for key in done]

    def _finish(self, key: Any) -> Completion:
        del self._left[key]
        self._turn[key] += 1
        is_last = self._turn[key] == len(self.plan[key])
        text = "<answer> a </answer>" if is_last else f"<search> {key} {self._turn[key]} </search>"
        ids = self.tokenizer(text)["input_ids"]
        return Completion(tuple(ids), (0.0,) * len(ids), "stop")

    def forget(self, keys: Iterable[Hashable]) -> None:
        pass


class LockStep:
    """An engine that steps until every row is done: those that are done wait for those that are not."""

    streams = False

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def step(self) -> list[tuple[Any, Completion]]:
        finished = []
        while self._engine.pending:
            finished += self._engine.step()
        return finished

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class VirtualSearch:
    """Answers at once and says how long that took: `seconds` of the last batch, that of its slowest query."""

    def __init__(self, latency: Callable[[str], float]) -> None:
        self.latency, self.seconds = latency, 0.0

    def search(self, queries: list[str], top_k: int) -> list[list[Document]]:
        self.seconds = max(map(self.latency, queries))
        return [[Document("t", f"about {query}")] for query in queries]


class VirtualRunner:
    """A `hiexp.background.Runner`: the batch is done once the clock says so, and waiting for it moves the clock."""

    def __init__(self, clock: Clock, search: VirtualSearch) -> None:
        self.clock, self.search = clock, search

    def submit(self, call: Callable[[], Any], /) -> "VirtualRunner":
        self._result = call()
        self._end = self.clock.now + self.search.seconds
        return self

    def done(self) -> bool:
        return self.clock.now >= self._end

    def result(self) -> Any:
        self.clock.now = max(self.clock.now, self._end)
        return self._result


class Letters:
    """One id per character, 256 of them; no end of sequence."""

    eos_token_id = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(character) for character in text]}

    def __len__(self) -> int:
        return 256

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(map(chr, ids))

    def convert_ids_to_tokens(self, token: int) -> str:
        return chr(token)


def draw(seed: int, shared: float = 0.0, slow_share: float = SLOW_SHARE) -> tuple[Plan, Callable[[str], float]]:
    """The tokens of each turn of each row, and the seconds that each query takes.

    shared: part of the log-lengths' variance that all turns of a trajectory have in common.
    """
    rng = np.random.default_rng(seed)
    plan = {}
    for key in ((i, member) for i in range(QUESTIONS) for member in range(GROUP)):
        turns = min(1 + rng.poisson(2.2), MAX_TURNS)
        spread = math.sqrt(shared) * rng.normal() + math.sqrt(1 - shared) * rng.normal(size=turns)
        plan[key] = np.clip(MEDIAN_TOKENS * np.exp(SIGMA * spread), 1, MAX_TURN_TOKENS).astype(int).tolist()
    slow: dict[str, bool] = {}
    for key, tokens in plan.items():
        slow |= {f"{key} {turn}": bool(rng.random() < slow_share) for turn in range(1, len(tokens))}
    return plan, lambda query: SLOW_SECONDS if slow[query] else SEARCH_SECONDS


def makespan(plan: Plan, latency: Callable[[str], float], lock_step: bool) -> float:
    """Virtual seconds until the last trajectory has its answer."""
    clock, tokenizer, search = Clock(), Letters(), VirtualSearch(latency)
    engine: Any = VirtualEngine(clock, tokenizer, plan)
    questions, members = (1 + max(column) for column in zip(*plan, strict=True))
    cfg = RolloutConfig(group_size=members, max_turns=MAX_TURNS, max_response_tokens=1 << 19)
    trajectories = run_rollouts(
        LockStep(engine) if lock_step else engine,
        tokenizer,
        PROTOCOLS["compact"],
        search,
        HEK.empty(),
        [Sample(str(i), f"question {i}", ("a",)) for i in range(questions)],
        cfg,
        seed=0,
        search_runner=VirtualRunner(clock, search),
    )
    turns = [len(trajectory.turns) for trajectory in trajectories]
    assert turns == [len(tokens) for tokens in plan.values()], "both modes must play the same trajectories"
    return clock.now


def compare_virtual(draws: int, **mix: float) -> dict[str, float]:
    """Medians over the draws; the ratio is taken within a draw."""
    lines = []
    for seed in range(draws):
        plan, latency = draw(seed, **mix)
        lock_step, streamed = makespan(plan, latency, True), makespan(plan, latency, False)
        bound = max(map(sum, plan.values())) * STEP_SECONDS
        lines.append((lock_step / streamed, lock_step, streamed, bound))
    medians = [statistics.median(column) for column in zip(*lines, strict=True)]
    return dict(zip(("ratio", "lock-step s", "streamed s", "bound s"), medians, strict=True))


class Chatter:
    """A protocol for a model that writes letters at random: whatever a turn holds, it is a query, or the answer."""

    searches, stop, refuses_repeats = True, (), True

    def __init__(self, kind: Literal["search", "answer"]) -> None:
        self.name = self.kind = kind

    def prompt(self, question: str, strategy: str, tokenizer: Any) -> Pieces:
        return [(Source.PROMPT, question)]

    def parse(self, text: str) -> Action:
        return Action(self.kind, text, len(text))

    def observation(self, documents: Sequence[Document], case: str, notice: str, asked: Any = None) -> Pieces:
        return [(Source.DOCUMENT, document.text) for document in documents] or [(Source.NOTICE, notice)]


class LongTail:
    """An engine whose turns have drawn lengths: `plan[key]` holds the tokens of each turn of a row."""

    def __init__(self, engine: Any, plan: Plan) -> None:
        self._engine, self._lengths = engine, {key: iter(tokens) for key, tokens in plan.items()}

    def submit(self, key: Hashable, prompt_ids: list[int], max_tokens: int, sampling: Sampling) -> None:
        self._engine.submit(key, prompt_ids, min(max_tokens, next(self._lengths[key])), sampling)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class SleepySearch:
    """Takes as long as the slowest query of the batch."""

    def search(self, queries: list[str], top_k: int) -> list[list[Document]]:
        slow = any(zlib.crc32(query.encode()) % 20 == 0 for query in queries)
        time.sleep(VLLM_SLOW_SECONDS if slow else VLLM_SEARCH_SECONDS)
        return [[Document("t", "a document of some length")] for _ in queries]


def compare_vllm(rounds: int) -> dict[str, float]:
    """Ratios of rounds that alternate; the folder of the model is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        model = build_model()
        model.save_pretrained(folder)
        engine = VLLMEngine(EngineConfig("vllm"), folder, Letters(), Sampling(), "float32")
        engine.load_weights(full_parameters(model), 0)
        bare = open_bare(folder)
        lock_steps = [lock_step_round(engine, seed) for seed in range(rounds + 1)][1:]
        overheads = [overhead_round(engine, bare, seed) for seed in range(rounds + 1)][1:]
        engine.close()
    return {
        "ratio": statistics.median(line[0] for line in lock_steps),
        "lock-step s": statistics.median(line[1] for line in lock_steps),
        "streamed s": statistics.median(line[2] for line in lock_steps),
        "same": min(line[3] for line in lock_steps),
        "overhead": statistics.median(overheads) - 1,
    }


def build_model() -> Qwen2ForCausalLM:
    """About 0.5M parameters: what vLLM and this project do around the model is most of the time."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Qwen2ForCausalLM(config)


def open_bare(folder: str) -> Any:
    from vllm import LLM  # after VLLMEngine has set its environment

    return LLM(
        folder,
        skip_tokenizer_init=True,
        dtype="float32",
        generation_config="vllm",
        enforce_eager=not torch.cuda.is_available(),
        enable_chunked_prefill=torch.cuda.is_available(),
        kv_cache_memory_bytes=1 << 30,
        disable_log_stats=True,
    )


def play(engine: Any, protocol: Chatter, questions: int, seed: int, **changes: Any) -> list[Trajectory]:
    cfg = RolloutConfig(group_size=1, top_p=1.0, max_malformed=0, strategy_level=0, use_cases=False, **changes)
    samples = [Sample(str(i), f"question {i} of {questions}", ("a",)) for i in range(questions)]
    return run_rollouts(engine, Letters(), protocol, SleepySearch(), HEK.empty(), samples, cfg, seed)


def lock_step_round(engine: Any, seed: int) -> tuple[float, float, float, float]:
    """(ratio, lock-step seconds, streamed seconds, share of trajectories with the same ids), of one round."""
    seconds, made = [], []
    lengths = np.clip(30 * np.exp(np.random.default_rng(seed).normal(size=(64, 4))), 1, 400).astype(int)
    plan = {(i, 0): row for i, row in enumerate(lengths.tolist())}
    for one in (LockStep(LongTail(engine, plan)), LongTail(engine, plan)):
        with Timer() as timer:
            made.append(play(one, Chatter("search"), len(plan), seed, max_turns=4, max_turn_tokens=400))
        seconds.append(timer.wall)
    same = [a.token_ids == b.token_ids for a, b in zip(*made, strict=True)]
    return seconds[0] / seconds[1], *seconds, sum(same) / len(same)


def overhead_round(engine: Any, bare: Any, seed: int) -> float:
    """CPU seconds of run_rollouts / of `LLM.generate`, for the same tokens."""
    from vllm import SamplingParams

    tokens = 64
    with Timer() as ours:
        made = play(engine, Chatter("answer"), 64, seed, max_turns=1, max_turn_tokens=tokens)
    prompts = [{"prompt_token_ids": trajectory.token_ids[:-tokens]} for trajectory in made]
    seeds = [derive_seed(seed, i, 0, 0) % 2**63 for i in range(len(made))]
    parameters = [
        SamplingParams(seed=one, max_tokens=tokens, detokenize=False, logprobs=0, flat_logprobs=True) for one in seeds
    ]
    with Timer() as theirs:
        outputs = bare.generate(prompts, parameters, use_tqdm=False)
    for trajectory, output in zip(made, outputs, strict=True):
        if list(output.outputs[0].token_ids) != trajectory.token_ids[-tokens:]:
            raise RuntimeError("run_rollouts and LLM.generate sampled different ids: nothing can be compared")
    return ours.cpu / theirs.cpu


def show(result: dict[str, Any]) -> str:
    lines = [f"{'':<22}{'ratio':>8}{'lock-step s':>13}{'streamed s':>12}{'bound s':>10}"]
    for name, line in result["virtual"].items():
        numbers = f"{line['ratio']:>8.2f}{line['lock-step s']:>13.1f}{line['streamed s']:>12.1f}"
        lines.append(f"{name:<22}{numbers}{line['bound s']:>10.1f}")
    if result["vllm_overhead"] is None:
        return "\n".join([*lines, f"vLLM: not measured ({result['reason']})"])
    line = result["vllm"]
    numbers = f"{line['ratio']:>8.2f}{line['lock-step s']:>13.1f}{line['streamed s']:>12.1f}"
    lines.append(f"{'vLLM, wall time':<22}{numbers}   ({line['same']:.0%} of the trajectories have the same ids)")
    return "\n".join([*lines, f"overhead over LLM.generate: {line['overhead']:.1%}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 draws and 2 rounds instead of 11 and 7")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # more threads than free cores slow small models down ten times
    virtual = {name: compare_virtual(3 if arguments.quick else 11, **mix) for name, mix in VARIANTS.items()}
    result: dict[str, Any] = {
        "lockstep_ratio": virtual["as stated"]["ratio"],
        "vllm_overhead": None,
        "virtual": virtual,
    }
    try:
        result["vllm"] = compare_vllm(2 if arguments.quick else 7)
        result["lockstep_ratio_vllm"], result["vllm_overhead"] = result["vllm"]["ratio"], result["vllm"]["overhead"]
    except ConfigError as error:
        result["reason"] = str(error)
    print(json.dumps(result) if arguments.json else show(result))


if __name__ == "__main__":
    main()
