"""Runs a prompted method (baselines.py) on many questions at once: samples in, outcomes out.

All that wait for a search go to the backend and the HEK in one batch, all that wait for a reply to the asker together;
nothing waits for the slowest question. What a question gets depends on its own seed and nothing else. Every context of
a model becomes a `Call` of the outcome, in order, with the author of each piece. What ends an attempt:

    answered       a final reply with an answer
    out_of_turns   a final reply without one, or no answer within the limits of an agent
    truncated      a final reply that was cut, a prompt or an observation without room, a budget of zero
    refused        an endpoint would not answer
    broken         the engine sampled an id that is no token
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from hiexp.askers import Asker, Context
from hiexp.background import Background, Inline, one_thread
from hiexp.baselines import PIPELINES, Ask, Final, Found, Look, More, PipelineConfig, Play, Task
from hiexp.chat_replies import Reply
from hiexp.config import lookup
from hiexp.data import Sample
from hiexp.hek import HEK
from hiexp.hits import Hit, fill
from hiexp.observations import different
from hiexp.records import REFUSED, Call, Outcome
from hiexp.rollout import CHARACTERS_PER_TOKEN, RolloutConfig
from hiexp.sampling import Sampling, derive_seed
from hiexp.search_cache import checked
from hiexp.search_types import SearchBackend
from hiexp.trajectory import Document, Status

PATIENCE = 0.05
"""Seconds that an endpoint is waited for while a search is under way."""
ENDED = {"full": Status.TRUNCATED.value, "broken": Status.BROKEN.value, "refused": REFUSED}
"""Status of an attempt that has no reply to go on with, by the reply's finish."""


def run_pipelines(
    name: str,
    asker: Asker,
    search: SearchBackend,
    hek: HEK,
    samples: Sequence[Sample],
    cfg: RolloutConfig,
    pipeline: PipelineConfig,
    seed: int,
    *,
    positions: Sequence[int] | None = None,
    done: Callable[[Outcome], Any] | None = None,
) -> list[Outcome]:
    """`cfg.group_size` outcomes per sample, siblings adjacent, in the order of samples.

    Of `cfg` count the budgets, the decoding, and what is shown of the HEK. What `search`, `hek` or the asker raises is
    raised here, when the requests under way are in.

    positions: of the samples among all questions (None: 0, 1, ...); seeds derive from (seed, position, member,
        request).
    done: called with each outcome as it ends.
    """
    run = _Run(lookup(PIPELINES, name, "pipeline"), asker, search, hek, cfg, pipeline, seed, done)
    places = range(len(samples)) if positions is None else positions
    if len(places) != len(samples) or len(set(places)) != len(samples):
        raise ValueError(f"{len(samples)} samples need as many different positions, got {list(places)[:20]}")
    rows = run.open(samples, places)
    try:
        with one_thread("search") if asker.streams else nullcontext(Inline()) as runner:
            run.play(rows, Background(run.look_up, runner))
    finally:
        asker.forget([context for row in rows for context in row.contexts])
    return [row.outcome for row in rows if row.outcome]


@dataclass
class _Row:
    """An attempt at a question."""

    key: tuple[int, int]
    sample: Sample
    play: Play
    hinted: bool
    strategies: tuple[str, ...]
    contexts: list[Context] = field(default_factory=list)
    open: Context | None = None
    """the one that More goes on with"""
    look: Look | None = None
    asked: int = 0
    searches: int = 0
    cases: list[str] = field(default_factory=list)
    outcome: Outcome | None = None


_Hits = list[tuple[list[Document], list[Hit]]]
"""What the queries of one row brought."""


