"""The paper's corpus: supporting passages of every layout, whole files, and a seeded sample of a dump.

Must fail if a passage that supports nothing gets in, a repeated one is written twice, the sample depends on anything
but dump and seed, or half a file is left behind.
"""

import hashlib
import json

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


def test_the_command(tmp_path, files, capsys):
    words = [f"supporting=[{files['hotpot']}]", f"dump=[{files['dump']}]", "sample=5", f"out={tmp_path / 'o.jsonl'}"]
    assert main(["corpus", *words]) == 0
    assert "7 passages" in capsys.readouterr().out and len(rows(tmp_path / "o.jsonl")) == 7
    assert main(["corpus", *words]) == 2 and "already exists" in capsys.readouterr().err
    assert main([]) == 0 and "recall" in capsys.readouterr().out
    index = [f"out={tmp_path / 'i'}", f"corpus=[{tmp_path / 'o.jsonl'}]", "encoder.kind=hash", "backend=hybrid"]
    assert main(["index", *index]) == 0
    assert "kind flat, storage float16" in capsys.readouterr().out
