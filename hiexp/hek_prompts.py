"""What a reflector is asked, how its reply is read, and which replies are turned down. Pure text.

A prompt set is one entry of PROMPTS: `full` for a chat model (the paper's Tables 11 and 12 in our words),
`compact` for a tiny word-level policy that was trained on exactly this form. The parser is shared: one JSON
object, strictly.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hiexp.metrics import normalise
from hiexp.trajectory import Trajectory

TYPES = ("success_factor", "pitfall", "mixed")
MAX_TITLE_WORDS = 24
MAX_DESCRIPTION_WORDS = {1: 80, 2: 60, 3: 60}

_OPENING = re.compile(r"<think>|\{")
_OBJECT = re.compile(r'\{\s*"')


@dataclass(frozen=True)
class ReflectionPrompts:
    """Templates of the two requests, and the fields that a reply to each must have."""

    reflect_template: str
    """with {question} {gold} {right} {wrong}"""
    abstract_template: str
    """with {level} {guide} {members}"""
    member: str
    """one line of {members}, with {title} {description}"""
    separator: str
    """between the parts of a trace"""
    trace: Callable[[Trajectory, bool], list[str]]
    """a trajectory as parts of text; False leaves the documents out, for a short context window"""
    reflect_fields: tuple[str, ...]
    abstract_fields: tuple[str, ...]
    own_tags: bool
    """the template's tags are tokens of their own; otherwise no control token in the text is taken for one"""

    def reflect(self, question: str, gold: str, right: Sequence[str], wrong: Sequence[str]) -> str:
        """Ask for the lesson in which two traces of one question differ."""
        return self.reflect_template.format(
            question=question, gold=gold, right=self.separator.join(right), wrong=self.separator.join(wrong)
        )

    def abstract(self, level: int, items: Sequence[tuple[str, str]]) -> str:
        """Ask for the one `level` lesson behind the (title, description) items of a cluster."""
        lines = "\n".join(self.member.format(title=title, description=text) for title, text in items)
        return self.abstract_template.format(level=level, guide=GUIDES[level], members=lines)


GUIDES = {
    2: "Describe a reusable plan, step by step, for this type of question.",
    3: "Describe a rule that holds across types of question.",
}

_REFLECT = """\
Below are two attempts at the same question by an assistant that can search. The first reached the right
answer, the second did not.

Question: {question}
Right answer: {gold}

Attempt 1 (right)
{right}

Attempt 2 (wrong)
{wrong}

Find the earliest step at which the attempts part, and say which decision helped and which one hurt. Turn
that into a lesson for OTHER questions of the same shape. Reply with one JSON object and nothing else, with the
fields
"type": "success_factor" if the lesson is what to do, "pitfall" if what to avoid, "mixed" if both;
"title": when the lesson applies, at most 24 words;
"tags": a list of short labels for the shape of the question, such as "comparison" or "bridge";
"thinking": your analysis of the two attempts;
"description": what to do and what to avoid, as instructions, at most 80 words.
Title and description must not contain the answer, or any name, number or date of this question.
"""

_ABSTRACT = """\
These notes were taken in related situations.

{members}

State the one procedure they share. {guide} Keep the conditions under which it fails, merge what is said
twice, drop what only one note supports, and add nothing of your own. Reply with one JSON object and nothing
else, with the fields
"title": when it applies, at most 24 words;
"tags": a list of short labels;
"thinking": what the notes have in common;
"description": the procedure, at most 60 words.
"""

_COMPACT_REFLECT = """\
<reflect>
question : {question}
gold : {gold}
right : {right}
wrong : {wrong}
</reflect>
"""

_COMPACT_ABSTRACT = """\
<abstract>
level : {level}
{members}
</abstract>
"""


def full_trace(trajectory: Trajectory, documents: bool) -> list[str]:
    """Each turn up to 300 characters, of each document its title and 200 characters, then how it ended."""
    parts = []
    for number, turn in enumerate(trajectory.turns, 1):
        parts.append(f"Step {number}: {_clip(turn.text, 300)}")
        if turn.action == "search":
            parts.append(f"  searched for: {_clip(turn.argument, 300)}")
        parts += [f"  found: {d.title}: {_clip(d.text, 200)}" for d in turn.documents if documents]
        if turn.notice:
            parts.append(f"  was told: {turn.notice}")
    answer = _clip(trajectory.answer, 300) or f"none ({trajectory.status.value})"
    return [*parts, f"Final answer after {trajectory.num_searches} searches: {answer}"]


def compact_trace(trajectory: Trajectory, documents: bool) -> list[str]:
    """The queries and the final answer ("-" for none)."""
    return [*trajectory.queries, trajectory.answer or "-"]


