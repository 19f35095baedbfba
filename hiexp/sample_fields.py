"""What a record of a question file says, whatever its publisher calls it: id, question, golds, kind, hops, facts.

Pure functions of one record (a dict of plain values). A data set that names its fields differently needs its names in
the key tuples below. Nothing is guessed: what a record does not state is empty or 0.
"""

import ast
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from decimal import Decimal
from typing import Any

from hiexp.notation import last_boxed

Record = Mapping[str, Any]

QUESTION_KEYS = ("question", "Question", "question_text", "problem", "Problem")
PROMPT_KEYS = ("Prompt", "prompt")
"""FRAMES' table has a Prompt; a trainer's row has a prompt of messages, of which the last is the question"""
GOLD_KEYS = (
    "answers",
    "golden_answers",
    "answer",
    "Answer",
    "expected_answer",
    "final_answer",
    "ground_truth",
)
ID_KEYS = ("id", "_id", "question_id", "qid", "idx", "unique_id", "test_id", "ID")
FAMILY_KEYS = ("family", "type", "reasoning_type", "reasoning_types", "subject", "subfield")
ANSWER_SPLIT = "<|answer_split|>"
"""joins several golds in one string of DeepResearcher's files"""

_MUSIQUE_ID = re.compile(r"(?:^|_)([2-9])hop\d?__")
_HOPS_OF_TYPE = {"bridge": 2, "comparison": 2, "compositional": 2, "inference": 2, "bridge_comparison": 4}
"""types of HotpotQA and 2WikiMultiHopQA, by how their questions were made"""


def id_of(record: Record) -> str:
    """The record's id, or "".

    A trainer's file often holds several sets that number their rows alike: there the name of the set goes before an
    id that does not hold it already.
    """
    own = text_of(first(record, ID_KEYS)) or text_of(_inner(record, "extra_info", "index"))
    source = source_of(record)
    return own if not own or source.casefold() in own.casefold() else f"{source}-{own}"


def source_of(record: Record) -> str:
    """The set that a row of a file of several sets is from ("RUC/nq" is "nq"), or ""."""
    return text_of(record.get("data_source")).rstrip("/").rsplit("/", 1)[-1]


def question_of(record: Record) -> str:
    """The question, stripped, or "". What a trainer keeps beside its prompt goes before the prompt around it."""
    candidates = [first(record, QUESTION_KEYS)]
    candidates += [_inner(record, "extra_info", key) for key in ("question", "raw_problem")]
    prompt = first(record, PROMPT_KEYS)
    is_chat = isinstance(prompt, list) and prompt and isinstance(prompt[-1], Mapping)
    candidates.append(prompt[-1].get("content") if is_chat else prompt)
    return next((value.strip() for value in candidates if isinstance(value, str) and value.strip()), "")


def golds_of(record: Record) -> list[Any]:
    """The gold answers as they stand, aliases last; the first place that holds any counts. Blanks are dropped.

    Values may be of any type: what is no text and no number is for the caller to refuse.
    """
    return next(filter(None, _places(record)), []) + listed(record.get("answer_aliases"))


def _places(record: Record) -> Iterator[list[Any]]:
    for key in GOLD_KEYS:
        yield listed(_split(record.get(key)) if key == "ground_truth" else record.get(key))
    truth = _inner(record, "reward_model", "ground_truth")
    yield listed(truth.get("target") if isinstance(truth, Mapping) else _split(truth))
    yield [gold for answer in listed(record.get("answers_objects")) for gold in _spans(answer)]
    yield listed(_inner(record, "extra_info", "answer"))
    solution = record.get("solution")
    yield listed(last_boxed(solution, keep_text=True) if isinstance(solution, str) else None)


def _spans(answer: Any) -> list[Any]:
    """Golds of an answer with `spans`, `number` and `date {day, month, year}`, of which one is filled."""
    if not isinstance(answer, Mapping):
        return [answer]
    day = answer.get("date")
    parts = [text_of(day.get(part)) for part in ("day", "month", "year")] if isinstance(day, Mapping) else []
    return listed(answer.get("spans")) or listed(answer.get("number")) or listed(" ".join(filter(None, parts)))


def _split(value: Any) -> Any:
    return value.split(ANSWER_SPLIT) if isinstance(value, str) else value


