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

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, TextIO

from hiexp.config import ConfigError
from hiexp.data import ID_KEYS, QUESTION_KEYS, DataError, require_file
from hiexp.raw_text import Pieces, first_line, json_lines, text_of
from hiexp.trajectory import Document

PASSAGE_ID_KEYS = ("id", "_id", "docid", "doc_id", "pid", "passage_id", "wikipedia_id")
TEXT_COLUMNS = ("text", "contents", "passage", "passage_text")
CONTEXT_KEYS = ("context", "contexts", "paragraphs")
RECORD_KEYS = {*PASSAGE_ID_KEYS, *CONTEXT_KEYS, *ID_KEYS, *QUESTION_KEYS, "title", "text", "contents", "url", "type"}
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
    with text_of(file) as stream:
        first = first_line(stream)
        if not first:
            raise ConfigError(f"{path} is empty; expected passages")
        for passage in _reader(first, file)(stream, file):
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


def titled(title: Any, contents: str) -> Document:
    """`contents` beside a title of its own: the title's line is taken off where it is there, else all is text."""
    document = parse_contents(contents)
    if not isinstance(title, str) or not title.strip() or document.title == title.strip():
        return document
    return Document(title.strip(), contents.strip())


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
    except (ValueError, RecursionError):
        return False


def _line_passages(stream: TextIO, file: Path) -> Iterator[Passage]:
    for number, (where, record) in enumerate(json_lines(stream, file)):
        yield from _record_passages(record, where, unnamed(file, number))


def _list_passages(stream: TextIO, file: Path) -> Iterator[Passage]:
    reader = Pieces(stream, file)
    reader.take("[")
    for number, where in enumerate(reader.items("]")):
        yield from _record_passages(reader.value(), f"{where} (item {number + 1})", unnamed(file, number))


def _dict_passages(stream: TextIO, file: Path) -> Iterator[Passage]:
    reader = Pieces(stream, file)
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
        document = titled(record.get("title"), record["contents"])
        yield _passage(key, document.title, document.text, where)
    else:
        raise DataError(f"{where}: passage {key!r} has neither text nor contents; its keys: {', '.join(record)[:100]}")


def _kilt_passages(record: dict[str, Any], where: str, key: str) -> Iterator[Passage]:
    title, lines = record["wikipedia_title"] or "", record.get("text")
    title = title.strip() if isinstance(title, str) else title
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise DataError(f"{where}: page {key!r}: KILT's text is a list of paragraphs")
    kept = [line.strip() for line in lines if not line.startswith("Section::::")]
    kept = [re.sub(r"^BULLET::::-?\s*", "", line) for line in kept]
    if kept and kept[0] == title:
        kept = kept[1:]
    if text := "\n".join(line for line in kept if line):  # a page that is a title alone says nothing
        yield _passage(key, title, text, where)


def question_passages(record: dict[str, Any], where: str, spare: str) -> Iterator[Passage]:
    """The paragraphs that a question's record brings along, with those marked that its answer rests on.

    DataError for paragraphs, or marks of what supports the answer, that are laid out in no known way.
    """
    question = str(next((record[key] for key in ID_KEYS if key in record), spare))
    try:
        named, paragraphs = supporting_titles(record), _paragraphs(record)
    except ValueError as error:
        raise DataError(f"{where}: question {question!r}: {error}") from None
    glue = glue_of(text for _, text, _ in paragraphs if isinstance(text, list))
    for number, (title, text, supports) in enumerate(paragraphs):
        whole = text if isinstance(text, str) else join_sentences(text, glue)
        if whole.strip():  # some published paragraphs are a title alone
            is_gold = title in named if supports is None else bool(supports)
            yield _passage(f"{question}:{number}", title, whole, where, is_gold, question)


