"""Prompts from files: what is kept, what is dropped and counted, what is refused and with which sentence."""

import datetime
import gzip
import json

import pytest

from nemo_style_rlhf.critic_service.protocol import reward_tensors
from nemo_style_rlhf.data.prompts import load_prompts
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.base import validate
from nemo_style_rlhf.schema.chat import Chat
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
    validate(built, "data.")
    return built


@pytest.mark.parametrize("name", ["prompts.jsonl", "prompts.jsonl.gz"])
def test_text_prompts_keep_their_row_number_label_and_other_fields(tmp_path, tokenizer, name):
    path = write(tmp_path / name, [{"prompt": "abcdef"}, {"prompt": "ab", "answer": 4, "level": "easy"}])
    prompts, report = load_prompts(path, config(max_prompt_length=4, label_key=None), tokenizer)
    assert [(prompt.prompt_id, prompt.token_ids, prompt.text) for prompt in prompts] == [(1, [0, 2, 3], "ab")]
    assert prompts[0].metadata == {"answer": 4, "level": "easy"} and prompts[0].label is None
    assert report.kept == 1 and report.dropped == {"longer than 4 tokens": 1}
    assert "line 1" in str(report)


def test_label_is_text_and_the_metadata_has_it_as_it_is(tmp_path, tokenizer):
    path = write(tmp_path / "p.jsonl", [{"question": "ab", "answer": 4}])
    (prompt,), _ = load_prompts(path, config(prompt_key="question", label_key="answer"), tokenizer)
    assert prompt.label == "4" and prompt.metadata == {"answer": 4}


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


def test_a_conversation_takes_the_day_along_to_the_reward_models_that_render_it(tmp_path, tokenizer):
    path = write(tmp_path / "m.jsonl", [{"messages": [{"role": "user", "content": "ab"}]}])
    dated = config(
        format="messages", chat_template="{{ strftime_now('%Y') }}{{ messages[0].content }}", today="2001-02-03"
    )
    (prompt,), _ = load_prompts(path, dated, tokenizer)
    assert prompt.text == "2001ab"
    assert Chat.from_json(reward_tensors([prompt.chat], ["c"])["prompts"][0].decode()).today == "2001-02-03"


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
    ("expression", "reason"),
    [
        ("1 / 0", "division by zero"),
        ("text.index('x')", "substring not found"),
        ("text.encode().decode('none')", "unknown encoding: none"),
    ],
)
def test_an_error_in_an_expression_of_the_chat_template_drops_the_row(tmp_path, tokenizer, expression, reason):
    template = (
        f"{{% set text = messages[0].content %}}{{{{ text }}}}{{% if text == 'a' %}}{{{{ {expression} }}}}{{% endif %}}"
    )
    path = write(tmp_path / "m.jsonl", [{"messages": [{"role": "user", "content": text}]} for text in "ab"])
    prompts, report = load_prompts(path, config(format="messages", chat_template=template), tokenizer)
    assert [prompt.text for prompt in prompts] == ["b"]
    assert report.dropped == {f"refused by the chat template ({reason})": 1}


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content }}",
        "{{ 'b' + messages[0].content }}",
        "{{ messages[0].content if messages[0].content is string else '' }}",
    ],
)
def test_parts_of_text_are_joined_only_for_a_template_that_knows_none(tmp_path, tokenizer, template):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    path = write(tmp_path / "m.jsonl", [{"messages": [{"role": "user", "content": parts}]}])
    (prompt,), _ = load_prompts(path, config(format="messages", chat_template=template), tokenizer)
    assert prompt.text.removeprefix("b") == "ab"
    knows_parts = "{% for m in messages %}{% for part in m.content %}{{ part.text }}c{% endfor %}{% endfor %}"
    (prompt,), _ = load_prompts(path, config(format="messages", chat_template=knows_parts), tokenizer)
    assert prompt.text == "acbc"


def test_a_turn_that_the_chat_template_leaves_out_is_counted(tmp_path, tokenizer):
    turns = [{"role": "bot", "content": "a"}, {"role": "user", "content": "b"}]
    path = write(tmp_path / "m.jsonl", [{"messages": turns}, {"messages": turns[1:]}])
    template = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    prompts, report = load_prompts(path, config(format="messages", chat_template=template), tokenizer)
    assert [prompt.text for prompt in prompts] == ["b"]
    assert report.dropped == {"with a turn of the role 'bot', which the chat template leaves out": 1}


