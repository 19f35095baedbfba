"""What a chat model is asked, in which language, and mathematics from two solutions to a store. Broken on purpose, each
of these failed: the language left out of one template, the compact templates touched, the middle of a solution kept."""

import json
from collections import Counter

import pytest

from hiexp.config import ConfigError
from hiexp.data import Sample
from hiexp.encoder import HashEncoder
from hiexp.engine import Sampling
from hiexp.hek import HEK
from hiexp.hek_build import BuildConfig, build_hek
from hiexp.hek_prompts import PROMPTS, math_trace
from hiexp.reflector import Reflector, Reply
from hiexp.trajectory import Segment, Source, Status, Trajectory, Turn

CHAT = [name for name in PROMPTS if name not in ("compact", "few_shot")]


class ScriptedWriter:
    """Prompts are texts; `reply(prompt)` answers."""

    name, together, max_new_tokens = "scripted", False, 50

    def __init__(self, reply):
        self.reply, self.asked = reply, []

    def fit(self, wordings):
        return wordings[0]

    def length(self, prompt):
        return len(prompt)

    def batches(self, prompts):
        return [list(prompts)]

    def answer(self, prompts, sampling):
        self.asked += prompts.values()
        yield {i: Reply(self.reply(prompt), 1, 1) for i, prompt in prompts.items()}


def solution(sample, member, text, answer):
    done = {"status": Status.ANSWERED, "answer": answer, "reward": float(not member)}
    turns, segments = [Turn(text, "answer", answer)], [Segment(Source.POLICY, (1,), (0.0,))]
    return Trajectory(sample.id, member, turns=turns, segments=segments, **done)


def build(reply, cfg, count=2):
    samples = [Sample(f"m{i}", f"Let $x^2 = {i}$. Find $x$.", (r"\frac{17}{4}",)) for i in range(count)]
    groups = [[solution(s, 0, f"way {s.id}", r"\frac{17}{4}"), solution(s, 1, f"slip {s.id}", "4.5")] for s in samples]
    writer = ScriptedWriter(reply)
    prompts = PROMPTS[cfg.prompts].asking_for(cfg.language)
    reflector = Reflector(writer, HashEncoder(), prompts, Sampling(0.7, 0.9, (), 0), cfg.max_attempts)
    return (*build_hek(reflector, groups, samples, cfg, 0), writer)


@pytest.mark.parametrize("name", CHAT)
def test_chat_prompts_ask_for_the_language_in_both_requests(name):
    prompts = PROMPTS[name]
    for language, reflect, abstract in (
        ("English", "in English", "in English"),
        ("Chinese", "in Chinese", "in Chinese"),
        (None, "in the language of the question", "in the language of the notes"),
    ):
        asked = prompts.asking_for(language)
        assert reflect in asked.reflect("q {x}?", "g", ["r"], ["w"])
        assert abstract in asked.abstract(2, [("t", "d {y}")])
    assert prompts.language == BuildConfig().language == "English"


@pytest.mark.parametrize("language", ["English", "Chinese", None])
def test_compact_prompts_name_no_language(language):
    compact = PROMPTS["compact"].asking_for(language)
    assert compact is PROMPTS["compact"] and compact.language is None
    assert compact.reflect("q", "g", ["a", "b"], ["-"]) == (
        "<reflect>\nquestion : q\ngold : g\nright : a | b\nwrong : -\n</reflect>\n"
    )
    assert compact.abstract(2, [("t", "d")]) == "<abstract>\nlevel : 2\n- t : d\n</abstract>\n"


@pytest.mark.parametrize("name", CHAT)
def test_chat_prompts_name_every_field_and_cap(name):
    prompts = PROMPTS[name]
    reflect, abstract = prompts.reflect("q", "g", ["r"], ["w"]), prompts.abstract(3, [("t", "d")])
    assert all(f'"{field}"' in reflect for field in prompts.reflect_fields) and "80 words" in reflect
    assert all(f'"{field}"' in abstract for field in prompts.abstract_fields) and "60 words" in abstract
    assert all("24 words" in text and "{" not in text for text in (reflect, abstract))
    assert ("search" in reflect) == (name == "full")


