"""The experience record, and the files that a store of them is kept in.

    header.json                     encoder fingerprint, counts, the settings it was built with
    level1.jsonl level1.npy  ...    one record per line, and its embedding in the same row
    questions.jsonl questions.npy   what is known of how the policy fares on questions, the same way (may be missing)

Reading checks everything that could silently mix up records and rows; hek.py retrieves.
"""

import dataclasses
import hashlib
import json
import shutil
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hiexp.config import ConfigError

FORMAT = 1
LEVELS = (1, 2, 3)
REBUILD = "rebuild the HEK with build_hek.py"


@dataclass(frozen=True)
class Experience:
    """One lesson; `qa_groups` are the (id, question) it stems from, above level 1 those of its children."""

    id: str
    level: int
    type: str
    """success_factor, pitfall or mixed (level 1); pattern (2); strategy (3)"""
    title: str
    """when it applies: the key, the only text that is embedded"""
    description: str
    """what to do: the value, shown to the policy"""
    tags: tuple[str, ...] = ()
    thinking: str = ""
    """the reflector's reasoning; never shown to a policy"""
    qa_groups: tuple[tuple[str, str], ...] = ()
    child_ids: tuple[str, ...] = ()
    parent_id: str | None = None
    source_model: str = ""
    language: str = ""
    """of title and description, as a two-letter code; empty = not known, as in every store of an earlier version"""
    not_when: tuple[str, ...] = ()
    """queries that the title is near to but the lesson is wrong for; what is nearer to one of them is not shown it"""

    @property
    def text(self) -> str:
        return f"{self.title}: {self.description}"

    def line(self) -> str:
        """How it stands in a block of experiences."""
        return f"- {self.text}"

    @property
    def sample_ids(self) -> frozenset[str]:
        return frozenset(qid for qid, _ in self.qa_groups)


