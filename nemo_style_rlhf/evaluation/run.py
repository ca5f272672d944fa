"""Runs an evaluation, from its configuration to its results."""

import dataclasses
import json
import logging
import shlex
from contextlib import closing
from pathlib import Path
from time import perf_counter

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nemo_style_rlhf.checkpoint.files import storage_errors, write_atomically
from nemo_style_rlhf.checkpoint.owner import require_owned
from nemo_style_rlhf.data.prompts import Prompt
from nemo_style_rlhf.evaluation.child import ChildSampler
from nemo_style_rlhf.evaluation.prompts import prompts_of
from nemo_style_rlhf.evaluation.responses import Responses
from nemo_style_rlhf.evaluation.samples import Sample, to_jsonl
from nemo_style_rlhf.evaluation.scoring import build_scorer, score
from nemo_style_rlhf.evaluation.summary import CheckpointSummary, summarize
from nemo_style_rlhf.launch.bootstrap import setup
from nemo_style_rlhf.launch.follow_up import command_line
from nemo_style_rlhf.launch.starting import starting
from nemo_style_rlhf.schema.evaluation import EvaluationConfig
from nemo_style_rlhf.scoring.contract import columns

log = logging.getLogger(__name__)
DRY_RUN_PROMPTS = 2
DRY_RUN_LENGTH = 8


def evaluate(config: EvaluationConfig, sampler: ChildSampler) -> list[CheckpointSummary]:
    """Sample from one checkpoint after the other, score, write the files, and return the summary of each checkpoint.

    Cheap checks come first: templates, prompts and reward sources are checked before any response is generated.
    """
    device = setup(config.run)
    if config.run.dry_run:
        config = _tiny(config)
    starting("reading the prompts")
    prompts = prompts_of(config)
    scorer = build_scorer(config, device, columns(prompt.metadata for each in prompts.values() for prompt in each))
    samples = _sample(config, sampler, prompts)
    if scorer is not None:
        with closing(scorer):
            score([sample for of_checkpoint in samples.values() for sample in of_checkpoint], scorer)
    summaries = _summaries(config, samples)
    if config.run.dry_run:
        log.info("dry run: %d prompts answered by each of %d checkpoints", DRY_RUN_PROMPTS, len(samples))
        return summaries
    _write(config, samples, summaries)
    _show(summaries, Path(config.run.output_dir))
    return summaries


def _tiny(config: EvaluationConfig) -> EvaluationConfig:
    generation = dataclasses.replace(
        config.generation, max_length=min(DRY_RUN_LENGTH, config.generation.max_length), min_length=0
    )
    data = dataclasses.replace(config.data, max_prompts=DRY_RUN_PROMPTS)
    return dataclasses.replace(config, samples_per_prompt=1, generation=generation, data=data)


def _sample(
    config: EvaluationConfig, sampler: ChildSampler, prompts: dict[str, list[Prompt]]
) -> dict[str, list[Sample]]:
    """Samples by name of the checkpoint; reuses those that an earlier start has written."""
    samples = {}
    for checkpoint in config.parsed_checkpoints:
        started = perf_counter()
        responses = None if config.run.dry_run else Responses(config, checkpoint, prompts[checkpoint.name])
        if responses is not None and (known := responses.load()) is not None:
            samples[checkpoint.name] = known
            log.info("%s: the %d responses of an earlier start", checkpoint.name, len(known))
            continue
        starting(f"loading {checkpoint.name}")
        samples[checkpoint.name] = sampler.sample(checkpoint, config, prompts[checkpoint.name])
        if responses is not None:
            responses.store(samples[checkpoint.name])
        tokens = sum(sample.length for sample in samples[checkpoint.name])
        seconds = perf_counter() - started
        log.info(
            "%s: %d responses, %d tokens in %.0f s", checkpoint.name, len(samples[checkpoint.name]), tokens, seconds
        )
    return samples


def _summaries(config: EvaluationConfig, samples: dict[str, list[Sample]]) -> list[CheckpointSummary]:
    checkpoints = config.parsed_checkpoints
    first = checkpoints[0].name
    return [
        summarize(
            checkpoint.name,
            checkpoint.path,
            samples[checkpoint.name],
            None if checkpoint.name == first else samples[first],
        )
        for checkpoint in checkpoints
    ]


def _write(config: EvaluationConfig, samples: dict[str, list[Sample]], summaries: list[CheckpointSummary]) -> None:
    """Write ``results.jsonl`` and ``summary.json``.

    Raises:
        StorageError: the disk refused.
    """
    require_owned()
    folder = Path(config.run.output_dir)
    summary = {
        "prompts": config.data.path,
        "seed": config.run.seed,
        "samples_per_prompt": config.samples_per_prompt,
        "temperature": config.generation.temperature,
        "max_length": config.generation.max_length,
        "rewards": config.reward.sources,
        "checkpoints": [dataclasses.asdict(summary) for summary in summaries],
    }
    by_prompt = sorted(
        (sample for of_checkpoint in samples.values() for sample in of_checkpoint), key=lambda sample: sample.prompt_id
    )
    with storage_errors(f"the results in {folder}", "make room or change run.output_dir"):
        write_atomically(folder / "results.jsonl", to_jsonl(by_prompt).encode())
        write_atomically(folder / "summary.json", (json.dumps(summary, indent=2) + "\n").encode())


def _show(summaries: list[CheckpointSummary], folder: Path) -> None:
    console = Console()
    table = Table(box=SIMPLE_HEAD)
    table.add_column("checkpoint", overflow="fold")
    for column in ("mean score", "win rate", "length", "truncated", "distinct", "samples"):
        table.add_column(column, justify="right", no_wrap=True)
    for summary in summaries:
        error = "" if summary.standard_error is None else f" ± {summary.standard_error:.3f}"
        table.add_row(
            Text(summary.name),
            "-" if summary.mean_score is None else f"{summary.mean_score:.3f}{error}",
            "-" if summary.win_rate is None else f"{summary.win_rate:.1%}",
            f"{summary.mean_length:.1f}",
            f"{summary.truncated_fraction:.1%}",
            str(summary.distinct_responses),
            str(summary.samples),
        )
    console.print(table)
    shown = f"{command_line('trainers/watch.py', {})} {shlex.quote(str(folder))}"
    console.print(f"the responses side by side: {shown}", soft_wrap=True, markup=False, highlight=False)
