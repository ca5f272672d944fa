"""The environment with a calculator."""

import json

import pytest

from tests.support.example_environments import answer, call, load, play


@pytest.fixture(scope="module")
def calculator():
    return load("calculator")


def test_the_result_of_a_call_is_read_and_the_right_answer_earns_one(calculator):
    read, end = play(calculator, "1803", call(expression="37 * 48 + 27"), answer(" 1803\n"))
    assert read.messages == [{"role": "tool", "content": "1803"}] and not read.done and read.reward == 0
    assert end.done and end.reward == 1 and end.metrics == {"tool_calls": 1}


@pytest.mark.parametrize("text", ["1804", "", "1803 or 1804", "37 * 48 + 27"])
def test_any_other_answer_earns_nothing(calculator, text):
    (end,) = play(calculator, "1803", answer(text))
    assert end.done and end.reward == 0 and end.metrics == {"tool_calls": 0}


@pytest.mark.parametrize(
    "arguments",
    [{"expression": "37 *"}, {"expression": "9 ** 9 ** 9"}, {"expression": "print(1)"}, {"expression": 3}, {"sum": "1"}, {}]
    + [{"expression": "1" + "+1" * 5000}, {"expression": "(" * 300}, {"expression": "1.5 + 1"}, {"expression": "\0"}],
)  # fmt: skip
def test_a_call_that_cannot_be_calculated_is_answered(calculator, arguments):
    (read,) = play(calculator, "1803", call(**arguments))
    assert read.messages == [{"role": "tool", "content": "error"}] and not read.done


@pytest.mark.parametrize("arguments", ["3", '"37 * 48"', "[]", "null", "{"])
def test_arguments_that_are_no_object_are_answered(calculator, arguments):
    action = call()
    action.message["tool_calls"][0]["function"]["arguments"] = arguments
    assert play(calculator, "1803", action)[0].messages[0]["content"] == "error"


def test_every_call_of_a_response_is_answered(calculator):
    action = call(expression="1 + 1")
    action.message["tool_calls"] *= 2
    (read,) = play(calculator, "2", action)
    assert json.dumps(read.messages) == json.dumps([{"role": "tool", "content": "2"}] * 2)
    assert read.metrics == {"tool_calls": 2}
