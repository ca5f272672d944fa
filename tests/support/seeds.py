"""Reward functions of the handbook that this project was created from, where it is present; nothing of it is copied."""

import pytest

from tests.support.paths import ROOT

HANDBOOK = "shared/seeds/002_1e91fc2fda3d697a.txt"
DEPTHS = {
    "### Example 1: Code": "000000" "111" "222" "33" "44" "33" "33333" "3343434" "2323" "234" + 9 * "1",
    "### Example 2: Math": "0000" "111" "22222222" "23232" "232" "3" "454534" + 9 * "1",
    "### Example 3: Conversation": "000000" "111" "22222222222" "3" "2" + 10 * "1",
    "### Dynamic Filtering": "0" + 8 * "1",
}  # fmt: skip
"""The depth of each line's indentation, which the handbook has lost, by the beginning of the example's heading."""


def example(heading: str) -> str:
    """The Python text below ``heading``, with its indentation; skips the test where the handbook is absent."""
    found = [path for folder in ROOT.parents if (path := folder / HANDBOOK).is_file()]
    if not found:
        pytest.skip(f"the handbook, ../{HANDBOOK}, does not lie beside this checkout")
    _, _, after = found[0].read_text().partition(f"\n{heading}")
    lines = after.partition("```python\n")[2].partition("\n```")[0].split("\n")
    return "".join("    " * int(depth) + line + "\n" for depth, line in zip(DEPTHS[heading], lines, strict=True))
