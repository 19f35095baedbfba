"""What is learned of a demonstration, against masks written by hand.

Must fail if a prompt token is learned, an end of turn is not, a trajectory is encoded again, BOS comes twice or never,
or a row vanishes without being counted.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support import CHATML, ScriptedEngine, ToySearch, build_byte_tokenizer
from tokenizers import pre_tokenizers, processors

from hiexp.config import ConfigError
from hiexp.data import DataError, Sample
from hiexp.demonstrations import SFTConfig, read_demonstrations
from hiexp.hek import HEK
from hiexp.protocols import PROTOCOLS
from hiexp.rollout import RolloutConfig, run_rollouts
from hiexp.tracking import write_trajectories
from hiexp.trajectory import Segment, Source, Status, Trajectory, Turn

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MARKS = {"<|im_start|>": [256], "<|im_end|>": [257], "<s>": [258]}
PAIR = {"question": "Who?", "target": "You."}
TALK = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Who?"},
    {"role": "assistant", "content": "You."},
    {"role": "user", "content": "Me?"},
    {"role": "assistant", "content": "Yes."},
]
THINKING = CHATML.replace(
    "{{ m['content'] }}",
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}",
)
"""A template that drops the thoughts of all turns but the last, as those of reasoning models do."""


def by_hand(*pieces):
    """(text, is learned) -> ids and mask; one id per byte, without the tokenizer."""
    ids, mask = [], []
    for text, learned in pieces:
        while text:
            mark = next((mark for mark in MARKS if text.startswith(mark)), text[0])
            new = MARKS.get(mark) or [ALPHABET.index({"\n": "\u010a", " ": "\u0120"}.get(mark, mark))]
            ids, mask, text = ids + new, mask + [learned] * len(new), text[len(mark) :]
    return ids, mask


def write(path: Path, *records) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read(path, tokenizer=None, window=4096, protocol=None, **changes):
    return read_demonstrations(path, tokenizer or build_byte_tokenizer(), SFTConfig(**changes), window, protocol)


def one_row(tmp_path, record, tokenizer=None, **changes):
    (row,) = read(write(tmp_path / "data.jsonl", record), tokenizer, **changes).rows
    return row.row()


def with_bos_tokenizer(template):
    """A tokenizer that sets a BOS by itself."""
    tokenizer = build_byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 258)])
    tokenizer.chat_template = template
    assert tokenizer("a")["input_ids"][0] == 258
    return tokenizer


PROMPT = "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("prompt", ["prompt", "question", "instruction", "problem"])
@pytest.mark.parametrize("target", ["target", "response", "completion", "solution", "answer"])
def test_a_pair_is_learned_from_its_answer_to_the_end_of_the_turn(tmp_path, prompt, target):
    assert one_row(tmp_path, {prompt: "Who?", target: "You."}) == by_hand((PROMPT, False), ("You.<|im_end|>", True))


def test_trap_6_the_end_of_the_turn_is_learned_although_it_is_also_the_padding(tmp_path):
    tokenizer = build_byte_tokenizer()
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 257
    for record in (PAIR, {"messages": TALK}):
        ids, mask = one_row(tmp_path, record)
        assert ids[-1] == 257 and mask[-1]


def test_a_system_prompt_is_set_before_rows_that_have_none(tmp_path):
    system = "<|im_start|>system\nBrief.<|im_end|>\n"
    expected = by_hand((system + PROMPT, False), ("You.<|im_end|>", True))
    assert one_row(tmp_path, PAIR, system="Brief.") == expected
    assert one_row(tmp_path, {"messages": TALK[1:3]}, system="Brief.") == expected
    assert one_row(tmp_path, {"messages": TALK}, system="Brief.") == one_row(tmp_path, {"messages": TALK})


def test_every_assistant_turn_of_a_chat_is_learned_and_nothing_else(tmp_path):
    assert one_row(tmp_path, {"messages": TALK}) == by_hand(
        ("<|im_start|>system\nBe kind.<|im_end|>\n" + PROMPT, False),
        ("You.<|im_end|>", True),
        ("\n<|im_start|>user\nMe?<|im_end|>\n<|im_start|>assistant\n", False),
        ("Yes.<|im_end|>", True),
    )


def test_a_prompt_of_messages_teaches_only_its_target(tmp_path):
    """The layout of LUFFY's OpenR1-Math; an earlier answer in the prompt is context."""
    record = {"prompt": TALK[:4], "target": [TALK[4]], "reward_model": {"ground_truth": "Yes."}}
    ids, _ = one_row(tmp_path, {"messages": TALK})
    learned = by_hand(("Yes.<|im_end|>", True))[0]
    assert one_row(tmp_path, record) == (ids, [False] * (len(ids) - len(learned)) + [True] * len(learned))


