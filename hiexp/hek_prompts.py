"""What a reflector is asked. Pure text; reply_parser.py reads the replies and hek_filters.py turns them down.

A prompt set is one entry of PROMPTS: `full` for a chat model and attempts with searches (the paper's Tables 11 and 12
in our words), `math` for a chat model and written solutions, `compact` for a tiny word-level policy that was trained on
exactly this form. All ask for one JSON object with the same fields.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hiexp.hek_filters import entity_names, turn_down
from hiexp.reply_parser import TYPES, parse_reply
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
        return self.abstract_template.format(level=level, guide=GUIDES[level], members=lines, language=language)


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
}
