"""Look at a store of experience: its tree, what a query would be shown and why, what changed, how it is made up.

    python -m hiexp.hek show runs/lab/hek/hek                              # strategies over patterns over cases
    python -m hiexp.hek search runs/lab/hek/hek "who founded ...?"         # settings of the run that built it
    python -m hiexp.hek search STORE - --config configs/lab.yaml hek.accept=zscore < queries.txt
    python -m hiexp.hek diff OLD NEW
    python -m hiexp.hek stats STORE --json

Each takes --html FILE for a page that needs no network and runs no script. What a model wrote is shown, never obeyed:
control characters are spelled out, markup is escaped.
"""

import argparse
import json
import os
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from hiexp import languages
from hiexp.config import ConfigError, load, read_yaml
from hiexp.encoder import EncoderConfig, load_encoder
from hiexp.experience import LEVELS, Experience, read_store
from hiexp.hek import HEK, HEKConfig
from hiexp.hek_filters import guess_language, num_words
from hiexp.hits import Hit
from hiexp.report import write_page
from hiexp.report_views import experience_tree

NEAR = 0.97
"""cosine of two titles from which on they are listed as near duplicates"""
MOST_COMPARED = 20_000
"""entries of a level that are compared pair by pair, at most"""
LISTED = 10
"""near duplicates and orphans that are named"""
COMPARED = ("type", "title", "description", "tags", "qa_groups", "not_when")
"""fields whose difference is a change; ids are given by position, so equal content with another id is none"""

Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]
"""heading, column names, rows"""


@dataclass(frozen=True)
class Settings:
    """The sections that a search needs."""

    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    hek: HEKConfig = field(default_factory=HEKConfig)


@dataclass
class Difference:
    """Old and new of each pair; `renumbered` have another id and are else the same."""

    added: list[Experience] = field(default_factory=list)
    removed: list[Experience] = field(default_factory=list)
    changed: list[tuple[Experience, Experience, tuple[str, ...]]] = field(default_factory=list)
    moved: list[tuple[Experience, Experience]] = field(default_factory=list)
    renumbered: int = 0
    same: int = 0


def main(argv: Sequence[str]) -> int:
    try:
        settings = [word for word in argv if _is_setting(word)]  # anywhere on the line
        _run(_parser().parse_args([word for word in argv if word not in settings]), settings)
        sys.stdout.flush()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def tree_lines(entries: Mapping[str, Experience], level: int = 0) -> Iterator[str]:
    """The tree, a record a line; `level` leaves out what is below it (0: nothing, sources included)."""

    def walk(entry: Experience, depth: int) -> Iterator[str]:
        pad, counts = "  " * depth, f"{len(entry.qa_groups)} questions"
        counts = f"{len(entry.child_ids)} of level {entry.level - 1}, {counts}" if entry.child_ids else counts
        yield one_line(f"{pad}{entry.id} [{entry.type}] {entry.text}  ({counts})")
        for query in entry.not_when:
            yield one_line(f"{pad}    not when: {query}")
        for child in entry.child_ids if entry.level > level else ():
            yield from walk(entries[child], depth + 1)
        if not entry.child_ids and not level:
            for sample_id, question in entry.qa_groups:
                yield one_line(f"{pad}    from {sample_id}: {question}")

    roots = [entry for entry in entries.values() if entry.parent_id is None and entry.level >= level]
    for root in sorted(roots, key=lambda entry: (-entry.level, entry.id)):
        yield from walk(root, 0)


def search(hek: HEK, queries: Sequence[str], levels: Sequence[int], top: int, sample: str = "") -> Iterator[Table]:
    """Per query and level the nearest entries, accepted or not, with the reason; `sample` is excluded as its own."""
    for query in queries:
        language = hek.centring.language(query) if hek.centring else guess_language(query)
        for level in levels:
            name = f"level {level} ({len(hek.levels[level])} entries): {query}" + (f" [{language}]" if language else "")
            try:
                hits = hek.retrieve([query], level, top, [sample] if sample else None, include_rejected=True)[0]
            except ConfigError as error:  # a level that cannot be calibrated is told, the others are searched
                hits, name = [], f"{name} - {error}"
            yield name, ("shown", "id", "cosine", "why", "experience"), [_hit_row(hit) for hit in hits]


