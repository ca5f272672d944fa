"""The models, prompts and rows of benchmarks/gpu.py."""

import json
from itertools import count, islice
from pathlib import Path
from random import Random

import torch
from models import PROMPT_TOKENS, PROMPTS, beginnings, pseudo_word_tokenizer, qwen2_config, sentence
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Qwen2Config, Qwen3Config

SMALL = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
         "num_key_value_heads": 2, "max_position_embeddings": 16_896}  # fmt: skip
REAL = {"vocab_size": 151_936}
SHAPES = {
    "small": SMALL,
    "0.5b": SMALL | REAL,
    "0.6b": SMALL | REAL | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
                            "num_key_value_heads": 8, "head_dim": 128},
    "1.5b": SMALL | REAL | {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
}  # fmt: skip
"""small has 0.36 G parameters and a vocabulary of 8,192; the others have the shapes of Qwen2.5 and (0.6b) Qwen3."""
TINY = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "max_position_embeddings": 16_896, "vocab_size": 8192}  # fmt: skip
LONG = (128, 8192, 16_384)
"""Tokens of the rows of SFT; the first length is for rehearsals."""
LONGER_PROMPT = 105
"""Tokens of the prompts of verl's example."""


def make_models(folder: Path, shape: dict[str, int]) -> None:
    """Write ``policy/``, ``reward/``, prompts and rows; a folder that already has them is left as it is."""
    if (folder / "prompts.jsonl").exists():  # written last
        return
    rng = Random(0)
    tokenizer = pseudo_word_tokenizer(rng)
    torch.manual_seed(0)
    smaller = qwen2_config(tokenizer).to_dict()
    del smaller["layer_types"], smaller["model_type"]
    kind = Qwen3Config if "head_dim" in shape else Qwen2Config
    model = AutoModelForCausalLM.from_config(kind(**{**smaller, **shape}), dtype=torch.bfloat16)
    model.save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")
    reward = AutoModelForSequenceClassification.from_pretrained(folder / "policy", num_labels=1, dtype="auto")
    reward.save_pretrained(folder / "reward")
    tokenizer.save_pretrained(folder / "reward")
    texts = list(islice(beginnings((sentence(rng) for _ in count()), tokenizer), PROMPTS))
    for length in LONG:
        parts = texts[: length // PROMPT_TOKENS - 3]
        rows = [{"prompt": text, "response": " ".join(parts)} for text in texts[:64]]
        (folder / f"long_{length}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for tokens, name in ((LONGER_PROMPT, f"prompts_{LONGER_PROMPT}.jsonl"), (PROMPT_TOKENS, "prompts.jsonl")):
        longer = (" ".join(sentence(rng) for _ in range(-(-tokens // PROMPT_TOKENS))) for _ in count())
        rows = [{"prompt": text} for text in islice(beginnings(longer, tokenizer, tokens), PROMPTS)]
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
