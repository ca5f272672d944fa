"""Passes Lightning's metrics to the project's metrics writer."""

from argparse import Namespace
from typing import Any

from pytorch_lightning.loggers.logger import Logger
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from nemo_style_rlhf.checkpoint.owner import require_owned
from nemo_style_rlhf.tracking.metrics import MetricsWriter


class MetricsLogger(Logger):
    """Hands every logged step to a :class:`MetricsWriter`, so that all stages write the same files."""

    def __init__(self, writer: MetricsWriter) -> None:
        super().__init__()
        self.writer = writer

    @property
    def name(self) -> str:
        return "metrics"

    @property
    def version(self) -> str:
        return ""

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the writer gets the whole configuration at its start."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        require_owned()
        self.writer.write(step or 0, {name: value for name, value in metrics.items() if name != "epoch"})
