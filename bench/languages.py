"""Experience across languages: what questions of one language find in a store of another, with and without centring.

    python bench/languages.py [--quick] [--json]

Stores of the lab world: a lesson for each kind of question and wording, its title the masked wording of one language.
Asked are the test questions of every language, a third of them in wordings that no lesson has. Of the first hit alone,
as a prompt with one hint has it, are counted, with 95% intervals over questions:
    nearest_right  the nearest lesson is of the question's kind
    right, wrong   it is shown, and is or is not
    stray          something is shown where the store has no lesson of the question's kind (these are taken away)
A cell is a HEK language and a question language.

Encoders:
    concept  what an encoder of many languages does, in miniature: unit(common + language + meaning + noise), where the
             meaning is the sum of vectors for the words of the plan that answers the question: kinds of question
             with similar plans are near. The squared lengths are WEIGHTS. Pooled over several draws of the vectors.
    tfidf    the lab's own, fitted on the training questions of all languages: languages share no words, so that
             nothing can transfer, whatever is subtracted. With the first sources and threshold only.

Stores (rows):
    en, es, zh  lessons of one language
    mixed       each kind of question has lessons in one language only, in turn: questions of the two others must
                cross over while lessons on other kinds of question are there in their own language

Settings: hek.centre; sources, the languages of the source questions: all, own (that of the lessons, so that nothing is
known of the others; `mixed` has all), or own+file (questions of the others come from hek.centre_questions); threshold,
one number for all questions: the one that lets 95% of the training questions in the lesson's language (own) or in all
languages (all) have their right lesson.
"""

import argparse
import json
import sys
import tempfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from hiexp.data import Sample, write_samples  # noqa: E402
from hiexp.encoder import Encoder, TfidfEncoder, unit_rows  # noqa: E402
from hiexp.hek import HEK, Experience, HEKConfig  # noqa: E402
from hiexp.lab_languages import spaced  # noqa: E402
from hiexp.lab_teacher import mask, plan_text  # noqa: E402
from hiexp.lab_world import FAMILIES, build_world, families, questions  # noqa: E402
from hiexp.metrics import bootstrap_interval  # noqa: E402

LANGUAGES = ("en", "es", "zh")
WEIGHTS = {"common": 0.5, "language": 0.2, "meaning": 0.25, "noise": 0.05}
KEPT = 0.95
"""share of the questions whose right lesson the threshold lets in"""
SETTINGS = (
    {"centre": "none", "sources": "all", "threshold": "own"},
    {"centre": "none", "sources": "all", "threshold": "all"},
    {"centre": "language", "sources": "all", "threshold": "own"},
    {"centre": "language", "sources": "all", "threshold": "all"},
    {"centre": "language", "sources": "own", "threshold": "own"},
    {"centre": "language", "sources": "own+file", "threshold": "own"},
)


class ConceptEncoder:
    """Same meaning near in all languages, plus an offset of the language; zero for what is no question of the lab."""

    def __init__(self, seed: int = 0, dim: int = 256, weights: dict[str, float] | None = None) -> None:
        self.dim, self.seed, self.fingerprint = dim, seed, f"concept:{seed}"
        self.weights = weights or WEIGHTS
        self._told = {
            spaced(mask(wording.format(a="Xa", b="Xb", y="1900"))): family
            for family in families(LANGUAGES)
            for wording in family.wordings
        }

        self._known: dict[str, np.ndarray] = {}

    def encode(self, texts: Sequence[str], kind: str) -> np.ndarray:
        self._known |= {text: self._vector(text) for text in texts if text not in self._known}
        return unit_rows(np.array([self._known[text] for text in texts], float).reshape(len(texts), self.dim))

    def _vector(self, text: str) -> np.ndarray:
        family = self._told.get(spaced(mask(text)))
        if family is None:
            return np.zeros(self.dim)
        meaning = sum(self._drawn(f"word {word}") for word in " ".join(family.plan).split())
        parts = {
            "common": self._drawn("common"),
            "language": self._drawn(f"language {family.language}"),
            "meaning": meaning / np.linalg.norm(meaning),
            "noise": self._drawn(f"text {text}"),
        }
        return sum(np.sqrt(self.weights[name]) * part for name, part in parts.items())

    def _drawn(self, name: str) -> np.ndarray:
        vector = np.random.default_rng([self.seed, zlib.crc32(name.encode())]).normal(size=self.dim)
        return vector / np.linalg.norm(vector)


@dataclass(frozen=True)
class Lab:
    """Questions of the lab world by split and language."""

    train: dict[str, list[Sample]]
    test: dict[str, list[Sample]]

    @classmethod
    def make(cls, train: int, test: int) -> "Lab":
        splits = questions(build_world(0), {"train": train, "test": test}, 0, LANGUAGES)
        asked = {
            name: {code: [s for s in samples if language(s) == code] for code in LANGUAGES}
            for name, samples in splits.items()
        }
        return cls(asked["train"], asked["test"])


def language(sample: Sample) -> str:
    return sample.id.partition(".")[2] or "en"


