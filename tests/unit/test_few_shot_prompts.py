"""Prompts to be continued, for models that follow no instruction. Broken on purpose, each of these failed: a chat
template around the prompt, a description without an end taken, a third line left out, the next example read on, a
copied example accepted, the stop string not passed on, a word of another prompt set changed."""

import hashlib
import json
from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from support import build_byte_tokenizer
from writers import ScriptedWriter, asked_of

from hiexp import hek_stages
from hiexp.api_client import WriterConfig
from hiexp.config import ConfigError
from hiexp.data import Sample
from hiexp.encoder import HashEncoder
from hiexp.hek_build import BuildConfig, build_hek
from hiexp.hek_filters import turn_down
from hiexp.hek_prompts import PROMPTS, few_shot_trace
from hiexp.reflector import EngineWriter, Reflector
from hiexp.reply_parser import parse_lines
from hiexp.sampling import Sampling
from hiexp.trajectory import Status, Trajectory, Turn

FEW_SHOT = PROMPTS["few_shot"]
FIELDS = ("title", "description")
GOOD = {"title": "when two are compared", "description": "Look both up.", "tags": []}
LINES = " when two are compared\nDescription: Look both up."


def attempt(sample, member, queries, answer):
    turns = [Turn(f"<search> {query} </search>", "search", query) for query in queries]
    turns.append(Turn(f"so: {answer}", "answer", answer))
    return Trajectory(sample.id, member, turns=turns, status=Status.ANSWERED, answer=answer, reward=float(not member))


def build(reply, names=("Xa", "Xb"), encoder=None, **changes):
    """The samples' first attempt is right."""
    cfg = replace(BuildConfig(prompts="few_shot", merge_threshold=None, max_attempts=1), **changes)
    samples = [Sample(f"s{name}", f"who founded {name}?", (f"Ada {name}",)) for name in names]
    groups = [[attempt(s, 0, ["founder"], s.answers[0]), attempt(s, 1, ["x"], "Bo")] for s in samples]
    prompts = FEW_SHOT.asking_for(cfg.language)
    reflector = Reflector(ScriptedWriter(reply), encoder or HashEncoder(), prompts, Sampling(), cfg.max_attempts)
    hek, report = build_hek(reflector, groups, samples, cfg, 0)
    return hek, report, asked_of(reflector)


# --- what is asked ---


@pytest.mark.parametrize(
    ("name", "templates", "texts"),
    [
        ("full", "951171d2edc345bc", "8691bf5c42d733f4 8802f36ac458a441 5a5c87f3d279edba"),
        ("math", "68212b68ab5250fc", "1e71ca153d446354 2d0fbb4197bcb6cd 031c01b28f4c2a7f"),
        ("compact", "db5171765e5ba1f5", "ea1ea4ae766ede31 ea1ea4ae766ede31 ea1ea4ae766ede31"),
    ],
)
def test_the_other_sets_are_what_they_were_before_this_one(name, templates, texts):
    """Digests of the texts as they were; stores and policies of earlier runs depend on every byte."""
    prompts, found = PROMPTS[name], []
    for language in ("English", "Chinese", None):
        asked = prompts.asking_for(language)
        text = asked.reflect("Q {x}?", "G", ["r1", "r2"], ["w"]) + asked.abstract(2, [("t", "d"), ("u", "e")])
        found.append(short_digest(text + asked.abstract(3, [("t", "d")])))
    assert " ".join(found) == texts
    assert short_digest(prompts.reflect_template + prompts.abstract_template) == templates
    assert (prompts.use_chat, prompts.stop, prompts.examples) == (True, (), ())


def short_digest(text):
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@pytest.mark.parametrize("language", ["English", "Chinese", None])
def test_the_request_is_one_more_example_without_its_end(language):
    prompts = FEW_SHOT.asking_for(language)
    assert prompts is FEW_SHOT and prompts.language is None
    reflect = prompts.reflect("q {x}?", "g", ["searched for: a", "answered: g"], ["answered: b"])
    head, *examples, last = reflect.split("### Question\n")
    assert head == "Lessons from a right and a wrong attempt at a question.\n\n" and len(examples) == 3
    assert last == (
        "q {x}?\nRight answer: g\nRight attempt: searched for: a; answered: g\nWrong attempt: answered: b\n"
        "### Lesson for other questions\nTitle:"
    )
    for level, kind in ((2, "Pattern"), (3, "Strategy")):
        _, *examples, last = prompts.abstract(level, [("t", "d {y}"), ("u", "e")]).split("### Notes\n")
        assert last == f"- t: d {{y}}\n- u: e\n### {kind}\nTitle:" and len(examples) == 2


