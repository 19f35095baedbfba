"""Small stand-ins for the whole suite: a tiny random model, tokenizers in memory, a scripted engine, a toy search.

Nothing here is downloaded.
"""

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from hiexp.engine import Completion, Sampling
from hiexp.trajectory import Document

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tiny_model(vocab_size: int = 258, attention: str = "eager", seed: int = 0, **changes: Any) -> Any:
    """A random Qwen2: 2 layers, 32 wide, window 512."""
    shape = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "initializer_range": 0.3,  # large enough that the next token is not a toss-up
    }
    torch.manual_seed(seed)
    config = Qwen2Config(vocab_size=vocab_size, **(shape | changes))
    config._attn_implementation = attention
    return Qwen2ForCausalLM(config).eval()


def build_byte_tokenizer(chat: bool = True) -> PreTrainedTokenizerFast:
    """One id per byte, then `<|im_start|>` and `<|im_end|>` (the end of a turn); decoding is exact for ASCII."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|im_end|>")
    tokenizer.chat_template = CHATML if chat else None
    return tokenizer


def build_ambiguous_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes plus merges, so that many id sequences decode to one text and encoding picks only one of them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("s", "e"), ("a", "r"), ("c", "h"), ("se", "ar"), ("sear", "ch"), ("search", ">"), ("<", "/"), ("a", "n")]
    vocab = {c: i for i, c in enumerate(alphabet)}
    for left, right in merges:
        vocab[left + right] = len(vocab)
    inner = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|im_end|>")
    tokenizer.chat_template = CHATML
    return tokenizer


class ScriptedEngine:
    """Plays the given turns: `turns(key, prompt_ids)` returns a text, a list of ids, or a whole Completion.

    Keeps every request in `requests` and every completion in `completions`, both [(key, ...)], for the assertions.
    With `pick` it streams: `pick(pending keys)` names those that finish in this step (it may name none).
    """

    def __init__(
        self,
        tokenizer: Any,
        turns: Callable[[Hashable, list[int]], Any],
        max_length: int = 4096,
        pick: Callable[[list[Hashable]], Iterable[Hashable]] | None = None,
    ) -> None:
        self.tokenizer, self.turns, self.max_length, self.version = tokenizer, turns, max_length, 7
        self.pick, self.streams, self.exact_logprobs = pick or list, pick is not None, True
        self.requests: list[tuple[Hashable, list[int], int, Sampling]] = []
        self.completions: list[tuple[Hashable, Completion]] = []
        self.forgotten: list[Hashable] = []
        self._rows: list[tuple[Hashable, list[int], int, Sampling]] = []

    @property
    def pending(self) -> int:
        return len(self._rows)

    def submit(self, key: Hashable, prompt_ids: list[int], max_tokens: int, sampling: Sampling) -> None:
        assert max_tokens > 0 and len(prompt_ids) + max_tokens <= self.max_length
        self._rows.append((key, list(prompt_ids), max_tokens, sampling))
        self.requests.append(self._rows[-1])

    def step(self) -> list[tuple[Hashable, Completion]]:
        finished, chosen = [], set(self.pick([row[0] for row in self._rows]))
        for key, prompt_ids, max_tokens, _ in [row for row in self._rows if row[0] in chosen]:
            turn = self.turns(key, prompt_ids)
            if isinstance(turn, str):
                turn = self.tokenizer.encode(turn, add_special_tokens=False)
            if not isinstance(turn, Completion):
                ids = tuple(turn[:max_tokens])
                finish = "length" if len(turn) > max_tokens else "stop"
                turn = Completion(ids, tuple(-0.5 - 0.01 * i for i in range(len(ids))), finish)
            finished.append((key, turn))
        self._rows = [row for row in self._rows if row[0] not in chosen]
        self.completions += finished
        return finished

    def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        self.version = version

    def forget(self, keys: Iterable[Hashable]) -> None:
        self.forgotten += list(keys)
        self._rows = [row for row in self._rows if row[0] not in self.forgotten]

    def sleep(self) -> None:
        pass

    close = sleep


class ToySearch:
    """Documents by exact query, else one that repeats the query; remembers every batch of queries."""

    def __init__(self, documents: dict[str, list[Document]] | None = None) -> None:
        self.documents, self.batches = documents or {}, []

    def search(self, queries: list[str], top_k: int) -> list[list[Document]]:
        self.batches.append(list(queries))
        default = lambda query: [Document(f"About {query}", f"All that is known of {query}.")]  # noqa: E731
        return [self.documents.get(query, default(query))[:top_k] for query in queries]
