"""Rows of the supervised stages: which tokens are learned, which rows are dropped."""

import json

import pytest

from nemo_style_rlhf.data.supervised import load_pairs, load_sft, load_unpaired
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.supervised import PreferenceDataConfig, SFTDataConfig, UnpairedDataConfig

A, B, C, EOS, BOS = 2, 3, 4, 1, 0


def write(tmp_path, *rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def sft(tmp_path, tokenizer, *rows, **changes):
    examples, report = load_sft(write(tmp_path, *rows), SFTDataConfig(train_path="unused", **changes), tokenizer)
    return [(example.token_ids, example.prompt_length) for example in examples], report


def pairs(tmp_path, tokenizer, *rows, **changes):
    config = PreferenceDataConfig(train_path="unused", **changes)
    found, report = load_pairs(write(tmp_path, *rows), config, tokenizer)
    return [(pair.chosen, pair.rejected, pair.margin) for pair in found], report


def unpaired(tmp_path, tokenizer, *rows, **changes):
    config = UnpairedDataConfig(train_path="unused", **changes)
    found, report = load_unpaired(write(tmp_path, *rows), config, tokenizer)
    return [(example.token_ids, example.prompt_length, example.desirable) for example in found], report


def test_the_prompt_is_read_and_the_response_with_eos_learned(tmp_path, tokenizer):
    examples, _ = sft(tmp_path, tokenizer, {"prompt": "ab", "response": "c"})
    assert examples == [([BOS, A, B, C, EOS], 3)]


def test_plain_text_is_learned_whole(tmp_path, tokenizer):
    examples, _ = sft(tmp_path, tokenizer, {"text": "ab"}, append_eos=False)
    assert examples == [([BOS, A, B], 0)]


def test_eos_is_not_written_twice(tmp_path, make_tokenizer):
    examples, _ = sft(tmp_path, make_tokenizer("<s> $A </s>"), {"prompt": "a", "response": "b"})
    assert examples == [([BOS, A, B, EOS], 2)]


def test_messages_are_learned_in_all_answers_or_the_last_one(tmp_path, tokenizer):
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}{{ m.content }}{% if m.role == 'user' %}z{% endif %}{% endfor %}"
    )
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "a"},
    ]
    rows = {"messages": messages}, {"messages": messages[:1]}
    examples, report = sft(tmp_path, tokenizer, *rows, learn="last_answer")
    assert examples == [([BOS, A, 27, B, C, 27, A, EOS], 6)]
    assert report.dropped == {"without an assistant's last turn": 1}
    path = tmp_path / "conversation.jsonl"
    path.write_text(json.dumps(rows[0]))
    (example,), _ = load_sft(str(path), SFTDataConfig(train_path=str(path)), tokenizer)
    assert example.token_ids == [BOS, A, 27, B, C, 27, A, EOS]
    assert example.learned() == [False, False, False, True, False, False, True, True]


def test_rows_that_cannot_be_learned_are_dropped_and_counted(tmp_path, tokenizer):
    rows = [{"prompt": "a", "response": response} for response in ("b", " ", "bbbbbb")]
    examples, report = sft(tmp_path, tokenizer, *rows, max_length=5)
    assert len(examples) == 1
    assert report.dropped == {"with an empty response": 1, "longer than 5 tokens": 1}


def test_pairs_share_their_prompt(tmp_path, tokenizer):
    row = {"prompt": "a", "chosen": "b", "rejected": "c", "by": 0.5}
    found, _ = pairs(tmp_path, tokenizer, row, margin_key="by", prompt_template="{prompt}{a}".replace("{a}", "a"))
    assert found == [([BOS, A, A, B, EOS], [BOS, A, A, C, EOS], 0.5)]


def test_a_pair_knows_where_its_responses_start(tmp_path, tokenizer):
    config = PreferenceDataConfig(train_path="unused", prompt_template="a{prompt}")
    path = write(tmp_path, {"prompt": "ab", "chosen": "b", "rejected": "cc"})
    (pair,), _ = load_pairs(path, config, tokenizer)
    assert pair.chosen[: pair.prompt_length] == pair.rejected[: pair.prompt_length] == [BOS, A, A, B]
    assert (pair.chosen[4:], pair.rejected[4:]) == ([B, EOS], [C, C, EOS])


