"""Building a HEK from groups of trajectories: contrast, reflect, cluster, abstract (the paper's Algorithm 1).

Every stage counts what it took in and what it turned down; the counts are the BuildReport. Prompts and the
parser of replies are in hek_prompts.py, the clustering in clustering.py, the models that write in reflector.py.
What is slow or paid is kept in journals (journal.py), so that a build goes on where a crash ended it.
"""

import dataclasses
import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from hiexp.api_client import WriterConfig
from hiexp.clustering import HEIGHTS, calibrate_threshold, cluster, near_duplicates, representatives
from hiexp.config import ConfigError, lookup
from hiexp.data import Sample
from hiexp.encoder import Encoder
from hiexp.experience import LEVELS
from hiexp.hek import HEK, Experience
from hiexp.hek_filters import guess_language
from hiexp.hek_prompts import PROMPTS, ReflectionPrompts, parse_reply
from hiexp.hek_report import BuildReport, LevelReport
from hiexp.journal import Journal, digest
from hiexp.reflector import Reflector, Request
from hiexp.reply_parser import parse_experience
from hiexp.success import Judge, is_success
from hiexp.trajectory import Status, Trajectory

__all__ = [
    "PROMPTS",
    "BuildConfig",
    "BuildReport",
    "Pair",
    "ReflectionPrompts",
    "build_hek",
    "cluster",
    "is_success",
    "parse_experience",
    "parse_reply",
]

MAX_MEMBERS = 6
"""lessons of a cluster that one abstraction reads"""


