"""Stores of the lab study that are made from a built one: what tells the use of a lesson from that of its words.

    self        what the policy wrote itself                                teacher     what a larger policy wrote
    measured    self, with the table and without the entries that do harm (hiexp.uplift)
    coarse      what the policy wrote itself, in wider clusters
    shuffled    every lesson is found by the title of another one of its level: a question is shown a whole lesson, as
                often and as long as before, but one that was drawn; it may be right by luck
    mismatched  titles stay, the advice under them is that of another lesson of the level
    filler      title and advice are replaced by as many words that say nothing; it is found where the lesson was
    advice      the title alone is: the lesson no longer says when it applies
    titles      the advice alone is: it no longer says what to do
    oracle      the right plan under every wording of every kind of question

Only the first four are written by a model. The others are deterministic in (store, seed).
"""

import json
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np

from hiexp.experience import LEVELS, Experience
from hiexp.hek import HEK
from hiexp.lab_teacher import mask, plan_text
from hiexp.lab_world import FAMILIES

FILLING = ("the", "of", "in", "is", "which", "a", "that", "was", "or", "to")
"""words of questions, known to the policy's tokenizer, that name no attribute"""


def shuffled(hek: HEK, seed: int) -> HEK:
    """Entries of a level exchange their keys; texts, lineage and counts stay. A lesson may keep its own by luck."""
    vectors = {}
    for level, rows in hek.vectors.items():
        order = list(range(len(rows)))
        random.Random(f"{seed} {level}").shuffle(order)
        vectors[level] = rows[order]
    return _like(hek, hek.by_id.values(), vectors)


def mismatched(hek: HEK, seed: int) -> HEK:
    """Entries of a level exchange their descriptions under titles that stay."""
    entries = []
    for level, members in hek.levels.items():
        texts = [entry.description for entry in members]
        random.Random(f"{seed} {level}").shuffle(texts)
        entries += [replace(entry, description=text) for entry, text in zip(members, texts, strict=True)]
    return _like(hek, entries, hek.vectors)


def filler(hek: HEK, seed: int) -> HEK:
    """Every word of title and description becomes a word that says nothing; marks stay, so no token is lost."""
    return _emptied(hek, seed, title=True, description=True)


def advice(hek: HEK, seed: int) -> HEK:
    """The words of titles are emptied: what to do is said, when is not. It is found where it was."""
    return _emptied(hek, seed, title=True)


def titles(hek: HEK, seed: int) -> HEK:
    """The words of descriptions are emptied: when is said, what to do is not."""
    return _emptied(hek, seed, description=True)


def _emptied(hek: HEK, seed: int, *, title: bool = False, description: bool = False) -> HEK:
    rng = random.Random(seed)

    def emptied(text: str) -> str:
        return " ".join(rng.choice(FILLING) if word.isalnum() else word for word in text.split())

    entries = [
        replace(
            entry,
            title=emptied(entry.title) if title else entry.title,
            description=emptied(entry.description) if description else entry.description,
        )
        for entry in hek.by_id.values()
    ]
    return _like(hek, entries, hek.vectors)


def oracle(hek: HEK, seed: int) -> HEK:
    """The right plan under every wording of every family, at each level; nothing of the built store is in it."""
    del seed
    pairs = [(mask(_asked(text)), plan_text(family.plan, "")) for family in FAMILIES for text in family.wordings]
    entries = [
        Experience(f"E{level}-{number:06d}", level, "oracle", title, advice)
        for level in LEVELS
        for number, (title, advice) in enumerate(dict(pairs).items())
    ]
    return HEK(entries, hek.encoder, hek.cfg, settings={"made": "oracle"})


MADE: Mapping[str, Callable[[HEK, int], HEK]] = {
    "shuffled": shuffled,
    "mismatched": mismatched,
    "filler": filler,
    "advice": advice,
    "titles": titles,
    "oracle": oracle,
}
"""name -> what makes it of the store `self`"""
VARIED: dict[str, tuple[str, ...]] = {"coarse": ("build.threshold_1=0.75",)}
"""name -> in what its build differs from that of `self`, where patterns are one per wording already: none is finer"""
BUILT = ("self", "teacher", "measured", *VARIED)
"""written by a model, each by a job of its own"""
STORES = (*BUILT, *MADE)


def right_share(folder: Path) -> dict[str, float]:
    """Per level that has entries, how often the advice is the plan of the question that it stems from: mean over
    entries, each over its source questions. Only the lab can tell."""
    plans, shares = {family.name: plan_text(family.plan, "") for family in FAMILIES}, {}
    for level in LEVELS:
        lines = (folder / f"level{level}.jsonl").read_text(encoding="utf-8").splitlines()
        entries = [json.loads(line) for line in lines]
        right = [
            fmean(plans[sample_id.split("-")[0]] == entry["description"] for sample_id, _ in entry["qa_groups"])
            for entry in entries
            if entry["qa_groups"]  # a store made for a control has none
        ]
        if right:
            shares[f"level {level}"] = fmean(right)
    return shares


def _asked(wording: str) -> str:
    """The wording as `mask` finds it in a question: a name is a capitalised word, a year stays one."""
    return wording.format(a="Someone", b="Someone", y="year")


def _like(hek: HEK, entries: Iterable[Experience], vectors: Mapping[int, np.ndarray]) -> HEK:
    return HEK(entries, hek.encoder, hek.cfg, vectors, hek.settings)
