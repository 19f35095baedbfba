"""Containers: what a file holds is told from its content; what no reader can take is told in one line."""

import csv
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hiexp import sample_fields
from hiexp.config import ConfigError
from hiexp.data import read_samples
from hiexp.layouts import DataError, records

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="no ../shared/data beside the repository")
ROWS = [
    {"id": "a", "question": "Who wrote it?", "answer": "Ada, countess"},
    {"id": "b", "question": 'Who said "no"?', "answer": "Jos\u00e9\u2028M"},
    {"id": "c", "question": "Two\nlines?", "answer": "0"},
]


def write(folder: Path, content: str | bytes, name: str = "file.jsonl") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def contents(path: Path) -> list[dict]:
    return [record for _, record in records(path)]


def table(rows: list[dict], delimiter: str, newline: str = "\n") -> str:
    lines = []

    class Lines:
        def write(self, text: str) -> None:
            lines.append(text)

    writer = csv.DictWriter(Lines(), list(rows[0]), delimiter=delimiter, lineterminator=newline)
    writer.writeheader()
    writer.writerows(rows)
    return "".join(lines)


SPELLINGS = {
    "lines": "".join(json.dumps(row) + "\n" for row in ROWS),
    "lines, no ASCII, CRLF, blanks": "\r\n\r\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS),
    "lines with a byte order mark": "\ufeff" + "".join(json.dumps(row) + "\n" for row in ROWS),
    "list": json.dumps(ROWS),
    "list, indented": json.dumps(ROWS, indent=4),
    "list, spaces before": " \n\n\t" + json.dumps(ROWS, indent=1),
    "columns of rows": json.dumps({key: {str(i): row[key] for i, row in enumerate(ROWS)} for key in ROWS[0]}),
    "columns of rows, indented": json.dumps(
        {key: {i: row[key] for i, row in enumerate(ROWS)} for key in ROWS[0]}, indent=2
    ),
    "columns of values": json.dumps({key: [row[key] for row in ROWS] for key in ROWS[0]}),
    "by id": json.dumps({row["id"]: {key: row[key] for key in ("question", "answer")} for row in ROWS}),
    "inside an object": json.dumps({"version": "1.0", "authors": ["A"], "data": ROWS}, indent=1),
    "csv": table(ROWS, ","),
    "csv, CRLF and byte order mark": "\ufeff" + table(ROWS, ",", "\r\n"),
    "csv, semicolons": table(ROWS, ";"),
    "tsv": table(ROWS, "\t"),
}


