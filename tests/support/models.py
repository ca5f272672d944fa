"""Tiny models and tokenizers made on the spot."""

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    PreTrainedTokenizerFast,
)

WORDS = ["<eos>", "<unk>", *(f"w{index}" for index in range(62))]
SHAPE = {
    "vocab_size": len(WORDS),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}


def save_tokenizer(directory: Path) -> None:
    """Words w0..w61, an end-of-text token, no pad token."""
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>").save_pretrained(directory)


def save_chat_tokenizer(directory: Path) -> None:
    """The same words; text is opened with a beginning-of-text token, which the chat template writes, too."""
    save_tokenizer(directory)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory, bos_token="<unk>")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<unk> $A", special_tokens=[("<unk>", 1)]
    )
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %} w60 {{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %} w61{% endif %}"
    )
    tokenizer.save_pretrained(directory)


def save_policy(directory: Path, *, seed: int = 0, **overrides: object) -> Path:
    """A random Llama with peaked enough predictions to tell weights apart."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, **overrides}))
    for parameter in model.parameters():
        parameter.data.mul_(2)
    model.save_pretrained(directory)
    save_tokenizer(directory)
    return directory


def save_judge(directory: Path, *, seed: int = 0) -> Path:
    """A random chat model that reads and writes single characters, so that its answers can be forced into any form."""
    characters = ["</s>", "<unk>", *map(chr, range(32, 127))]
    torch.manual_seed(seed)
    shape = {**SHAPE, "vocab_size": len(characters), "max_position_embeddings": 1024}
    model = LlamaForCausalLM(LlamaConfig(**shape))
    for parameter in model.parameters():
        parameter.data.mul_(5)  # else it would say the same about everything
    model.save_pretrained(directory)
    tokenizer = Tokenizer(models.WordLevel({each: index for index, each in enumerate(characters)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    chat = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")
    chat.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}assistant: "
    chat.save_pretrained(directory)
    return directory


def save_run_inputs(folder: Path, reward: str, rows: Iterable[object]) -> Path:
    """A ``policy``, a ``reward`` model, the reward function ``reward.py`` and the prompts ``rows.jsonl``."""
    save_policy(folder / "policy")
    save_reward_model(folder / "reward")
    (folder / "reward.py").write_text(reward)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def save_policy_with_code(directory: Path, **overrides: object) -> Path:
    """A policy whose config transformers knows from the code beside it alone."""
    save_policy(directory, **overrides)
    (directory / "own_llama.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n\n\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own_llama'\n\n\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    config = json.loads((directory / "config.json").read_text())
    code = {"AutoConfig": "own_llama.OwnConfig", "AutoModelForCausalLM": "own_llama.OwnForCausalLM"}
    (directory / "config.json").write_text(json.dumps(config | {"model_type": "own_llama", "auto_map": code}))
    return directory


def save_reward_model(directory: Path, *, seed: int = 1, num_labels: int = 1, **overrides: object) -> Path:
    torch.manual_seed(seed)
    config = LlamaConfig(**{**SHAPE, "num_labels": num_labels, **overrides})
    LlamaForSequenceClassification(config).save_pretrained(directory)
    save_tokenizer(directory)
    return directory


def save_token_classifier(directory: Path, *, seed: int = 1, bias: float = 1.0, **overrides: object) -> Path:
    """The reward model as a token classifier, whose head has a bias."""
    torch.manual_seed(seed)
    model = LlamaForTokenClassification(LlamaConfig(**{**SHAPE, "num_labels": 1, **overrides}))
    model.score.bias.data.fill_(bias)
    model.save_pretrained(directory)
    save_tokenizer(directory)
    return directory


LETTERS = "abcdefghijklmnopqrstuvwxyz"


def letter_tokenizer(single: str | None = "<s> $A", eos: str | None = "</s>") -> PreTrainedTokenizerFast:
    """One token per letter: <s> is 0, </s> is 1, "a" is 2 ...; anything else is <unk> 28; ``single`` adds specials."""
    vocabulary = {"<s>": 0, "</s>": 1} | {letter: 2 + index for index, letter in enumerate(LETTERS)} | {"<unk>": 28}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    if single:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token=eos, unk_token="<unk>")


def disturb(model: torch.nn.Module) -> None:
    """As training would: every trainable weight moves."""
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
