"""What a long job has done already, kept so that a crash costs nothing: finished answers in a file of JSON lines.

    {"key": "9f0c...", "text": "...", "prompt_tokens": 412, ...}        one line per answer, on disk before it is used

The key is a digest of everything that the answer depends on, so the same question is answered from the file, and one
that changed (another prompt, seed or model) is asked anew. Nothing is ever rewritten; a half-written last line is cut.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hiexp.config import ConfigError
from hiexp.encoder import Encoder, Kind


def digest(*parts: Any) -> str:
    """Hex sha256 of JSON values; equal for equal values only."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class Journal:
    """Records by key: on disk with only their places in memory, or (without a path) in memory."""

    def __init__(self, path: str | Path | None = None, read_only: bool = False) -> None:
        self._path = None if path is None else Path(path)
        self._lines: dict[str, bytes | tuple[int, int]] = {}  # the line, or where it begins in the file and its length
        if self._path is not None and self._path.exists():
            end = self._read(self._path)
            if not read_only and end < self._path.stat().st_size:
                os.truncate(self._path, end)

    def get(self, key: str) -> dict[str, Any] | None:
        """The record, or None; one that a damaged disk block made unreadable counts as not there."""
        place = self._lines.get(key, b"")
        try:
            return json.loads(place if isinstance(place, bytes) else self._line(*place))
        except ValueError:
            return None

    def __contains__(self, key: str) -> bool:
        return key in self._lines

    def values(self) -> Iterator[dict[str, Any]]:
        """Every record, those of former settings included."""
        return (record for key in self._lines if (record := self.get(key)) is not None)

    def add(self, records: Mapping[str, Mapping[str, Any]]) -> None:
        """All of them are on disk on return; ConfigError, and the file as it was, where that fails."""
        lines = {key: (json.dumps({"key": key, **value}) + "\n").encode() for key, value in records.items()}
        if self._path is None:
            self._lines |= lines
            return
        end = _append(self._path, b"".join(lines.values()))
        for key, line in lines.items():
            self._lines[key] = (end, len(line))
            end += len(line)

    def remember(self, key: str, compute: Callable[[], Any]) -> Any:
        """The JSON value that was computed under this key before, or else now."""
        record = self.get(key)
        if record is None:
            record = {"value": json.loads(json.dumps(compute()))}  # as the file would give it back
            self.add({key: record})
        return record["value"]

    def _line(self, start: int, length: int) -> bytes:
        assert self._path is not None
        with self._path.open("rb") as file:
            file.seek(start)
            return file.read(length)

    def _read(self, path: Path) -> int:
        """Bytes of the whole lines."""
        end = 0
        with path.open("rb") as lines:
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                if found := _KEY.match(line):
                    self._lines[found[1].decode()] = (end, len(line))
                end += len(line)
        return end


class KeptEncoder:
    """An encoder whose results stay in a folder: the rows of one list of texts are computed once."""

    def __init__(self, encoder: Encoder, folder: str | Path) -> None:
        self.inner, self.fingerprint, self.dim = encoder, encoder.fingerprint, encoder.dim
        self._folder = Path(folder)

    def encode(self, texts: Sequence[str], kind: Kind) -> np.ndarray:
        """As the encoder itself; a list of texts is kept as a whole, as its rows may depend on how it is batched."""
        path = self._folder / f"{digest(self.fingerprint, kind, list(texts))}.npy"
        try:
            return np.load(path, allow_pickle=False)
        except (OSError, ValueError, EOFError):
            rows = self.inner.encode(texts, kind)
        self._folder.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(".new")
        with new.open("wb") as file:
            np.save(file, rows)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
        return rows


def _append(path: Path, data: bytes) -> int:
    """Write to the end of the file and wait for the disk; returns where the data begins."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab", buffering=0) as file:
            end = file.tell()
            try:
                rest = memoryview(data)
                while rest:
                    rest = rest[file.write(rest) :]
                os.fsync(file.fileno())
            except OSError:
                os.truncate(path, end)
                raise
        if end == 0:
            _sync_folder(path.parent)
        return end
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ConfigError(f"cannot write {path} ({reason}); free some space and run the same command again") from error


def _sync_folder(folder: Path) -> None:
    """So that the name of a new file survives a power cut too."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


_KEY = re.compile(rb'\{"key": "([0-9a-f]{64})"[,}]')
