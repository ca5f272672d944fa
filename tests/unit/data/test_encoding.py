"""What a conversation is rendered as depends on the conversation, the template and the configuration alone."""

import json

import pytest

from nemo_style_rlhf.data.encoding import Encoder, decode_response
from nemo_style_rlhf.data.records import Dropped, DropReport, Record, require_whole_characters, usable
from nemo_style_rlhf.data.reward_text import RewardText
from nemo_style_rlhf.data.supervised import sft_reader
from nemo_style_rlhf.data.turns import messages, tools
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.chat import REASONING, Chat
from nemo_style_rlhf.schema.supervised import SFTDataConfig
from tests.unit.agents.chat_templates import CHATML, DATED, REAL, encoder

QUESTION = [{"role": "user", "content": "What is a cat?"}]
ANSWER = {"role": "assistant", "content": "An animal."}
ARGUMENTS = {"city": "Rome", "n": 3, "deep": {"none": None, "list": [1.5, "a"]}}


def called(arguments: object) -> list[dict]:
    call = {"type": "function", "id": "call00001", "function": {"name": "weather", "arguments": arguments}}
    return [
        *QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "weather", "tool_call_id": "call00001", "content": "sunny"},
    ]


def rendered(template: str, arguments: object) -> str:
    try:
        return encoder(template).chat(called(arguments), add_generation_prompt=True)
    except Dropped as reason:
        return f"dropped {reason}"


@pytest.mark.skipif(not REAL, reason="the chat templates of public models do not lie beside this checkout")
@pytest.mark.parametrize("name", REAL)
def test_arguments_as_json_text_are_rendered_as_the_object(name: str) -> None:
    """As OpenAI's own format has them."""
    as_object = rendered(REAL[name], ARGUMENTS)
    assert rendered(REAL[name], json.dumps(ARGUMENTS)) == as_object
    given = called(json.dumps(ARGUMENTS))
    rendered(REAL[name], json.dumps(ARGUMENTS))
    assert given == called(json.dumps(ARGUMENTS))  # it is not changed


@pytest.mark.parametrize("text", ["no JSON", "[1]", '"text"', "3"])
def test_text_that_is_no_object_stays_as_it_is(text: str) -> None:
    template = "{% for m in messages %}{{ m.role }}{{ m.tool_calls }}{{ m.content }}{% endfor %}"
    assert repr(text) in encoder(template).chat(called(text), add_generation_prompt=True)


def dated(today: str | None) -> Encoder:
    plain = encoder(DATED)
    return Encoder(plain.tokenizer, today=today)


def test_a_template_that_asks_for_the_date_gets_that_of_the_configuration() -> None:
    assert (
        dated("2025-07-01")
        .chat(QUESTION, add_generation_prompt=True)
        .startswith("<|im_start|>system\nToday is 01 July 2025.")
    )
    assert dated(None).writes_a_date and not encoder("{{ messages[0].content }}").writes_a_date
    other = dated(None).chat(QUESTION, add_generation_prompt=True, today="2024-02-29")
    assert "Today is 29 February 2024." in other


def test_a_reward_model_renders_on_the_day_that_comes_with_the_conversation(tmp_path) -> None:
    text = RewardText(str(tmp_path), dated(None).tokenizer, append_eos=None)
    sent = Chat.from_json(Chat(QUESTION, today="2025-07-01").to_json())
    ids = text.token_ids(sent, "An animal.")
    assert "Today is 01 July 2025." in text._encoder.tokenizer.decode(ids)
    for wrong in ("2025-13-01", "yesterday", 20250701):
        with pytest.raises(ValueError, match=r"date|month|ISO"):
            Chat.from_json(json.dumps({"messages": QUESTION, "tools": None, "today": wrong}))


HALF = "\ud83d"


@pytest.mark.parametrize(
    "fields",
    [{"prompt": f"a {HALF}"}, {"messages": [{"role": "user", "content": HALF}]}, {"prompt": "a", "row": {HALF: 1}}],
)
def test_a_row_with_half_of_a_character_is_dropped_and_counted(fields: dict) -> None:
    records = [Record(0, "line 1", fields), Record(1, "line 2", {"prompt": "a \U0001f600", "n": 3})]
    rows, report = usable(records, lambda record: record.index, "rows.jsonl")
    assert rows == [1] and "1 dropped (1 with half of a character (a lone surrogate)" in str(report)
    require_whole_characters(["ä", {"b": None}, 1.5])


