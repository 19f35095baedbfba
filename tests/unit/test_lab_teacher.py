"""The practice traces: they obey the protocol, tell no held-back plan, and read what they claim to have read."""

import random
from collections import Counter

import pytest

from hiexp.hek_prompts import parse_reply
from hiexp.lab_policy import build_model, build_tokenizer, encode_row
from hiexp.lab_teacher import NOISE, ROWS, comparison, draw, habit, mask, plan_text, practice_rows, wander
from hiexp.lab_world import FAMILIES, build_world, questions
from hiexp.protocols import PROTOCOLS
from hiexp.rollout import NOTICES
from hiexp.trajectory import Source

TOKENIZER = build_tokenizer()


def rows(kind, count=150):
    rng = random.Random(5)
    return [ROWS[kind](rng) for _ in range(count)]


@pytest.mark.parametrize("kind", list(ROWS))
def test_every_word_has_a_token_and_only_policy_text_is_learned(kind):
    for row in rows(kind):
        ids, learned = encode_row(TOKENIZER, row)
        assert TOKENIZER.unk_token_id not in ids
        pieces = [(source, TOKENIZER.encode(text, add_special_tokens=False)) for source, text in row]
        assert learned == [source is Source.POLICY for source, piece in pieces for _ in piece]


def test_questions_notices_and_tags_have_tokens():
    world = build_world(1)
    texts = [s.question for s in questions(world, {"test": 6}, 1)["test"]] + list(NOTICES)
    texts += [document.text for _, document in world.passages()] + list(PROTOCOLS["compact"].stop)
    assert not any(TOKENIZER.unk_token_id in TOKENIZER.encode(text, add_special_tokens=False) for text in texts)


def test_text_and_ids_correspond():
    text = 'who founded the label of Zorin ? <search> { "title" : " a " } </search>'.replace("Zorin", "Novel")
    ids = TOKENIZER.encode(text.replace(" a ", " label "), add_special_tokens=False)
    assert TOKENIZER.decode(ids) == text.replace(" a ", " label ")


@pytest.mark.parametrize("kind", ["plain", "hint", "case"])
def test_traces_obey_the_protocol_and_copy_what_they_were_shown(kind):
    protocol = PROTOCOLS["compact"]
    for row in rows(kind):
        shown = ""
        turns = [text for source, text in row if source is Source.POLICY]
        for source, text in row:
            if source is Source.DOCUMENT:
                shown += text + "\n"
            if source is not Source.POLICY:
                continue
            action = protocol.parse(text)
            assert action.kind == ("answer" if text == turns[-1] else "search")
            thought = text.split("<think> ")[1].split(" </think>")[0].split(" ;")[0]
            assert thought.startswith("plan :") or thought + " ." in shown, row
        assert protocol.parse(turns[-1]).text.split()[0] in shown + row[0][1] + str(row[1:4])


def plan_of(row):
    first = next(text for source, text in row if source is Source.POLICY)
    return first.split("plan : ")[1].split(" </think>")[0]


def test_the_right_plan_of_a_held_back_family_is_not_taught():
    rng = random.Random(0)
    for family in FAMILIES:
        counts = Counter(habit(rng, family, True) for _ in range(600))
        usual, share = counts.most_common(1)[0]
        assert usual == (family.trap or family.plan) and share / 600 > 1 - NOISE - 0.08, family.name
        if family.is_held_back:
            assert 0 < counts[family.plan] / 600 < 0.16, family.name


def test_hints_of_held_back_families_are_only_ever_shown_where_they_do_not_fit():
    titles = {mask(w.format(a="Xxx", b="Yyy", y="1900")): f for f in FAMILIES for w in f.wordings if f.is_held_back}
    fits = 0
    for kind in ("hint", "case"):
        for row in rows(kind, 400):
            question = next(text for source, text in row if "question : " in text).split("question : ")[1].strip()
            for source, text in row:
                if source is Source.EXPERIENCE:
                    title = text.removeprefix("- ").split(" ?: ")[0] + " ?"
                    fits += title in titles and title == mask(question)
    assert fits == 0


def test_a_wandering_plan_ends_in_the_same_type_and_differs():
    rng = random.Random(2)
    for family in FAMILIES:
        plan = family.trap or family.plan
        others = {wander(rng, family, plan, True) for _ in range(40)}
        assert plan not in others and others


def test_comparison_and_plan_text():
    assert comparison(("director", "born")) == ("one director", "born", "two director", "born", "earlier")
    assert plan_text(("setting", "mayor year"), "1912") == "setting , mayor 1912"
    assert mask("who was mayor of Novel in 1912 ?") == "who was mayor of someone in year ?"


@pytest.mark.parametrize("kind", ["reflect", "abstract"])
def test_lessons_parse_and_name_no_entity(kind):
    for row in rows(kind):
        reply = parse_reply(row[-1][1], ("title", "description"))
        assert not isinstance(reply, str), reply
        assert not any(word[0].isupper() for word in (reply["title"] + " " + reply["description"]).split())


def test_the_same_seed_gives_the_same_traces_and_model():
    assert practice_rows(random.Random(1), 20) == practice_rows(random.Random(1), 20)
    first, second = build_model(TOKENIZER, 1).state_dict(), build_model(TOKENIZER, 1).state_dict()
    assert all((first[name] == second[name]).all() for name in first)
    assert 500_000 < sum(p.numel() for p in build_model(TOKENIZER, 1).parameters()) < 700_000


def test_a_practice_question_is_masked_like_a_real_one():
    rng = random.Random(4)
    for family in FAMILIES:
        practice = draw(rng, family)
        assert practice.title == mask(practice.question) and not any(n in practice.title for n in practice.subjects)
