"""``torchrun --standalone`` whose ranks are forks of it, so that they find its libraries loaded.

python tests/integration/torchrun.py RANKS SCRIPT ARGUMENT...
"""

import runpy
import sys
import uuid
from pathlib import Path

from torch.distributed.launcher import LaunchConfig, elastic_launch


def main(ranks: str, *command: str) -> None:
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=int(ranks), run_id=str(uuid.uuid4()), max_restarts=0,
        rdzv_backend="c10d", rdzv_endpoint="localhost:0", start_method="fork",
    )  # fmt: skip
    elastic_launch(config, become)(*command)


def become(*command: str) -> None:
    """One rank: what ``python COMMAND`` is, but that it also finds the packages in the working directory."""
    sys.argv = list(command)
    sys.path[0] = str(Path(command[0]).parent.resolve())
    sys.path.append(str(Path.cwd()))
    try:
        runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise


if __name__ == "__main__":
    main(*sys.argv[1:])
