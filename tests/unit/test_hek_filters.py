"""Which lessons are turned down, and why. Broken on purpose, each of these failed: the gold filter off, aliases left
out, numbers compared as text, names of one word let through, the caps counted in spaces alone."""

import numpy as np
import pytest

from hiexp.experience import Experience, read_store, write_store
from hiexp.hek_filters import LANGUAGES, entity_names, guess_language, num_words, tells, turn_down


@pytest.mark.parametrize(
    ("title", "description", "reason"),
    [
        ("when a label is asked for", "search the label first", None),
        ("when oslo is near", "x", "gold_leak"),
        ("x", "the answer is The New-York!", "gold_leak"),  # articles, case and punctuation do not hide it
        ("osloite", "newyorker", None),  # words, not letters
        ("yes or no", "say yes", None),
        ("abc", "abc", None),  # three letters tell nothing
        ("the label of xa moon", "x", "entity_name"),
        ("about The Hobbit film", "x", "entity_name"),
        ("the question on the hobby", "Xa Moon may stand here", None),
        ("w " * 25, "x", "title_too_long"),
        ("w " * 24, "x " * 60, None),
        ("w", "x " * 61, "description_too_long"),
    ],
)
def test_filters(title, description, reason):
    question = "Who wrote the label song of Xa Moon, or The Hobbit?"
    golds = ["Oslo", "new york", "yes", "abc"]
    assert turn_down({"title": title.strip(), "description": description}, 2, [question], golds) == reason
    assert turn_down({"title": "w", "description": "x " * 80}, 1, [question], golds) is None


def test_entity_names_are_runs_of_capitals_after_the_first_word():
    assert entity_names("Which film by Alma Reed, Norn or (The Hobbit) is older?") == [
        "alma reed",
        "norn",
        "the hobbit",
    ]
    assert entity_names("who founded the first label of Xavi ?") == ["xavi"]
    assert entity_names("Norn") == entity_names("what is A ?") == []


@pytest.mark.parametrize(
    ("question", "names"),
    [
        ("Alma Reed wrote which film?", ["alma reed"]),  # a name may come first
        ("Which Alma Reed film is older?", ["alma reed"]),
        ("What did Alma Reed's brother write?", ["alma reed"]),
        ("Let $ABC$ be given. Find the area. Show that Oslo is far.", ["oslo"]),  # words that begin a sentence
        ("What is A. Reed known for?", ["a", "reed"][1:]),
        ("\u300a\u84dd\u5929\u300b\u7684\u5bfc\u6f14\u662f\u8c01\uff1f", ["\u84dd\u5929"]),
        ("Who sang \u201cblue sky\u201d?", ["blue sky"]),
    ],
)
def test_names_of_a_question(question, names):
    assert entity_names(question) == names


@pytest.mark.parametrize(
    ("gold", "text"),
    [
        ("Orl\u00e9ans", "then go to orleans"),
        ("\uff2f\uff33\uff2c\uff2f", "look for Oslo"),  # full-width letters
        ("July 4, 1776", "it was on 4 July 1776"),
        ("July 4, 1776", "the 4th of July 1776"),
        ("4 July 1776", "see 1776-07-04"),
        ("4 July 1776", "see 7/4/1776"),
        ("4 July 1776", "see 04.07.1776"),
        ("1776-07-04", "the year 1776"),
        ("1976\u5e745\u67083\u65e5", "on May 3, 1976"),
        ("1200", "about 1,200 of them"),
        ("1,200 km", "1200"),
        ("12", "take twelve of them"),
        ("$35", "it costs 35 dollars"),
        ("2.50", "about 2.5"),
        ("3/4", r"which gives \frac{3}{4}."),
        (r"\dfrac{3}{4}", r"which gives $\frac34$."),
        (r"x^2 + 1", r"get $x^2+1$ then"),
        (r"\sqrt{2}", r"it is $\sqrt{2}$"),
        ("\u5317\u4eac", "\u7b54\u6848\u662f\u5317\u4eac\u3002"),  # no spaces between words
    ],
)
def test_an_answer_is_found_in_every_spelling(gold, text):
    assert tells(gold, ("a key", text)) and tells(gold, (text, "a plan"))
    reply = {"title": "a key", "description": text}
    assert turn_down(reply, 1, [], ["something else", gold]) == "gold_leak"  # every alias


