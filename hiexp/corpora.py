"""Passages out of the files that others publish: one reader, the layout told by content, never by a file's name.

    {id, title, text}                  JSON lines or one list (BEIR's _id, extracted Wikipedia pages, a text as a list)
    {id, contents}                     Search-R1 and FlashRAG: a first line with the title, in quotes, then the text
    id <tab> text <tab> title          DPR, with or without its heading; quoted like CSV where a field holds quotes
    id <tab> Title: ... Text: ...      R1-Searcher's abstracts; its full pages have "title   text" in that column
    {wikipedia_title, text: [...]}     KILT: section marks and list marks are dropped
    {title: [sentences]}               HippoRAG: one object; its other layout is a list without ids
    {question, context or paragraphs}  HotpotQA (both forms), 2Wiki, MuSiQue, IRCoT, MoreHopQA: with what is supporting

gzip, bzip2 and xz are read as they are. Files are streamed, a single list of any size too. A record that cannot be used
ends the reading with file and line. Ids are the file's own; where it has none, they are its name and the position.
"""

import bz2
import gzip
import json
import lzma
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, TextIO

from hiexp.config import ConfigError
from hiexp.data import ID_KEYS, QUESTION_KEYS, DataError, require_file
from hiexp.trajectory import Document

PASSAGE_ID_KEYS = ("id", "_id", "docid", "doc_id", "pid", "passage_id", "wikipedia_id")
CONTEXT_KEYS = ("context", "contexts", "paragraphs")
RECORD_KEYS = {*PASSAGE_ID_KEYS, *CONTEXT_KEYS, *ID_KEYS, *QUESTION_KEYS, "title", "text", "contents", "url", "type"}
PACKED: dict[bytes, Callable[..., Any]] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ": lzma.open}
UNREADABLE = {b"\x28\xb5\x2f\xfd": "zstd", b"PAR1": "parquet", b"PK\x03\x04": "zip", b"\x93NUMPY": "a numpy array"}
CHUNK = 1 << 20
"""characters that are read at once of a file that is one JSON value"""
PEEK = 10
"""lines that tell how a table is laid out"""
TITLE_TEXT = re.compile(r"Title: (.*?) Text:\s+(.*)", re.DOTALL)
WIDE_GAP = " " * 3


@dataclass(frozen=True)
class Passage:
    """One text as its file has it, stripped."""

    id: str
    title: str
    text: str
    where: str
    """file:line, for messages"""
    supporting: bool = False
    """the file says that a question's answer rests on it"""
    question: str = ""
    """id of the question that it comes with, in files of questions"""


def read_file(path: str | Path) -> Iterator[Passage]:
    """The passages of a file in its order, texts whole.

    Raises ConfigError for a missing, empty or unreadable file and one without a passage, DataError for a record that
    is broken, has no text, or is laid out in no known way.
    """
    file, count = require_file(path), 0
    with _text_of(file) as stream:
        first = next((line for line in _short_lines(stream) if line.strip()), "")
        if not first:
            raise ConfigError(f"{path} is empty; expected passages")
        stream.seek(0)
        for passage in _reader(first.lstrip(), file)(stream, file):
            count += 1
            yield passage
    if not count:
        raise ConfigError(f"{path} holds no passage; docs/search.md lists the layouts that are read")


def parse_contents(contents: str) -> Document:
    """Title and text of Search-R1's and FlashRAG's `contents`; a text of one line has no title."""
    head, newline, text = contents.strip().partition("\n")
    if not newline:
        return Document("", head.strip())
    title = head.strip()
    if len(title) > 1 and title[0] == title[-1] == '"':
        title = title[1:-1]
    return Document(title.strip(), text.strip())


def contents(document: Document) -> str:
    """The other direction: `"Title"` on the first line, then the text."""
    return f'"{document.title}"\n{document.text}'


def join_sentences(sentences: Sequence[str], glue: str | None = None) -> str:
    """One text. `glue` is what goes between two sentences; None = nothing if they bring their spaces, else a space."""
    return (glue_of([sentences]) if glue is None else glue).join(sentences).strip()


