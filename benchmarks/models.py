"""Make what the benchmarks run on: a policy, a reward model of the same size, a tokenizer, prompts of 16 tokens.

    .venv-actor/bin/python benchmarks/models.py --model 19m --output-dir outputs/benchmarks/models/19m

``19m`` is a Qwen2 with random weights: 8 layers, 384 wide, heads of 64, 8,192 tokens, 19 million parameters. ``stories`` is
the pretrained 0.26 M-parameter Llama in ``../shared/data/stories260K`` and needs that folder.
"""

import argparse
import json
import random
import shutil
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
)

PROMPT_TOKENS = 16
PROMPTS = 1024
VOCABULARY = 8192
SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
DTYPES = {"19m": "bfloat16", "stories": "float32"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(DTYPES), default="19m")
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--shared-data", type=Path, default=SHARED_DATA, help="holds stories260K/ and tinystories/")
    arguments = parser.parse_args()
    if arguments.model == "stories" and not (arguments.shared_data / "stories260K").is_dir():
        parser.error(
            f"--model stories needs {arguments.shared_data}/stories260K: give --shared-data, or use --model 19m"
        )
    make(arguments.model, arguments.output_dir, arguments.shared_data)


def make(model: str, output_dir: Path, shared_data: Path = SHARED_DATA) -> None:
    """Write ``policy/``, ``reward/`` and ``prompts.jsonl``; a folder that already has them is left as it is."""
    if (output_dir / "prompts.jsonl").exists():  # written last
        return
    torch.manual_seed(0)
    texts: Iterator[str]
    if model == "19m":
        rng = random.Random(0)
        tokenizer = pseudo_word_tokenizer(rng)
        Qwen2ForCausalLM(qwen2_config(tokenizer)).to(torch.bfloat16).save_pretrained(output_dir / "policy")
        tokenizer.save_pretrained(output_dir / "policy")
        texts = (sentence(rng) for _ in count())
    else:
        shutil.copytree(shared_data / "stories260K", output_dir / "policy", dirs_exist_ok=True)
        tokenizer = AutoTokenizer.from_pretrained(output_dir / "policy")
        stories = (shared_data / "tinystories" / "stories.jsonl").read_text().splitlines()
        texts = (json.loads(line)["text"] for line in stories)
    reward = AutoModelForSequenceClassification.from_pretrained(output_dir / "policy", num_labels=1, dtype="auto")
    reward.save_pretrained(output_dir / "reward")
    tokenizer.save_pretrained(output_dir / "reward")
    rows = (json.dumps({"prompt": text}) + "\n" for text in islice(beginnings(texts, tokenizer), PROMPTS))
    (output_dir / "prompts.jsonl").write_text("".join(rows))


def qwen2_config(tokenizer: PreTrainedTokenizerBase) -> Qwen2Config:
    """Config of a model with 19.07 M parameters and tied embeddings."""
    return Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=384,
        intermediate_size=1216,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=6,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )


def pseudo_word_tokenizer(rng: random.Random) -> PreTrainedTokenizerBase:
    """Qwen2's byte-level BPE with ``VOCABULARY`` tokens, learned from pseudo-words."""
    corpus = (sentence(rng) for _ in range(5000))
    return Qwen2Tokenizer(pad_token="<|pad|>").train_new_from_iterator(corpus, VOCABULARY, show_progress=False)


def sentence(rng: random.Random) -> str:
    words = (
        "".join(rng.choice("bdfghklmnprstvz") + rng.choice("aeiou") for _ in range(rng.randint(1, 4)))
        for _ in range(20)
    )
    return " ".join(words)


def beginnings(texts: Iterator[str], tokenizer: PreTrainedTokenizerBase, tokens: int = PROMPT_TOKENS) -> Iterator[str]:
    """The first ``tokens`` tokens of each text that has as many."""
    for text in texts:
        beginning = tokenizer.decode(tokenizer(text)["input_ids"][:tokens], skip_special_tokens=True)
        if len(tokenizer(beginning)["input_ids"]) == tokens:
            yield beginning


if __name__ == "__main__":
    main()
