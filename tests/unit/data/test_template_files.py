"""A model remembers the templates it was trained with."""

import hashlib
import logging
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from transformers import AutoTokenizer

from nemo_style_rlhf.data.template_files import (
    check_reward_template,
    check_template,
    read_template,
    render,
    write_template,
)
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.models.digests import tokenizer_digest
from nemo_style_rlhf.schema.actor import PPOActorConfig
from nemo_style_rlhf.schema.base import build, validate
from nemo_style_rlhf.schema.data import PromptTemplateConfig
from nemo_style_rlhf.schema.evaluation import EvaluationConfig
from nemo_style_rlhf.schema.inspection import InspectDataConfig
from nemo_style_rlhf.schema.plan import PlanConfig
from nemo_style_rlhf.schema.supervised import DPOConfig, KTOConfig, RewardModelConfig, SFTConfig
from nemo_style_rlhf.schema.templates import unrendered
from tests.support.paths import ROOT

TEMPLATE = "Question: {prompt}\nAnswer:"
SCHEMAS = [
    PPOActorConfig, SFTConfig, RewardModelConfig, DPOConfig, KTOConfig, EvaluationConfig, InspectDataConfig, PlanConfig,
]  # fmt: skip


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


def test_a_reward_model_that_reads_the_policys_tokens_was_trained_with_its_prompt_template(tmp_path, tokenizer, caplog):
    name = "the reward model of x:1"
    check_reward_template(name, read_template(str(tmp_path)), PromptTemplateConfig(TEMPLATE))
    write_template(tmp_path, "Q: {prompt}", tokenizer, append_eos=True)
    trained = read_template(str(tmp_path))
    check_reward_template(name, trained, PromptTemplateConfig("Q: {prompt}"))
    for given in (None, TEMPLATE):
        with pytest.raises(
            UserError, match=r"but the reward model of x:1 was trained with 'Q: \{prompt\}' and reads the policy's"
        ):
            check_reward_template(name, trained, PromptTemplateConfig(given))
    assert not caplog.records
    check_reward_template(name, trained, PromptTemplateConfig(on_template_mismatch="warn"))
    assert "data.prompt_template is None but the reward model of x:1" in caplog.text


@pytest.mark.parametrize("template", [None, "{prompt}", "{prompt} w9", "w9 {prompt}", "w9 w9{prompt}w9\n"])
@pytest.mark.parametrize("prompt", ["", "w1", "w1 w9", "w9 w1 w9", "w9 ", "{prompt}", "w9 w9w9\n"])
def test_a_prompt_is_taken_out_of_its_template_again(template, prompt):
    assert unrendered(template, render(template, prompt)) == prompt


def test_another_chat_template_is_refused(tmp_path, tokenizer):
    tokenizer.chat_template = "{{ messages }}"
    write_template(tmp_path, None, tokenizer, append_eos=True)
    tokenizer.chat_template = "{{ messages }}."
    with pytest.raises(UserError, match="chat template"):
        check_template(str(tmp_path), PromptTemplateConfig(), tokenizer)


OWN = """{%- for message in messages -%}
    {%- if message.role not in ("system", "user", "assistant") -%}{{ raise_exception("unknown role") }}{%- endif -%}
    {%- if message.role == "system" -%}{%- continue -%}{%- endif -%}
    {%- if message.role == "assistant" -%}
        {% generation %}{{ "a:" + message.content | trim + eos_token }}{% endgeneration %}
    {%- else -%}{{ "u:" + message.content + "é" }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ "a:" }}{%- endif -%}
"""
"""With what transformers adds to Jinja."""
REAL = sorted((ROOT.parent / "shared/data/chat_templates").glob("*.jinja"))  # none on other machines


def given(**data: str) -> PromptTemplateConfig:
    """As an entry point checks it."""
    return build(PromptTemplateConfig, OmegaConf.create(data))


def save_own(folder: Path) -> Path:
    path = folder / "own template.jinja"
    path.write_text(OWN, encoding="utf-8")
    return path


