"""Training rows of one source, or of several with weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from nemo_style_rlhf.data.records import DropReport
from nemo_style_rlhf.schema.data import TrainingDataConfig
from nemo_style_rlhf.schema.sources import Sources

if TYPE_CHECKING:
    from nemo_style_rlhf.data.sampling import Sampler

Row = TypeVar("Row", covariant=True)
IDS_PER_SOURCE = 2**32
"""Rows that a source may have, so that ids of prompts are unique and none depends on the size of another source."""


class Load(Protocol[Row]):
    def __call__(self, sources: Sources, first_id: int) -> tuple[Sequence[Row], DropReport]:
        """The usable rows of one source, and a report on the others.

        Args:
            first_id: identity of its first row.
        """


@dataclass(frozen=True)
class TrainingRows(Generic[Row]):
    """The rows of all sources, one after the other."""

    rows: list[Row]
    sizes: list[int]
    """Number of rows of each source."""
    weights: list[float]
    """Weight of each source of a mixture; empty without one."""
    reports: list[DropReport]

    def sampler(self, seed: int, shuffle: bool = True) -> "Sampler":
        """The order of training, a pure function of ``seed`` and the position in it."""
        from nemo_style_rlhf.data.sampling import (
            MixtureSampler,
            PromptSampler,
        )  # it imports numpy, and checks of rows do not need that

        if not self.weights:
            return PromptSampler(len(self.rows), seed, shuffle)
        return MixtureSampler(self.sizes, self.weights, seed, shuffle)

    @property
    def identity(self) -> dict[str, Any]:
        """Size and share of each source of a mixture. With the rows, they give a position its meaning."""
        shares = [weight / sum(self.weights) for weight in self.weights]
        return {"data.mixture": [list(each) for each in zip(self.sizes, shares, strict=False)]}


def load_training_rows(config: TrainingDataConfig, load: Load[Row]) -> TrainingRows[Row]:
    """The rows of ``data.train_path``, or of each source of ``data.mixture``.

    Raises:
        UserError: a source is missing, broken, or has no usable row.
    """
    loaded = [load(source, number * IDS_PER_SOURCE) for number, source in enumerate(config.training_sources)]
    weights = [source.weight for source in config.mixture]
    for (_, report), weight in zip(loaded, weights, strict=False):
        report.source = f"{report.source} ({weight / sum(weights):.1%} of the mixture)"
    return TrainingRows(
        rows=[row for rows, _ in loaded for row in rows],
        sizes=[len(rows) for rows, _ in loaded],
        weights=weights,
        reports=[report for _, report in loaded],
    )