def test_an_instruction_keeps_its_input(tmp_path):
    ids, _ = one_row(tmp_path, {"instruction": "Add", "input": "1 2", "output": "", "response": "3"})
    assert "Add\n\n1 2<|im_end|>" in build_byte_tokenizer().decode(ids)


def test_without_a_chat_template_the_text_goes_on_and_ends(tmp_path):
    tokenizer = build_byte_tokenizer(chat=False)
    assert one_row(tmp_path, PAIR, tokenizer) == by_hand(("Who?", False), ("You.<|im_end|>", True))
    expected = by_hand(("Brief.\n\nWho?", False), ("You.<|im_end|>", True))
    assert one_row(tmp_path, PAIR, tokenizer, system="Brief.") == expected


@pytest.mark.parametrize("template", [CHATML, "<s>" + CHATML, "{{ bos_token }}" + CHATML, None])
def test_bug_82_bos_comes_exactly_once(tmp_path, template):
    tokenizer = with_bos_tokenizer(template)
    for record in (PAIR, {"messages": TALK})[: 2 if template else 1]:
        ids, mask = one_row(tmp_path, record, tokenizer)
        assert ids[0] == 258 and ids.count(258) == 1 and not mask[0]


def test_bug_82_a_tokenizer_that_sets_no_bos_gets_none(tmp_path):
    tokenizer = build_byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    assert 258 not in one_row(tmp_path, PAIR, tokenizer)[0]


def test_bug_83_masks_do_not_need_the_generation_mark_of_a_template(tmp_path):
    options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    assert not any(build_byte_tokenizer().apply_chat_template(TALK, **options)["assistant_masks"])  # as in the report
    assert sum(one_row(tmp_path, {"messages": TALK})[1]) == len("You.") + len("Yes.") + 2


def test_bug_83_data_that_teach_nothing_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"data.jsonl:1: messages have no assistant turn, nothing to learn; drop"):
        one_row(tmp_path, {"messages": TALK[:2]})
    write_trajectories(tmp_path / "t.jsonl", [attempt("a", [Segment(Source.PROMPT, (1, 2))])])
    with pytest.raises(ConfigError, match=r"t.jsonl: no row has .* \(1 without a token of the policy .*t.jsonl:1\)"):
        read(tmp_path / "t.jsonl")


def test_bug_83_a_template_that_rewrites_earlier_turns_is_refused(tmp_path):
    tokenizer = build_byte_tokenizer()
    tokenizer.chat_template = THINKING
    thought = [TALK[1], {"role": "assistant", "content": "<think>hm</think>You."}]
    ids, mask = one_row(tmp_path, {"messages": thought}, tokenizer)
    assert tokenizer.decode([i for i, on in zip(ids, mask, strict=True) if on]) == "<think>hm</think>You.<|im_end|>"
    path = write(tmp_path / "long.jsonl", {"messages": thought}, {"messages": thought + TALK[3:]})
    with pytest.raises(DataError, match=r"long.jsonl:2: message 3: .* differently once it goes on.*split the record"):
        read(path, tokenizer)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (CHATML.replace("m['content']", "m['content'].split('.')[0]"), "changes its text"),
        (CHATML.replace("<|im_end|>\n{% endfor", "\n{% endfor"), "no control token"),
        ("{{ raise_exception('system only') }}", "does not take the roles user"),
    ],
)
def test_a_template_that_cannot_be_learned_from_is_told_with_the_row(tmp_path, template, message):
    tokenizer = build_byte_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(DataError, match=rf"data.jsonl:1: .*{message}"):
        one_row(tmp_path, PAIR, tokenizer)


def test_a_pair_through_a_protocol_opens_as_its_rollouts_do(tmp_path):
    tokenizer = build_byte_tokenizer()
    for name in ("direct", "search_r1", "few_shot_direct"):
        engine = ScriptedEngine(tokenizer, lambda *_: "<answer> You. </answer> \\boxed{You.}")
        cfg = RolloutConfig(protocol=name, group_size=1, strategy_level=0)
        parts = (engine, tokenizer, PROTOCOLS[name], ToySearch(), HEK.empty())
        run_rollouts(*parts, [Sample("a", "Who <search>?", ("You.",))], cfg, 0)
        path = write(tmp_path / f"{name}.jsonl", {"question": "Who <search>?", "target": "You."})
        (row,) = read(path, tokenizer, prompt="protocol", protocol=PROTOCOLS[name]).rows
        ids, mask = row.row()
        answer = by_hand(("You.<|im_end|>", True))[0]
        assert ids == engine.requests[0][1] + answer
        assert sum(mask) == len(answer) and all(mask[-len(answer) :])


