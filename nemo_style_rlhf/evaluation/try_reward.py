"""Tries reward sources on prompts and responses of a file, without a model."""

import itertools
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nemo_style_rlhf.data.records import Dropped, Record
from nemo_style_rlhf.data.sources import read_records
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.try_reward import TryRewardConfig, TryRewardDataConfig
from nemo_style_rlhf.scoring.combined import failure, finite
from nemo_style_rlhf.scoring.contract import columns
from nemo_style_rlhf.scoring.futures import caught
from nemo_style_rlhf.scoring.interface import RewardError, Scorer, Scores, ScoringSample
from nemo_style_rlhf.scoring.sources import text_sources

GROUP = 32
"""Samples per call of a source, as in a run."""
SHOWN = 32
"""Maximum number of characters shown of a text."""
WIDTH = 160
"""Width of the table in characters where the output is not a terminal."""


def try_reward(config: TryRewardConfig) -> bool:
    """Print the rewards of each source for each row, and one sentence for each of its failures.

    Returns:
        True if every row has a reward from every source.

    Raises:
        UserError: the rows cannot be read, or a source cannot be used as it is configured.
    """
    samples = _samples(config.data)
    with ExitStack() as closed_later:
        verdicts = Path(closed_later.enter_context(TemporaryDirectory()))
        sources = text_sources(config.reward, columns(sample.metadata for sample in samples), verdicts=verdicts)
        for scorer, _ in sources.values():
            closed_later.enter_context(closing(scorer))
        outcomes = {name: scored(scorer, samples, name) for name, (scorer, _) in sources.items()}
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    console.print(table(samples, outcomes))
    reasons = dict.fromkeys(str(reason) for scores in outcomes.values() for reason in scores.reasons)
    for reason in reasons:
        print(f"error: {reason}", file=sys.stderr)
    return not reasons


def scored(scorer: Scorer, samples: Sequence[ScoringSample], name: str) -> Scores:
    """The scores of one source, with the reasons of all failures."""
    groups = [samples[start : start + GROUP] for start in range(0, len(samples), GROUP)]
    asked = [caught(scorer.score(group), RewardError) for group in groups]
    parts = []
    for group, future in zip(groups, asked, strict=True):
        outcome = future.result()
        scores = failure(len(group), outcome) if isinstance(outcome, RewardError) else outcome
        parts.append(finite(scores, f"the reward of reward.{name}", "correct it"))
    return Scores.joined(parts)


def table(samples: Sequence[ScoringSample], outcomes: Mapping[str, Scores]) -> Table:
    """A row for each sample; each source has a column for its rewards, one for its scores if it has any, and its extra logs."""
    result = Table(box=SIMPLE_HEAD)
    for heading in ("row", "prompt", "response", "label"):
        result.add_column(heading)
    numbers = []
    for name, scores in outcomes.items():
        prefix = f"{name}/" if len(outcomes) > 1 else ""
        named = {"reward": scores.rewards, "score": scores.filter_scores, **scores.extra}
        for heading, values in named.items():
            if values is not None:
                result.add_column(Text(prefix + heading), justify="right", overflow="fold")
                numbers.append(values.tolist())
    for row, sample in enumerate(samples):
        texts = [_short(sample.prompt), _short(sample.response), _short(sample.label or "")]
        result.add_row(str(row), *texts, *(_number(values[row]) for values in numbers))
    return result


def _samples(config: TryRewardDataConfig) -> list[ScoringSample]:
    records = itertools.islice(read_records(config.path), config.num_samples or None)
    samples = [_sample(record, config) for record in records]
    if not samples:
        raise UserError(f"{config.path} is empty: expected at least one row with a prompt and a response")
    return samples


def _sample(record: Record, config: TryRewardDataConfig) -> ScoringSample:
    try:
        prompt = record.text(config.prompt_key, "data.prompt_key")
        response = record.text(config.response_key, "data.response_key")
    except Dropped as reason:
        raise UserError(reason.sentence or f"{record.where} is a row {reason}") from reason
    label = record.fields.get(config.label_key) if config.label_key else None
    metadata = {
        key: value for key, value in record.fields.items() if key not in (config.prompt_key, config.response_key)
    }
    no_tokens = torch.zeros(0, dtype=torch.int64)
    return ScoringSample.of_texts(no_tokens, prompt, response, None if label is None else str(label), metadata)


def _short(text: str) -> Text:
    """``text`` on one line, without the middle if it is long: its end decides rewards as often as its beginning."""
    text = " ".join(text.split())
    half = SHOWN // 2 - 1
    return Text(text if len(text) <= SHOWN else f"{text[:half]} … {text[-half:]}")


def _number(value: float) -> str:
    return "-" if value != value else f"{value:.4g}"
