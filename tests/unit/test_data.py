import json
import warnings
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hiexp import data
from hiexp.config import ConfigError
from hiexp.data import PromptSampler, Sample

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="no ../shared/data beside the repository")
ROW = {"id": "a", "question": "Who?", "answers": ["Ada"]}


def write(folder: Path, content: str | bytes, name: str = "file.jsonl") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def lines(*records: dict) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def samples(n: int) -> list[Sample]:
    return [Sample(f"q{i}", f"question {i}", (str(i),)) for i in range(n)]


@pytest.mark.parametrize(
    ("record", "question", "answers"),
    [
        (
            {"id": "5a", "question": " Who? ", "answers": [" Ada ", "Ada", "", None, "A. L."]},
            "Who?",
            ("Ada", "A. L."),
        ),
        ({"_id": "5a", "question": "Who?", "answer": "Ada"}, "Who?", ("Ada",)),  # HotpotQA, 2Wiki
        (
            {"id": "5a", "question": "Who?", "answer": "Ada", "answer_aliases": ["Byron"]},
            "Who?",
            ("Ada", "Byron"),
        ),
        ({"id": "5a", "question": "Who?", "golden_answers": ["Ada"]}, "Who?", ("Ada",)),  # FlashRAG
        (
            {"id": "5a", "Question": "Who?", "answer": ["Ada"], "Answer": "x"},
            "Who?",
            ("Ada",),
        ),  # SimpleDeepSearcher
        ({"id": "5a", "problem": "1+1?", "answer": 2}, "1+1?", ("2",)),  # AIME25
        ({"id": "5a", "problem": "0?", "answer": 0}, "0?", ("0",)),
        ({"id": "5a", "question": "x?", "answer": 142.0}, "x?", ("142",)),  # AMC
        ({"id": "5a", "question": "x?", "answer": 0.5}, "x?", ("0.5",)),
        ({"id": "5a", "question": "x?", "final_answer": ["9.6\n"]}, "x?", ("9.6",)),  # OlympiadBench
        ({"id": "5a", "question": "x?", "ground_truth": "no"}, "x?", ("no",)),
        (
            {"id": "5a", "question": "x?", "answers": ["!!!"]},
            "x?",
            ("!!!",),
        ),  # normalises to nothing, still a gold
        ({"id": "5a", "Prompt": "Who?", "Answer": "Ada", "wiki_links": "[]"}, "Who?", ("Ada",)),  # FRAMES
        (
            {"question_id": "5a", "question_text": "q", "answers_objects": [{"number": "", "spans": ["Ada", "A."]}]},
            "q",
            ("Ada", "A."),
        ),  # IRCoT
        (
            {
                "qid": "5a",
                "question": "q",
                "answers_objects": [{"spans": [], "date": {"day": "", "month": "May", "year": 9}}],
            },
            "q",
            ("May 9",),
        ),
        (
            {
                "data_source": "5a",
                "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": " q "}],
                "target": [{"role": "assistant", "content": "a long way"}],
                "reward_model": {"style": "rule", "ground_truth": "7"},
                "extra_info": {"index": "5a", "split": "default"},
            },
            "q",
            ("7",),
        ),  # OpenR1-Math as LUFFY prepares it
        (
            {
                "id": "5a",
                "question": "q",
                "prompt": [{"role": "user", "content": "Answer the question. Question: q"}],
                "reward_model": {"ground_truth": {"target": ["Ada", "A."]}},
            },
            "q",
            ("Ada", "A."),
        ),  # Search-R1
        (
            {
                "prompt": [{"role": "user", "content": "Solve step by step: 1+1"}],
                "reward_model": {"ground_truth": "2"},
                "extra_info": {"index": "5a", "raw_problem": "1+1"},
            },
            "1+1",
            ("2",),
        ),  # an instruction around the problem
        (
            {"idx": "5a", "problem": "x?", "solution": r"first \boxed{1}, so \boxed{\frac{1}{2}} m"},
            "x?",
            (r"\frac{1}{2}",),
        ),
        ({"unique_id": "5a", "problem": "x?", "answer": "", "solution": r"\boxed{9}"}, "x?", ("9",)),
        ({"test_id": "5a", "question": "x?", "ground_truth": "A<|answer_split|> B <|answer_split|>"}, "x?", ("A", "B")),
        ({"id": "5a", "question": "x?", "answer": None, "final_answer": ["7"]}, "x?", ("7",)),
        ({"id": "5a", "question": "x?", "answer": 1e22}, "x?", ("10000000000000000000000",)),
        ({"id": "5a", "question": "x?", "answer": [float("nan"), "7"]}, "x?", ("7",)),
    ],
)
def test_B79_every_published_spelling_becomes_a_sample(tmp_path, record, question, answers):
    (sample,) = data.read_samples(write(tmp_path, lines(record)))
    assert (sample.id, sample.question, sample.answers) == ("5a", question, answers)