def answer_text(value: Any) -> str:
    """One gold as stripped text, 142.0 as "142", "" for a blank; TypeError for what is no answer."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float, Decimal, date, type(None))):
        raise TypeError(f"a gold answer of type {type(value).__name__}")
    return text_of(value)


def family_of(record: Record) -> str:
    """What kind of question it is: the data set's own label, else the set it is from, else ""."""
    return text_of(first(record, FAMILY_KEYS)) or source_of(record)


def hops_of(record: Record) -> int:
    """Hops as the data set labels them, 0 where it does not.

    MuSiQue's ids and decompositions name them; MoreHopQA counts the hops that it added to two; HotpotQA's and 2Wiki's
    types stand for a number of paragraphs.
    """
    if _is_count(record.get("hops")):
        return record["hops"]
    if _is_count(record.get("no_of_hops")):  # before the id, which may be that of the MuSiQue question it began as
        return 2 + record["no_of_hops"]
    if match := _MUSIQUE_ID.search(id_of(record)):
        return int(match[1])
    steps = listed(record.get("question_decomposition"))
    if steps and all(isinstance(step, Mapping) and "paragraph_support_idx" in step for step in steps):
        return len(steps)
    return _HOPS_OF_TYPE.get(text_of(record.get("type")), 0) if "family" not in record else 0


def facts_of(record: Record) -> int:
    """Number of supporting facts, 0 where none are stated.

    Sentences in HotpotQA and 2Wiki; paragraphs in MuSiQue, IRCoT's files and MoreHopQA; articles in FRAMES.
    """
    if _is_count(record.get("facts")):
        return record["facts"]
    counts = (
        lambda: len(_written(record.get("supporting_facts"))),
        lambda: _count(record.get("paragraphs"), lambda part: part.get("is_supporting") is True),
        lambda: _count(record.get("contexts"), lambda part: part.get("is_supporting") is True),
        lambda: _count(record.get("question_decomposition"), lambda part: part.get("paragraph_support_title")),
        lambda: len(_written(record.get("wiki_links"))),
        lambda: len(listed(record.get("supporting_ids"))),
        lambda: len(listed(record.get("supporting_titles"))),
    )
    return next((count for count in (rule() for rule in counts) if count), 0)


def is_unanswerable(record: Record) -> bool:
    """MuSiQue-Full's twin of a question whose paragraphs lack the answer: not to be asked of a search agent."""
    return record.get("answerable") is False


def first(record: Record, keys: Sequence[str]) -> Any:
    """The value under the first of `keys` that holds one."""
    return next((record[key] for key in keys if key in record and not is_blank(record[key])), None)


def is_blank(value: Any) -> bool:
    """None, NaN (a table's None) and white space."""
    if isinstance(value, str):
        return not value.strip()
    return value is None or (isinstance(value, float) and math.isnan(value))


def listed(value: Any) -> list[Any]:
    """A value as a list without blanks."""
    values = value if isinstance(value, (list, tuple)) else [value]
    return [item for item in values if not is_blank(item)]


def text_of(value: Any) -> str:
    """A scalar as text: "" for a blank, whole floats without their point."""
    if is_blank(value):
        return ""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value).strip()


def literal_list(text: str, kinds: type | tuple[type, ...] = str) -> list[Any] | str:
    """A list of `kinds` written as text, as tables hold it (JSON or Python), or the text as it was."""
    if text[:1] != "[" or text[-1:] != "]":
        return text
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
            continue
        if isinstance(value, list) and value and all(isinstance(item, kinds) for item in value):
            return value
    return text


def _inner(record: Record, outer: str, key: str) -> Any:
    value = record.get(outer)
    return value.get(key) if isinstance(value, Mapping) else None


def _written(value: Any) -> list[Any]:
    """A list that may be kept as text, or as a column `title` beside its other columns."""
    if isinstance(value, Mapping):
        value = value.get("title")
    if isinstance(value, str):
        value = literal_list(value, (str, list))
    return listed(value) if isinstance(value, list) else []


def _count(parts: Any, wanted: Callable[[Record], Any]) -> int:
    return sum(1 for part in listed(parts) if isinstance(part, Mapping) and wanted(part))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