def lessons(lab: Lab, written: Sequence[str], asked: Sequence[str]) -> list[Experience]:
    """A pattern for each kind of question and wording (but those of the test) in `written`, a language or one a family.

    Source questions are the training questions of the family in the languages `asked`.
    """
    entries = []
    for number, family in enumerate(FAMILIES):
        code = written[number % len(written)]
        own = families((code,))[number]
        sources = tuple((s.id, s.question) for other in asked for s in lab.train[other] if s.family == family.name)
        for wording in own.wordings[:-1]:
            title, key = mask(spaced(wording).format(a="Xa", b="Xb", y="1900")), f"E2-{len(entries):06d}"
            plan = plan_text(family.plan, "")
            entries.append(Experience(key, 2, "pattern", title, plan, (family.name,), "", sources, language=code))
    return entries


class Scores(NamedTuple):
    """Of a question: its best lesson of the right kind and of another, by cosine; -2 where there is none."""

    right: float
    other: float


def scores(hek: HEK, samples: Sequence[Sample]) -> list[Scores]:
    found = hek.retrieve([s.question for s in samples], 2, len(hek), include_rejected=True)
    return [
        Scores(*(max([h.score for h in hits if (h.experience.tags[0] == s.family) is is_right], default=-2.0)
                 for is_right in (True, False)))
        for hits, s in zip(found, samples, strict=True)
    ]  # fmt: skip


def cell(draws: Sequence[Sequence[Scores]]) -> dict[str, Any]:
    """Shares with 95% intervals over questions, of scores less the threshold; of a question the mean over draws."""
    right, other = np.moveaxis(np.array(draws), -1, 0)
    facts = {
        "nearest_right": right > other,
        "right": (right > other) & (right >= 0),
        "wrong": (right <= other) & (other >= 0),
        "stray": other >= 0,
    }
    shares = {name: values.mean(axis=0).tolist() for name, values in facts.items()}
    return {
        name: {"share": float(np.mean(values)), "interval": bootstrap_interval(values, 0)}
        for name, values in shares.items()
    }


def matrix(lab: Lab, encoders: Sequence[Encoder], setting: dict[str, str]) -> dict[str, dict[str, Any]]:
    """HEK language -> question language -> cell."""
    table = {}
    for written in (*((code,) for code in LANGUAGES), LANGUAGES):
        name = written[0] if len(written) == 1 else "mixed"
        rows: dict[str, list[list[Scores]]] = {code: [] for code in LANGUAGES}
        leasts = []
        for encoder in encoders:
            hek = _store(lab, encoder, written, setting)
            own = [s for s in _everything(lab.train) if setting["threshold"] == "all" or _is_written(s, written)]
            leasts.append(float(np.quantile([s.right for s in scores(hek, own)], 1 - KEPT)))
            for code in LANGUAGES:
                # each encoder has its own threshold: what counts is the distance to it
                rows[code].append([Scores(*(x - leasts[-1] for x in s)) for s in scores(hek, lab.test[code])])
        table[name] = {code: cell(hits) for code, hits in rows.items()} | {"threshold": float(np.mean(leasts))}
    return table


def _store(lab: Lab, encoder: Encoder, written: Sequence[str], setting: dict[str, str]) -> HEK:
    asked = LANGUAGES if setting["sources"] == "all" else written
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "questions.jsonl"
        write_samples(file, _everything(lab.train))
        questions = str(file) if setting["sources"] == "own+file" and setting["centre"] == "language" else ""
        return HEK(
            lessons(lab, written, asked), encoder, HEKConfig(centre=setting["centre"], centre_questions=questions)
        )


def _everything(split: dict[str, list[Sample]]) -> list[Sample]:
    return [sample for samples in split.values() for sample in samples]


def _is_written(sample: Sample, written: Sequence[str]) -> bool:
    """Whether the lessons on this kind of question are in its language."""
    number = next(i for i, family in enumerate(FAMILIES) if family.name == sample.family)
    return written[number % len(written)] == language(sample)


def run(quick: bool) -> dict[str, Any]:
    lab = Lab.make(*((4, 6) if quick else (12, 12)))
    masked = [mask(s.question) for s in _everything(lab.train)]
    encoders = {
        "concept": [ConceptEncoder(seed) for seed in range(1 if quick else 5)],
        "tfidf": [TfidfEncoder.fit(masked)],
    }
    return {
        name: {
            ", ".join(f"{key}={value}" for key, value in setting.items()): matrix(lab, made, setting)
            for setting in SETTINGS
            if name == "concept" or (setting["sources"], setting["threshold"]) == ("all", "own")
        }
        for name, made in encoders.items()
    }


def show(result: dict[str, Any]) -> str:
    lines = ["right wrong (stray), each a share; rows: language of the HEK, columns: of the questions"]
    for name, tables in result.items():
        for setting, table in tables.items():
            lines.append(f"\n{name}, {setting}")
            lines.append("        " + "".join(f"{code:>19}" for code in LANGUAGES) + "   threshold")
            for written, row in table.items():
                shares = [[row[code][key]["share"] for key in ("right", "wrong", "stray")] for code in LANGUAGES]
                cells = "".join(f"    {right:.2f} {wrong:.2f} ({stray:.2f})" for right, wrong, stray in shares)
                lines.append(f"{written:<8}{cells}{row['threshold']:12.3f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer questions, one draw of the concept encoder")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    result = run(arguments.quick)
    print(json.dumps(result) if arguments.json else show(result))


if __name__ == "__main__":
    main()
