"""What a reflector is asked. Pure text; reply_parser.py reads the replies and hek_filters.py turns them down.

A prompt set is one entry of PROMPTS: `full` for a chat model and attempts with searches (the paper's Tables 11 and 12
in our words), `math` for a chat model and written solutions, `compact` for a tiny word-level policy that was trained on
exactly this form: these ask for one JSON object with the same fields. `few_shot` is for a model that follows no
instruction: plain text with worked examples, to be continued by two lines.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hiexp.hek_filters import entity_names, turn_down
from hiexp.reply_parser import HEADING, TYPES, parse_lines, parse_reply
from hiexp.trajectory import Trajectory

__all__ = ["PROMPTS", "TYPES", "ReflectionPrompts", "entity_names", "parse_reply", "turn_down"]

SOLUTION_LENGTHS = {True: (1200, 800), False: (400, 400)}
"""characters of a written solution that are shown, from its start and its end; False for a short context window"""


@dataclass(frozen=True)
class ReflectionPrompts:
    """Templates of the two requests, and the fields that a reply to each must have."""

    reflect_template: str
    """with {question} {gold} {right} {wrong}, and {language} where a chat model is asked"""
    abstract_template: str
    """with {level} {guide} {members}, and {language}"""
    member: str
    """one line of {members}, with {title} {description}"""
    separator: str
    """between the parts of a trace"""
    trace: Callable[[Trajectory, bool], list[str]]
    """a trajectory as parts of text; False leaves the documents (or more of a solution) out, for a short window"""
    reflect_fields: tuple[str, ...]
    abstract_fields: tuple[str, ...]
    own_tags: bool
    """the template's tags are tokens of their own; otherwise no control token in the text is taken for one"""
    language: str | None = None
    """what the lesson is to be written in; None: the language of the question"""
    use_chat: bool = True
    """a user message, where the model has a chat template; False: plain text for the model to continue"""
    parse: Callable[[str, Sequence[str]], dict[str, Any] | str] = parse_reply
    """reads a reply: its fields, or the reason why there are none"""
    stop: tuple[str, ...] = ()
    """strings that end a reply"""
    examples: tuple[str, ...] = ()
    """what the templates' own examples say, sentence by sentence; a reply that repeats one is turned down"""

    def asking_for(self, language: str | None) -> "ReflectionPrompts":
        """The same prompts with another language; `self` where they do not name one (the compact ones)."""
        return replace(self, language=language) if "{language}" in self.reflect_template else self

    def reflect(self, question: str, gold: str, right: Sequence[str], wrong: Sequence[str]) -> str:
        """Ask for the lesson in which two traces of one question differ."""
        language = self.language or "the language of the question"
        attempts = {"right": self.separator.join(right), "wrong": self.separator.join(wrong)}
        return self.reflect_template.format(question=question, gold=gold, language=language, **attempts)

    def abstract(self, level: int, items: Sequence[tuple[str, str]]) -> str:
        """Ask for the one `level` lesson behind the (title, description) items of a cluster."""
        lines = "\n".join(self.member.format(title=title, description=text) for title, text in items)
        language = self.language or "the language of the notes"
        kind = KINDS[level]
        return self.abstract_template.format(
            level=level, guide=GUIDES[level], kind=kind, members=lines, language=language
        )


GUIDES = {
    2: "Describe a reusable plan, step by step, for this type of question.",
    3: "Describe a rule that holds across types of question.",
}
KINDS = {2: "Pattern", 3: "Strategy"}

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
Title and description must not contain the answer, or any name, number or date of this question. Write title, tags
and description in {language}, whatever the attempts are written in.
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
Write title, tags and description in {language}.
"""

_MATH_REFLECT = """\
Below are two written solutions of the same problem. The first ends in the right answer, the second does not.

Problem: {question}
Right answer: {gold}

Solution 1 (right)
{right}

Solution 2 (wrong)
{wrong}

Find the first line at which the second goes wrong: a method that cannot work, a case or condition left out, a false
identity, a slip in the calculation, or an answer in another form than was asked for. Say which choice in the first
avoids it. Turn that into a lesson for OTHER problems of the same kind. Reply with one JSON object and nothing else,
with the fields
"type": "success_factor" if the lesson is what to do, "pitfall" if what to avoid, "mixed" if both;
"title": for what kind of problem and at which step it applies, at most 24 words;
"tags": a list of short labels for the field and the technique, such as "number theory" or "substitution";
"thinking": your analysis of the two solutions;
"description": what to do, what to avoid and how to check it, as instructions, at most 80 words.
Title and description must not contain the answer, or any number, name or expression of this problem; general formulas
may stand there. In JSON every backslash of LaTeX is written twice. Write title, tags and description in {language}.
"""

_MATH_ABSTRACT = """\
These notes were taken while solving related problems of mathematics.

{members}

State the one method they share. {guide} Name the conditions that it needs and the check that would have found the
mistakes, merge what is said twice, drop what only one note supports, and add nothing of your own. Reply with one JSON
object and nothing else, with the fields
"title": when the method applies, at most 24 words;
"tags": a list of short labels;
"thinking": what the notes have in common;
"description": the method, at most 60 words.
In JSON every backslash of LaTeX is written twice. Write title, tags and description in {language}.
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

