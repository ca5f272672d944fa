"""A model remembers the templates it was trained with."""

import logging

import pytest

from nemo_style_rlhf.data.templates import check_template, write_template
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.data import PromptTemplateConfig

TEMPLATE = "Question: {prompt}\nAnswer:"


def test_the_same_template_passes_and_a_model_without_a_note_is_not_judged(tmp_path, tokenizer, caplog):
    check_template(str(tmp_path), PromptTemplateConfig(), tokenizer)
    write_template(tmp_path, TEMPLATE, tokenizer, append_eos=True)
    check_template(str(tmp_path), PromptTemplateConfig(TEMPLATE), tokenizer)
    assert not caplog.records


@pytest.mark.parametrize("given", [None, "{prompt}", TEMPLATE + " "])
def test_another_prompt_template_is_refused_or_warned_about(tmp_path, tokenizer, given, caplog):
    write_template(tmp_path, TEMPLATE, tokenizer, append_eos=True)
    with pytest.raises(UserError, match=r"set data\.prompt_template"):
        check_template(str(tmp_path), PromptTemplateConfig(given), tokenizer)
    with caplog.at_level(logging.WARNING):
        check_template(str(tmp_path), PromptTemplateConfig(given, on_template_mismatch="warn"), tokenizer)
    assert "was trained with" in caplog.text


def test_another_chat_template_is_refused(tmp_path, tokenizer):
    tokenizer.chat_template = "{{ messages }}"
    write_template(tmp_path, None, tokenizer, append_eos=True)
    tokenizer.chat_template = "{{ messages }}."
    with pytest.raises(UserError, match="chat template"):
        check_template(str(tmp_path), PromptTemplateConfig(), tokenizer)
