"""A reward model reads in serving what it read in training."""

import json
from pathlib import Path

import pytest

from nemo_style_rlhf.data.prompts import load_prompts
from nemo_style_rlhf.data.reward_text import RewardText
from nemo_style_rlhf.data.supervised import load_pairs
from nemo_style_rlhf.data.template_files import write_template
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.chat import Chat
from nemo_style_rlhf.schema.data import PromptDataConfig
from nemo_style_rlhf.schema.supervised import PreferenceDataConfig
from tests.support.models import letter_tokenizer

BOS, EOS, A, B, C = 0, 1, 2, 3, 4
TURNS = (
    "{{ START }}{% for m in messages %}{{ {'user': 'u', 'assistant': 'r'}[m.role] }}{{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}r{% endif %}"
)


@pytest.mark.parametrize("single", [None, "<s> $A", "$A </s>", "<s> $A </s>"])
@pytest.mark.parametrize("template", [None, "q{prompt}r", "<s>q{prompt}r"])
@pytest.mark.parametrize("append_eos", [True, False])
def test_serving_forms_the_sequences_of_training(
    tmp_path: Path, single: str | None, template: str | None, append_eos: bool
) -> None:
    tokenizer = letter_tokenizer(single)
    rows = [{"prompt": "ab", "chosen": "cd", "rejected": "c"}, {"prompt": "{b}", "chosen": "d ", "rejected": "</s>"}]
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    config = PreferenceDataConfig(train_path=str(path), prompt_template=template, append_eos=append_eos)
    pairs, _ = load_pairs(str(path), config, tokenizer)
    write_template(tmp_path, template, tokenizer, append_eos=append_eos)
    text = RewardText(str(tmp_path), tokenizer, append_eos=None)
    assert len(pairs) == len(rows)
    for row, pair in zip(rows, pairs, strict=True):
        assert text.token_ids(row["prompt"], row["chosen"]) == pair.chosen
        assert text.token_ids(row["prompt"], row["rejected"]) == pair.rejected


def test_without_a_note_or_an_end_of_text_token_the_texts_stay_as_they_are(tmp_path: Path) -> None:
    text = RewardText(str(tmp_path), letter_tokenizer(None, eos=None), append_eos=None)
    assert text.token_ids("ab", "c") == [2, 3, 4]


@pytest.mark.parametrize("single", ["<s> $A", "<s> $A </s>"])
def test_a_bos_that_stands_in_the_text_stands_once(tmp_path: Path, single: str) -> None:
    """A template of the policy, which the tokenizer's BOS is part of, wrote it."""
    text = RewardText(str(tmp_path), letter_tokenizer(single), append_eos=None)
    assert text.token_ids("<s>ab", "c") == text.token_ids("ab", "c") == [BOS, A, B, C, EOS]


def test_a_bos_that_the_tokenizer_does_not_add_stays_as_it_was_written(tmp_path: Path) -> None:
    text = RewardText(str(tmp_path), letter_tokenizer(None), append_eos=None)
    assert text.token_ids("<s>ab", "c") == [BOS, A, B, C, EOS]
    assert text.token_ids("ab", "c") == [A, B, C, EOS]


def test_the_template_of_training_is_put_around_every_prompt(tmp_path: Path) -> None:
    """Also around one that looks as if it stood in it already."""
    tokenizer = letter_tokenizer()
    write_template(tmp_path, "q{prompt}r", tokenizer, append_eos=True)
    text = RewardText(str(tmp_path), tokenizer, append_eos=None)
    assert len(text.token_ids("ab", "c")) == len([BOS, "q", A, B, "r", C, EOS])
    assert len(text.token_ids("qabr", "c")) == len([BOS, "q", "q", A, B, "r", "r", C, EOS])
    assert len(text.token_ids("qr", "c")) == len([BOS, "q", "q", "r", "r", C, EOS])


