"""Records of a file, whatever holds them: JSON lines, a JSON list or object, CSV or TSV, parquet, arrow.

The container is told from the content, never from the suffix: published `.json` files hold JSON lines, and the other
way round. What a record says is for sample_fields.py; this file knows just enough names to tell a table of questions
from any other text.
"""

import csv
import difflib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from hiexp.config import ConfigError
from hiexp.sample_fields import GOLD_KEYS, ID_KEYS, PROMPT_KEYS, QUESTION_KEYS, literal_list

NO_DATA = {
    b"\x1f\x8b": "packed with gzip; unpack it first",
    b"BZh": "packed with bzip2; unpack it first",
    b"\xfd7zXZ": "packed with xz; unpack it first",
    b"\x28\xb5\x2f\xfd": "packed with zstd; unpack it first",
    b"PK\x03\x04": "a zip archive; unpack it and name a file in it",
    b"version https://git-lfs": "a pointer of Git LFS, not the data; fetch the file itself (git lfs pull)",
    b"\xff\xfe": "UTF-16 text; store it as UTF-8",
    b"\xfe\xff": "UTF-16 text; store it as UTF-8",
    b"FEA1": "a feather file of version 1; store it as parquet",
    b"\x80\x04": "a Python pickle, which is never read here (it could run code); store it as JSON lines",
    b"<!DOCTYPE": "a web page, not the data; download the raw file",
    b"<html": "a web page, not the data; download the raw file",
}
"""How a file starts that holds no records, and what to do."""
ROWS_AT_ONCE = 1024
COMP_GAP_WIDTH = 7
"""Columns of Bamboogle's table without a header: the question is the first, the answer the fifth, 2 to 4 are empty"""


class DataError(ConfigError, ValueError):
    """A record that cannot be used; the message names the file, the line (or list position) and the id."""


Item = tuple[str, Any]
"""(where, value); the value is a DataError for a row that cannot be read while the next ones can."""


