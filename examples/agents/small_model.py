"""A tokenizer with a chat template, and the configuration of a small model, for conversations with tool calls."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast

Message = dict[str, Any]
VOCABULARY = 512
PAD, START, END, CALL, CALL_END = "<pad>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"
CHAT_TEMPLATE = """
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls -%}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{
  call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}}
</tool_call>
{%- endfor -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""
"""ChatML, with tool calls as Hermes and Qwen write them. It leaves out the tools' descriptions: a small model cannot use them."""


def said(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def tool_call(name: str, **arguments: str) -> Message:
    """The message of an assistant that calls a tool."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def make_model(folder: Path, conversations: Iterable[list[Message]]) -> None:
    """Write tokenizer and ``config.json`` into ``folder``, without weights."""
    tokenizer = train_tokenizer(conversations)
    tokenizer.save_pretrained(folder)
    model_config(tokenizer).save_pretrained(folder)


def train_tokenizer(conversations: Iterable[list[Message]]) -> PreTrainedTokenizerFast:
    """Byte-level BPE in which every word is one token, and so is every digit."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, START, END, CALL, CALL_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, chat_template=CHAT_TEMPLATE
    )
    tokenizer.train_from_iterator((made.apply_chat_template(each, tokenize=False) for each in conversations), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def model_config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    """A Llama of 0.4 M parameters; vLLM's CPU attention wants a head size of 32."""
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.06,  # small models leave their first plateau sooner than with 0.02
        dtype="float32",
    )
