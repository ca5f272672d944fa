"""Rows of the supervised stages: which tokens are learned, which rows are dropped."""

import json

import pytest

from nemo_style_rlhf.data.supervised import load_pairs, load_sft
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.supervised import PreferenceDataConfig, SFTDataConfig

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


def test_the_prompt_is_read_and_the_response_with_eos_learned(tmp_path, tokenizer):
    examples, _ = sft(tmp_path, tokenizer, {"prompt": "ab", "response": "c"})
    assert examples == [([BOS, A, B, C, EOS], 3)]


def test_plain_text_is_learned_whole(tmp_path, tokenizer):
    examples, _ = sft(tmp_path, tokenizer, {"text": "ab"}, append_eos=False)
    assert examples == [([BOS, A, B], 0)]


def test_eos_is_not_written_twice(tmp_path, make_tokenizer):
    examples, _ = sft(tmp_path, make_tokenizer("<s> $A </s>"), {"prompt": "a", "response": "b"})
    assert examples == [([BOS, A, B, EOS], 2)]


def test_messages_are_learned_in_the_last_answer_alone(tmp_path, tokenizer):
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}{{ m.content }}{% if m.role == 'user' %}z{% endif %}{% endfor %}"
    )
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "a"},
    ]
    examples, report = sft(tmp_path, tokenizer, {"messages": messages}, {"messages": messages[:1]})
    assert examples == [([BOS, A, 27, B, C, 27, A, EOS], 6)]
    assert report.dropped == {"without an assistant's last turn": 1}


def test_rows_that_cannot_be_learned_are_dropped_and_counted(tmp_path, tokenizer):
    rows = [{"prompt": "a", "response": response} for response in ("b", " ", "bbbbbb")]
    examples, report = sft(tmp_path, tokenizer, *rows, max_length=5)
    assert len(examples) == 1
    assert report.dropped == {"with an empty response": 1, "longer than 5 tokens": 1}


def test_pairs_share_their_prompt(tmp_path, tokenizer):
    row = {"prompt": "a", "chosen": "b", "rejected": "c", "by": 0.5}
    found, _ = pairs(tmp_path, tokenizer, row, margin_key="by", prompt_template="{prompt}{a}".replace("{a}", "a"))
    assert found == [([BOS, A, A, B, EOS], [BOS, A, A, C, EOS], 0.5)]


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
