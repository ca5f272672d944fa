"""Tells a run's kind, its state, and when it will end."""

import logging
import statistics
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from nemo_style_rlhf.checkpoint.owner import OwnerStatus, owner_statuses
from nemo_style_rlhf.checkpoint.starts import ALL, DONE, NEWEST
from nemo_style_rlhf.tracking.metrics import EVENTS_FILE, METRICS_FILE, TIME
from nemo_style_rlhf.watch.metrics import LARGEST, Logs, Row
from nemo_style_rlhf.watch.run_files import read
from nemo_style_rlhf.watch.runs import Run

PACE_STEPS = 20
"""Number of last steps that give a run's speed."""
DEFAULT_PATIENCE_S = 60.0
SUPERVISED = ("SFT", "reward model", "DPO", "KTO")
HEADLINES = {
    "ppo": ("train_rollouts/rewards", "train_rollouts/init_policy_kl"),
    "supervised": ("val/loss", "train/loss"),
}
CONFIG_BYTES = 4 * 2**20
LONGEST_FAULT = 200
DAMAGED = (OSError, yaml.YAMLError, ValueError, RecursionError)
"""Errors from reading a file that is not a configuration; a date or a number may be impossible."""
log = logging.getLogger(__name__)
Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class States:
    """Tells the states of runs; remembers what it saw of owners on other machines, whose heartbeat is their only sign of life."""

    def __init__(self, logs: Logs) -> None:
        self._logs = logs
        self._pulses: dict[str, tuple[bytes | None, float]] = {}

    def of(self, run: Run) -> dict[str, Any]:
        """The run's entry in ``/api/runs``. A run with unforeseen damage has one, too."""
        try:
            return self._of(run)
        except Exception as error:
            damaged = [f"{type(error).__name__}: {error}"[:LONGEST_FAULT]]
            log.exception("%s cannot be shown", run.folder)
            unknown = ("owner", "step", "total_steps", "seconds_per_step", "eta_s", "updated", "critic")
            shown = {"id": run.id, "folder": str(run.folder), "kind": "run", "state": "damaged", "damaged": damaged}
            return shown | dict.fromkeys(unknown) | {"headline": {}, "warnings": 0}

    def _of(self, run: Run) -> dict[str, Any]:
        config = read_config(run.folder)
        rows = self._logs(run.folder / METRICS_FILE).rows()
        events = self._logs(run.folder / EVENTS_FILE).rows()
        kind, owner = kind_of(config, run.folder), self._owner(run.folder, config)
        step = max((row["step"] for row in rows), default=None)
        if step is not None and kind in SUPERVISED:
            step += 1  # Lightning's steps count from 0
        total = total_steps(config, events)
        pace = seconds_per_step(rows)
        state = _state(run.folder, owner, begun=step is not None or kind == "critic")
        left = (
            None if total is None or step is None or pace is None or state != "running" else max(total - step, 0) * pace
        )
        return {
            "id": run.id,
            "folder": str(run.folder),
            "kind": kind,
            "state": state,
            "owner": None if owner is None else str(owner[0].record),
            "step": step,
            "total_steps": total,
            "seconds_per_step": pace,
            "eta_s": left,
            "updated": rows[-1].get(TIME) or _modified(run.folder / METRICS_FILE) if rows else None,
            "headline": _headline(rows, "ppo" if kind == "PPO" else "supervised"),
            "warnings": sum(event.get("kind") == "health" for event in events),
            "damaged": self._damaged(run.folder),
            "critic": _sibling(run, kind),
        }

    def _damaged(self, folder: Path) -> list[str]:
        """The run's files that cannot be read, and the reasons."""
        found = [(name, self._logs(folder / name).damage) for name in (METRICS_FILE, EVENTS_FILE)]
        found.append((NEWEST, config_damage(folder / NEWEST)))
        return [f"{name}: {why}" for name, why in found if why]

    def _owner(self, folder: Path, config: Mapping[str, Any]) -> tuple[OwnerStatus, bool] | None:
        """The owner of the folder, a live one if there is one, and whether it is alive."""
        section = config.get("run")
        given = section.get("takeover_s") if isinstance(section, dict) else None
        patience_s = float(given) if isinstance(given, int | float) and given < LARGEST else DEFAULT_PATIENCE_S
        found = [(each, self._lives(each, patience_s)) for each in owner_statuses(folder)]
        return max(found, key=lambda pair: pair[1], default=None)

    def _lives(self, status: OwnerStatus, patience_s: float) -> bool:
        if status.lives is not None:
            return status.lives
        now, key = time.monotonic(), status.record.id
        if key not in self._pulses or self._pulses[key][0] != status.pulse:
            self._pulses[key] = status.pulse, now
        return now - self._pulses[key][1] < patience_s


