"""Tokens per second of SFT's forward and backward on the lengths of HH-RLHF: packed, padded, and padded rows of like length.

    .venv-actor/bin/python benchmarks/packing.py --data HH/train.jsonl.gz

Lengths are those of the chosen transcripts, 1.3 tokens a word; the tokens are random. The three take turns.
"""

import argparse
import random
import statistics
import time
from pathlib import Path

from ppo_step import DTYPES, make_models, models_dir
from processes import ROOT

from nemo_style_rlhf.data.examples import SFTExample
from nemo_style_rlhf.data.sources import read_records
from nemo_style_rlhf.launch.bootstrap import setup
from nemo_style_rlhf.models.loading import load_causal_lm
from nemo_style_rlhf.schema.common import ModelConfig, RunConfig
from nemo_style_rlhf.schema.supervised import SupervisedEngineConfig
from nemo_style_rlhf.supervised.batches import TrainingBatches, collate_sft, parts_within
from nemo_style_rlhf.supervised.sft import SFTModule

TOKENS_PER_WORD = 1.3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="rows with a `chosen` transcript")
    parser.add_argument("--model", choices=sorted(DTYPES), default="19m", help="see benchmarks/models.py")
    parser.add_argument("--rows", type=int, default=32, help="of an optimizer step")
    parser.add_argument("--micro-batch-size", type=int, default=8, help="rows of a padded micro-batch")
    parser.add_argument("--max-length", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work-dir", type=Path, default=ROOT / "outputs" / "benchmarks")
    arguments = parser.parse_args()
    setup(RunConfig(output_dir="", num_threads=arguments.threads))
    make_models(arguments)
    rows = examples(arguments)
    lengths = [len(row) for row in rows]
    print(f"{len(rows)} rows, median {statistics.median(lengths):.0f} tokens, mean {statistics.fmean(lengths):.0f}")
    parts = arguments.rows // arguments.micro_batch_size
    sides = {
        "padded": (False, [rows[start : start + arguments.micro_batch_size] for start in micro_starts(arguments)]),
        "padded, like lengths together": (False, batches(rows, parts, arguments, packed=False)),
        "packed": (True, batches(rows, parts, arguments, packed=True)),
    }
    modules = {packing: module(arguments, packing) for packing in (False, True)}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(arguments.rounds + 1):
        for name, (packing, micro_batches) in sides.items():
            taken = forward_and_backward(modules[packing], micro_batches)
            if number:  # the first round warms up
                seconds[name].append(taken)
    tokens = sum(lengths[: arguments.rows])
    for name in sides:
        rate = tokens / statistics.median(seconds[name])
        ratio = statistics.median(seconds["padded"]) / statistics.median(seconds[name])
        print(f"{name:32} {rate:8.0f} tokens/s   {ratio:.2f} times padded")


def examples(arguments: argparse.Namespace) -> list[SFTExample]:
    """Examples in a random order, with random tokens."""
    generator = random.Random(0)
    counts = [len(str(record.fields["chosen"]).split()) for record in read_records(arguments.data)]
    lengths = [min(max(2, round(TOKENS_PER_WORD * count)), arguments.max_length) for count in counts]
    generator.shuffle(lengths)
    return [SFTExample(generator.choices(range(5, 8000), k=length), 0) for length in lengths[: 4 * arguments.rows]]


def micro_starts(arguments: argparse.Namespace) -> range:
    return range(0, arguments.rows, arguments.micro_batch_size)


def batches(
    rows: list[SFTExample], parts: int, arguments: argparse.Namespace, *, packed: bool
) -> list[list[SFTExample]]:
    """The micro-batches of the first optimizer step, as a stage would form them."""
    step = rows[: arguments.rows]
    if packed:  # the average content of the padded micro-batches
        budget = arguments.micro_batch_size * statistics.fmean(len(row) for row in step)
        parts = parts_within([len(row) for row in step], round(1.2 * budget), packed=True)
    formed = TrainingBatches(
        step,
        lambda part, _, __: list(part),
        0,
        batch_size=len(step),
        micro_batches=parts,
        steps=1,
        seed=0,
        packed=packed,
    )
    return [formed[part] for part in range(len(formed))]


def module(arguments: argparse.Namespace, packing: bool) -> SFTModule:
    path = str(models_dir(arguments) / "policy")
    hf = load_causal_lm(ModelConfig(path, dtype=DTYPES[arguments.model], packing=packing))
    return SFTModule(hf, SupervisedEngineConfig(), 1, compile_backbone=False)


def forward_and_backward(model: SFTModule, micro_batches: list[list[SFTExample]]) -> float:
    started = time.perf_counter()
    for rows in micro_batches:
        loss, _, _ = model.losses(collate_sft(rows, rows, 0))
        loss.backward()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
