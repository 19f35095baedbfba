"""The next version of a HEK: lessons added, merged and removed, and what stands above them brought up to date.

A version is immutable; `next_version` makes another one. A pattern or strategy is abstracted again only where a fifth
of the members that it was made of changed; a level is clustered anew once a fifth of it came after the last clustering.
An id is never used twice, so what is known of an entry's uplift is about one text. What a version must know of its past
is in `settings["refresh"]`.
"""

import dataclasses
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hiexp.clustering import CHANGED, FALLBACK, assign, calibrate_threshold, centroids, cluster
from hiexp.config import ConfigError
from hiexp.experience import LEVELS, Experience, without
from hiexp.hek import HEK
from hiexp.hek_build import BuildConfig, abstract, sources_of
from hiexp.hek_report import BuildReport
from hiexp.reflector import Reflector

SLACK = 1e-6
Group = tuple[str | None, list[int]]
"""The entry above that a group of rows belonged to so far, and the rows."""


@dataclass(frozen=True)
class RefreshConfig:
    """Whether and how the HEK is refreshed while the policy trains."""

    every: int = 0
    """steps from one refresh to the next; 0 = the HEK stays as it was built (the paper)"""
    control: float = 0.125
    """least share of the groups without experience: what an entry's uplift is measured against"""
    groups: int = 256
    """questions, the newest, whose right and wrong attempts one refresh reflects on, at most"""
    merge_threshold: float | None = 0.92
    """a lesson whose title is this near to that of an entry of its type joins it; null = only if it says the same"""
    min_uses: int = 20
    """groups that must have seen an entry before its uplift can remove it (lower end of its interval below 0)"""
    unused_steps: int = 500
    """a case is removed when neither it nor its pattern was shown for so many steps; uplift looks back as far"""
    max_cases: int = 20_000
    """cases in the store; beyond it those of the least uplift go"""
    gate_questions: int = 128
    """training questions that are never trained on, to compare a new version with the old one; 0 = no comparison"""
    gate_samples: int = 1
    """attempts at each of them with either version"""
    gate_tolerance: float = 1.0
    """standard errors of the mean difference that a new version may be worse and still replace the old one"""

    def __post_init__(self) -> None:
        least = {"every": 0, "groups": 1, "min_uses": 1, "unused_steps": 1, "max_cases": 1, "gate_questions": 0}
        for name, bound in (least | {"gate_samples": 1, "gate_tolerance": 0}).items():
            if not getattr(self, name) >= bound:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least {bound}")
        if not 0 < self.control < 1:
            raise ConfigError(f"control={self.control} must lie between 0 and 1: uplift needs groups of both kinds")
        if self.merge_threshold is not None and not -1 <= self.merge_threshold <= 1:
            raise ConfigError(f"merge_threshold={self.merge_threshold} is a cosine; set it in [-1, 1], or null")


@dataclass
class Book:
    """What a store remembers from version to version."""

    next: dict[str, int]
    """level -> number of the next new id"""
    clustered: dict[str, int]
    """level -> `next` when the level was last clustered as a whole"""
    abstracted: dict[str, list[str]]
    """id of a pattern or strategy -> members that its text was made of"""
    thresholds: dict[str, float] = field(default_factory=dict)
    """level -> cosine above which entries join"""
    born: dict[str, int] = field(default_factory=dict)
    """id -> step of the refresh that brought it; not there: it was in the store that the run began with"""

    @classmethod
    def of(cls, hek: HEK) -> "Book":
        """That of a refreshed store, or a first one."""
        if "refresh" in hek.settings:
            return cls(**{name: dict(value) for name, value in hek.settings["refresh"].items()})
        above = {str(level): 1 + max((_number(e.id) for e in hek.levels[level]), default=-1) for level in LEVELS}
        levels = hek.settings.get("report", {}).get("levels", [])
        thresholds = {str(one["level"]): float(one["threshold"]) for one in levels}
        made_of = {entry.id: list(entry.child_ids) for entry in hek.by_id.values() if entry.level > 1}
        return cls(above, dict(above), made_of, thresholds)

    def new_id(self, level: int, step: int) -> str:
        number = self.next[str(level)]
        self.next[str(level)] = number + 1
        name = f"E{level}-{number:06d}"
        self.born[name] = step
        return name

    def forget(self, ids: Collection[str]) -> None:
        for name in ids:
            self.abstracted.pop(name, None)
            self.born.pop(name, None)


