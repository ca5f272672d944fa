"""The share of a row's tests that the Python code in a response passes.

    .venv-actor/bin/python trainers/train_ppo_actor.py algorithm=grpo reward=function \
        reward.function.path=examples/rewards/code_tests.py reward.function.per_sample=true \
        data.train_path=$PROBLEMS data.label_key=tests model.path=$POLICY run.output_dir=outputs/code

A label is a list of tests, `["assert add(1, 2) == 3", ...]`, or Python text as one test. The code is the last ```python block
of the response, or all of it. Code and tests run in two sandboxes without network, files or secrets of this machine, and the code
cannot give its own verdict: nemo_style_rlhf/scoring/code_judge.py lists what holds and what does not. Needs bubblewrap.
"""

import ast
import contextlib
import json
import re

from nemo_style_rlhf.scoring.code_judge import passed_tests
from nemo_style_rlhf.scoring.sandbox import require_sandbox

WALL_S = 8.0
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)

require_sandbox()  # when the trainer starts, not in its first rollout


def reward_func(queries: list[str], prompts: list[str], labels: list[str | None]) -> list[float]:
    return [
        share_passed(code_of(query[len(prompt) :]), tests_of(label))
        for query, prompt, label in zip(queries, prompts, labels, strict=True)
    ]


def code_of(response: str) -> str:
    """The last block marked as code, or the whole response."""
    blocks = _BLOCK.findall(response)
    return blocks[-1] if blocks else response


def tests_of(label: str | None) -> list[str]:
    """A list in JSON or Python notation, or one test."""
    if not label:
        raise ValueError("code_tests.py needs the tests of each row: set data.label_key")
    for read in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError):
            if (tests := read(label)) and isinstance(tests, list):
                return [str(test) for test in tests]
    return [label]


def share_passed(code: str, tests: list[str]) -> float:
    return len(passed_tests(code, tests, wall_s=WALL_S)) / len(tests)
