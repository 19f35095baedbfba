"""Asking a language model for lessons: prompts in batches, strict replies, bounded retries, nothing asked twice.

A `Writer` is a model that answers prompts: one behind an engine (here) or behind an endpoint (api_client.py). Every
reply, good or bad, is in the journal before it is judged, under a digest of prompt, seed, settings and model.
"""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from hiexp.api_client import Budget, Reply
from hiexp.encoder import Encoder
from hiexp.engine import Engine, Sampling, with_bos
from hiexp.hek_prompts import ReflectionPrompts, turn_down
from hiexp.journal import Journal, digest

SLOT = "[[REQUEST]]"


@dataclass(frozen=True)
class Request:
    """One lesson wanted: its prompt, longest wording first, and what the reply must not tell."""

    wordings: tuple[str, ...]
    level: int
    questions: tuple[str, ...]
    golds: tuple[str, ...]


class Writer(Protocol):
    """A language model that answers prompts; a prompt is whatever its own `fit` made (ids or text)."""

    name: str
    """of the model: part of every journal key, and the source_model of what it writes"""
    together: bool
    """the replies of a batch may depend, in a last bit, on who else is in it, so it is asked whole or not at all"""
    max_new_tokens: int

    def fit(self, wordings: Sequence[str]) -> Any | None:
        """The prompt of the first wording that leaves room for a reply."""
        ...

    def length(self, prompt: Any) -> int:
        """Tokens of a prompt."""
        ...

    def batches(self, prompts: Mapping[int, Any]) -> Iterable[list[int]]: ...

    def answer(self, prompts: Mapping[int, Any], sampling: Mapping[int, Sampling]) -> Iterator[dict[int, Reply]]:
        """Replies to one batch, in as many pieces as they come. BudgetReached before one that might pass a cap."""
        ...


@dataclass(frozen=True)
class Reflector:
    """A writer, and what its replies must be; `encoder` tells whether a title could ever be retrieved."""

    writer: Writer
    encoder: Encoder
    prompts: ReflectionPrompts
    sampling: Sampling
    """its seed is the base from which every reply's own is derived"""
    max_attempts: int
    journal: Journal = field(default_factory=Journal)
    role: str = "reflector"
    """whose budget the journal's records count against"""
    progress: Callable[..., Any] | None = None
    """tracking.progress: called with total= and label=, a context manager with update(n)"""
    say: Callable[[str], Any] = lambda _: None
    """told what each round will take, before it begins"""

    def ask(
        self, requests: Sequence[Request], fields: Sequence[str], counts: Counter[str]
    ) -> list[dict[str, Any] | None]:
        """Per request its first acceptable reply, or None; each reply adds to `counts` what became of it."""
        prompts = {i: prompt for i, one in enumerate(requests) if (prompt := self.writer.fit(one.wordings)) is not None}
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
        prompts = self.prompts
        outcomes: dict[int, dict[str, Any] | str] = {i: prompts.parse(texts[i], fields) for i in requests}
        for i, reply in outcomes.items():
            if not isinstance(reply, str):
                one = requests[i]
                rules = (one.level, one.questions, one.golds, prompts.language, prompts.examples)
                outcomes[i] = turn_down(reply, *rules) or reply
        titles = {i: reply["title"] for i, reply in outcomes.items() if not isinstance(reply, str)}
        rows = self.encoder.encode(list(titles.values()), "query")
        for i, row in zip(titles, rows, strict=True):
            if not row.any():
                outcomes[i] = "title_unknown_to_encoder"
        return outcomes

    def _generate(self, prompts: Mapping[int, Any], attempt: int, level: int) -> dict[int, str]:
        """Reply texts by key: those of the journal, and the others asked for batch by batch."""
        sampling = {i: replace(self.sampling, seed=self._seed(level, i, attempt)) for i in prompts}
        keys = {i: self._key(prompt, sampling[i]) for i, prompt in prompts.items()}
        texts = {i: record["text"] for i, key in keys.items() if (record := self.journal.get(key))}
        label = f"level {level} lessons" + (f", attempt {attempt + 1}" if attempt else "")
        self.say(self._plan(label, [prompt for i, prompt in prompts.items() if i not in texts], len(texts)))
        with self.progress(total=len(prompts), label=label) if self.progress else nullcontext() as bar:
            done = 0
            for batch in self.writer.batches(prompts):
                missing = [i for i in batch if i not in texts]
                wanted = {i: prompts[i] for i in (batch if missing and self.writer.together else missing)}
                for replies in self._timed(wanted, sampling, {"level": level, "attempt": attempt}, keys):
                    texts |= replies
                    if bar is not None:
                        bar.update(len(texts) - done)
                    done = len(texts)
        return texts

    def _timed(
        self, wanted: Mapping[int, Any], sampling: Mapping[int, Sampling], what: dict[str, Any], keys: Mapping[int, str]
    ) -> Iterator[dict[int, str]]:
        """Texts that are in the journal by now, as they come; a record's seconds add up to the time that was waited."""
        start = time.monotonic()
        for replies in self.writer.answer(wanted, sampling) if wanted else ():
            now = time.monotonic()
            more = what | {"role": self.role, "seconds": round((now - start) / len(replies), 4)}
            self.journal.add({keys[i]: vars(reply) | more for i, reply in replies.items()})
            start = now
            yield {i: reply.text for i, reply in replies.items()}

    def _plan(self, label: str, prompts: Sequence[Any], kept: int) -> str:
        read, most = sum(map(self.writer.length, prompts)), len(prompts) * self.writer.max_new_tokens
        known = f", {kept} kept from before" if kept else ""
        spent = [record for record in self.journal.values() if record.get("role") == self.role]
        per_call = sum(record["seconds"] for record in spent) / len(spent) if spent else None
        time_left = "known after the first replies" if per_call is None else f"about {per_call * len(prompts):.0f} s"
        return (
            f"{label} by {self.writer.name}: {len(prompts)} calls{known}; {read:,} prompt tokens, "
            f"at most {most:,} reply tokens; time {time_left}"
        )

    def _seed(self, level: int, i: int, attempt: int) -> int:
        return int(np.random.SeedSequence([self.sampling.seed, level, i, attempt]).generate_state(1)[0])

    def _key(self, prompt: Any, sampling: Sampling) -> str:
        return digest("reply", self.writer.name, prompt, vars(sampling), self.writer.max_new_tokens)