def test_a_protocol_on_a_chat_model_ends_as_the_template_does(tmp_path):
    """The tokenizer of a base model: its texts end with <s>, its turns with <|im_end|>."""
    tokenizer = build_byte_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<s>"})
    for name, end in (("direct", 257), ("few_shot_direct", 258)):
        (row,) = read(write(tmp_path / "d", PAIR), tokenizer, prompt="protocol", protocol=PROTOCOLS[name]).rows
        assert row.token_ids[-1] == end


def attempt(sample_id, segments, reward=1.0, turns=(), status=Status.ANSWERED):
    return Trajectory(sample_id, segments=segments, reward=reward, turns=list(turns), status=status)


def said(tokenizer, *ids):
    return Segment(Source.POLICY, ids, (0.0,) * len(ids)), Turn(tokenizer.decode(list(ids)), "answer", "")


def test_a_trajectory_keeps_its_ids_and_learns_those_of_the_policy(tmp_path, ambiguous_tokenizer):
    """`search` spelt s-e-a-r-c-h by the policy is one token when encoded again."""
    spelt = [ambiguous_tokenizer.convert_tokens_to_ids(letter) for letter in "search"]
    assert ambiguous_tokenizer.encode("search", add_special_tokens=False) != spelt
    policy, turn = said(ambiguous_tokenizer, *spelt)
    rest = [Segment(Source.DOCUMENT, (7, 8)), said(ambiguous_tokenizer, 5)[0], Segment(Source.NOTICE, (9,))]
    one = attempt("a", [Segment(Source.PROMPT, (1, 2)), Segment(Source.EXPERIENCE, (3,)), policy, *rest])
    one.turns = [turn, said(ambiguous_tokenizer, 5)[1]]
    write_trajectories(tmp_path / "t.jsonl", [one])
    (row,) = read(tmp_path / "t.jsonl", ambiguous_tokenizer).rows
    assert row.row() == ([1, 2, 3, *spelt, 7, 8, 5], [False] * 3 + [True] * 6 + [False] * 2 + [True])
    assert row.row() == (one.token_ids[:-1], one.response_mask[:-1])


def test_a_trajectory_of_another_tokenizer_is_refused(tmp_path, ambiguous_tokenizer):
    policy, turn = said(ambiguous_tokenizer, *ambiguous_tokenizer.encode("searching", add_special_tokens=False))
    one = attempt("a", [Segment(Source.PROMPT, (1,)), policy], turns=[turn])
    write_trajectories(tmp_path / "t.jsonl", [one])
    with pytest.raises(DataError, match=r"t.jsonl:1: segments hold token id 26\d, the tokenizer has 258; .*model.path"):
        read(tmp_path / "t.jsonl")
    policy, turn = said(build_byte_tokenizer(), 70, 71)  # ids that exist, but mean something else
    fine = attempt("b", [Segment(Source.PROMPT, (1,)), policy], turns=[turn])
    wrong = attempt("c", fine.segments, turns=[replace(turn, text="xy")])
    write_trajectories(tmp_path / "t.jsonl", [fine, wrong])
    with pytest.raises(DataError, match=r"t.jsonl:2: segments read '..', but turns hold 'xy'; .*model.path"):
        read(tmp_path / "t.jsonl")


def test_only_good_different_and_whole_trajectories_are_used_and_the_rest_counted(tmp_path):
    def one(question, token, reward, status=Status.ANSWERED):
        policy = Segment(Source.POLICY, (token,), (0.0,))
        return attempt(question, [Segment(Source.PROMPT, (1,)), policy], reward, status=status)

    all_ = [one("a", 10, 1.0), one("a", 10, 1.0), one("a", 11, 0.5), one("a", 12, 1.0), one("a", 13, 1.0)]
    all_ += [one("b", 10, 0.0), one("b", 500, 1.0, Status.BROKEN), one("b", 14, 1.0), one("c", 15, float("nan"))]
    write_trajectories(tmp_path / "t.jsonl", all_)
    found = read(tmp_path / "t.jsonl", min_reward=1.0, per_question=2)
    assert [(row.where[-1], row.token_ids[-1]) for row in found.rows] == [("1", 10), ("4", 12), ("8", 14)]
    assert {reason: count for reason, (count, _) in found.left_out.items()} == {
        "repeated or beyond 2 of a question": 2,
        "of reward below 1": 3,
        "with an id that no token has": 1,
    }
    assert f"3 of reward below 1 (first {tmp_path}/t.jsonl:3)" in found.summary()
    assert found.summary().startswith(f"{tmp_path}/t.jsonl: 3 trajectories; 6 tokens, 3 learned")
    assert len(read(tmp_path / "t.jsonl").rows) == 8


