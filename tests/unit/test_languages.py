"""Experience across languages: centring against plain numpy, short queries, prompts, filters and views.

Broken on purpose, each of these failed: a query centred with its titles' mean, a mean of all languages for each, means
of few texts, centred vectors on disk, calibration or not_when on plain vectors, short
questions left out of the means.
"""

import json
import sys
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import languages as bench  # noqa: E402

from hiexp.acceptance import Record  # noqa: E402
from hiexp.api_client import Reply  # noqa: E402
from hiexp.config import ConfigError  # noqa: E402
from hiexp.data import write_samples  # noqa: E402
from hiexp.encoder import TfidfEncoder  # noqa: E402
from hiexp.hek import HEK, Experience, HEKConfig  # noqa: E402
from hiexp.hek_filters import guess_language  # noqa: E402
from hiexp.hek_prompts import PROMPTS  # noqa: E402
from hiexp.hek_view import main as view  # noqa: E402
from hiexp.lab_teacher import mask  # noqa: E402
from hiexp.languages import LEAST, Centring  # noqa: E402
from hiexp.reflector import Reflector, Request  # noqa: E402
from hiexp.sampling import Sampling  # noqa: E402

LANGUAGES = ("en", "es", "zh")
CENTRED = HEKConfig(centre="language")


@pytest.fixture(scope="module")
def lab():
    return bench.Lab.make(2, 3)


class Table:
    """Text -> a given unit vector."""

    fingerprint = "concept:0"

    def __init__(self, table):
        self.table, self.dim = table, 256

    def encode(self, texts, kind):
        return np.array([self.table[text] for text in texts], np.float32).reshape(len(texts), self.dim)


def unit(rows):
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


def by_hand(encoder, entries, asked, queries):
    """Text -> centred vector: the additive model of languages.py for a store with questions in every language."""

    def vectors(texts):
        return np.array([encoder.encode([text], "query")[0] for text in texts], np.float64)

    mean = {code: vectors(texts).mean(axis=0) for code, texts in asked.items()}
    titles = {entry.title: entry.language for entry in entries}
    shift = np.mean([vectors([t])[0] - mean[code] for t, code in titles.items()], axis=0)
    table = {t: unit(vectors([t])[0] - mean[code] - shift) for t, code in titles.items()}
    return table | {q: unit(vectors([q])[0] - mean[code]) for q, code in queries.items()}


