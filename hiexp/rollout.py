"""The multi-turn loop: samples in, trajectories out, the author of every token recorded as it is born.

Policy ids go from the engine into the trajectory and back into the next prompt untouched; their text is read only to
decide the next action. Text of the environment is encoded once, piece by piece, where control tokens in documents and
experience stay plain text. What ends a trajectory:

    answered       a complete answer
    out_of_turns   `max_turns` without an answer, or more than `max_malformed` turns that asked for nothing
    truncated      no room left: a turn cut off without an action, an observation that does not fit, a budget of zero
    broken         the engine sampled an id that is no token

Nothing waits for the slowest row: with an engine that streams, the queries that are ready go out as one batch in one
worker thread while the engine steps on for the other rows. That thread calls the search backend and the HEK and
nothing else; tokenizers are not safe to share between threads, so the policy's is used in the caller's alone. All
queries of one turn go out together, count one by one, and come back in one observation.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

from hiexp.background import Background, Inline, Runner, one_thread
from hiexp.config import ConfigError
from hiexp.data import Sample
from hiexp.encoding import PieceEncoder, kept
from hiexp.engine import Completion, Engine, Sampling, decode, with_bos
from hiexp.hek import HEK
from hiexp.hits import Hit, fill
from hiexp.observations import count_marks, different
from hiexp.sampling import derive_seed
from hiexp.search_cache import add_counters, checked, counters
from hiexp.search_types import SearchBackend
from hiexp.tag_protocol import Action, AgentProtocol, Asked, normalise_query
from hiexp.trajectory import Document, Segment, Source, Status, Trajectory, Turn

# plain words, so that a word-level tokenizer can know them all
REPEATED = "this query was already searched so see the earlier result"
LIMIT = "the search limit is reached so answer now"
MALFORMED = "no query and no answer was found so write one of them"
NOTHING_FOUND = "nothing was found"
NOTICES = (REPEATED, LIMIT, MALFORMED, NOTHING_FOUND)
"""Every notice that a policy can see."""
CHARACTERS_PER_TOKEN = 64
"""More of a document is cut off before anything reads or records it: no text has tokens that long on average."""
UNEXECUTED = {
    Status.OUT_OF_TURNS: "the turn limit is reached",
    Status.BROKEN: "an id without a token was sampled",
}
"""Why a query of the last turn was not executed: in the record alone, the policy never sees it."""


@dataclass(frozen=True)
class RolloutConfig:
    """How trajectories are sampled, and what they may cost."""

    protocol: str = "qwen_tool"
    """qwen_tool, search_o1, search_r1, few_shot, few_shot_direct, compact, direct, or a peer's (docs/peers.md)"""
    prompt_file: str = ""
    """a published agent's own instruction, as text with {question}; empty = ours, which it was not trained on"""
    prompt_date: str = ""
    """YYYY-MM-DD that {date} in an instruction stands for; empty = today, in UTC"""
    group_size: int = 8
    """trajectories per question (G)"""
    max_turns: int = 12
    """turns of one trajectory, the answer included"""
    max_searches: int = 10
    """queries that are executed per trajectory"""
    max_malformed: int = 2
    """turns without query or answer that are forgiven with a notice"""
    top_k: int = 5
    """documents per query"""
    max_document_tokens: int = 160
    """each document is cut to this"""
    max_turn_tokens: int = 512
    """tokens the policy may write in one turn"""
    max_response_tokens: int = 8192
    """everything after the prompt, whoever wrote it"""
    temperature: float = 1.0
    """0 = greedy"""
    top_p: float = 0.95
    """sample from the likeliest tokens that hold this much probability; 1 keeps all"""
    strategy_level: Literal[0, 2, 3] = 2
    """level of the experience in the prompt; 0 = none"""
    use_cases: bool = True
    """show level-1 experience beside the documents"""
    strategy_tokens: int = 256
    """budget of the strategy block in the prompt"""
    case_tokens: int = 128
    """budget of the cases beside one query's documents"""
    case_key: Literal["query", "question_query"] = "query"
    """what a case is looked up by: Eq. 2 embeds the query; with the question before it, it knows the task too"""

    def __post_init__(self) -> None:
        least = {"max_searches": 0, "max_malformed": 0, "strategy_tokens": 0, "case_tokens": 0}
        counts = ("group_size", "max_turns", "top_k", "max_document_tokens", "max_turn_tokens", "max_response_tokens")
        for name, bound in (least | dict.fromkeys(counts, 1)).items():
            if getattr(self, name) < bound:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least {bound}")
        Sampling(self.temperature, self.top_p)


