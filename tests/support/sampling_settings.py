"""Values of a prompt's sampling settings that are never possible."""

import math
from typing import Any

IMPOSSIBLE: dict[str, list[Any]] = {
    "temperature": [0, -1, 1e-320, 1e6, 10**400, math.inf, math.nan, True, "1", [1.0], {}],
    "top_p": [0, -0.5, 1.0001, 7, 10**400, math.nan, True, "1", [1.0]],
    "top_k": [-2, -(2**70), 1.0, math.nan, True, "5", [5]],
    "max_length": [0, -1, 2.5, math.inf, True, "5", []],
    "min_length": [-1, 2.5, True, "5", [1]],
    "stop": ["abc", "", [""], [1], [None], [["a"]], {}, {"a": 1}, 5, True],
    "stop_token_ids": [5, "5", ["5"], [1.0], [True], [-1], [None], [[1]], {}],
}
