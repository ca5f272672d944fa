"""Names of runs and checkpoints, in the form that both processes use in file names."""

import re

RUN_ID = re.compile("[a-z0-9]{1,40}")
CHECKPOINT_ID = re.compile(f"({RUN_ID.pattern})-step_([0-9]{{6}}|[1-9][0-9]{{6,14}})")


def checkpoint_id(run_id: str, step: int) -> str:
    """The name that actor checkpoint and critic checkpoint share."""
    return f"{run_id}-step_{step:06d}"


def is_run_id(value: object) -> bool:
    return isinstance(value, str) and RUN_ID.fullmatch(value) is not None


def is_checkpoint_id(value: object) -> bool:
    return isinstance(value, str) and CHECKPOINT_ID.fullmatch(value) is not None


def run_of(checkpoint_id: str) -> str:
    """The run of a checkpoint, from its id."""
    return checkpoint_id.rpartition("-")[0]
