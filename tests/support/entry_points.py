"""An entry point that refuses what it is given."""

import os
from collections.abc import Sequence

from tests.support import warm

TIMEOUT_S = 120


def refusal(script: str, arguments: Sequence[str], **environment: str) -> str:
    """Run an entry point of the actor's environment; its only line of error output. It is a process of its own, as an actor that
    ends takes its process group with it."""
    done = warm.run([script, *arguments], timeout=TIMEOUT_S, environment={**os.environ, **environment})
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    return line.removeprefix("error: ")
