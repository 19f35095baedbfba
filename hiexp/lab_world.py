"""A fictional encyclopedia and its multi-hop questions: the embedded data set of the CPU lab.

A world is a graph of typed entities; each fact is one short passage. A family is a kind of question: its wordings, the
plan that answers it, and (for held-back families) the plausible wrong plan that a naive reader takes: the current label
for the first one, today's mayor for that of a year, any film of a name for the one of a year. A plan is a tuple of
steps; a step is the attribute to look up for the value found last, or for the question's first ("one ...") or second
("two ...") entity. Add a family: one entry in FAMILIES (and its wordings in other languages in lab_wordings.json).
"""

import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from hiexp.data import Sample
from hiexp.lab_languages import wordings
from hiexp.trajectory import Document

Plan = tuple[str, ...]

ATTRIBUTES: dict[str, dict[str, str]] = {
    "film": {"director": "person", "star": "person", "setting": "city", "released": "year"},
    "remake": {"director": "person", "star": "person", "setting": "city"},
    "band": {"label": "company", "first label": "company", "leader": "person", "first leader": "person"},
    "company": {"founder": "person", "owner": "person", "seat": "city"},
    "team": {"coach": "person", "first coach": "person", "ground": "city"},
    "person": {
        "spouse": "person",
        "teacher": "person",
        "birthplace": "city",
        "home": "city",
        "school": "school",
        "born": "year",
    },
    "city": {"country": "country", "mayor": "person", "mayor year": "person"},
    "country": {"capital": "city", "ruler": "person", "first ruler": "person"},
    "school": {"place": "city", "head": "person"},
}
"""entity type -> attribute -> type of the value. "year" inside an attribute stands for a year of the question."""

COUNTS = {"film": 64, "band": 64, "company": 40, "team": 48, "person": 120, "city": 36, "country": 16, "school": 24}
YEARS = tuple(str(year) for year in range(1900, 1930))
REMAKES_PER_NAME = 3


@dataclass(frozen=True)
class Family:
    """A kind of question. `plan` answers it; `trap` is what a policy without experience tends to do."""

    name: str
    subjects: tuple[str, ...]
    wordings: tuple[str, ...]
    """with {a}, {b} for the entities and {y} for a year; the last wording appears in test questions only"""
    plan: Plan
    trap: Plan = ()
    language: str = "en"

    @property
    def is_held_back(self) -> bool:
        return bool(self.trap)