@pytest.mark.parametrize(
    ("gold", "text"),
    [
        ("yes", "say yes or no"),
        ("True", "true or false"),
        ("\u662f", "\u8fd9\u662f\u4e00\u4e2a\u8ba1\u5212"),
        ("7", "in 7 steps"),  # one digit, one letter: too common to tell
        ("x", "solve for x"),
        ("2.50", "about 250 of them"),
        ("250", "about 2.50"),
        ("12", "in 112 or 12.5 or 1,200"),
        ("1776", "in 17760"),
        ("4 July 1776", "on 4 July 1777"),
        ("3/4", r"\frac{13}{4} and 3/45"),
        ("Oslo", "oslovian"),
    ],
)
def test_what_is_not_the_answer_is_let_through(gold, text):
    assert not tells(gold, ("a title", text))


@pytest.mark.parametrize(
    ("title", "description", "reason"),
    [
        ("...", "x", "empty_title"),
        ("x", "-", "empty_description"),
        ("Title", "x", "boilerplate_title"),
        ("The lesson", "x", "boilerplate_title"),
        ("when the lesson applies, at most 24 words", "x", "boilerplate_title"),
        ("N/A", "x", "boilerplate_title"),
        ("when a title is asked for", "what to do and what to avoid, as instructions", "boilerplate_description"),
        ("x", "As an AI model I have no lesson", "boilerplate_description"),
        ("x", "I'm sorry, but no", "boilerplate_description"),
        ("x", "I\u2019m sorry, but no", "boilerplate_description"),
        ("none of the films fits", "look again", None),
        ("\u5bfc" * 48, "x", None),  # two letters of a script without spaces are a word
        ("\u5bfc" * 49, "x", "title_too_long"),
        ("x" * 300, "x", "title_too_long"),  # one word without end
        ("x", "\u5bfc" * 161, "description_too_long"),
    ],
)
def test_lessons_that_say_nothing_or_too_much(title, description, reason):
    assert turn_down({"title": title, "description": description}, 1, [], []) == reason


def test_words_are_counted_in_every_script():
    assert num_words("two words") == 2 and num_words("") == 0
    assert num_words("\u641c\u7d22 label \u57ce") == 3  # three letters are two words, and one more


SENTENCES = {
    "en": "Search for the label first, and then look for its city",
    "de": "Suche zuerst nach dem Verlag und dann nach der Stadt",
    "fr": "Cherche d'abord le label et ensuite la ville dans les pages",
    "es": "Busca primero el sello y luego la ciudad en que se fund\u00f3",
    "zh": "\u5148\u641c\u7d22\u5531\u7247\u516c\u53f8\uff0c\u7136\u540e\u641c\u7d22\u57ce\u5e02",
    "ja": "\u307e\u305a\u4f1a\u793e\u3092\u691c\u7d22\u3057\u3001\u6b21\u306b\u90fd\u5e02\u3092\u63a2\u3059",
    "ko": "\uba3c\uc800 \ud68c\uc0ac\ub97c \uac80\uc0c9\ud558\uc138\uc694",
    "ru": "\u043d\u0430\u0439\u0434\u0438\u0442\u0435 \u0433\u043e\u0440\u043e\u0434",
    "": "label founder city",
}


@pytest.mark.parametrize("code", SENTENCES)
def test_the_language_is_guessed_from_script_and_common_words(code):
    assert guess_language(SENTENCES[code]) == code
    assert guess_language(SENTENCES[code] + r" $x \in \mathbb{R}$ \frac{a}{b}") == code
    for name, other in LANGUAGES.items():
        reply = {"title": "x", "description": SENTENCES[code]}
        assert turn_down(reply, 1, [], [], name) == (None if code in (other, "") else "wrong_language")
    for language in (None, "Klingon"):  # none was asked for, or one that cannot be told
        assert turn_down({"title": "x", "description": SENTENCES[code]}, 1, [], [], language) is None


def test_a_few_foreign_words_are_no_other_language():
    reply = {"title": "x", "description": "die label und the city"}
    assert guess_language(reply["description"]) == "de" and turn_down(reply, 1, [], [], "English") is None


def test_a_store_keeps_the_language_and_reads_stores_without(tmp_path):
    encoder, rows = "e", np.eye(2, dtype=np.float32)
    entries = [Experience("E1-0", 1, "mixed", "a", "b", language="zh"), Experience("E1-1", 1, "mixed", "c", "d")]
    empty = {level: np.zeros((0, 2), np.float32) for level in (2, 3)}
    write_store(tmp_path / "hek", {1: entries, 2: [], 3: []}, {1: rows, **empty}, {"encoder": encoder}, False)
    assert read_store(tmp_path / "hek", encoder, 2)[0] == entries
    lines = (tmp_path / "hek/level1.jsonl").read_text(encoding="utf-8").splitlines()
    assert ["language" in line for line in lines] == [True, False]  # an earlier version reads what knows none
