"""The benchmarks by name: counts, the paper's draw, what is noticed of a file, and real files in several layouts."""

import hashlib
import json
import random
import re
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hiexp import benchmarks
from hiexp.benchmarks import BENCHMARKS, main, near_duplicates, open_benchmark
from hiexp.config import ConfigError
from hiexp.data import Sample, read_samples, shared_questions
from hiexp.metrics import METRICS

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="no ../shared/data beside the repository")


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows(n: int, **more: object) -> list[dict]:
    return [{"id": f"q{i}", "question": f"question {i}?", "answer": f"gold {i}"} | more for i in range(n)]


def opened(name: str, path: Path, **options: object) -> benchmarks.Loaded:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return open_benchmark(name, path, **options)


def test_the_registry_is_the_paper_s():
    published = {
        "hotpotqa": (7405, 1000, 1),
        "2wiki": (12576, 1000, 1),
        "musique": (2417, 1000, 1),
        "bamboogle": (125, 0, 1),
        "morehopqa": (1118, 0, 1),
        "frames": (824, 0, 1),
        "aime24": (30, 0, 32),
        "aime25": (30, 0, 32),
        "amc": (83, 0, 32),
        "math500": (500, 0, 1),
        "minerva": (272, 0, 1),
        "olympiadbench": (675, 0, 1),
    }
    assert {name: (row.size, row.subset, row.samples) for name, row in BENCHMARKS.items()} == published
    assert all(set(row.metrics) <= {*METRICS, "math"} for row in BENCHMARKS.values())
    assert [row.name for row in BENCHMARKS.values() if row.domain == "out"] == ["bamboogle", "morehopqa", "frames"]
    names = [name for row in BENCHMARKS.values() for name in row.sets]
    assert len(names) == len(set(names)) and all(re.fullmatch(r"[a-z0-9]+", name) for name in names)


def test_the_subset_is_drawn_from_rows_in_order_of_id_whatever_the_file_s_order(tmp_path):
    whole = rows(1200)
    expected = sorted(random.Random(42).sample(sorted(row["id"] for row in whole), 1000))
    shuffled = random.Random(1).sample(whole, len(whole))
    for part in (whole, shuffled):
        loaded = opened("hotpotqa", write(tmp_path / "x.jsonl", part))
        assert list(loaded.ids) == [sample.id for sample in loaded.samples] == expected
    assert [s.id for s in opened("hotpotqa", tmp_path / "x.jsonl", subset=False).samples] == [r["id"] for r in shuffled]
    assert {s.hops for s in loaded.samples} == {2}
    loaded.write_ids(tmp_path / "ids.json")
    said = json.loads((tmp_path / "ids.json").read_text())
    assert said["ids"] == expected and said["seed"] == 42
    assert said["sha256"] == hashlib.sha256((tmp_path / "x.jsonl").read_bytes()).hexdigest()


def test_a_subset_by_row_numbers_is_told(tmp_path):
    nameless = [{"question": row["question"], "answer": row["answer"]} for row in rows(1100)]
    assert any("has no ids" in note for note in opened("2wiki", write(tmp_path / "x", nameless)).notes)


def test_another_count_than_the_published_one_is_told_with_both(tmp_path):
    with pytest.warns(UserWarning, match="has 30 questions, the published Bamboogle has 125"):
        loaded = open_benchmark("bamboogle", write(tmp_path / "x", rows(30)))
    assert len(loaded.notes) == 1
    assert opened("aime24", tmp_path / "x").notes == ()
    (note,) = opened("musique", write(tmp_path / "y", rows(1000))).notes
    assert "1000 questions of 2417: it is a subset already" in note


def test_B78_a_set_repeated_under_other_ids_is_taken_once(tmp_path):
    repeated = [row | {"id": f"{row['id']}-{k}"} for row in rows(30) for k in range(4)]
    loaded = opened("aime25", write(tmp_path / "x", repeated))
    assert len(loaded.samples) == 30 and "each of 30 problems stands 4 times under ids of its own" in loaded.notes[0]
    other = opened("aime25", write(tmp_path / "x", repeated[:80]))
    assert len(other.samples) == 80  # not the published problems: left as they are, and told
    assert "has 80 questions" in other.notes[0]


