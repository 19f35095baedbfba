"""From prompt ids to sampled ids with their log-probs; never text in, never text out.

`TorchEngine` runs any transformers causal LM with full attention and defines what every other engine must do;
vllm_engine.py holds the fast one. A new engine is a class with the members of `Engine`.
Letters: n rows of a batch, S new tokens, L cached length, V vocabulary.
"""

from collections.abc import Container, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from hiexp.config import ConfigError
from hiexp.kv_cache import SlotCache
from hiexp.sampling import Sampling, sample, uniforms

PREFILL_TOKENS = 1024
"""new tokens of one prefill call: few enough for a core's cache with a tiny model, enough to keep a large one busy"""


@dataclass(frozen=True)
class Completion:
    """What one call returned for one row. A final eos, stop token or phantom id is among the ids."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """log-softmax of logits / temperature (greedy: temperature 1), before top-p"""
    finish: Literal["stop", "eos", "length", "broken"]
    """broken: the last id has no token (a model head wider than its vocabulary)"""


@dataclass(frozen=True)
class EngineConfig:
    """What samples the completions."""

    kind: Literal["torch", "vllm"] = "torch"
    """torch: any machine and model, for small runs and as the reference; vllm: many times as fast on a GPU"""
    tensor_parallel: int = 1
    """vllm: GPUs that hold one engine together; they must lie in one node (for models that do not fit on one)"""
    gpu_memory_fraction: float = 0.6
    """vllm on CUDA: share of the GPU's memory for its weights and cache, given back while the trainer works"""

    def __post_init__(self) -> None:
        if self.kind not in ("torch", "vllm"):
            raise ConfigError(f"kind={self.kind!r} must be torch or vllm")
        if self.tensor_parallel < 1:
            raise ConfigError(f"tensor_parallel={self.tensor_parallel} must be at least 1")
        if self.kind == "torch" and self.tensor_parallel > 1:
            raise ConfigError(f"tensor_parallel={self.tensor_parallel} needs kind=vllm; torch is never split")
        if not 0 < self.gpu_memory_fraction < 1:
            raise ConfigError(f"gpu_memory_fraction={self.gpu_memory_fraction} must be between 0 and 1")


class Engine(Protocol):
    """Continuous batching without asyncio: submit rows, step, take whatever has finished."""

    version: int
    """of the weights that were loaded last, whole"""
    max_length: int
    """context window: prompt and completion together"""
    streams: bool
    """True: `step` goes one token further and returns what finished; False: it finishes all pending rows"""
    exact_logprobs: bool
    """False: the log-probs of rollouts are not those that `Completion` promises; good for nothing but a rough look"""

    @property
    def pending(self) -> int:
        """Rows submitted and not returned yet."""
        ...

    def submit(self, key: Hashable, prompt_ids: list[int], max_tokens: int, sampling: Sampling) -> None: ...

    def step(self) -> list[tuple[Any, Completion]]:
        """Advance; (key, completion) of the rows that finished, in any order, if any did."""
        ...

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace every weight; whatever was cached under the old ones is dropped."""
        ...

    def forget(self, keys: Iterable[Hashable]) -> None:
        """The caller is done with these rows; what is cached for them may go, and those that are pending end."""
        ...

    def sleep(self) -> None:
        """Give memory back while the trainer works; `load_weights` wakes the engine."""
        ...

    def close(self) -> None:
        """The engine's work is over, and so is that of process groups: nothing collective may follow."""
        ...


@dataclass
class Row:
    """A request and what has been sampled for it."""

    key: Hashable
    prompt: list[int]
    max_tokens: int
    sampling: Sampling
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str = ""

    def completion(self) -> Completion:
        return Completion(tuple(self.ids), tuple(self.logprobs), self.finish)  # type: ignore[arg-type]


