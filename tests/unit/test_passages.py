"""Cut texts make up the whole, ids lead back to the files, repetitions are left out and counted, on disk as in memory.

Must fail if a cut loses or moves a word, parts are far from the length asked for, an id of two passages is taken, or a
store that was cut off opens.
"""

import json
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hiexp.config import ConfigError
from hiexp.data import DataError
from hiexp.passages import (
    PassageStore,
    Tally,
    corpus_digest,
    cut,
    read_corpus,
    sentence_ends,
    stream_corpus,
    unique_passages,
    write_store,
)
from hiexp.trajectory import Document


def corpus(folder, name, *rows):
    path = folder / name
    path.write_text("".join(json.dumps(dict(zip(("id", "title", "text"), row, strict=True))) + "\n" for row in rows))
    return str(path)


word = st.sampled_from(["a", "Oslo", "capital", "1998", "\u4e2d\u6587", "x" * 30])
sentence = st.lists(word, min_size=1, max_size=30).map(lambda w: " ".join(w) + ".")


@settings(deadline=None, max_examples=150)
@given(st.lists(sentence, min_size=1, max_size=40), st.integers(25, 60))
def test_parts_make_up_the_text_and_are_about_as_long_as_asked_for(sentences, wanted):
    text = " ".join(sentences)
    parts = cut(text, wanted)
    assert " ".join(parts).split() == text.split()  # at white space only, as no word is that long
    length = max(len(text.split()), len(text) // 10)
    assert len(parts) == (1 if length <= 1.5 * wanted else -(-length // wanted))
    step = len(text) / len(parts)
    assert all(0.1 * step - 31 <= len(part) <= 1.9 * step + 31 for part in parts)


def test_texts_of_about_the_length_stay_whole_and_0_never_cuts():
    text = "word " * 149 + "end"
    assert cut(text, 100) == [text] and cut("word " * 1000, 0) == ["word " * 1000]
    assert [len(part.split()) for part in cut(text + " more", 100)] == [75, 76]


def test_cuts_are_at_sentence_ends_where_there_are_any():
    first, second = "Dr. J. Smith was in the U.S. Army, no. 5, i.e. twice. ", '"What?" he said at 3.5 p.m. to all. '
    text = (first + second) * 12
    parts = cut(text, 40)
    assert len(parts) > 3 and all(part.startswith(("Dr. J.", '"What?"')) for part in parts)
    one_sentence = "word " * 400
    assert {len(part.split()) for part in cut(one_sentence, 100)} == {100}
    assert "".join(cut("y" * 5000, 100)) == "y" * 5000 and len(cut("y" * 5000, 100)) == 5
    assert all(part.endswith("\u3002") for part in cut("\u4e2d\u56fd\u3002" * 1000, 100))


def test_sentence_ends():
    text = 'J. R. Smith sang. "Really?" No. 5 did (at 3.5 p.m.) too! Last'
    ends = sentence_ends(text)
    parts = [text[a:b].strip() for a, b in zip([0, *ends], ends, strict=False)]
    assert parts == ["J. R. Smith sang.", '"Really?"', "No. 5 did (at 3.5 p.m.) too!", "Last"]
    assert sentence_ends("") == [0] and sentence_ends("one") == [3]


HOSTILE = {
    "dots": ("." * 7, "."),
    "dots and a quote": (".' ", '?!."'),
    "quotes": (".", '"'),
    "spaces": (".", " "),
    "stops": ("x", ". A"),
    "abbreviations": ("", "Mr. X. "),
    "lines": ("", "a.\n"),
    "cjk": ("", "\u3002"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_no_text_takes_more_than_its_share_of_time(name):
    """Twenty thousand dots once took eight seconds: twenty times the text must take about twenty times as long."""
    head, unit = HOSTILE[name]

    def seconds(count):
        text, best = (head + unit * count)[:count], float("inf")
        for _ in range(3):
            began = time.process_time()
            sentence_ends(text)
            cut(text, 100)
            best = min(best, time.process_time() - began)
        return best

    small, large = seconds(1_000), seconds(20_000)
    assert large < max(100 * small, 0.5), (small, large)  # where time grows with the square it is 400 times as long


@settings(deadline=None, max_examples=300)
@given(st.text(st.sampled_from(list("aAM r.!?\"')\n\u3002")), max_size=60))
def test_sentence_ends_are_those_of_a_slow_search(text):
    slow = re.compile(r"(?:[.!?]+[\"')\]\u201d\u2019]*(?=\s+[^\sa-z])|[\u3002\uff01\uff1f]|\n)")
    short = re.compile(r"(?:\b(?:Mr)|\b[A-Z]|\b[A-Za-z]\.[A-Za-z])\.$")
    ends = [match.end() for match in slow.finditer(text) if not short.search(text[: match.end()])]
    assert sentence_ends(text) == [end for end in ends if end < len(text)] + [len(text)]


def test_ids_lead_back_and_everything_is_counted(tmp_path):
    long = " ".join(f"Sentence {i} has five words." for i in range(60))
    one = corpus(tmp_path, "1.jsonl", ("a", "T", "short"), ("b", "T", long), ("c", "U", "short"))
    two = corpus(tmp_path, "2.jsonl", ("d", "T", "short"), ("a", "T", "short"), ("e", "T", "other"))
    tally = Tally()
    pairs = read_corpus([one, two], 100, tally)
    assert [key for key, _ in pairs] == ["a", "b#0", "b#1", "b#2", "c", "e"]
    assert " ".join(document.text for key, document in pairs if key[0] == "b") == long
    assert tally.counts() == {"records": 6, "cut": 1, "passages": 6, "repeated": 2}
    assert tally.corpus == corpus_digest(document for _, document in pairs)
    left_out = {pair[0]: first for pair, first in stream_corpus([one, two], 100, Tally()) if first}
    assert left_out == {"d": "a", "a": "a"}
    assert unique_passages([("x", Document("T", "t")), ("y", Document("T", "t")), ("z", Document("U", "t"))]) == [
        ("x", Document("T", "t")),
        ("z", Document("U", "t")),
    ]


def test_an_id_of_two_passages_is_refused_with_both_places(tmp_path):
    one = corpus(tmp_path, "1.jsonl", ("a", "T", "x"))
    two = corpus(tmp_path, "2.jsonl", ("b", "T", "y"), ("a", "T", "z"))
    with pytest.raises(DataError, match=re.escape(f"{two}:2: passage id 'a' is also in {one}, with another text")):
        read_corpus([one, two])
    same = corpus(tmp_path, "3.jsonl", ("a", "T", "x"), ("a", "U", "x"))
    with pytest.raises(DataError, match=re.escape(f"{same}:2: passage id 'a' is also in {same}")):
        read_corpus([same])
    with pytest.raises(ConfigError, match="corpus is empty"):
        read_corpus([])


def test_a_store_gives_the_passages_back(tmp_path):
    rows = [("a", "T\u00e9", "x\ny \u2028 z"), ("b", "", "y"), ("c", "T\u00e9", "x\ny \u2028 z"), ("d", "U", "w")]
    path = corpus(tmp_path, "1.jsonl", *rows)
    seen = []
    tally = write_store(tmp_path, [path], 0, seen.append)
    store = PassageStore(tmp_path)
    assert list(store) == read_corpus([path]) == [store[row] for row in range(3)] and len(store) == sum(seen) == 3
    assert store.aliases() == {"c": "a"} and (tally.passages, tally.repeated) == (3, 1)
    for row in (-1, 3):
        with pytest.raises(IndexError):
            store[row]
    file = tmp_path / "passages.jsonl"
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(ConfigError, match="cut off or changed"):
        PassageStore(tmp_path)
    file.write_bytes(b"")
    with pytest.raises(ConfigError, match="no whole passages"):
        PassageStore(tmp_path)


def test_nothing_has_its_name_before_all_of_it_is_there(tmp_path):
    path = corpus(tmp_path, "1.jsonl", ("a", "T", "x"), ("b", "T", ""))
    folder = tmp_path / "store"
    folder.mkdir()
    with pytest.raises(DataError):
        write_store(folder, [path], 0, lambda count: None)
    assert not [name.name for name in folder.iterdir() if name.suffix != ".part"]