def parse_reply(text: str, required: Sequence[str]) -> dict[str, Any] | str:
    """The first JSON object of a reply that has the `required` fields, or the reason why there is none.

    Text inside <think> does not count. A scan that knows strings finds the objects, so fences, braces in
    prose and back-ticks in values do no harm; no part of a cut-off object and none nested in another is ever
    taken. Strings come back with white space collapsed. Reasons: empty, unfinished_thinking, truncated,
    no_object, malformed, missing_<field>, bad_<field>.
    """
    if not text.strip():
        return "empty"
    decoder = json.JSONDecoder(strict=False)  # a raw line break inside a string is read as one
    position, reason = _after_orphan_thinking(text), "no_object"
    while found := _OPENING.search(text, position):
        start = found.start()
        if found[0] == "<think>":
            close = text.find("</think>", start)
            if close < 0:
                return "unfinished_thinking"
            position = close + len("</think>")
            continue
        try:
            value, position = decoder.raw_decode(text, start)
        except (json.JSONDecodeError, RecursionError):
            end = _matching_brace(text, start)
            if end is None and _OBJECT.match(text, start):
                return "truncated"
            position = start + 1 if end is None else end + 1
            reason = "malformed" if _OBJECT.match(text, start) else reason
            continue
        checked = _check_fields(value, required)
        if not isinstance(checked, str):
            return checked
        reason = checked
    return reason


def turn_down(reply: dict[str, Any], level: int, questions: Sequence[str], golds: Sequence[str]) -> str | None:
    """Why a well-formed reply must not enter the HEK, or None: too long, tells an answer or an entity."""
    title, description = reply["title"], reply["description"]
    if len(title.split()) > MAX_TITLE_WORDS:
        return "title_too_long"
    if len(description.split()) > MAX_DESCRIPTION_WORDS[level]:
        return "description_too_long"
    for form in (normalise, _bare):  # "New-York" is "newyork" in the one and "new york" in the other
        body = f" {form(title)} | {form(description)} "
        if any(f" {form(gold)} " in body for gold in golds if _tells(normalise(gold))):
            return "gold_leak"
    words = f" {_bare(title)} "
    if any(f" {name} " in words for question in questions for name in entity_names(question)):
        return "entity_name"
    return None


def entity_names(question: str) -> list[str]:
    """Runs of capitalised words, lower-cased, without the question's first word (which begins a sentence).

    A run of two words would be safer; one is enough here, since names of one word are names too. What is
    compared is the whole run: "The Hobbit" does not bar a title with "the". Single letters are passed over.
    """
    names, run = [], []
    for word in [*question.split()[1:], ""]:
        bare = word.strip("\"'()[]{}?!.,:;")
        if bare[:1].isupper():
            run.append(bare)
        if run and (not bare[:1].isupper() or word[-1] in "?!.,:;"):
            names.append(_bare(" ".join(run)))
            run = []
    return [name for name in names if len(name) > 1]


def _tells(gold: str) -> bool:
    """Whether a normalised answer gives something away: two words, or four characters; never yes or no."""
    return (" " in gold or len(gold) >= 4) and gold not in ("yes", "no")


def _bare(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.casefold()))


def _clip(text: str, limit: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else f"{text[:limit]} ..."


def _after_orphan_thinking(text: str) -> int:
    """Where the reply begins when a chat template has opened the reasoning block in the prompt."""
    close, opening = text.find("</think>"), text.find("<think>")
    return close + len("</think>") if close >= 0 and (opening < 0 or opening > close) else 0


def _matching_brace(text: str, start: int) -> int | None:
    """The brace that closes the one at `start`; braces inside double-quoted strings do not count."""
    depth, quoted, i = 0, False, start
    while i < len(text):
        character = text[i]
        if quoted and character == "\\":
            i += 1
        elif character == '"':
            quoted = not quoted
        elif not quoted and character in "{}":
            depth += 1 if character == "{" else -1
            if depth == 0:
                return i
        i += 1
    return None


def _check_fields(value: dict[str, Any], required: Sequence[str]) -> dict[str, Any] | str:
    clean = dict(value)
    for field in required:
        if field not in value:
            return f"missing_{field}"
    for field in ("type", "title", "thinking", "description"):
        if field in value:
            if not isinstance(value[field], str) or (field in required and not value[field].strip()):
                return f"bad_{field}"
            clean[field] = " ".join(value[field].split())
    if "type" in required and clean["type"] not in TYPES:
        return "bad_type"
    tags = value.get("tags", [])
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        return "bad_tags"
    clean["tags"] = [" ".join(tag.split()) for tag in tags]
    return clean


PROMPTS = {
    "full": ReflectionPrompts(
        reflect_template=_REFLECT,
        abstract_template=_ABSTRACT,
        member="- {title}: {description}",
        separator="\n",
        trace=full_trace,
        reflect_fields=("type", "title", "tags", "thinking", "description"),
        abstract_fields=("title", "tags", "thinking", "description"),
        own_tags=False,
    ),
    "compact": ReflectionPrompts(
        reflect_template=_COMPACT_REFLECT,
        abstract_template=_COMPACT_ABSTRACT,
        member="- {title} : {description}",
        separator=" | ",
        trace=compact_trace,
        reflect_fields=("title", "description"),
        abstract_fields=("title", "description"),
        own_tags=True,
    ),
}
