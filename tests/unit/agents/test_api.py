"""Requests of the OpenAI API: what cannot be trained is refused; and answers in the forms that clients read."""

import json

import hypothesis.strategies as st
import pytest
from hypothesis import given

from nemo_style_rlhf.agents.api_answers import Answer
from nemo_style_rlhf.agents.api_requests import ApiError, Offer, Request, read_chat, read_json, read_text
from nemo_style_rlhf.agents.environment import Action

OFFER = Offer(temperature=0.7, top_p=0.9, max_length=100)
USER = {"role": "user", "content": "hello"}
UNTRAINABLE = [
    {"n": 2}, {"temperature": 1.0}, {"temperature": 0}, {"top_p": 1.0}, {"presence_penalty": 0.1}, {"frequency_penalty": -1},
    {"logit_bias": {"5": 1}}, {"seed": 1}, {"response_format": {"type": "json_object"}}, {"top_logprobs": 1},
    {"tool_choice": "required"}, {"tool_choice": {"type": "function", "function": {"name": "f"}}}, {"top_k": 5},
    {"parallel_tool_calls": False}, {"functions": []}, {"reasoning_effort": "low"}, {"modalities": ["audio"]},
    {"max_tokens": 101}, {"max_completion_tokens": 0}, {"max_tokens": True}, {"stop": [""]}, {"stop": ["a"] * 17},
]  # fmt: skip
HARMLESS = [
    {"n": 1}, {"temperature": 0.7}, {"top_p": 0.9}, {"presence_penalty": 0}, {"logit_bias": {}}, {"seed": None}, {"user": "me"},
    {"response_format": {"type": "text"}}, {"tool_choice": "auto"}, {"tool_choice": "none"}, {"parallel_tool_calls": True},
    {"metadata": {"a": "b"}, "store": False}, {"top_k": None}, {"logprobs": False, "top_logprobs": 0}, {"model": "gpt-4o"},
]  # fmt: skip


@pytest.mark.parametrize("asked", UNTRAINABLE, ids=json.dumps)
def test_what_cannot_be_trained_is_refused(asked):
    with pytest.raises(ApiError) as refused:
        read_chat({"messages": [USER], **asked}, OFFER)
    (name,) = asked
    assert refused.value.status == 400 and refused.value.body()["error"]["param"] == name
    assert name in str(refused.value)


@pytest.mark.parametrize("asked", HARMLESS, ids=json.dumps)
def test_what_changes_no_sample_is_passed_over(asked):
    request = read_chat({"messages": [USER], **asked}, OFFER)
    assert (request.prompt, request.sampling) == ([USER], {})


@pytest.mark.parametrize(
    "asked", [{"best_of": 2}, {"echo": True}, {"suffix": "x"}, {"logprobs": 1}, {"messages": [USER]}]
)
def test_texts_have_limits_of_their_own(asked):
    with pytest.raises(ApiError, match=r"not (possible|known)"):
        read_text({"prompt": "Once", **asked}, OFFER)


def test_settings_of_a_request():
    request = read_chat({"messages": [USER], "max_tokens": 50, "max_completion_tokens": 9, "stop": "end"}, OFFER)
    assert request.sampling == {"max_length": 9, "stop": ["end"]}
    texts = [read_text({"prompt": prompt}, OFFER).prompt for prompt in ("a", ["a"], [1, 2], [[1, 2]])]
    assert texts == ["a", "a", [1, 2], [1, 2]]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda each: st.lists(each) | st.dictionaries(st.text(), each),
)


def read(content: object) -> str:
    """The role of the last message that is read, or the status of the refusal."""
    try:
        return str(read_chat(read_json(json.dumps(content).encode()), OFFER).prompt[-1]["role"])
    except ApiError as refused:
        return str(refused.status)


@pytest.mark.slow("sends some hundred requests")
@given(JSON)
def test_no_content_of_a_request_is_a_fault_of_ours(content):
    """Whatever it is, it is read or refused."""
    found = {read(each) for each in (content, {"messages": content}, {"messages": [content]})}
    assert found == {"400"}
    assert read({"messages": [USER], "tools": content, "stop": content}) in ("400", "user")


def answer(**fields) -> Answer:
    action = Action("a cat", {"role": "assistant", "content": "a cat", **fields}, (5, 6), (-0.5, -0.25))
    return Answer(
        Request([USER], model="m", with_usage=True, logprobs=True), action, "name", prompt_tokens=7, created=9
    )


def test_an_answer_has_the_form_of_the_api():
    logprobs = [
        {"token": "token_id:5", "logprob": -0.5, "bytes": None, "top_logprobs": []},
        {"token": "token_id:6", "logprob": -0.25, "bytes": None, "top_logprobs": []},
    ]
    assert answer().chat() == {
        "id": "chatcmpl-name", "object": "chat.completion", "created": 9, "model": "m",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "a cat"}, "finish_reason": "stop",
                     "logprobs": {"content": logprobs, "refusal": None}}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9},
    }  # fmt: skip
    first, last, usage = answer().chat_stream()
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": "a cat"}
    assert last["choices"][0]["finish_reason"] == "stop" and usage["usage"]["total_tokens"] == 9


def test_calls_have_ids_that_follow_from_the_conversation():
    """The template may write them, so a repeated run needs the same; calls of one answer differ."""
    calls = [{"name": "f", "arguments": {"a": 1}}, {"function": {"name": "g", "arguments": "{}"}}]
    (choice,) = answer(tool_calls=calls).chat()["choices"]
    found = choice["message"]["tool_calls"]
    assert [each["function"] for each in found] == [
        {"name": "f", "arguments": '{"a": 1}'},
        {"name": "g", "arguments": "{}"},
    ]
    assert choice["finish_reason"] == "tool_calls" and len({each["id"] for each in found}) == 2
    assert found == answer(tool_calls=calls).chat()["choices"][0]["message"]["tool_calls"]
    first = next(answer(tool_calls=calls).chat_stream())
    assert [each["index"] for each in first["choices"][0]["delta"]["tool_calls"]] == [0, 1]