def test_numbers_are_ids_and_type_is_the_family(tmp_path):
    path = write(tmp_path, lines(ROW | {"id": 0, "type": "bridge"}, ROW | {"family": "f", "family_group": "g"}))
    first, second = data.read_samples(path)
    assert (first.id, first.family, first.family_group) == ("0", "bridge", "")
    assert (second.family, second.family_group) == ("f", "g")


@pytest.mark.parametrize("gold", [[], "", None, [""], ["  ", None], [{"number": "3"}], True, [["Ada"]]])
def test_B79_a_record_without_a_usable_gold_names_file_line_and_id(tmp_path, gold):
    path = write(tmp_path, lines(ROW) + "\n" + lines(ROW | {"id": "bad-7", "answers": gold}))
    with pytest.raises(ValueError, match=r"file\.jsonl:3: sample 'bad-7' has .* gold answer"):
        data.read_samples(path)


@pytest.mark.parametrize(
    ("record", "hops", "facts"),
    [
        ({}, 0, 0),
        ({"hops": 3, "facts": 5}, 3, 5),
        ({"hops": None, "facts": ["text"]}, 0, 0),
        ({"id": "3hop1__1_2_3", "question_decomposition": [{"paragraph_support_idx": 1}] * 3}, 3, 0),
        ({"id": "musique_2hop__252311_366220"}, 2, 0),
        ({"question_decomposition": [{"paragraph_support_idx": i} for i in (1, 2, None, 4)]}, 4, 0),
        ({"paragraphs": [{"is_supporting": x} for x in (True, False, True)]}, 0, 2),
        ({"contexts": [{"is_supporting": x} for x in (True, False)]}, 0, 1),
        (
            {
                "id": "2hop__1_2_7",
                "no_of_hops": 3,
                "question_decomposition": [{"paragraph_support_title": t} for t in ("A", "B", "")],
            },
            5,
            2,
        ),  # MoreHopQA counts what it adds to a MuSiQue question of two
        ({"type": "bridge_comparison", "supporting_facts": [["T", 0]] * 4, "evidences": [[]] * 5}, 4, 4),
        ({"type": "comparison", "supporting_facts": '[["T", 0], ["U", 1]]'}, 2, 2),
        ({"type": "bridge", "supporting_facts": {"title": ["T", "T", "U"], "sent_id": [0, 1, 0]}}, 2, 3),
        ({"wiki_links": "['u', 'v']"}, 0, 2),
        ({"wiki_links": ["u"], "type": "Temporal reasoning"}, 0, 1),
    ],
)
def test_hops_and_facts_are_what_the_data_set_states(tmp_path, record, hops, facts):
    (sample,) = data.read_samples(write(tmp_path, lines(ROW | record)))
    assert (sample.hops, sample.facts) == (hops, facts)


def test_rows_without_any_id_are_numbered(tmp_path):
    rows = [{"question": f"q{i}", "answer": "x"} for i in (1, 2, 2, 3)]
    path = write(tmp_path, "\n" + lines(*rows))
    assert [s.id for s in data.read_samples(path)] == ["row-1", "row-2", "row-3", "row-4"]
    assert [s.id for s in data.read_samples(path, 2)] == ["row-1", "row-2"]
    mixed = write(tmp_path, lines(rows[0], *(row | {"id": i} for i, row in enumerate(rows))))
    with pytest.raises(data.DataError, match=r":1: no id, which other rows have"):
        data.read_samples(mixed)
    with pytest.warns(UserWarning, match=r"1 rows cannot be used and were left out; the first: .*:1: no id"):
        assert [s.id for s in data.read_samples(mixed, on_bad_row="skip")] == ["0", "1", "2", "3"]


