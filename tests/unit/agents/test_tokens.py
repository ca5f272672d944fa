# ruff: noqa: RUF001
"""An episode's tokens: only what an observation adds is tokenized, and it equals what a whole rendering has there."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from nemo_style_rlhf.agents.tokens import continuation
from nemo_style_rlhf.data.chat_templates import classify
from nemo_style_rlhf.data.encoding import Encoder
from nemo_style_rlhf.data.turns import said
from nemo_style_rlhf.errors import UserError
from tests.unit.agents.chat_templates import (
    CHATML,
    DATA,
    DATED,
    FORGETFUL,
    LLAMA,
    MISTRAL,
    NO_TOOLS,
    PLAIN,
    REAL,
    STRIPPED,
    WRITTEN,
    encoder,
)

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Looks a word up.",
            "parameters": {"type": "object", "properties": {"word": {"type": "string", "description": "The word."}}},
        },
    }
]
PLAIN_TURNS = [
    said("user", "What is a cat?"), said("assistant", "An answer."), said("user", "And a mat, é?"),
    said("assistant", "Something to sit on."), said("user", "Thank you."), said("assistant", "Well"), said("user", "Bye."),
]  # fmt: skip
ARGUMENT = "needle"


def call(**arguments: str) -> dict:
    return {"id": "call00001", "type": "function", "function": {"name": "look_up", "arguments": arguments}}


def result(content: str) -> dict:
    return {"role": "tool", "name": "look_up", "tool_call_id": "call00001", "content": content}


CALLING = {**said("assistant", ""), "tool_calls": [call(word=ARGUMENT)]}
TOOL_TURNS = [said("user", "Look it up."), CALLING, result("a thing"), result("two things"), *PLAIN_TURNS[1:]]
"""The call has two results, and a question follows the answer to them."""


def text_of(encoder: Encoder, ids: list[int]) -> str:
    return str(encoder.tokenizer.decode(ids, skip_special_tokens=False))


def token(encoder: Encoder, text: str) -> int:
    (single,) = encoder.rendered(text)
    return single


def turns(messages: list[dict]):
    """For every answer: the messages before it, with it, and the observation after it."""
    ends = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    for end, following in zip(ends, [*ends[1:], len(messages)]):
        yield messages[:end], messages[: end + 1], messages[end + 1 : following]


def marker_of(encoder: Encoder) -> int:
    """The first special token behind an answer in a whole rendering."""
    whole = encoder.chat(PLAIN_TURNS[:3], add_generation_prompt=True)
    behind = encoder.rendered(whole.partition(PLAIN_TURNS[1]["content"])[2])
    return next(each for each in behind if each in encoder.tokenizer.added_tokens_decoder)


def played(encoder: Encoder, messages: list[dict], tools: list[dict] | None) -> tuple[list[list[int]], list[list[int]]]:
    """The continuations of an episode, and what whole renderings have there, cut by what this test knows of them."""
    marker, sampled = marker_of(encoder), encoder.rendered("some thing")
    found, wanted = [], []
    for before, so_far, new in turns(messages):
        prompt = encoder.chat(before, add_generation_prompt=True, tools=tools)
        whole = encoder.chat([*so_far, *new], add_generation_prompt=True, tools=tools)
        said_last = ARGUMENT if "tool_calls" in so_far[-1] else so_far[-1]["content"]
        # Some templates write no calls.
        behind = whole.rpartition(said_last)[2] if said_last in whole else whole.removeprefix(prompt)
        ids = encoder.rendered(behind)
        expected = ids[ids.index(marker) :]
        found += [continuation(encoder, so_far, ids, new, tools=tools) for ids in (sampled, [*sampled, marker])]
        wanted += [encoder.rendered(whole)[-len(expected) :], expected[1:]]
    return found, wanted


@pytest.mark.parametrize("stories", [False, True], ids=["bytes", "stories"])
@pytest.mark.parametrize("name", REAL)
def test_continuations_of_public_templates_equal_the_whole_rendering(name, stories):
    """For templates that rewrite the past, what they write behind the last answer is the same."""
    reader = encoder(REAL[name], stories=stories)
    found = classify(reader)
    if found.kind == "refuses":
        with pytest.raises(UserError, match="cannot render an observation"):
            continuation(reader, PLAIN_TURNS[:2], [], PLAIN_TURNS[2:3])
        return
    continuations, expected = played(reader, PLAIN_TURNS, None)
    assert continuations == expected
    if found.kind == "appends" and not any("tool results" in limit for limit in found.limits):
        continuations, expected = played(reader, TOOL_TURNS, TOOLS)
        assert continuations == expected


@pytest.mark.parametrize("name", WRITTEN)
def test_continuations_of_written_templates_equal_the_whole_rendering(name):
    reader = encoder(WRITTEN[name])
    continuations, expected = played(reader, PLAIN_TURNS, None)
    assert len(continuations) == 6 and continuations == expected
    if name not in {"mistral", "gemma", "no tools"}:
        continuations, expected = played(reader, [said("system", "Be brief."), *PLAIN_TURNS], None)
        assert continuations == expected


@pytest.mark.skipif(
    not DATA.is_dir(),
    reason="needs public chat templates and a tokenizer in ../shared/data, which are not part of the repository",
)
def test_the_stories_tokenizer_puts_no_space_before_text_in_the_middle():
    reader = encoder(CHATML, stories=True)
    before = reader.rendered("a")
    assert text_of(reader, [*before, *reader.rendered("cat")]) == "a cat"
    assert text_of(reader, [*before, *continuation(reader, SO_FAR, before, "cat")]) == "acat"


SO_FAR = [said("user", "a question"), said("assistant", "an answer")]
USER = [said("user", "next")]
BEHIND = "\n<|im_start|>user\nnext<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def chatml() -> Encoder:
    return encoder(CHATML)


def test_what_was_sampled_of_the_end_of_turn_is_left_out(chatml):
    end, newline = chatml.rendered("<|im_end|>"), chatml.rendered("\n")
    for sampled, expected in [
        ([], "<|im_end|>" + BEHIND),
        (chatml.rendered("an answer"), "<|im_end|>" + BEHIND),
        (chatml.rendered("an answer\n"), "<|im_end|>" + BEHIND),  # a line break is no marker
        (end, BEHIND),
        ([*chatml.rendered("an answer"), *end], BEHIND),
        ([*end, *newline], BEHIND[1:]),
        (chatml.rendered("an answer</s>"), "<|im_end|>" + BEHIND),  # the template writes no such token
    ]:
        assert text_of(chatml, continuation(chatml, SO_FAR, sampled, USER)) == expected


def test_sampled_tokens_need_not_be_those_of_the_text(chatml):
    """Byte by byte, as a policy may write it; the message may even say something else."""
    ids = [token(chatml, letter) for letter in "answer"]
    assert ids != chatml.rendered("answer")
    assert continuation(chatml, SO_FAR, ids, USER) == chatml.rendered("<|im_end|>" + BEHIND)


def test_a_marker_of_ordinary_text_is_left_out_as_far_as_it_was_sampled():
    reader = encoder(PLAIN)
    for answer, expected in [
        ("an answer", "\nuser: next\nassistant:"),
        ("an answer\n", "user: next\nassistant:"),
        ("an answer\nuser:", " next\nassistant:"),  # a stop string
    ]:
        assert text_of(reader, continuation(reader, SO_FAR, reader.rendered(answer), USER)) == expected


@pytest.mark.parametrize("content", ["", " ", " an answer\n\n", "\tx", "</think>", "<|im_end|>", "{{ 1 }}{% raw %}"])
@pytest.mark.parametrize("template", [CHATML, STRIPPED, FORGETFUL, LLAMA, MISTRAL, DATED])
def test_what_the_answer_says_changes_nothing(template, content):
    """A template may trim, split or drop it."""
    reader = encoder(template)
    expected = continuation(reader, SO_FAR, [], USER)
    assert (
        continuation(reader, [SO_FAR[0], said("assistant", content)], reader.rendered(content)[:1], USER)[-8:]
        == expected[-8:]
    )
    assert continuation(reader, [SO_FAR[0], said("assistant", content)], [], USER) == expected


def test_observations_of_several_messages(chatml):
    two_questions = [said("user", "one"), said("user", "two")]
    between = "<|im_end|>\n<|im_start|>"
    assert text_of(chatml, continuation(chatml, SO_FAR, [], two_questions)) == (
        f"{between}user\none{between}user\ntwo{between}assistant\n"
    )
    results = [result("one"), result("two"), said("system", "Be brief.")]
    assert text_of(chatml, continuation(chatml, SO_FAR, [], results)) == (
        f"{between}tool\none{between}tool\ntwo{between}system\nBe brief.{between}assistant\n"
    )


def test_text_and_token_ids_pass_by_the_template(chatml):
    ended = chatml.rendered("an answer<|im_end|>")
    assert continuation(chatml, SO_FAR, ended, "one two") == chatml.rendered("one two")
    assert continuation(chatml, SO_FAR, ended, "\n<|im_start|>") == chatml.rendered("\n<|im_start|>")
    assert continuation(chatml, SO_FAR, ended, (7, 5, 7)) == [7, 5, 7]
    assert [continuation(chatml, SO_FAR, ended, nothing) for nothing in ("", [], ())] == [[], [], []]


def test_a_sentinel_that_messages_quote_is_another_one():
    """The sentinel is a digest of the conversation, so a conversation with that text has another."""
    reader = encoder(CHATML)
    seen = []
    reader.chat, chat = (lambda messages, **options: seen.append(messages) or chat(messages, **options)), reader.chat
    continuation(reader, SO_FAR, [], USER)
    sentinel = seen[0][1]["content"]
    assert sentinel not in ("an answer", "") and reader.rendered(sentinel)
    for question in (sentinel, sentinel * 2, sentinel[:-1], sentinel[1:]):
        so_far, new = [said("user", question), said("assistant", question)], [said("user", question)]
        expected = "<|im_end|>" + BEHIND.replace("next", question)
        assert text_of(reader, continuation(reader, so_far, [], new)) == expected


@pytest.mark.skipif(
    not REAL,
    reason="needs public chat templates and a tokenizer in ../shared/data, which are not part of the repository",
)
@pytest.mark.parametrize(
    ("name", "ended_by", "expected"),
    [
        ("gptoss", "<|call|>", "<|start|>functions.look_up to=assistant<|channel|>commentary<|message|>"),
        ("gemma4", "<tool_call|>", "<|tool_response>response:look_up{"),
        ("gemma4", "<|tool_response>", "response:look_up{"),  # the model ends its turn by opening the next
        ("glm4moe", "<|observation|>", "\n<tool_response>\n"),
        ("qwen3", "</tool_call>", "<|im_end|>\n<|im_start|>user\n<tool_response>\n"),  # a stop string
        ("qwen3", "<|im_end|>", "\n<|im_start|>user\n<tool_response>\n"),
        ("qwen3", "thing", "<|im_end|>\n<|im_start|>user\n<tool_response>\n"),
        ("qwen3_5_think", "<|im_end|>", "\n<|im_start|>user\n<tool_response>\n"),
    ],
)
def test_results_of_tools_follow_a_call_however_it_ended(name, ended_by, expected):
    """Also with templates that rewrite the past: the continuation keeps it."""
    reader = encoder(REAL[name])
    text = text_of(
        reader, continuation(reader, TOOL_TURNS[:2], reader.rendered("a" + ended_by), TOOL_TURNS[2:3], tools=TOOLS)
    )
    assert text.startswith(expected) and text.count("a thing") == 1 and ARGUMENT not in text


@pytest.mark.skipif(
    not REAL,
    reason="needs public chat templates and a tokenizer in ../shared/data, which are not part of the repository",
)
def test_a_call_takes_the_form_that_its_template_reads():
    """DeepSeek's adds arguments to a text."""
    as_text = {**call(), "function": {"name": "look_up", "arguments": '{"word": "needle"}'}}
    reader = encoder(REAL["deepseekv3"])
    so_far = [TOOL_TURNS[0], {**CALLING, "tool_calls": [as_text]}]
    ids = continuation(reader, so_far, [token(reader, "<｜end▁of▁sentence｜>")], TOOL_TURNS[2:3], tools=TOOLS)
    assert text_of(reader, ids).startswith(
        "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>a thing<｜tool▁output▁end｜>"
    )