@dataclass
class Update:
    """A store on its way to the next version; `vectors` by id."""

    levels: dict[int, list[Experience]]
    vectors: dict[str, np.ndarray]
    book: Book
    step: int
    counts: Counter[str] = field(
        default_factory=lambda: Counter(added=0, merged=0, removed=0, abstracted=0, given_up=0, clustered=0)
    )


def next_version(
    hek: HEK,
    lessons: Sequence[Experience],  # of level 1; their ids are not kept
    removed: Collection[str],
    abstractor: Reflector,
    golds: Mapping[str, Sequence[str]],  # sample id -> answers that must not be told
    cfg: BuildConfig,
    merge_threshold: float | None,
    step: int,
) -> tuple[HEK, dict[str, int]]:
    """The store with `lessons` and without `removed`, and counts of what was done. Deterministic; `hek` stays as it is.

    A lesson that says word for word what an entry says, or whose title is within `merge_threshold` (cosine, inclusive)
    of one of the same type, joins it: its sources are added, and the shorter description is kept.
    """
    vectors = {e.id: row for level in LEVELS for e, row in zip(hek.levels[level], hek.vectors[level], strict=True)}
    draft = Update({level: list(hek.levels[level]) for level in LEVELS}, vectors, Book.of(hek), step)
    _remove(draft, removed)
    _add(draft, lessons, hek, merge_threshold)
    known = {qid: tuple(golds.get(qid, ())) for entry in draft.levels[1] for qid, _ in entry.qa_groups}
    report = BuildReport()
    for level in range(1, cfg.max_level):
        _lift(draft, level, abstractor, known, cfg, report)
    entries = [entry for level in LEVELS for entry in sorted(draft.levels[level], key=lambda e: e.id)]
    draft.book.forget(set(draft.book.born | draft.book.abstracted) - {entry.id for entry in entries})
    settings: dict[str, Any] = {**hek.settings, "version": hek.version + 1, "refresh": dataclasses.asdict(draft.book)}
    width = (0, hek.vectors[1].shape[1])
    rows = {n: [draft.vectors[e.id] for e in entries if e.level == n] for n in LEVELS}
    stacked = {n: np.stack(found) if found else np.zeros(width, np.float32) for n, found in rows.items()}
    counts = dict(draft.counts) | {f"level_{n}": len(rows[n]) for n in LEVELS}
    return hek.with_entries(entries, stacked, settings), counts


def in_a_new_run(hek: HEK) -> HEK:
    """A store whose entries were all there when the run began, whenever an earlier run brought them."""
    if "refresh" not in hek.settings:
        return hek
    book = dataclasses.replace(Book.of(hek), born={})
    return hek.with_entries(hek.by_id.values(), hek.vectors, {**hek.settings, "refresh": dataclasses.asdict(book)})


def _remove(draft: Update, removed: Collection[str]) -> None:
    """Take entries out; one above level 1 that loses its last member goes too."""
    gone = set(removed)
    for level in LEVELS[1:]:
        gone |= {e.id for e in draft.levels[level] if e.child_ids and gone.issuperset(e.child_ids)}
    for level in LEVELS:
        draft.levels[level] = without(draft.levels[level], gone)
    draft.counts["removed"] = len(gone)


