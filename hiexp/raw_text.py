r"""Text as others' files and services give it: unpacked, streamed at any size, every fault with its file and line.

gzip, bzip2 and xz are unpacked while they are read. JSON lines, and the items of one list or object, come one by one.
What no file or tokenizer can hold (half of a surrogate pair, `\ud800`) ends the reading of a file; in the words of a
model or a server it becomes U+FFFD.
"""

import bz2
import codecs
import gzip
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TextIO

from hiexp.config import ConfigError
from hiexp.layouts import DataError, records, require_file
from hiexp.sample_fields import QUESTION_KEYS

PACKED: dict[bytes, Callable[..., Any]] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ": lzma.open}
TABLES = (b"PAR1", b"ARROW1", b"\xff\xff\xff\xff")
UNREADABLE = {b"\x28\xb5\x2f\xfd": "zstd", b"PAR1": "parquet", b"PK\x03\x04": "zip", b"\x93NUMPY": "a numpy array"}
CHUNK = 1 << 20
"""characters that are read at once of a file that is one JSON value"""
HALF = re.compile("[\ud800-\udfff]")
TOO_DEEP = "brackets nested too deeply to be a record"


def mended(text: str) -> str:
    """The text with U+FFFD for each half of a surrogate pair, which tokenizers and UTF-8 refuse."""
    return HALF.sub("\ufffd", text)


@contextmanager
def text_of(file: Path) -> Iterator[TextIO]:
    """The file as text, unpacked; what goes wrong while it is read becomes an error that names it."""
    opener = _opener(file)
    try:
        try:
            with opener(file, "rt", encoding="utf-8-sig", newline="\n") as stream:  # a lone \r is part of a text
                yield stream
        except UnicodeDecodeError as error:
            line, byte = _not_utf8(file, opener)  # which may come upon damage in a packed file
            raise DataError(f"{file}:{line}: not UTF-8 text ({error.reason}, byte {byte} of the text)") from error
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        raise DataError(f"{file} is damaged or cut off ({error}); fetch it again") from error
    except OSError as error:
        if opener is not open and error.errno is None:  # bz2 says so of damaged data
            raise DataError(f"{file} is damaged or cut off ({error}); fetch it again") from error
        raise ConfigError(f"cannot read {file}: {error}") from error


