"""Our commands as values: which script runs in which environment, with which overrides. A launcher starts them, see local.py.

The scripts lie in the repository, and so do the two environments (`make envs`).
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nemo_style_rlhf.launch.interpreter import NEEDS, ROOT
from nemo_style_rlhf.launch.overrides import override

PYTHON = {folder: ROOT / f".venv-{environment}" / "bin" / "python" for folder, (environment, _) in NEEDS.items()}
"""Interpreter by folder of the script."""
ACTOR_PYTHON, SERVER_PYTHON = PYTHON["trainers"], PYTHON["servers"]
ACTOR, CRITIC = "actor", "critic"
"""Names of the programs of a PPO run."""
CHECKED = "NSR_CHECKED"
"""Environment variable of programs whose configuration and inputs their launcher has checked, see precheck/."""
ENGINE_CONFIG = "this_run"
"""Name of the configuration that a trainer writes for its engines; ``engine`` is taken by conf/."""


@dataclass(frozen=True)
class Program:
    """One command, and what its launcher must know about it."""

    name: str
    """Differs from the names of all other programs of the same launcher."""
    argv: Sequence[str]
    """The command of one rank, which begins with the interpreter."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables added to the launcher's environment."""
    ranks: int = 1
    folder: Path = ROOT
    """The folder in which it runs, to which its paths are relative."""
    ready_file: Path | None = None
    """The file in which a server writes its host and port (JSON) once it answers. None if the program is not a server."""

    @property
    def command(self) -> list[str]:
        """The command of all ranks: torchrun starts several of them."""
        python, *words = self.argv
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}"]
        return [python, *(torchrun if self.ranks > 1 else []), *words]


def threads_of_a_rank(ranks: int) -> dict[str, str]:
    """Variables that divide this host's cores between ``ranks``, each of which would start a thread per core; a single rank has
    them all anyway."""
    return {} if ranks == 1 else {"OMP_NUM_THREADS": str(-(-len(os.sched_getaffinity(0)) // ranks))}


def trainer(
    script: str, output_dir: Path, *overrides: str, ranks: int = 1, env: Mapping[str, str] | None = None
) -> Program:
    """``trainers/<script>.py``: the actor, a supervised stage or an evaluation."""
    argv = [str(ACTOR_PYTHON), f"trainers/{script}.py", override("run.output_dir", output_dir), *overrides]
    return Program(script, argv, env or {}, ranks)


def server(
    script: str, output_dir: Path, *overrides: str, ranks: int = 1, env: Mapping[str, str] | None = None
) -> Program:
    """``servers/<script>.py`` on a free port."""
    ready_file = output_dir / "ready.json"
    where = [override("run.output_dir", output_dir), "server.port=0", override("server.ready_file", ready_file)]
    argv = [str(SERVER_PYTHON), f"servers/{script}.py", *where, *overrides]
    return Program(script, argv, env or {}, ranks, ready_file=ready_file)


def engine_program(name: str, folder: Path, environment: Mapping[str, str]) -> Program:
    """``servers/serve_engine.py`` on a free port, for the trainer that writes its engines' configuration into ``folder``."""
    ready = folder / f"{name}.json"
    where = ["server.port=0", override("server.ready_file", ready)]
    words = [f"--config-dir={folder}", f"--config-name={ENGINE_CONFIG}", *where]
    argv = [str(ACTOR_PYTHON), str(ROOT / "servers" / "serve_engine.py"), *words]
    return Program(name, argv, environment, folder=Path.cwd(), ready_file=ready)