def difference(old: Mapping[str, Experience], new: Mapping[str, Experience]) -> Difference:
    """Entries are paired by equal content, then by id if something of the content is equal; the rest came or went."""
    pairs = _pairs(old, new)
    found, became = Difference(), {before.id: after.id for before, after in pairs}
    for before, after in pairs:
        fields = tuple(name for name in COMPARED if getattr(before, name) != getattr(after, name))
        is_moved = before.parent_id != after.parent_id and became.get(before.parent_id or "") != after.parent_id
        if fields:
            found.changed.append((before, after, fields))
        if is_moved:
            found.moved.append((before, after))
        found.renumbered += before.id != after.id
        found.same += not fields and not is_moved
    taken = set(became.values())
    found.added = [entry for entry in new.values() if entry.id not in taken]
    found.removed = [entry for entry in old.values() if entry.id not in became]
    return found


def statistics(entries: Mapping[str, Experience], vectors: Mapping[int, np.ndarray]) -> dict[str, Any]:
    """Figures of a store by level: counts, lengths in words, languages, clusters, coverage, orphans, duplicates."""
    asked = {sample_id for entry in entries.values() for sample_id in entry.sample_ids}
    levels = {}
    for level in LEVELS:
        rows = [entry for entry in entries.values() if entry.level == level]
        if not rows:
            continue
        orphans = [entry.id for entry in rows if entry.parent_id is None]
        covered = {sample_id for entry in rows for sample_id in entry.sample_ids}
        levels[str(level)] = {
            "entries": len(rows),
            "types": dict(Counter(entry.type for entry in rows).most_common()),
            "title_words": _spread([num_words(entry.title) for entry in rows]),
            "description_words": _spread([num_words(entry.description) for entry in rows]),
            "languages": dict(Counter(map(language_of, rows)).most_common()),
            "cluster_sizes": _spread([len(entry.child_ids) for entry in rows]) if level > 1 else None,
            "coverage": len(covered) / len(asked) if asked else 0.0,
            "orphans": {"count": len(orphans), "first": orphans[:LISTED]} if level < LEVELS[-1] else None,
            "with_not_when": sum(bool(entry.not_when) for entry in rows),
            **_duplicates(rows, vectors[level]),
        }
    return {"questions": len(asked), "levels": levels}


def language_of(entry: Experience) -> str:
    """Its tag or a guess, else the script that most of its letters belong to."""
    scripts = Counter(unicodedata.name(c, "?").split()[0].lower() for c in entry.text if c.isalpha())
    return languages.language_of(entry) or (f"{scripts.most_common(1)[0][0]} script" if scripts else "none")