@pytest.mark.parametrize("single", [None, "<s> $A", "<s> $A </s>"])
@pytest.mark.parametrize("start", ["", "{{ bos_token }}"])
def test_rendered_prompts_get_the_tokens_of_training_on_messages(
    tmp_path: Path, single: str | None, start: str
) -> None:
    """With a template that writes BOS and with one that does not, whatever the tokenizer adds to plain text."""
    tokenizer = letter_tokenizer(single)
    tokenizer.chat_template = TURNS.replace("{{ START }}", start)
    question, *answers = (
        {"role": role, "content": text} for role, text in zip(["user", "assistant", "assistant"], "abc")
    )
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"prompt": [question], "chosen": answers[:1], "rejected": answers[1:]}))
    (pair,), _ = load_pairs(str(path), PreferenceDataConfig(train_path=str(path)), tokenizer)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"messages": [question]}))
    config = PromptDataConfig(train_path=str(prompts), format="messages")
    (prompt,), _ = load_prompts(str(prompts), config, tokenizer)
    write_template(tmp_path, None, tokenizer, append_eos=True)
    text = RewardText(str(tmp_path), tokenizer, append_eos=None)
    assert prompt.chat is not None
    assert text.token_ids(prompt.chat, "b") == pair.chosen
    assert text.token_ids(prompt.chat, "c") == pair.rejected
    assert pair.chosen[: len(prompt.token_ids)] == prompt.token_ids


QUESTION = Chat([{"role": "user", "content": "ab"}])
TURNS_OF_THREE = Chat([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}])


@pytest.mark.parametrize("chat", [QUESTION, TURNS_OF_THREE], ids=["a question", "two turns"])
def test_a_model_that_was_trained_elsewhere_reads_what_its_chat_template_writes(tmp_path: Path, chat: Chat) -> None:
    tokenizer = letter_tokenizer()
    tokenizer.chat_template = TURNS.replace("{{ START }}", "{{ bos_token }}")
    whole = [*chat.messages, {"role": "assistant", "content": "c"}]
    expected = tokenizer.apply_chat_template(whole, tokenize=True, return_dict=False)
    assert expected.count(BOS) == 1
    assert RewardText(str(tmp_path), tokenizer, append_eos=None).token_ids(chat, "c") == expected


def test_a_model_without_a_chat_template_reads_a_single_question_as_words_and_no_more(tmp_path: Path) -> None:
    text = RewardText(str(tmp_path), letter_tokenizer(), append_eos=None)
    assert not text.reads_conversations
    assert text.token_ids(QUESTION, "c") == text.token_ids("ab", "c")
    with pytest.raises(
        UserError, match=r"reads no conversations of several turns \(its tokenizer has no chat template\): take"
    ):
        text.token_ids(TURNS_OF_THREE, "c")


def test_a_chat_template_that_fails_is_one_sentence(tmp_path: Path) -> None:
    """A template is a program: here it calls what is no function."""
    tokenizer = letter_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content.nothing() }}"
    with pytest.raises(
        UserError, match=rf"the chat template of the reward model {tmp_path} cannot render a conversation"
    ):
        RewardText(str(tmp_path), tokenizer, append_eos=None).token_ids(TURNS_OF_THREE, "c")


def test_an_encoder_reads_no_conversations_whatever_its_tokenizer_has(tmp_path: Path) -> None:
    tokenizer = letter_tokenizer()
    tokenizer.chat_template = TURNS
    text = RewardText(str(tmp_path), tokenizer, append_eos=None, as_pair=True)
    assert not text.reads_conversations
    with pytest.raises(UserError, match=r"reads no conversations of several turns \(it is an encoder\)"):
        text.token_ids(TURNS_OF_THREE, "c")


def test_a_conversation_travels_whole() -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    chat = Chat([*TURNS_OF_THREE.messages, called], [{"type": "function"}])
    assert Chat.from_json(chat.to_json()) == chat
    assert chat.question is None and QUESTION.question == "ab"


@pytest.mark.parametrize(
    "text",
    ["[]", "nonsense", "[" * 9000, '{"messages": []}', '{"messages": [{"role": "user"}]}', '{"messages": [1]}',
     '{"messages": [{"role": 1, "content": "a"}]}', '{"messages": [{"role": "user", "content": "a"}], "tools": [1]}',
     '{"messages": [{"role": "user", "content": "a"}], "more": 1}'],
)  # fmt: skip
def test_what_is_no_conversation(text: str) -> None:
    with pytest.raises(ValueError, match=r"it is not JSON|expected an object|is not a list of objects"):
        Chat.from_json(text)
