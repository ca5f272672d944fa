"""The gold rule of the quickstart's world as a reward: 1 for a pleasant review, 0 for any other."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import world


def reward_func(queries: list[str], prompts: list[str], labels: list[str | None]) -> list[float]:
    return [float(world.is_pleasant(query)) for query in queries]
