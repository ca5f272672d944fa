"""Scores samples with the sources that training uses."""

import logging
import sys
from collections.abc import Collection, Sequence
from concurrent.futures import Future

import torch
from rich.console import Console
from rich.progress import track

from nemo_style_rlhf.evaluation.reward_model import RewardModelScorer
from nemo_style_rlhf.evaluation.samples import Sample
from nemo_style_rlhf.schema.evaluation import EvaluationConfig
from nemo_style_rlhf.scoring.combined import CombinedScorer
from nemo_style_rlhf.scoring.function import FunctionScorer
from nemo_style_rlhf.scoring.interface import Scorer, Scores, ScoringSample

log = logging.getLogger(__name__)
GROUP = 32
"""Samples per call of a source."""


def build_scorer(config: EvaluationConfig, device: torch.device, columns: Collection[str] = ()) -> Scorer | None:
    """A scorer of the configured sources; None if no source is in use.

    Args:
        columns: names of the further fields of the prompts' rows.

    Raises:
        UserError: a reward model or a function cannot be loaded.
    """
    model, function = config.reward.model, config.reward.function
    sources: dict[str, tuple[Scorer, float]] = {}
    if function.path and function.weight != 0:  # first, since it runs in other processes
        sources["function"] = FunctionScorer(function, columns), function.weight
    if model.path and model.weight != 0:
        scorer = RewardModelScorer(model, config.model, device, prompt_template=config.data.prompt_template)
        sources["model"] = scorer, model.weight
    return CombinedScorer(sources, on_error=config.reward.on_error) if sources else None


def score(samples: Sequence[Sample], scorer: Scorer) -> None:
    """Set ``score`` and ``extra`` of each sample.

    Every response to a row is scored once: equal ones must get equal scores, to the last bit, otherwise a tie would look like
    a win.
    """
    alike: dict[tuple[int, str, str], list[Sample]] = {}
    for sample in samples:
        alike.setdefault((sample.prompt_id, sample.prompt, sample.response), []).append(sample)
    different = list(alike.values())
    groups = [different[start : start + GROUP] for start in range(0, len(different), GROUP)]
    shown = track(groups, "scoring", console=Console(stderr=True), disable=not sys.stderr.isatty())
    futures: list[Future[Scores]] = [scorer.score([_scoring_sample(same[0]) for same in group]) for group in shown]
    for group, future in zip(groups, futures, strict=True):
        _assign(group, future.result())


def _assign(group: Sequence[Sequence[Sample]], scores: Scores) -> None:
    for row, same in enumerate(group):
        failed = bool(scores.failures[row])
        for sample in same:
            sample.score = None if failed else float(scores.rewards[row])
            sample.extra = {} if failed else {name: float(values[row]) for name, values in scores.extra.items()}


def _scoring_sample(sample: Sample) -> ScoringSample:
    tokens = torch.tensor(sample.token_ids)
    return ScoringSample.of_texts(tokens, sample.prompt, sample.response, sample.label, sample.metadata, sample.chat)
