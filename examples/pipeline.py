"""Runs the stages of an example as the processes they are."""

import shutil
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from nemo_style_rlhf.launch.environment import has_nvidia
from nemo_style_rlhf.launch.interpreter import ROOT as ROOT
from nemo_style_rlhf.launch.local import ProgramFailed
from nemo_style_rlhf.launch.program import Program
from nemo_style_rlhf.launch.supervisor import Supervisor

console = Console()


class Pipeline(Supervisor):
    """A launcher for an example's script: SIGTERM and SIGHUP end every program in order, as Ctrl-C does."""

    def __enter__(self) -> "Pipeline":
        signal.signal(signal.SIGTERM, _raise_interrupt)
        signal.signal(signal.SIGHUP, _raise_interrupt)
        return self

    def run(self, program: Program, *, shown: bool = False) -> float:
        """Run ``program`` to its end and return its seconds; its output is ``shown`` or goes to its log.

        Raises:
            ProgramFailed: it, or another program of this pipeline, ended with an error.
        """
        started = time.monotonic()
        self.start(program, shown=shown)
        self.wait(program.name)
        return time.monotonic() - started


def run_example(example: Callable[[Pipeline], None], output_dir: Path) -> None:
    """``example`` in an empty ``output_dir``; a failed stage exits with 1 and its log's end, Ctrl-C with 130."""
    shutil.rmtree(output_dir, ignore_errors=True)
    if has_nvidia():
        say(
            "this host has an NVIDIA GPU; the example computes in fp32 on the CPU all the same (examples/stages.py says why)"
        )
    try:
        with Pipeline(output_dir / "logs") as pipeline:
            example(pipeline)
    except ProgramFailed as error:
        console.print(f"[bold red]failed:[/] {error}", highlight=False)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        console.print("[bold]interrupted[/]: every process was stopped")
        raise SystemExit(130) from None


def say(text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def overrides(settings: Mapping[str, Any]) -> list[str]:
    """Hydra overrides ``key=value``; None becomes null and booleans are written as YAML has them."""
    return [f"{key}={_value(value)}" for key, value in settings.items()]


def _value(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def _raise_interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
