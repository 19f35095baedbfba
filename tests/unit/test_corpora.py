"""Every layout gives the ids, titles and texts that its file has; what cannot be used names file and line.

Must fail if a title stays in the text, an id is invented where there is one, sentences run together, a broken line is
skipped, or a list of any size is read whole.
"""

import bz2
import csv
import gzip
import json
import lzma
import random
import re
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hiexp import raw_text
from hiexp.config import ConfigError
from hiexp.corpora import contents, parse_contents, read_file
from hiexp.data import DataError
from hiexp.trajectory import Document

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="no ../shared/data beside the repository")


def write(folder, text, name="corpus.txt"):
    path = folder / name  # the name tells nothing
    path.write_text(text, encoding="utf-8")
    return path


def lines(*records):
    return "\n".join(json.dumps(record) for record in records) + "\n"


def read(path):
    return [(p.id, p.title, p.text) for p in read_file(path)]


HOTPOT = {
    "_id": "q1",
    "question": "Who?",
    "supporting_facts": [["B", 0]],
    "context": [["A", ["One.", " Two."]], ["B", ["Three (", "3)."]], ["C", [" "]]],
}
COLUMNS = {
    "id": "q2",
    "question": "Who?",
    "supporting_facts": {"title": ["B"], "sent_id": [0]},
    "context": {"title": ["A", "B"], "sentences": [["One.", " Two."], ["Three."]]},
}
MUSIQUE = {
    "id": "q3",
    "question": "Who?",
    "paragraphs": [
        {"idx": 0, "title": "A", "paragraph_text": "One.", "is_supporting": True},
        {"idx": 1, "title": "A", "paragraph_text": "Two.", "is_supporting": False},
    ],
}
MORE = {
    "_id": "q4",
    "question": "Who?",
    "question_decomposition": [
        {"sub_id": "1", "paragraph_support_title": "A", "details": [{"paragraph_support_title": "B"}]},
        {"sub_id": "2", "paragraph_support_title": ""},
    ],
    "context": [["A", ["One."]], ["B", ["Two."]], ["C", ["Three."]]],
}
KILT = {
    "_id": "7",
    "wikipedia_id": "7",
    "wikipedia_title": "Oslo",
    "text": ["Oslo\n", "Oslo is a city.\n", "Section::::History.\n", "BULLET::::- Founded in 1040.\n"],
}
LAYOUTS = {
    "ours": (
        lines({"id": "a", "title": " T ", "text": "x "}, {"id": 2, "text": "z"}),
        [("a", "T", "x"), ("2", "", "z")],
    ),
    "beir": (lines({"_id": "a", "title": "T", "text": "x", "metadata": {}}), [("a", "T", "x")]),
    "search_r1": (
        lines({"id": "0", "contents": '"The "Human" Factor"\nx\ny'}, {"id": "1", "contents": "no title"}),
        [("0", 'The "Human" Factor', "x\ny"), ("1", "", "no title")],
    ),
    "list": (json.dumps([{"title": "T", "text": "x"}, {"title": "U", "text": ["y.", "z."]}], indent=2),
             [("corpus:0", "T", "x"), ("corpus:1", "U", "y. z.")]),
    "dict": (json.dumps({"T": ["x.", " y."], "U": "z"}), [("T", "T", "x. y."), ("U", "U", "z")]),
    "dict over lines": (json.dumps({"T": ["x."], "U": "y"}, indent=1), [("T", "T", "x."), ("U", "U", "y")]),
    "dpr": ('id\ttext\ttitle\n1\t"a ""b"" c"\t"Q"\n2\tan "x"\tU\n', [("1", "Q", 'a "b" c'), ("2", "U", 'an "x"')]),
    "dpr without a heading": ("1\ttext one\tT\n2\ttext two\tU\n", [("1", "T", "text one"), ("2", "U", "text two")]),
    "two columns": ("1\ttext one\n2\ttext two\n", [("1", "", "text one"), ("2", "", "text two")]),
    "abstracts": (
        '\ufeff0\t"Title: A: B Text:  one ""two"""\n1\tTitle: C Text: three\n',
        [("0", "A: B", 'one "two"'), ("1", "C", "three")],
    ),
    "full pages": ('0\tA   one\n1\tB C   "two   three\n', [("0", "A", "one"), ("1", "B C", '"two   three')]),
    "kilt": (
        lines(KILT, KILT | {"wikipedia_id": "8", "text": ["Oslo"]}, KILT | {"wikipedia_title": None, "text": ["x"]}),
        [("7", "Oslo", "Oslo is a city.\nFounded in 1040."), ("7", "", "x")],
    ),
    "a title beside contents": (
        lines({"id": "1", "title": "T", "contents": "body"}, {"id": "2", "title": "T", "contents": '"T"\nbody'},
              {"id": "3", "title": "T", "contents": "one\ntwo"}, {"id": "4", "title": None, "contents": "U\nbody"}),
        [("1", "T", "body"), ("2", "T", "body"), ("3", "T", "one\ntwo"), ("4", "U", "body")],
    ),
    "another heading": ("pid\tpassage\ttitle\n1\ttext one\tT\n", [("1", "T", "text one")]),
    "a heading in another order": ("title\tdocid\tcontents\nT\t1\ttext one\n", [("1", "T", "text one")]),
    "sentences before three spaces": (
        "1\tOne is here.   Two.\n2\tThree is.   Four.\n",
        [("1", "", "One is here.   Two."), ("2", "", "Three is.   Four.")],
    ),
    "hotpotqa": (lines(HOTPOT), [("q1:0", "A", "One. Two."), ("q1:1", "B", "Three (3).")]),
    "hotpotqa in columns": (json.dumps([COLUMNS]), [("q2:0", "A", "One. Two."), ("q2:1", "B", "Three.")]),
    "musique": (lines(MUSIQUE), [("q3:0", "A", "One."), ("q3:1", "A", "Two.")]),
    "morehopqa": (json.dumps([MORE]), [("q4:0", "A", "One."), ("q4:1", "B", "Two."), ("q4:2", "C", "Three.")]),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_layout_is_told_by_its_content(tmp_path, name):
    text, expected = LAYOUTS[name]
    assert read(write(tmp_path, text)) == expected


@pytest.mark.parametrize("pack", [gzip.open, bz2.open, lzma.open])
@pytest.mark.parametrize("name", ["ours", "dict", "abstracts", "list"])
def test_packed_files_are_read_as_they_are(tmp_path, pack, name):
    text, expected = LAYOUTS[name]
    path = tmp_path / "corpus.whatever"
    with pack(path, "wt", encoding="utf-8", newline="\n") as file:
        file.write(text)
    assert read(path) == expected
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match="damaged or cut off"):
        read(path)