def glue_of(paragraphs: Iterable[Sequence[str]]) -> str:
    """Nothing where sentences begin with a space (HotpotQA), a space where none does (2Wiki).

    All paragraphs of a question decide together: HotpotQA also cuts where no space is.
    """
    return "" if any(s[:1].isspace() for sentences in paragraphs for s in sentences[1:]) else " "


@contextmanager
def _text_of(file: Path) -> Iterator[TextIO]:
    """The file as text, unpacked; what goes wrong while it is read becomes an error that names it."""
    with file.open("rb") as raw:
        head = raw.read(8)
    for magic, name in UNREADABLE.items():
        if head.startswith(magic):
            raise ConfigError(f"{file} is {name}, which is not read; turn it into JSON lines (gzip is fine)")
    opener = next((opener for magic, opener in PACKED.items() if head.startswith(magic)), open)
    try:
        with opener(file, "rt", encoding="utf-8-sig", newline="\n") as stream:  # a lone \r is part of a text
            yield stream
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 text ({error.reason} at byte {error.start})") from error
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError) as error:
        raise DataError(f"{file} is damaged or cut off ({error}); fetch it again") from error


def _short_lines(stream: TextIO) -> Iterator[str]:
    """Lines, cut at CHUNK: a list of gigabytes may be one line."""
    while line := stream.readline(CHUNK):
        yield line


def _reader(first: str, file: Path) -> Callable[[TextIO, Path], Iterator[Passage]]:
    if first.startswith("["):
        return _list_passages
    if first.startswith("{"):
        key = re.match(r'\{\s*"((?:[^"\\]|\\.)*)"', first)
        is_record = key[1] in RECORD_KEYS or _is_whole_record(first) if key else first.strip() != "{"
        return _line_passages if is_record else _dict_passages
    if "\t" in first:
        return _table_passages
    raise DataError(f"{file}:1: neither JSON nor a table with tabs ({first[:40]!r}); docs/search.md lists the layouts")


def _is_whole_record(line: str) -> bool:
    """A line that is an object with keys of a passage or a question."""
    try:
        return not RECORD_KEYS.isdisjoint(json.loads(line))
    except ValueError:
        return False


def _line_passages(stream: TextIO, file: Path) -> Iterator[Passage]:
    number = 0
    for at, line in enumerate(stream, 1):
        if line.strip():
            where = f"{file}:{at}"
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{where}: not JSON ({error.msg}, column {error.colno})") from error
            yield from _record_passages(record, where, unnamed(file, number))
            number += 1


def _list_passages(stream: TextIO, file: Path) -> Iterator[Passage]:
    reader = _Pieces(stream, file)
    reader.take("[")
    for number, where in enumerate(reader.items("]")):
        yield from _record_passages(reader.value(), f"{where} (item {number + 1})", unnamed(file, number))


def _dict_passages(stream: TextIO, file: Path) -> Iterator[Passage]:
    reader = _Pieces(stream, file)
    reader.take("{")
    for where in reader.items("}"):
        title = reader.value()
        reader.take(":")
        text = reader.value()
        if not isinstance(title, str) or not isinstance(text, (str, list)):
            raise DataError(f"{where}: expected a title with its text or sentences, got {type(text).__name__}")
        yield _passage(title, title, text, where)


def _record_passages(record: Any, where: str, spare: str) -> Iterator[Passage]:
    """The passages of one JSON record; `spare` is its id where it has none."""
    if not isinstance(record, dict):
        raise DataError(f"{where}: expected a JSON object, got {type(record).__name__}")
    if any(key in record for key in QUESTION_KEYS):
        yield from question_passages(record, where, spare)
        return
    key = next((str(record[key]).strip() for key in PASSAGE_ID_KEYS if record.get(key) is not None), None)
    if key == "" or (key is None and any(name in record for name in PASSAGE_ID_KEYS)):
        raise DataError(f"{where}: the id is empty; leave it out of every record or fill it in")
    key = spare if key is None else key
    if "wikipedia_title" in record:
        yield from _kilt_passages(record, where, str(record.get("wikipedia_id") or key))
    elif "text" in record:
        yield _passage(key, record.get("title"), record["text"], where)
    elif isinstance(record.get("contents"), str):
        document = parse_contents(record["contents"])
        yield _passage(key, document.title, document.text, where)
    else:
        raise DataError(f"{where}: passage {key!r} has neither text nor contents; its keys: {', '.join(record)[:100]}")


