"""What stands in a reply, whatever the model did to its JSON. Broken on purpose, each of these failed: an inner object
accepted, a cut-off string accepted, escapes of LaTeX decoded, the last of two equal keys taken, the first closing tag
taken for the end of nested thinking, a scan that starts again at every brace."""

import json
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hiexp.hek_build import PROMPTS, parse_experience
from hiexp.reply_parser import parse_reply

GOOD = {"title": "a b", "description": "c d"}
FIELDS = ("title", "description")


def fields_of(text, required=FIELDS):
    reply = parse_reply(text, required)
    return {key: reply[key] for key in FIELDS} if isinstance(reply, dict) else reply


@pytest.mark.parametrize(
    "text",
    [
        '{"title": "a b", "description": "c d"}',
        '{ "title" : " a b " , "description" : " c d " } <end>',  # words apart, as a word-level model writes
        'Sure!\n```json\n{"title": "a b", "description": "c d"}\n```\nDone.',  # B60
        '```\n{"title": "a b", "description": "c d"}\n```',
        'use {x} and {y: {z}} so: {"title": "a b", "description": "c d"} [1] {2}',  # B61 prose with braces
        'a brace { alone, then {"title": "a b", "description": "c d"}',
        '{"note": "draft"} {"title": "a b", "description": "c d"}',  # first object that has the fields
        '{"title": "x", "description": ""} {"title": "a b", "description": "c d"}',
        '{"title": "x", "description": 3} {"title": "a b", "description": "c d"}',
        "{'title': 'x', 'description': 'y'} {\"title\": \"a b\", \"description\": \"c d\"}",
        '{"title": "x", "description": "y",} {"title": "a b", "description": "c d"}',  # a trailing comma
        '<think>{"title": "x", "description": "y"}</think>{"title": "a b", "description": "c d"}',  # B61
        'draft {"title": "x", "description": "y"}</think> {"title": "a b", "description": "c d"}',
        '<think></think><think>{"title": "x", "description": "y"}</think>{"title": "a b", "description": "c d"}',
        '{"title": "a\\n b", "description": "c\n d", "tags": [], "o": {"title": "q", "description": "r"}}',
    ],
)
def test_B60_B61_the_first_object_with_the_fields_is_found(text):
    assert fields_of(text) == GOOD


@pytest.mark.parametrize(
    "value", ["use ```x``` here", "a } brace", "{ open", 'a \\" quote { in', "<think> of it", "</think>"]
)
def test_B60_B61_string_values_are_left_as_they_are(value):
    text = f'```json\n{{"title": "a b", "description": "{value}"}}\n```'
    if value == "</think>":  # with no block open, the tag ends a block that the prompt opened
        assert parse_reply(text, FIELDS) == "no_object"
    else:
        reply = parse_reply(text, FIELDS)
        assert isinstance(reply, dict) and reply["description"] == value.replace('\\"', '"')


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        (" \n", "empty"),
        ("I cannot help with that.", "no_object"),
        ('{"title": "a b", "description": "c', "truncated"),
        ('{"title": "a b", "x": {"title": "q", "description": "r"}, "description": "c', "truncated"),  # B63
        ('{"title": "a b", "x": [{"title": "q", "description": "r"}', "truncated"),
        ('{"lesson": {"title": "q", "description": "r"}}', "missing_title"),
        ('{"lesson": {"title": "q", "description": "r"},}', "missing_title"),
        ('{"a": "}", "b": {"title": "q", "description": "r"} 1}', "malformed"),
        ('{"a": 1 1, "b": {"title": "q", "description": "r"}', "truncated"),
        ('{"a" {"title": "q", "description": "r"}', "truncated"),
        ('{"title": "a b", "description": "say "no" to it"}', "malformed"),
        ("</think>", "no_object"),
        ("\ufeff", "empty"),
        ('{lesson: {"title": "q", "description": "r"}}', "no_object"),
        ('<think>{"title": "a b", "description": "c d"}', "unfinished_thinking"),
        ('[{"titel": "a"}]', "missing_title"),
        ('{"title": "a b"}', "missing_description"),
        ('{"title": " ", "description": "c d"}', "bad_title"),
        ('{"title": ["a"], "description": "c d"}', "bad_title"),
        ('{"title": "a b", "description": "c d", "tags": "x"}', "bad_tags"),
        ("{" * 1000, "no_object"),
        ('{"a":' * 5000, "truncated"),
    ],
)
def test_B63_a_reply_without_a_whole_object_is_turned_down_with_its_reason(text, reason):
    assert parse_reply(text, FIELDS) == reason


