"""Logs of any agent, as groups of attempts that a HEK can be built from: question, trajectories, rewards.

    {"id": "q7", "question": "...", "answers": ["..."], "trajectories": [...], "rewards": [1, 0]}    a question a line
    {"question_id": "q7", "question": "...", "trajectory": "...", "reward": 1}                       an attempt a line

An attempt is plain text, a list of chat messages, a list of steps, or an object that holds one of these under a name
of FORMS. `id`, `answers` and (where there are answers) the rewards may be missing; docs/experience.md has it in full.
Whatever has another shape is an error that names file, line and remedy; nothing is skipped in silence.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hiexp.attempts import HELP, as_text, first_of, turns_of_messages, turns_of_steps, turns_of_text
from hiexp.data import GOLD_KEYS, ID_KEYS, QUESTION_KEYS, DataError, Sample, records, subset
from hiexp.trajectory import Status, Trajectory

GROUP_KEYS = ("question_id", "sample_id", "qid", "prompt_id", "group_id")
ATTEMPTS_KEYS = ("trajectories", "attempts", "rollouts")
REWARDS_KEYS = ("rewards", "scores")
REWARD_KEYS = ("reward", "score", "success", "correct")
FORMS = ("trajectory", "messages", "steps", "turns", "text", "response", "completion")


@dataclass
class Logs:
    """Questions in the order of the file, and the attempts at each."""

    path: str
    samples: list[Sample]
    """without answers where the logs have none"""
    groups: dict[str, list[Trajectory]]
    """by sample id"""
    has_rewards: bool
    digest: str
    """sha256 of the file"""

    def subset(self, n: int, seed: int) -> "Logs":
        """`n` random questions with all their attempts; 0 = all."""
        return replace(self, samples=subset(self.samples, n, seed))

    def attempts(self) -> list[list[Trajectory]]:
        """The groups, in the order of the samples."""
        return [self.groups[sample.id] for sample in self.samples]

    def judge(self, least: float) -> Callable[[Trajectory, Sample], bool] | None:
        """Success by reward, or None where there are no rewards and the answers decide."""
        return (lambda attempt, _: attempt.reward >= least) if self.has_rewards else None

    def nothing_to_contrast(self, least: float) -> str:
        """Why no question has both a success and a failure, from what the rewards are."""
        rewards = [attempt.reward for group in self.attempts() for attempt in group]
        if not self.has_rewards:
            return f"{self.path}: no question was answered both rightly and wrongly; log more attempts at each"
        return (
            f"{self.path}: no question has both a success (reward >= build.success_reward={least:g}) and a failure; "
            f"the rewards of {len(rewards)} attempts at {len(self.samples)} questions lie between {min(rewards):g} and "
            f"{max(rewards):g}: set build.success_reward between them, or log more attempts at each question"
        )


@dataclass
class _Group:
    where: str
    id: str = ""
    question: str = ""
    answers: tuple[str, ...] = ()
    attempts: list[Trajectory] = field(default_factory=list)


def read_logs(path: str | Path, known: Callable[[], Mapping[str, Sample]] = dict) -> Logs:
    """The questions and attempts of a file of JSON lines (or one JSON list).

    `known` gives samples by id, and is called only for a line that has an id and no question, such as those of a run's
    trajectories.jsonl. Raises ConfigError for a missing or empty file, DataError for a line that cannot be used.
    """
    groups: dict[str, _Group] = {}
    samples: Mapping[str, Sample] | None = None
    rewarded: dict[bool, str] = {}
    for where, record in records(path):
        attempts, rewards = _attempts(record, where)
        question = as_text(first_of(record, QUESTION_KEYS))
        key, answers = as_text(first_of(record, GROUP_KEYS)), _answers(record, where)
        own = as_text(first_of(record, ID_KEYS))
        if not question and key in groups:
            question = groups[key].question
        if not question and (key or own):
            samples = known() if samples is None else samples
            if sample := samples.get(key or own):
                question, answers = sample.question, answers or sample.answers
        question = question or _asked(attempts)
        if not question:
            raise DataError(
                f"{where}: no question; add `question` to the line, or name in data.train a file that has it under "
                f"this id ({key or own or 'there is none'})"
            )
        name = key or own or _name(question)
        if not key:  # an id of a line with one attempt may be the attempt's own
            key = own if own and first_of(record, ATTEMPTS_KEYS) is not None else _plain(question)
        group = groups.setdefault(key, _Group(where, name, question, answers))
        if _plain(group.question) != _plain(question):
            raise DataError(f"{where}: question {key!r} has another text at {group.where}; give each question its id")
        group.answers = group.answers or answers
        for item, reward in zip(attempts, rewards, strict=True):
            rewarded.setdefault(reward is not None, where)
            group.attempts.append(_trajectory(item, group, reward, where))
    _check(groups, rewarded)
    found = [Sample(group.id, group.question.strip(), group.answers) for group in groups.values()]
    by_id = {group.id: group.attempts for group in groups.values()}
    if len(by_id) < len(found):
        twice = next(one.id for i, one in enumerate(found) if one.id in {other.id for other in found[:i]})
        raise DataError(f"{path}: two questions have the id {twice!r}; ids must be unique")
    return Logs(str(path), found, by_id, True in rewarded, hashlib.sha256(Path(path).read_bytes()).hexdigest())


def _check(groups: Mapping[str, _Group], rewarded: Mapping[bool, str]) -> None:
    if len(rewarded) == 2:
        raise DataError(f"{rewarded[False]}: no reward, but {rewarded[True]} has one; give every attempt its reward")
    for group in groups.values():
        if False in rewarded and not group.answers:
            raise DataError(f"{group.where}: neither rewards nor answers, so nothing tells a success; add one of them")


def _attempts(record: dict[str, Any], where: str) -> tuple[list[Any], list[float | None]]:
    """The attempts of a line as they stand there, and the reward of each (None: it has none)."""
    items = first_of(record, ATTEMPTS_KEYS)
    if items is None:
        if not any(form in record for form in FORMS):
            wanted, names = ", ".join(FORMS), ", ".join(list(record)[:8])
            raise DataError(f"{where}: no attempt; expected `trajectories` (a list) or {wanted}; found {names}; {HELP}")
        inner = record.get("trajectory")
        return [record], [_reward((inner if isinstance(inner, dict) else {}) | record, where)]
    if not isinstance(items, list) or not items:
        raise DataError(f"{where}: `trajectories` must be a list of at least one attempt; {HELP}")
    rewards = first_of(record, REWARDS_KEYS)
    if rewards is None:
        return items, [_reward(item, where) if isinstance(item, dict) else None for item in items]
    if not isinstance(rewards, list) or len(rewards) != len(items):
        count = len(rewards) if isinstance(rewards, list) else "no list of"
        raise DataError(f"{where}: {len(items)} trajectories, {count} rewards; give one for each, in the same order")
    return items, [_finite(reward, where) for reward in rewards]


def _reward(item: Mapping[str, Any], where: str) -> float | None:
    value = first_of(item, REWARD_KEYS)
    return None if value is None else _finite(value, where)


def _finite(value: Any, where: str) -> float:
    if not isinstance(value, (bool, int, float)) or not math.isfinite(value):
        raise DataError(f"{where}: reward {value!r} is no finite number (or true, false)")
    return float(value)


def _answers(record: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """Gold answers of a line. In a line with one attempt, `answer` is what the agent answered."""
    is_whole = first_of(record, ATTEMPTS_KEYS) is not None
    value = first_of(record, GOLD_KEYS if is_whole else [key for key in GOLD_KEYS if key != "answer"])
    values = value if isinstance(value, list) else [value]
    if any(isinstance(one, (dict, list, bool)) for one in values):
        raise DataError(f"{where}: answers must be texts or numbers, got {value!r}")
    return tuple(dict.fromkeys(text for text in map(as_text, values) if text))


def _trajectory(item: Any, group: _Group, reward: float | None, where: str) -> Trajectory:
    """One attempt; our own records keep their tokens, for others only the text is known."""
    record = item if isinstance(item, dict) else {"trajectory": item}
    member, status = len(group.attempts), Status.TRUNCATED
    if {"segments", "turns", "status"} <= set(record):
        try:
            attempt = Trajectory.from_json(record)
        except (KeyError, ValueError, TypeError) as error:
            raise DataError(f"{where}: a damaged trajectory of a run ({type(error).__name__}: {error})") from error
        attempt.sample_id, attempt.member, attempt.reward = group.id, member, reward or 0.0
        return attempt
    form = next((name for name in FORMS if name in record), None)
    content = record[form] if form else None
    if isinstance(content, dict):  # {"trajectory": {"messages": [...]}}
        return _trajectory(content | {"answer": record.get("answer", content.get("answer"))}, group, reward, where)
    if isinstance(content, str):
        turns = turns_of_text(content)
    elif isinstance(content, list) and content and all(isinstance(one, dict) for one in content):
        is_chat = all("role" in one for one in content)
        turns = (turns_of_messages if is_chat else turns_of_steps)(content, where)
    else:
        kind = (
            f"a {type(content).__name__} under {form!r}" if form else f"an object with {', '.join(record) or 'nothing'}"
        )
        raise DataError(
            f"{where}: attempt {member + 1} is {kind}; expected text, a list of {{role, content}} messages or a list "
            f"of {{text, query, documents, answer}} steps; {HELP}"
        )
    answer = as_text(record.get("answer")) or next((one.argument for one in turns[::-1] if one.action == "answer"), "")
    return Trajectory(
        group.id, member, turns=turns, status=Status.ANSWERED if answer else status, answer=answer, reward=reward or 0.0
    )


def _asked(attempts: Sequence[Any]) -> str:
    """The first user message of a chat, where a line has no question."""
    item = attempts[0]
    messages = first_of(item, FORMS) if isinstance(item, dict) else item
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict) and message.get("role") == "user" and isinstance(message.get("content"), str):
            return message["content"].strip()
    return ""


def _plain(question: str) -> str:
    return " ".join(question.casefold().split())


def _name(question: str) -> str:
    return "log-" + hashlib.sha256(_plain(question).encode()).hexdigest()[:12]
