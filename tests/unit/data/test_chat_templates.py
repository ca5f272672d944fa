# ruff: noqa: RUF001
"""Chat templates are classified by what they render, and a sentence says why."""

import pytest

from nemo_style_rlhf.data.chat_templates import classify
from nemo_style_rlhf.errors import UserError
from tests.unit.agents.chat_templates import CHATML, FORGETFUL, GEMMA, MISTRAL, NO_TOOLS, PLAIN, REAL, WRITTEN, encoder

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
REASONING = "leaves the reasoning of past answers out of later prompts"
REWRITING = {
    **dict.fromkeys(["qwen3", "lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl", "diffusion_gemma"], REASONING),
    **dict.fromkeys(["gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5"], REASONING),
    **dict.fromkeys(["qwen3_5_think", "qwen3_6"], r"ends a prompt with '<think>\n', which becomes '' once"),
    **dict.fromkeys(
        ["nemotron_3_5_lightning", "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra"],
        r"ends a prompt with '<think>\n', which becomes '<think></think>' once",
    ),
    **dict.fromkeys(
        ["deepseek_r1_distill", "deepseekv3"], r"with '<｜Assistant｜><think>\n', which becomes '<｜Assistant｜>'"
    ),
    "qwen3_5_nothink": r"ends a prompt with '<think>\n\n</think>\n\n', which becomes ''",
    "qwen3_8": r"writes '\n</think>\n\n' before an answer",
    "glm4moe": r"writes '\n<think></think>\n' before an answer, which the prompt for it lacks",
    "gptoss": "writes '<|channel|>final<|message|>' before an answer",
    "muse_glimmer": "writes ' to=user<|message|>' before an answer",
}
REFUSING = {"idefics3", "llava_next", "smolvlm"}
"""These read content as a list of parts only."""
TRIMMING = {"cohere", "gemma", "gemma3", "llama3", "llama3_1", "llama3_2"}


@pytest.mark.parametrize("name", REAL)
def test_templates_of_public_models(name):
    found = classify(encoder(REAL[name]))
    if name in REFUSING:
        assert (
            found.kind == "refuses"
            and "a conversation of several turns: with a turn of the role 'user'" in found.reason
        )
    elif name in REWRITING:
        assert found.kind == "rewrites" and REWRITING[name] in found.reason
    else:
        assert found.kind == "appends"
        assert ("white space" in found.reason) == (name in TRIMMING)


@pytest.mark.parametrize("name", WRITTEN)
def test_templates_that_append(name):
    found = classify(encoder(WRITTEN[name]))
    assert found.kind == "appends"
    assert ("white space" in found.reason) == (name in {"llama", "mistral", "gemma", "stripped"})


def test_a_template_that_drops_reasoning_rewrites():
    found = classify(encoder(FORGETFUL))
    assert (found.kind, found.reason) == ("rewrites", f"The chat template {REASONING}.")


def test_reasoning_in_a_field_of_its_own_counts_too():
    """Written in the last message alone."""
    thought = "(message.reasoning_content if loop.last and message.reasoning_content else '') + message.content"
    assert REASONING in classify(encoder(CHATML.replace("message.content", thought))).reason


def test_earlier_text_that_changes_is_quoted():
    counting = "{{- '<|im_start|>system\\n' ~ messages | length ~ ' messages<|im_end|>\\n' -}}\n" + CHATML
    found = classify(encoder(counting))
    assert found.kind == "rewrites"
    assert "changes earlier text when a turn is added, '1 messages<|im_end|>" in found.reason
    assert " to '3 messages<|im_end|>" in found.reason


@pytest.mark.parametrize(
    ("content", "where"),
    [
        ("('as a result ' if loop.last and message.role == 'tool' else '') + message.content", "tool results"),
        (
            "(messages[0].content if loop.last and messages[0].role == 'system' else '') + message.content",
            "a system message",
        ),
    ],
)
def test_what_a_template_rewrites_in_such_conversations_alone_counts(content, where):
    """It marks the last result, or puts the system message into the last question."""
    found = classify(encoder(CHATML.replace("message.content", content)))
    assert found.kind == "rewrites" and found.reason.endswith(f", in a conversation with {where}.")


@pytest.mark.parametrize(
    ("template", "limits"),
    [
        (CHATML, []),
        (MISTRAL, ["tool results", "system messages", "two questions in succession"]),
        (GEMMA, ["system messages"]),
        (NO_TOOLS, ["tool results"]),
        (
            CHATML.replace("message.content", "(message.content if message.role != 'system' else '')"),
            ["system messages"],
        ),
    ],
)
def test_messages_that_a_template_cannot_render_are_limits(template, limits):
    found = classify(encoder(template))
    assert found.kind == "appends"
    assert [limit.partition(":")[0] for limit in found.limits] == [
        f"The chat template cannot render {each}" for each in limits
    ]


@pytest.mark.parametrize("arguments", ["word", "replace('a', 'b')"])
def test_a_template_may_read_arguments_as_an_object_or_as_json(arguments):
    read = f"(message.tool_calls[0].function.arguments.{arguments} if message.tool_calls else message.content)"
    found = classify(encoder(CHATML.replace("message.content", read)), TOOLS)
    assert (found.kind, found.limits) == ("appends", ())


def test_a_run_with_tools_needs_a_template_with_tool_results():
    found = classify(encoder(NO_TOOLS), TOOLS)
    assert found.kind == "refuses"
    assert found.reason == "The chat template cannot render tool results: refused by the chat template (no tools)."
    assert classify(encoder(CHATML), TOOLS).kind == "appends"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('nothing goes') }}", "refused by the chat template (nothing goes)"),
        ("{{ 1 / 0 }}", "refused by the chat template (division by zero)"),
        ("{{ 'word'.index('x') }}", "refused by the chat template (substring not found)"),
        ("{{ messages[0].content.pop() }}", "refused by the chat template ('str object' has no attribute 'pop')"),
        (
            CHATML.replace("message.content", "message.content + nothing"),
            "refused by the chat template ('nothing' is undefined)",
        ),
        ("fixed", "with a turn of the role 'user', which the chat template leaves out"),
        (
            "{% for message in messages if message.role != 'assistant' %}{{ message.content }}{% endfor %}",
            "it leaves out 'answer-1', what a message of the role 'assistant' says",
        ),
    ],
)
def test_a_template_that_renders_no_conversation_is_refused_with_its_reason(template, reason):
    found = classify(encoder(template))
    assert found.kind == "refuses"
    assert found.reason == f"The chat template cannot render a conversation of several turns: {reason}."


def test_a_tokenizer_without_a_template_is_the_users_mistake():
    with pytest.raises(UserError, match=r"set data\.chat_template"):
        classify(encoder(None))


def test_a_template_without_special_tokens_appends():
    assert classify(encoder(PLAIN)).kind == "appends"