def test_the_full_form_needs_all_its_fields():
    reply = {"type": "pitfall", "title": "a b", "tags": ["x "], "thinking": "t", "description": "c d"}
    assert parse_reply(json.dumps(reply), ALL) == reply | {"tags": ["x"]}
    for field in reply:
        less = {key: value for key, value in reply.items() if key != field}
        assert parse_reply(json.dumps(less), ALL) == f"missing_{field}"
    assert parse_reply(json.dumps(reply | {"type": "advice"}), ALL) == "bad_type"


ALL = ("type", "title", "tags", "thinking", "description")
FULL = {"type": "mixed", "title": "a b", "tags": ["x", "y"], "thinking": "t u", "description": "c d"}


@pytest.mark.parametrize(
    "text",
    [
        '{"title": "a b", "description": "c d",}',  # trailing commas
        '{"tags": ["x",], "title": "a b", "description": "c d", }',
        "{'title': 'a b', 'description': 'c d', 'thinking': None, 'sure': True}",  # a Python dict
        "Here: ```python\n{'title': 'a b',\n 'description': \"c d\"}\n```",
        '{"title"\uff1a"a b"\uff0c"description"\uff1a"c d"}',  # full-width colon and comma
        '\uff5b"title": "a b", "description": "c d"\uff5d',
        '{"tags": \uff3b"x"\uff0c"y"\uff3d, "title": "a b", "description": "c d"}',
        "{\u201ctitle\u201d: \u201ca b\u201d, \u201cdescription\u201d: \u201cc d\u201d}",  # typographic quotes
        "{\u2018title\u2019: \u2018a b\u2019, \u2018description\u2019: \u2018c d\u2019}",
        "{\uff02title\uff02: \uff02a b\uff02, \uff02description\uff02: \uff02c d\uff02}",
        '\ufeff{"title": "a b", "description": "c d"}',  # byte-order mark
        '```json\n\ufeff{"title": "a b", "description": "c d"}\n```',
        '{"title": "a b", "description": "c d"',  # cut off, nothing of a wanted field lost
        '{"title": "a b", "description": "c d", "thinking": "beca',
        '{"title": "a b", "description": "c d", "tags": ["x", "y',
        '{"title": "a b", "description": "c d"}\n{"title": "x',
        '{"title": "x", "description": "y",} then {"title": "a b", "description": "c d"}',  # sound before mended
        '{"title": "a b", "description": "c d",} {"title": "x", "description": "y",}',  # the first of equals
        '{"title": "a b", "description": "c d"} {"title": "x", "description": "y"}',
        '[{"title": "a b", "description": "c d"}, {"title": "x", "description": "y"}]',
        '{"title": "x", "description": "y" "z"} {"title": "a b", "description": "c d"}',
        '{"title": "a b", "title": "a b", "description": "c d"}',  # one key twice, one value
        '{"title": "a b", "description": "c d", "n": -1.5e3, "m": [1, [2, {}], true], "note": {"title": 1}}',
    ],
)
def test_B60_what_models_do_to_json_is_mended(text):
    assert fields_of(text) == GOOD


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"title": "a b", "title": "x", "description": "c d"}', "duplicate_title"),
        ('{"title": "a b", "description": "c d", "tags": ["x"], "tags": []}', "duplicate_tags"),
        ("{'title': 'a b', 'description': 'c d'", "truncated"),  # that quote may be an apostrophe
        ("{'title': 'a b', 'description': 'it is the dogs' ", "truncated"),
        ("{'title': 'a b', 'description': 'search 'c', 'd", "truncated"),
        ('see {"a", {"title": "q", "description": "r"}} there', "no_object"),
        ('{"title": "a b", "description": "c d\\', "truncated"),
        ('{"title": "a b", "description":', "truncated"),
        ('{"title": "a b"', "truncated"),
        ('{"title": "a b", "description": "c\\u0000d"}', "bad_description"),
        ('{"title": "a b", "description": "c\\u0008d"}', "bad_description"),
        ('{"title": "a b", "description": nothing}', "malformed"),
        ('{"title": "a b" "description": "c d"}', "malformed"),
        ("{title: 'a b', description: 'c d'}", "no_object"),
        ('{"a": ' + "[" * 60 + "]" * 60 + ', "title": "a b", "description": "c d"}', "malformed"),
    ],
)
def test_B63_what_cannot_be_mended_has_a_reason(text, reason):
    assert parse_reply(text, FIELDS) == reason