def test_what_supports_an_answer_is_marked(tmp_path):
    for record, supporting in ((HOTPOT, ["q1:1"]), (COLUMNS, ["q2:1"]), (MUSIQUE, ["q3:0"]), (MORE, ["q4:0", "q4:1"])):
        found = [p for p in read_file(write(tmp_path, lines(record))) if p.supporting]
        assert [p.id for p in found] == supporting
        assert {p.question for p in found} == {supporting[0].split(":")[0]}


BROKEN = {
    "not JSON": (lines({"id": "1", "text": "x"}) + '{"id": "2", "te', ":2: not JSON"),
    "no text": (lines({"id": "1", "text": "x"}, {"id": "2", "title": "T"}), ":2: passage '2' has neither"),
    "blank text": (lines({"id": "1", "text": " "}), ":1: passage '1' needs a text"),
    "a number as text": (lines({"id": "1", "text": 3}), ":1: passage '1' needs a text"),
    "empty id": (lines({"id": "1", "text": "x"}, {"id": "", "text": "y"}), ":2: the id is empty"),
    "null id": (lines({"id": None, "text": "x"}), ":1: the id is empty"),
    "a bare value": ('{"id": "1", "text": "x"}\n7\n', ":2: expected a JSON object, got int"),
    "columns": ("1\ta\tT\n2\tb\n", ":2: 2 columns, the first line has 3"),
    "abstract": ("".join(f"{i}\tTitle: T Text: x\n" for i in range(12)) + "12\tnone\n", ":13: expected Title"),
    "broken list": ('[{"id": "1", "text": "x"},\n {"id": "2" "text": "y"}]', ":2: not JSON (Expecting ',' delimiter)"),
    "list cut off": ('[\n{"id": "1", "text": "x"},\n', ":3: not JSON"),
    "more behind a list": ('[{"id": "1", "text": "x"}]\n[]', ":2: not JSON (something follows"),
    "dict of numbers": ('{"T": ["x"],\n "U": 3}', ":2: expected a title with its text"),
    "half of a pair": (lines({"id": "1", "text": "x"}) + '{"id": "2", "text": "\\ud800"}', ":2: holds half of a surr"),
    "half of a pair in an id": ('{"id": "\\uDC00", "text": "x"}', ":1: holds half of a surrogate pair"),
    "half of a pair in a list": ('[{"id": "1", "text": "x"},\n{"text": "\\ud800"}]', ":2: holds half of a surrogate"),
    "half of a pair in a dict": ('{"T": "x",\n"U": "\\ud800"}', ":2: holds half of a surrogate"),
    "deep": (lines({"id": "1", "text": "x"}) + '{"id": ' + "[" * 100000, ":2: brackets nested too deeply"),
    "deep in a list": ('[{"id": "1", "text": "x"},\n' + "[" * 100000, ":2: brackets nested too deeply"),
    "digits": (lines({"id": "1", "text": "x"}) + '{"id": ' + "9" * 5000 + "}", ":2: not JSON (Exceeds the limit"),
    "digits in a list": ('[{"id": "1", "text": "x"},\n{"n": ' + "9" * 5000 + "}]", ":2: not JSON (Exceeds the limit"),
    "columns of unequal length": (
        lines(COLUMNS | {"context": {"title": ["A"], "sentences": [["x"], ["y"]]}}),
        ":1: question 'q2': the columns",
    ),
    "columns that are none": (
        lines(COLUMNS | {"context": {"title": 3, "sentences": None}}),
        ":1: question 'q2': the col",
    ),
    "a title that is a list": (
        lines(COLUMNS | {"context": {"title": [["A"]], "sentences": [["x"]]}}),
        ":1: question 'q2': paragraph 0 needs",
    ),
    "an empty paragraph": (
        lines(HOTPOT | {"context": [["A", ["x"]], []]}),
        ":1: question 'q1': paragraph 1 is laid out",
    ),
    "a null sentence": (lines(HOTPOT | {"context": [["A", ["x", None]]]}), ":1: question 'q1': paragraph 0 needs"),
    "a null paragraph": (lines(MUSIQUE | {"paragraphs": [None]}), ":1: question 'q3': paragraph 0 is laid out"),
    "facts of numbers": (lines(HOTPOT | {"supporting_facts": [1]}), ":1: question 'q1': supporting_facts must be"),
    "empty facts": (lines(HOTPOT | {"supporting_facts": [[]]}), ":1: question 'q1': supporting_facts must be"),
    "facts without titles": (
        lines(COLUMNS | {"supporting_facts": {"sent_id": [0]}}),
        ":1: question 'q2': supporting_f",
    ),
    "a step that is a text": (lines(MORE | {"question_decomposition": ["x"]}), ":1: question 'q4': question_decomp"),
    "steps that are a text": (lines(MORE | {"question_decomposition": "x"}), ":1: question 'q4': question_decomp"),
    "details that are a text": (
        lines(MORE | {"question_decomposition": [{"details": ["x"]}]}),
        ":1: question 'q4': question_decomp",
    ),
    "prose": ("once upon a time\n", ":1: neither JSON nor a table"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_record_names_file_and_line(tmp_path, name):
    text, message = BROKEN[name]
    path = write(tmp_path, text)
    with pytest.raises(DataError) as error:
        read(path)
    assert f"{path}{message}" in str(error.value) and "\n" not in str(error.value)


def test_what_is_no_corpus_at_all_is_told(tmp_path):
    for content, message in (
        (b"", "is empty"),
        (b"[]", "holds no passage"),
        (lines({"id": "1", "question": "Who?"}).encode(), "holds no passage"),
        (b"PAR1....", "is parquet"),
        (b"\x28\xb5\x2f\xfd....", "is zstd"),
        (b'{"id": "1", "text": "\xff"}', ":1: not UTF-8"),
    ):
        path = tmp_path / "corpus"
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            read(path)
    with pytest.raises(ConfigError, match=r"did you mean .*corpus"):
        read(tmp_path / "korpus")


def test_a_list_is_streamed_whatever_its_size(tmp_path, monkeypatch):
    monkeypatch.setattr(raw_text, "CHUNK", 64)  # every item is longer than what is read at once
    records = [{"id": str(i), "title": "\u00e9\u4e2d", "text": f'"{i}" \\' + "x" * (37 * i)} for i in range(40)]
    for text in (json.dumps(records), json.dumps(records, indent=3), json.dumps(records, ensure_ascii=False)):
        assert read(write(tmp_path, text)) == [(r["id"], r["title"], r["text"]) for r in records]


@pytest.mark.parametrize("pack", [open, gzip.open, bz2.open])
def test_what_is_no_utf8_is_told_with_its_line_in_a_file_of_megabytes(tmp_path, pack):
    good = lines({"id": "1", "text": "\u00e9" * 500}).encode() * 1500
    with pack(tmp_path / "c", "wb") as file:
        file.write(good + b'{"id": "2", "text": "\xc3\x28"}\n')
    with pytest.raises(DataError, match=re.escape(f"{tmp_path / 'c'}:1501: not UTF-8 text (")) as error:
        read(tmp_path / "c")
    assert f"byte {len(good) + 21} of the text" in str(error.value)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("pack", [gzip.open, bz2.open, lzma.open])
def test_damage_inside_a_packed_file_is_the_files_fault(tmp_path, pack, seed):
    """What damaged data unpack to is often no UTF-8, and what follows it cannot be unpacked at all."""
    path, draw = tmp_path / "c", random.Random(seed)
    with pack(path, "wb") as file:
        file.write(lines(*({"id": str(i), "text": draw.randbytes(40).hex()} for i in range(10000))).encode())
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 2000] = bytes(2000)
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"is damaged or cut off|not JSON|not UTF-8"):
        read(path)


