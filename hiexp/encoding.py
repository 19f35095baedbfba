"""Between text and ids: labelled text to segments, and a turn's ids up to the end of what was acted on."""

from collections.abc import Sequence
from typing import Any

from hiexp.engine import decode
from hiexp.observations import cut
from hiexp.tag_protocol import Pieces
from hiexp.trajectory import Segment, Source


class PieceEncoder:
    """Encodes the environment's text piece by piece; control tokens in documents and experience stay plain text."""

    def __init__(self, tokenizer: Any, max_document_tokens: int) -> None:
        self.tokenizer, self.max_document_tokens = tokenizer, max_document_tokens
        self._encoded: dict[tuple[bool, int, str], tuple[int, ...]] = {}

    def segments(self, pieces: Pieces) -> list[Segment]:
        """A segment for each piece that has tokens; a document beyond its budget is cut (observations.cut)."""
        segments = []
        for source, text in pieces:
            most = self.max_document_tokens if source is Source.DOCUMENT else 0
            ids = self._encode(text, source in (Source.DOCUMENT, Source.EXPERIENCE), most)
            if ids:
                segments.append(Segment(source, ids))
        return segments

    def count(self, text: str) -> int:
        """Tokens of a text from outside."""
        return len(self._encode(text, True))

    def _encode(self, text: str, from_outside: bool, most: int = 0) -> tuple[int, ...]:
        """Ids of a text, or of its beginning where it has more than `most` (0 = all)."""
        encode = lambda part: tuple(  # noqa: E731
            self.tokenizer(part, add_special_tokens=False, split_special_tokens=from_outside)["input_ids"]
        )
        key = (from_outside, most, text)
        if key not in self._encoded:
            ids = encode(text)
            if most and len(ids) > most:
                ids = encode(cut(text, most, lambda part: len(encode(part))))[:most]
            self._encoded[key] = ids
        return self._encoded[key]


def kept(tokenizer: Any, ids: Sequence[int], text: str, end: int) -> int:
    """How many ids hold the action: what begins after the token that completes it is dropped (never acted on)."""
    count = len(ids)
    if end < len(text):
        while count > 1 and decode(tokenizer, ids[: count - 1]).startswith(text[:end]):
            count -= 1
    return count
