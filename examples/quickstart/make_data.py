"""Write everything the quickstart trains on: reviews, preference pairs, prompts, a tokenizer and a model configuration.

    .venv-actor/bin/python examples/quickstart/make_data.py --output-dir outputs/quickstart/data --seed 1234

Reviews are pleasant or unpleasant with equal chance. A preference pair is a pleasant and an unpleasant review of the same
product, the pleasant one preferred; a tenth of the training labels is swapped. Held-out prompts appear nowhere else.
"""

import argparse
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import world
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast

HELD_OUT_PROMPTS = 128
TRAIN_REVIEWS = 12_000
TRAIN_PAIRS = 2_000
VALIDATION_ROWS = 512
LABEL_NOISE = 0.1
VOCABULARY = 1024
BOS, EOS, PAD = "<bos>", "<eos>", "<pad>"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1234)
    arguments = parser.parse_args()
    make_data(arguments.output_dir, arguments.seed)


def make_data(output_dir: Path, seed: int) -> None:
    """Write the JSONL files and ``base/`` (tokenizer and ``config.json``, no weights) into ``output_dir``."""
    rng = random.Random(seed)
    prompts = world.prompts(rng)
    held_out, known = prompts[:HELD_OUT_PROMPTS], prompts[HELD_OUT_PROMPTS:]
    output_dir.mkdir(parents=True, exist_ok=True)

    reviews = [review(rng, known) for _ in range(TRAIN_REVIEWS)]
    write_jsonl(output_dir / "sft_train.jsonl", (row(each) for each in reviews))
    write_jsonl(output_dir / "sft_validation.jsonl", (row(review(rng, held_out)) for _ in range(VALIDATION_ROWS)))
    write_jsonl(output_dir / "pairs_train.jsonl", (pair(rng, known, LABEL_NOISE) for _ in range(TRAIN_PAIRS)))
    write_jsonl(output_dir / "pairs_validation.jsonl", (pair(rng, held_out, 0.0) for _ in range(VALIDATION_ROWS)))
    write_jsonl(output_dir / "prompts_train.jsonl", ({"prompt": prompt} for prompt in known))
    write_jsonl(output_dir / "prompts_validation.jsonl", ({"prompt": prompt} for prompt in held_out))

    tokenizer = train_tokenizer(each.prompt + each.response for each in reviews)
    tokenizer.save_pretrained(output_dir / "base")
    model_config(tokenizer).save_pretrained(output_dir / "base")


def review(rng: random.Random, prompts: list[str]) -> world.Review:
    return world.write_review(rng.choice(prompts), rng.choice((world.PLEASANT, world.UNPLEASANT)), rng)


def row(written: world.Review) -> dict[str, str]:
    return {"prompt": written.prompt, "response": written.response}


def pair(rng: random.Random, prompts: list[str], noise: float) -> dict[str, str]:
    """A preference pair whose label is wrong with probability ``noise``."""
    prompt = rng.choice(prompts)
    chosen = world.write_review(prompt, world.PLEASANT, rng).response
    rejected = world.write_review(prompt, world.UNPLEASANT, rng).response
    if rng.random() < noise:
        chosen, rejected = rejected, chosen
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE in which every word of the world ends up as one token; texts begin with BOS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD)


def model_config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    """A Llama of 1.5 M parameters; vLLM's CPU attention wants a head size of 32."""
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.06,  # small models leave their first plateau sooner than with 0.02
        dtype="float32",
    )


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))


if __name__ == "__main__":
    main()