def run_rollouts(
    engine: Engine,
    tokenizer: Any,
    protocol: AgentProtocol,
    search: SearchBackend,
    hek: HEK,
    samples: Sequence[Sample],
    cfg: RolloutConfig,
    seed: int,
    progress: Callable[[int], Any] | None = None,
    *,
    first: int = 0,
    positions: Sequence[int] | None = None,
    done: Callable[[Trajectory], Any] | None = None,
    hinted: Sequence[bool] | None = None,
    metrics: dict[str, float] | None = None,
    search_runner: Runner | None = None,
) -> list[Trajectory]:
    """`group_size` trajectories per sample, siblings adjacent; the same arguments give the same ids.

    Rows are submitted as they become ready; the queries that wait go to `search` and `hek` in one call each. If
    `engine.streams`, that happens in a thread while the engine works on; else between two steps, and which rows make a
    batch is always the same. What `search` or `hek` raises is raised here, with a note that names the queries.

    progress: called with the number of trajectories that ended since its last call.
    first: position of samples[0] among all questions of the step. Seeds derive from (seed, position, member, turn), so
        the ranks that share a step's questions sample what one rank alone would.
    positions: instead of `first`, the position of each sample, no two the same: for questions that lie apart.
    done: called with each trajectory once, as it ends, in the caller's thread.
    hinted: per sample, whether its group gets experience at all; None = all that `hek.wants` to. Whole groups, because
        within one the attempts without experience would fare worse than their siblings and be trained against.
    metrics: "time/search" is raised by the seconds of searching, "time/search_wait" by those the engine stood still,
        "search/neutralised" by the tags and control tokens found in documents; what the backend counts is added.
    search_runner: instead of the thread, or of the call between two steps.
    """
    run, before = _Run(engine, tokenizer, protocol, search, hek, cfg, seed), counters(search)
    places = range(first, first + len(samples)) if positions is None else positions
    rows = run.open(samples, [True] * len(samples) if hinted is None else hinted, places)
    try:
        overlapped = engine.streams and search_runner is None
        with one_thread("search") if overlapped else nullcontext(search_runner or Inline()) as runner:
            searches = Background(run.look_up, runner)
            _play(run, rows, searches, progress, done)
    finally:
        engine.forget([row.key for row in rows])
    if metrics is not None:
        times = {"time/search": searches.worked, "time/search_wait": searches.waited}
        for name, value in (times | {"search/neutralised": run.neutralised}).items():
            metrics[name] = metrics.get(name, 0.0) + value
        add_counters(metrics, search, before)
    return [row.trajectory for row in rows]


def _play(
    run: "_Run",
    rows: "list[_Row]",
    searches: Background,
    progress: Callable[[int], Any] | None,
    done: Callable[[Trajectory], Any] | None,
) -> None:
    """The loop; a row is with the engine, with the search, or ready for its next turn, until it ends."""
    engine, by_key = run.engine, {row.key: row for row in rows}
    ready, running = rows, rows
    while running:
        is_new = bool(ready)
        for row in ready:
            run.submit(row)
        finished = sorted(engine.step(), key=lambda item: item[0])
        waiting = [by_key[key] for key, completion in finished if run.receive(by_key[key], completion)]
        asked = {row.key for row in waiting}
        ready = [row for key, _ in finished if key not in asked and (row := by_key[key]).is_running]
        is_idle = not ready and not (engine.streams and engine.pending)
        if found := searches.advance(waiting, wait=is_idle):
            run.observe(*found)
            ready = sorted([*ready, *(row for row in found[0] if row.is_running)], key=lambda row: row.key)
        before = running
        if is_new or finished or found:
            running = [row for row in running if row.is_running]
        if running and is_idle and not (ready or searches.is_busy):
            raise RuntimeError(f"the engine returned nothing while {len(running)} trajectories are running")
        if len(running) < len(before):
            for row in before:
                if done and not row.is_running:
                    done(row.trajectory)
            if progress:
                progress(len(before) - len(running))


_Found = tuple[list[list[Document]], list[Hit]]
"""What the queries of one turn brought: the passages of each, and cases."""


@dataclass
class _Row:
    key: tuple[int, int]
    """position of the question in the step, member of its group"""
    sample: Sample
    trajectory: Trajectory
    prompt_length: int
    hinted: bool
    """whether it may be shown experience"""
    malformed: int = 0
    searches: int = 0
    queries: set[str] = field(default_factory=set)
    """normalised, those that were executed"""
    shown: set[str] = field(default_factory=set)
    """ids of the experiences shown so far, in the prompt and beside documents"""
    text: str = ""
    action: Action = field(default_factory=lambda: Action("malformed", ""))
    """text and action of the newest turn"""
    asked: tuple[str, ...] = ()
    """its queries, up to the limit"""
    closed: int | None = None
    """the eos that the newest turn ended with, if it did"""

    @property
    def is_running(self) -> bool:
        return self.trajectory.status is Status.RUNNING