@pytest.mark.parametrize("with_ids", [True, False])
@pytest.mark.parametrize("order", ["each", "epochs"])
def test_B78_a_file_repeated_for_avg_at_k_is_noticed(tmp_path, with_ids, order):
    rows = [{"question": f"q{i}", "answer": i} | ({"id": i} if with_ids else {}) for i in range(3)]
    repeated = [row for row in rows for _ in range(4)] if order == "each" else rows * 4
    path = write(tmp_path, lines(*repeated))
    with pytest.warns(UserWarning, match=r"each of 3 problems stands 4 times in the file; .*Avg@k") as told:
        read = data.read_samples(path)
    assert len(told) == 1
    assert [(s.question, s.answers) for s in read] == [("q0", ("0",)), ("q1", ("1",)), ("q2", ("2",))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert data.read_samples(path, 2) == read[:2]  # of the problems, not of the rows


@pytest.mark.filterwarnings("error")
def test_B78_two_problems_with_one_text_stay_two(tmp_path):
    rows = [{"id": i, "question": "q", "answer": "7"} for i in range(2)] + [{"id": 2, "question": "r", "answer": "7"}]
    assert len(data.read_samples(write(tmp_path, lines(*rows)))) == 3
    assert (
        len(data.read_samples(write(tmp_path, lines(*({k: r[k] for k in ("question", "answer")} for r in rows))))) == 3
    )


def test_some_repeated_rows_are_told_as_such(tmp_path):
    rows = [ROW | {"id": i} for i in (0, 1, 1, 1, 2)]
    with pytest.warns(UserWarning, match="1 of 3 problems stand up to 3 times"):
        assert len(data.read_samples(write(tmp_path, lines(*rows)))) == 3


def test_sets_of_one_file_that_number_their_rows_alike_keep_apart(tmp_path):
    rows = [
        {"data_source": source, "question": question, "answer": "7"} | more
        for source, question, more in [
            ("aime", "q", {"extra_info": {"index": 0}}),
            ("org/amc", "r", {"extra_info": {"index": 0}}),
            ("nq", "s", {"id": "test_0"}),
            ("tq", "t", {"id": "test_0"}),
            ("musique", "u", {"id": "musique_9"}),
        ]
    ]
    read = data.read_samples(write(tmp_path, lines(*rows)))
    assert [s.id for s in read] == ["aime-0", "amc-0", "nq-test_0", "tq-test_0", "musique_9"]
    assert [s.family for s in read] == ["aime", "amc", "nq", "tq", "musique"]


def test_unanswerable_rows_are_left_out_and_counted(tmp_path):
    """MuSiQue-Full has the twin under the same id."""
    twin = ROW | {"question": "other words", "answerable": False}
    path = write(tmp_path, lines(twin, ROW | {"answerable": True}))
    with pytest.warns(UserWarning, match="1 of 2 rows are marked unanswerable"):
        assert [s.question for s in data.read_samples(path)] == ["Who?"]
    with (
        pytest.raises(data.DataError, match="none of its rows can be used"),
        pytest.warns(UserWarning, match="1 of 1 rows are marked unanswerable"),
    ):
        data.read_samples(write(tmp_path, lines(twin)))


def test_bad_rows_are_skipped_only_when_asked_and_never_silently(tmp_path):
    good = [ROW | {"id": i} for i in range(3)]
    path = write(
        tmp_path,
        lines(good[0])
        + "{broken\n"
        + lines(good[1], ROW | {"id": "x", "answers": []}, ROW | {"id": 0, "question": "other"}, good[2])
        + '"text"\n'
        + '{"id": 9, "question": "\\ud800", "answers": ["x"]}\n',
    )
    with pytest.raises(data.DataError, match=":2: not JSON"):
        data.read_samples(path)
    with pytest.warns(UserWarning, match=r"5 rows cannot be used and were left out; the first: .*:2: not JSON") as told:
        assert [s.id for s in data.read_samples(path, on_bad_row="skip")] == ["0", "1", "2"]
    assert len(told) == 1
    with pytest.raises(ConfigError, match="on_bad_row must be one of error, skip; got 'ignore'"):
        data.read_samples(path, on_bad_row="ignore")
    nothing = write(tmp_path, '{"id": 1}\n')
    with (
        pytest.raises(data.DataError, match=r"none of its rows can be used; .*:1: sample '1' has no question"),
        pytest.warns(UserWarning, match="1 rows cannot be used"),
    ):
        data.read_samples(nothing, on_bad_row="skip")


def test_skipped_rows_keep_the_numbers_of_the_others(tmp_path):
    path = write(tmp_path, '{"question": "a", "answer": "x"}\n{broken\n{"question": "b", "answer": "x"}\n')
    with pytest.warns(UserWarning, match="1 rows"):
        assert [s.id for s in data.read_samples(path, on_bad_row="skip")] == ["row-1", "row-3"]


def test_aliases_of_2wiki_join_the_golds(tmp_path):
    names = [{"Q_id": "Q30", "aliases": ["US", "Ada"], "demonyms": ["American"]}, {"Q_id": "Q9", "aliases": []}]
    aliases = write(tmp_path, lines(*names), "id_aliases.json")
    rows = [ROW | {"answer_id": "Q30"}, ROW | {"id": "b", "answer_id": None}, ROW | {"id": "c", "answer_id": "Q9"}]
    path = write(tmp_path, lines(*rows))
    assert [s.answers for s in data.read_samples(path)] == [("Ada",)] * 3
    assert [s.answers for s in data.read_samples(path, aliases=aliases)] == [
        ("Ada", "US", "American"),
        ("Ada",),
        ("Ada",),
    ]
    with pytest.warns(UserWarning, match="no row has an answer_id that the alias file knows"):
        data.read_samples(write(tmp_path, lines(ROW)), aliases=aliases)
    with pytest.raises(data.DataError, match="no Q_id"):
        data.read_samples(path, aliases=path)


def test_counts_that_are_not_stated_are_not_written(tmp_path):
    """Files written before samples had them stay the same byte for byte."""
    path = tmp_path / "s.jsonl"
    data.write_samples(path, [Sample("a", "q", ("x",), "f", "g"), Sample("b", "q", ("0",), hops=2, facts=3)])
    assert path.read_bytes() == (
        b'{"id": "a", "question": "q", "answers": ["x"], "family": "f", "family_group": "g"}\n'
        b'{"id": "b", "question": "q", "answers": ["0"], "family": "", "family_group": "", "hops": 2, "facts": 3}\n'
    )
    assert [(s.hops, s.facts) for s in data.read_samples(path)] == [(0, 0), (2, 3)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lines(ROW, {"question": "Who?", "answers": ["x"]}), "file.jsonl:2: no id"),
        (lines({"id": "a", "answers": ["x"]}), "file.jsonl:1: sample 'a' has no question"),
        (lines(ROW | {"question": "  "}), "sample 'a' has no question"),
        (
            lines(ROW, ROW | {"question": "Where?"}),
            "file.jsonl:2: id 'a' was already used at .*file.jsonl:1 with another q",
        ),
        (
            lines(ROW, ROW | {"answers": ["Bob"]}),
            "file.jsonl:2: id 'a' was already used at .*file.jsonl:1 with other an",
        ),
        (lines(ROW) + '{"id": "b",\n', "file.jsonl:2: not JSON"),
        ("Who?,Ada\n", "file.jsonl:1: not JSON"),
        (lines(ROW) + '"text"\n', "file.jsonl:2: expected a JSON object, got str"),
        ('[{"id": "a"},\n oops]', "file.jsonl:2: not a JSON list"),
        (
            '[{"question": "q", "answers": ["x"]}, {"id": 1, "question": "r", "answers": ["x"]}]',
            r"file.jsonl\[1\]: no id",
        ),
        (b'{"id": "\xff"}\n', "not UTF-8"),
        ("[]", "holds an empty list"),
        ("", "is empty; expected JSON lines"),
        ("\n \n", "is empty; expected JSON lines"),
    ],
)
def test_bad_files_are_refused_in_one_line(tmp_path, content, message):
    with pytest.raises(ConfigError, match=message) as error:
        data.read_samples(write(tmp_path, content))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.txt", "a"])
