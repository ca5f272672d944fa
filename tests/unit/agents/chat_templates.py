# ruff: noqa: RUF001
"""Chat templates for tests, and tokenizers with the special tokens that they write."""

import re
from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from nemo_style_rlhf.data.encoding import Encoder
from tests.support.paths import ROOT

DATA = ROOT.parent / "shared/data"  # none on other machines
REAL = {path.stem: path.read_text(encoding="utf-8") for path in sorted((DATA / "chat_templates").glob("*.jinja"))}

CHATML = """{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
LLAMA = """{{- bos_token -}}
{%- for message in messages -%}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}
"""
MISTRAL = """{{- bos_token -}}
{%- for message in messages -%}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') -}}
    {%- endif -%}
    {%- if message.role == 'user' -%}{{- '[INST] ' + message.content + ' [/INST]' -}}
    {%- else -%}{{- ' ' + message.content + eos_token -}}{%- endif -%}
{%- endfor -%}
"""
GEMMA = """{{- bos_token -}}
{%- if messages[0].role == 'system' -%}{{- raise_exception('System role not supported') -}}{%- endif -%}
{%- for message in messages -%}
    {%- set role = 'model' if message.role == 'assistant' else message.role -%}
    {{- '<start_of_turn>' + role + '\\n' + message.content | trim + '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}
"""
STRIPPED = CHATML.replace("message.content", "message.content.strip()")
FORGETFUL = CHATML.replace("message.content", "message.content.split('</think>')[-1]")
DATED = "{{- '<|im_start|>system\\nToday is ' + strftime_now('%d %B %Y') + '.<|im_end|>\\n' -}}\n" + CHATML
NO_TOOLS = (
    "{%- for message in messages if message.role == 'tool' -%}{{- raise_exception('no tools') -}}{%- endfor -%}\n"
    + CHATML
)
PLAIN = """{%- for message in messages -%}{{- message.role + ': ' + message.content + '\\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'assistant:' -}}{%- endif -%}
"""
"""Without special tokens."""
WRITTEN = {
    "chatml": CHATML, "llama": LLAMA, "mistral": MISTRAL, "gemma": GEMMA, "stripped": STRIPPED, "dated": DATED,
    "no tools": NO_TOOLS,
}  # fmt: skip
"""All of these only append."""
_SPECIAL = re.compile(
    r"<[|｜][^<>{}\s]*>|<[a-z_]+[|｜]>|</?[a-z]+_of_turn>|\[/?INST\]|</?(?:think|tool_call|tool_response)>"
)
_TEXT = (
    "A cat sat on a mat. The question is what the answer of the user and the assistant may be, word by word.\n\n" * 3
)


@cache
def _bytes_tokenizer() -> str:
    """A tokenizer of bytes and frequent words, as JSON."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([_TEXT], trainer)
    return tokenizer.to_str()


def encoder(template: str | None, *, stories: bool = False) -> Encoder:
    """An encoder whose tokenizer has the template and the special tokens in its text.

    Args:
        stories: take the SentencePiece tokenizer of a model of stories, not the one of bytes.
    """
    if stories:
        tokenizer = AutoTokenizer.from_pretrained(DATA / "stories260K")
    else:
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(_bytes_tokenizer()), bos_token="<s>", eos_token="</s>"
        )
    found = sorted(set(_SPECIAL.findall(template or "")))
    tokenizer.add_tokens(found, special_tokens=True)
    tokenizer.chat_template = template
    return Encoder(tokenizer)