class Endings:
    """Why a row is over, judged after every id; the same for every engine."""

    def __init__(self, tokenizer: Any, generation_config: Any) -> None:
        self.tokenizer = tokenizer
        eos = getattr(generation_config, "eos_token_id", None)
        ids = eos if isinstance(eos, (list, tuple)) else [eos]
        self.eos = frozenset(i for i in (*ids, tokenizer.eos_token_id) if i is not None)
        self._known: dict[int, bool] = {}
        self._closing: dict[tuple[str, ...], dict[int, bool]] = {}

    def finish(self, row: Row) -> str:
        """The `Completion.finish` of a row with a new last id; empty while it goes on."""
        token, stop = row.ids[-1], row.sampling.stop
        if token in self.eos:
            return "eos"
        if token not in self._known:
            self._known[token] = token < len(self.tokenizer) and bool(self.tokenizer.convert_ids_to_tokens(token))
        if not self._known[token]:
            return "broken"
        if stop and self._may_close(token, stop):
            text = decode(self.tokenizer, row.ids)
            if any(string in text for string in stop):
                return "stop"
        return "length" if len(row.ids) == row.max_tokens else ""

    def _may_close(self, token: int, stop: tuple[str, ...]) -> bool:
        """Whether this token can complete a stop string: most cannot, which saves decoding the row."""
        closing = self._closing.setdefault(stop, {})
        if token not in closing:
            text = decode(self.tokenizer, [token])
            # a piece of a character alone decodes to U+FFFD, and may complete any character
            closing[token] = "\ufffd" in text or any(string[-1] in text for string in stop)
        return closing[token]