@pytest.mark.parametrize("text", [FEW_SHOT.reflect("q", "g", ["r"], ["w"]), FEW_SHOT.abstract(3, [("t", "d")])])
def test_an_example_in_the_prompt_has_the_form_that_is_parsed_and_is_turned_down_as_a_reply(text):
    parts = text.split("\nTitle:")
    for part in parts[1:-1]:
        reply = parse_lines(part, FIELDS)
        assert isinstance(reply, dict) and reply["title"] in FEW_SHOT.examples
        assert turn_down(reply, 2, [], []) is None  # within the caps of every level
        assert turn_down(reply, 2, [], [], None, FEW_SHOT.examples) == "copied_example"


def test_a_trace_is_its_queries_and_its_answer_or_what_was_written():
    sample = Sample("s", "q", ("7",))
    assert few_shot_trace(attempt(sample, 0, ["a\n b", "c"], "7"), True) == [
        "searched for: a b",
        "searched for: c",
        "answered: 7",
    ]
    assert few_shot_trace(attempt(sample, 0, [], "7"), True) == ["wrote: so: 7", "answered: 7"]
    long = Trajectory("s", turns=[Turn("x" * 400, "malformed", "")], status=Status.TRUNCATED)
    assert [len(few_shot_trace(long, whole)[0]) for whole in (True, False)] == [311, 111]
    assert few_shot_trace(long, True)[1] == "answered: nothing"


def test_a_chat_template_is_not_used_and_control_tokens_in_a_trace_stay_text():
    tokenizer = build_byte_tokenizer(chat=True)
    engine: Any = SimpleNamespace(max_length=500)
    for use_chat in (True, False):
        writer = EngineWriter(lambda: engine, tokenizer, "self", 50, 8192, False, use_chat=use_chat)
        ids = writer.fit(["a <|im_end|> Title:"])
        assert ids is not None and (tokenizer.eos_token_id in ids) == use_chat
        assert (tokenizer.decode(ids) == "a <|im_end|> Title:") == (not use_chat)


def test_the_stop_string_and_plain_text_reach_the_models_that_write(tmp_path):
    tokenizer = build_byte_tokenizer()
    agent = SimpleNamespace(tokenizer=tokenizer)
    for name, stop in (("few_shot", ("\n###",)), ("full", ())):
        cfg = SimpleNamespace(build=BuildConfig(prompts=name), model=SimpleNamespace(path="folder"), seed=3)
        models: Any = SimpleNamespace(cfg=cfg, agent=agent, local=lambda path: (tokenizer, lambda: None))
        for made in hek_stages.open_reflectors(models, HashEncoder(), tmp_path / name):
            assert made.sampling.stop == stop
            assert isinstance(made.writer, EngineWriter) and made.writer._use_chat == (name == "full")


def test_an_endpoint_is_refused_before_any_work():
    url = WriterConfig(url="http://localhost:1/v1", model="m")
    few_shot = partial(BuildConfig, prompts="few_shot")
    for make in (lambda: few_shot(reflector=url), lambda: few_shot(abstractor=url)):
        with pytest.raises(ConfigError, match=r"prompts=few_shot.*url.*prompts=full"):
            make()
    few_shot(reflector=WriterConfig(model="folder"))


# --- what is read ---


@pytest.mark.parametrize(
    "text",
    [
        f"{LINES}\n",
        f"{LINES}\n###",  # the stop string
        f"{LINES}\n### Question\nWhat is next?\nRight answer: 3\n### Lesson\nTitle: z\nDescription: z\n",
        f"{LINES}<|im_end|>",
        f"{LINES}</s>\n",
        f"{LINES} <|endoftext|>\n###",
        f"{LINES}\n\n \n###",
        f"{LINES}\r\n###",
        f"Title:{LINES}\n",  # the label once more
        " when  two are\tcompared \n Description:   Look both up. \n",
        f"\ufeff{LINES}\n",
    ],
)
def test_two_whole_lines_are_read_up_to_the_next_heading(text):
    assert parse_lines(text, FIELDS) == GOOD


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        (" \n\n", "empty"),
        ("<|im_end|>", "empty"),
        ("### Question\nx\n", "empty"),
        (LINES, "truncated"),  # cut off by the room for a reply: perhaps the sentence went on
        (" when two are", "truncated"),
        (" when two are compared\nDescr", "truncated"),
        (" when two are compared\n", "missing_description"),
        (" when two are compared\n###", "missing_description"),
        (" when two are compared<|im_end|>", "missing_description"),
        (" when two are compared\nDescription:\n###", "missing_description"),
        (" when two are compared: Look both up.\n###", "missing_description"),
        (" when two are compared\nLook both up.\n", "missing_description"),
        (" when two are compared\ndescription: Look both up.\n", "missing_description"),
        ("\nDescription: Look both up.\n", "missing_title"),
        ("Title:\nDescription: Look both up.\n", "missing_title"),
        (" when two\n\nDescription: Look both up.\n", "malformed"),
        (f"{LINES}\nThen answer.\n", "malformed"),
        (f"{LINES}\n\nThen answer.\n###", "malformed"),
        (f"{LINES}\nThen ans", "malformed"),
        (f"{LINES}\nTitle: another\nDescription: d\n", "malformed"),
        (" Right answer: 3\nRight attempt: x\nWrong attempt: y\n###", "malformed"),
        (" a Description: b\nDescription: c\n", "bad_title"),
        (" a\nDescription: Title: c\n", "bad_description"),
        (" a <|im_start|> b\nDescription: c\n", "bad_title"),
        (" a\nDescription: c \x07\n", "bad_description"),
        (" a\nDescription: c <|im_end|> d\n", "bad_description"),
        ('{"title": "a", "description": "b"}\n', "missing_description"),
    ],
)
def test_nothing_half_read(text, reason):
    assert parse_lines(text, FIELDS) == reason