def _state(folder: Path, owner: tuple[OwnerStatus, bool] | None, *, begun: bool) -> str:
    """running, finished, died (killed: its record stayed), stopped (ended in peace before its last step) or new."""
    if owner is not None and owner[1]:
        return "running"
    if (folder / DONE).is_file() or (folder / "results.jsonl").is_file():
        return "finished"
    if owner is not None:
        return "died"
    return "stopped" if begun or (folder / "checkpoints").is_dir() else "new"


def read_config(folder: Path) -> dict[str, Any]:
    """The configuration of the newest start; empty if there is none or it is damaged."""
    return read_yaml(folder / NEWEST)


def read_yaml(path: Path) -> dict[str, Any]:
    try:
        return _read_yaml(path, path.stat().st_mtime_ns)
    except DAMAGED:
        return {}


def config_damage(path: Path) -> str:
    """The reason why an existing configuration cannot be read; empty if it can."""
    try:
        _read_yaml(path, path.stat().st_mtime_ns)
    except FileNotFoundError:
        return ""
    except DAMAGED as error:
        return " ".join((getattr(error, "strerror", None) or str(error)).split())[:LONGEST_FAULT]
    return ""


@lru_cache(maxsize=1024)
def _read_yaml(path: Path, _changed: int) -> dict[str, Any]:
    within = path.parent.parent if path.parent.name == ALL else path.parent
    content = read(path, within, most=CONFIG_BYTES)
    if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(content, Loader)):
        raise yaml.YAMLError("it has aliases, which no run writes")  # a few of them are a tree of a million leaves
    config = yaml.load(content, Loader)
    if not isinstance(config, dict):
        raise yaml.YAMLError("it is no configuration")
    return config


def kind_of(config: Mapping[str, Any], folder: Path) -> str:
    """The kind, as the configuration's groups show it: it does not name its program."""
    data = config.get("data")
    of_data = data if isinstance(data, dict) else {}
    marks = [
        ("PPO", "algorithm" in config),
        ("critic", "server" in config and "critic" in config),
        ("evaluation", "checkpoints" in config or (folder / "results.jsonl").is_file()),
        ("SFT", "text_key" in of_data),
        ("reward model", "centring" in config),
        ("KTO", "completion_key" in of_data),
        ("DPO", "beta" in config),
    ]
    return next((kind for kind, holds in marks if holds), "run")


def total_steps(config: Mapping[str, Any], events: Sequence[Row]) -> int | None:
    """The number that the newest start recorded, or the configuration gives; None if neither does."""
    recorded = [event["total_steps"] for event in events if isinstance(event.get("total_steps"), int)]
    if recorded:
        return int(recorded[-1])
    groups = [config.get(name) for name in ("algorithm", "trainer")]
    given = [group.get("max_steps") for group in groups if isinstance(group, dict)]
    return next((each for each in given if isinstance(each, int) and 0 < each < LARGEST), None)


def seconds_per_step(rows: Sequence[Row]) -> float | None:
    """Median over the last steps, from row to row where rows say when they were written: saving counts, too."""
    trained = [row for row in rows if isinstance(row.get("timers/step"), int | float)][-PACE_STEPS - 1 :]
    paces = [
        (after[TIME] - before[TIME]) / (after["step"] - before["step"])
        for before, after in pairwise(trained)
        if TIME in before and TIME in after and after["step"] > before["step"]
    ]
    paces = paces or [row["timers/step"] for row in trained]
    return statistics.median(paces) if paces else None


def _headline(rows: Sequence[Row], kind: str) -> dict[str, float]:
    """The newest values of the metrics that a list of runs has room for."""
    found = {}
    for name in HEADLINES[kind]:
        for row in reversed(rows):
            if isinstance(row.get(name), int | float):
                found[name] = row[name]
                break
    return found


def _modified(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _sibling(run: Run, kind: str) -> str | None:
    """The critic's run next to an actor's, in the place that train_ppo_local gives it."""
    return f"{run.id.rpartition('/')[0]}/critic".lstrip("/") if kind == "PPO" and run.folder.name == "actor" else None