def test_a_file_of_several_sets_gives_its_own(tmp_path):
    mixed = rows(30, data_source="opencompass/AIME-2025") + rows(5, data_source="MATH") + rows(2, data_source="x/amc")
    path = write(tmp_path / "x", mixed)
    loaded = opened("aime25", path)
    assert len(loaded.samples) == 30 and "not math 5, amc 2" in loaded.notes[0]
    assert [s.id for s in opened("amc", path).samples] == ["amc-q0", "amc-q1"]
    with pytest.raises(ConfigError, match="holds no rows of minerva; its data_source says aime2025 30, math 5, amc 2"):
        open_benchmark("minerva", path)
    alone = opened("minerva", write(tmp_path / "y", rows(272, data_source="somebody/university")))
    assert len(alone.samples) == 272 and "no known name of minerva" in alone.notes[0]


def test_B111_a_problem_that_holds_its_answer_is_counted(tmp_path):
    leaking = [*rows(29), {"id": "z", "question": "What is 3 + 4? Answer: 7", "answer": 7}]
    with pytest.warns(UserWarning, match="1 of 30 questions hold their answer .*first z"):
        open_benchmark("aime24", write(tmp_path / "x", leaking))


def test_B111_ids_are_unique_and_the_file_is_known_by_its_hash(tmp_path):
    path = write(tmp_path / "x", [*rows(30), {"id": "q3", "question": "another", "answer": "x"}])
    with pytest.raises(ConfigError, match=r":31: id 'q3' was already used at .*:4 with another question"):
        open_benchmark("aime24", path)
    loaded = opened("aime24", path, on_bad_row="skip")
    assert len(loaded.samples) == 30 and loaded.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert "1 rows cannot be used" in loaded.notes[0]


words = st.lists(
    st.sampled_from(["who", "wrote", "this", "old", "book", "about", "some", "big", "red", "dog", "may"]),
    min_size=1,
    max_size=8,
)


@settings(max_examples=80)
@given(st.lists(words, max_size=8), st.lists(words, max_size=8), st.sampled_from([0.3, 0.5, 0.75, 0.8, 1.0]))
def test_near_duplicates_are_those_of_comparing_every_pair(left, right, share):
    ours = [Sample(f"a{i}", " ".join(w), ("x",)) for i, w in enumerate(left)]
    theirs = [Sample(f"b{i}", " ".join(w), ("x",)) for i, w in enumerate(right)]
    expected = {
        (f"a{i}", f"b{j}")
        for i, a in enumerate(left)
        for j, b in enumerate(right)
        if len(set(a) & set(b)) >= share * len(set(a) | set(b))
    }
    assert {(a, b) for a, b, _ in near_duplicates(ours, theirs, share)} == expected


def test_near_duplicates_refuse_a_share_that_is_none():
    with pytest.raises(ConfigError, match=r"near=1.5 must lie in \(0, 1\]"):
        near_duplicates([], [], 1.5)


