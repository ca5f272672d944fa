"""Seconds of a PPO step with every sample recorded token by token, and without, in turn.

    .venv-actor/bin/python benchmarks/recording.py --rounds 4

It takes the options of benchmarks/ppo_step.py, whose runs these are, and prints medians, their ratio, and the wait of training.
"""

import argparse
from copy import copy
from statistics import median

from ppo_step import make_models, measure_ours, parse_arguments
from rounds import Measured, alternate

OFF = "tracking.rollouts.every=0"


def main() -> None:
    arguments = parse_arguments()
    arguments.peer = True
    make_models(arguments)
    recorded, unrecorded = alternate(arguments, measure_ours, measure_unrecorded)
    assert unrecorded is not None
    on, off = median(recorded.step_seconds), median(unrecorded.step_seconds)
    ratios = [one / other for one, other in zip(recorded.round_medians, unrecorded.round_medians, strict=True)]
    print(f"recorded {on:.3f} s/step, not recorded {off:.3f}; ratio of the medians {on / off:.4f}")
    print(f"ratio of each round: {', '.join(f'{ratio:.3f}' for ratio in ratios)}, median {median(ratios):.4f}")
    waits = [median(side.phases["tracking"]) for side in (recorded, unrecorded)]
    print(f"training waits {waits[0]:.4f} s per step, without {waits[1]:.4f}")


def measure_unrecorded(arguments: argparse.Namespace, result: Measured) -> None:
    changed = copy(arguments)
    changed.actor = [*arguments.actor, OFF]
    measure_ours(changed, result)


if __name__ == "__main__":
    main()