@pytest.mark.parametrize("suffix", ["json", "jsonl", "csv", "parquet"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_B79_one_content_whatever_the_container_and_the_suffix(tmp_path, spelling, suffix):
    assert contents(write(tmp_path, SPELLINGS[spelling], f"x.{suffix}")) == ROWS


def arrow_files(folder: Path, rows: list[dict]) -> dict[str, Path]:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    whole = pa.Table.from_pylist(rows)
    parquet.write_table(whole, folder / "x.json", row_group_size=2)
    for name, new in (("x.arrow", pa.ipc.new_stream), ("x.feather", pa.ipc.new_file)):
        with new(folder / name, whole.schema) as writer:
            writer.write_table(whole, max_chunksize=2)
    return {"parquet": folder / "x.json", "stream": folder / "x.arrow", "file": folder / "x.feather"}


def test_B79_parquet_and_arrow_hold_the_same_as_lines(tmp_path):
    for kind, path in arrow_files(tmp_path, ROWS).items():
        assert contents(path) == ROWS, kind
        assert [where for where, _ in records(path)] == [f"{path}[{i}]" for i in (1, 2, 3)]


def test_a_table_cut_in_the_middle_is_told(tmp_path):
    for kind, path in arrow_files(tmp_path, ROWS * 50).items():
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(DataError, match="damaged or unfinished table") as error:
            contents(path)
        assert "\n" not in str(error.value), kind


def test_without_pyarrow_the_remedy_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"needs pyarrow; pip install -r requirements-eval\.txt"):
        contents(write(tmp_path, b"PAR1...."))


def test_nan_and_null_of_a_table_are_no_answers(tmp_path):
    rows = [{"question": "q", "answer": 3.0}, {"question": "r", "answer": float("nan")}]
    path = arrow_files(tmp_path, rows)["parquet"]
    with pytest.raises(DataError, match=r"\[2\]: the row has no gold answer"):
        read_samples(path)
    with pytest.warns(UserWarning, match=r"1 rows cannot be used and were left out; the first: .*\[2\]"):
        assert [sample.answers for sample in read_samples(path, on_bad_row="skip")] == [("3",)]


def test_text_of_a_table_that_is_not_utf8_is_one_bad_row(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    broken = pa.array([b"fine?", b"\xff\xfe", b"also fine?"]).view(pa.string())
    parquet.write_table(pa.table({"question": broken, "answer": ["a", "b", "c"]}), tmp_path / "x")
    with pytest.raises(DataError, match=r"x\[2\]: cannot be read"):
        read_samples(tmp_path / "x")
    with pytest.warns(UserWarning, match="1 rows cannot be used"):
        assert [s.id for s in read_samples(tmp_path / "x", on_bad_row="skip")] == ["row-1", "row-3"]


def test_a_comp_gap_table_has_no_header_and_its_answer_in_the_fifth_column(tmp_path):
    text = 'Who?,,,,Ada,,\r\n"In 1999, who?",,,,"Bob\n",Robert,\r\n'
    read = read_samples(write(tmp_path, text))
    assert [(s.id, s.question, s.answers) for s in read] == [
        ("row-1", "Who?", ("Ada",)),
        ("row-2", "In 1999, who?", ("Bob",)),
    ]
    other = text.replace("Who?,,,,", "Who?,x,,,")
    with pytest.raises(DataError, match=":1: not JSON"):
        read_samples(write(tmp_path, other))


def test_a_table_of_frames_numbers_its_rows_and_keeps_lists_as_text(tmp_path):
    cells = [["", "Prompt", "Answer", "reasoning_types", "wiki_links"]]
    cells += [["0", " Who?", "Ada", "A | B", "['https://x/1', 'https://x/2']"], ["1", "Which?", "[2, 5]", "A", "[]"]]
    text = "\n".join("\t".join(row) for row in cells)
    first, second = read_samples(write(tmp_path, text, "test.tsv"))
    assert (first.id, first.question, first.answers, first.family, first.facts) == ("0", "Who?", ("Ada",), "A | B", 2)
    assert (second.id, second.answers, second.facts) == ("1", ("[2, 5]",), 0)


def test_a_list_of_golds_written_as_text_in_a_table_is_a_list(tmp_path):
    text = 'question\tanswer\nwho?\t[\'Ada\', "Ada\'s"]\nwhen?\t["1999"]\nwhat?\t[x]\n'
    assert [s.answers for s in read_samples(write(tmp_path, text))] == [("Ada", "Ada's"), ("1999",), ("[x]",)]


HOSTILE = {
    "half a surrogate in lines": ('{"question": "x \\ud800", "answer": "a"}\n', ":1: holds half of a surrogate"),
    "half a surrogate in a list": ('[{"question": "\\uDC00", "answer": "a"}]', r"\[1\]: holds half of a surrogate"),
    "half a surrogate in columns": ('{"question": ["\\ud83d"], "answer": ["a"]}', r"\[1\]: holds half of a surrogate"),
    "deep lines": ('{"a":' * 100_000, ":1: brackets nested too deeply"),
    "deep list": ("[" * 100_000, "brackets nested too deeply"),
    "a number without end": ('{"id": ' + "9" * 5000 + "}", ":1: not JSON"),
    "a quote that never closes": ('question,answer\nq,a\n"r,b\ns,c\n', ":3: not a row of a table .*never closes"),
    "a quote inside a cell": ('question,answer\n"The "Human" Factor",b\n', ":2: not a row of a table"),
    "a row too short": ("question,answer\nq,a\nr\n", ":3: 1 cells where the table has 2 columns"),
    "a table of passages": ("id\ttext\n1\tAda wrote.\n", ":1: not JSON"),
    "a header alone": ("question,answer\n", "holds an empty list"),
    "gzip": (b"\x1f\x8b\x08\x00", "packed with gzip; unpack it first"),
    "zip": (b"PK\x03\x04....", "a zip archive"),
    "a pointer": (b"version https://git-lfs.github.com/spec/v1\noid", "pointer of Git LFS"),
    "a web page": (b"<!DOCTYPE html><html>", "a web page"),
    "UTF-16": ("question".encode("utf-16"), "UTF-16 text"),
    "a pickle": (b"\x80\x04\x95", "a Python pickle, which is never read"),
    "parquet of nothing": (b"PAR1", "damaged or unfinished|needs pyarrow"),
    "a lone scalar": ("17\n", "expected a JSON object, got int"),
    "a list of lists": ("[[1, 2]]", "expected a JSON object, got list"),
    "columns that are none": ('{"answers": ["x"], "question": 5}', ":1: the row has no question"),
    "one record that asks nothing": ('{"a": {"b": 1}}', ":1: the row has no question"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused_in_one_line(tmp_path, case):
    content, message = HOSTILE[case]
    with pytest.raises(ConfigError, match=message) as error:
        read_samples(write(tmp_path, content))
    assert "\n" not in str(error.value) and len(str(error.value)) < 600


def test_an_unclosed_quote_is_no_row_to_skip(tmp_path):
    """It would take the rest of the file with it, counted as one."""
    path = write(tmp_path, 'question,answer\nq,a\n"r,b\n' + "s,c\n" * 50)
    with pytest.raises(DataError, match="never closes"):
        read_samples(path, on_bad_row="skip")


def test_lists_and_strings_in_one_file(tmp_path):
    rows = [{"question": "q", "answer": ["Ada", "A."]}, {"question": "r", "answer": "yes"}]
    path = write(tmp_path, json.dumps(rows))
    assert [s.answers for s in read_samples(path)] == [("Ada", "A."), ("yes",)]


def test_one_record_alone_is_one_record(tmp_path):
    record = {"id": "a", "question": "q", "answers": ["x"], "question_decomposition": [{"question": "p"}]}
    for indent in (None, 2):
        assert contents(write(tmp_path, json.dumps(record, indent=indent))) == [record]
    logs = {"id": "a", "messages": [{"role": "user", "content": "q"}], "scores": [1.0]}
    assert contents(write(tmp_path, json.dumps(logs))) == [logs]


simple = st.dictionaries(
    st.sampled_from(["id", "question", "answer", "note"]),
    st.text(st.characters(codec="utf-8"), max_size=9) | st.integers() | st.lists(st.text(max_size=3), max_size=2),
    min_size=1,
)


@settings(max_examples=60)
@given(st.lists(simple | simple.map(lambda row: row | {"x": row}), min_size=2, max_size=5))
def test_any_json_records_come_back_from_lines_and_lists(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("layouts")
    rows = json.loads(json.dumps(rows))
    try:
        json.dumps(rows, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return
    assert contents(write(folder, json.dumps(rows))) == rows
    assert contents(write(folder, "\n".join(map(json.dumps, rows)))) == rows


NAMES = (
    "answer_aliases data_source reward_model ground_truth extra_info index answers_objects spans date solution target "
    "supporting_facts paragraphs wiki_links no_of_hops question_decomposition answerable hops facts content title"
)
known_names = st.sampled_from(
    [*NAMES.split(), *sample_fields.PROMPT_KEYS, *sample_fields.FAMILY_KEYS]
    + [key for keys in (sample_fields.QUESTION_KEYS, sample_fields.GOLD_KEYS, sample_fields.ID_KEYS) for key in keys]
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["", "x", "['u']", r"\boxed{1}", "[[["]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(known_names, inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.filterwarnings("ignore::UserWarning")
@settings(max_examples=150)
@given(st.lists(st.dictionaries(known_names, values, max_size=6), min_size=1, max_size=3), st.booleans())
def test_any_values_under_the_known_names_are_samples_or_an_error_of_the_user(tmp_path_factory, rows, whole):
    rows = [({"question": "q", "answer": "x"} if whole else {}) | row for row in rows]
    path = write(tmp_path_factory.getbasetemp(), json.dumps(rows), "any_values")
    try:
        for sample in read_samples(path):
            assert sample.id and sample.question and sample.answers and sample.hops >= 0 <= sample.facts
            assert all(isinstance(text, str) and text for text in (sample.id, sample.question, *sample.answers))
    except ConfigError as error:
        assert str(path) in str(error)


@settings(max_examples=150)
@given(
    st.binary(max_size=60)
    | st.text(max_size=60).map(lambda text: ("question,answer\n" + text).encode(errors="replace"))
)
def test_any_bytes_are_records_or_an_error_of_the_user(tmp_path_factory, content):
    path = write(tmp_path_factory.getbasetemp(), content, "any")
    try:
        assert all(isinstance(record, dict) for record in contents(path))
    except ConfigError as error:
        assert str(path) in str(error)


@needs_shared
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_B79_every_published_layout_loads():
    """With the number of questions where a fixture holds a whole set."""
    whole = {
        "bamboogle": 125,
        "aime24_qwen": 30,
        "aime25": 30,
        "amc23": 40,
        "amc_rllm": 83,
        "minerva": 272,
        "luffy": 1590,
        "deepresearcher": 875,
    }
    files = [path for path in sorted((SHARED / "raw").iterdir()) if not path.name.startswith("corpus_")]
    for path in files:
        if path.suffix == ".parquet":
            pytest.importorskip("pyarrow")
        read = read_samples(path)
        assert len({sample.id for sample in read}) == len(read) > 0, path.name
        assert all(s.question == s.question.strip() != "" and s.answers and all(s.answers) for s in read), path.name
        for name, count in whole.items():
            assert len(read) == count or not path.name.startswith(name), path.name
    assert len(files) >= 25
