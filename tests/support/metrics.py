"""Reads the metrics that a run has logged."""

import json
from pathlib import Path


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def without_timers(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """The metrics on which the clock has no influence."""
    return [{key: row[key] for key in row if not key.startswith(("timers/", "engines/"))} for row in rows]