def test_an_empty_list_of_tool_calls_says_that_there_are_none() -> None:
    turns = [*QUESTION, {"role": "assistant", "content": "An animal.", "tool_calls": []}]
    found = messages(Record(0, "line 1", {"messages": turns}), "messages", "data.messages_key")
    assert found[1] == {"role": "assistant", "content": "An animal."}


OF_IMAGES = ("idefics3", "llava_next", "smolvlm")
"""They write no turn that is plain text."""
OPENS_REASONING = ("deepseek_r1_distill", "deepseekv3")
"""Their prompt opens reasoning, which they leave out of every answer. The policy has to close it."""
SAID = ["2+2?", "It is 4.", "3+3?", "It is 6.", "4+4?", "It is 8."]
CONVERSATION = [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(SAID)]


@pytest.mark.skipif(not REAL, reason="the chat templates of public models do not lie beside this checkout")
@pytest.mark.parametrize("name", REAL)
def test_every_answer_is_learned_after_the_text_that_the_model_sees_at_inference(name: str) -> None:
    """Also under templates that write an answer otherwise once a question follows it."""
    reader = encoder(REAL[name])
    config = SFTDataConfig(train_path="unused", append_eos=False, max_length=4096)
    if name in OF_IMAGES:
        with pytest.raises(Dropped, match="leaves out"):
            sft_reader((), config, reader)(Record(0, "line 1", {"messages": CONVERSATION}))
        return
    examples = sft_reader((), config, reader)(Record(0, "line 1", {"messages": CONVERSATION}))
    learned = []
    for example in examples:
        ids, mask = example.token_ids, example.learned()
        starts = [at for at in range(1, len(ids)) if mask[at] and not mask[at - 1]]
        ends = [at for at in range(1, len(ids) + 1) if mask[at - 1] and (at == len(ids) or not mask[at])]
        texts = [reader.tokenizer.decode(ids[:start], skip_special_tokens=False) for start in starts]
        answers = [reader.tokenizer.decode(ids[start:end]) for start, end in zip(starts, ends, strict=True)]
        learned += zip(texts, answers, strict=True)
    prompts = [reader.chat(CONVERSATION[:turn], add_generation_prompt=True) for turn in (1, 3, 5)]
    assert [reader.rendered(text) for text, _ in learned] == [reader.rendered(prompt) for prompt in prompts]
    assert all(CONVERSATION[turn]["content"] in answer for turn, (_, answer) in zip((1, 3, 5), learned, strict=True))


@pytest.mark.skipif(not REAL, reason="the chat templates of public models do not lie beside this checkout")
@pytest.mark.parametrize("name", OPENS_REASONING)
@pytest.mark.parametrize(
    ("answer", "reasoning"),
    [
        ({"content": "It is 4."}, ""),
        ({"content": "It is 4.", "reasoning_content": "Two and two."}, "Two and two."),
        ({"content": "<think>\nTwo and two.\n</think>\n\nIt is 4."}, "Two and two."),
    ],
)
def test_an_answer_closes_the_reasoning_that_its_prompt_opens(name: str, answer: dict, reasoning: str) -> None:
    reader = encoder(REAL[name])
    config = SFTDataConfig(train_path="unused", append_eos=False)
    turns = [CONVERSATION[0], {"role": "assistant", **answer}]
    (example,) = sft_reader((), config, reader)(Record(0, "line 1", {"messages": turns}))
    start = example.learned().index(True)
    said = reader.tokenizer.decode(example.token_ids[start:], skip_special_tokens=False)
    assert said.startswith(f"{reasoning}\n</think>\n\n") and "It is 4." in said and said.count("</think>") == 1


def test_what_to_do_about_rows_depends_on_why_they_were_dropped() -> None:
    report = DropReport("rows.jsonl")
    for reason in (Dropped("empty"), Dropped("longer than 3 tokens", advice="raise data.max_length"), Dropped("empty")):
        report.drop(reason, Record(0, "line 1", {}))
    with pytest.raises(
        UserError, match=r"\(2 empty, 1 longer than 3 tokens\): check the file, or raise data\.max_length$"
    ):
        report.require_kept()


