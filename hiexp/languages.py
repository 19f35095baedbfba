"""Which language a text is in, and vectors with the offset of their language taken out (hek.centre=language).

An encoder of many languages puts texts of one language near each other whatever they say, so that one threshold cannot
hold for queries of both the lesson's language and others. Taken from each vector before the cosine is the mean of its
language; what is left is made unit length again. The means also take with them what all texts of a store have in
common, so thresholds of centred cosines are others (lower) than those of plain ones.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from hiexp.acceptance import pick
from hiexp.data import read_samples
from hiexp.encoder import unit_rows
from hiexp.experience import Experience
from hiexp.hek_filters import guess_language

LEAST = 8
"""different texts that a mean needs; of fewer it would take out what they say"""
SAMPLE = 512
"""source questions of a language that are embedded for its mean, at most"""
SMALL = 1e-5
"""a shorter remainder is rounding"""
BLOCK = 8192
"""rows that are centred at a time; bounds memory"""

Encode = Callable[[Sequence[str]], np.ndarray]


class Centring:
    """The means of a store's languages, computed once.

    From a query is taken the mean of its language's questions, from a title the same and what titles differ from
    questions by, on average over all languages: few lessons of a language on few subjects would give a mean that
    holds these subjects. A language without questions is given its titles' mean, less that difference. A language
    without either (fewer than LEAST texts of each), and a text whose language cannot be told, gets the average of the
    means that there are, each language counting alike. A store in which no language has a mean is not centred. Short
    texts are taken for one of the languages that LEAST others are surely in (`guess_language`).
    """

    def __init__(
        self,
        levels: Mapping[int, Sequence[Experience]],
        vectors: Mapping[int, np.ndarray],
        encode: Encode,
        questions: str = "",
    ) -> None:
        """`vectors[level]`: [N, D] of the titles; `encode`: texts to such rows; `questions`: file of further ones."""
        everything = [entry for entries in levels.values() for entry in entries]
        asked = {text for entry in everything for _, text in entry.qa_groups}
        asked = sorted(asked | {sample.question for sample in read_samples(questions)} if questions else asked)
        of_entries, of_asked = [language_of(entry) for entry in everything], list(map(guess_language, asked))
        counts = [Counter(of_entries), Counter(of_asked)]
        likely = {code for count in counts for code in count if code and count[code] >= LEAST}
        of_entries = [code or guess_language(e.title, likely) for code, e in zip(of_entries, everything, strict=True)]
        of_asked = [code or guess_language(text, likely) for code, text in zip(of_asked, asked, strict=True)]
        codes, told = {}, iter(of_entries)
        for level, entries in levels.items():
            codes[level] = list(itertools.islice(told, len(entries)))
        self._set_means(_title_means(levels, vectors, codes), _question_means(asked, of_asked, encode))
        self.keys = {level: _centred(rows, codes[level], self.titles) for level, rows in vectors.items()}
        """level -> [N, D] unit or zero rows, titles without the mean of each entry's language"""

    def _set_means(self, found: Mapping[str, tuple[int, np.ndarray]], of_queries: dict[str, np.ndarray]) -> None:
        both = {code: (count, mean - of_queries[code]) for code, (count, mean) in found.items() if code in of_queries}
        total = sum(count for count, _ in both.values())
        shift = sum(count * apart for count, apart in both.values()) / total if total >= LEAST else 0.0
        of_titles = {code: mean for code, (count, mean) in found.items() if count >= LEAST}
        self.queries = {code: mean - shift for code, mean in of_titles.items()} | of_queries
        self.titles = of_titles | {code: mean + shift for code, mean in of_queries.items()}
        for means in (self.titles, self.queries):
            means[""] = np.mean([means[code] for code in sorted(means)], axis=0) if means else np.zeros(())

    @property
    def known(self) -> tuple[str, ...]:
        """Languages with a mean of their own."""
        return tuple(sorted(set(self.titles) - {""}))

    def language(self, query: str) -> str:
        """Of a query, however short; "" where it cannot be told."""
        return guess_language(query, self.known)

    def centre(self, rows: np.ndarray, texts: Sequence[str]) -> np.ndarray:
        """The same [Q, D] of the vectors of queries, whose language is guessed."""
        return _centred(rows, [self.language(text) for text in texts], self.queries)


def language_of(entry: Experience) -> str:
    """The tag of an entry, else a guess from the title, which is what is embedded; "" where nothing tells."""
    return entry.language or guess_language(entry.title) or guess_language(entry.text)


def _question_means(texts: Sequence[str], codes: Sequence[str], encode: Encode) -> dict[str, np.ndarray]:
    """By language, where there are LEAST of which the encoder knows something."""
    means = {}
    for code in sorted(set(codes) - {""}):
        mine = [text for text, other in zip(texts, codes, strict=True) if other == code]
        rows = encode([mine[i] for i in pick(len(mine), SAMPLE)])
        rows = rows[rows.any(axis=1)]
        if len(rows) >= LEAST:
            means[code] = rows.mean(axis=0, dtype=np.float64)
    return means


def _title_means(
    levels: Mapping[int, Sequence[Experience]], vectors: Mapping[int, np.ndarray], codes: Mapping[int, Sequence[str]]
) -> dict[str, tuple[int, np.ndarray]]:
    """By language the number of different titles that the encoder knows something of, and their mean."""
    places: dict[str, dict[str, tuple[int, int]]] = {}
    for level, entries in levels.items():
        told = np.any(vectors[level], axis=1).tolist()
        for i, entry in enumerate(entries):
            if told[i] and codes[level][i]:
                places.setdefault(codes[level][i], {})[entry.title] = (level, i)
    means = {}
    for code, found in places.items():
        total = np.zeros(())
        for level in levels:
            mine = np.array([i for at, i in found.values() if at == level], int)
            for at in range(0, len(mine), BLOCK):
                total = total + vectors[level][mine[at : at + BLOCK]].sum(axis=0, dtype=np.float64)
        means[code] = len(found), total / len(found)
    return means


def _centred(rows: np.ndarray, codes: Sequence[str], means: Mapping[str, np.ndarray]) -> np.ndarray:
    if not means[""].ndim:
        return rows
    centred = np.zeros_like(rows)
    for code in dict.fromkeys(codes):
        of_code = np.array([i for i, other in enumerate(codes) if other == code])
        for at in range(0, len(of_code), BLOCK):
            mine = of_code[at : at + BLOCK]
            mine = mine[rows[mine].any(axis=1)]  # what the encoder knows nothing of stays zero
            left = rows[mine] - means.get(code, means[""])
            left[np.linalg.norm(left, axis=1) < SMALL] = 0
            centred[mine] = unit_rows(left)
    return centred