def test_a_list_takes_time_in_proportion_to_its_length(tmp_path):
    """Short items are the ones that a count from the beginning of each block makes slow."""

    def seconds(text):
        path = write(tmp_path, text)
        began = time.process_time()
        read(path)
        return time.process_time() - began

    rows = [{"id": str(i), "title": f"T{i}", "text": "x"} for i in range(20000)]
    by_line = min(seconds(lines(*rows)) for _ in range(3))
    assert min(seconds(json.dumps(rows, indent=0)) for _ in range(2)) < 8 * by_line
    assert (
        min(seconds(json.dumps({row["title"]: row["text"] for row in rows}, indent=0)) for _ in range(2)) < 8 * by_line
    )


@pytest.mark.parametrize("pack", [open, gzip.open, bz2.open, lzma.open])
@pytest.mark.parametrize("layout", ["lines", "list"])
def test_records_of_questions_are_streamed_packed_or_not(tmp_path, pack, layout, monkeypatch):
    monkeypatch.setattr(raw_text, "CHUNK", 100)
    records = [HOTPOT, MUSIQUE, MORE | {"note": "y" * 1000}]
    path = tmp_path / "q"
    with pack(path, "wt", encoding="utf-8") as file:
        file.write(lines(*records) if layout == "lines" else json.dumps(records, indent=1))
    monkeypatch.setattr(raw_text, "records", None)  # the reader of whole files is not asked
    found = list(raw_text.question_records(path))
    assert [record for _, record in found] == records and all(str(path) in where for where, _ in found)


