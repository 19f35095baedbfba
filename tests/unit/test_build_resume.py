"""build_hek.py itself, killed at many points and started again by the same command.

Every run is a process of its own; the policy is a script whose every call is written to a file, so that what was asked
twice shows. Must fail if a reply or a rollout is used before it is on disk, if a batch changes its members on resuming,
or if anything of the interruption gets into the HEK.
"""

import json
import multiprocessing
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from endpoint import serve
from support import build_byte_tokenizer, build_tiny_model

from hiexp.assemble import Config
from hiexp.checkpoint import save_policy
from hiexp.config import load
from hiexp.data import Sample, write_samples
from hiexp.hek_stages import estimate
from hiexp.resume import folder_hash

pytestmark = pytest.mark.slow
FAMILIES = ("who founded the first label of a band", "when was the second film of a city made")
QUESTIONS = 16


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    place = tmp_path_factory.mktemp("build")
    write_samples(place / "train.jsonl", [Sample(f"s{i}", f"what is n{i} ?", ("Oslo",)) for i in range(QUESTIONS)])
    (place / "corpus.jsonl").write_text(json.dumps({"id": "1", "title": "a", "text": "b"}) + "\n")
    save_policy(build_tiny_model(), build_byte_tokenizer(chat=False), place / "model")
    return [
        "configs/lab.yaml",
        f"model.path={place / 'model'}",
        f"data.train={place / 'train.jsonl'}",
        f"search.corpus=[{place / 'corpus.jsonl'}]",
        "encoder.kind=hash",
        "encoder.path=",
        "build.questions=0",
        "build.rollouts_per_question=4",
        "build.threshold_1=0.6",
        "build.threshold_2=-0.5",
        "build.tokens_per_batch=1200",
        "build.max_new_tokens=200",
    ]


def written(prompt: str, seed: int) -> str:
    """A lesson; a third of the seeds give none, so that replies are rejected and asked for again."""
    if seed % 3 == 0:
        return "I cannot say."
    if "<reflect>" in prompt:
        number = int(prompt.split("what is n")[1].split()[0])
        return json.dumps({"title": f"{FAMILIES[number % 2]} {'so ' * (seed % 2)}".strip(), "description": f"d{seed}"})
    title = FAMILIES["film" in prompt] if "level : 2" in prompt else "any question"
    return json.dumps({"title": title, "description": f"shared {seed}"})


class Policy:
    """Answers rightly or wrongly by its seed, and notes what it was asked when it has answered a whole batch."""

    version, max_length, streams, exact_logprobs = 0, 4096, False, True

    def __init__(self, tokenizer: Any, notes: Path) -> None:
        self.tokenizer, self.notes, self.rows = tokenizer, notes, []

    def submit(self, key: Any, prompt_ids: list[int], max_tokens: int, sampling: Any) -> None:
        self.rows.append((key, prompt_ids, sampling.seed))

    def step(self) -> list[Any]:
        from hiexp.engine import Completion

        done, lines, crowd = [], [], len(self.rows)
        for key, ids, seed in self.rows:
            prompt = self.tokenizer.decode(ids)
            is_lesson = "<reflect>" in prompt or "<abstract>" in prompt
            # a reply that shows with how many it was asked: any other batch would give another HEK
            text = written(prompt, seed) if is_lesson else f"<answer> {'Oslo' if seed % 2 else 'Rome'} </answer>"
            text = text.replace('description": "', f'description": "of {crowd} ')
            out = tuple(self.tokenizer.encode(text, add_special_tokens=False))
            done.append((key, Completion(out, (-0.25,) * len(out), "stop")))
            lines.append(json.dumps([prompt, seed]) + "\n")
        self.rows = []
        with self.notes.open("a") as file:
            file.writelines(lines)
        return done

    def forget(self, keys: Any) -> None:
        pass