def one_line(text: str) -> str:
    """Line ends and characters that could steer a terminal are spelled out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m hiexp.hek", description="Look at a store of experience.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, about in (
        ("show", "the tree, with the questions it stems from"),
        (
            "search",
            "what queries would be shown, and why; encoder.KEY=... and hek.KEY=... set what the config file does",
        ),
        ("diff", "what changed between two stores"),
        ("stats", "counts, lengths, languages, clusters, coverage, orphans, near duplicates"),
    ):
        command = commands.add_parser(name, help=about)
        command.add_argument("store", metavar="STORE", help="folder with header.json")
        command.add_argument("--html", metavar="FILE", help="write a page instead")
        if name == "show":
            command.add_argument("--level", type=int, choices=LEVELS, default=0, help="nothing below this level")
        if name == "search":
            command.add_argument("words", nargs="+", metavar="QUERY", help="- reads a query a line")
            command.add_argument("--level", type=int, choices=LEVELS, default=0, help="only this level")
            command.add_argument("--top", type=int, default=3, help="entries of a level, at most (3)")
            command.add_argument("--sample", default="", help="id whose own lessons are hidden, as in training")
            command.add_argument(
                "--config",
                metavar="FILE",
                help="default: config.yaml beside the store, or of the run that it is a version of",
            )
        if name == "diff":
            command.add_argument("new", metavar="NEW", help="the other store")
        if name == "stats":
            command.add_argument("--json", action="store_true", help="the figures as JSON")
    return parser


def _run(arguments: argparse.Namespace, settings: Sequence[str]) -> None:
    if arguments.command == "search":
        title, tables = f"Search of {arguments.store}", list(_search(arguments, settings))
        lines, parts = (line for table in tables for line in _text(table)), list(map(_markup, tables))
    elif arguments.command == "diff":
        title, found = (
            f"From {arguments.store} to {arguments.new}",
            difference(*map(_read, (arguments.store, arguments.new))),
        )
        tables = list(_difference_tables(found))
        lines, parts = (line for table in tables for line in _text(table)), list(map(_markup, tables))
    else:
        entries, vectors = _read_all(arguments.store)
        title = f"Experience in {arguments.store}"
        lines: Iterable[str] = ()
        if arguments.command == "show":
            counts = Counter(map(language_of, entries.values())).most_common()
            told = ", ".join(f"{count} {name}" for name, count in counts)
            lines = [*tree_lines(entries, arguments.level), *([f"languages: {told}"] if len(counts) > 1 else [])]
        figures = statistics(entries, vectors) if arguments.command == "stats" or arguments.html else {}
        table = _statistics_table(figures) if figures else ("", (), ())
        if arguments.command == "stats":
            lines = [json.dumps(figures, indent=1, ensure_ascii=False)] if arguments.json else _text(table)
        parts = [_markup(table), "<h2>Tree</h2>", experience_tree(arguments.store)]
    if arguments.html:
        write_page(arguments.html, title, parts)
        lines = [f"wrote {arguments.html}"]
    for line in lines:
        print(line)


def _search(arguments: argparse.Namespace, words: Sequence[str]) -> Iterator[Table]:
    settings, queries = _settings(arguments, words), arguments.words
    if "-" in queries:
        queries = [line.strip() for line in sys.stdin if line.strip()]
    if not queries:
        raise ConfigError("no query on the standard input; write one a line")
    if arguments.top < 1:
        raise ConfigError(f"--top={arguments.top} must be at least 1")
    hek = HEK.load(arguments.store, load_encoder(settings.encoder), settings.hek)
    levels = [arguments.level] if arguments.level else [level for level in LEVELS if hek.levels[level]]
    return search(hek, queries, levels, arguments.top, arguments.sample)


def _settings(arguments: argparse.Namespace, words: Sequence[str]) -> Settings:
    """Sections encoder and hek of the config file, then key=value words."""
    folder = Path(arguments.store).parent  # of a version, <out>/hek/v0001, one more up
    beside = [file for file in (folder / "config.yaml", folder.parent / "config.yaml") if file.is_file()]
    file = arguments.config or (beside[0] if beside else None)
    sections = read_yaml(file) if file else {}
    given = [
        f"{name}.{key}={json.dumps(value)}"
        for name in ("encoder", "hek")
        for key, value in (sections.get(name) or {}).items()
    ]
    return load(Settings, [*given, *words])


def _is_setting(word: str) -> bool:
    key, equals, _ = word.partition("=")
    return bool(equals) and key.startswith(("encoder.", "hek.")) and " " not in key


def _read_all(folder: str) -> tuple[dict[str, Experience], dict[int, np.ndarray]]:
    """Records by id and vectors by level; of whatever encoder, as nothing is embedded."""
    try:
        header = json.loads((Path(folder) / "header.json").read_text(encoding="utf-8"))
        encoder, dim = str(header["encoder"]), int(header["dim"])
    except (OSError, ValueError, KeyError, TypeError):
        encoder, dim = "", 0  # read_store says what is wrong
    entries, vectors, _ = read_store(folder, encoder, dim)
    return {entry.id: entry for entry in entries}, vectors


def _read(folder: str) -> dict[str, Experience]:
    return _read_all(folder)[0]


def _pairs(old: Mapping[str, Experience], new: Mapping[str, Experience]) -> list[tuple[Experience, Experience]]:
    def content(entry: Experience) -> tuple[Any, ...]:
        return entry.level, *(getattr(entry, name) for name in COMPARED)

    alike: dict[tuple[Any, ...], list[Experience]] = {}
    for entry in new.values():
        alike.setdefault(content(entry), []).append(entry)
    pairs, left = [], []
    for entry in old.values():
        twins = alike.get(content(entry))
        if not twins:
            left.append(entry)
            continue
        same_id = next((i for i, twin in enumerate(twins) if twin.id == entry.id), 0)
        pairs.append((entry, twins.pop(same_id)))
    free = {entry.id: entry for twins in alike.values() for entry in twins}
    for entry in left:
        after = free.get(entry.id)
        parts = ("title", "description", "qa_groups")
        if after and any(getattr(entry, name) == getattr(after, name) for name in parts):
            pairs.append((entry, after))
    return pairs


def _spread(counts: Sequence[int]) -> dict[str, float]:
    return {"least": min(counts), "median": float(np.median(counts)), "most": max(counts)}


def _duplicates(rows: Sequence[Experience], vectors: np.ndarray) -> dict[str, Any]:
    """Titles that occur more than once, how many of them with different lessons, and pairs of near titles."""
    by_title: dict[str, set[str]] = {}
    for entry in rows:
        by_title.setdefault(entry.title, set()).add(entry.description)
    facts: dict[str, Any] = {
        "same_title": len(rows) - len(by_title),
        "titles_with_different_lessons": sum(len(texts) > 1 for texts in by_title.values()),
    }
    if len(rows) > MOST_COMPARED:
        return facts | {"near_duplicates": None}
    pairs = []
    for at in range(0, len(rows), 1024):
        near = np.argwhere(vectors[at : at + 1024] @ vectors.T >= NEAR).tolist()
        pairs += [(at + i, j) for i, j in near if at + i < j and rows[at + i].title != rows[j].title]
    first = [[rows[i].id, rows[j].id] for i, j in pairs[:LISTED]]
    return facts | {"near_duplicates": {"count": len(pairs), "first": first}}


def _hit_row(hit: Hit) -> tuple[str, ...]:
    entry = hit.experience
    return "yes" if hit.accepted else "no", entry.id, f"{hit.score:.3f}", hit.reason, entry.text


def _difference_tables(found: Difference) -> Iterator[Table]:
    counts = {name: len(getattr(found, name)) for name in ("added", "removed", "changed", "moved")}
    counts |= {"renumbered": found.renumbered, "same": found.same}
    yield "Counts", tuple(counts), [tuple(map(str, counts.values()))]
    for name in ("added", "removed"):
        yield name.capitalize(), ("id", "experience"), [(entry.id, entry.text) for entry in getattr(found, name)]
    changes = [
        (before.id, after.id, name, *_sides(getattr(before, name), getattr(after, name)))
        for before, after, names in found.changed
        for name in names
    ]
    yield "Changed", ("old id", "new id", "field", "before", "after"), changes
    moves = [(old.id, new.id, old.parent_id or "none", new.parent_id or "none", new.text) for old, new in found.moved]
    yield "Moved", ("old id", "new id", "from", "to", "experience"), moves


def _sides(before: Any, after: Any) -> tuple[str, str]:
    """Both values; of lists only what the other does not have."""
    if not isinstance(before, tuple):
        return str(before), str(after)
    lost, gained = ([x for x in one if x not in other] for one, other in ((before, after), (after, before)))
    return _items(lost), _items(gained)


def _items(values: Sequence[Any]) -> str:
    return " | ".join(": ".join(value) if isinstance(value, tuple) else str(value) for value in values) or "-"


def _statistics_table(figures: Mapping[str, Any]) -> Table:
    levels = figures["levels"]
    names = list(dict.fromkeys(name for level in levels.values() for name in level))
    rows = [(name.replace("_", " "), *(_plain(level.get(name)) for level in levels.values())) for name in names]
    return f"{figures['questions']} source questions", ("", *(f"level {level}" for level in levels)), rows


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(item)}" for key, item in value.items())
    if isinstance(value, list):
        return " ".join("+".join(item) if isinstance(item, list) else str(item) for item in value) or "-"
    return "-" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


def _text(table: Table) -> Iterator[str]:
    """Columns under a heading; the last is not padded."""
    heading, columns, rows = table
    cells = [tuple(columns), *(tuple(map(one_line, row)) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    yield one_line(heading)
    for row in cells if rows else [("none",)]:
        yield "  " + "  ".join([*(cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=False)), row[-1]])
    yield ""


def _markup(table: Table) -> str:
    heading, columns, rows = table
    head = "".join(f'<th class="name">{escape(name)}</th>' for name in columns)
    body = "".join("<tr>" + "".join(f'<td class="name">{escape(cell)}</td>' for cell in row) + "</tr>" for row in rows)
    if not rows:
        return f'<h3>{escape(heading)}</h3><p class="soft">none</p>'
    return f'<h3>{escape(heading)}</h3><div class="scroll"><table><tr>{head}</tr>{body}</table></div>'