def test_other_containers_of_questions_are_read_as_ever_and_only_unpacked(tmp_path):
    table = write(tmp_path, "id,question,answer\n1,Who?,x\n")
    assert [record["question"] for _, record in raw_text.question_records(table)] == ["Who?"]
    by_id = write(tmp_path, json.dumps({"a": {"question": "Who?", "answer": "x"}}))
    assert [record["id"] for _, record in raw_text.question_records(by_id)] == ["a"]
    with gzip.open(tmp_path / "p", "wt") as file:
        file.write(by_id.read_text())
    with pytest.raises(DataError, match="is packed, and neither"):
        list(raw_text.question_records(tmp_path / "p"))
    with pytest.raises(DataError, match=r":2: expected a JSON object, got int"):
        list(raw_text.question_records(write(tmp_path, lines(HOTPOT) + "7\n")))


titles = st.text(max_size=20).map(lambda t: "".join(t.split())).filter(lambda t: t != '"')
texts = st.text(min_size=1, max_size=40).map(str.strip).filter(bool)


@settings(deadline=None, max_examples=200)
@given(titles, texts)
def test_contents_and_back(title, text):
    document = Document(title, text)
    assert parse_contents(contents(document)) == document


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.text(min_size=1, max_size=20), st.text(max_size=10)), min_size=1, max_size=6))
def test_quoted_tables_equal_the_csv_module(tmp_path_factory, rows):
    """Fields are quoted as DPR's are; white space inside is left to the stripping."""
    rows = [(" ".join(text.split()) or "x", " ".join(title.split())) for text, title in rows]
    path = tmp_path_factory.mktemp("t") / "table"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter="\t", quoting=csv.QUOTE_ALL, lineterminator="\n")
        writer.writerow(("id", "text", "title"))
        writer.writerows((i, text, title) for i, (text, title) in enumerate(rows))
    with path.open(encoding="utf-8", newline="") as file:
        expected = [(r["id"], r["title"], r["text"]) for r in csv.DictReader(file, delimiter="\t")]
    assert read(path) == expected