def test_conversations_that_the_chat_template_refuses_are_dropped_and_counted(tmp_path, tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "{{ tools[0].name }}{{ m.content }}{% endfor %}"
    )
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [{"messages": [{"role": "system", "content": "c"}, *messages]}, {"messages": messages}]
    examples, report = sft(tmp_path, tokenizer, *({**row, "tools": [{"name": "c"}]} for row in rows))
    assert examples == [([C, A, C, B, EOS], 2)]
    assert report.dropped == {"refused by the chat template (no system role)": 1}


ALPACA = {"instruction": "a", "input": "b"}
ANSWERS = {"output": "c", "chosen": "c", "rejected": "a", "completion": "c", "label": True}


@pytest.mark.parametrize(
    ("load", "changes"),
    [
        (sft, {"response_key": "output"}),
        (sft, {"format": "prompt_response", "response_key": "output"}),
        (pairs, {}),
        (unpaired, {"format": "pairs"}),
        (unpaired, {}),
    ],
    ids=["sft", "prompt_response", "pairs", "pairs judged", "judged"],
)
def test_an_instruction_goes_on_in_its_input(tmp_path, tokenizer, load, changes):
    (without, *_), _ = load(tmp_path, tokenizer, ALPACA | ANSWERS | {"input": ""}, **changes)
    assert without[0] == [BOS, A, C, EOS]
    unknown = 28  # a line break of the blank line between them
    for keys in ({}, {"prompt_key": "instruction"}, {"prompt_key": "instruction", "input_key": "input"}):
        (joined, *_), _ = load(tmp_path, tokenizer, ALPACA | ANSWERS, **keys, **changes)
        assert joined[0] == [BOS, A, unknown, unknown, B, C, EOS]


def test_an_instruction_before_messages_goes_on_in_its_input(tmp_path, tokenizer):
    tokenizer.chat_template = ENDING_TURNS
    row = ALPACA | {"chosen": [said("assistant", "b")], "rejected": [said("assistant", "c")]}
    found, _ = pairs(tmp_path, tokenizer, row)
    assert found == [([BOS, A, 28, 28, B, 27, B, EOS], [BOS, A, 28, 28, B, 27, C, EOS], 0.0)]


ENDING_TURNS = (
    "{{ bos_token }}{% for m in messages %}{{ m.content }}"
    "{% if m.role == 'user' %}z{% else %}{{ eos_token }}y{% endif %}{% endfor %}"
)


def said(role, content):
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [said("user", "a")], "chosen": [said("assistant", "b")], "rejected": [said("assistant", "c")]},
        {"prompt": "a", "chosen": [said("assistant", "b")], "rejected": [said("assistant", "c")]},
        {
            "prompt": "what the messages begin with",
            "chosen": [said("user", "a"), said("assistant", "b")],
            "rejected": [said("user", "a"), said("assistant", "c")],
        },
    ],
    ids=["messages before", "text before", "whole conversations"],
)
def test_pairs_may_be_conversations(tmp_path, tokenizer, row):
    """Answers end at the template's EOS; what it writes behind it is not learned."""
    tokenizer.chat_template = ENDING_TURNS
    found, _ = pairs(tmp_path, tokenizer, row)
    assert found == [([BOS, A, 27, B, EOS], [BOS, A, 27, C, EOS], 0.0)]
    judged, _ = unpaired(tmp_path, tokenizer, row)
    assert judged == [([BOS, A, 27, B, EOS], 3, True), ([BOS, A, 27, C, EOS], 3, False)]


def test_a_judged_answer_may_be_a_message(tmp_path, tokenizer):
    tokenizer.chat_template = ENDING_TURNS
    row = {"prompt": [said("user", "a")], "completion": [said("assistant", "b")], "label": True}
    assert unpaired(tmp_path, tokenizer, row)[0] == [([BOS, A, 27, B, EOS], 3, True)]


def test_conversations_that_are_no_pairs_are_dropped_and_counted(tmp_path, tokenizer):
    tokenizer.chat_template = ENDING_TURNS
    question, answer = said("user", "a"), said("assistant", "b")
    rows = [
        {"chosen": [question, answer], "rejected": [question, said("assistant", "c")]},
        {"chosen": [question, answer], "rejected": [said("user", "c"), answer]},
        {"chosen": [question, answer], "rejected": [question]},
        {"chosen": [question, answer], "rejected": [question, said("assistant", " ")]},
    ]
    found, report = pairs(tmp_path, tokenizer, *rows)
    assert len(found) == 1
    reasons = ("with differing prompts", "without an assistant's last turn", "with an empty response")
    assert report.dropped == dict.fromkeys(reasons, 1)
    with pytest.raises(UserError, match=r"'chosen' is not a list of messages: check the file or data\.chosen_key"):
        pairs(tmp_path, tokenizer, {"chosen": ["b"], "rejected": ["c"]})


