"""Configurations of runs side by side, and what their starts have changed."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_style_rlhf.checkpoint.starts import ALL, PLACES, leaves
from nemo_style_rlhf.watch.runs import Run
from nemo_style_rlhf.watch.state import read_config, read_yaml

WHERE = {*PLACES, "output_dir", "ready_file", "token_file"}
"""Last parts of keys that give a run's place. They always differ."""


def differing(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The keys whose values are not the same in all runs: ``{"key": ..., "values": [text or null, ...]}``."""
    configs = [dict(leaves(read_config(run.folder))) for run in runs]
    keys = dict.fromkeys(key for config in configs for key in config)
    rows = [{"key": key, "values": [_shown(config, key) for config in configs]} for key in keys if key and _counts(key)]
    return [row for row in rows if len(set(row["values"])) > 1]


def starts(folder: Path) -> list[dict[str, Any]]:
    """Each start that changed the configuration: what it resumed from, and the keys that it changed."""
    found = []
    before: dict[str, Any] = {}
    for number, path in enumerate(sorted((folder / ALL).glob("*.yaml"))):
        now = dict(leaves(read_yaml(path)))
        keys = [key for key in {**before, **now} if key and _counts(key) and _shown(before, key) != _shown(now, key)]
        changes = [{"key": key, "values": [_shown(before, key), _shown(now, key)]} for key in keys] if number else []
        found.append({"after": path.stem.partition("_")[2], "changes": changes})
        before = now
    return found


def _counts(key: str) -> bool:
    return key.rpartition(".")[2] not in WHERE


def _shown(config: Mapping[str, Any], key: str) -> str | None:
    return json.dumps(config[key], ensure_ascii=False, default=str) if key in config else None
