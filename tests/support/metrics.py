"""Reads the metrics that a run has logged."""

import json
from pathlib import Path


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def without_timers(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{key: value for key, value in row.items() if not key.startswith("timers/")} for row in rows]