def test_a_solution_is_shown_from_both_ends():
    sample = Sample("m", "q", ("7",))
    short = solution(sample, 0, "line 1\n  line 2\n", "7")
    assert math_trace(short, True) == ["line 1\n  line 2", "Final answer: 7"]
    long = solution(sample, 0, "a" * 1500 + "MIDDLE" + "z" * 1500, "7")
    wide, narrow = math_trace(long, True)[0], math_trace(long, False)[0]
    assert wide == "a" * 1200 + "\n[...]\n" + "z" * 800 and narrow == "a" * 400 + "\n[...]\n" + "z" * 400
    cut = Trajectory("m", turns=[Turn("so", "malformed", "", notice="no box")], status=Status.TRUNCATED)
    assert math_trace(cut, True) == ["so", "  was told: no box", "Final answer: none (truncated)"]


def math_lesson(prompt):
    """As models write it: fenced, single backslashes in the formulas."""
    kind = "" if "These notes" in prompt else '"type": "pitfall", '
    text = r"Divide by \frac{a}{b} only if \theta \neq 0; \boxed{} the exact form"
    return (
        f'```json\n{{{kind}"title": "when a root is taken", "tags": [], "thinking": "x", "description": "{text}"}}\n```'
    )


def test_lessons_of_mathematics_keep_their_formulas_on_every_level(tmp_path):
    cfg = BuildConfig(prompts="math", threshold_1=0.5, merge_threshold=None, max_level=2)
    hek, report, writer = build(math_lesson, cfg)
    assert [len(hek.levels[level]) for level in (1, 2)] == [2, 1]
    assert all("Solution 1 (right)\nway m" in text and "\nslip m" in text for text in writer.asked[:2])
    assert "problems of mathematics" in writer.asked[2] and r"\frac{a}{b}" in writer.asked[2]
    hek.save(tmp_path / "hek")
    for entry in (entry for entries in HEK.load(tmp_path / "hek", HashEncoder()).levels.values() for entry in entries):
        assert entry.description == r"Divide by \frac{a}{b} only if \theta \neq 0; \boxed{} the exact form"
        assert entry.language == "" or entry.language == "en"
    assert report.replies[1] == {"accepted": 2}


def test_every_drop_is_counted_under_its_reason():
    replies = {
        "wrong_language": {
            "title": "wenn die Wurzel gezogen wird",
            "description": "pruefe zuerst das Vorzeichen und die",
        },
        "gold_leak": {"title": "when a root is taken", "description": r"the value is $\dfrac{17}{4}$"},
        "boilerplate_title": {"title": "Title", "description": "check the sign"},
        "empty_description": {"title": "when a root is taken", "description": "..."},
        "duplicate_title": None,
    }
    made = {"type": "mixed", "tags": [], "thinking": "t"}
    texts = [json.dumps(made | fields) if fields else '{"title": "a", "title": "b"}' for fields in replies.values()]
    texts[-1] = json.dumps(made | {"title": "a", "description": "d"})[:-1] + ', "title": "b"}'
    cfg = BuildConfig(prompts="math", max_attempts=len(texts), max_level=1)
    queue = iter(texts)
    _, report, _ = build(lambda prompt: next(queue), cfg, count=1)
    assert report.replies[1] == Counter(replies.keys()) and report.given_up[1] == 1
    german = json.dumps(made | replies["wrong_language"])
    for language, kept in (("German", 1), (None, 1), ("English", 0)):
        hek, _, _ = build(lambda prompt: german, BuildConfig(prompts="math", language=language, max_level=1), count=1)
        assert [entry.language for entry in hek.levels[1]] == ["de"] * kept


def test_a_language_without_a_name_is_refused():
    with pytest.raises(ConfigError, match=r"language.*English, or null"):
        BuildConfig(language=" ")