def question_records(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """("file:line", record) of each record of a file of questions.

    JSON lines and one JSON list are streamed, packed or not; every other container is read as layouts.records does.
    """
    file = require_file(path)
    if not _head(file).startswith(TABLES):
        with text_of(file) as stream:
            first = first_line(stream)
            if first.startswith("["):
                yield from _records(_list_items(stream, file))
                return
            if first.startswith("{") and _is_question(first):
                yield from _records(json_lines(stream, file))
                return
        if _opener(file) is not open:
            raise DataError(f"{file} is packed, and neither JSON lines of questions nor one list of them; unpack it")
    yield from records(path)


def first_line(stream: TextIO) -> str:
    """The first line that is not blank, without white space before it, at most CHUNK long; the stream starts anew."""
    first = ""
    while not first.strip() and (line := stream.readline(CHUNK)):
        first = line
    stream.seek(0)
    return first.lstrip()


def json_lines(stream: TextIO, file: Path) -> Iterator[tuple[str, Any]]:
    """("file:line", value) of each line that is not blank."""
    for number, line in enumerate(stream, 1):
        if line.strip():
            where = f"{file}:{number}"
            try:
                value = json.loads(line)
            except RecursionError:
                raise DataError(f"{where}: {TOO_DEEP}") from None
            except json.JSONDecodeError as error:
                raise DataError(f"{where}: not JSON ({error.msg}, column {error.colno})") from error
            except ValueError as error:  # a number of more digits than Python converts
                raise DataError(f"{where}: not JSON ({_brief(error)})") from None
            if may_halve(line):
                check_whole(value, where)
            yield where, value


def may_halve(text: str) -> bool:
    """Whether JSON text may hold half of a surrogate pair."""
    return "\\ud" in text or "\\uD" in text


def check_whole(value: Any, where: str) -> None:
    """DataError where a text of the value holds half of a surrogate pair."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise DataError(f"{where}: holds half of a surrogate pair (\\ud...); mend the record") from None


class Pieces:
    """One JSON value of any size, read item by item."""

    def __init__(self, stream: TextIO, file: Path) -> None:
        self.stream, self.file = stream, file
        self.text, self.at = "", 0
        self.line, self.counted = 1, 0  # newlines are counted up to there, each once
        self.decoder = json.JSONDecoder()

    @property
    def where(self) -> str:
        """file:line of the place that is read next."""
        self.line += self.text.count("\n", self.counted, self.at)
        self.counted = max(self.counted, self.at)
        return f"{self.file}:{self.line}"

    def items(self, end: str) -> Iterator[str]:
        """file:line of each item, whose value is then read; up to the closing bracket, behind which nothing may be."""
        if self.next() != end:
            while True:
                self.next()
                yield self.where
                if self.next() != ",":
                    break
                self.take(",")
        self.take(end)
        if self.next():
            self.fail(f"not JSON (something follows the closing {end})")

    def next(self) -> str:
        """The next character that is not white space; empty at the end."""
        while True:
            while self.at < len(self.text) and self.text[self.at].isspace():
                self.at += 1
            if self.at < len(self.text) or not self.more():
                return self.text[self.at : self.at + 1]

    def take(self, character: str) -> None:
        if self.next() != character:
            self.fail(f"not JSON (expected {character!r})")
        self.at += 1

    def value(self) -> Any:
        """The value that begins here. DataError where it is none."""
        self.next()
        while True:
            try:
                value, end = self.decoder.raw_decode(self.text, self.at)
            except RecursionError:
                self.fail(TOO_DEEP)
            except json.JSONDecodeError as error:
                is_open = error.msg.startswith("Unterminated") or error.pos > len(self.text) - 16
                if is_open and self.more():
                    continue
                self.at = min(error.pos, len(self.text))
                self.fail(f"not JSON ({error.msg})")
            except ValueError as error:
                self.fail(f"not JSON ({_brief(error)})")
            if may_halve(self.text[self.at : end]):
                check_whole(value, self.where)
            self.at = end
            return value

    def more(self) -> bool:
        """Read on, twice as much as is waiting; what was used is dropped."""
        _ = self.where
        rest = self.text[self.at :]
        chunk = self.stream.read(max(CHUNK, len(rest)))
        self.text, self.counted, self.at = rest + chunk, self.counted - self.at, 0
        return bool(chunk)

    def fail(self, message: str) -> NoReturn:
        raise DataError(f"{self.where}: {message}")


def _list_items(stream: TextIO, file: Path) -> Iterator[tuple[str, Any]]:
    reader = Pieces(stream, file)
    reader.take("[")
    for number, where in enumerate(reader.items("]"), 1):
        yield f"{where} (item {number})", reader.value()


def _records(items: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for where, item in items:
        if not isinstance(item, dict):
            raise DataError(f"{where}: expected a JSON object, got {type(item).__name__}")
        yield where, item


def _is_question(line: str) -> bool:
    """A line that is a question's record, not an object of many."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return True  # the reader of lines tells what is wrong with it
    return any(isinstance(record.get(key), str) for key in QUESTION_KEYS)


def _opener(file: Path) -> Callable[..., Any]:
    head = _head(file)
    for magic, name in UNREADABLE.items():
        if head.startswith(magic):
            raise ConfigError(f"{file} is {name}, which is not read; turn it into JSON lines (gzip is fine)")
    return next((opener for magic, opener in PACKED.items() if head.startswith(magic)), open)


def _head(file: Path) -> bytes:
    try:
        with file.open("rb") as raw:
            return raw.read(8)
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error}") from error


def _not_utf8(file: Path, opener: Callable[..., Any]) -> tuple[int, int]:
    """Line and byte of the first thing that is no UTF-8: a decoder's own numbers count within what it was given."""
    decoder, line, byte = codecs.getincrementaldecoder("utf-8")(), 1, 0
    with opener(file, "rb") as raw:
        while True:
            chunk = raw.read(CHUNK)
            try:
                decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                good, waiting = error.object[: error.start], len(error.object) - len(chunk)
                return line + good.count(b"\n"), byte - waiting + error.start
            if not chunk:
                return line, byte
            line, byte = line + chunk.count(b"\n"), byte + len(chunk)


def _brief(error: ValueError) -> str:
    return str(error).split(";")[0]