def test_a_turns_time_from_parquet_travels_as_text(tmp_path, tokenizer):
    import datasets

    turn = {"role": "user", "content": "a", "timestamp": datetime.datetime(2023, 4, 9, 0, 2)}
    datasets.Dataset.from_list([{"messages": [turn]}]).to_parquet(str(tmp_path / "m.parquet"))
    settings = config(format="messages", chat_template=ROLES)
    (prompt,), _ = load_prompts(str(tmp_path / "m.parquet"), settings, tokenizer)
    assert Chat.from_json(prompt.chat.to_json()).messages == [{**turn, "timestamp": "2023-04-09 00:02:00"}]


def test_a_tools_answer_that_the_chat_template_leaves_out_is_counted_but_not_one_that_it_escapes(tmp_path, tokenizer):
    path = write(
        tmp_path / "m.jsonl",
        [{"messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": ' {"b": "é"}\n'}]}],
    )
    known = "{% for m in messages %}{% if m.role == 'user' or escaped %}{{ m.content | tojson }}{% endif %}{% endfor %}"
    with pytest.raises(UserError, match="with a turn of the role 'tool', which the chat template leaves out"):
        load_prompts(path, config(format="messages", chat_template=known), tokenizer)
    escaping = "{% set escaped = true %}" + known
    prompts, _ = load_prompts(path, config(format="messages", chat_template=escaping), tokenizer)
    assert len(prompts) == 1


ROLES = (
    "{% for m in messages %}{{ {'system': 's', 'user': 'u', 'assistant': 'r', 'tool': 't'}[m.role] }}{{ m.content }}"
    "{% endfor %}{% if add_generation_prompt %}r{% endif %}"
)


def turns(*spoken):
    """Messages from texts such as "user a"."""
    return [dict(zip(("role", "content"), each.split(), strict=True)) for each in spoken]


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        (turns("user a", "assistant b"), "uar"),
        (turns("system c", "user a", "assistant b", "user d", "assistant e"), "scuarbudr"),
        (turns("user a", "assistant b", "assistant c"), "uar"),
        (turns("user a", "assistant b", "tool c", "assistant d"), "uar"),
        (turns("user a", "assistant b", "user d"), "uarbudr"),
        (turns("user a", "assistant b", "tool c"), "uarbtcr"),
        (turns("system a"), "sar"),
    ],
    ids=[
        "one",
        "the last",
        "two in a row",
        "with a tool's turn",
        "ends with the user",
        "ends with a tool",
        "system alone",
    ],
)
def test_a_conversation_is_cut_before_the_answer_it_ends_with(tmp_path, tokenizer, messages, text):
    path = write(tmp_path / "m.jsonl", [{"messages": messages, "answer": 4}])
    settings = config(format="messages", chat_template=ROLES, label_key="answer")
    (prompt,), report = load_prompts(path, settings, tokenizer)
    assert (prompt.text, prompt.label) == (text, "4")
    assert report.cut == (messages[-1]["role"] == "assistant")


def test_the_report_counts_cut_conversations_and_drops_those_that_are_nothing_but_an_answer(tmp_path, tokenizer):
    answered, open_ended = turns("user a", "assistant b"), turns("user a")
    alone = [turns("assistant b"), turns("system c", "assistant b")]
    settings = config(format="messages", chat_template=ROLES, max_prompt_length=5)
    too_long = turns("user aaaaa", "assistant b")
    path = write(
        tmp_path / "m.jsonl", [{"messages": each} for each in (answered, open_ended, *alone, too_long, answered)]
    )
    prompts, report = load_prompts(path, settings, tokenizer)
    assert [(prompt.prompt_id, prompt.text) for prompt in prompts] == [(0, "uar"), (1, "uar"), (5, "uar")]
    assert report.dropped == {"without a turn before the answer": 2, "longer than 5 tokens": 1}
    assert str(report).startswith(f"{path}: 3 rows kept, 2 of them cut before the answer they end with, 3 dropped (")
    assert "\n" not in str(report)
    whole = write(tmp_path / "whole.jsonl", [{"messages": answered}])
    _, report = load_prompts(whole, settings, tokenizer)
    assert str(report) == f"{whole}: 1 rows, 1 of them cut before the answer they end with"


def test_an_instruction_goes_on_in_its_input(tmp_path, tokenizer):
    inputs = ["bc", "", "  ", None]
    path = write(tmp_path / "p.jsonl", [{"instruction": "a", "input": given, "output": "d"} for given in inputs])
    settings = config(prompt_key="instruction", input_key="input", prompt_template="x{prompt}y")
    prompts, _ = load_prompts(path, settings, tokenizer)
    assert [prompt.text for prompt in prompts] == ["xa\n\nbcy", "xay", "xay", "xay"]
    assert [prompt.metadata for prompt in prompts] == [{"output": "d"}] * 4


