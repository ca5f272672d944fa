"""The share of a row's tests that the Python code in a response passes.

    .venv-actor/bin/python trainers/train_ppo_actor.py algorithm=grpo reward=function \
        reward.function.path=examples/rewards/code_tests.py reward.function.per_sample=true \
        data.train_path=$PROBLEMS data.label_key=tests model.path=$POLICY run.output_dir=outputs/code

A label is a list of tests, `["assert add(1, 2) == 3", ...]`, or Python text as one test. The code is the last ```python block
of the response, or all of it. It runs in a process of its own (limited_python.py): bounded in CPU seconds, memory, file size and
wall time, its output dropped, without network, further processes, or changes outside a temporary folder. That stops accidents:
endless loops, huge lists, a stray `rm`. It is no security boundary: code that means to can get around it, or forge its result.
For models you do not trust, run the trainer in a container, or put this function behind reward.endpoints on a machine made
for it.
"""

import ast
import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

WALL_S = 8.0
RUNNER = Path(__file__).resolve().with_name("limited_python.py")
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


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
    """In 0 to 1; each passed test leaves one token, that the code has no business to know, in the result."""
    token = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, tempfile.TemporaryFile() as result:
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", str(RUNNER)],
            cwd=folder,
            env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=result,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(json.dumps({"token": token, "code": code, "tests": tests}).encode(), WALL_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and whatever it started
            process.wait()
        result.seek(0)
        return min(result.read().count(token.encode()), len(tests)) / len(tests)
