"""Measures two sides in turn, and keeps the results."""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import report


@dataclass
class Measured:
    """Measurements of one side, over all rounds."""

    step_seconds: list[float] = field(default_factory=list)
    """Seconds of every counted step."""
    round_medians: list[float] = field(default_factory=list)
    phases: dict[str, list[float]] = field(default_factory=dict)
    """Seconds of each counted step, by phase."""
    peak_rss_bytes: dict[str, int] = field(default_factory=dict)
    """Peak memory by process."""

    def add_round(self, steps: list[float], phases: dict[str, list[float]], peak_rss_bytes: dict[str, int]) -> None:
        self.step_seconds += steps
        self.round_medians.append(report.median(steps))
        for name, seconds in phases.items():
            self.phases.setdefault(name, []).extend(seconds)
        for process, peak in peak_rss_bytes.items():
            self.peak_rss_bytes[process] = max(peak, self.peak_rss_bytes.get(process, 0))


Side = Callable[[argparse.Namespace, Measured], None]
"""Runs one side once and adds its measurements."""


def alternate(
    arguments: argparse.Namespace, measure_ours: Side, measure_peer: Side
) -> tuple[Measured, Measured | None]:
    """``arguments.rounds`` runs of our side and, with ``arguments.peer``, of the peer's, each first in every other round."""
    sides = [(measure_ours, Measured()), *([(measure_peer, Measured())] if arguments.peer else [])]
    for number in range(arguments.rounds):
        for measure, result in sides if number % 2 == 0 else reversed(sides):
            measure(arguments, result)
            print(
                f"round {number + 1}/{arguments.rounds}: {result.round_medians[-1]:.2f} s/step ({measure.__name__})",
                file=sys.stderr,
                flush=True,
            )
    return sides[0][1], sides[1][1] if arguments.peer else None


def phases_of(lines: list[dict[str, Any]]) -> tuple[list[float], dict[str, list[float]]]:
    """Seconds of the steps, and of their phases, in lines of metrics.jsonl."""
    names = [name for name in lines[0] if name.startswith("timers/") and "_per_second" not in name]
    phases = {name.removeprefix("timers/"): [line[name] for line in lines] for name in names}
    return phases.pop("step"), phases
