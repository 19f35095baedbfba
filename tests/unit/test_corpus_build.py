"""The paper's corpus: supporting passages of every layout, whole files, and a seeded sample of a dump.

Must fail if a passage that supports nothing gets in, a repeated one is written twice, the sample depends on anything
but dump and seed, or half a file is left behind.
"""

import bz2
import fcntl
import gzip
import hashlib
import json
import tracemalloc
from pathlib import Path

import pytest

from hiexp.config import ConfigError
from hiexp.corpus_build import CorpusConfig, build_corpus
from hiexp.data import DataError
from hiexp.passages import read_corpus
from hiexp.search import corpus_hash
from hiexp.search_cli import main


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def files(tmp_path):
    hotpot = {
        "_id": "h1",
        "question": "Who?",
        "supporting_facts": [["A", 0], ["B", 1]],
        "context": [["A", ["a one.", " a two."]], ["B", ["b."]], ["N", ["noise."]]],
    }
    musique = {
        "id": "m1",
        "question": "Who?",
        "paragraphs": [
            {"title": "A", "paragraph_text": "a one. a two.", "is_supporting": True},
            {"title": "M", "paragraph_text": "m.", "is_supporting": True},
            {"title": "N", "paragraph_text": "noise.", "is_supporting": False},
        ],
    }
    by_id = {"id": "w1", "question": "Who?", "supporting_ids": ["p2"]}
    dump = ["id\ttext\ttitle"] + [f"{i}\ttext {i}\tD{i}" for i in range(50)]
    (tmp_path / "dump.tsv").write_text("\n".join(dump) + "\n")
    return {
        "hotpot": write(tmp_path / "hotpot.json", [hotpot]),
        "musique": write(tmp_path / "musique.json", [musique]),
        "by_id": write(tmp_path / "by_id.json", [by_id]),
        "pool": write(tmp_path / "pool.jsonl", [{"id": f"p{i}", "title": f"P{i}", "text": f"p {i}"} for i in range(4)]),
        "articles": write(
            tmp_path / "articles.jsonl", [{"id": "f", "title": "F", "text": " ".join(f"w{i}" for i in range(250))}]
        ),
        "dump": str(tmp_path / "dump.tsv"),
    }


def config(tmp_path, files, name="out.jsonl", **changes):
    given = {
        "out": str(tmp_path / name),
        "supporting": (files["hotpot"], files["musique"], files["by_id"]),
        "pool": (files["pool"],),
        "whole": (files["articles"],),
        "dump": (files["dump"],),
        "sample": 10,
    }
    return CorpusConfig(**given | changes)


def rows(path):
    return [json.loads(line) for line in open(path, encoding="utf-8")]  # noqa: PTH123


def test_the_corpus_is_what_supports_what_is_whole_and_a_sample(tmp_path, files):
    cfg = config(tmp_path, files)
    manifest = build_corpus(cfg)
    found = rows(cfg.out)
    assert [row["id"] for row in found[:7]] == ["h1:0", "h1:1", "m1:1", "p2", "f#0", "f#1", "f#2"]
    assert found[0] == {"id": "h1:0", "title": "A", "text": "a one. a two."}
    drawn = [int(row["id"]) for row in found[7:]]
    assert len(set(drawn)) == 10 and drawn == sorted(drawn) and all(0 <= i < 50 for i in drawn)
    assert [(part["as"], part["passages"], part["repeated"]) for part in manifest["parts"]] == [
        ("supporting", 2, 0), ("supporting", 1, 1), ("supporting", 1, 0), ("whole", 3, 0), ("dump", 10, 0),
    ]  # fmt: skip
    assert (manifest["passages"], manifest["repeated"], manifest["cut"]) == (17, 1, 1)
    assert manifest["corpus"] == corpus_hash([cfg.out])
    assert manifest["sha256"] == hashlib.sha256((tmp_path / "out.jsonl").read_bytes()).hexdigest()
    assert json.loads((tmp_path / "out.jsonl.manifest.json").read_text()) == json.loads(json.dumps(manifest))
    assert [key for key, _ in read_corpus([cfg.out])] == [row["id"] for row in found]