class TorchEngine:
    """Batched generation over rows of different lengths, each starting at position 0, with a cache kept per key.

    `model` belongs to the engine (its weights change by `load_weights` only). A prompt that extends what is cached for
    its key costs the new tokens alone; otherwise the common prefix is kept. `step` runs until every row is done.
    """

    streams, exact_logprobs = False, True

    def __init__(self, model: Any, tokenizer: Any) -> None:
        _check_supported(model)
        self.model, self.tokenizer, self.version = model.eval().requires_grad_(False), tokenizer, 0
        self.max_length = int(model.config.max_position_embeddings)
        self._endings = Endings(tokenizer, getattr(model, "generation_config", None))
        self._pending: dict[Hashable, Row] = {}
        self._cache = SlotCache(model.device)
        self._clear()

    @property
    def pending(self) -> int:
        return len(self._pending)

    def submit(self, key: Hashable, prompt_ids: list[int], max_tokens: int, sampling: Sampling) -> None:
        check_request(key, prompt_ids, max_tokens, self.max_length, self._pending)
        self._pending[key] = Row(key, list(prompt_ids), max_tokens, sampling)

    def sleep(self) -> None:
        """Nothing: the weights stay where they are, and the cache is small."""

    close = sleep

    @torch.inference_mode()
    def step(self) -> list[tuple[Any, Completion]]:
        rows, self._pending = list(self._pending.values()), {}
        if not rows:
            return []
        self._place(rows)
        in_slot_order = sorted(rows, key=lambda row: self._slot[row.key])
        self._decode(in_slot_order, self._prefill(in_slot_order))
        for row in rows:
            self._cached[row.key] = row.prompt + row.ids[:-1]  # the last id was sampled but never fed
        return [(row.key, row.completion()) for row in rows]

    @torch.no_grad()
    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy every tensor in; ValueError for an unknown, misshaped or missing one. Tied names may come once."""
        own = dict(self.model.named_parameters(remove_duplicate=False))
        loaded = set()
        for name, tensor in named_tensors:
            if name not in own or own[name].shape != tensor.shape:
                shape = tuple(own[name].shape) if name in own else "absent"
                raise ValueError(
                    f"weight {name} of shape {tuple(tensor.shape)} does not fit the engine's model ({shape})"
                )
            own[name].copy_(tensor)
            loaded.add(id(own[name]))
        missing = [name for name, parameter in own.items() if id(parameter) not in loaded]
        if missing:
            raise ValueError(f"weights not given: {', '.join(missing[:3])} ({len(missing)} in all)")
        self.version = version
        self._clear()

    def forget(self, keys: Iterable[Hashable]) -> None:
        for key in keys:
            self._pending.pop(key, None)
            slot = self._slot.pop(key, None)
            if slot is not None:
                self._keys[slot] = None
                del self._cached[key]

    def _clear(self) -> None:
        """Nothing cached belongs to anyone any more; the memory stays, as what is in it is never read."""
        self._keys: list[Hashable | None] = []
        self._slot: dict[Hashable, int] = {}
        self._cached: dict[Hashable, list[int]] = {}

    def _place(self, rows: list[Row]) -> None:
        """Give each row a slot among the first len(rows), so that a batch is a view of the cache, not a copy."""
        pending = {row.key for row in rows}
        free = [slot for slot, key in enumerate(self._keys) if key is None]
        for row in rows:
            if row.key not in self._slot:
                slot = free.pop(0) if free else len(self._keys)
                self._keys[slot : slot + 1] = [row.key]
                self._slot[row.key], self._cached[row.key] = slot, []
        self._cache.reserve(len(self._keys), max(len(row.prompt) for row in rows))
        holes = [slot for slot in range(len(rows)) if self._keys[slot] not in pending]
        self._swap(holes, [slot for slot in range(len(rows), len(self._keys)) if self._keys[slot] in pending])

    def _swap(self, left: list[int], right: list[int]) -> None:
        self._cache.swap(left, right)
        for a, b in zip(left, right, strict=True):
            self._keys[a], self._keys[b] = self._keys[b], self._keys[a]
            for slot in (a, b):
                if self._keys[slot] is not None:
                    self._slot[self._keys[slot]] = slot

    def _prefill(self, rows: list[Row]) -> Tensor:
        """Feed what is not cached, equal new prompts once; returns the logits [n, V] after each prompt."""
        starts = [min(_common_prefix(self._cached[row.key], row.prompt), len(row.prompt) - 1) for row in rows]
        leader: dict[Any, int] = {}
        leads = [leader.setdefault(i if start else tuple(rows[i].prompt), i) for i, start in enumerate(starts)]
        order = sorted(set(leads), key=lambda i: len(rows[i].prompt) - starts[i])
        chunks: list[list[int]] = [[]]
        for i in order:  # ascending, so the newest row is the widest of its chunk
            if chunks[-1] and (len(chunks[-1]) + 1) * (len(rows[i].prompt) - starts[i]) > PREFILL_TOKENS:
                chunks.append([])
            chunks[-1].append(i)
        logits = torch.cat([self._prefill_chunk([rows[i] for i in c], c, [starts[i] for i in c]) for c in chunks])
        self._cache.copy([(lead, i) for i, lead in enumerate(leads) if lead != i])
        place = {i: k for k, i in enumerate(order)}
        return logits[torch.tensor([place[lead] for lead in leads], device=logits.device)]

    def _prefill_chunk(self, rows: list[Row], slots: list[int], starts: list[int]) -> Tensor:
        suffixes = [row.prompt[start:] for row, start in zip(rows, starts, strict=True)]
        width, length = max(map(len, suffixes)), max(len(row.prompt) for row in rows)
        device, dtype = self.model.device, self.model.dtype
        ids = torch.tensor([[0] * (width - len(s)) + s for s in suffixes], device=device)
        pads = torch.tensor([[width - len(s)] for s in suffixes], device=device)  # new tokens are aligned right
        column = torch.arange(width, device=device)
        positions = torch.tensor(starts, device=device)[:, None] + column - pads  # [n, S]
        hidden = torch.arange(length, device=device) > positions[:, :, None]
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, torch.finfo(dtype).min)
        index = torch.tensor(slots, device=device)
        self._cache.aim(index, index, torch.where(column < pads, self._cache.trash, positions), length)
        return self._forward(ids, positions.clamp(min=0), mask[:, None])

    def _forward(self, ids: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        output = self.model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]

    def _decode(self, rows: list[Row], logits: Tensor) -> None:
        """Sample until every row is done. Rows that are done ride along until enough of them can be left behind."""
        batch = _Batch(rows, self.model.dtype, self.model.device)
        while True:
            if not bool(torch.isfinite(logits.amax(-1)).all()):
                raise FloatingPointError(f"non-finite logits from the weights of version {self.version}")
            ids, logprobs = sample(logits, batch.temperature, batch.top_p, batch.uniform())
            for row, token, logprob in zip(batch.rows, ids.tolist(), logprobs.tolist(), strict=True):
                if not row.finish:
                    row.ids.append(token)
                    row.logprobs.append(logprob)
                    row.finish = self._endings.finish(row)
            alive = [i for i, row in enumerate(batch.rows) if not row.finish]
            if not alive:
                return
            if len(alive) <= 0.8 * len(batch.rows):
                keep = self._compact(len(batch.rows), alive)
                ids = ids[keep]
                batch.select(keep.tolist())
            positions = batch.advance()
            width, length = len(batch.rows), batch.longest + 1
            self._cache.reserve(len(self._keys), length)
            self._cache.aim(slice(0, width), torch.arange(width, device=ids.device), positions, length)
            logits = self._forward(ids[:, None], positions, batch.mask[:, :, :, :length])

    def _compact(self, width: int, alive: list[int]) -> Tensor:
        """Move living rows to the front slots; returns which old row now stands at each of them."""
        living = set(alive)
        holes = [slot for slot in range(len(alive)) if slot not in living]
        tail = [slot for slot in alive if slot >= len(alive)]
        self._swap(holes, tail)
        order = list(range(width))
        for a, b in zip(holes, tail, strict=True):
            order[a] = b
        return torch.tensor(order[: len(alive)], device=self.model.device)


class _Batch:
    """The tensors of the rows that are being decoded, in slot order."""

    def __init__(self, rows: list[Row], dtype: torch.dtype, device: torch.device) -> None:
        self.rows = rows
        self.temperature = torch.tensor([row.sampling.temperature for row in rows], device=device)
        self.top_p = torch.tensor([row.sampling.top_p for row in rows], device=device)
        self._seeds = np.array([row.sampling.seed % 2**64 for row in rows], dtype=np.uint64)
        lengths = torch.tensor([[len(row.prompt)] for row in rows], device=device)
        hidden = torch.arange(max(len(row.prompt) + row.max_tokens for row in rows), device=device) >= lengths
        self.mask = torch.zeros(hidden.shape, dtype=dtype, device=device)
        self.mask = self.mask.masked_fill_(hidden, torch.finfo(dtype).min)[:, None, None]  # [n, 1, 1, window]
        self.longest = 0

    def select(self, keep: list[int]) -> None:
        self.rows = [self.rows[i] for i in keep]
        self._seeds = self._seeds[keep]
        self.temperature, self.top_p, self.mask = self.temperature[keep], self.top_p[keep], self.mask[keep]

    def uniform(self) -> Tensor:
        """One number in [0, 1) per row, from the row's seed and the number of ids it has."""
        counts = np.array([len(row.ids) for row in self.rows], dtype=np.uint64)
        return torch.from_numpy(uniforms(self._seeds, counts)).to(self.mask.device)

    def advance(self) -> Tensor:
        """Positions [n, 1] of the tokens just sampled, now visible; those of finished rows fall on a spent place."""
        places = [len(row.prompt) + len(row.ids) - 1 for row in self.rows]
        self.longest = max(places)
        positions = torch.tensor(places, device=self.mask.device)[:, None]
        self.mask[:, 0, 0].scatter_(1, positions, 0.0)
        return positions


