"""Runs the programs of one run to its end: restarts what dies, shows what the programs say, and ends them together.

Ctrl-C reaches only this process. It ends the actor first: the actor may still save, and needs the server for that. A restarted
actor resumes by itself. If the server was restarted, the actor goes back to the last common checkpoint.
"""

import contextlib
import dataclasses
import json
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.launch import interrupt
from nemo_style_rlhf.launch.composition import config_file
from nemo_style_rlhf.launch.interpreter import ROOT
from nemo_style_rlhf.launch.local import POLL_S, STOP_GRACE_S, Child
from nemo_style_rlhf.launch.preemption import PREEMPTED_EXIT
from nemo_style_rlhf.launch.program import ACTOR, ACTOR_PYTHON, CRITIC, SERVER_PYTHON, Program
from nemo_style_rlhf.launch.screen import WORTH_READING, GrowingLog, Screen
from nemo_style_rlhf.launch.starting import STARTING
from nemo_style_rlhf.launch.supervisor import Supervisor
from nemo_style_rlhf.schema.actor import PPOActorConfig
from nemo_style_rlhf.schema.pair import LaunchedConfig

COMMANDS = {
    CRITIC: (SERVER_PYTHON, "servers/serve_ppo_critic.py", "ppo_critic"),
    ACTOR: (ACTOR_PYTHON, "trainers/train_ppo_actor.py", "ppo_actor"),
}
"""Interpreter, script, and file in ``conf/`` of each program."""
AGAIN = "run.resume=auto"
"""The actor's argument when it is started again, whatever the first start was told to do with checkpoints."""
PROGRESS = re.compile(r"[A-Z_]+ (\d+)/\d+  reward ")
"""Begins the line that an actor without a terminal writes after each step."""
PHASE = re.compile(rf"[\d:]{{8}} INFO (?:{STARTING}(.+)|serving )")
"""Begins the line of a program that says what it does while it starts, or that it is ready."""
GOES_ON = "  "
"""Begins the further lines of a message, such as the samples under a failed health check."""
ENDS_ACTOR = (0, interrupt.INTERRUPTED_EXIT, PREEMPTED_EXIT)
"""Exit codes of an actor that was not lost."""
PATIENT_INTERRUPTS = 3
"""Presses of Ctrl-C before this process ends without waiting for the others."""


def critic_python(backend: str) -> Path:
    """The interpreter of a critic server: only PyTriton needs an environment of its own."""
    return ACTOR_PYTHON if backend == "native" else SERVER_PYTHON


def pythons_of(config: LaunchedConfig) -> set[Path]:
    """The interpreters of a run's programs."""
    return {ACTOR_PYTHON, *([critic_python(config.critic.server.backend)] if config.uses_critic_process else [])}


def require_environments(config: LaunchedConfig) -> None:
    """Raise UserError if an environment is missing on this host."""
    for python in sorted(pythons_of(config)):
        if not python.exists():
            raise UserError(
                f"{python} does not exist: build the environments beside the package, `make envs` in {ROOT}"
            )


def configurations(config: LaunchedConfig, folder: Path) -> dict[str, dict[str, Any]]:
    """The configurations of actor and critic server, in folders of their own below ``folder``, by the name of the program."""
    values = dataclasses.asdict(config)
    critic = dataclasses.asdict(config.critic_server)
    actor = {field.name: values[field.name] for field in dataclasses.fields(PPOActorConfig)}
    actor["run"]["output_dir"] = str(folder / ACTOR)
    actor["tracking"]["progress"] = True
    critic["run"]["output_dir"] = critic["run"]["output_dir"] or str(folder / CRITIC)
    critic["run"]["dry_run"] = False  # the actor's rehearsal needs a server
    return {CRITIC: critic, ACTOR: actor}


def configured(name: str, folder: Path, values: dict[str, Any]) -> list[str]:
    """The command of a program, whose configuration becomes a file in ``folder/configs``."""
    python, script, base = COMMANDS[name]
    if name == CRITIC:
        python = critic_python(values["server"]["backend"])
    configs = folder / "configs"
    configs.mkdir(parents=True, exist_ok=True)
    (configs / f"{name}.yaml").write_text(config_file(base, values))
    return [str(python), str(ROOT / script), f"--config-dir={configs}", f"--config-name={name}"]