def test_a_call_that_is_not_written_like_an_answer_must_have_ended():
    message = "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}"
    assert message in CHATML
    of_calls = "{{- message.tool_calls | tojson + '<|call|>' -}}"
    reader = encoder(
        CHATML.replace(message, f"{{%- if message.tool_calls -%}}{of_calls}{{%- else -%}}{message}{{%- endif -%}}")
    )
    ended = continuation(reader, TOOL_TURNS[:2], [token(reader, "<|call|>")], TOOL_TURNS[2:3])
    assert text_of(reader, ended) == "<|im_start|>tool\na thing<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(UserError, match="leave tool_calls out of the message of a truncated response"):
        continuation(reader, TOOL_TURNS[:2], reader.rendered("a"), TOOL_TURNS[2:3])


@pytest.mark.parametrize(
    ("template", "new", "said_to_user"),
    [
        (NO_TOOLS, result("x"), r"cannot render an observation \(refused by the chat template \(no tools\)\)"),
        (MISTRAL, said("system", "x"), r"\(refused by the chat template \(Conversation roles must alternate"),
        (
            CHATML.replace("message.content", "(message.content if message.role != 'tool' else '')"), result("x1"),
            r"\(with a turn of the role 'tool', which the chat template leaves out\): return messages that it can",
        ),
        (CHATML.replace("message.content", "message.content * 2"), USER[0], "writes an answer 2 times, expected once"),
        (CHATML.replace("message.content", "(message.content if message.role == 'user' else '')"), USER[0], "leaves out an"),
        (None, USER[0], r"set data\.chat_template"),
    ],
)  # fmt: skip
def test_an_observation_that_cannot_be_rendered_is_refused(template, new, said_to_user):
    with pytest.raises(UserError, match=said_to_user):
        continuation(encoder(template), SO_FAR, [], [new])