def run(capsys: pytest.CaptureFixture, *words: object) -> tuple[int, str, str]:
    code = main([str(word) for word in words])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_commands(tmp_path, capsys):
    path = write(tmp_path / "x.jsonl", rows(1200))
    code, out, _ = run(capsys, "list")
    assert code == 0 and [line.split()[0] for line in out.splitlines()] == list(BENCHMARKS)
    code, out, _ = run(capsys, "check", "hotpotqa", path)
    assert code == 0 and out.startswith("HotpotQA: 1000 questions; metrics em, f1, cem\n") and "hops: 2: 1000" in out
    assert run(capsys, "check", "hotpotqa", path, "subset=false")[1].startswith("HotpotQA: 1200 questions")
    code, out, _ = run(capsys, "subset", "hotpotqa", path, f"out={tmp_path / 'out.jsonl'}")
    assert code == 0 and "1000 questions of HotpotQA" in out
    drawn = read_samples(tmp_path / "out.jsonl")
    assert [s.id for s in drawn] == json.loads((tmp_path / "out.ids.json").read_text())["ids"]
    other = write(tmp_path / "y.jsonl", [{"id": 1, "question": "QUESTION  7", "answer": "x"}, rows(3)[2]])
    assert run(capsys, "overlap", path, other)[1].splitlines()[1] == "2 are in both, first q2, q7"
    near = write(tmp_path / "z.jsonl", [{"id": 1, "question": "Is this question 7?", "answer": "x"}])
    assert (
        "1 more overlap by 0.5 of their words or more, first q7 ~ 1"
        in run(capsys, "overlap", path, near, "near=0.5")[1]
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["chek"], "unknown command 'chek'; did you mean 'check'"),
        (["check", "hotpot", "x"], "unknown benchmark 'hotpot'; did you mean 'hotpotqa'.*known: 2wiki, aime24"),
        (["check", "hotpotqa"], "NAME and FILE are needed; known benchmarks: hotpotqa"),
        (["check", "hotpotqa", "nowhere.jsonl"], "no such file"),
        (["check", "hotpotqa", "x", "subset=maybe"], "subset=maybe must be true or false"),
        (["check", "hotpotqa", "x", "limit=3"], "unexpected 'limit=3'; expected subset=..., on_bad_row=..., aliases="),
        (["subset", "hotpotqa", "x"], "subset needs out=FILE.jsonl"),
        (["overlap", "a", "b", "near=much"], "near=much must be a number"),
        (["list", "x"], "unexpected 'x'; expected no more"),
    ],
)
def test_wrong_commands_are_told_in_one_line(capsys, words, message):
    code, out, err = run(capsys, *words)
    assert code == 2 and not out and err.startswith("error: ") and err.count("\n") == 1
    assert re.search(message, err), err