def test_B63_a_cut_gives_the_whole_lesson_or_nothing():
    """Every prefix: a field that is wanted is there to its last letter, or there is no reply."""
    for whole in (json.dumps(FULL), json.dumps(FULL | {"description": 'it\'s \\frac{1}{2} "so" {x}'})):
        for end in range(len(whole)):
            reply = parse_reply(whole[:end], ALL)
            if end < len(whole) - 1:
                assert isinstance(reply, str), whole[:end]
            else:
                assert reply == parse_reply(whole, ALL) and isinstance(reply, dict)


@pytest.mark.parametrize(
    ("thinking", "is_read"),
    [
        ("<think> a <think> {DRAFT} </think> {DRAFT} </think>", True),
        ("<think> a </think> <think> {DRAFT} <think></think> {DRAFT} </think>", True),
        ("a <think> {DRAFT} </think> {DRAFT} </think>", True),  # the prompt opened the outer block
        ("<think> the <think> tag {DRAFT} </think>", True),  # more opened than closed: up to the last closing tag
        ("<thinking>{DRAFT}</thinking>", True),
        ("<THINK>{DRAFT}</THINK>", True),
        ("{DRAFT}</think>", True),
        ("<think> {DRAFT}", False),
        ("<think> a </think> <think> {DRAFT}", False),
    ],
)
def test_B61_drafts_in_nested_thinking_do_not_count(thinking, is_read):
    text = thinking.replace("{DRAFT}", '{"title": "x", "description": "y"}')
    if is_read:
        assert fields_of(text + '{"title": "a b", "description": "c d"}') == GOOD
        assert parse_reply(text, FIELDS) == "no_object"
    else:
        assert parse_reply(text, FIELDS) == "unfinished_thinking"


def test_B61_thinking_after_the_object_does_no_harm():
    text = '{"title": "a b", "description": "c d"} <think> a <think> b </think> {"title": "x"} </think>'
    assert fields_of(text) == GOOD and fields_of(text[:50]) == GOOD


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (r"\frac{a}{b}", None),
        (r"\boxed{7} and \beta", None),
        (r"\theta \times \tan x \to \text{cm}", None),
        (r"\rho \right) \rangle", None),
        (r"\nabla \neq \nu \notin", None),
        (r"\underline{x} \upsilon", None),
        (r"\alpha + \sqrt{2} \( x \) \[ y \] 5\% \{ \, \}", None),
        (r"\\frac{a}{b} \\theta \\neq", r"\frac{a}{b} \theta \neq"),
        (r"one\nTwo\n- next\n\nnow\tthen\r\nend", "one Two - next now then end"),
        (r"one\ntheta", "one theta"),
        (r"\u00e9t\u00e9 \u4e2d \ud83d\ude00", "\u00e9t\u00e9 \u4e2d \U0001f600"),
        (r"half \ud83d here", "half \ufffd here"),
        (r"it\'s a \/ b \"c\"", 'it\'s a / b "c"'),
        ("\uff1a\uff0c\u201cquoted\u201d\uff02 stay", None),
    ],
)
def test_latex_stays_latex_and_escapes_stay_escapes(written, read):
    reply = parse_reply(f'{{"title": "a b", "description": "{written}"}}', FIELDS)
    assert isinstance(reply, dict) and reply["description"] == (written if read is None else read)
    reply["description"].encode("utf-8")  # what goes to a file


@pytest.mark.parametrize(
    ("text", "description"),
    [
        ("{'title': 'when it's asked', 'description': 'don't guess, it's wrong'}", "don't guess, it's wrong"),
        ("{\u2018title\u2019: \u2018a\u2019, \u2018description\u2019: \u2018it\u2019s \u2018it\u2019 so\u2019}", None),
        ("{'title': 'a', 'description': 'the \\'old\\' one: {x}'}", "the 'old' one: {x}"),
    ],
)
def test_an_apostrophe_ends_no_string(text, description):
    reply = parse_reply(text, FIELDS)
    assert isinstance(reply, dict) and reply["description"] == (description or "it\u2019s \u2018it\u2019 so")


