"""The pictures of the README, made from a finished quickstart:

    .venv-actor/bin/python examples/pictures.py outputs/quickstart

They go to docs/images, or to the folder of --target.
"""

import argparse
from pathlib import Path

from curves import plot_curves, read_metrics

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("quickstart", type=Path, help="the folder that examples/quickstart/run.py wrote")
    parser.add_argument("--target", type=Path, default=ROOT / "docs" / "images")
    arguments = parser.parse_args()
    rows = read_metrics(arguments.quickstart / "actor" / "metrics.jsonl")
    plot_curves({"": [rows]}, arguments.target / "quickstart.png", title="Quickstart: PPO")


if __name__ == "__main__":
    main()
