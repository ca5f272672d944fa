"""Tool calls in responses, read by vLLM's parsers."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.generation.tool_calls import tool_call_reader

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 3}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizer():
    """Every byte is a token."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(sorted(letters))}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("tools", [None, [TOOL]])
def test_a_call_is_found_whether_or_not_the_prompts_describe_tools(tokenizer, tools):
    read = tool_call_reader("hermes", tokenizer, tools)
    message = read(CALL, tokenizer(f"so {CALL}")["input_ids"])
    assert message["content"] == "so "
    assert [call["function"] for call in message["tool_calls"]] == [{"name": "add", "arguments": '{"x": 3}'}]


@pytest.mark.parametrize("broken", ["<tool_call>{", "<tool_call>[1]</tool_call>", '<tool_call>{"name": "add"}'])
def test_a_call_that_nobody_can_read_is_a_plain_answer_and_no_traceback_in_the_log(tokenizer, broken, capfd):
    read = tool_call_reader("hermes", tokenizer)
    assert read(broken, tokenizer(broken)["input_ids"]) == {"role": "assistant", "content": broken}
    assert "Traceback" not in "".join(capfd.readouterr())


def test_an_unknown_parser_is_refused(tokenizer):
    with pytest.raises(UserError, match=r"agent.tool_parser=nobody is unknown to vLLM: expected one of .*hermes"):
        tool_call_reader("nobody", tokenizer)
