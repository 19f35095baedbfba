"""The twelve benchmarks by name: which file is whose, what is checked of it, and the questions that are measured.

    python -m hiexp.benchmarks list
    python -m hiexp.benchmarks check hotpotqa hotpot_dev_distractor_v1.json
    python -m hiexp.benchmarks overlap train.jsonl dev.jsonl near=0.8
    python -m hiexp.benchmarks subset hotpotqa hotpot_dev_distractor_v1.json out=data/hotpotqa_1000.jsonl

`check` opens a file as an evaluation does and tells what it sees; further keys are subset=false (all questions),
on_bad_row=skip and aliases=FILE (2Wiki's id_aliases.json). `overlap` counts questions that two files share, word for
word, and, with near=SHARE, those whose sets of words overlap by at least that share. `subset` writes the questions of
the paper's draw, and their ids beside them.
"""

import hashlib
import json
import math
import random
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hiexp import data
from hiexp.config import ConfigError, lookup
from hiexp.data import Sample
from hiexp.metrics import normalise
from hiexp.sample_fields import source_of

SEED = 42
"""Of the paper's subset (its generator is not stated; here Python's random.Random)."""
QA = ("em", "f1", "cem")
SAMPLES = 32
"""Draws per question of Avg@32."""


@dataclass(frozen=True)
class Benchmark:
    """One row of `BENCHMARKS`: what was published, and how it is measured."""

    name: str
    title: str
    """its column in a table"""
    task: str
    """qa or math"""
    size: int
    """questions of the published set"""
    source: str
    """the original file, and which other layouts of it are known"""
    sets: tuple[str, ...]
    """its names in the `data_source` of a file of several sets, in lower case letters and digits"""
    subset: int = 0
    """questions that the paper draws from it; 0 = all"""
    metrics: tuple[str, ...] = QA
    """names in METRICS, the first one leads"""
    samples: int = 1
    """attempts per question"""
    domain: str = "in"
    """whether the training sets are of the same kind: in or out"""
    hops: int = 0
    """of every question, where the set is made that way and its files do not say so"""


@dataclass(frozen=True)
class Loaded:
    """A benchmark's questions as they are measured, and what is to be known of the file."""

    benchmark: Benchmark
    samples: list[Sample]
    """a subset in the order of its ids, a whole set in file order"""
    ids: tuple[str, ...]
    sha256: str
    """of the file"""
    notes: tuple[str, ...]
    """one line each; also given as warnings"""

    def write_ids(self, path: str | Path) -> None:
        """The ids in order, with what they were drawn from, as one JSON object."""
        about = {"benchmark": self.benchmark.name, "sha256": self.sha256, "seed": SEED, "questions": len(self.ids)}
        Path(path).write_text(json.dumps(about | {"ids": self.ids}, indent=1) + "\n", encoding="utf-8")


def _math(name: str, title: str, size: int, source: str, sets: tuple[str, ...], samples: int = 1) -> Benchmark:
    return Benchmark(name, title, "math", size, source, sets, metrics=("math",), samples=samples)