def test_mistakes_of_the_caller(chatml):
    with pytest.raises(ValueError, match="must be the assistant's"):
        continuation(chatml, SO_FAR[:1], [], USER)
    with pytest.raises(ValueError, match="must be the assistant's"):
        continuation(chatml, [], [], "text")
    with pytest.raises(ValueError, match="not of both"):
        continuation(chatml, SO_FAR, [], [1, said("user", "x")])


PIECES = st.sampled_from(
    [
        "<|im_end|>",
        "<|im_start|>assistant\n",
        "{{ messages }}",
        "{% endfor %}",
        "[INST]",
        "</s>",
        "\r\n",
        " ",
        "x" + "0" * 64,
    ]
)
TEXTS = st.lists(st.one_of(st.text(st.characters(codec="utf-8"), max_size=8), PIECES), max_size=4).map("".join)
WRITERS = {
    CHATML: lambda new: f"<|im_end|>\n<|im_start|>user\n{new}<|im_end|>\n<|im_start|>assistant\n",
    LLAMA: lambda new: (
        f"<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n{new.strip()}"
        "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
    MISTRAL: lambda new: f"</s>[INST] {new} [/INST]",
}
READERS = {template: encoder(template) for template in WRITERS}


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(WRITERS)), TEXTS, TEXTS, TEXTS, st.lists(st.integers(0, 255), max_size=3))
def test_any_texts(template, question, answer, new, sampled):
    """Texts hold unicode and parts of templates; the test writes by itself what it expects."""
    reader = READERS[template]
    so_far = [said("user", question), said("assistant", answer)]
    expected = reader.rendered(WRITERS[template](new))
    assert continuation(reader, so_far, sampled, [said("user", new)]) == expected
    assert continuation(reader, so_far, [*sampled, expected[0]], [said("user", new)]) == expected[1:]