_EXAMPLES = (
    (
        "Which moon of Jupiter is the largest?",
        "Ganymede",
        "searched for: moons of Jupiter by size; answered: Ganymede",
        "searched for: moon of Jupiter; answered: Europa",
        "when the question asks for the largest of a group",
        "Search for the whole group together with its sizes and read all of it. Never take the first that is found.",
    ),
    (
        "How many people live on Malta?",
        "about 540,000",
        "searched for: population of Malta latest census; answered: about 540,000",
        "searched for: history of Malta; answered: 184,742",
        "when the question asks for a number that changes over the years",
        "Put the word latest into the search and look at the date of the number. Avoid numbers that carry no date.",
    ),
    (
        "What does a jaguar eat?",
        "deer and fish",
        "searched for: jaguar animal diet; answered: deer and fish",
        "searched for: jaguar; answered: petrol",
        "when the question names a thing that shares its name with others",
        "Add the kind of thing that is meant to the search. Ignore results about the others.",
    ),
)
"""question, right answer, right attempt, wrong attempt, title, description"""
_ABSTRACT_EXAMPLES = (
    (
        "Pattern",
        (
            ("when the question asks for the tallest of some trees", "Look for a table of heights. Compare every row."),
            ("when the question asks for the oldest of some bridges", "Look for the years of all of them, not of one."),
        ),
        "when the question asks which of many things stands out by a measure",
        "Collect the measure of every one of them before choosing. Never choose from a part of them.",
    ),
    (
        "Strategy",
        (
            ("when the question is about a recipe with several names", "Add the country to the search."),
            (
                "when the question is about a price that depends on the season",
                "Add the month, then check it in the result.",
            ),
        ),
        "when the question is so short that many facts would fit",
        "Add the condition that tells them apart, then check that the result fulfils it. Otherwise search anew.",
    ),
)
"""kind, (title, description) of each note, title, description"""
_FEW_SHOT_REFLECT = """\
### Question
{question}
Right answer: {gold}
Right attempt: {right}
Wrong attempt: {wrong}
### Lesson for other questions
Title:"""
_FEW_SHOT_ABSTRACT = """\
### Notes
{members}
### {kind}
Title:"""
_FEW_SHOT_MEMBER = "- {title}: {description}"


def _few_shot_reflect() -> str:
    fields = ("question", "gold", "right", "wrong")
    shown = [
        f"{_FEW_SHOT_REFLECT.format(**dict(zip(fields, given, strict=True)))} {title}\nDescription: {description}\n"
        for *given, title, description in _EXAMPLES
    ]
    return "".join(["Lessons from a right and a wrong attempt at a question.\n\n", *shown, _FEW_SHOT_REFLECT])


def _few_shot_abstract() -> str:
    shown = []
    for kind, notes, title, description in _ABSTRACT_EXAMPLES:
        lines = "\n".join(_FEW_SHOT_MEMBER.format(title=key, description=value) for key, value in notes)
        shown.append(f"{_FEW_SHOT_ABSTRACT.format(members=lines, kind=kind)} {title}\nDescription: {description}\n")
    return "".join(["What several notes have in common.\n\n", *shown, _FEW_SHOT_ABSTRACT])


def _sentences() -> tuple[str, ...]:
    """Every title, and every sentence of a description, in the examples."""
    said = [lesson[-2:] for lesson in _EXAMPLES]
    for _, notes, title, description in _ABSTRACT_EXAMPLES:
        said += [*notes, (title, description)]
    parts = [part for title, description in said for part in (title, *description.removesuffix(".").split(". "))]
    return tuple(dict.fromkeys(parts))


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


def few_shot_trace(trajectory: Trajectory, whole: bool) -> list[str]:
    """What was searched for and the answer, as in the examples; where nothing was, the start of what was written."""
    parts = [f"searched for: {_clip(query, 120)}" for query in trajectory.queries]
    if not parts:
        parts = [f"wrote: {_clip(turn.text, 300 if whole else 100)}" for turn in trajectory.turns]
    return [*parts, f"answered: {_clip(trajectory.answer, 120) or 'nothing'}"]


def math_trace(trajectory: Trajectory, whole: bool) -> list[str]:
    """Each turn, line breaks kept, its start and end where it is long; then the final answer.

    The middle is what is left out: a method is chosen at the start, and the end shows what came of it.
    """
    head, tail = SOLUTION_LENGTHS[whole]
    parts = []
    for turn in trajectory.turns:
        text = turn.text.strip()
        parts.append(text if len(text) <= head + tail else f"{text[:head]}\n[...]\n{text[-tail:]}")
        if turn.notice:
            parts.append(f"  was told: {turn.notice}")
    return [*parts, f"Final answer: {_clip(trajectory.answer, 300) or f'none ({trajectory.status.value})'}"]


def _clip(text: str, limit: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else f"{text[:limit]} ..."


_FIELDS = ("type", "title", "tags", "thinking", "description")
_CHAT = ReflectionPrompts(
    reflect_template=_REFLECT,
    abstract_template=_ABSTRACT,
    member="- {title}: {description}",
    separator="\n",
    trace=full_trace,
    reflect_fields=_FIELDS,
    abstract_fields=_FIELDS[1:],
    own_tags=False,
    language="English",
)

PROMPTS = {
    "full": _CHAT,
    "math": replace(_CHAT, reflect_template=_MATH_REFLECT, abstract_template=_MATH_ABSTRACT, trace=math_trace),
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
    "few_shot": ReflectionPrompts(
        reflect_template=_few_shot_reflect(),
        abstract_template=_few_shot_abstract(),
        member=_FEW_SHOT_MEMBER,
        separator="; ",
        trace=few_shot_trace,
        reflect_fields=("title", "description"),
        abstract_fields=("title", "description"),
        own_tags=False,
        use_chat=False,
        parse=parse_lines,
        stop=(f"\n{HEADING}",),
        examples=_sentences(),
    ),
}