def _add(draft: Update, lessons: Sequence[Experience], hek: HEK, threshold: float | None) -> None:
    """Lessons join an entry or become one."""
    cases, encoder = draft.levels[1], hek.encoder
    assert encoder is not None
    fresh = encoder.encode([lesson.title for lesson in lessons], "query")
    keys = np.zeros((len(cases) + len(lessons), fresh.shape[1]), np.float32)
    for i, case in enumerate(cases):
        keys[i] = draft.vectors[case.id]
    place = {(case.title, case.description): i for i, case in enumerate(cases)}
    for lesson, key in zip(lessons, fresh, strict=True):
        i = place.get((lesson.title, lesson.description))
        if i is None and threshold is not None:
            i = _near(keys[: len(cases)], key, threshold, [case.type == lesson.type for case in cases])
        if i is not None:
            old, draft.counts["merged"] = cases[i], draft.counts["merged"] + 1
            shorter = min(old.description, lesson.description, key=lambda text: len(text.split()))
            cases[i] = dataclasses.replace(old, description=shorter, qa_groups=sources_of([old, lesson]))
        else:
            draft.counts["added"] += 1
            name = draft.book.new_id(1, draft.step)
            keys[len(cases)], draft.vectors[name] = key, key
            cases.append(dataclasses.replace(lesson, id=name, parent_id=None))
            i = len(cases) - 1
        place[cases[i].title, cases[i].description] = i


def _near(keys: np.ndarray, key: np.ndarray, threshold: float, may_join: Sequence[bool]) -> int | None:
    """The row nearest to `key` among those that it may join and that are near enough."""
    if not any(may_join):
        return None
    scores = np.where(may_join, keys @ key, -np.inf)
    best = int(np.argmax(scores))
    return best if scores[best] >= threshold - SLACK else None


def _lift(
    draft: Update,
    level: int,
    abstractor: Reflector,
    golds: Mapping[str, Sequence[str]],
    cfg: BuildConfig,
    report: BuildReport,
) -> None:
    """Bring level + 1 up to date with the entries of `level`."""
    entries, book = draft.levels[level], draft.book
    above = {entry.id: entry for entry in draft.levels[level + 1]}
    rows = np.stack([draft.vectors[e.id] for e in entries]) if entries else np.zeros((0, 1), np.float32)
    groups = _groups(draft, level, rows, cfg)
    if level > 1 and len(groups) >= len(entries):  # a strategy for each pattern would say nothing more generally
        groups = [group for group in groups if group[0] is not None]
    stale = [group for group in groups if group[0] is None or _has_changed(book, above[group[0]], entries, group[1])]
    members = [[entries[i] for i in found] for _, found in stale]
    fresh = abstract(abstractor, members, [rows[found] for _, found in stale], level + 1, golds, report)
    draft.counts["abstracted"] += len(fresh)
    draft.counts["given_up"] += len(stale) - len(fresh)
    written = {entry.child_ids: entry for entry in fresh}
    made = [entry for entry in above.values() if not entry.child_ids]  # written by hand, of no members
    for name, found in groups:
        old, mine = above.get(name or ""), [entries[i] for i in found]
        ids = tuple(entry.id for entry in mine)
        new = written.get(ids)
        if new is None and old is None:
            continue  # no usable reply: the entries wait for the next refresh
        is_same = new is None or (old is not None and (old.title, old.description) == (new.title, new.description))
        text = old if is_same and old is not None else new
        assert text is not None
        name = text.id if text is old else book.new_id(level + 1, draft.step)
        parent = old.parent_id if old else None
        made.append(dataclasses.replace(text, id=name, child_ids=ids, parent_id=parent, qa_groups=sources_of(mine)))
        if new is not None:
            book.abstracted[name] = list(ids)
    _place(draft, level, made, abstractor)