def test_container_is_known_by_content_not_suffix(tmp_path, name):
    rows = [ROW, ROW | {"id": "b", "question": "Où ?"}]
    as_lines = data.read_samples(write(tmp_path, "\ufeff" + lines(*rows), name))
    as_list = data.read_samples(write(tmp_path, "\ufeff \n" + json.dumps(rows, indent=1), name))
    one_line = data.read_samples(write(tmp_path, json.dumps(rows, ensure_ascii=False), name))
    assert as_lines == as_list == one_line
    assert [s.id for s in as_lines] == ["a", "b"]
    assert as_lines[1].question == "Où ?"


def test_limit_takes_the_first_and_zero_all(tmp_path):
    path = write(tmp_path, lines(*(ROW | {"id": str(i)} for i in range(5))))
    assert [s.id for s in data.read_samples(path, 2)] == ["0", "1"]
    assert len(data.read_samples(path, 9)) == len(data.read_samples(path)) == 5


def test_missing_file_suggests_the_nearest_name(tmp_path):
    write(tmp_path, lines(ROW), "train.jsonl")
    with pytest.raises(ConfigError, match=r"no such file: .*trian.jsonl; did you mean .*train\.jsonl"):
        data.read_samples(tmp_path / "trian.jsonl")
    with pytest.raises(ConfigError, match="there is no folder"):
        data.read_samples(tmp_path / "nowhere" / "train.jsonl")
    with pytest.raises(ConfigError, match="its path is empty"):
        data.read_samples("")
    with pytest.raises(ConfigError, match="is a folder"):
        data.read_samples(tmp_path)