def test_judged_answers_keep_their_label(tmp_path, tokenizer):
    rows = [{"prompt": "a", "completion": "b", "label": True}, {"prompt": "a", "completion": "c", "label": False}]
    found, report = unpaired(tmp_path, tokenizer, *rows)
    assert found == [([BOS, A, B, EOS], 2, True), ([BOS, A, C, EOS], 2, False)]
    assert report.kept == 2


def test_keys_of_judged_answers_can_be_set(tmp_path, tokenizer):
    row = {"question": "a", "answer": "b", "good": True, "chosen": "not read"}
    keys = {"prompt_key": "question", "completion_key": "answer", "label_key": "good"}
    found, _ = unpaired(tmp_path, tokenizer, row, **keys, prompt_template="c{prompt}")
    assert found == [([BOS, C, A, B, EOS], 3, True)]


def test_a_pair_is_two_judged_answers(tmp_path, tokenizer):
    rows = [
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"chosen": "\n\nHuman: a\n\nAssistant:b", "rejected": "\n\nHuman: a\n\nAssistant:c"},
        {"prompt": "a", "chosen": "b", "rejected": "b"},
        {"prompt": "a", "chosen": "b", "rejected": " "},
    ]
    found, report = unpaired(tmp_path, tokenizer, *rows)
    assert [(ids[length:], desirable) for ids, length, desirable in found] == [([B, EOS], True), ([C, EOS], False)] * 2
    assert found[0][:2] == ([BOS, A, B, EOS], 2) and found[2][1] == found[3][1] > 10
    assert report.dropped == {"with equal responses": 1, "with an empty response": 1}


def test_judged_answers_that_cannot_be_learned_are_dropped_and_counted(tmp_path, tokenizer):
    rows = [{"prompt": "a", "completion": completion, "label": True} for completion in ("b", " ", "bbbbbb")]
    found, report = unpaired(tmp_path, tokenizer, *rows, max_length=5)
    assert len(found) == 1
    assert report.dropped == {"with an empty response": 1, "longer than 5 tokens": 1}


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        (
            {"prompt": "a", "completion": "b", "label": "yes"},
            "line 1: 'label' holds 'yes', expected true or false, or 1 or 0",
        ),
        ({"prompt": "a", "completion": "b", "label": 2}, "'label' holds 2, expected true or false"),
        ({"prompt": "a", "completion": "b", "label": None}, "'label' holds NoneType, expected true or false"),
        ({"prompt": "a", "completion": "b"}, "no key 'label' .*: set data.label_key"),
        ({"prompt": "a", "label": True}, "no key 'completion' .*: set data.completion_key"),
        ({"prompt": "a", "completion": 3, "label": True}, "'completion' holds int, expected a string"),
    ],
)
def test_a_judged_answer_of_the_wrong_kind_gets_one_sentence(tmp_path, tokenizer, row, sentence):
    with pytest.raises(UserError, match=sentence):
        unpaired(tmp_path, tokenizer, row)


def test_hh_oddities_are_dropped_and_counted(tmp_path, tokenizer):
    def transcript(question, answer):
        return f"\n\nHuman: {question}\n\nAssistant:{answer}"

    rows = [
        {"chosen": transcript("a", " b"), "rejected": transcript("a", " c")},
        {"chosen": transcript("a", " b"), "rejected": transcript("a", " b")},
        {"chosen": transcript("a", " b"), "rejected": transcript("c", " b")},
        {"chosen": transcript("a", " b"), "rejected": transcript("a", "")},
        {"chosen": "a", "rejected": "b"},
    ]
    found, report = pairs(tmp_path, tokenizer, *rows)
    assert len(found) == 1 and found[0][0][-2:] == [B, EOS]
    assert report.dropped == {
        "with equal responses": 1,
        "with differing prompts": 1,
        "with an empty response": 1,
        "without an assistant turn": 1,
    }


def test_a_tokenizer_without_eos_gets_one_sentence(tmp_path, make_tokenizer):
    with pytest.raises(UserError, match=r"set data\.append_eos=false"):
        sft(tmp_path, make_tokenizer(eos=None), {"prompt": "a", "response": "b"})


def test_all_rows_dropped_is_refused(tmp_path, tokenizer):
    with pytest.raises(UserError, match="all 1 rows were dropped"):
        pairs(tmp_path, tokenizer, {"prompt": "a", "chosen": "b", "rejected": "b"})