class _Run:
    """What every row of one call shares."""

    def __init__(
        self,
        method: Callable[[Task], Play],
        asker: Asker,
        search: SearchBackend,
        hek: HEK,
        cfg: RolloutConfig,
        pipeline: PipelineConfig,
        seed: int,
        done: Callable[[Outcome], Any] | None,
    ) -> None:
        self.method, self.asker, self.search, self.hek, self.done = method, asker, search, hek, done
        self.cfg, self.pipeline, self.seed = cfg, pipeline, seed
        self.waiting: list[_Row] = []

    def open(self, samples: Sequence[Sample], positions: Sequence[int]) -> list[_Row]:
        """Plan each question once, for all members of its group."""
        ids, questions = [sample.id for sample in samples], [sample.question for sample in samples]
        hinted = self.hek.wants(questions, ids)
        blocks: list[tuple[str, tuple[str, ...]]] = [("", ())] * len(samples)
        asked = [i for i, wants in enumerate(hinted) if wants] if self.cfg.strategy_level else []
        if asked:
            wanted = [questions[i] for i in asked], [ids[i] for i in asked], self.cfg.strategy_level
            found = self.hek.strategy_block(*wanted, self.asker.count, self.cfg.strategy_tokens)
            for i, block in zip(asked, found, strict=True):
                blocks[i] = block
        rows = []
        for sample, position, wants, (strategy, shown) in zip(samples, positions, hinted, blocks, strict=True):
            task = Task(sample.question, strategy, frozenset(shown), self.pipeline, self.cfg, self.asker.count)
            for member in range(self.cfg.group_size):
                rows.append(_Row((position, member), sample, self.method(task), wants, shown))
        return rows

    def play(self, rows: Sequence[_Row], searches: Background[_Row, list[_Hits]]) -> None:
        by_key = {row.key: row for row in rows}
        for row in rows:
            self.advance(row, None)
        while self.waiting or searches.is_busy or self.asker.pending:
            replies = self.asker.step(PATIENCE if searches.is_busy else None) if self.asker.pending else []
            for context, reply in sorted(replies, key=lambda item: item[0].key):
                self.receive(by_key[context.key[:2]], context, reply)
            waiting, self.waiting = self.waiting, []
            if found := searches.advance(waiting, wait=not self.asker.pending):
                for row, hits in zip(*found, strict=True):
                    self.observe(row, hits)
        if left := [row.key for row in rows if row.outcome is None]:
            raise RuntimeError(f"the asker returned nothing while {len(left)} attempts are running, first {left[0]}")

    def advance(self, row: _Row, value: Any) -> None:
        """Send the method what it waits for, and see to what it wants next."""
        try:
            wanted = row.play.send(value)
        except StopIteration as end:
            self.end(row, end.value)
            return
        if isinstance(wanted, Look):
            row.look = wanted
            self.waiting.append(row)
        else:
            self.submit(row, wanted)

    def submit(self, row: _Row, wanted: Ask | More) -> None:
        if isinstance(wanted, Ask):
            key = (*row.key, len(row.contexts))
            context = self.asker.open(key, wanted.purpose, wanted.system, wanted.user)
            row.contexts.append(context)
            row.open = context if wanted.stays_open else row.open
            most = wanted.max_tokens or self.cfg.max_turn_tokens
        else:
            assert row.open is not None
            context, most = row.open, self.cfg.max_turn_tokens
            if not self.asker.go_on(context, wanted.pieces, self._budget(context)):
                self.end(row, Final("", Status.TRUNCATED))  # half an observation is no evidence
                return
        room = min(most, self._budget(context), self.asker.room(context))
        if room <= 0:
            self.end(row, Final("", Status.TRUNCATED))
            return
        sampled = Sampling(
            self.cfg.temperature, self.cfg.top_p, wanted.stop, derive_seed(self.seed, *row.key, row.asked)
        )
        row.asked += 1
        self.asker.submit(context, room, sampled, wanted.opening)

    def _budget(self, context: Context) -> int:
        return self.cfg.max_response_tokens - (context.length - context.opening)

    def receive(self, row: _Row, context: Context, reply: Reply) -> None:
        if context is not row.open:
            self.asker.forget([context])
        if status := ENDED.get(reply.finish):
            self.end(row, Final("", Status.RUNNING), status)
        else:
            self.advance(row, reply)

    def look_up(self, rows: list[_Row]) -> list[_Hits]:
        """Execute the queries of waiting rows in one batch; needs no tokenizer and changes nothing."""
        asked = [(row, query) for row in rows if row.look for query in row.look.queries]
        queries = [query for _, query in asked]
        try:
            results = checked(self.search.search(queries, self.cfg.top_k), queries)
            cases = self._cases(asked)
        except BaseException as error:
            more = f" and {len(queries) - 3} more" if len(queries) > 3 else ""
            error.add_note(f"raised by the search for {', '.join(map(repr, queries[:3]))}{more}")
            raise
        pairs = iter(zip(results, cases, strict=True))
        return [[next(pairs) for _ in row.look.queries] for row in rows if row.look]

    def _cases(self, asked: Sequence[tuple[_Row, str]]) -> list[list[Hit]]:
        cases: list[list[Hit]] = [[] for _ in asked]
        wanted = [i for i, (row, _) in enumerate(asked) if row.hinted] if self.cfg.use_cases else []
        if wanted:
            rows, keys = [asked[i][0] for i in wanted], [asked[i][1] for i in wanted]
            if self.cfg.case_key == "question_query":
                keys = [f"{row.sample.question} {key}" for row, key in zip(rows, keys, strict=True)]
            shown = [row.look.shown if row.look else () for row in rows]
            for i, hits in zip(wanted, self.hek.cases(keys, [row.sample.id for row in rows], shown), strict=True):
                cases[i] = hits
        return cases

    def observe(self, row: _Row, hits: _Hits) -> None:
        """Give the method what its queries brought, of bounded length and no passage twice."""
        most, found = CHARACTERS_PER_TOKEN * self.cfg.max_document_tokens, []
        for documents, cases in hits:
            shown = different(Document(document.title[:most], document.text[:most]) for document in documents)
            case, case_ids = fill(cases, self.asker.count, self.cfg.case_tokens, cut=True)
            row.cases += case_ids
            found.append(Found(shown, case, case_ids))
        row.searches += len(hits)
        self.advance(row, found)

    def end(self, row: _Row, final: Final, status: str = "") -> None:
        self.asker.forget(row.contexts)
        row.play.close()
        calls = [context for context in row.contexts if context.requests]
        row.outcome = Outcome(
            sample_id=row.sample.id,
            member=row.key[1],
            answer=final.answer,
            status=status or final.status.value,
            searches=row.searches,
            calls=tuple(_call(context) for context in calls),
            tokens=sum(context.tokens for context in calls),
            strategies=row.strategies,
            cases=tuple(dict.fromkeys(row.cases)),
            seconds=round(sum(context.seconds for context in calls), 3),
        )
        if self.done:
            self.done(row.outcome)


def _call(context: Context) -> Call:
    pieces = tuple((source.value, text) for source, text in context.pieces)
    return Call(pieces, context.purpose, context.requests, context.prompt_tokens, context.reply_tokens)