def child(arguments: list[str], notes: str, kill: tuple[str, int], errors: str) -> None:
    import build_hek
    from hiexp import api_client, assemble, hek_stages, journal
    from hiexp.config import run_script

    sys.stderr = Path(errors).open("a", buffering=1)  # noqa: SIM115 (for the life of the process)
    where, at = kill
    writes = 0
    to_file: Counter[str] = Counter()

    def append(path: Path, data: bytes) -> int:
        nonlocal writes
        writes += 1
        to_file[path.name] += 1
        if (where, at) == ("before a write", writes):
            os.kill(os.getpid(), signal.SIGKILL)
        if (where, at) == ("inside a write", writes):
            inner(path, data[: len(data) * 2 // 3])
            os.kill(os.getpid(), signal.SIGKILL)
        end = inner(path, data)
        if (where, at) in (("after a write", writes), (f"after a write to {path.name}", to_file[path.name])):
            os.kill(os.getpid(), signal.SIGKILL)
        return end

    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def start_engine(agent: Any, *_: Any) -> Any:
        agent.engine = Policy(agent.tokenizer, Path(notes))
        return agent.engine

    inner, journal._append = journal._append, append
    hek_stages.start_engine, hek_stages.engine_only = start_engine, lambda cfg: (None, None)
    hek_stages.ROLLOUTS_AT_ONCE = assemble.ROLLOUTS_AT_ONCE = 16
    api_client.FIRST_PAUSE = 0.01
    plant(where, die)
    code = run_script(build_hek.main, Config, arguments, "")
    sys.stdout.flush()
    os._exit(code)


def plant(where: str, die: Any) -> None:
    """Death inside a stage that writes no journal."""
    import build_hek
    from hiexp import experience, hek_build, journal

    def half_a_vector(file: Any, rows: Any) -> None:
        file.write(rows.tobytes()[: rows.nbytes // 2])
        file.flush()
        die()

    def half_a_store(folder: Path, *parts: Any) -> None:
        write(folder, *parts)
        (folder / "header.json").unlink()
        die()

    write = experience._write
    if where == "in the embedding":
        journal.np = SimpleNamespace(load=np.load, save=half_a_vector)
    elif where == "before a vector has its name":
        journal.np = SimpleNamespace(load=np.load, save=lambda file, rows: (np.save(file, rows), die()))
    elif where == "in the clustering":
        hek_build.cluster = die
    elif where == "in the saving":
        experience._write = half_a_store
    elif where == "before the store has its name":
        experience._swap = die
    elif where == "before the page":
        build_hek.write_build_page = die
    elif where == "before the summary":
        build_hek.finish_run = die


def start(arguments: list[str], notes: Path, where: str = "", at: int = 0) -> int:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["build_hek", "torch", "transformers"])
    process = context.Process(target=child, args=(arguments, str(notes), (where, at), f"{notes}.err"))
    process.start()
    process.join(120)
    assert process.exitcode is not None
    return process.exitcode


def calls(notes: Path) -> Counter[str]:
    return Counter(notes.read_text().splitlines())


@pytest.fixture(scope="module")
def whole(settings, tmp_path_factory):
    """The HEK of a build that nothing interrupted, and its calls."""
    place = tmp_path_factory.mktemp("whole")
    assert start([*settings, f"out={place / 'run'}"], place / "notes") == 0
    assert not (place / "run/kept/rollouts.jsonl").exists()
    header = json.loads((place / "run/hek/header.json").read_text())
    assert (
        all(header["counts"][level] > 0 for level in "123")
        and header["settings"]["report"]["replies"]["1"]["no_object"]
    )
    return folder_hash(place / "run/hek"), calls(place / "notes"), (place / "run/trajectories.jsonl").read_bytes()


@pytest.mark.parametrize("step", [1, 2, 3])
def test_killed_again_and_again_after_a_write_it_repeats_no_call(settings, whole, tmp_path, step):
    """After each `step` things that were kept (parts of rollouts, batches of replies, clusterings) the process dies."""
    out, notes, kills = tmp_path / "run", tmp_path / "notes", 0
    while (code := start([*settings, f"out={out}"], notes, "after a write", step)) == -signal.SIGKILL:
        kills += 1
    assert code == 0 and kills >= 12 // step
    assert calls(notes) == whole[1]
    assert (folder_hash(out / "hek"), (out / "trajectories.jsonl").read_bytes()) == (whole[0], whole[2])


@pytest.mark.parametrize("where", ["before a write", "inside a write"])
def test_killed_around_a_write_it_repeats_that_batch_alone(settings, whole, tmp_path, where):
    out, notes = tmp_path / "run", tmp_path / "notes"
    for at in (2, 3, 4, 2):  # in the rollouts, then in the first batches of reflections
        before = len(notes.read_text().splitlines()) if notes.exists() else 0
        assert start([*settings, f"out={out}"], notes, where, at) == -signal.SIGKILL
        assert len(notes.read_text().splitlines()) > before
    assert start([*settings, f"out={out}"], notes) == 0
    assert folder_hash(out / "hek") == whole[0]
    repeated = calls(notes) - whole[1]
    assert set(calls(notes)) == set(whole[1]) and 4 <= sum(repeated.values()) <= 4 * 16


def test_killed_with_the_hek_written_and_no_summary(settings, whole, tmp_path):
    out, notes = tmp_path / "run", tmp_path / "notes"
    assert start([*settings, f"out={out}"], notes, "before the summary") == -signal.SIGKILL
    assert (out / "hek").exists() and not (out / "summary.json").exists()
    assert start([*settings, f"out={out}"], notes) == 0
    assert folder_hash(out / "hek") == whole[0] and calls(notes) == whole[1]
    assert start([*settings, f"out={out}"], notes) == 2, "a finished run is left alone"
    assert "holds a finished run" in Path(f"{notes}.err").read_text()


def test_a_teacher_behind_an_endpoint_is_asked_once_for_each_reply(settings, tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    hashes = []
    with serve(
        lambda prompt, seed, n: (503, {"Retry-After": "0"}, "") if n == 1 else written(prompt, seed)
    ) as endpoint:
        teacher = [*settings, f"build.reflector.url={endpoint.url}", "build.reflector.model=big"]
        for name, kill in (("whole", ()), ("cut", ("after a write", 6))):
            endpoint.answered.clear()
            endpoint.asked.clear()
            one = [*teacher, "build.reflector.concurrency=1", f"out={tmp_path / name}"]
            kills = 0
            while (code := start(one, tmp_path / f"{name}.notes", *kill)) == -signal.SIGKILL:
                kills += 1
            assert code == 0 and kills >= 2 * bool(kill)
            assert len(endpoint.answered) == len(set(endpoint.answered)) > QUESTIONS // 2
            hashes.append(folder_hash(tmp_path / name / "hek"))
        assert hashes[0] == hashes[1]
        entries = [json.loads(line) for line in (tmp_path / "cut/hek/level1.jsonl").read_text().splitlines()]
        assert {entry["source_model"] for entry in entries} == {"big"}
        asked = "".join(path.read_text() for path in tmp_path.glob("*.notes"))
        assert "<reflect>" not in asked and "<abstract>" in asked, "abstractions stay with the policy"


STAGES = [
    ("after a write to rollouts.jsonl", 2),
    ("after a write to replies.jsonl", 5),
    ("in the embedding", 1),
    ("before a vector has its name", 1),
    ("in the clustering", 1),
    ("after a write to stages.jsonl", 1),
    ("after a write to replies.jsonl", 1),
    ("in the clustering", 1),
    ("after a write to replies.jsonl", 1),
    ("in the saving", 1),
    ("before the store has its name", 1),
    ("before the page", 1),
]
"""In the order of the build: rollout, reflect, embed, cluster, abstract, cluster, abstract, save, and what is left."""


def test_killed_in_every_stage_it_gives_the_same_hek_and_pays_for_no_reply_twice(settings, tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with serve(lambda prompt, seed, n: written(prompt, seed)) as endpoint:
        one = [
            f"build.{role}.{key}"
            for role in ("reflector", "abstractor")
            for key in (f"url={endpoint.url}", "model=big")
        ]
        one += ["build.reflector.concurrency=1", "build.abstractor.concurrency=1"]
        assert start([*settings, *one, f"out={tmp_path / 'whole'}"], tmp_path / "whole.notes") == 0
        paid = Counter(endpoint.asked)
        endpoint.asked.clear()
        out, notes = tmp_path / "cut", tmp_path / "cut.notes"
        reached = []
        for where, at in STAGES:
            assert start([*settings, *one, f"out={out}"], notes, where, at) == -signal.SIGKILL, where
            header = out / "hek/header.json"
            reached.append((len(endpoint.asked), header.exists()))
        assert start([*settings, *one, f"out={out}"], notes) == 0
    assert Counter(endpoint.asked) == paid and set(paid.values()) == {1}
    assert calls(notes) == calls(tmp_path / "whole.notes")
    asked = [count for count, _ in reached]
    assert asked[0] == 0 < asked[1] == 5 and asked == sorted(asked)
    assert asked[5] < asked[6] <= asked[7] < asked[8] <= asked[9] == len(endpoint.asked), "levels 2 and 3 were begun"
    assert [has_store for _, has_store in reached] == [False] * 11 + [True]
    assert folder_hash(out / "hek") == folder_hash(tmp_path / "whole/hek")
    for name in ("trajectories.jsonl", "report.md", "report.html"):
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def test_at_a_cap_it_stops_with_code_3_and_goes_on_when_the_cap_is_raised(settings, whole, tmp_path):
    out, notes = tmp_path / "run", tmp_path / "notes"
    capped = [*settings, f"out={out}", "build.reflector.max_calls=8"]
    assert start(capped, notes) == 3 and start(capped, notes) == 3
    lessons = sum(n for call, n in calls(notes).items() if "<reflect>" in call)
    assert 0 < lessons <= 8
    assert "build.reflector.max_calls=8 is reached" in Path(f"{notes}.err").read_text()
    assert not (out / "summary.json").exists()
    assert start([*settings, f"out={out}", "build.reflector.max_calls=10000"], notes) == 0
    assert folder_hash(out / "hek") == whole[0] and calls(notes) == whole[1]


def test_a_missing_key_is_told_before_the_first_rollout(settings, tmp_path, monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    more = [
        "build.reflector.url=http://127.0.0.1:9/v1",
        "build.reflector.model=m",
        "build.reflector.api_key_env=NO_SUCH_KEY",
    ]
    assert start([*settings, *more, f"out={tmp_path / 'run'}"], tmp_path / "notes") == 2
    assert "NO_SUCH_KEY" in (tmp_path / "notes.err").read_text() and not (tmp_path / "run").exists()


def test_a_dry_run_loads_and_writes_nothing_and_knows_what_is_kept(settings, tmp_path):
    out, notes = tmp_path / "run", tmp_path / "notes"
    dry = [*settings, f"out={out}", "build.dry_run=true"]
    assert start(dry, notes) == 0 and not out.exists() and not notes.exists()
    assert start([*settings, f"out={out}"], notes, "after a write", 6) == -signal.SIGKILL
    before = folder_hash(out)
    assert start(dry, notes) == 0 and folder_hash(out) == before
    cfg = load(Config, dry)
    samples = [Sample(f"s{i}", f"what is n{i} ?", ("Oslo",)) for i in range(QUESTIONS)]
    text = estimate(load(Config, [*settings, "out=nowhere"]), samples)
    assert "64 rollouts (0 kept)" in text and "unknown before the first" in text and "Assumed: 50% of 16" in text
    assert "~10 calls of reflector (0 kept), <= 48" in text  # 16 x 0.5 x 1.3; 16 x 3 attempts
    assert "(0 kept)" not in estimate(cfg, samples).splitlines()[2] and "~0 s" in estimate(cfg, samples)


def test_what_each_round_takes_is_told_before_it_begins(settings, whole, tmp_path):
    assert start([*settings, f"out={tmp_path / 'run'}"], tmp_path / "notes") == 0
    told = (tmp_path / "notes.err").read_text()
    assert "level 1 lessons by" in told and "level 1 lessons, attempt 2 by" in told and "level 3 lessons by" in told
    assert "prompt tokens, at most" in told and "time about" in told