def records(
    path: str | Path, on_bad_row: Callable[[DataError], None] | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """("file:line", record) of each record; the place in a list, a column or a batch is its 1-based position.

    A row that cannot be read raises its DataError, or is handed to `on_bad_row` and left out. Raises ConfigError for a
    file that is missing, empty, packed, cut short or no container known here.
    """
    file, count = require_file(path), 0
    for where, item in _items(file):
        if not isinstance(item, (dict, DataError)):
            item = DataError(f"{where}: expected a JSON object, got {type(item).__name__}")
        count += 1
        if isinstance(item, dict):
            yield where, item
        elif on_bad_row:
            on_bad_row(item)
        else:
            raise item
    if not count:
        raise ConfigError(f"{path} holds an empty list; expected records")


def require_file(path: str | Path) -> Path:
    """The path, if it is a file; else a ConfigError that suggests the nearest name beside it."""
    file = Path(path)
    if file.is_file():
        return file
    if not str(path):
        raise ConfigError("a data file is needed, but its path is empty; set it in the configuration")
    if file.is_dir():
        raise ConfigError(f"{path} is a folder; name one of the files in it")
    if not file.parent.is_dir():
        raise ConfigError(f"no such file: {path} (there is no folder {file.parent})")
    names = sorted(p.name for p in file.parent.iterdir() if p.is_file())
    near = difflib.get_close_matches(file.name, names, 1)
    hint = f"did you mean {file.parent / near[0]}?" if near else f"files in {file.parent}: {', '.join(names[:5])}"
    raise ConfigError(f"no such file: {path}; {hint}")


def _items(file: Path) -> Iterator[Item]:
    try:
        with file.open("rb") as stream:
            head = stream.read(32)
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
    for start, what in NO_DATA.items():
        if head.startswith(start):
            raise DataError(f"{file} is {what}")
    if head.startswith((b"PAR1", b"ARROW1", b"\xff\xff\xff\xff")):
        yield from _arrow_items(file, head)
        return
    try:
        yield from _text_items(file)
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 text ({error.reason} at byte {error.start})") from error


def _text_items(file: Path) -> Iterator[Item]:
    with file.open(encoding="utf-8-sig") as stream:  # some published files start with a byte order mark
        filled = (line for line in stream if line.strip())
        first, second = next(filled, ""), next(filled, "")
        if not first:
            raise ConfigError(f"{file} is empty; expected JSON lines or one JSON list")
        stream.seek(0)
        start = first.lstrip()[0]
        if start == "[":
            yield from _list_items(stream.read(), file)
        elif start == "{":
            yield from _object_items(stream, file, first, bool(second))
        elif delimiter := _delimiter(first):
            yield from _table_items(file, delimiter)
        else:
            yield from _line_items(stream, file)


def _line_items(stream: Iterable[str], file: Path) -> Iterator[Item]:
    for number, line in enumerate(stream, 1):
        if line.strip():
            where = f"{file}:{number}"
            try:
                record = json.loads(line)
                yield where, _whole_characters(record, where, "mend the line") if _may_halve(line) else record
            except RecursionError:
                yield where, DataError(f"{where}: brackets nested too deeply to be a record; mend the line")
            except json.JSONDecodeError as error:
                yield where, DataError(f"{where}: not JSON ({error.msg}, column {error.colno})")
            except ValueError as error:  # a number of more digits than Python converts
                yield where, DataError(f"{where}: not JSON ({str(error).split(';')[0]})")


def _list_items(text: str, file: Path) -> Iterator[Item]:
    try:
        items = json.loads(text)
    except RecursionError:
        raise DataError(f"{file}: brackets nested too deeply to be records") from None
    except json.JSONDecodeError as error:
        raise DataError(f"{file}:{error.lineno}: not a JSON list ({error.msg}, column {error.colno})") from error
    except ValueError as error:
        raise DataError(f"{file}: not a JSON list ({str(error).split(';')[0]})") from error
    yield from _checked(enumerate(items, 1), text, file)


def _checked(found: Iterable[tuple[Any, Any]], text: str, file: Path) -> Iterator[Item]:
    """(place, item) pairs that were read from `text` as a whole."""
    may_halve = _may_halve(text)
    for place, item in found:
        where = f"{file}[{place}]"
        yield where, _whole_characters(item, where, "mend the record") if may_halve else item


def _may_halve(text: str) -> bool:
    return "\\ud" in text or "\\uD" in text


def _whole_characters(item: Any, where: str, remedy: str) -> Any:
    r"""The item, or a DataError where it holds half of a surrogate pair (`\ud800`), which no file can hold."""
    try:
        json.dumps(item, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return DataError(f"{where}: holds half of a surrogate pair (\\ud...); {remedy}")
    except RecursionError:
        return DataError(f"{where}: brackets nested too deeply to be a record; {remedy}")
    return item


def _object_items(stream: Any, file: Path, first: str, has_more: bool) -> Iterator[Item]:
    """A file that starts with a brace: JSON lines, or one object that holds all records."""
    if not has_more or not _is_json(first):
        text = stream.read()
        stream.seek(0)
        try:
            whole = json.loads(text)
        except (ValueError, RecursionError):
            whole = None
        if isinstance(whole, dict):
            found = _unfold(whole)
            if found is not None or has_more:
                yield from _checked([(1, whole)] if found is None else found, text, file)
                return
    yield from _line_items(stream, file)


def _unfold(whole: dict[str, Any]) -> list[tuple[Any, Any]] | None:
    """(place, record) of an object that holds records; None for an object that is itself one.

    Known are {column: {row: value}} (a table of pandas), {column: [value, ...]}, {id: record} and a record list beside
    other facts, such as {"version": ..., "data": [record, ...]}.
    """
    values = list(whole.values())
    if question := next((whole[key] for key in (*QUESTION_KEYS, "Prompt") if key in whole), None):
        if all(isinstance(column, dict) for column in values):
            return [(row, {name: column.get(row) for name, column in whole.items()}) for row in question]
        is_columns = isinstance(question, list) and all(isinstance(column, list) for column in values)
        if is_columns and all(len(column) == len(question) for column in values):
            return [(i + 1, {name: column[i] for name, column in whole.items()}) for i in range(len(question))]
        return None
    if values and all(map(_asks, values)):
        return [
            (key, {**({} if set(record) & set(ID_KEYS) else {"id": key}), **record}) for key, record in whole.items()
        ]
    lists = [value for value in values if isinstance(value, list) and value and all(map(_asks, value))]
    return list(enumerate(lists[0], 1)) if len(lists) == 1 else None


def _asks(value: Any) -> bool:
    return isinstance(value, dict) and any(key in value for key in QUESTION_KEYS)


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    except RecursionError:
        return True
    return True


def _delimiter(line: str) -> str:
    """What separates the cells of a table of questions that starts with this line; "" for anything else."""
    for delimiter in "\t,;":
        cells = next(csv.reader([line], delimiter=delimiter), [])
        names = {cell.strip() for cell in cells}
        if names & {*QUESTION_KEYS, *PROMPT_KEYS} and names & set(GOLD_KEYS):
            return delimiter
        if _is_comp_gap(cells):
            return delimiter
    return ""


def _is_comp_gap(cells: list[str]) -> bool:
    return len(cells) == COMP_GAP_WIDTH and bool(cells[0].strip() and cells[4].strip()) and not any(cells[1:4])


def _table_items(file: Path, delimiter: str) -> Iterator[Item]:
    with file.open(encoding="utf-8-sig", newline="") as stream:
        reader = csv.reader(stream, delimiter=delimiter, strict=True)
        start = 1
        try:
            names = next(row for row in reader if any(cell.strip() for cell in row))
            names, rows = _named(names, reader)
            start = 1 if rows is not reader else reader.line_num + 1
            for row in rows:
                where, start = f"{file}:{start}", reader.line_num + 1
                if not any(cell.strip() for cell in row):
                    continue
                if len(row) != len(names):
                    yield where, DataError(f"{where}: {len(row)} cells where the table has {len(names)} columns")
                else:
                    cells = zip(names, row, strict=True)
                    yield where, {name: literal_list(cell.strip()) for name, cell in cells if name}
        except csv.Error as error:
            raise DataError(
                f"{file}:{start}: not a row of a table ({error}); a quote that never closes, or one in a cell that "
                "is not doubled? Mend the line, or store the file as JSON lines"
            ) from error


def _named(head: list[str], reader: Iterator[list[str]]) -> tuple[list[str], Iterator[list[str]]]:
    """(names of the columns, rows). An unnamed column that numbers the rows is their id, where no other is."""
    if _is_comp_gap(head):
        return ["question", "", "", "", "answer", "", ""], itertools.chain([head], reader)
    names = [name.strip() for name in head]
    if not set(names) & set(ID_KEYS) and names[0] in ("", "Unnamed: 0"):
        names[0] = "id"
    return names, reader


def _arrow_items(file: Path, head: bytes) -> Iterator[Item]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ConfigError(
            f"{file} is a parquet or arrow file, which needs pyarrow; pip install -r requirements-eval.txt"
        ) from error
    try:
        if head.startswith(b"PAR1"):
            batches: Iterable[Any] = parquet.ParquetFile(file).iter_batches(ROWS_AT_ONCE)
        elif head.startswith(b"ARROW1"):
            reader = pa.ipc.open_file(pa.OSFile(str(file)))
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            batches = pa.ipc.open_stream(pa.OSFile(str(file)))
        number = 0
        for batch in batches:
            for row in _rows(batch):
                number += 1
                where = f"{file}[{number}]"
                yield where, row if isinstance(row, dict) else DataError(f"{where}: {row}")
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file} is a damaged or unfinished table ({' '.join(str(error).split())[:200]})") from error


def _rows(batch: Any) -> Iterator[dict[str, Any] | str]:
    """Rows of a batch; what is wrong with a row that cannot be taken (text that is not UTF-8) in its place."""
    try:
        rows = batch.to_pylist()
    except (ValueError, OverflowError):
        rows = [_row(batch.slice(i, 1)) for i in range(batch.num_rows)]
    yield from rows


def _row(batch: Any) -> dict[str, Any] | str:
    try:
        return batch.to_pylist()[0]
    except (ValueError, OverflowError) as error:
        return f"cannot be read ({error})"
