"""Starts programs, starts again those that are lost, and ends them all: the one restart policy of every launcher."""

import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.launch.local import STOP_GRACE_S, Child, wait_for
from nemo_style_rlhf.launch.program import ACTOR, Program


class Supervisor:
    """Programs by name, with their output in ``log_dir/<name>.log``; leaving the context ends all of them.

    Failures are counted until there is progress, and the first ``restarts`` of them are forgiven.
    """

    def __init__(
        self, log_dir: Path, restarts: int = 0, *, key: str = "restarts", since: str = "", together: bool = False,
        launch: Callable[..., Child] = Child, say: Callable[[str], None] = lambda text: None,
    ) -> None:  # fmt: skip
        """
        Args:
            key: the configuration key of ``restarts``, empty if no user sets it.
            since: when a count ends, as the rest of a sentence: "before the next step".
            together: whether all programs share one count.
            launch: starts a program, given it and its log.
            say: is told which program is started again, and why.
        """
        self._log_dir, self._launch, self._say = log_dir, launch, say
        self._restarts, self._key, self._since, self._together = restarts, key, since, together
        self._failures: Counter[str] = Counter()
        self._children: dict[str, Child] = {}

    def __enter__(self) -> "Supervisor":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in reversed(list(self._children)):
            self.stop(name, STOP_GRACE_S if kind is None else STOP_GRACE_S / 6)

    def __getitem__(self, name: str) -> Child:
        return self._children[name]

    @property
    def children(self) -> list[Child]:
        """The programs in the order of their first starts."""
        return list(self._children.values())

    @property
    def ended(self) -> list[Child]:
        return [child for child in self.children if child.poll() is not None]

    def start(self, *programs: Program, shown: bool = False) -> None:
        """Start the programs in the background, each with an empty log, or ``shown``."""
        for program in programs:
            log = self._log_dir / f"{program.name}.log"
            log.unlink(missing_ok=True)
            self.resume(program, log, **({"shown": True} if shown else {}))

    def resume(self, program: Program, log: Path, **how: bool) -> None:
        """Start a program whose output is added to ``log``."""
        assert program.name not in self._children, f"{program.name} was already started"
        self._children[program.name] = self._launch(program, log, **how)

    def restart(self, name: str, program: Program | None = None) -> None:
        """Kill what is left of a program, and start it, or ``program`` in its place; the log continues."""
        child = self._children[name]
        child.kill()
        self._children[name] = self._launch(program or child.program, child.log)

    def progressed(self) -> None:
        """Forget the failures so far."""
        self._failures.clear()

    def lost(
        self, name: str, reason: object = None, *, counts: bool = True, mistakes: bool = False,
        program: Program | None = None,
    ) -> None:  # fmt: skip
        """Start a program again that has ended, or that its clients have lost for a ``reason``. One that was not started here
        is only counted.

        Args:
            counts: whether this is a failure of its own; not if it had the cause of another, which counts.
            mistakes: whether a program that refused its configuration is started again, too.
            program: what is started in its place.

        Raises:
            UserError: the program refused its configuration or its inputs, or its clients lost it too often.
            ProgramFailed: it ended too often.
        """
        child = self._children.get(name)
        if child is not None and not mistakes and (mistake := child.mistake):
            raise UserError(("" if name == ACTOR else f"{name}: ") + mistake)
        self._failures[counted := "" if self._together else name] += counts
        if self._failures[counted] > self._restarts:
            allowed = f"{self._key}={self._restarts} allows" if self._key else f"the {self._restarts} allowed"
            too_often = f"one failure more than {allowed} {self._since}"
            if child is None or reason is not None:
                raise UserError(f"{name} was lost, {too_often}: {reason}")
            raise child.failed(f"{child.end}, {too_often}")
        if child is None:
            return
        if reason is None:
            restarts = f" ({self._failures[counted]} of {self._restarts} restarts {self._since})" if counts else ""
            self._say(f"{name} {child.end} and is started again{restarts}")
        self.restart(name, program)

    def wait(self, name: str) -> None:
        """Wait until the program has ended with 0.

        Raises:
            ProgramFailed: it, or any other program of this launcher, has ended with an error.
        """
        child = self._children[name]
        wait_for(child, *(other for other in self._children.values() if other is not child))
        self.stop(name)  # children that it left

    def stop(self, name: str, grace_s: float = STOP_GRACE_S) -> int:
        """Stop the program, as :meth:`Child.stop`, and forget it; returns the exit code."""
        return self._children.pop(name).stop(grace_s)

    def stop_all(self, grace_s: float) -> None:
        """Stop the programs, all at the same time."""
        for child in self._children.values():
            child.signal(signal.SIGTERM)
        for name in list(self._children):
            self.stop(name, grace_s)