def test_the_sample_depends_on_dump_and_seed_alone_and_grows_with_its_size(tmp_path, files):
    def drawn(name, **changes):
        only = {"supporting": (), "whole": ()}
        cfg = config(tmp_path, files, name, **only | changes)
        build_corpus(cfg)
        return [row["id"] for row in rows(cfg.out)]

    ten = drawn("a")
    assert drawn("b") == ten and drawn("c", seed=43) != ten and len(drawn("d", sample=0)) == 50
    assert set(ten) < set(drawn("e", sample=30))
    everything = config(tmp_path, files, "f")
    build_corpus(everything)
    assert [row["id"] for row in rows(everything.out)][-10:] == ten
    counts = [0] * 50
    for seed in range(200):
        for key in drawn(f"s{seed}", seed=seed):
            counts[int(key)] += 1
    assert min(counts) >= 15 and max(counts) <= 70  # each is drawn about 40 times of 200


def test_a_dump_of_several_files_is_one(tmp_path, files):
    lines = (tmp_path / "dump.tsv").read_text().splitlines(keepends=True)
    (tmp_path / "d1").write_text("".join(lines[:21]))
    (tmp_path / "d2").write_text("".join([lines[0], *lines[21:]]))
    whole, halves = config(tmp_path, files, "a"), config(tmp_path, files, "b")
    halves = CorpusConfig(**vars(halves) | {"dump": (str(tmp_path / "d1"), str(tmp_path / "d2"))})
    assert build_corpus(whole)["corpus"] == build_corpus(halves)["corpus"]


def test_nothing_is_left_behind_or_overwritten(tmp_path, files):
    cfg = config(tmp_path, files)
    for changes, error, message in (
        ({"sample": 51}, ConfigError, "the dump has 50 passages"),
        ({"pool": ()}, DataError, r"by_id\.json:1: supporting passage 'p2' is in no file of pool"),
        ({"whole": (str(tmp_path / "nowhere"),)}, ConfigError, "no such file"),
    ):
        with pytest.raises(error, match=message):
            build_corpus(CorpusConfig(**vars(cfg) | changes))
        assert not list(tmp_path.glob("out.jsonl*"))
    build_corpus(cfg)
    with pytest.raises(ConfigError, match="already exists"):
        build_corpus(cfg)
    for changes, message in (
        ({"supporting": (), "whole": (), "dump": ()}, "nothing to take"),
        ({"seed": -1}, "seed=-1"),
    ):
        with pytest.raises(ConfigError, match=message):
            CorpusConfig(**vars(cfg) | changes)


def test_two_runs_to_one_file_do_not_mix(tmp_path, files):
    """The second is told so while the first is writing, also if it opened the file before it got its name."""
    cfg = config(tmp_path, files)
    expected = build_corpus(config(tmp_path, files, "alone.jsonl"))
    part = tmp_path / "out.jsonl.part"
    with part.open("ab") as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        first.write(b"mine")
        first.flush()
        with pytest.raises(ConfigError, match="another process is writing"):
            build_corpus(cfg)
        assert part.read_bytes() == b"mine" and not (tmp_path / "out.jsonl").exists()
    assert build_corpus(cfg)["sha256"] == expected["sha256"], "what a killed run left is written anew"
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "alone.jsonl").read_bytes() and not part.exists()


@pytest.mark.parametrize("how", ["done", "failed, and a third began"])
def test_a_run_that_comes_just_as_the_other_ends_leaves_its_file_alone(tmp_path, files, monkeypatch, how):
    cfg, flock = config(tmp_path, files), fcntl.flock
    part, out = tmp_path / "out.jsonl.part", tmp_path / "out.jsonl"
    theirs = out if how == "done" else part

    def late(file, flags):  # what the others do between our opening and our claim
        part.rename(tmp_path / "gone")
        theirs.write_bytes(b"whole")
        flock(file, flags)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(ConfigError, match="another process is writing"):
        build_corpus(cfg)
    assert theirs.read_bytes() == b"whole"


@pytest.mark.parametrize("seed", range(4))
def test_a_clash_of_ids_does_not_depend_on_the_draw_and_has_a_remedy(tmp_path, files, seed):
    """Wikipedia dumps and Search-R1's corpora both count from 0."""
    articles = write(tmp_path / "search_r1.jsonl", [{"id": "7", "title": "S", "text": "s"}])
    changes = {"whole": (articles,), "sample": 1, "seed": seed}
    dump = files["dump"]
    with pytest.raises(DataError) as error:
        build_corpus(config(tmp_path, files, **changes))
    assert f"{dump}:9: passage id '7' is used before, with another text, in {articles}; ids=file" in str(error.value)
    assert build_corpus(config(tmp_path, files, **changes | {"ids": "file", "sample": 0}))["passages"] == 4 + 1 + 50
    found = {row["id"]: row["title"] for row in rows(tmp_path / "out.jsonl")}
    assert (found["search_r1:7"], found["dump:7"]) == ("S", "D7") and "p2" in found