@dataclass(frozen=True)
class BuildConfig:
    """How a HEK is made from rollouts."""

    questions: int = 0
    """build from a random subset of so many training questions; 0 = all"""
    rollouts_per_question: int = 8
    """K attempts at each question; right and wrong ones must both occur"""
    prompts: str = "full"
    """full (a chat model, attempts with searches), math (the same, written solutions), few_shot (a model that
    follows no instruction: worked examples to be continued) or compact (the lab's policy)"""
    language: str | None = "English"
    """what full and math ask the lessons to be written in, and drop what is clearly not; null = the question's own"""
    linkage: str = "average"
    """average, complete, or ward (the paper's)"""
    threshold_1: float | None = None
    """similarity above which cases join into a pattern; null = calibrated on the titles"""
    threshold_2: float | None = None
    """the same for patterns joining into a strategy"""
    min_cluster: int = 2
    """smaller clusters stay at their level"""
    max_level: int = 3
    """1 cases, 2 patterns too, 3 strategies too"""
    merge_threshold: float | None = 0.97
    """cases of one type whose titles are this close become one entry with the sources of all; null = never"""
    max_attempts: int = 3
    """replies asked for, each with a fresh seed, before a pair or cluster is given up"""
    reflect_temperature: float = 0.7
    """of the reflector's replies; 0 = greedy"""
    reflect_top_p: float = 0.9
    """see rollout.top_p"""
    max_new_tokens: int = 512
    """room for one reply"""
    tokens_per_batch: int = 32768
    """prompt and reply tokens that are generated together; bounds memory"""
    success_max_words: int = 20
    """a right answer longer than this is no success: it may only have covered the gold one"""
    logs: str = ""
    """build from this file of questions, attempts and rewards of any agent (docs/experience.md), without rollouts"""
    success_reward: float = 1.0
    """with logs that hold rewards: an attempt with this reward or more is a success"""
    dry_run: bool = False
    """print what the build will take (calls, tokens, time) and stop before anything is loaded, asked or written"""
    reflector: WriterConfig = field(default_factory=WriterConfig)
    """who writes the lessons from pairs (level 1)"""
    abstractor: WriterConfig = field(default_factory=WriterConfig)
    """who writes patterns and strategies; the policy by default, so that a teacher changes level 1 alone"""

    def __post_init__(self) -> None:
        prompts = lookup(PROMPTS, self.prompts, "prompts")
        if not prompts.use_chat and (self.reflector.url or self.abstractor.url):
            raise ConfigError(
                f"prompts={self.prompts} is plain text to be continued, but an endpoint (url) is asked in a chat; set "
                "prompts=full or math, or a model folder without a url"
            )
        if self.language is not None and not self.language.strip():
            raise ConfigError(f"language={self.language!r} names none; set it to one such as English, or null")
        lookup(HEIGHTS, self.linkage, "linkage")
        for name, least in (("rollouts_per_question", 2), ("min_cluster", 1), ("max_attempts", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least {least}")
        for name in ("questions", "max_new_tokens", "tokens_per_batch", "success_max_words"):
            if getattr(self, name) < (name != "questions"):
                raise ConfigError(f"{name}={getattr(self, name)} must be at least {int(name != 'questions')}")
        if not math.isfinite(self.success_reward):
            raise ConfigError(f"success_reward={self.success_reward} must be a number; set it between the rewards")
        if not 0 <= self.reflect_temperature < float("inf"):
            raise ConfigError(f"reflect_temperature={self.reflect_temperature} must be 0 (greedy) or above")
        if not 0 < self.reflect_top_p <= 1:
            raise ConfigError(f"reflect_top_p={self.reflect_top_p} must be in (0, 1]")
        if self.max_level not in (1, 2, 3):
            raise ConfigError(f"max_level={self.max_level} must be 1, 2 or 3")
        for name in ("threshold_1", "threshold_2", "merge_threshold"):
            value = getattr(self, name)
            if value is not None and not -1 <= value <= 1:
                raise ConfigError(f"{name}={value} is a cosine; set it in [-1, 1], or null")
        if self.threshold_1 is not None and self.threshold_2 is not None and self.threshold_2 > self.threshold_1:
            raise ConfigError(
                f"threshold_2={self.threshold_2} is above threshold_1={self.threshold_1}; a strategy joins "
                "what patterns kept apart, so set it to the same or less"
            )


@dataclass(frozen=True)
class Pair:
    """A right and a wrong attempt at one question."""

    sample: Sample
    right: Trajectory
    wrong: Trajectory


def build_hek(
    reflector: Reflector,
    groups: Sequence[Sequence[Trajectory]],  # the siblings of each sample, in the order of `samples`
    samples: Sequence[Sample],
    cfg: BuildConfig,
    seed: int,
    abstractor: Reflector | None = None,  # None: the reflector itself
    journal: Journal | None = None,  # what was clustered before
    judge: Judge | None = None,  # what a success is; None: judge_by_answer
) -> tuple[HEK, BuildReport]:
    """Algorithm 1: the store and the account of its making, the same for the same inputs and seed.

    Raises ConfigError when no question was answered both rightly and wrongly, BudgetReached at a cap. Where every reply
    was turned down the store is empty but valid, and the report's warnings say so.
    """
    abstractor, journal, encoder = abstractor or reflector, journal or Journal(), reflector.encoder
    report = BuildReport(cfg.prompts, cfg.linkage, _authors(reflector, abstractor))
    pairs = contrastive_pairs(groups, samples, judge or judge_by_answer(cfg), report)
    if not pairs:
        raise ConfigError(_nothing_to_contrast(report))
    first = _merge(reflect(reflector, pairs, report), encoder, cfg.merge_threshold, report)
    levels, vectors, level = {1: first}, {1: _embed(encoder, first)}, 1
    golds = {pair.sample.id: pair.sample.answers for pair in pairs}
    while len(levels[level]) > 1 and level < cfg.max_level:
        groups_of_rows = _cluster_level(vectors[level], level, cfg, report, journal)
        members = [[levels[level][i] for i in group] for group in groups_of_rows]
        rows = [vectors[level][group] for group in groups_of_rows]
        above = abstract(abstractor, members, rows, level + 1, golds, report)
        if not above or len(above) >= len(levels[level]):
            report.stop = f"{len(levels[level])} entries of level {level} gave {len(above)} abstractions"
            break
        levels[level] = _adopt(levels[level], above)
        level += 1
        levels[level], vectors[level] = above, _embed(encoder, above)
    else:
        deepest = level == cfg.max_level
        report.stop = "deepest level reached" if deepest else f"level {level} has {len(levels[level])} entries"
    report.finish(levels)
    settings = {"build": _recipe(cfg, reflector, abstractor), "seed": seed, "report": report.to_json()}
    everything = [entry for entries in levels.values() for entry in entries]
    vectors |= {missing: _embed(encoder, []) for missing in LEVELS if missing not in vectors}
    return HEK(everything, encoder, vectors=vectors, settings=settings), report


def judge_by_answer(cfg: BuildConfig) -> Judge:
    """What a success is where nothing but the answer tells."""
    return partial(is_success, max_words=cfg.success_max_words, is_math=cfg.prompts == "math")


def contrastive_pairs(
    groups: Sequence[Sequence[Trajectory]],
    samples: Sequence[Sample],
    judge: Judge = is_success,
    report: BuildReport | None = None,
) -> list[Pair]:
    """One pair for each question that was answered both rightly and wrongly; the others are counted.

    Where a sample has no answer (logs need none), what the successes answered stands for it, the pair's own first.
    """
    report, pairs = report or BuildReport(), []
    if len(groups) != len(samples):
        raise ValueError(f"{len(groups)} groups of trajectories for {len(samples)} samples")
    for group, sample in zip(groups, samples, strict=True):
        if any(trajectory.sample_id != sample.id for trajectory in group):
            raise ValueError(f"sample {sample.id}: its group holds trajectories of another sample")
        right = [t for t in group if judge(t, sample)]
        wrong = [t for t in group if not judge(t, sample)]
        report.questions += 1
        report.all_right += not wrong
        report.all_wrong += bool(wrong) and not right
        if right and wrong:
            best, worse = select_pair(right, wrong)
            said = dict.fromkeys(t.answer for t in (best, *right) if t.answer) or ("not recorded",)
            known = sample if sample.answers else dataclasses.replace(sample, answers=tuple(said))
            pairs.append(Pair(known, best, worse))
    report.pairs = len(pairs)
    return pairs


def select_pair(right: Sequence[Trajectory], wrong: Sequence[Trajectory]) -> tuple[Trajectory, Trajectory]:
    """The success with the fewest searches (then tokens), and the failure that parts from it last.

    A failure's distance is the length of the query prefix it shares; among equals one that gave an answer
    comes first, then the shorter.
    """
    best = min(right, key=lambda t: (t.num_searches, _length(t), t.member))
    order = [(-_shared(best, t), t.status is not Status.ANSWERED, _length(t), t.member) for t in wrong]
    return best, wrong[order.index(min(order))]


def reflect(reflector: Reflector, pairs: Sequence[Pair], report: BuildReport) -> list[Experience]:
    """Level-1 experiences (Eq. 1), one for each pair with an acceptable reply."""
    prompts = reflector.prompts
    requests = [
        Request(reflection_wordings(prompts, pair), 1, (pair.sample.question,), pair.sample.answers) for pair in pairs
    ]
    sources = [((pair.sample.id, pair.sample.question),) for pair in pairs]
    return _experiences(reflector, requests, prompts.reflect_fields, sources, [()] * len(pairs), report)


def reflection_wordings(prompts: ReflectionPrompts, pair: Pair) -> tuple[str, ...]:
    """The request for the lesson of a pair, longest first."""
    traces = [(prompts.trace(pair.right, full), prompts.trace(pair.wrong, full)) for full in (True, False)]
    return tuple(prompts.reflect(pair.sample.question, pair.sample.answers[0], *both) for both in traces)


def abstract(
    reflector: Reflector,
    clusters: Sequence[Sequence[Experience]],
    vectors: Sequence[np.ndarray],  # of each cluster [members, D]
    level: int,
    golds: Mapping[str, Sequence[str]],  # sample id -> answers that must not be told
    report: BuildReport,
) -> list[Experience]:
    """Experiences of `level`, one for each cluster (of the level below) with an acceptable reply."""
    prompts, requests, sources = reflector.prompts, [], []
    for members, rows in zip(clusters, vectors, strict=True):
        items = [(members[i].title, members[i].description) for i in representatives(rows, MAX_MEMBERS)]
        wordings = tuple(prompts.abstract(level, items[:n]) for n in range(len(items), min(2, len(items)) - 1, -1))
        qa_groups = sources_of(members)
        answers = tuple(gold for qid, _ in qa_groups for gold in golds[qid])
        requests.append(Request(wordings, level, tuple(question for _, question in qa_groups), answers))
        sources.append(qa_groups)
    children = [tuple(member.id for member in members) for members in clusters]
    return _experiences(reflector, requests, prompts.abstract_fields, sources, children, report)


def _experiences(
    reflector: Reflector,
    requests: Sequence[Request],
    fields: Sequence[str],
    sources: Sequence[tuple[tuple[str, str], ...]],
    children: Sequence[tuple[str, ...]],
    report: BuildReport,
) -> list[Experience]:
    if not requests:
        return []
    level = requests[0].level
    replies = reflector.ask(requests, fields, report.replies.setdefault(level, Counter()))
    report.given_up[level] = sum(reply is None for reply in replies)
    return [
        Experience(
            id=f"E{level}-{i:06d}",
            level=level,
            type=str(reply.get("type", "mixed")) if level == 1 else ("pattern", "strategy")[level - 2],
            title=reply["title"],
            description=reply["description"],
            tags=tuple(reply["tags"]),
            thinking=reply.get("thinking", ""),
            qa_groups=qa_groups,
            child_ids=child_ids,
            source_model=reflector.writer.name,
            language=guess_language(f"{reply['title']} {reply['description']}"),
        )
        for i, (reply, qa_groups, child_ids) in enumerate(zip(replies, sources, children, strict=True))
        if reply is not None
    ]


def _merge(
    entries: Sequence[Experience], encoder: Encoder, threshold: float | None, report: BuildReport
) -> list[Experience]:
    """Near duplicates of one type as one entry: the sources of all, the shortest body."""
    if threshold is None:
        return list(entries)
    groups = near_duplicates(_embed(encoder, entries), [entry.type for entry in entries], threshold)
    report.merged = len(entries) - len(groups)
    merged = []
    for group in groups:
        members = [entries[i] for i in group]
        shortest = min((member.description for member in members), key=lambda text: len(text.split()))
        merged.append(dataclasses.replace(members[0], description=shortest, qa_groups=sources_of(members)))
    return merged


def _cluster_level(
    rows: np.ndarray, level: int, cfg: BuildConfig, report: BuildReport, journal: Journal
) -> list[list[int]]:
    """Rows of the clusters that are large enough to be abstracted."""
    given = (cfg.threshold_1, cfg.threshold_2)[level - 1]
    at_most = report.levels[-1].threshold if report.levels else 1.0

    def compute() -> tuple[float, str, list[list[int]]]:
        tau, how = calibrate_threshold(rows, level, cfg.linkage, at_most) if given is None else (given, "given")
        notes: list[str] = []
        groups = cluster(rows, tau, cfg.linkage, notes=notes)
        return tau, "; ".join([how, *notes]), groups

    key = digest("cluster", hashlib.sha256(rows.tobytes()).hexdigest(), rows.shape, level, cfg.linkage, given, at_most)
    threshold, how, groups = journal.remember(key, compute)
    report.levels.append(LevelReport(level, threshold, how, [len(group) for group in groups]))
    return [group for group in groups if len(group) >= cfg.min_cluster]


def _adopt(entries: Sequence[Experience], above: Sequence[Experience]) -> list[Experience]:
    parent = {child_id: entry.id for entry in above for child_id in entry.child_ids}
    return [dataclasses.replace(entry, parent_id=parent.get(entry.id)) for entry in entries]


def sources_of(members: Sequence[Experience]) -> tuple[tuple[str, str], ...]:
    """Every (id, question) behind the members, once each."""
    return tuple(dict.fromkeys(source for member in members for source in member.qa_groups))


def _embed(encoder: Encoder, entries: Sequence[Experience]) -> np.ndarray:
    return encoder.encode([entry.title for entry in entries], "query")


def _shared(a: Trajectory, b: Trajectory) -> int:
    """Queries that two trajectories have in common at their start."""
    same = 0
    for left, right in zip(a.queries, b.queries, strict=False):
        if left.casefold().split() != right.casefold().split():
            break
        same += 1
    return same


def _length(trajectory: Trajectory) -> int:
    """Tokens, or (of another agent's logs) characters that the agent wrote."""
    return trajectory.num_tokens or sum(len(turn.text) for turn in trajectory.turns)


def _authors(reflector: Reflector, abstractor: Reflector) -> str:
    first, above = reflector.writer.name, abstractor.writer.name
    return first if first == above else f"{first}, with abstractions by {above}"


def _recipe(cfg: BuildConfig, reflector: Reflector, abstractor: Reflector) -> dict[str, Any]:
    """The settings that shape a HEK: who wrote it, but not where that model was reached or what it might cost."""
    recipe = {name: value for name, value in dataclasses.asdict(cfg).items() if name != "dry_run"}
    return recipe | {"reflector": reflector.writer.name, "abstractor": abstractor.writer.name}


def _nothing_to_contrast(report: BuildReport) -> str:
    easier = "harder" if report.all_right > report.all_wrong else "easier"
    return (
        f"no HEK can be built: of {report.questions} questions {report.all_right} were answered rightly "
        f"every time and {report.all_wrong} never, so none has both a success and a failure; use more questions, a "
        f"larger rollouts_per_question, a higher temperature or {easier} questions"
    )
