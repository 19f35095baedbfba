"""Asking the language model for lessons: prompts in batches through an engine, strict replies, bounded
retries."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from hiexp.encoder import Encoder
from hiexp.engine import Engine, Sampling, with_bos
from hiexp.hek_prompts import ReflectionPrompts, parse_reply, turn_down

SLOT = "[[REQUEST]]"


@dataclass(frozen=True)
class Request:
    """One lesson wanted: its prompt, longest wording first, and what the reply must not tell."""

    wordings: tuple[str, ...]
    level: int
    questions: tuple[str, ...]
    golds: tuple[str, ...]


@dataclass(frozen=True)
class Reflector:
    """A language model that answers requests; `encoder` tells whether a title could ever be retrieved."""

    engine: Engine
    tokenizer: Any
    encoder: Encoder
    prompts: ReflectionPrompts
    sampling: Sampling
    """its seed is the base from which every reply's own is derived"""
    max_new_tokens: int
    max_attempts: int
    tokens_per_batch: int
    progress: Callable[..., Any] | None = None
    """tracking.progress: called with total= and label=, a context manager with update(n)"""

    def ask(
        self, requests: Sequence[Request], fields: Sequence[str], counts: Counter[str]
    ) -> list[dict[str, Any] | None]:
        """Per request its first acceptable reply, or None; each reply adds to `counts` what became of it."""
        prompts = {i: ids for i, request in enumerate(requests) if (ids := self._encode(request.wordings))}
        counts["prompt_too_long"] += len(requests) - len(prompts)
        accepted: list[dict[str, Any] | None] = [None] * len(requests)
        for attempt in range(self.max_attempts):
            pending = {i: prompt for i, prompt in prompts.items() if accepted[i] is None}
            if not pending:
                break
            texts = self._generate(pending, attempt, requests[0].level)
            for i, outcome in self._judge({i: requests[i] for i in pending}, texts, fields).items():
                counts[outcome if isinstance(outcome, str) else "accepted"] += 1
                accepted[i] = None if isinstance(outcome, str) else outcome
        counts += Counter()  # drops reasons that did not occur
        return accepted

    def _judge(
        self, requests: Mapping[int, Request], texts: Mapping[int, str], fields: Sequence[str]
    ) -> dict[int, dict[str, Any] | str]:
        """The reply, or the reason why it is turned down."""
        outcomes: dict[int, dict[str, Any] | str] = {i: parse_reply(text, fields) for i, text in texts.items()}
        for i, reply in outcomes.items():
            if not isinstance(reply, str):
                request = requests[i]
                outcomes[i] = turn_down(reply, request.level, request.questions, request.golds) or reply
        titles = {i: reply["title"] for i, reply in outcomes.items() if not isinstance(reply, str)}
        rows = self.encoder.encode(list(titles.values()), "query")
        for i, row in zip(titles, rows, strict=True):
            if not row.any():
                outcomes[i] = "title_unknown_to_encoder"
        return outcomes

    def _generate(self, prompts: Mapping[int, list[int]], attempt: int, level: int) -> dict[int, str]:
        """Reply texts by key, generated in batches that fit the token budget."""
        texts: dict[int, str] = {}
        label = f"level {level} lessons" + (f", attempt {attempt + 1}" if attempt else "")
        with self.progress(total=len(prompts), label=label) if self.progress else nullcontext() as bar:
            for batch in self._batches(prompts):
                texts |= self._drain({i: prompts[i] for i in batch}, attempt, level)
                if bar is not None:
                    bar.update(len(batch))
        return texts

    def _batches(self, prompts: Mapping[int, list[int]]) -> Iterator[list[int]]:
        batch: list[int] = []
        for i in sorted(prompts, key=lambda i: (len(prompts[i]), i)):  # each is the longest of its batch so far
            if batch and (len(batch) + 1) * (len(prompts[i]) + self.max_new_tokens) > self.tokens_per_batch:
                yield batch
                batch = []
            batch.append(i)
        if batch:
            yield batch

    def _drain(self, prompts: Mapping[int, list[int]], attempt: int, level: int) -> dict[int, str]:
        keys = {("lesson", level, i, attempt): i for i in prompts}
        for key, i in keys.items():
            seed = np.random.SeedSequence([self.sampling.seed, level, i, attempt]).generate_state(1)[0]
            sampling = Sampling(self.sampling.temperature, self.sampling.top_p, self.sampling.stop, int(seed))
            self.engine.submit(key, prompts[i], self.max_new_tokens, sampling)
        texts: dict[int, str] = {}
        while len(texts) < len(keys):
            for key, completion in self.engine.step():
                ids = completion.token_ids[:-1] if completion.finish == "broken" else completion.token_ids
                texts[keys[key]] = self.tokenizer.decode(list(ids))
        self.engine.forget(list(keys))
        return texts

    def _encode(self, wordings: Sequence[str]) -> list[int] | None:
        """Ids of the first wording that leaves room for a reply; a user message if there is a chat
        template."""
        head, tail = "", ""
        if getattr(self.tokenizer, "chat_template", None):
            messages = [{"role": "user", "content": SLOT}]
            chat = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            head, _, tail = chat.partition(SLOT)
        before = list(with_bos(self.tokenizer, self.tokenizer.encode(head, add_special_tokens=False)))
        after = self.tokenizer.encode(tail, add_special_tokens=False)
        literal = not self.prompts.own_tags  # a control token that a trace spells out stays text
        for text in wordings:
            ids = self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=literal)
            if len(before) + len(ids) + len(after) + self.max_new_tokens <= self.engine.max_length:
                return [*before, *ids, *after]
        return None