def check_request(
    key: Hashable, prompt_ids: list[int], max_tokens: int, window: int, pending: Container[Hashable]
) -> None:
    """ValueError for a row that cannot be served."""
    if key in pending:
        raise ValueError(f"row {key!r} is pending already")
    if not prompt_ids or max_tokens < 1:
        raise ValueError(f"row {key!r}: {len(prompt_ids)} prompt tokens, max_tokens={max_tokens}; both must be > 0")
    if len(prompt_ids) + max_tokens > window:
        raise ValueError(f"row {key!r}: {len(prompt_ids)} prompt tokens + {max_tokens} exceed the window of {window}")


def with_bos(tokenizer: Any, ids: Sequence[int]) -> tuple[int, ...]:
    """The ids of an opening prompt, with the begin-of-sequence token in front once if this tokenizer sets one."""
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is None or list(ids[:1]) == [bos] or tokenizer("a")["input_ids"][:1] != [bos]:
        return tuple(ids)
    return (bos, *ids)


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text that stop strings and parsers read: every token shown, spaces as they are."""
    return tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _common_prefix(old: list[int], new: list[int]) -> int:
    if new[: len(old)] == old:
        return len(old)
    return next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))


def _check_supported(model: Any) -> None:
    config = model.config
    kinds = getattr(config, "layer_types", None)
    windowed = set(kinds) != {"full_attention"} if kinds else getattr(config, "sliding_window", None) is not None
    if windowed:
        raise ConfigError(
            f"{config.model_type}: the torch engine knows full attention only; use a vLLM engine or another model"
        )
    if config._attn_implementation not in ("eager", "sdpa"):
        raise ConfigError(
            f"attention={config._attn_implementation!r} does not take row masks; the torch engine needs eager or sdpa"
        )