def test_the_module_runs_as_a_program():
    done = subprocess.run(
        [sys.executable, "-m", "hiexp.benchmarks"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "python -m hiexp.benchmarks check" in done.stdout


# ---- real files ----

WHOLE = {
    ("hotpotqa", "qa/hotpotqa_dev_1000.jsonl"): 1000,
    ("2wiki", "qa/2wiki_dev_1000.jsonl"): 1000,
    ("musique", "qa/musique_dev_1000.jsonl"): 1000,
    ("bamboogle", "raw/bamboogle_compgap.json"): 125,
    ("bamboogle", "raw/bamboogle_flashrag.jsonl"): 125,
    ("bamboogle", "raw/bamboogle_r1searcher.jsonl"): 125,
    ("bamboogle", "raw/bamboogle_simpledeepsearcher.json"): 125,
    ("bamboogle", "raw/bamboogle_verl.jsonl"): 125,
    ("morehopqa", "qa/morehopqa_150.jsonl"): 150,
    ("frames", "qa/frames.jsonl"): 824,
    ("aime24", "raw/aime24_qwen.jsonl"): 30,
    ("aime24", "raw/luffy_valid.all.parquet"): 30,
    ("aime25", "raw/aime25_arpo.jsonl"): 30,
    ("aime25", "raw/luffy_valid.all.parquet"): 30,
    ("amc", "raw/amc_rllm.json"): 83,
    ("amc", "raw/luffy_valid.all.parquet"): 83,
    ("math500", "math/math500.jsonl"): 500,
    ("math500", "raw/luffy_valid.all.parquet"): 500,
    ("minerva", "raw/minerva_qwen.jsonl"): 272,
    ("minerva", "raw/luffy_valid.all.parquet"): 272,
    ("olympiadbench", "math/olympiadbench.jsonl"): 675,
    ("olympiadbench", "raw/luffy_valid.all.parquet"): 675,
}


def real(name: str) -> Path:
    path = SHARED / name
    if not path.is_file():
        pytest.skip(f"no {name} in ../shared/data")
    if path.suffix == ".parquet":
        pytest.importorskip("pyarrow")
    return path


@pytest.mark.parametrize(("name", "file"), WHOLE, ids=lambda value: str(value))
def test_B111_real_files_have_the_published_counts(name, file):
    loaded = opened(name, real(file))
    assert len(loaded.samples) == len(set(loaded.ids)) == WHOLE[name, file]
    told = any("published" in note or "subset already" in note for note in loaded.notes)
    assert told == (len(loaded.samples) != BENCHMARKS[name].size)
    assert any("32 times" in note for note in loaded.notes) == (BENCHMARKS[name].samples == 32 and "luffy" in file)


def golds(path: str, name: str = "") -> list[tuple[str, ...]]:
    return [s.answers for s in (opened(name, real(path)).samples if name else read_samples(real(path)))]


@pytest.mark.parametrize("file", [file for name, file in WHOLE if name == "bamboogle"])
def test_B79_all_copies_of_bamboogle_have_the_same_answers(file):
    assert golds(file, "bamboogle") == golds("qa/bamboogle.jsonl")


@pytest.mark.parametrize("name", ["math500", "minerva", "olympiadbench", "amc"])
def test_B79_a_table_of_six_sets_has_the_answers_of_the_single_files_row_by_row(name):
    table = golds("raw/luffy_valid.all.parquet", name)
    if name == "amc":
        table = [(gold.removesuffix(".0"),) for (gold,) in table]  # text there, numbers in the single file
    assert table == golds(f"math/{name}.jsonl", name)


@pytest.mark.parametrize("name", ["aime24", "aime25"])
def test_B79_its_aime_problems_are_the_same_in_another_order(name):
    table = [re.sub(r"\D", "", gold) for (gold,) in golds("raw/luffy_valid.all.parquet", name)]
    assert Counter(table) == Counter(gold for (gold,) in golds(f"math/{name}.jsonl", name))


@pytest.mark.parametrize(
    ("original", "plain"),
    [
        ("raw/minerva_qwen.jsonl", "math/minerva.jsonl"),  # the gold is the last box of the solution
        ("raw/amc_rllm.json", "math/amc.jsonl"),
        ("raw/aime24_qwen.jsonl", "math/aime24.jsonl"),
        ("raw/aime25_arpo.jsonl", "math/aime25.jsonl"),
        ("raw/amc23_qwen.jsonl", "math/amc23.jsonl"),
    ],
)
def test_B79_original_layouts_of_mathematics_give_the_same_golds(original, plain):
    assert golds(original) == golds(plain)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("original", "plain", "least"),
    [
        ("raw/hotpotqa_original_migres.jsonl", "qa/hotpotqa_dev_paras.jsonl", 20),
        ("raw/hotpotqa_ircot.jsonl", "qa/hotpotqa_dev_paras.jsonl", 20),
        ("raw/2wiki_original_migres.jsonl", "qa/2wiki_dev_paras.jsonl", 20),
        ("raw/musique_original_migres.jsonl", "qa/musique_dev_paras.jsonl", 15),
        ("raw/morehopqa.json", "qa/morehopqa_150.jsonl", 50),
        ("raw/frames_simpledeepsearcher.json", "qa/frames.jsonl", 60),
        ("raw/r1searcher_stage_2.jsonl", "train/r1searcher_stage2.jsonl", 1000),
        ("raw/olympiadbench_qwen.jsonl", "math/olympiadbench.jsonl", 60),
        ("raw/math500_simplerl.jsonl", "math/math500.jsonl", 120),
    ],
)
def test_B79_original_layouts_of_questions_give_the_same_golds(original, plain, least):
    """Question by question; hops and facts too, where both files state them."""
    known = {sample.question: sample for sample in read_samples(real(plain))}
    shared = [sample for sample in read_samples(real(original)) if sample.question in known]
    assert len(shared) >= least
    for sample in shared:
        other = known[sample.question]
        assert sample.answers == other.answers
        assert not (sample.hops and other.hops) or sample.hops == other.hops
        assert not (sample.facts and other.facts) or sample.facts == other.facts, sample


def test_B111_training_files_share_no_question_with_the_benchmarks():
    tests = ["hotpotqa_dev_1000", "2wiki_dev_1000", "musique_dev_1000", "bamboogle", "frames", "morehopqa_150"]
    asked = [sample for name in tests for sample in read_samples(real(f"qa/{name}.jsonl"))]
    for name in ("r1searcher_stage2", "musique_train_8000"):
        assert shared_questions(read_samples(real(f"train/{name}.jsonl")), asked) == []
    ours, theirs = real("train/2wiki_train_paras_500.jsonl"), real("train/r1searcher_stage2.jsonl")
    assert benchmarks.overlap(ours, theirs)[1].startswith("12 are in both")