def _paragraphs(record: dict[str, Any]) -> list[tuple[str, str | list[str], Any]]:
    """(title, text or sentences, whether it supports the answer or None) of each; ValueError for what is none."""
    context = next((record[key] for key in CONTEXT_KEYS if record.get(key)), [])
    if isinstance(context, dict) and {"title", "sentences"} <= context.keys():
        titles, texts = context["title"], context["sentences"]
        if not isinstance(titles, list) or not isinstance(texts, list) or len(titles) != len(texts):
            raise ValueError("the columns title and sentences of its paragraphs must be lists of equal length")
        context = list(zip(titles, texts, strict=True))
    if not isinstance(context, list):
        raise ValueError(f"the paragraphs are a {type(context).__name__}")
    found = []
    for number, item in enumerate(context):
        if isinstance(item, dict):
            title, text, supports = item.get("title"), item.get("paragraph_text"), item.get("is_supporting")
        elif isinstance(item, (list, tuple)) and len(item) == 2:
            (title, text), supports = item, None
        else:
            raise ValueError(f"paragraph {number} is laid out in no known way")
        title = "" if title is None else title
        if not isinstance(title, str) or not _is_text(text):
            raise ValueError(f"paragraph {number} needs a title, and a text or a list of sentences")
        found.append((title, text, supports))
    return found


def supporting_titles(record: dict[str, Any]) -> set[str]:
    """Titles that a HotpotQA, 2Wiki or MoreHopQA record names as the ground of its answer; ValueError for others."""
    facts = record.get("supporting_facts") or []
    if isinstance(facts, dict):
        facts = [[title] for title in facts["title"]] if isinstance(facts.get("title"), list) else None
    if not isinstance(facts, list) or not all(isinstance(fact, (list, tuple)) and fact for fact in facts):
        raise ValueError("supporting_facts must be a list of [title, sentence], or an object with a list of titles")
    steps = record.get("question_decomposition") or []
    steps = steps if isinstance(steps, list) else [steps]
    details = [step.get("details") or [] for step in steps if isinstance(step, dict)]
    steps = [*steps, *chain.from_iterable(detail if isinstance(detail, list) else [detail] for detail in details)]
    if not all(isinstance(step, dict) for step in steps):
        raise ValueError("question_decomposition must be a list of objects")
    named = [step.get("paragraph_support_title") for step in steps]
    return {str(title) for title in (*(fact[0] for fact in facts), *named) if title}


def _is_text(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(one, str) for one in value))


def _table_passages(stream: TextIO, file: Path) -> Iterator[Passage]:
    numbered = ((at, line.rstrip("\r\n")) for at, line in enumerate(stream, 1) if line.strip())
    head = list(islice(numbered, PEEK))
    names = [name.strip().lower() for name in _cells(head[0][1])]
    order = _heading(names)
    has_heading, columns = bool(order), len(names)
    rows = [_cells(line) for _, line in head[has_heading:]]
    if not has_heading and columns not in (2, 3):
        raise DataError(f"{file}:1: {columns} columns; expected id and text, or id, text and title, or a heading")
    inside = _inside([row[-1] for row in rows]) if columns == 2 else ""
    order = order or {"id": 0, "text": 1, "title": 2}
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


def _heading(names: Sequence[str]) -> dict[str, int]:
    """Where id, text and title stand by a table's first line; empty where that is a passage."""
    columns = {"id": PASSAGE_ID_KEYS, "text": TEXT_COLUMNS, "title": ("title", "wikipedia_title")}
    found = {kind: [names.index(name) for name in known if name in names] for kind, known in columns.items()}
    return {kind: places[0] for kind, places in found.items() if places} if found["id"] and found["text"] else {}


def _inside(cells: Sequence[str]) -> str:
    """How title and text share a column; "" where it holds a text alone.

    Three spaces part them unless most of what would be titles ends like a sentence.
    """
    if cells and all(TITLE_TEXT.fullmatch(cell) for cell in cells):
        return "Title: ... Text: ..."
    if cells and all(WIDE_GAP in cell for cell in cells):
        sentences = sum(cell.partition(WIDE_GAP)[0].rstrip().endswith((".", "!", "?")) for cell in cells)
        return "title, three spaces, text" if 2 * sentences <= len(cells) else ""
    return ""


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
    text = join_sentences(text) if isinstance(text, list) and _is_text(text) else text
    title = "" if title is None else title
    if not isinstance(title, str) or not isinstance(text, str) or not text.strip():
        raise DataError(f"{where}: passage {key!r} needs a text and (if any) a title, as strings")
    return Passage(key, title.strip(), text.strip(), where, supporting, question)


def unnamed(file: Path, number: int) -> str:
    """The id of a record that has none."""
    return f"{file.name.split('.')[0]}:{number}"