def test_a_chat_template_is_a_file_a_marked_file_or_a_text(tmp_path, monkeypatch):
    path = save_own(tmp_path)
    monkeypatch.chdir(tmp_path)
    for words in (str(path), f"@{path}", path.name, f"@{path.name}", OWN):
        config = given(chat_template=words)
        assert config.chat_template == OWN
        validate(config)  # once more: what has been read is a text now
        assert config.chat_template == OWN


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("none.jinja", r"data\.chat_template=none\.jinja cannot be read \(No such file or directory\): give the path"),
        ("@none.jinja", r"data\.chat_template=none\.jinja cannot be read"),
        ("chatml", r"data\.chat_template=chatml cannot be read"),
        (".", r"data\.chat_template=\. cannot be read \(Is a directory\)"),
        ("User:\nAssistant:", r"data\.chat_template is a text without \{\{ \}\} or \{% %\}"),
        ("plain.txt", r"data\.chat_template: plain\.txt holds no \{\{ \}\}"),
        ("latin.jinja", r"data\.chat_template=latin\.jinja is not text in UTF-8"),
        ("broken.jinja", r"data\.chat_template: broken\.jinja is not Jinja, line 2: .*endfor"),
        (
            "{% for m in messages %}\n{{ m.content | shout }}{% endfor %}",
            r"chat_template is not Jinja, line 2: .*'shout'",
        ),
    ],
)
def test_what_is_no_template_is_refused(tmp_path, monkeypatch, template, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain.txt").write_text("User: hello")
    (tmp_path / "latin.jinja").write_bytes("{{ 'é' }}".encode("latin-1"))
    (tmp_path / "broken.jinja").write_text("{% for m in messages %}\n{{ m.content }}")
    with pytest.raises(UserError, match=said) as refusal:
        given(chat_template=template)
    assert "\n" not in str(refusal.value)


def test_a_prompt_template_comes_from_a_file_too(tmp_path):
    path = tmp_path / "template.txt"
    path.write_text("Question: {prompt}\nAnswer:\n")
    assert given(prompt_template=f"@{path}").prompt_template == "Question: {prompt}\nAnswer:"
    assert given(prompt_template="@user {prompt}").prompt_template == "@user {prompt}"
    with pytest.raises(UserError, match=r"data\.prompt_template=none cannot be read"):
        given(prompt_template="@none")


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.__name__)
def test_every_stage_reads_it(tmp_path, schema):
    path = save_own(tmp_path)
    rows = {"path": "rows", "max_prompts": 1} if schema is EvaluationConfig else {"train_path": "rows"}
    if schema in (PPOActorConfig, PlanConfig, EvaluationConfig):
        rows["format"] = "messages"
    words = {"run": {"output_dir": "run"}, "model": {"path": "model"}, "data": {"chat_template": str(path), **rows}}
    if schema is EvaluationConfig:
        words |= {"model": {}, "checkpoints": ["model"]}
    if schema is InspectDataConfig:
        del words["run"]
    if schema is PlanConfig:
        words["critic"] = {"run": {"output_dir": "critic"}, "model": {"path": "reward"}}
    config = build(schema, OmegaConf.create(words))
    assert config.data.chat_template == OWN
    if schema is InspectDataConfig:
        assert config.stage_data.chat_template == OWN


@pytest.mark.parametrize("several", [False, True])
def test_the_template_travels_with_the_tokenizer(tmp_path, tokenizer, several):
    """transformers renders what it rendered, and the digest is the one noted: also of templates that models are published with,
    and where the tokenizer had others before."""
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]
    for template in [OWN, "{{ messages[0].content }}\r\n.\r\n", *(path.read_text(encoding="utf-8") for path in REAL)]:
        assert given(chat_template=template).chat_template == template
        folder = tmp_path / hashlib.sha256(template.encode()).hexdigest()
        tokenizer.chat_template = {"default": "{{ 1 }}", "tool_use": "{{ 2 }}"} if several else None
        tokenizer.save_pretrained(folder)
        write_template(folder, None, tokenizer, template, append_eos=True)
        loaded = AutoTokenizer.from_pretrained(folder)
        check_template(str(folder), PromptTemplateConfig(), loaded)
        check_template(str(folder), PromptTemplateConfig(chat_template=template), loaded)
        assert tokenizer_digest(loaded) == tokenizer_digest(tokenizer)  # the critic server's may have another template
        if template == OWN:
            assert loaded.apply_chat_template(messages, tokenize=False) == "u:abéa:cd</s>"
            assert loaded.apply_chat_template(messages[:1], add_generation_prompt=True, tokenize=False) == "u:abéa:"