def _kilt_passages(record: dict[str, Any], where: str, key: str) -> Iterator[Passage]:
    title, lines = str(record["wikipedia_title"]).strip(), record.get("text")
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise DataError(f"{where}: page {key!r}: KILT's text is a list of paragraphs")
    kept = [line.strip() for line in lines if not line.startswith("Section::::")]
    kept = [re.sub(r"^BULLET::::-?\s*", "", line) for line in kept]
    if kept and kept[0] == title:
        kept = kept[1:]
    if text := "\n".join(line for line in kept if line):  # a page that is a title alone says nothing
        yield _passage(key, title, text, where)


def question_passages(record: dict[str, Any], where: str, spare: str) -> Iterator[Passage]:
    """The paragraphs that a question's record brings along, with those marked that its answer rests on."""
    question = str(next((record[key] for key in ID_KEYS if key in record), spare))
    context = next((record[key] for key in CONTEXT_KEYS if record.get(key)), [])
    if isinstance(context, dict) and {"title", "sentences"} <= context.keys():
        context = list(zip(context["title"], context["sentences"], strict=True))
    if not isinstance(context, list):
        raise DataError(f"{where}: the paragraphs of question {question!r} are a {type(context).__name__}")
    named = supporting_titles(record)
    glue = glue_of(item[1] for item in context if isinstance(item, (list, tuple)) and isinstance(item[-1], list))
    for number, item in enumerate(context):
        if isinstance(item, dict):
            title, text, supports = item.get("title"), item.get("paragraph_text"), item.get("is_supporting")
        elif isinstance(item, (list, tuple)) and len(item) == 2:
            (title, text), supports = item, None
        else:
            raise DataError(f"{where}: paragraph {number} of question {question!r} is laid out in no known way")
        if isinstance(text, list) and all(isinstance(sentence, str) for sentence in text):
            text = join_sentences(text, glue)
        if isinstance(text, str) and not text.strip():
            continue  # some published paragraphs are a title alone
        is_gold = title in named if supports is None else bool(supports)
        yield _passage(f"{question}:{number}", title, text, where, is_gold, question)


def supporting_titles(record: dict[str, Any]) -> set[str]:
    """Titles that a HotpotQA, 2Wiki or MoreHopQA record names as the ground of its answer."""
    facts = record.get("supporting_facts") or []
    if isinstance(facts, dict):
        return set(facts["title"])
    steps = record.get("question_decomposition") or []
    steps = [*steps, *(detail for step in steps for detail in step.get("details") or [])]
    named = [str(step.get("paragraph_support_title") or "") for step in steps]
    return {str(title) for title in (*(fact[0] for fact in facts), *named) if title}


def _table_passages(stream: TextIO, file: Path) -> Iterator[Passage]:
    numbered = ((at, line.rstrip("\r\n")) for at, line in enumerate(stream, 1) if line.strip())
    head = list(islice(numbered, PEEK))
    names = [name.strip().lower() for name in _cells(head[0][1])]
    has_heading = {"id", "text"} <= set(names)
    rows = [_cells(line) for _, line in head[has_heading:]]
    columns = len(names)
    if not has_heading and columns not in (2, 3):
        raise DataError(f"{file}:1: {columns} columns; expected id and text, or id, text and title, or a heading")
    order = {name: at for at, name in enumerate(names)} if has_heading else {"id": 0, "text": 1, "title": 2}
    inside = ""
    if columns == 2 and rows:
        marked, gap = all(TITLE_TEXT.fullmatch(row[-1]) for row in rows), all(WIDE_GAP in row[-1] for row in rows)
        inside = "Title: ... Text: ..." if marked else "title, three spaces, text" if gap else ""
    for at, line in chain(head[has_heading:], numbered):
        where, cells = f"{file}:{at}", _cells(line)
        if len(cells) != columns:
            raise DataError(f"{where}: {len(cells)} columns, the first line has {columns}")
        key, text = cells[order["id"]].strip(), cells[order["text"]]
        title = cells[order["title"]] if "title" in order and order["title"] < columns else ""
        if inside:
            title, text = _title_inside(text, inside, where)
        if not key:
            raise DataError(f"{where}: the id is empty")
        yield _passage(key, title, text, where)