def _place(draft: Update, level: int, made: Sequence[Experience], abstractor: Reflector) -> None:
    """Put entries above `level`, and mend who names whom."""
    gone = {entry.id for entry in draft.levels[level + 1]} - {entry.id for entry in made}
    unknown = [entry for entry in made if entry.id not in draft.vectors]
    keys = abstractor.encoder.encode([entry.title for entry in unknown], "query")
    draft.vectors |= {entry.id: key for entry, key in zip(unknown, keys, strict=True)}
    parent = {child: entry.id for entry in made for child in entry.child_ids}
    draft.levels[level] = [dataclasses.replace(e, parent_id=parent.get(e.id)) for e in draft.levels[level]]
    draft.levels[level + 1] = list(made)
    if level + 2 in draft.levels:  # a pattern with a new text has a new id, which its strategy must learn
        children: dict[str, list[str]] = {}
        for entry in made:
            if entry.parent_id is not None:
                children.setdefault(entry.parent_id, []).append(entry.id)
        kept = [e for e in draft.levels[level + 2] if e.id in children]
        gone |= {entry.id for entry in draft.levels[level + 2]} - {entry.id for entry in kept}
        draft.levels[level + 2] = [dataclasses.replace(e, child_ids=tuple(children[e.id])) for e in kept]
    for entries in draft.levels.values():
        for i, entry in enumerate(entries):
            if entry.parent_id in gone:
                entries[i] = dataclasses.replace(entry, parent_id=None)


def _groups(draft: Update, level: int, rows: np.ndarray, cfg: BuildConfig) -> list[Group]:
    """Which rows belong together: those of each entry above, with the new ones near to them, and new groups."""
    entries, book, key = draft.levels[level], draft.book, str(level)
    late = sum(_number(entry.id) >= book.clustered[key] for entry in entries)
    is_due = late >= CHANGED * max(len(entries), 1)
    given = (cfg.threshold_1, cfg.threshold_2)[level - 1]
    if given is not None:
        book.thresholds[key] = given
    elif len(entries) > 1 and (is_due or key not in book.thresholds):
        at_most = book.thresholds.get("1", 1.0) if level == 2 else 1.0
        book.thresholds[key] = calibrate_threshold(rows, level, cfg.linkage, at_most)[0]
    threshold = book.thresholds.get(key, FALLBACK[level])
    if is_due:
        book.clustered[key] = book.next[key]
        draft.counts["clustered"] += 1
        return _matched(entries, [g for g in cluster(rows, threshold, cfg.linkage) if len(g) >= cfg.min_cluster])
    old: dict[str, list[int]] = {}
    for i, entry in enumerate(entries):
        if entry.parent_id is not None:
            old.setdefault(entry.parent_id, []).append(i)
    waiting = np.array([i for i, entry in enumerate(entries) if entry.parent_id is None], int)
    names = list(old)
    placed = assign(rows[waiting], centroids(rows, list(old.values())), threshold)
    for i, where in zip(waiting.tolist(), placed.tolist(), strict=True):
        if where >= 0:
            old[names[where]].append(i)
    left = waiting[placed < 0]
    new = [
        left[group].tolist() for group in cluster(rows[left], threshold, cfg.linkage) if len(group) >= cfg.min_cluster
    ]
    return [*((name, sorted(old[name])) for name in names), *((None, group) for group in new)]


def _matched(entries: Sequence[Experience], groups: Sequence[list[int]]) -> list[Group]:
    """Each group with the entry above that most of its rows had, where no group has more of them; order as given."""
    shared = Counter((p, g) for g, rows in enumerate(groups) for i in rows if (p := entries[i].parent_id) is not None)
    owner: dict[int, str] = {}
    for (name, g), _ in sorted(shared.items(), key=lambda item: (-item[1], item[0])):
        if g not in owner and name not in owner.values():
            owner[g] = name
    return [(owner.get(g), rows) for g, rows in enumerate(groups)]


def _has_changed(book: Book, above: Experience, entries: Sequence[Experience], rows: Sequence[int]) -> bool:
    """A fifth or more of the members differ from those that the text was made of."""
    before, now = set(book.abstracted.get(above.id, above.child_ids)), {entries[i].id for i in rows}
    return max(len(before - now), len(now - before)) >= CHANGED * max(len(before), len(now))


def _number(name: str) -> int:
    """Of an id such as E1-000042; -1 for an id of another make."""
    digits = name.rpartition("-")[2]
    return int(digits) if digits.isascii() and digits.isdigit() else -1