@needs_shared
def test_published_files_are_read_as_another_reader_has_them():
    """Normalised copies of the same passages were made by somebody else's code."""

    def plain(text):
        return " ".join(text.split())

    for raw, corpus in (
        ("hotpotqa_original_migres.jsonl", "hotpotqa_dev_paras"),
        ("hotpotqa_ircot.jsonl", "hotpotqa_dev_paras"),
        ("2wiki_original_migres.jsonl", "2wiki_dev_paras"),
        ("musique_original_migres.jsonl", "musique_dev_paras"),
        ("morehopqa.json", "morehopqa_150"),
    ):
        known = {(plain(p.title), plain(p.text)) for p in read_file(SHARED / f"corpora/{corpus}.jsonl")}
        questions = {r["id"]: r for r in map(json.loads, (SHARED / f"qa/{corpus}.jsonl").read_text().splitlines())}
        found = list(read_file(SHARED / "raw" / raw))
        # 2 of HotpotQA's 200 end a sentence without a space, and the copies put one there
        assert sum((plain(p.title), plain(p.text)) in known for p in found) >= 0.99 * len(found)
        supporting: dict[str, set[str]] = {}
        for passage in found:
            if passage.supporting:
                supporting.setdefault(passage.question, set()).add(passage.title)
        assert len(supporting) >= 15
        for question, of_question in supporting.items():
            assert of_question == set(questions[question]["supporting_titles"])


@needs_shared
def test_published_corpora():
    folder = SHARED / "raw"
    with (folder / "corpus_r1searcher_np_abs.tsv").open(encoding="utf-8-sig", newline="") as file:
        rows = [(key, cell) for key, cell in csv.reader(file, delimiter="\t")]
    found = read(folder / "corpus_r1searcher_np_abs.tsv")
    assert [(i, f"Title: {title} Text:  {text}") for i, title, text in found] == [(i, c.strip()) for i, c in rows]
    pages = [line.split("\t") for line in (folder / "corpus_r1searcher_kilt_full_page.tsv").read_text().splitlines()]
    assert [(i, f"{title}   {text}") for i, title, text in read(folder / "corpus_r1searcher_kilt_full_page.tsv")] == [
        (i, cell.strip()) for i, cell in pages
    ]
    first = read(folder / "corpus_search_r1.jsonl")
    assert len(first) == 10 and first[0][:2] == ("0", "Evan Morris") and first[0][2].startswith("Evan Morris Evan L.")
    assert len(read(folder / "corpus_hipporag_2wiki_list.json")) == 400