texts = st.text(min_size=1).map(str.strip).filter(bool)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(texts, texts, st.lists(texts, min_size=1, unique=True)),
        min_size=1,
        unique_by=lambda r: r[0],
    )
)
def test_written_samples_are_read_back_equal(tmp_path_factory, rows):
    written = [Sample(i, q, tuple(a), "family", "group", len(q) % 4, len(a) % 3) for i, q, a in rows]
    path = tmp_path_factory.mktemp("data") / "new" / "s.jsonl"
    data.write_samples(path, written)
    assert data.read_samples(path) == written
    assert [p.name for p in path.parent.iterdir()] == ["s.jsonl"]


def test_a_failed_write_keeps_the_old_file(tmp_path):
    path = tmp_path / "s.jsonl"
    data.write_samples(path, samples(2))

    def broken():
        yield samples(1)[0]
        raise OSError(28, "No space left on device")

    with pytest.raises(ConfigError, match="No space left"):
        data.write_samples(path, broken())
    assert data.read_samples(path) == samples(2)
    with pytest.raises(ConfigError, match="cannot write"):
        data.write_samples(path / "below-a-file.jsonl", samples(1))


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 12), st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(0, 3))
def test_B102_every_sample_is_drawn_once_per_epoch_whatever_the_batch_sizes(size, batches, seed):
    sampler = PromptSampler(samples(size), seed)
    drawn = []
    for n in batches:
        batch = sampler.next(n)
        assert len(batch) == n
        drawn += [sample.id for sample in batch]
    for start in range(0, len(drawn), size):
        epoch = drawn[start : start + size]
        assert len(set(epoch)) == len(epoch)


def test_epochs_and_seeds_have_their_own_order():
    first, second = PromptSampler(samples(50), 0), PromptSampler(samples(50), 1)
    epochs = [first.next(50), first.next(50), second.next(50)]
    assert len({tuple(s.id for s in epoch) for epoch in epochs}) == 3
    assert PromptSampler(samples(50), 0).next(50) == epochs[0]


@pytest.mark.parametrize("stop", range(13))
def test_B99_resume_draws_what_the_uninterrupted_run_draws(stop):
    """Six batches per epoch; saving after batch 6 is the epoch boundary."""
    whole = PromptSampler(samples(12), 3)
    expected = [whole.next(2) for _ in range(12)]
    interrupted = PromptSampler(samples(12), 3)
    got = [interrupted.next(2) for _ in range(stop)]
    state = json.loads(json.dumps(interrupted.state_dict()))
    resumed = PromptSampler(samples(12), 3)
    resumed.next(5)  # whatever it did before, the state decides
    resumed.load_state_dict(state)
    got += [resumed.next(2) for _ in range(12 - stop)]
    assert got == expected
    assert sorted(s.id for batch in got[6:] for s in batch) == sorted(s.id for s in samples(12))


def test_resume_refuses_other_data_or_another_seed():
    state = PromptSampler(samples(12), 3).state_dict()
    with pytest.raises(ConfigError, match="the samples of the saved run differ"):
        PromptSampler(samples(11), 3).load_state_dict(state)
    with pytest.raises(ConfigError, match="the samples of the saved run differ"):
        PromptSampler(samples(12)[::-1], 3).load_state_dict(state)
    with pytest.raises(ConfigError, match="the seed of the saved run differ"):
        PromptSampler(samples(12), 4).load_state_dict(state)