NULLS = {"function": {"name": "look_up", "arguments": {"limit": None, "deep": {"a": None}}}, "id": None}
SCHEMA = {"type": "function", "function": {"name": "look_up", "parameters": {"default": None}}}


def test_a_null_is_a_value_where_nothing_fills_rows_with_nulls() -> None:
    """In the arguments of a call and in a schema, from JSON. Tables fill keys that other rows have."""
    fields = {
        "messages": [{"role": "assistant", "content": None, "name": None, "tool_calls": [NULLS]}],
        "tools": [SCHEMA],
    }
    (turn,) = messages(Record(0, "line 1", fields), "messages", "data.messages_key")
    assert turn["tool_calls"] == [{"function": NULLS["function"]}] and "name" not in turn
    assert (
        tools(Record(0, "line 1", fields))
        == [SCHEMA]
        == tools(Record(0, "row 1", {"tools": json.dumps([SCHEMA])}, True))
    )
    (turn,) = messages(Record(0, "row 1", fields, filled=True), "messages", "data.messages_key")
    assert turn["tool_calls"] == [{"function": {"name": "look_up", "arguments": {"deep": {}}}}]
    assert tools(Record(0, "row 1", fields, filled=True)) == [
        {"type": "function", "function": {"name": "look_up", "parameters": {}}}
    ]


CALLING = {"role": "assistant", "content": "Let me see.", "tool_calls": [NULLS]}


@pytest.mark.parametrize(
    ("turns", "given"),
    [
        ([*QUESTION, CALLING], {}),
        ([*QUESTION, CALLING, *QUESTION, ANSWER], {}),
        ([*QUESTION, ANSWER], {"tools": [SCHEMA]}),
    ],
)
def test_calls_and_tools_that_no_template_writes_are_a_reason_to_drop_a_row(turns: list, given: dict) -> None:
    """Else a model would learn to say that it looks, and not to look."""
    writes = CHATML.replace(
        "message.content", "message.content + (message.tool_calls or [])|tojson + (tools or [])|tojson"
    )
    record = Record(0, "line 1", {"messages": turns, **given})
    config = SFTDataConfig(train_path="unused", max_length=4096)
    with pytest.raises(Dropped, match=r"a (call|tool) of 'look_up', which the chat template leaves out"):
        sft_reader((), config, encoder(CHATML))(record)
    assert sft_reader((), config, encoder(writes))(record)


THINKING = {
    name: CHATML.replace("message.content", f"(message.{name} or '') + '|' + message.content") for name in REASONING
}


@pytest.mark.parametrize("given", REASONING)
@pytest.mark.parametrize("read", REASONING)
def test_reasoning_reaches_the_template_under_the_name_that_it_reads(given: str, read: str) -> None:
    answer = {"role": "assistant", "content": "An animal.", given: "Cats meow."}
    text = encoder(THINKING[read]).chat([*QUESTION, answer], add_generation_prompt=False)
    assert "assistant\nCats meow.|An animal." in text


def test_reasoning_that_no_template_writes_is_a_reason_to_drop_a_row() -> None:
    config = SFTDataConfig(train_path="unused")
    answer = {"role": "assistant", "content": "An animal.", "thinking": "Cats meow."}
    rows, report = usable(
        [Record(0, "line 1", {"messages": [*QUESTION, answer]}), Record(1, "line 2", {"messages": [*QUESTION, ANSWER]})],
        sft_reader((), config, encoder(CHATML)), "rows.jsonl",
    )  # fmt: skip
    assert len(rows) == 1 and "1 with reasoning that the chat template does not write" in str(report)


def test_special_tokens_are_kept_for_rewards_that_look_for_them() -> None:
    tokenizer = encoder(CHATML).tokenizer
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"], "eos_token": "<|im_end|>"})
    prompt = tokenizer("a cat", add_special_tokens=False)["input_ids"]
    text = "<think>two</think> 4"
    response = tokenizer(f"{text}<|im_end|>", add_special_tokens=False)["input_ids"]
    ends = {tokenizer.eos_token_id}
    assert decode_response(tokenizer, prompt, response) == "two 4"
    assert decode_response(tokenizer, prompt, response, special_but=ends) == text
    assert decode_response(tokenizer, prompt, response[:-1], special_but=ends) == text  # truncated
    assert decode_response(tokenizer, prompt, [], special_but=ends) == ""