FAMILIES = (
    Family(
        "label_founder",
        ("band",),
        (
            "who founded the label of {a} ?",
            "the label of {a} was founded by whom ?",
            "which person is the founder of the label of {a} ?",
            "by whom was the label of the band {a} founded ?",
        ),
        ("label", "founder"),
    ),
    Family(
        "director_spouse",
        ("film",),
        (
            "who is married to the director of {a} ?",
            "the director of {a} is married to whom ?",
            "who is the spouse of the director of the film {a} ?",
            "which person is the spouse of the director of {a} ?",
        ),
        ("director", "spouse"),
    ),
    Family(
        "setting_country",
        ("film",),
        (
            "in which country is {a} set ?",
            "the film {a} is set in which country ?",
            "which country is the setting of the film {a} in ?",
            "in which country is the setting of {a} ?",
        ),
        ("setting", "country"),
    ),
    Family(
        "coach_birthplace",
        ("team",),
        (
            "where was the coach of {a} born ?",
            "in which city was the coach of the team {a} born ?",
            "what is the birthplace of the coach of {a} ?",
            "the coach of the team {a} was born in which city ?",
        ),
        ("coach", "birthplace"),
    ),
    Family(
        "leader_school_place",
        ("band",),
        (
            "in which city is the school of the leader of {a} ?",
            "where is the school that the leader of {a} attended ?",
            "the leader of the band {a} attended a school in which city ?",
            "in which city is the school that the leader of the band {a} attended ?",
        ),
        ("leader", "school", "place"),
    ),
    Family(
        "founder_birth_country",
        ("company",),
        (
            "in which country was the founder of {a} born ?",
            "the founder of the company {a} was born in which country ?",
            "which country is the birthplace of the founder of {a} in ?",
            "in which country is the birthplace of the founder of the company {a} ?",
        ),
        ("founder", "birthplace", "country"),
    ),
    Family(
        "setting_mayor_spouse",
        ("film",),
        (
            "who is married to the mayor of the city where {a} is set ?",
            "the mayor of the setting of {a} is married to whom ?",
            "who is the spouse of the mayor of the setting of the film {a} ?",
            "which person is married to the mayor of the setting of {a} ?",
        ),
        ("setting", "mayor", "spouse"),
    ),
    Family(
        "older_person",
        ("person", "person"),
        (
            "who was born earlier , {a} or {b} ?",
            "which person is older , {a} or {b} ?",
            "who is the older person , {a} or {b} ?",
            "which person was born earlier , {a} or {b} ?",
        ),
        ("one born", "two born", "earlier"),
    ),
    Family(
        "first_label_founder",
        ("band",),
        (
            "who founded the first label of {a} ?",
            "the first label of {a} was founded by whom ?",
            "which person is the founder of the first label of {a} ?",
            "by whom was the first label of the band {a} founded ?",
        ),
        ("first label", "founder"),
        ("label", "founder"),
    ),
    Family(
        "first_coach_birthplace",
        ("team",),
        (
            "where was the first coach of {a} born ?",
            "in which city was the first coach of the team {a} born ?",
            "what is the birthplace of the first coach of {a} ?",
            "the first coach of the team {a} was born in which city ?",
        ),
        ("first coach", "birthplace"),
        ("coach", "birthplace"),
    ),
    Family(
        "setting_mayor_in_year",
        ("film",),
        (
            "who was mayor of the city where {a} is set in {y} ?",
            "in {y} , who was mayor of the setting of {a} ?",
            "which person was mayor in {y} of the city where {a} is set ?",
            "in {y} , which person was mayor of the setting of the film {a} ?",
        ),
        ("setting", "mayor year"),
        ("setting", "mayor"),
    ),
    Family(
        "remake_director_spouse",
        ("remake",),
        (
            "who is married to the director of the {y} film {a} ?",
            "the director of the {y} film {a} is married to whom ?",
            "who is the spouse of the director of {a} of {y} ?",
            "which person is the spouse of the director of the {y} film {a} ?",
        ),
        ("year director", "spouse"),
        ("director", "spouse"),
    ),
    Family(
        "older_director",
        ("film", "film"),
        (
            "which film has the older director , {a} or {b} ?",
            "the director of which film was born earlier , {a} or {b} ?",
            "which film , {a} or {b} , has the director who was born earlier ?",
            "which film has the director who is older , {a} or {b} ?",
        ),
        ("one director", "born", "two director", "born", "earlier"),
        ("one released", "two released", "earlier"),
    ),
    Family(
        "star_birth_capital",
        ("film",),
        (
            "what is the capital of the country where the star of {a} was born ?",
            "which city is the capital of the country where the star of {a} was born ?",
            "the star of {a} was born in a country with which capital ?",
            "the star of the film {a} was born in a country with what capital ?",
        ),
        ("star", "birthplace", "country", "capital"),
        ("setting", "country", "capital"),
    ),
    Family(
        "seat_first_ruler",
        ("company",),
        (
            "who was the first ruler of the country where {a} has its seat ?",
            "the country where {a} has its seat had which first ruler ?",
            "which person was first to rule the country where {a} has its seat ?",
            "which person was the first ruler of the country where the company {a} has its seat ?",
        ),
        ("seat", "country", "first ruler"),
        ("seat", "country", "ruler"),
    ),
    Family(
        "first_leader_teacher",
        ("band",),
        (
            "who was the teacher of the first leader of {a} ?",
            "the first leader of {a} had which teacher ?",
            "which person was the teacher of the first leader of {a} ?",
            "the first leader of the band {a} had which person as teacher ?",
        ),
        ("first leader", "teacher"),
        ("leader", "teacher"),
    ),
)


@dataclass
class World:
    """Entities by type, and facts: (entity, attribute with its real year) -> value."""

    seed: int
    entities: dict[str, list[str]] = field(default_factory=dict)
    facts: dict[tuple[str, str], str] = field(default_factory=dict)
    remakes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """film name -> the years of its versions"""
    mayors: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """city -> years whose mayor is recorded"""

    def passages(self) -> list[tuple[str, Document]]:
        """One passage a fact, in an order that carries no information."""
        keys = sorted(self.facts)
        random.Random(self.seed).shuffle(keys)
        return [(f"p{i}", Document(e, fact_text(e, a, self.facts[e, a]))) for i, (e, a) in enumerate(keys)]


def fact_text(entity: str, attribute: str, value: str) -> str:
    return f"{entity} {attribute} is {value} ."


def name_pool(count: int) -> list[str]:
    """Distinct invented names, the same for every world (the tokenizer is built from them)."""
    onsets, vowels, codas = "bdfgklmnprstvz", "aeiou", "nrlxms"
    names = ["".join(p).capitalize() for p in itertools.product(onsets, vowels, onsets, vowels, codas)]
    random.Random(4242).shuffle(names)
    return names[:count]