def test_sampler_refuses_nothing_and_no_samples():
    with pytest.raises(ValueError, match="at least one"):
        PromptSampler(samples(3), 0).next(0)
    with pytest.raises(ConfigError, match="no training samples"):
        PromptSampler([], 0)


def test_subset_is_nested_ordered_and_seeded():
    every = samples(20)
    small, large = data.subset(every, 5, 7), data.subset(every, 11, 7)
    assert len(small) == 5 and len(large) == 11 and set(small) < set(large)
    assert small == sorted(small, key=every.index)
    assert small == data.subset(every, 5, 7) != data.subset(every, 5, 8)
    assert data.subset(every, 0, 7) == every == data.subset(every, 20, 7)
    with pytest.raises(ConfigError, match="21 samples asked for, the data has 20"):
        data.subset(every, 21, 0)


def test_B111_overlap_and_leaked_golds_are_counted():
    train = [Sample("a", "Who wrote  'Emma'?", ("Jane",)), Sample("b", "What is 3 + 4? Answer: 7", ("7",))]
    test = [Sample("x", "who wrote emma", ("Jane",)), Sample("y", "Is no in Norway?", ("no",))]
    assert data.shared_questions(train, test) == ["a"]
    assert data.shared_questions(test, train) == ["x"]
    assert data.golds_in_questions(train + test) == ["b"]
    assert data.golds_in_questions([Sample("z", "Is Norway big?", ("Nor", "!!!"))]) == []  # whole words only


def test_new_folder_is_whole_or_absent(tmp_path):
    target = tmp_path / "deep" / "out"
    with data.new_folder(target) as part:
        (part / "file").write_text("x")
        assert not target.exists()
    assert [p.name for p in target.iterdir()] == ["file"]
    with pytest.raises(ConfigError, match="already exists and is left as it is"), data.new_folder(target):
        pytest.fail("must refuse before any work")
    with pytest.raises(RuntimeError), data.new_folder(tmp_path / "other"):
        raise RuntimeError
    with pytest.raises(ConfigError, match="No space left"), data.new_folder(tmp_path / "full"):
        raise OSError(28, "No space left on device")
    with pytest.raises(ConfigError, match="cannot write"), data.new_folder(target / "file" / "below"):
        pytest.fail("must refuse before any work")
    assert {p.name for p in tmp_path.iterdir()} == {"deep"}
    assert (target / "file").read_text() == "x"


@needs_shared
def test_real_files_are_read_whole():
    counts = {
        "qa/hotpotqa_dev_paras": 685,
        "qa/musique_dev_1000": 1000,
        "qa/2wiki_dev_1000": 1000,
        "qa/bamboogle": 125,
        "qa/frames": 824,
        "qa/morehopqa_150": 150,
        "train/hotpotqa_train_paras_100": 100,
        "train/r1searcher_stage2": 8148,
        "math/aime25": 30,
        "math/olympiadbench": 675,
    }
    for name, count in counts.items():
        path = SHARED / f"{name}.jsonl"
        if path.is_file():
            read = data.read_samples(path)
            assert len(read) == count, name
            assert all(s.question == s.question.strip() and s.question and all(s.answers) for s in read), name


@needs_shared
def test_real_overlap():
    train = data.read_samples(SHARED / "train/hotpotqa_train_paras_100.jsonl")
    dev = data.read_samples(SHARED / "qa/hotpotqa_dev_paras.jsonl")
    assert data.shared_questions(train, dev) == []
    assert {s.family for s in dev} == {"bridge", "comparison"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"id": "a", "question": "x \\ud800 y", "answers": ["z"]}\n', ":1: holds half of a surrogate pair"),
        ('{"a":' * 100_000 + "\n", ":1: brackets nested too deeply"),
        ("[" * 100_000, "brackets nested too deeply"),
    ],
)
def test_what_no_reader_can_take_is_told_with_its_line(tmp_path, text, message):
    (tmp_path / "x.jsonl").write_text(text)
    with pytest.raises(data.DataError, match=message):
        data.read_samples(tmp_path / "x.jsonl")