def _title_inside(cell: str, layout: str, where: str) -> tuple[str, str]:
    if layout.startswith("Title"):
        found = TITLE_TEXT.fullmatch(cell)
        parts = (found[1], found[2]) if found else None
    else:
        title, gap, text = cell.partition(WIDE_GAP)
        parts = (title, text) if gap else None
    if parts is None:
        raise DataError(f"{where}: expected {layout} like the lines before")
    return parts


def _cells(line: str) -> list[str]:
    """Fields between tabs. One in quotes, with every quote inside doubled, is unquoted; any other is as it stands."""
    return [_unquoted(cell) for cell in line.split("\t")]


def _unquoted(cell: str) -> str:
    if len(cell) > 1 and cell[0] == cell[-1] == '"':
        inner = cell[1:-1]
        if '"' not in inner.replace('""', ""):
            return inner.replace('""', '"')
    return cell


def _passage(key: str, title: Any, text: Any, where: str, supporting: bool = False, question: str = "") -> Passage:
    if isinstance(text, list) and all(isinstance(sentence, str) for sentence in text):
        text = join_sentences(text)
    title = "" if title is None else title
    if not isinstance(title, str) or not isinstance(text, str) or not text.strip():
        raise DataError(f"{where}: passage {key!r} needs a text and (if any) a title, as strings")
    return Passage(key, title.strip(), text.strip(), where, supporting, question)


def unnamed(file: Path, number: int) -> str:
    """The id of a record that has none."""
    return f"{file.name.split('.')[0]}:{number}"


class _Pieces:
    """One JSON value of any size, read item by item."""

    def __init__(self, stream: TextIO, file: Path) -> None:
        self.stream, self.file = stream, file
        self.text, self.at, self.line = "", 0, 1
        self.decoder = json.JSONDecoder()

    def items(self, end: str) -> Iterator[str]:
        """file:line of each item, whose value is then read; up to the closing bracket, behind which nothing may be."""
        if self.next() != end:
            while True:
                self.next()
                yield f"{self.file}:{self.line + self.text.count(chr(10), 0, self.at)}"
                if self.next() != ",":
                    break
                self.take(",")
        self.take(end)
        if self.next():
            self.fail(f"something follows the closing {end}")

    def next(self) -> str:
        """The next character that is not white space; empty at the end."""
        while True:
            while self.at < len(self.text) and self.text[self.at].isspace():
                self.at += 1
            if self.at < len(self.text) or not self.more():
                return self.text[self.at : self.at + 1]

    def take(self, character: str) -> None:
        if self.next() != character:
            self.fail(f"expected {character!r}")
        self.at += 1

    def value(self) -> Any:
        self.next()
        while True:
            try:
                value, end = self.decoder.raw_decode(self.text, self.at)
            except json.JSONDecodeError as error:
                is_open = error.msg.startswith("Unterminated") or error.pos > len(self.text) - 16
                if is_open and self.more():
                    continue
                self.at = min(error.pos, len(self.text))
                self.fail(error.msg)
            self.at = end
            return value

    def more(self) -> bool:
        """Read on, twice as much as is waiting; what was used is dropped."""
        self.line += self.text.count("\n", 0, self.at)
        rest = self.text[self.at :]
        chunk = self.stream.read(max(CHUNK, len(rest)))
        self.text, self.at = rest + chunk, 0
        return bool(chunk)

    def fail(self, message: str) -> None:
        raise DataError(f"{self.file}:{self.line + self.text.count(chr(10), 0, self.at)}: not JSON ({message})")