def test_sound_json_is_read_as_json_reads_it():
    rng, words = random.Random(0), ["a", "{", "}", '"', "'", "\\", "]", ",", ":", "\u4e2d", "\U0001f600", "x/y", "<b>"]
    for _ in range(300):
        value: dict[str, object] = {key: " ".join(rng.choices(words, k=5)) for key in (*FIELDS, "thinking")}
        value["tags"] = [rng.choice(words) for _ in range(rng.randrange(3))]
        extra = {"n": rng.random(), "deep": [{"title": [1]}, None], **value}
        text = json.dumps(extra, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, 1]))
        assert parse_reply(f"so {{x}}: {text} [1]", FIELDS) == value


def test_the_mended_form_of_a_lesson_is_the_lesson():
    """Any mixture of the mends, over lessons with apostrophes and formulas."""
    rng = random.Random(1)
    for _ in range(300):
        quote = rng.choice(["''", "\u201c\u201d", "\uff02\uff02"])
        colon, comma = rng.choice([":", " : ", "\uff1a"]), rng.choice([",", "\uff0c", " ,\n"])
        pairs = [f"{quote[0]}{k}{quote[1]}{colon}{quote[0]}{GOOD[k]}'s \\frac{{1}}{{2}} it{quote[1]}" for k in FIELDS]
        rng.shuffle(pairs)
        text = "{" + comma.join(pairs) + rng.choice(["", comma]) + "}"
        expected = {key: f"{GOOD[key]}'s \\frac{{1}}{{2}} it" for key in FIELDS}
        assert fields_of(rng.choice(["", "```json\n", "Sure {ok}: "]) + text) == expected, text


HOSTILE = """
{ {{ {} {"a": {"a":[ {' {'' {" {\\" {x" {'a' {'a': {"a":{"b":1|1, \u201c " ' \\ <think> </think> <think>{
{"a":1} {"a":} {"a"1} {"a":"b","c {'a':'b','c \\u12 [[ {"a":"\\" \u201d, ', {|||| \uff5b\u201c '||| <think></think>{
"""
WORST = ["{", "{'", '{"a":}', '{"a":1}', "' ", "\u201d,"]


@pytest.mark.parametrize("before", ["", '{"a": ["b", ', "{'a': '", '{"title": "'])
@pytest.mark.parametrize("size", [200_000, 1_000_000])
def test_a_megabyte_of_anything_takes_less_than_a_second(size, before):
    for unit in HOSTILE.split() if size < 1_000_000 else WORST:
        unit = unit.replace("|", " ")
        text = before + unit * (size // len(unit))
        assert any(_seconds(text) < size / 1e6 for _ in range(4)), unit  # the best of a few: others use the machine


def _seconds(text):
    start = time.process_time()
    assert isinstance(parse_reply(text, FIELDS), str)
    return time.process_time() - start


LESSON = {"type": "pitfall", "title": "a b", "tags": ["t"], "thinking": "why", "description": "c d"}


def test_parse_experience_gives_the_lesson_or_none():
    fenced = f"<think>{{}}</think>```json\n{json.dumps(LESSON)}\n```"
    assert parse_experience(fenced) == parse_experience(json.dumps(LESSON)) == LESSON
    assert parse_experience(fenced, PROMPTS["full"].reflect_fields) == LESSON
    assert parse_experience('{"title": "a b", "description": "c d"}') == GOOD | {"tags": []}
    assert parse_experience('{"title": "a b", "description": "c d"}', PROMPTS["full"].reflect_fields) is None
    whole = json.dumps(LESSON)
    for nothing in (
        "",
        " ",
        "I cannot help.",
        whole[:-30],
        f"<think>{whole}",
        "{" * 50_000,
        "[" * 50_000,
        None,
        3,
        b"{}",
    ):
        assert parse_experience(nothing) is None


@settings(deadline=None, max_examples=200)
@given(
    st.one_of(
        st.text(), st.lists(st.sampled_from([*json.dumps(LESSON), "title", "<think>", "\\u", "\ud83d"])).map("".join)
    )
)
def test_parse_experience_has_a_result_for_any_text(text):
    found = parse_experience(text)
    assert found is None or {"title", "description", "tags"} <= found.keys() <= LESSON.keys()
    assert found == parse_experience(text)