def test_a_clash_within_the_dump_is_found_whatever_is_drawn(tmp_path, files):
    more = write(tmp_path / "more.jsonl", [{"id": "3", "title": "M", "text": "m"}, {"id": "x", "text": "y"}])
    dump = (files["dump"], more)
    with pytest.raises(DataError, match=r"more.jsonl:1: passage id '3' is used before, .* in .*dump.tsv; ids=file"):
        build_corpus(config(tmp_path, files, dump=dump, sample=1))
    assert build_corpus(config(tmp_path, files, dump=dump, sample=1, ids="file"))["parts"][-2:]


def test_a_file_that_marks_nothing_as_supporting_is_refused(tmp_path, files):
    for text in (json.dumps({"id": "1", "text": "x"}), json.dumps({"id": "1", "question": "Who?", "answer": "x"})):
        plain = tmp_path / "plain.jsonl"
        plain.write_text(text + "\n")
        with pytest.raises(ConfigError, match=r"plain.jsonl marks nothing as supporting"):
            build_corpus(config(tmp_path, files, supporting=(files["hotpot"], str(plain))))
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("pack", [gzip.open, bz2.open])
def test_packed_files_of_questions_are_read(tmp_path, files, pack):
    packed = {}
    for name in ("hotpot", "musique", "by_id"):
        packed[name] = str(tmp_path / f"{name}.packed")
        with pack(packed[name], "wb") as file:
            file.write(Path(files[name]).read_bytes())
    build_corpus(config(tmp_path, files, "plain.jsonl"))
    build_corpus(config(tmp_path, files | packed))
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "plain.jsonl").read_bytes()


def test_a_list_of_questions_takes_the_memory_of_one_of_them(tmp_path, files):
    question = json.loads(Path(files["musique"]).read_text())
    big = [question | {"id": str(i), "pad": "x" * 5000} for i in range(2000)]
    path = tmp_path / "big.json"
    path.write_text(json.dumps(big))
    tracemalloc.start()
    build_corpus(config(tmp_path, files, supporting=(str(path),), dump=()))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < path.stat().st_size


def test_the_manifest_counts_the_texts_that_were_drawn(tmp_path, files):
    long = tmp_path / "long.tsv"
    long.write_text("".join(f"{i}\t{' '.join(f'w{n}' for n in range(400))} {i}\tD{i}\n" for i in range(20)))
    manifest = build_corpus(config(tmp_path, files, supporting=(), whole=(), dump=(str(long),), sample=0))
    assert (manifest["records"], manifest["cut"]) == (20, 20)
    some = build_corpus(config(tmp_path, files, "some.jsonl", supporting=(), whole=(), dump=(str(long),), sample=5))
    texts = {row["id"].split("#")[0] for row in rows(tmp_path / "some.jsonl")}
    assert some["records"] == some["cut"] == len(texts)


@pytest.mark.parametrize("which", ["supporting", "whole", "dump"])
def test_what_is_wrong_with_a_source_is_not_blamed_on_the_output(tmp_path, files, which):
    path = tmp_path / "damaged.bz2"
    path.write_bytes(bz2.compress(Path(files["hotpot"]).read_bytes())[:20] + b"\0" * 200)
    with pytest.raises(ConfigError, match=r"damaged.bz2 is damaged or cut off"):
        build_corpus(config(tmp_path, files, **{which: (str(path),)}))


def test_the_command(tmp_path, files, capsys):
    words = [f"supporting=[{files['hotpot']}]", f"dump=[{files['dump']}]", "sample=5", f"out={tmp_path / 'o.jsonl'}"]
    assert main(["corpus", *words]) == 0
    assert "7 passages" in capsys.readouterr().out and len(rows(tmp_path / "o.jsonl")) == 7
    assert main(["corpus", *words]) == 2 and "already exists" in capsys.readouterr().err
    assert main([]) == 0 and "recall" in capsys.readouterr().out
    index = [f"out={tmp_path / 'i'}", f"corpus=[{tmp_path / 'o.jsonl'}]", "encoder.kind=hash", "backend=hybrid"]
    assert main(["index", *index]) == 0
    assert "kind flat, storage float16" in capsys.readouterr().out
