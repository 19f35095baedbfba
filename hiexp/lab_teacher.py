"""The traces from which the lab's policy learns its trade, before any experience exists.

They come from practice encyclopedias: every trace draws fresh names for its entities, so that only reading, copying and
planning can be learned, no fact. What is taught: the protocol; to plan, search, read and answer; to follow a hint whose
title fits the question and to ignore one that does not; to write a lesson from two traces and to merge lessons. What
is not taught is the right plan of a held-back family: its questions are shown with the trap, and every family's plan
wanders off to another way through the graph of attributes with probability NOISE, which is all the exploration that RL
starts with.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from hiexp.experience import Experience
from hiexp.hek_prompts import PROMPTS
from hiexp.lab_languages import KEPT, MARKS, spaced
from hiexp.lab_world import ATTRIBUTES, FAMILIES, YEARS, Family, Plan, fact_text, families, name_pool, num_names
from hiexp.protocols import PROTOCOLS, Pieces
from hiexp.trajectory import Document, Source

NOISE = 0.25

Row = Pieces
"""A trace as labelled text; POLICY pieces are what the model learns to write."""

MIXTURE = {"plain": 0.28, "hint": 0.24, "case": 0.24, "reflect": 0.14, "abstract": 0.10}


@dataclass
class Practice:
    """One practice question: the names and year that stand in it, and the words that ask it."""

    question: str
    title: str
    """the question with its names and year masked: how a lesson says when it applies"""
    subjects: tuple[str, ...]
    year: str
    kinds: tuple[str, ...]
    language: str = "en"


def mask(text: str) -> str:
    """Replace entity names by "someone" and years by "year"; names are exactly the capitalised words."""

    def masked(word: re.Match[str]) -> str:
        return "someone" if word[0][0].isupper() else "year" if word[0] in YEARS else word[0]

    return re.sub("[A-Za-z0-9]+", masked, " ".join(text.split()))


@cache
def practice_families(languages: tuple[str, ...]) -> tuple[Family, ...]:
    """The families of questions in these languages, with spaces between the words of all."""
    return tuple(replace(f, wordings=tuple(map(spaced, f.wordings))) for f in families(languages))


@cache
def _names() -> list[str]:
    return name_pool(num_names())


def draw(rng: random.Random, family: Family, wording: str | None = None) -> Practice:
    subjects = tuple(rng.sample(_names(), len(family.subjects)))
    year = rng.choice(YEARS)
    wording = wording or rng.choice(family.wordings[:-1])
    question = wording.format(a=subjects[0], b=subjects[-1], y=year)
    asked = year if "{y}" in wording else ""
    return Practice(question, mask(question), subjects, asked, family.subjects, family.language)


def attributes_of(kind: str, has_year: bool) -> dict[str, str]:
    table = dict(ATTRIBUTES[kind]) if kind in ATTRIBUTES else {}
    if kind == "remake" and has_year:
        table |= {f"year {name}": target for name, target in ATTRIBUTES["remake"].items()}
    return {name: target for name, target in table.items() if has_year or "year" not in name.split()}


def wander(rng: random.Random, family: Family, plan: Plan, has_year: bool) -> Plan:
    """The plan with one step replaced by another way (of one or two attributes) to a value of the same type."""
    kind = family.subjects[0]
    is_comparison = plan[-1] == "earlier"
    steps = _half(plan) if is_comparison else plan
    options = []
    for index, step in enumerate(steps):
        target = attributes_of(kind, has_year)[step]
        ways = [way for way in _ways(kind, target, has_year) if way != (step,)]
        if ways:
            options.append((index, ways))
        kind = target
    if not options:
        return plan
    index, ways = rng.choice(options)
    direct = [way for way in ways if len(way) == 1]
    way = rng.choice(direct if direct and rng.random() < 0.5 else ways)
    chosen = steps[:index] + way + steps[index + 1 :]
    return comparison(chosen) if is_comparison else chosen


def comparison(steps: Plan) -> Plan:
    """The plan that follows `steps` from both entities of the question and takes the earlier end."""
    return (f"one {steps[0]}", *steps[1:], f"two {steps[0]}", *steps[1:], "earlier")


def _half(plan: Plan) -> Plan:
    second = next(i for i, step in enumerate(plan) if step.startswith("two "))
    return (plan[0].removeprefix("one "), *plan[1:second])


@cache
def _ways(kind: str, target: str, has_year: bool) -> tuple[Plan, ...]:
    first = attributes_of(kind, has_year)
    direct = [(name,) for name, end in first.items() if end == target]
    for name, middle in first.items():
        direct += [(name, then) for then, end in attributes_of(middle, has_year).items() if end == target]
    return tuple(direct)


def habit(rng: random.Random, family: Family, has_year: bool) -> Plan:
    """What the policy does by itself: its plan or trap, wandering off now and then."""
    plan = family.trap or family.plan
    return wander(rng, family, plan, has_year) if rng.random() < NOISE else plan


def random_plan(rng: random.Random) -> tuple[str, Plan]:
    """A walk through the attributes from a random type, for questions that mean nothing."""
    if rng.random() < 0.15:
        kind = rng.choice(["person", "film"])
        steps: Plan = rng.choice(_ways(kind, "year", False))
        return kind, comparison(steps)
    start = kind = rng.choice([k for k in ATTRIBUTES if k != "remake"])
    steps = ()
    for _ in range(rng.choice([1, 2, 2, 3, 3, 4])):
        if kind not in ATTRIBUTES:
            break
        name = rng.choice([a for a in ATTRIBUTES[kind] if "year" not in a.split()])
        steps, kind = (*steps, name), ATTRIBUTES[kind][name]
    return start, steps


@cache
def _all_words(language: str) -> list[str]:
    asked = practice_families((language,))
    return sorted({w for f in asked for t in f.wordings for w in t.split() if not w.startswith("{") and w not in MARKS})


def nonsense(rng: random.Random, asked: Sequence[Family] = FAMILIES) -> tuple[Practice, Plan]:
    """A question of random words with a random plan: only its hint can tell what to do."""
    kind, plan = random_plan(rng)
    model = rng.choice(asked)
    wording = rng.choice(model.wordings).replace("{y}", "year").split()
    count = 2 if plan[-1] == "earlier" else 1
    words = [w for w in wording if not w.startswith("{") and w not in MARKS]
    rng.shuffle(words)
    words = [rng.choice(_all_words(model.language)) if rng.random() < 0.4 else w for w in words]
    spots = sorted(rng.sample(range(1, len(words) + 1), count), reverse=True)
    for spot, slot in zip(spots, ["{b}", "{a}"][-count:], strict=True):
        words.insert(spot, slot)
    family = Family("", (kind,) * count, (" ".join([*words, "?"]),), plan, language=model.language)
    return draw(rng, family, family.wordings[0]), plan


def plan_text(plan: Plan, year: str) -> str:
    return " , ".join(step.replace("year", year) if year else step for step in plan)


class Walk:
    """One practice attempt: invents the facts that a plan meets, and writes the turns."""

    def __init__(self, rng: random.Random, practice: Practice) -> None:
        self.rng, self.practice = rng, practice
        self.unused = iter(rng.sample(_names(), 60))
        self.facts: dict[tuple[str, str], str] = {}
        self.queries: list[str] = []

    def fresh(self) -> str:
        return next(n for n in self.unused if n not in self.practice.subjects)

    def value(self, entity: str, attribute: str) -> str:
        target = self.rng.choice(YEARS) if attribute in ("born", "released") else self.fresh()
        return self.facts.setdefault((entity, attribute), target)

    def look_up(self, entity: str, attribute: str) -> tuple[str, tuple[Document, ...]]:
        """The value found, and two passages as the search would rank them."""
        self.queries.append(f"{entity} {attribute}")
        is_remake = self.practice.kinds == ("remake",) and entity == self.practice.subjects[0]
        if is_remake and attribute.split()[0] not in YEARS:
            attribute = f"{self.rng.choice(YEARS)} {attribute}"  # the search returns some version of the film
        value = self.value(entity, attribute)
        if is_remake:
            other = f"{self.rng.choice([y for y in YEARS if y not in attribute])} {attribute.split()[-1]}"
        else:
            other = self.rng.choice(_confusable(attribute))
        aside = entity if self.rng.random() < 0.7 else self.fresh()
        second = fact_text(aside, other, self.value(aside, other))
        documents = [Document(entity, fact_text(entity, attribute, value)), Document(aside, second)]
        if self.rng.random() < 0.1 and not is_remake:
            documents.reverse()
        self.found = f"{entity} {attribute} is {value}"
        return value, tuple(documents)

    def turns(self, plan: Plan) -> list[tuple[str, tuple[Document, ...]]]:
        """Policy text of each turn with the passages that answer it; the last has none."""
        thought, value, result = f"plan : {plan_text(plan, self.practice.year)}", self.practice.subjects[0], []
        ends: list[str] = []
        for step in plan:
            if step == "earlier":
                continue
            selector, _, rest = step.partition(" ")
            if selector in ("one", "two"):
                if selector == "two":
                    ends.append(value)
                value, step = self.practice.subjects[selector == "two"], rest
            attribute = step.replace("year", self.practice.year) if self.practice.year else step
            text = f"<think> {thought} </think> <search> {value} {attribute} </search>"
            value, documents = self.look_up(value, attribute)
            result.append((text, documents))
            thought = self.found
        if plan[-1] == "earlier":
            first, second = ends[0], value
            thought += f" ; one {first} , two {second}"
            value = self.practice.subjects[first > second]
        self.answer = value
        result.append((f"<think> {thought} </think> <answer> {value} </answer>", ()))
        return result


@cache
def _confusable(attribute: str) -> list[str]:
    """Attributes that a search for this one also finds: a word in common, else any of the same type."""
    plain = " ".join(w for w in attribute.split() if w not in YEARS)
    everything = {name for table in ATTRIBUTES.values() for name in table if "year" not in name.split()}
    close = [n for n in everything if n != plain and set(n.split()) & set(plain.split())]
    siblings = [n for t in ATTRIBUTES.values() if plain in t for n in t if n != plain and "year" not in n.split()]
    return sorted(close * 3 + siblings) or sorted(everything - {plain})


def lesson_line(title: str, description: str) -> str:
    return Experience("", 1, "", title, description).line()


def plain_row(rng: random.Random, asked: Sequence[Family] = FAMILIES) -> Row:
    family = rng.choice(asked)
    practice = draw(rng, family)
    return trace(rng, practice, habit(rng, family, bool(practice.year)), "")


def trace(rng: random.Random, practice: Practice, plan: Plan, strategy: str) -> Row:
    return _prompt(practice, strategy) + _play(Walk(rng, practice).turns(plan))


def hint_row(rng: random.Random, asked: Sequence[Family] = FAMILIES) -> Row:
    """A hint in the prompt: one that fits (to be followed) or one that does not (to be ignored)."""
    kind = rng.random()
    if kind < 0.45:
        practice, plan = nonsense(rng, asked)
        return trace(rng, practice, plan, _hint(rng, practice, plan))
    family = rng.choice([f for f in asked if not f.is_held_back] if kind < 0.75 else asked)
    practice = draw(rng, family)
    plan = habit(rng, family, bool(practice.year))
    if kind < 0.75:
        plan = wander(rng, family, plan, bool(practice.year)) if rng.random() < 0.5 else plan
        return trace(rng, practice, plan, _hint(rng, practice, plan))
    return trace(rng, practice, plan, _misfit(rng, family, asked))


def _hint(rng: random.Random, practice: Practice, plan: Plan) -> str:
    """A fitting lesson: mostly the whole plan; sometimes a part of the question and one step of its plan."""
    if rng.random() < 0.12:
        words = practice.title.split()
        start = rng.randrange(max(1, len(words) - 5))
        return lesson_line(" ".join(words[start : start + 5]), rng.choice(plan))
    return _whole_hint(rng, practice, plan)


def _whole_hint(rng: random.Random, practice: Practice, plan: Plan) -> str:
    """The masked question, perhaps with a word changed or gone, and the plan."""
    words = practice.title.split()
    if rng.random() < 0.3:
        spot = rng.randrange(len(words))
        if words[spot] not in KEPT:
            words[spot : spot + 1] = [rng.choice(_all_words(practice.language))] if rng.random() < 0.5 else []
    return lesson_line(" ".join(words), plan_text(plan, ""))


def _misfit(rng: random.Random, family: Family, asked: Sequence[Family]) -> str:
    if rng.random() < 0.3:
        practice, plan = nonsense(rng, asked)
        return lesson_line(practice.title, plan_text(plan, ""))
    other = rng.choice([f for f in asked if f.name != family.name])
    return lesson_line(draw(rng, other).title, plan_text(habit(rng, other, True), ""))


def case_row(rng: random.Random, asked: Sequence[Family] = FAMILIES) -> Row:
    """Lessons beside the documents, with or without one in the prompt; one that fits can make the policy plan anew.

    A policy that already follows a fitting plan goes on with it, whatever else it is shown.
    """
    is_fit = rng.random() < 0.7
    family = rng.choice([f for f in asked if not f.is_held_back] if is_fit else asked)
    practice = draw(rng, family)
    start = plan = habit(rng, family, bool(practice.year))
    if is_fit and rng.random() < 0.5:
        practice, plan = nonsense(rng, asked)
        other = random_plan(rng)[1][:2]
        start = other if len(practice.subjects) == 1 and not other[0].startswith("one ") else plan
    elif is_fit and rng.random() < 0.6:
        start = wander(rng, family, plan, bool(practice.year))
    strategy, kind = "", rng.random()
    if kind < 0.4:
        strategy, start = (_whole_hint(rng, practice, plan), plan) if is_fit else (_misfit(rng, family, asked), start)
    elif kind < 0.5:
        strategy = _misfit(rng, family, asked)

    def lesson() -> str:
        return _whole_hint(rng, practice, plan) if is_fit else _misfit(rng, family, asked)

    walk, row = Walk(rng, practice), _prompt(practice, strategy)
    if start != plan:
        begun = [turn for turn in walk.turns(start)[: rng.choice([1, 1, 2])] if turn[1]]
        row += _play(begun, [""] * (len(begun) - 1) + [lesson()])
    turns = walk.turns(plan)
    return row + _play(turns, [lesson() if rng.random() < 0.8 else "" for _ in turns])


def reflect_row(rng: random.Random, asked: Sequence[Family] = FAMILIES) -> Row:
    """Two attempts at one question, then the lesson: when it applies, and the plan of the attempt that was right."""
    family = rng.choice(asked)
    practice = draw(rng, family)
    if rng.random() < 0.3:
        practice, right = nonsense(rng, asked)
        wrong = right if rng.random() < 0.3 else random_plan(rng)[1]
        wrong = right if ("two" in " ".join(wrong)) != ("two" in " ".join(right)) else wrong
    else:
        base = family.trap or family.plan
        options = [base, *(wander(rng, family, base, bool(practice.year)) for _ in range(3))]
        right, wrong = rng.choice(options), rng.choice(options)
    good, bad = Walk(rng, practice), Walk(rng, practice)
    good.turns(right)
    bad.turns(wrong)
    prompt = PROMPTS["compact"].reflect(
        question=practice.question,
        gold=good.answer,
        right=[*good.queries, good.answer],
        wrong=[*bad.queries, bad.answer],
    )
    return [(Source.PROMPT, prompt), (Source.POLICY, _lesson(practice.title, plan_text(right, "")))]


def abstract_row(rng: random.Random, asked: Sequence[Family] = FAMILIES) -> Row:
    """Lessons of one cluster, then the lesson they share: the first title, and the plan that most of them name."""
    count = rng.choice([2, 2, 3, 4, 5, 6])
    family = rng.choice(asked)
    base = family.trap or family.plan
    plan = rng.choice([base, wander(rng, family, base, True)])
    if rng.random() < 0.3:
        plan = random_plan(rng)[1]
    other = wander(rng, family, base, True)
    strays = rng.randrange((count + 1) // 2)
    plans = [plan] * (count - strays) + [other] * strays
    rng.shuffle(plans)
    titles = [draw(rng, family).title for _ in plans]
    level = 2 if rng.random() < 0.7 else 3
    items = [(title, plan_text(p, "")) for title, p in zip(titles, plans, strict=True)]
    prompt = PROMPTS["compact"].abstract(level=level, items=items)
    return [(Source.PROMPT, prompt), (Source.POLICY, _lesson(titles[0], plan_text(plan, "")))]


def _lesson(title: str, description: str) -> str:
    return f'{{ "title" : " {title} " , "description" : " {description} " }} <end>'


def _prompt(practice: Practice, strategy: str) -> Row:
    return PROTOCOLS["compact"].prompt(practice.question, strategy, None)


def _play(turns: Sequence[tuple[str, tuple[Document, ...]]], cases: Sequence[str] = ()) -> Row:
    """The turns, each with its documents and its case beside them, where it has them."""
    row: Row = []
    for index, (text, documents) in enumerate(turns):
        row.append((Source.POLICY, text))
        if documents:
            row += PROTOCOLS["compact"].observation(documents, cases[index] if cases else "", "")
    return row


ROWS = {"plain": plain_row, "hint": hint_row, "case": case_row, "reflect": reflect_row, "abstract": abstract_row}


def practice_rows(rng: random.Random, count: int, asked: Sequence[Family] = FAMILIES) -> list[Row]:
    """`count` traces in the proportions of MIXTURE, of questions of the given families."""
    kinds = rng.choices(list(MIXTURE), weights=list(MIXTURE.values()), k=count)
    return [ROWS[kind](rng, asked) for kind in kinds]