class EngineWriter:
    """Answers prompts through an engine in this process, in batches of at most `tokens_per_batch` tokens.

    `open_engine` is called when the first prompt is fitted, so that a model is loaded only if it is needed.
    """

    together = True

    def __init__(
        self,
        open_engine: Callable[[], Engine],
        tokenizer: Any,
        name: str,
        max_new_tokens: int,
        tokens_per_batch: int,
        own_tags: bool,  # see ReflectionPrompts
        budget: Budget | None = None,
        use_chat: bool = True,  # see ReflectionPrompts
    ) -> None:
        self.name, self.max_new_tokens = name, max_new_tokens
        self._open, self._tokenizer, self._budget = open_engine, tokenizer, budget
        self._tokens_per_batch, self._own_tags, self._use_chat = tokens_per_batch, own_tags, use_chat
        self._numbers = itertools.count()

    def fit(self, wordings: Sequence[str]) -> list[int] | None:
        """Ids of the first wording that leaves room for a reply; a user message if there is a chat template to use."""
        head, tail = "", ""
        if self._use_chat and getattr(self._tokenizer, "chat_template", None):
            messages = [{"role": "user", "content": SLOT}]
            chat = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            head, _, tail = chat.partition(SLOT)
        before = list(with_bos(self._tokenizer, self._tokenizer.encode(head, add_special_tokens=False)))
        after = self._tokenizer.encode(tail, add_special_tokens=False)
        literal = not self._own_tags  # a control token that a trace spells out stays text
        room = self._open().max_length - len(before) - len(after) - self.max_new_tokens
        for text in wordings:
            ids = self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=literal)
            if len(ids) <= room:
                return [*before, *ids, *after]
        return None

    def length(self, prompt: list[int]) -> int:
        return len(prompt)

    def batches(self, prompts: Mapping[int, list[int]]) -> Iterator[list[int]]:
        batch: list[int] = []
        for i in sorted(prompts, key=lambda i: (len(prompts[i]), i)):  # each is the longest of its batch so far
            if batch and (len(batch) + 1) * (len(prompts[i]) + self.max_new_tokens) > self._tokens_per_batch:
                yield batch
                batch = []
            batch.append(i)
        if batch:
            yield batch

    def answer(self, prompts: Mapping[int, list[int]], sampling: Mapping[int, Sampling]) -> Iterator[dict[int, Reply]]:
        """One batch, whole."""
        most = sum(len(prompt) + self.max_new_tokens for prompt in prompts.values())
        if self._budget:
            self._budget.reserve(len(prompts), most)
        engine = self._open()
        keys = {("lesson", next(self._numbers)): i for i in prompts}
        for key, i in keys.items():
            engine.submit(key, prompts[i], self.max_new_tokens, sampling[i])
        replies: dict[int, Reply] = {}
        while len(replies) < len(keys):
            for key, completion in engine.step():
                i = keys[key]
                ids = completion.token_ids[:-1] if completion.finish == "broken" else completion.token_ids
                replies[i] = Reply(self._tokenizer.decode(list(ids)), len(prompts[i]), len(completion.token_ids))
        engine.forget(list(keys))
        if self._budget:
            self._budget.settle(most, sum(reply.prompt_tokens + reply.reply_tokens for reply in replies.values()))
        yield replies