_ROWS = (
    Benchmark(
        "hotpotqa",
        "HotpotQA",
        "qa",
        7405,
        "hotpot_dev_distractor_v1.json or _fullwiki_ (CMU), the HF parquet, IRCoT, FlashRAG",
        ("hotpotqa", "hotpot"),
        subset=1000,
        hops=2,
    ),
    Benchmark(
        "2wiki",
        "2WikiMultiHopQA",
        "qa",
        12576,
        "dev.json of data_ids (Alab-NII); id_aliases.json adds aliases, FlashRAG",
        ("2wiki", "2wikimultihopqa", "2wikimqa"),
        subset=1000,
    ),
    Benchmark(
        "musique",
        "MuSiQue",
        "qa",
        2417,
        "musique_ans_v1.0_dev.jsonl or _full_ (StonyBrookNLP), FlashRAG",
        ("musique",),
        subset=1000,
        metrics=(*QA, "f1_musique"),
    ),
    Benchmark(
        "bamboogle",
        "Bamboogle",
        "qa",
        125,
        "the table of its authors with or without header, FlashRAG, verl",
        ("bamboogle",),
        domain="out",
        hops=2,
    ),
    Benchmark(
        "morehopqa",
        "MoreHopQA",
        "qa",
        1118,
        "with_human_verification.json (Alab-NII); morehopqa_150.json is their sample",
        ("morehopqa", "morehop"),
        domain="out",
    ),
    Benchmark("frames", "FRAMES", "qa", 824, "test.tsv (Google), SimpleDeepSearcher", ("frames",), domain="out"),
    _math("aime24", "AIME24", 30, "aime24 of Qwen2.5-Math, LUFFY", ("aime", "aime24", "aime2024"), SAMPLES),
    _math("aime25", "AIME25", 30, "aime25 of ARPO, LUFFY", ("aime25", "aime2025"), SAMPLES),
    _math("amc", "AMC", 83, "AMC 12 of 2022 and 2023 (rLLM, LUFFY); amc23 with 40 is another set", ("amc",), SAMPLES),
    _math("math500", "MATH-500", 500, "test.jsonl of MATH-500, simpleRL, LUFFY", ("math", "math500")),
    _math("minerva", "Minerva", 272, "minerva_math of Qwen2.5-Math, LUFFY", ("minerva", "minervamath")),
    _math("olympiadbench", "OlympiadBench", 675, "OE_TO_maths_en_COMP, Qwen2.5-Math, LUFFY", ("olympiadbench",)),
)
BENCHMARKS = {row.name: row for row in _ROWS}
"""Math counts as in domain, since the trained rows of its table learn from competition mathematics."""


def open_benchmark(
    name: str, path: str | Path, *, subset: bool = True, on_bad_row: str = "error", aliases: str | Path = ""
) -> Loaded:
    """The questions of a benchmark from any file of it (data.read_samples), checked and cut to the paper's subset.

    A file of several sets gives the rows whose `data_source` is one of `Benchmark.sets`. The count is compared with the
    published one; a set that repeats its problems under other ids is taken once; golds inside their question are
    counted. What is noticed is in `notes` and warned of. ConfigError for an unknown name and for what read_samples
    refuses.
    """
    benchmark = lookup(BENCHMARKS, name, "benchmark")
    notes: list[str] = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        samples = _rows_of(benchmark, path, on_bad_row, aliases, notes)
    notes += [str(warning.message) for warning in told]
    once, k = data.once_each(samples)
    if k > 1 and len(once) == benchmark.size:
        samples = once
        notes.append(f"{path}: each of {len(once)} problems stands {k} times under ids of its own; each is taken once")
    drawn = benchmark.subset and subset
    if len(samples) not in (benchmark.size, benchmark.subset or benchmark.size):
        notes.append(f"{path} has {len(samples)} questions, the published {benchmark.title} has {benchmark.size}")
    if drawn and len(samples) > benchmark.subset:
        if samples[0].id.startswith("row-"):
            notes.append(f"{path} has no ids; a subset by row numbers holds other questions than one by the set's ids")
        samples = draw(samples, benchmark.subset)
    elif drawn and len(samples) == benchmark.subset:
        notes.append(f"{path} has {len(samples)} questions of {benchmark.size}: it is a subset already, taken whole")
    if leaked := data.golds_in_questions(samples):
        why = "choices between two do" if benchmark.task == "qa" else "a short number may by chance"
        notes.append(f"{path}: {len(leaked)} of {len(samples)} questions hold their answer ({why}), first {leaked[0]}")
    notes = list(dict.fromkeys(notes))
    for note in notes:
        warnings.warn(note, stacklevel=2)
    if benchmark.hops:
        samples = [sample if sample.hops else replace(sample, hops=benchmark.hops) for sample in samples]
    return Loaded(benchmark, samples, tuple(s.id for s in samples), _sha256(path), tuple(notes))