def test_every_beginning_of_a_reply_gives_all_of_it_or_a_reason():
    whole = f"{LINES}\n###"
    found = [parse_lines(whole[:end], FIELDS) for end in range(len(whole) + 1)]
    assert Counter(map(str, found[: len(LINES)])).keys() == {"empty", "truncated", "missing_description"}
    assert found[len(LINES) : len(LINES) + 2] == ["truncated", GOOD] and found[-1] == GOOD
    assert all(one in (GOOD, "malformed") for one in found[len(LINES) + 1 :])  # "#" alone is a third line begun


@pytest.mark.parametrize(
    ("title", "description", "reason"),
    [
        ("When two: are compared!", "Look both up.", "copied_example"),  # signs and case aside
        ("so, when two are compared", "x", "copied_example"),  # with more around it
        ("y", "First do this. Count them all, twice.", "copied_example"),  # one sentence of a description
        ("y", "when two are compared", "copied_example"),  # a title as a description
        ("two are compared", "x", "copied_example"),  # a part of three words
        ("are compared", "x", None),
        ("when two are not compared", "x", None),
        ("when twotwo are compared", "x", None),
        ("y", "Count them", None),
    ],
)
def test_what_repeats_an_example_is_turned_down(title, description, reason):
    examples = ("when two are compared", "Count them all, twice")
    reply = {"title": title, "description": description}
    assert turn_down(reply, 1, [], [], None, examples) == reason
    assert turn_down(reply, 1, [], []) is None


# --- from pairs to a store ---


def test_a_store_of_three_levels_from_a_model_that_only_continues(tmp_path):
    def reply(prompt):
        last = prompt.rpartition("### ")[2]
        if last.startswith("Lesson"):
            name = prompt.rpartition("who founded X")[2][0]
            title = "label of a band" if name in "ab" else "film of a city"
            return f" {title}\nDescription: Ask first for {name}.\n### Question"
        return f" {last.split()[0]} {'film' if 'film of' in prompt else 'label'}\nDescription: Go on.<|im_end|>"

    hek, report, asked = build(reply, ("Xa", "Xb", "Xc", "Xd"), threshold_1=0.75, threshold_2=-0.5)
    assert [len(hek.levels[level]) for level in (1, 2, 3)] == [4, 2, 1]
    [strategy], patterns, cases = hek.levels[3], hek.levels[2], hek.levels[1]
    assert (strategy.type, strategy.description, strategy.tags) == ("strategy", "Go on.", ())
    assert {entry.title for entry in patterns} == {"Pattern label", "Pattern film"}
    assert (cases[0].title, cases[0].description, cases[0].type) == ("label of a band", "Ask first for a.", "mixed")
    assert all(text.endswith("\nTitle:") for text in asked) and len(asked) == 7
    assert "Right attempt: searched for: founder; answered: Ada Xa\n" in asked[0] and "\nWrong attempt: s" in asked[0]
    assert report.replies == {level: {"accepted": n} for level, n in ((1, 4), (2, 2), (3, 1))}
    hek.save(tmp_path / "hek")
    assert json.loads((tmp_path / "hek" / "header.json").read_text())["settings"]["build"]["prompts"] == "few_shot"


def test_every_drop_is_counted_and_a_copy_is_asked_for_again():
    copy = FEW_SHOT.examples[0]
    replies = [
        f" {copy}\nDescription: Look.\n###",
        " a\nDescription: It was Ada Xa.\n",
        " a\nDescription: cut o",
        " Xa and others\nDescription: Look.\n",
        " wer zuerst war\nDescription: Frage nach dem Jahr und dann nach der Stadt.\n",
    ]
    queue = iter(replies)
    hek, report, _ = build(lambda prompt: next(queue), ("Xa",), max_attempts=5)
    reasons = ("copied_example", "gold_leak", "truncated", "entity_name", "accepted")  # no language is asked for
    assert report.replies[1] == Counter(reasons) and [entry.language for entry in hek.levels[1]] == ["de"]
    assert "| 1 | copied_example | 1 |" in report.to_markdown()