class _Run:
    """What every row of one call shares."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        protocol: AgentProtocol,
        search: SearchBackend,
        hek: HEK,
        cfg: RolloutConfig,
        seed: int,
    ) -> None:
        self.engine, self.tokenizer, self.protocol, self.search, self.hek = engine, tokenizer, protocol, search, hek
        self.cfg, self.seed = cfg, seed
        self.encoder = PieceEncoder(tokenizer, cfg.max_document_tokens)
        self.neutralised = 0

    def open(self, samples: Sequence[Sample], hinted: Sequence[bool], places: Sequence[int]) -> list[_Row]:
        """Plan each question once and open its group."""
        if len(set(places)) != len(samples) or len(places) != len(samples):
            raise ValueError(f"{len(samples)} samples need as many different positions, got {list(places)[:20]}")
        wanted = self.hek.wants([sample.question for sample in samples], [sample.id for sample in samples])
        hinted = [drawn and wants for drawn, wants in zip(hinted, wanted, strict=True)]
        plans: list[tuple[str, tuple[str, ...]]] = [("", ())] * len(samples)
        asked = [i for i, sample in enumerate(samples) if hinted[i]] if self.cfg.strategy_level else []
        if asked:
            questions, ids = [samples[i].question for i in asked], [samples[i].id for i in asked]
            level, budget = self.cfg.strategy_level, self.cfg.strategy_tokens
            blocks = self.hek.strategy_block(questions, ids, level, self.encoder.count, budget)
            for i, plan in zip(asked, blocks, strict=True):
                plans[i] = plan
        rows = []
        for place, sample, with_hints, (strategy, shown) in zip(places, samples, hinted, plans, strict=True):
            hek_version = self.hek.version if with_hints else -1
            prompt = self.encoder.segments(self.protocol.prompt(sample.question, strategy, self.tokenizer))
            prompt[0] = Segment(prompt[0].source, with_bos(self.tokenizer, prompt[0].token_ids))
            for member in range(self.cfg.group_size):
                trajectory = Trajectory(sample.id, member, self.engine.version, shown, hek_version)
                for segment in prompt:
                    trajectory.append(segment)
                start = (trajectory, trajectory.num_tokens, with_hints)
                rows.append(_Row((place, member), sample, *start, shown=set(shown)))
        return rows

    def submit(self, row: _Row) -> None:
        """Ask the engine for the next turn, or end the row when there is no room for one."""
        room = self._room(row)
        if room <= 0:
            row.trajectory.status = Status.TRUNCATED
            return
        seed = derive_seed(self.seed, *row.key, len(row.trajectory.turns))
        sampling = Sampling(self.cfg.temperature, self.cfg.top_p, self.protocol.stop, seed)
        self.engine.submit(row.key, row.trajectory.token_ids, min(room, self.cfg.max_turn_tokens), sampling)

    def receive(self, row: _Row, completion: Completion) -> bool:
        """Record a turn and act on it; True when its query waits to be executed."""
        text = decode(self.tokenizer, completion.token_ids)
        action = self.protocol.parse(text)
        count = kept(self.tokenizer, completion.token_ids, text, action.end)
        ids, logprobs = completion.token_ids[:count], completion.logprobs[:count]
        row.trajectory.append(Segment(Source.POLICY, ids, logprobs))
        row.asked = ()
        row.text, row.action = decode(self.tokenizer, ids) if count < len(completion.token_ids) else text, action
        row.closed = ids[-1] if completion.finish == "eos" and count == len(completion.token_ids) and ids else None
        status = self._status(row, completion.finish)
        if status is not Status.RUNNING:
            self._record(row, notice=UNEXECUTED.get(status, ""))
            row.trajectory.status = status
            row.trajectory.answer = action.text if status is Status.ANSWERED else ""
            return False
        notice = self._refusal(row)
        row.asked = () if notice else action.queries[: self.cfg.max_searches - row.searches]
        if notice:
            self._reply(row, [], "", (), notice)
        return not notice

    def look_up(self, rows: list[_Row]) -> list[_Found]:
        """Execute the queries of waiting rows in one batch; needs no tokenizer and changes nothing."""
        owners, queries = [row for row in rows for _ in row.asked], [query for row in rows for query in row.asked]
        try:
            found = iter(self._look_up(owners, queries))
        except BaseException as error:
            more = f" and {len(queries) - 3} more" if len(queries) > 3 else ""
            error.add_note(f"raised by the search for {', '.join(map(repr, queries[:3]))}{more}")
            raise
        return [_together([next(found) for _ in row.asked]) for row in rows]

    def _look_up(self, rows: list[_Row], queries: list[str]) -> list[tuple[list[Document], list[Hit]]]:
        """Passages and cases of each query."""
        results = checked(self.search.search(queries, self.cfg.top_k), queries)
        cases: list[list[Hit]] = [[] for _ in rows]
        asked = [i for i, row in enumerate(rows) if row.hinted] if self.cfg.use_cases else []
        if asked:
            keys, ids = [queries[i] for i in asked], [rows[i].sample.id for i in asked]
            if self.cfg.case_key == "question_query":
                keys = [f"{rows[i].sample.question} {key}" for i, key in zip(asked, keys, strict=True)]
            for i, hits in zip(asked, self.hek.cases(keys, ids, [rows[i].shown for i in asked]), strict=True):
                cases[i] = hits
        return list(zip(results, cases, strict=True))

    def observe(self, rows: list[_Row], found: list[_Found]) -> None:
        """Append to each row what its queries brought."""
        most = CHARACTERS_PER_TOKEN * self.cfg.max_document_tokens
        for row, (results, hits) in zip(rows, found, strict=True):
            row.searches += len(row.asked)
            row.queries.update(map(normalise_query, row.asked))
            shown = [different(Document(one.title[:most], one.text[:most]) for one in passages) for passages in results]
            self.neutralised += sum(count_marks(f"{one.title} {one.text}") for passages in shown for one in passages)
            case, case_ids = fill(hits, self.encoder.count, self.cfg.case_tokens, cut=True)
            self._reply(row, shown, case, case_ids, "" if any(shown) else NOTHING_FOUND)

    def _status(self, row: _Row, finish: str) -> Status:
        row.malformed += row.action.kind == "malformed"
        if finish == "broken":
            return Status.BROKEN
        if row.action.kind == "answer":
            return Status.ANSWERED
        if finish == "length" and row.action.kind == "malformed":
            return Status.TRUNCATED
        if len(row.trajectory.turns) + 1 >= self.cfg.max_turns or row.malformed > self.cfg.max_malformed:
            return Status.OUT_OF_TURNS
        return Status.RUNNING

    def _refusal(self, row: _Row) -> str:
        """Why the turn's query is not executed; empty if it is."""
        if row.action.kind == "malformed":
            return MALFORMED
        if row.action.refused:
            return row.action.refused
        if row.searches >= self.cfg.max_searches:
            return LIMIT
        repeats = self.protocol.refuses_repeats and normalise_query(row.action.text) in row.queries
        return REPEATED if repeats else ""

    def _reply(
        self, row: _Row, found: list[tuple[Document, ...]], case: str, case_ids: tuple[str, ...], notice: str
    ) -> None:
        """Append an observation whole, or end the row: half a document is no evidence. `found`: of each query asked."""
        documents = tuple(one for passages in found for one in passages)
        counts = tuple(zip(row.asked, map(len, found), strict=True))
        is_last = len(row.trajectory.turns) + 2 >= self.cfg.max_turns  # this turn is not recorded yet
        asked = Asked(row.action, counts, row.text[row.action.end :], is_last)
        segments = self.encoder.segments(self.protocol.observation(documents, case, notice, asked))
        if segments and row.closed is not None and segments[0].token_ids[0] == row.closed:
            segments[0] = Segment(segments[0].source, segments[0].token_ids[1:])  # the policy closed its turn itself
        refused = "" if row.asked else notice
        if sum(len(segment.token_ids) for segment in segments) > self._room(row):
            self._record(row, notice=refused)
            row.trajectory.status = Status.TRUNCATED
            return
        for segment in segments:
            row.trajectory.append(segment)
        row.shown.update(case_ids)
        self._record(row, refused, documents, case_ids)

    def _record(
        self, row: _Row, notice: str, documents: tuple[Document, ...] = (), cases: tuple[str, ...] = ()
    ) -> None:
        more = row.asked[1:] if row.asked else row.action.more
        turn = Turn(row.text, row.action.kind, row.action.text, documents, cases, notice, more)
        row.trajectory.turns.append(turn)

    def _room(self, row: _Row) -> int:
        length = row.trajectory.num_tokens
        budget = self.cfg.max_response_tokens - (length - row.prompt_length)
        return min(budget, self.engine.max_length - length)


def _together(found: list[tuple[list[Document], list[Hit]]]) -> _Found:
    """What the queries of a turn brought, the cases of all by falling score and each once."""
    hits = [hit for _, cases in found for hit in cases]
    if len(found) > 1:
        best: dict[str, Hit] = {}
        for hit in sorted(hits, key=lambda hit: -hit.score):
            best.setdefault(hit.experience.id, hit)
        hits = list(best.values())
    return [passages for passages, _ in found], hits