def build_world(seed: int) -> World:
    """A world drawn from `seed`: who did what changes, names and types of facts do not."""
    rng, world = random.Random(seed), World(seed)
    pool = iter(rng.sample(names := name_pool(num_names()), len(names)))
    for kind, count in COUNTS.items():
        world.entities[kind] = [next(pool) for _ in range(count)]
    world.entities["remake"] = [next(pool) for _ in range(num_remake_names())]
    world.entities["year"] = list(YEARS)
    for kind, attributes in ATTRIBUTES.items():
        for entity in world.entities[kind]:
            if kind == "remake":
                world.remakes[entity] = tuple(sorted(rng.sample(YEARS, REMAKES_PER_NAME)))
            if kind == "city":
                world.mayors[entity] = tuple(sorted(rng.sample(YEARS, 2)))
            _add_facts(world, rng, kind, entity, attributes)
    return world


def num_names() -> int:
    return sum(COUNTS.values()) + num_remake_names()


def num_remake_names() -> int:
    return 20


def _add_facts(world: World, rng: random.Random, kind: str, entity: str, attributes: dict[str, str]) -> None:
    used: set[str] = {entity}
    for attribute, target in attributes.items():
        if kind == "remake":
            concrete: Iterable[str] = [f"{year} {attribute}" for year in world.remakes[entity]]
        elif attribute == "mayor year":
            concrete = [f"mayor {year}" for year in world.mayors[entity]]
        else:
            concrete = [attribute]
        for name in concrete:
            # the first and the current holder of an office differ: the trap must not be right by luck
            value = rng.choice([v for v in world.entities[target] if v not in used])
            used.add(value)
            world.facts[entity, name] = value


def follow(world: World, family: Family, subjects: tuple[str, ...], year: str) -> str | None:
    """The answer that the family's plan gives in this world; None where a comparison is a tie."""
    value, ends = subjects[0], []
    for step in family.plan:
        if step == "earlier":
            first, second = ends[0], value
            return None if first == second else subjects[first > second]
        if step.startswith("two "):
            ends.append(value)
        selector, _, rest = step.partition(" ")
        if selector in ("one", "two"):
            value, step = subjects[selector == "two"], rest
        value = world.facts[value, step.replace("year", year)]
    return value


def families(languages: Sequence[str] = ("en",)) -> tuple[Family, ...]:
    """Every family in each of the languages, one language after the other."""
    others = wordings()
    return tuple(
        family if code == "en" else replace(family, wordings=others[code][family.name], language=code)
        for code in languages
        for family in FAMILIES
    )


def questions(
    world: World, per_family: dict[str, int], seed: int, languages: Sequence[str] = ("en",)
) -> dict[str, list[Sample]]:
    """Split -> samples; no subject (pair, year) of a family is in two splits, test also has the unseen wording.

    Every question is there in each language, with the same answer; those that are not English have the id of the
    English one and ".zh" behind it. ValueError when the world is too small for what is asked.
    """
    splits: dict[str, list[Sample]] = {name: [] for name in per_family}
    for number, family in enumerate(FAMILIES):
        rng = random.Random(seed * 1000 + number)
        cases = _cases(world, family, rng, sum(per_family.values()))
        for split, count in per_family.items():
            for index in range(count):
                subjects, year, answer = cases.pop()
                last = len(family.wordings) - 1
                is_new = split == "test" and index % 3 == 2
                group = ("held_back" if family.is_held_back else "taught") + ("_new_wording" if is_new else "")
                for asked in families(languages)[number :: len(FAMILIES)]:
                    wording = asked.wordings[last if is_new else index % last]
                    text = wording.format(a=subjects[0], b=subjects[-1], y=year)
                    behind = "" if asked.language == "en" else f".{asked.language}"
                    key = f"{family.name}-{split}-{index}{behind}"
                    splits[split].append(Sample(key, text, (answer,), family.name, group + behind.replace(".", "_")))
    return splits


def _cases(world: World, family: Family, rng: random.Random, wanted: int) -> list[tuple[tuple[str, ...], str, str]]:
    pools = [world.entities[kind] for kind in family.subjects]
    combos = [c for c in itertools.product(*pools) if len(set(c)) == len(c)]
    rng.shuffle(combos)
    cases = []
    for subjects in combos:
        years: tuple[str, ...] = ("",)
        if family.subjects == ("remake",):
            years = world.remakes[subjects[0]]
        elif "mayor year" in family.plan:
            years = world.mayors[world.facts[subjects[0], "setting"]]
        for year in years:
            answer = follow(world, family, subjects, year)
            if answer is not None:
                cases.append((subjects, year, answer))
        if len(cases) >= 3 * wanted:
            break
    rng.shuffle(cases)
    if len(cases) < wanted:
        raise ValueError(f"family {family.name} has {len(cases)} questions in world {world.seed}, {wanted} wanted")
    return cases