def draw(samples: Sequence[Sample], n: int, seed: int = SEED) -> list[Sample]:
    """`n` samples of `random.Random(seed)` over the rows sorted by id, in order of id: the file's order is nothing."""
    ordered = sorted(samples, key=lambda sample: sample.id)
    return sorted(random.Random(seed).sample(ordered, n), key=lambda sample: sample.id)


def near_duplicates(
    samples: Sequence[Sample], others: Sequence[Sample], share: float = 0.8
) -> list[tuple[str, str, float]]:
    """(id, id of the other, overlap) of questions whose sets of words overlap by `share` or more, equal ones included.

    Overlap is common words over all words of the two (Jaccard). Exact, and fast since two sets that overlap so far
    share one of the rarest words of each.
    """
    if not 0 < share <= 1:
        raise ConfigError(f"near={share} must lie in (0, 1]")
    counts = Counter(word for sample in (*samples, *others) for word in _word_set(sample))
    known: dict[str, list[int]] = defaultdict(list)
    sets = [_word_set(other) for other in others]
    for i, words in enumerate(sets):
        for word in _rarest(words, counts, share):
            known[word].append(i)
    found = []
    for sample in samples:
        words = _word_set(sample)
        for i in sorted({i for word in _rarest(words, counts, share) for i in known.get(word, ())}):
            overlap = len(words & sets[i]) / len(words | sets[i])
            if overlap >= share:
                found.append((sample.id, others[i].id, overlap))
    return found


def overlap(path: str | Path, other: str | Path, near: float = 0.0) -> list[str]:
    """Lines that tell what two files share."""
    left, right = data.read_samples(path), data.read_samples(other)
    shared = data.shared_questions(left, right)
    lines = [f"{path}: {len(left)} questions; {other}: {len(right)}", _told(f"{len(shared)} are in both", shared)]
    if near:
        pairs = [(a, b) for a, b, _ in near_duplicates(left, right, near) if a not in set(shared)]
        ids = [f"{a} ~ {b}" for a, b in pairs]
        lines.append(_told(f"{len({a for a, _ in pairs})} more overlap by {near:g} of their words or more", ids))
    return lines


def describe(loaded: Loaded) -> list[str]:
    """What `check` prints of an opened file."""
    samples, benchmark = loaded.samples, loaded.benchmark
    golds = [gold for sample in samples for gold in sample.answers]
    empty = [s.id for s in samples if benchmark.task == "qa" and any(not normalise(gold) for gold in s.answers)]
    short = sum(len(gold) <= 2 for gold in golds)
    same = len(samples) - len({normalise(sample.question) for sample in samples})
    hops = Counter(sample.hops for sample in samples)
    draws = f", {benchmark.samples} attempts each" if benchmark.samples > 1 else ""
    return [
        f"{benchmark.title}: {len(samples)} questions{draws}; metrics {', '.join(benchmark.metrics)}",
        f"file sha256 {loaded.sha256[:16]}, ids {loaded.ids[0]} ... {loaded.ids[-1]}",
        f"{len(golds)} golds, {short} of at most two characters; {same} questions repeat another's words",
        _told(f"{len(empty)} questions with a gold that normalises to nothing", empty),
        "hops: " + ", ".join(f"{n or 'not stated'}: {count}" for n, count in sorted(hops.items())),
        f"supporting facts stated for {sum(bool(sample.facts) for sample in samples)} questions",
    ]


def _rows_of(
    benchmark: Benchmark, path: str | Path, on_bad_row: str, aliases: str | Path, notes: list[str]
) -> list[Sample]:
    """All rows of a file, or those of one set where it holds several."""
    seen: Counter[str] = Counter()

    def is_ours(record: Mapping[str, Any]) -> bool:
        source = "".join(filter(str.isalnum, source_of(record).casefold()))
        seen[source] += 1
        return not source or source in benchmark.sets

    try:
        samples = data.read_samples(path, on_bad_row=on_bad_row, aliases=aliases, keep=is_ours)
    except data.DataError:
        if set(seen) & {"", *benchmark.sets} or not seen:
            raise
        samples = []
    if len(seen) > 1:
        others = ", ".join(f"{name or 'none'} {n}" for name, n in seen.items() if name not in benchmark.sets)
        if not samples:
            raise ConfigError(f"{path} holds no rows of {benchmark.name}; its data_source says {others}")
        notes.append(f"{path} holds several sets; those of {benchmark.name} are taken, not {others}")
    elif not samples:
        notes.append(f"{path} calls its rows {next(iter(seen))}, which is no known name of {benchmark.name}")
        samples = data.read_samples(path, on_bad_row=on_bad_row, aliases=aliases)
    return samples


