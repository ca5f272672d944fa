"""Reads the metrics and samples that a run has written."""

import json
from pathlib import Path
from typing import Any

from nemo_style_rlhf.tracking.rollout_files import read_rows

OF_THE_CLOCK = ("timers/", "engines/", "clock/", "memory/", "placement/", "gpu/")
OF_THE_CRITICS_CLOCK = {"seconds", "rss_gib", "cuda_peak_gib"}


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def without_timers(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """The metrics on which clock and machine have no influence."""
    return [{key: row[key] for key in row if not key.startswith(OF_THE_CLOCK)} for row in rows]


def without_clock(answer: dict[str, float]) -> dict[str, float]:
    """The same of a critic's answer to a train step."""
    return {key: value for key, value in answer.items() if key not in OF_THE_CRITICS_CLOCK}


def samples(folder: Path, step: int | None = None) -> list[dict[str, Any]]:
    """The recorded samples of an actor's run, or of one of its steps."""
    return list(read_rows(folder / "rollouts", step or 0, step))