class PPORun:
    """The programs of a run; the last one is the actor."""

    def __init__(self, programs: list[Program], folder: Path, *, restarts: int, then: str = "") -> None:
        """``then`` is the command that may follow a run that is done; empty for none."""
        self._folder, self._then = folder, then
        logs = [folder / f"{program.name}.log" for program in programs]
        self._news = [GrowingLog(log) for log in logs]
        self._screen = Screen()
        self._supervisor = Supervisor(
            folder, restarts, since="before the next step", together=True, launch=self._start, say=self._screen.say
        )
        self._furthest = 0
        """The newest step that was reached."""
        self._interrupts, self._passed_on = 0, 0
        for _ in range(PATIENT_INTERRUPTS):
            interrupt.on_first(self._interrupted)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._interrupted)
        self._speaking: set[Child] = set()
        """The children whose last line was shown as a message. The message may continue."""
        self._phases = {program.name: "loading libraries" for program in programs}
        """Phase of each program, by its name, until the first step is done."""
        for program, log in zip(programs, logs, strict=True):
            self._screen.say(f"{program.name}: log in {log}")
            self._supervisor.resume(program, log)
        self._show_phases()

    def _start(self, program: Program, log: Path) -> Child:
        """The program, started; subclasses may start it elsewhere."""
        return Child(program, log)

    def _counts(self, dead: Child) -> bool:
        """True if this death counts; False if it shares its cause with a death that counted."""
        return True

    @property
    def _children(self) -> list[Child]:
        return self._supervisor.children

    @property
    def _actor(self) -> Child:
        return self._supervisor.children[-1]

    def to_its_end(self) -> int:
        """Run until the actor has ended; returns its exit code, or Ctrl-C's."""
        while True:
            time.sleep(POLL_S)
            self._show()
            self._pass_on()
            self._watch()
            actor = self._actor
            if actor.poll() is not None and (self._interrupts or actor.poll() in ENDS_ACTOR):
                self._show()
                break
            for child in self._supervisor.ended:
                if not self._interrupts:
                    self._restart(child)
        self._screen.close()
        if (code := actor.poll()) == 0:
            if self._then:
                self._screen.say(f"next: {self._then}")
            return 0
        self._screen.say(actor.said("the same command ") or "stopped; the same command goes on")
        return code if code in ENDS_ACTOR and code is not None else interrupt.INTERRUPTED_EXIT

    def close(self) -> None:
        """End the actor, then the server, then what is left of killed processes."""
        self._screen.close()
        self._interrupts += 1
        deadline = time.monotonic() + STOP_GRACE_S
        while self._children and self._actor.poll() is None and time.monotonic() < deadline:
            self._pass_on()
            time.sleep(POLL_S)
        for child in reversed(self._children):
            child.stop()
        remove_leftovers(self._folder / ACTOR)

    def _watch(self) -> None:
        """Called several times a second; what it raises ends the run."""

    def _show(self) -> None:
        for child, log in zip(self._children, self._news, strict=True):
            for line in log.news():
                if phase := PHASE.match(line):
                    self._phases[child.program.name] = phase[1] or "ready"
                    self._show_phases()
                elif step := PROGRESS.match(line):
                    self._screen.progress(line)
                    if int(step[1]) > self._furthest:
                        self._furthest = int(step[1])
                        self._supervisor.progressed()
                elif WORTH_READING.match(line) or (line.startswith(GOES_ON) and child in self._speaking):
                    self._screen.say(f"{child.program.name}: {line}")
                    self._speaking.add(child)
                    continue
                self._speaking.discard(child)

    def _show_phases(self) -> None:
        if not self._furthest:
            self._screen.progress("; ".join(f"{name}: {phase}" for name, phase in self._phases.items()))

    def _restart(self, dead: Child) -> None:
        """Start a program again, as :meth:`Supervisor.lost` allows."""
        program = dead.program
        if program.name == ACTOR and AGAIN not in program.argv:
            program = dataclasses.replace(program, argv=[*program.argv, AGAIN])
        self._supervisor.lost(program.name, counts=self._counts(dead), program=program)

    def _interrupted(self, *_: object) -> None:
        self._interrupts += 1

    def _pass_on(self) -> None:
        """Interrupt the actor as often as this process was interrupted, or told to end."""
        while self._passed_on < self._interrupts:
            self._passed_on += 1
            self._actor.interrupt()


def remove_leftovers(actor: Path) -> None:
    """Remove what an actor and engines that were killed could not: ready files, and weights in memory."""
    for ready in (actor / "engines").glob("*.json"):
        ready.unlink(missing_ok=True)
    for manifest in actor.glob("checkpoints/*/manifest.json"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            run_id = json.loads(manifest.read_text())["run_id"]
            shutil.rmtree(interrupt.weights_in_memory(run_id), ignore_errors=True)