def _sha256(path: str | Path) -> str:
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _word_set(sample: Sample) -> frozenset[str]:
    return frozenset(normalise(sample.question).split()) or frozenset([sample.question])


def _rarest(words: frozenset[str], counts: Counter[str], share: float) -> list[str]:
    """As many of the rarest words as a set with that overlap cannot all lack."""
    keep = len(words) - math.ceil(share * len(words) - 1e-9) + 1
    return sorted(words, key=lambda word: (counts[word], word))[:keep]


def _told(what: str, ids: Sequence[str]) -> str:
    return what + (f", first {', '.join(ids[:3])}" if ids else "")


def _list(words: Sequence[str]) -> None:
    _options(words, 0, "", {})
    for row in BENCHMARKS.values():
        drawn = f"{row.subset} of {row.size}" if row.subset else str(row.size)
        print(f"{row.name:<14}{row.task:<5}{drawn:<15}{row.domain + ' domain':<12}{row.source}")


def _check(words: Sequence[str]) -> None:
    files, given = _options(words, 2, "NAME and FILE", {"subset": "true", "on_bad_row": "error", "aliases": ""})
    if given["subset"] not in ("true", "false"):
        raise ConfigError(f"subset={given['subset']} must be true or false")
    wanted = given["subset"] == "true"
    loaded = open_benchmark(*files, subset=wanted, on_bad_row=given["on_bad_row"], aliases=given["aliases"])
    print("\n".join(describe(loaded)))


def _overlap(words: Sequence[str]) -> None:
    files, given = _options(words, 2, "FILE and FILE", {"near": "0"})
    try:
        near = float(given["near"])
    except ValueError:
        raise ConfigError(f"near={given['near']} must be a number in (0, 1]") from None
    print("\n".join(overlap(*files, near=near)))


def _subset(words: Sequence[str]) -> None:
    files, given = _options(words, 2, "NAME and FILE", {"out": "", "on_bad_row": "error", "aliases": ""})
    if not given["out"]:
        raise ConfigError("subset needs out=FILE.jsonl, the file that the questions are written to")
    loaded = open_benchmark(*files, on_bad_row=given["on_bad_row"], aliases=given["aliases"])
    ids = Path(given["out"]).with_suffix(".ids.json")
    data.write_samples(given["out"], loaded.samples)
    loaded.write_ids(ids)
    print(f"{given['out']}: {len(loaded.samples)} questions of {loaded.benchmark.title}; their ids: {ids}")


COMMANDS = {"list": _list, "check": _check, "overlap": _overlap, "subset": _subset}


def _options(words: Sequence[str], n: int, needs: str, known: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """The first `n` words, and the key=value words after them over the defaults `known`."""
    first, rest, found = list(words[:n]), words[n:], dict(known)
    if len(first) < n:
        raise ConfigError(f"{needs} are needed; known benchmarks: {', '.join(BENCHMARKS)}")
    for word in rest:
        key, equals, value = word.partition("=")
        if not equals or key not in known:
            raise ConfigError(f"unexpected {word!r}; expected {', '.join(f'{key}=...' for key in known) or 'no more'}")
        found[key] = value
    return first, found


def main(argv: Sequence[str]) -> int:
    if not argv or "-h" in argv or "--help" in argv:
        print(__doc__)
        return 0
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    try:
        lookup(COMMANDS, argv[0], "command")(argv[1:])
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
