"""Prompts from files: what is kept, what is dropped and counted, what is refused and with which sentence."""

import gzip
import json

import pytest

from nemo_style_rlhf.data.prompts import load_prompts
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.data import PromptDataConfig


def write(path, rows):
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return str(path)


def config(**changes):
    built = PromptDataConfig(train_path="unused", **changes)
    built.validate()
    return built


@pytest.mark.parametrize("name", ["prompts.jsonl", "prompts.jsonl.gz"])
def test_text_prompts_keep_their_row_number_label_and_other_fields(tmp_path, tokenizer, name):
    path = write(tmp_path / name, [{"prompt": "abcdef"}, {"prompt": "ab", "answer": 4, "level": "easy"}])
    prompts, report = load_prompts(path, config(max_prompt_length=4, label_key=None), tokenizer)
    assert [(prompt.prompt_id, prompt.token_ids, prompt.text) for prompt in prompts] == [(1, [0, 2, 3], "ab")]
    assert prompts[0].metadata == {"answer": 4, "level": "easy"} and prompts[0].label is None
    assert report.kept == 1 and report.dropped == {"longer than 4 tokens": 1}
    assert "line 1" in str(report)


def test_label_is_text_and_leaves_the_metadata(tmp_path, tokenizer):
    path = write(tmp_path / "p.jsonl", [{"question": "ab", "answer": 4}])
    (prompt,), _ = load_prompts(path, config(prompt_key="question", label_key="answer"), tokenizer)
    assert prompt.label == "4" and prompt.metadata == {}


def test_template_wraps_the_prompt_and_leaves_its_braces_alone(tmp_path, tokenizer):
    path = write(tmp_path / "p.jsonl", [{"prompt": "{a}"}])
    (prompt,), _ = load_prompts(path, config(prompt_template="x{prompt}y"), tokenizer)
    assert prompt.text == "x{a}y"


def test_hh_transcripts_are_cut_before_the_last_answer(tmp_path, tokenizer):
    transcript = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: d"
    rows = [{"chosen": transcript, "rejected": "x"}, {"chosen": "\n\nHuman: only", "rejected": "x"}]
    prompts, report = load_prompts(write(tmp_path / "hh.jsonl", rows), config(format="hh"), tokenizer)
    assert [prompt.text for prompt in prompts] == ["\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:"]
    assert report.dropped == {"without an assistant turn": 1}


def test_messages_pass_through_the_chat_template_which_brings_its_own_special_tokens(tmp_path, tokenizer):
    template = (
        "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}z{% endif %}"
    )
    path = write(tmp_path / "m.jsonl", [{"messages": [{"role": "user", "content": "ab"}]}])
    (prompt,), _ = load_prompts(path, config(format="messages", chat_template=template), tokenizer)
    assert prompt.token_ids == [0, 2, 3, 27]


def test_the_chat_template_sees_a_rows_tools_and_may_refuse_a_conversation(tmp_path, tokenizer):
    template = (
        "{% if not tools %}{{ raise_exception('no tools') }}{% endif %}{{ tools[0].name }}{{ messages[0].content }}"
    )
    messages = [{"role": "user", "content": "b"}]
    rows = [{"messages": messages}, {"messages": messages, "tools": [{"name": "a"}]}]
    path = write(tmp_path / "m.jsonl", rows)
    prompts, report = load_prompts(path, config(format="messages", chat_template=template), tokenizer)
    assert [prompt.text for prompt in prompts] == ["ab"]
    assert report.dropped == {"refused by the chat template (no tools)": 1}


@pytest.mark.parametrize(
    ("single", "eos", "expected"),
    [
        ("<s> $A", "</s>", [0, 2, 3]),
        ("<s> $A </s>", "</s>", [0, 2, 3]),
        ("$A </s>", "</s>", [2, 3]),
        ("<s> $A", "<s>", [0, 2, 3]),  # bos is eos, as in stories260K
        ("<s> $A <s>", "<s>", [0, 2, 3]),
        ("<s> $A", None, [0, 2, 3]),
        (None, "</s>", [2, 3]),
    ],
)
def test_prompt_tokens_are_the_tokenizers_own_without_a_closing_eos(tmp_path, make_tokenizer, single, eos, expected):
    path = write(tmp_path / "p.jsonl", [{"prompt": "ab"}])
    (prompt,), _ = load_prompts(path, config(), make_tokenizer(single, eos))
    assert prompt.token_ids == expected


def test_a_datasets_folder_and_a_parquet_file_read_like_jsonl(tmp_path, tokenizer):
    import datasets

    table = datasets.Dataset.from_list([{"prompt": "ab"}, {"prompt": "c"}])
    table.save_to_disk(str(tmp_path / "saved"))
    table.to_parquet(str(tmp_path / "p.parquet"))
    for source in ("saved", "p.parquet"):
        prompts, _ = load_prompts(str(tmp_path / source), config(), tokenizer)
        assert [prompt.text for prompt in prompts] == ["ab", "c"]


@pytest.mark.parametrize(
    ("content", "changes", "sentence"),
    [
        (None, {}, "does not exist"),
        ("", {}, "is empty"),
        ('{"question": "a", "answer": "b"}\n', {}, "the keys there are: question, answer"),
        ('{"prompt": "a"}\n{"prompt": \n', {}, "line 2 is not valid JSON"),
        ('{"prompt": "a"}\n[1]\n', {}, "line 2 holds list"),
        ('{"prompt": 3}\n', {}, "holds int, expected a string"),
        ('{"prompt": "abcdef"}\n', {"max_prompt_length": 3}, "raise data.max_prompt_length"),
        ('{"prompt": "a"}\n', {"label_key": "answer"}, "set data.label_key"),
        ('{"messages": [{"role": "user", "content": "a"}]}\n', {"format": "messages"}, "set data.chat_template"),
        ('{"messages": "a"}\n', {"format": "messages"}, "not a list of messages"),
    ],
)
def test_mistakes_get_one_sentence(tmp_path, tokenizer, content, changes, sentence):
    path = tmp_path / "p.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=sentence) as raised:
        load_prompts(str(path), config(**changes), tokenizer)
    assert "\n" not in str(raised.value)


def test_a_truncated_gzip_file_is_refused(tmp_path, tokenizer):
    path = tmp_path / "p.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt": "a"}\n' * 100)[:-12])
    with pytest.raises(UserError, match="cannot be read"):
        load_prompts(str(path), config(), tokenizer)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"format": "xml"}, "data.format=xml"),
        ({"max_prompt_length": 0}, "data.max_prompt_length=0"),
        ({"prompt_template": "no placeholder"}, "exactly once"),
        ({"prompt_template": "{prompt}", "format": "messages"}, "takes a chat template"),
        ({"chat_template": "{{ x }}"}, "set data.format=messages"),
    ],
)
def test_impossible_settings_are_refused(changes, sentence):
    with pytest.raises(UserError, match=sentence):
        config(**changes)