@dataclass(frozen=True)
class Asked:
    """How the policy fared on a question. A mean of no attempts is 0 and means nothing."""

    id: str
    question: str
    off_reward: float = 0.0
    """mean over the attempts without experience"""
    off_count: int = 0
    on_reward: float = 0.0
    """mean over the attempts that could be shown experience"""
    on_count: int = 0

    def after(self, off: Sequence[float] = (), on: Sequence[float] = ()) -> "Asked":
        """The record with the rewards of further attempts."""
        counts = (self.off_count + len(off), self.on_count + len(on))
        sums = (self.off_reward * self.off_count + sum(off), self.on_reward * self.on_count + sum(on))
        means = [total / count if count else 0.0 for total, count in zip(sums, counts, strict=True)]
        return Asked(self.id, self.question, means[0], counts[0], means[1], counts[1])

    def faded(self) -> "Asked":
        """The record with half of the attempts, as the policy has changed since."""
        return dataclasses.replace(self, off_count=self.off_count // 2, on_count=self.on_count // 2)


def check_lineage(entries: Sequence[Experience]) -> None:
    """ValueError unless ids are unique and every parent and child name each other, one level apart."""
    by_id = {entry.id: entry for entry in entries}
    if len(by_id) != len(entries):
        raise ValueError("two experiences have the same id")
    for entry in entries:
        if entry.level not in LEVELS:
            raise ValueError(f"{entry.id}: level {entry.level}")
        for child_id in entry.child_ids:
            child = by_id.get(child_id)
            if child is None or child.parent_id != entry.id or child.level != entry.level - 1:
                raise ValueError(f"{entry.id}: child {child_id} is missing or does not name it as its parent")
        parent = by_id.get(entry.parent_id) if entry.parent_id is not None else None
        if entry.parent_id is not None and (parent is None or entry.id not in parent.child_ids):
            raise ValueError(f"{entry.id}: parent {entry.parent_id} is missing or does not name it as a child")


def without(entries: Iterable[Experience], gone: Collection[str]) -> list[Experience]:
    """The others, who no longer name the entries `gone`; what was abstracted from one keeps its sources."""
    return [
        dataclasses.replace(
            entry,
            child_ids=tuple(child for child in entry.child_ids if child not in gone),
            parent_id=None if entry.parent_id in gone else entry.parent_id,
        )
        for entry in entries
        if entry.id not in gone
    ]


def write_store(
    folder: str | Path,
    levels: Mapping[int, Sequence[Experience]],
    vectors: Mapping[int, np.ndarray],
    header: Mapping[str, Any],
    overwrite: bool,
    asked: Sequence[Asked] = (),
    asked_vectors: np.ndarray | None = None,
) -> None:
    """Write a store whole or not at all; ConfigError if the folder is in use or cannot be written."""
    path = Path(folder)
    used = path.exists() and (not path.is_dir() or any(path.iterdir()))
    if used and not (overwrite and (path / "header.json").is_file()):
        raise ConfigError(f"{folder} exists already; choose another folder, or allow overwriting a HEK")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        try:
            new.chmod(0o755)  # mkdtemp makes it private
            known = _write_asked(new, asked, asked_vectors) if asked and asked_vectors is not None else {}
            _write(new, levels, vectors, {**header, **known})
            _swap(new, path)
        finally:
            shutil.rmtree(new, ignore_errors=True)
    except OSError as error:
        raise ConfigError(f"cannot write the HEK to {folder}: {error}") from error


def read_store(
    folder: str | Path, fingerprint: str, dim: int
) -> tuple[list[Experience], dict[int, np.ndarray], dict[str, Any]]:
    """Records, vectors by level and settings; ConfigError naming the file and line that is wrong."""
    path = Path(folder)
    if not (path / "header.json").is_file():
        inside = path / "hek"
        remedy = f"did you mean {inside}?" if (inside / "header.json").is_file() else "build one with build_hek.py"
        raise ConfigError(f"no HEK in {str(folder)!r} (hek.path: no header.json there); {remedy}")
    header = _read_header(path / "header.json")
    if header.get("encoder") != fingerprint:
        raise ConfigError(
            f"HEK {folder} was embedded by encoder {header.get('encoder')!r}, the settings give "
            f"{fingerprint!r}; use its encoder, or {REBUILD}"
        )
    entries: list[Experience] = []
    vectors: dict[int, np.ndarray] = {}
    for level in LEVELS:
        records, vectors[level] = _read_level(path, level, header, dim)
        entries += records
    if header.get("titles") != _titles_digest(entries):
        raise ConfigError(f"HEK {folder}: titles or ids are not those that were embedded; {REBUILD}")
    try:
        check_lineage(entries)
    except ValueError as error:
        raise ConfigError(f"HEK {folder} is damaged: {error}; {REBUILD}") from error
    return entries, vectors, header.get("settings") or {}


def read_asked(folder: str | Path, dim: int) -> tuple[list[Asked], np.ndarray]:
    """The table of questions and its [N, D] vectors, nothing where the store has none; ConfigError if it is damaged."""
    path = Path(folder)
    told = _read_header(path / "header.json").get("questions")
    if told is None:
        return [], np.zeros((0, dim), np.float32)
    file = path / "questions.jsonl"
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
        asked = [Asked(**json.loads(line)) for line in lines[:-1]]
        rows = np.load(path / "questions.npy", allow_pickle=False)
        if lines[-1] or told != _asked_digest(asked):
            raise ValueError("the records are not those that were written")
        if rows.shape != (len(asked), dim) or rows.dtype != np.float32:
            raise ValueError(f"{len(asked)} records and vectors {rows.dtype} {rows.shape}, {dim} wide is expected")
    except (OSError, ValueError, TypeError, EOFError) as error:
        remedy = f'remove "questions" from {path / "header.json"} to go on without the table, or {REBUILD}'
        raise ConfigError(f"{file} cannot be used ({error}); {remedy}") from error
    _check_unit(path / "questions.npy", rows)
    return asked, rows


def _write_asked(folder: Path, asked: Sequence[Asked], vectors: np.ndarray) -> dict[str, Any]:
    """Returns what the header says of it."""
    lines = [json.dumps(dataclasses.asdict(one), ensure_ascii=False) + "\n" for one in asked]
    (folder / "questions.jsonl").write_text("".join(lines), encoding="utf-8")
    np.save(folder / "questions.npy", vectors, allow_pickle=False)
    return {"questions": _asked_digest(asked)}


def _asked_digest(asked: Sequence[Asked]) -> dict[str, Any]:
    records = [dataclasses.astuple(one) for one in asked]
    return {"count": len(asked), "digest": hashlib.sha256(json.dumps(records).encode()).hexdigest()[:16]}


def _check_unit(file: Path, rows: np.ndarray) -> None:
    lengths = np.linalg.norm(rows, axis=1)
    if not np.all((np.abs(lengths - 1) < 1e-3) | (lengths == 0)):  # also false for a length of nan or inf
        raise ConfigError(f"{file} holds vectors that are not finite or not of length 1; {REBUILD}")


def _write(
    folder: Path,
    levels: Mapping[int, Sequence[Experience]],
    vectors: Mapping[int, np.ndarray],
    header: Mapping[str, Any],
) -> None:
    for level, entries in levels.items():
        lines = [json.dumps(_record(entry), ensure_ascii=False) + "\n" for entry in entries]
        (folder / f"level{level}.jsonl").write_text("".join(lines), encoding="utf-8")
        np.save(folder / f"level{level}.npy", vectors[level], allow_pickle=False)
    whole = {
        "format": FORMAT,
        "normalised": True,
        "counts": {str(level): len(entries) for level, entries in levels.items()},
        "titles": _titles_digest([entry for entries in levels.values() for entry in entries]),
        **header,
    }
    (folder / "header.json").write_text(json.dumps(whole, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _record(entry: Experience) -> dict[str, Any]:
    """Without what is empty in nearly every entry."""
    record = dataclasses.asdict(entry)
    return {key: value for key, value in record.items() if value or key not in ("not_when", "language")}


def _swap(new: Path, path: Path) -> None:
    """Put `new` in the place of `path`; a folder that is not empty cannot be replaced in one call."""
    if path.is_dir() and any(path.iterdir()):
        old = Path(f"{new}.old")
        path.rename(old)
        new.rename(path)
        shutil.rmtree(old)
    else:
        new.replace(path)


def _titles_digest(entries: Iterable[Experience]) -> str:
    keys = sorted((entry.level, entry.id, entry.title) for entry in entries)
    return hashlib.sha256(json.dumps(keys).encode()).hexdigest()[:16]


def _read_header(file: Path) -> dict[str, Any]:
    try:
        header = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(header, dict) or not isinstance(header.get("counts"), dict):
            raise ValueError("no object with counts")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read ({error}); {REBUILD}") from error
    if header.get("format") != FORMAT:
        raise ConfigError(f"{file}: format {header.get('format')!r}, this code reads {FORMAT}; {REBUILD}")
    return header


def _read_level(folder: Path, level: int, header: Mapping[str, Any], dim: int) -> tuple[list[Experience], np.ndarray]:
    records, vectors = folder / f"level{level}.jsonl", folder / f"level{level}.npy"
    try:
        lines = records.read_text(encoding="utf-8").split("\n")  # splitlines would also cut at U+2028 in a text
    except (OSError, ValueError) as error:
        raise ConfigError(f"{records} cannot be read ({error}); {REBUILD}") from error
    try:
        rows = np.load(vectors, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(f"{vectors} is missing, cut off or not plain numbers; {REBUILD}") from error
    entries = [_read_record(line, f"{records}:{n}", level) for n, line in enumerate(lines[:-1], 1)]
    if lines[-1]:
        raise ConfigError(f"{records}:{len(lines)}: the last line is cut off; {REBUILD}")
    counted = header["counts"].get(str(level))
    if counted != len(entries) or rows.shape != (len(entries), dim) or rows.dtype != np.float32:
        raise ConfigError(
            f"{records} holds {len(entries)} records where header.json says {counted}, and {vectors.name} is "
            f"{rows.dtype} {rows.shape} (float32, {dim} wide is expected); {REBUILD}"
        )
    _check_unit(vectors, rows)
    return entries, rows


def _read_record(line: str, where: str, level: int) -> Experience:
    try:
        record = json.loads(line)
        for key in ("tags", "child_ids"):
            record[key] = tuple(record[key])
        record["not_when"] = tuple(map(str, record.get("not_when", ())))
        record["qa_groups"] = tuple((str(qid), str(question)) for qid, question in record["qa_groups"])
        entry = Experience(**record)
        texts = (entry.id, entry.title, entry.description, entry.language)
        if entry.level != level or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"not a record of level {level}")
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{where}: not an experience ({error}); mend the line, or {REBUILD}") from error
    return entry