@pytest.mark.parametrize("written", [("en",), ("zh",), LANGUAGES], ids="-".join)
@pytest.mark.parametrize(
    "settings",
    [
        {"strategy_threshold": 0.75},
        {"strategy_threshold": 0.75, "margin": 0.01},
        {"accept": "zscore", "alpha": 0.1},
        {"accept": "zscore", "alpha": 0.1, "csls": True},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_a_centred_store_is_a_store_of_vectors_that_were_centred_by_hand(lab, written, settings):
    """So thresholds, margins, z, its calibration, hubness and not_when all see centred vectors."""
    encoder, entries = bench.ConceptEncoder(0), bench.lessons(lab, written, LANGUAGES)
    other = lab.train["es"][0].question
    entries[0] = replace(entries[0], not_when=(other,))
    asked = {code: sorted(s.question for s in lab.train[code]) for code in LANGUAGES}
    queries = {text: code for code, texts in asked.items() for text in texts}
    queries |= {s.question: code for code in LANGUAGES for s in lab.test[code]}
    hek = HEK(entries, encoder, HEKConfig(centre="language", **settings))
    plain = HEK(entries, Table(by_hand(encoder, entries, asked, queries)), HEKConfig(**settings))
    shown = 0
    for mine, theirs in zip(
        hek.retrieve(list(queries), 2, 5, include_rejected=True),
        plain.retrieve(list(queries), 2, 5, include_rejected=True),
        strict=True,
    ):
        for a, b in zip(mine, theirs, strict=True):
            assert a.experience == b.experience and a.accepted == b.accepted
            assert (a.score, a.value) == pytest.approx((b.score, b.value), abs=2e-4)
            shown += a.accepted
    assert 0 < shown < 5 * len(queries)


def test_without_centring_nothing_crosses_over_with_it_the_diagonal_is_reached(lab):
    encoder = bench.ConceptEncoder(0)
    setting = {"sources": "all", "threshold": "own"}
    off, on = (bench.matrix(lab, [encoder], setting | {"centre": centre}) for centre in ("none", "language"))
    for written, asked in product(LANGUAGES, LANGUAGES):
        before, after = off[written][asked], on[written][asked]
        assert (before["right"]["share"] > 0.8) == (written == asked) and before["nearest_right"]["share"] > 0.9
        assert after["right"]["share"] > on[written][written]["right"]["share"] - 0.15 > 0.65
        assert after["wrong"]["share"] == after["stray"]["share"] == 0
    for asked in LANGUAGES:  # a lesson on something else, but in the question's language, is nearer
        assert off["mixed"][asked]["nearest_right"]["share"] < 0.6
        assert on["mixed"][asked]["nearest_right"]["share"] > 0.95
    low = bench.matrix(lab, [encoder], {"centre": "none", "sources": "all", "threshold": "all"})
    assert low["en"]["zh"]["right"]["share"] > 0.6 and low["en"]["en"]["stray"]["share"] > 0.9


def test_an_encoder_whose_languages_share_no_words_transfers_nothing(lab):
    encoder = TfidfEncoder.fit([mask(s.question) for samples in lab.train.values() for s in samples])
    for centre in ("none", "language"):
        table = bench.matrix(lab, [encoder], {"centre": centre, "sources": "all", "threshold": "own"})
        for written, asked in product(LANGUAGES, LANGUAGES):
            assert (table[written][asked]["right"]["share"] > 0.4) == (written == asked)


def test_the_average_of_the_means_stands_for_a_language_of_which_nothing_is_known(lab):
    encoder = bench.ConceptEncoder(0)
    entries = bench.lessons(lab, ("en",), ("en", "es"))
    centring = HEK(entries, encoder, CENTRED).centring
    assert centring.known == ("en", "es")
    question = lab.test["zh"][0].question
    [row] = encoder.encode([question], "query")
    means = [np.mean(encoder.encode([s.question for s in lab.train[code]], "query"), axis=0) for code in ("en", "es")]
    expected = unit(row - np.mean(means, axis=0))
    np.testing.assert_allclose(centring.centre(row[None], [question])[0], expected, atol=1e-5)
    few = [replace(entries[0], id=f"E2-9{i}", title=f"\u8c01{i}", language="zh") for i in range(LEAST - 1)]
    vectors = {2: np.concatenate([encoder.encode([e.title for e in entries], "query"), np.eye(LEAST - 1, 256)])}
    both = Centring({2: [*entries, *few]}, vectors, lambda texts: encoder.encode(texts, "query"))
    assert both.known == ("en", "es")  # too few: they would be taken for what the language is


def test_languages_without_questions_have_the_mean_of_their_titles_and_the_other_way_round(lab):
    encoder = bench.ConceptEncoder(0)
    entries = [replace(entry, qa_groups=()) for entry in bench.lessons(lab, ("zh",), ())]
    hek = HEK(entries, encoder, CENTRED)
    mean = hek.vectors[2].mean(axis=0, dtype=np.float64)
    question = lab.test["zh"][0].question
    [row] = encoder.encode([question], "query")
    np.testing.assert_allclose(hek.embed([question])[0], unit(row - mean), atol=1e-5)
    np.testing.assert_allclose(hek.centring.keys[2], unit(hek.vectors[2] - mean), atol=1e-5)


def test_questions_of_a_file_make_further_languages_known(lab, tmp_path):
    encoder, entries = bench.ConceptEncoder(0), bench.lessons(lab, ("en",), ("en",))
    write_samples(tmp_path / "zh.jsonl", lab.train["zh"])
    known = HEK(entries, encoder, HEKConfig(centre="language", centre_questions=str(tmp_path / "zh.jsonl")))
    same = HEK(bench.lessons(lab, ("en",), ("en", "zh")), encoder, CENTRED)
    texts = [s.question for s in lab.test["zh"]]
    np.testing.assert_array_equal(known.embed(texts), same.embed(texts))
    for message, settings in (
        ("centre=language", {"centre_questions": "x"}),
        ("nowhere", {"centre": "language", "centre_questions": "nowhere.jsonl"}),
    ):
        with pytest.raises(ConfigError, match=message):
            HEK(entries, encoder, HEKConfig(**settings))


def test_a_store_of_few_texts_and_zero_vectors_stay_as_they_are(lab):
    encoder = bench.ConceptEncoder(0)
    [first, *_] = entries = bench.lessons(lab, ("en",), ())
    question = next(s.question for s in lab.test["en"] if s.family == first.tags[0])
    alone = HEK([first], encoder, CENTRED)
    assert alone.centring.known == () and alone.retrieve([question], 2, 1) == HEK([first], encoder).retrieve(
        [question], 2, 1
    )
    hek = HEK([*entries, replace(first, id="E2-x", title="nothing that it knows")], encoder, CENTRED)
    assert not hek.centring.keys[2][-1].any() and not hek.embed(["nothing that it knows"]).any()
    assert hek.retrieve(["nothing that it knows"], 2, 5, include_rejected=True) == [[]]
    assert HEK([], encoder, CENTRED).retrieve(["x"], 2, 1) == [[]]
    # all texts say the same: nothing is left of them but rounding
    row = encoder.encode([first.title], "query")
    alike = [replace(first, id=f"E2-{i}", title=f"title {i}") for i in range(LEAST)]
    same = Centring({2: alike}, {2: np.repeat(row, LEAST, axis=0)}, lambda texts: np.repeat(row, len(texts), axis=0))
    assert not same.keys[2].any()


def test_vectors_on_disk_are_the_encoders_own_and_none_changes_nothing(lab, tmp_path):
    encoder, entries = bench.ConceptEncoder(0), bench.lessons(lab, LANGUAGES, LANGUAGES)
    for name, cfg in (("on", CENTRED), ("off", None)):
        HEK(entries, encoder, cfg).save(tmp_path / name)
    files = {path.name for path in (tmp_path / "off").iterdir()}
    assert files == {path.name for path in (tmp_path / "on").iterdir()}
    assert all((tmp_path / "on" / f).read_bytes() == (tmp_path / "off" / f).read_bytes() for f in files)
    plain, again = HEK(entries, encoder), HEK.load(tmp_path / "on", encoder, CENTRED)
    np.testing.assert_array_equal(
        plain.embed(["x", entries[0].title]), encoder.encode(["x", entries[0].title], "query")
    )
    np.testing.assert_array_equal(again.centring.keys[2], HEK(entries[::-1], encoder, CENTRED).centring.keys[2])


def test_a_gate_knows_whether_it_was_fitted_to_centred_vectors(lab, tmp_path):
    encoder, entries = bench.ConceptEncoder(0), bench.lessons(lab, ("en",), LANGUAGES)
    found = [
        Record(s.question, entry.id, 1.0 if s.family == entry.tags[0] else -1.0)
        for s in lab.train["zh"][::3]
        for entry in entries[::3]
    ]
    HEK(entries, encoder, CENTRED).fit_gate(found).save(tmp_path / "gate.json")
    settings = {"accept": "gate", "gate": str(tmp_path / "gate.json")}
    hek = HEK(entries, encoder, HEKConfig(centre="language", **settings))
    hits = hek.retrieve([s.question for s in lab.test["es"]], 2, 1)
    right = [bool(row) and row[0].experience.tags[0] == s.family for row, s in zip(hits, lab.test["es"], strict=True)]
    assert np.mean(right) > 0.8
    with pytest.raises(ConfigError, match="fit it again"):
        HEK(entries, encoder, HEKConfig(**settings))


@pytest.mark.parametrize(
    ("query", "alone", "of_three", "of_two"),
    [
        ("Zorin director", "", "", "en"),
        ("Zorin \u7684\u5bfc\u6f14", "zh", "zh", "zh"),
        ("Christopher Nolan\u7684\u914d\u5076", "zh", "zh", "zh"),  # a name keeps its letters
        ("who directed \u9738\u738b\u522b\u59ec?", "", "en", "en"),
        ("director of Inception", "", "en", "en"),
        ("\u00bf qu\u00e9 persona ?", "es", "es", "es"),
        ("capital de Francia", "", "es", "en"),
        ("wer hat das Buch und den Film", "de", "de", "de"),  # sure, though not among them
        ("\u10d9\u10d8\u10d7\u10ee\u10d5\u10d0", "", "", ""),
    ],
)
def test_short_queries_are_told_by_the_languages_that_are_likely(query, alone, of_three, of_two):
    assert (guess_language(query), guess_language(query, LANGUAGES), guess_language(query, ("en", "zh"))) == (
        alone, of_three, of_two,
    )  # fmt: skip


# --- prompts, filters, views ---

CHINESE = {"title": "\u95ee\u54c1\u724c\u7684\u521b\u59cb\u4eba", "description": "\u5148\u67e5\u516c\u53f8\u3002"}
ENGLISH = {"title": "when the founder of a label is asked for", "description": "first look for the label"}


class Writer:
    """Chinese at the first attempt, English at the second."""

    name, together, max_new_tokens, attempts = "writer", True, 50, 0

    def fit(self, wordings):
        return wordings[0]

    def length(self, prompt):
        return len(prompt)

    def batches(self, prompts):
        yield list(prompts)

    def answer(self, prompts, sampling):
        reply = (CHINESE, ENGLISH)[self.attempts] | {"type": "mixed", "tags": ["x"], "thinking": "so"}
        self.attempts += 1
        yield {i: Reply(json.dumps(reply), 1, 1) for i in prompts}


@pytest.mark.parametrize("language", ["English", None])
def test_lessons_of_chinese_questions_are_asked_for_in_the_language_of_the_settings(language, lab):
    prompts = PROMPTS["full"].asking_for(language)
    question = lab.train["zh"][0]
    prompt = prompts.reflect(question.question, question.answers[0], ["right"], ["wrong"])
    wanted = "and description in English" if language else "and description in the language of the question"
    assert wanted in " ".join(prompt.split()) and question.question in prompt
    abstract = " ".join(prompts.abstract(2, [(CHINESE["title"], CHINESE["description"])] * 2).split())
    assert f"description in {language or 'the language of the notes'}" in abstract


def test_a_chinese_lesson_is_dropped_and_counted_where_english_was_asked_for():
    requests = [Request(("p",), 1, ("\u8c01\uff1f",), ("Zorin",))]
    encoder = TfidfEncoder.fit([CHINESE["title"], ENGLISH["title"]])
    for language, title, outcomes in (
        ("English", ENGLISH["title"], {"wrong_language": 1, "accepted": 1}),
        (None, CHINESE["title"], {"accepted": 1}),
    ):
        prompts, counts = PROMPTS["full"].asking_for(language), Counter()
        reflector = Reflector(Writer(), encoder, prompts, Sampling(0.7, 0.9, (), 3), 2)
        [reply] = reflector.ask(requests, prompts.reflect_fields, counts)
        assert reply["title"] == title and counts == outcomes


@pytest.fixture
def store(tmp_path):
    def entry(number, words, language=""):
        sources = ((f"q{number}", "Zorin\u7684\u5531\u7247\u516c\u53f8\u662f\u8c01\u521b\u7acb\u7684\uff1f"),)
        return Experience(f"E1-{number}", 1, "mixed", **words, qa_groups=sources, language=language)

    entries = [entry(0, CHINESE), entry(1, ENGLISH, "en"), entry(2, {"title": "x", "description": "y"})]
    encoder = TfidfEncoder.fit([e.text for e in entries])
    encoder.save(tmp_path / "encoder.json")
    HEK(entries, encoder).save(tmp_path / "hek")
    (tmp_path / "config.yaml").write_text(f"encoder: {{kind: tfidf, path: {tmp_path / 'encoder.json'}}}\n")
    return tmp_path / "hek"


def test_languages_of_entries_and_queries_are_shown(store, capsys, tmp_path):
    assert view(["show", str(store)]) == 0
    shown = capsys.readouterr().out
    assert CHINESE["title"] in shown and "languages: 1 zh, 1 en, 1 latin script" in shown
    assert view(["stats", str(store), "--json"]) == 0
    level = json.loads(capsys.readouterr().out)["levels"]["1"]
    assert level["languages"] == {"zh": 1, "en": 1, "latin script": 1}
    assert level["title_words"]["most"] == 9 and level["description_words"]["median"] == 3  # six letters, three words
    query = "\u54c1\u724c\u7684\u521b\u59cb\u4eba\u662f\u8c01"
    assert view(["search", str(store), query]) == 0
    heading, _, first, *_ = capsys.readouterr().out.splitlines()
    assert heading.endswith(f"{query} [zh]") and "E1-0" in first
    for words in (["show"], ["search", query], ["stats"]):
        assert view([words[0], str(store), *words[1:], "--html", str(tmp_path / "page.html")]) == 0
        page = (tmp_path / "page.html").read_text(encoding="utf-8")
        assert 'charset="utf-8"' in page.replace("=utf-8", '="utf-8"') and (
            words == ["stats"] or CHINESE["title"] in page
        )