def test_alpacas_input_is_read_unless_another_setting_reads_it(tmp_path, tokenizer):
    inputs = ["b", "", None, 3]
    rows = [{"instruction": "a", "input": given, "output": "d"} for given in inputs]
    for prompt_key in ("instruction", None):
        prompts, report = load_prompts(write(tmp_path / "p.jsonl", rows), config(prompt_key=prompt_key), tokenizer)
        assert [prompt.text for prompt in prompts] == ["a\n\nb", "a", "a"]
        assert [prompt.metadata for prompt in prompts] == [{"output": "d"}] * 3
        assert report.dropped == {"whose 'input' holds int instead of a string": 1}
    (first, *_), _ = load_prompts(write(tmp_path / "p.jsonl", rows), config(label_key="input"), tokenizer)
    assert (first.text, first.label) == ("a", "b")


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
        ('{"messages": ["a"]}\n', {"format": "messages"}, "not a list of messages"),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "model", "content": "b"}]}\n',
            {"format": "messages"},
            "line 1: the last of 'messages' has the role 'model', expected one of system, .* rename the keys and roles",
        ),
        (
            '{"conversations": [{"speaker": "human", "text": "a"}]}\n',
            {"format": "messages"},
            "a turn of 'conversations' has the keys speaker, text, expected role and content, or from and value",
        ),
        (
            '{"conversations": [{"from": "human", "value": "a"}, {"from": "narrator", "value": "b"}]}\n',
            {"format": "messages"},
            "has a turn from 'narrator', expected one of system, human, .*: rename it",
        ),
        (
            '{"prompt": [{"role": "user", "content": "a"}]}\n',
            {},
            "line 1: 'prompt' holds a list, .* set data=messages and data.prompt_key=prompt$",
        ),
        (
            '{"chosen": [{"role": "user", "content": "a"}]}\n',
            {"format": "hh"},
            "data=messages and data.prompt_key=chosen$",
        ),
        ('{"instruction": "a"}\n', {"prompt_key": "instruction", "input_key": "input"}, "set data.input_key"),
        (
            '{"instruction": "a", "input": 3}\n',
            {"prompt_key": "instruction", "input_key": "input"},
            "'input' holds int, .* data.input_key",
        ),
    ],
)
def test_mistakes_get_one_sentence(tmp_path, tokenizer, content, changes, sentence):
    path = tmp_path / "p.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=sentence) as raised:
        load_prompts(str(path), config(**changes), tokenizer)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("own", "named"),
    [({"top_p": 0.9}, "top_p=0.9"), ({"top_k": 5}, "top_k=5"), ({"temperature": 2, "min_length": 3}, "min_length=3")],
)
def test_a_row_that_cuts_its_distribution_is_refused_where_the_whole_one_is_needed(tmp_path, tokenizer, own, named):
    whole = {"temperature": 0.5, "top_p": 1, "top_k": 0, "min_length": 0, "max_length": 4, "stop": ["b"]}
    rows = [{"prompt": "a", "own": whole}, {"prompt": "a"}, {"prompt": "b", "own": own}]
    path = write(tmp_path / "p.jsonl", rows)
    assert len(load_prompts(path, config(sampling_key="own"), tokenizer)[0]) == 3
    with pytest.raises(
        UserError, match=rf"p\.jsonl line 3: {named} .* algorithm\.old_logprobs=sampler .* use .*=trainer$"
    ):
        load_prompts(path, config(sampling_key="own"), tokenizer, whole_distribution=True)
    path = write(tmp_path / "whole.jsonl", rows[:2])
    assert len(load_prompts(path, config(sampling_key="own"), tokenizer, whole_distribution=True)[0]) == 2


@pytest.mark.parametrize("own", [{"top_k": "5"}, {"max_length": 2.5}, {"min_length": [1]}])
def test_a_rows_counts_are_whole_numbers(tmp_path, tokenizer, own):
    path = write(tmp_path / "p.jsonl", [{"prompt": "a", "own": own}])
    (name,) = own
    with pytest.raises(UserError, match=rf"line 1: {name}=.* is not possible: expected a whole number"):
        load_prompts(path, config(sampling_key="own"), tokenizer)


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
        ({"input_key": "input", "format": "messages"}, "data.input_key is set but data.format=messages"),
        ({"system_key": "system"}, "data.system_key is set but data.format=text uses no chat template"),
    ],
)
def test_impossible_settings_are_refused(changes, sentence):
    with pytest.raises(UserError, match=sentence):
        config(**changes)


def test_conversations_without_a_prompt_name_the_preset_that_reads_them(tmp_path, tokenizer):
    path = write(tmp_path / "share.jsonl", [{"conversations": [{"from": "human", "value": "a"}]}])
    with pytest.raises(UserError, match=r"has no 'prompt' but a conversation in 'conversations': set data=messages"):
        load_prompts(path, config(), tokenizer)