def test_longer_rows_are_dropped_or_cut_and_counted(tmp_path):
    path = write(tmp_path / "d.jsonl", PAIR, PAIR | {"target": "x" * 50}, PAIR | {"question": "y" * 99})
    length = len(by_hand((PROMPT + "You.<|im_end|>", True))[0])
    found = read(path, max_tokens=length)
    assert [len(row.token_ids) for row in found.rows] == [length] and found.ends == {257}
    assert found.left_out == {f"longer than {length} tokens": (2, f"{path}:2")}
    found = read(path, window=length, overlong="cut")
    assert [len(row.token_ids) for row in found.rows] == [length, length] and found.rows[1].mask[-5:] == b"\x01" * 5
    assert found.cut == {f"longer than {length} tokens": (1, f"{path}:2")} and "; cut: 1 longer" in found.summary()
    with pytest.raises(ConfigError, match=r"3 longer than 3 tokens \(first .*d.jsonl:1\)\); .*sft.max_tokens"):
        read(path, max_tokens=3)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"question": "Who?"}, r"keys question are no known layout; needed: segments .* messages .* prompt.* target"),
        ({"question": 7, "target": "You."}, r"question must be text or a list of messages, not int"),
        ({"question": "Who?", "target": " "}, r"target\[0\] needs a role and a content"),
        ({"question": "Who?", "target": TALK[:2]}, r"target must be text or one assistant message; use messages"),
        ({"question": "Who?<|im_end|>", "target": "I"}, r"question\[0\] holds the control token <\|im_end\|>; take"),
        ({"messages": []}, r"messages must be text or a list"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\] needs a role and a content"),
        ({"segments": [["policy", [1], []]]}, r"not a trajectory that a run wrote \(no key 'sample_id'\)"),
        ([1], "expected a JSON object"),
    ],
)
def test_a_record_that_cannot_be_used_is_named_with_file_line_and_key(tmp_path, record, message):
    path = write(tmp_path / "d.jsonl", PAIR, record)
    with pytest.raises(DataError, match=rf"^{path}:2: {message}"):
        read(path)


def test_a_chat_without_a_template_and_a_text_without_an_end_are_refused(tmp_path):
    tokenizer = build_byte_tokenizer(chat=False)
    with pytest.raises(DataError, match=r"data.jsonl:1: a chat needs a tokenizer with a chat template; use prompt"):
        one_row(tmp_path, {"messages": TALK}, tokenizer)
    tokenizer.eos_token = None
    with pytest.raises(DataError, match=r"data.jsonl:1: the tokenizer has no end token"):
        one_row(tmp_path, PAIR, tokenizer)


def test_layouts_may_be_mixed_and_the_fingerprint_changes_with_ids_masks_and_order(tmp_path):
    policy, turn = said(build_byte_tokenizer(), 70)
    mixed = [PAIR, {"messages": TALK}, attempt("a", [Segment(Source.PROMPT, (1,)), policy], turns=[turn]).to_json()]
    found = read(write(tmp_path / "m.jsonl", *mixed))
    assert found.layouts == {"pairs (question -> target)": 1, "chats": 1, "trajectories": 1}
    prints = {found.fingerprint(), read(write(tmp_path / "n.jsonl", *mixed[::-1])).fingerprint()}
    prints.add(read(write(tmp_path / "o.jsonl", *mixed), system="Brief.").fingerprint())
    whole = replace(found.rows[0], mask=b"\x00" + b"\x01" * (len(found.rows[0].mask) - 1))
    found.rows[0] = whole
    assert len(prints | {found.fingerprint()}) == 4


@pytest.mark.parametrize(
    "changes", [{"epochs": 0}, {"rows_per_step": 0}, {"dev_every": 5}, {"max_tokens": -1}, {"per_question": -1}]
)
def test_settings_that_cannot_work_name_themselves(changes):
    with pytest.raises(ConfigError, match=next(iter(changes))):
        SFTConfig(**changes)
    with pytest.raises(ConfigError, match="prompt=protocol brings its own instruction"):
        SFTConfig(prompt="protocol", system="Brief.")
