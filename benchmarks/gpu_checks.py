"""How benchmarks/gpu.py runs a check: with limits, so that what hangs costs little, and with the figures of the steps so far."""

import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models import PROMPT_TOKENS
from processes import ROOT, Child

from nemo_style_rlhf.launch import local
from nemo_style_rlhf.launch.local import ProgramFailed
from nemo_style_rlhf.launch.program import Program, engine_program, server, trainer

Lines = list[dict[str, Any]]
Figures = dict[str, Any]
SHOWN = {
    "step s": "timers/step", "generate s": "timers/generate", "log-probabilities s": "timers/logprobs",
    "reference s": "timers/reference_logprobs", "update s": "timers/actor_update", "critic train s": "timers/critic_train",
    "transfer s": "timers/weight_transfer", "handovers s": "placement/handover_seconds", "tokens/s": "timers/tokens_per_second",
    "gap mean": "train_rollouts/sampler_logprob_gap_mean", "gap max": "train_rollouts/sampler_logprob_gap_max",
    "probe gap": "train_rollouts/transfer_probe_gap", "actor GiB": "memory/actor_cuda_peak_gib",
    "critic GiB": "memory/critic_cuda_peak_gib",
}  # fmt: skip
"""Figures by the key of metrics.jsonl; GiB are the peaks of torch's allocator, which also counts what a vLLM that sleeps in the
trainer's process gave back."""
PROGRAMS = {
    "actor": "train_ppo_actor", "critic server": "serve_ppo_critic", "engine": "serve_engine", "Triton": "tritonserver",
}  # fmt: skip
"""Programs whose memory the driver is asked for, contexts and libraries included."""
LAST_LINES = 40
QUIET_S = 60.0
"""A check whose logs and metrics have not grown for so long hangs; compilation says nothing for longer."""
COMPILES_S = 150.0


@dataclass(frozen=True)
class Check:
    run: "Callable[[Attempt], Figures]"
    overrides: tuple[str, ...] = ()
    critic: tuple[str, ...] = ()
    """Overrides of the critic server."""
    models: str = "small"
    beside: bool = False
    """Whether others may run at the same time."""
    limit_s: float = 150.0
    compiles: bool = False
    """Whether programs compile kernels at their start, and print nothing meanwhile."""
    vllm: bool = False
    """Whether it needs vLLM, and cannot sample with generation=hf."""
    prompt: int = PROMPT_TOKENS
    """Tokens of a prompt."""
    length: int | None = None
    """Tokens of a response; None takes that of all checks."""


@dataclass
class Size:
    """The settings that all checks share."""

    steps: int = 3
    samples: int = 256
    length: int = 128
    """Tokens of a response."""
    everywhere: tuple[str, ...] = ()
    """Overrides of every program that computes."""
    sampling: tuple[str, ...] = ()
    """Overrides of every program that samples."""
    patience: float = 1.0
    """Factor of all limits."""


class Enough(Exception):
    """The last step that was asked for is made."""


class Attempt:
    """One check under way, in a folder of its own."""

    def __init__(self, check: Check, size: Size, models: Path, folder: Path, ends: float) -> None:
        self.check, self.size, self.models, self.folder = check, size, models, folder
        self._ends = min(time.monotonic() + check.limit_s * size.patience, ends)
        self._grew, self._bytes, self._looked = time.monotonic(), -1, 0.0
        self.length = size.length if check.length is None or size.everywhere else check.length
        compiles = check.compiles or "generation.enforce_eager=false" in check.overrides
        self.quiet_s = (COMPILES_S if compiles else QUIET_S) * size.patience
        self.wrote: list[float] = []
        """When each line of the metrics of the last program was first seen."""

    # --- programs ----------------------------------------------------------------------------------------------------

    def program(self, program: Program, log: Path, *others: Child, metrics: Path | None = None, steps: int = 0) -> None:
        """Run a program to its end, or to its ``steps``-th step if that is not 0.

        Raises:
            ProgramFailed: it or one of the others ended with an error, hangs, or took longer than the check may.
        """
        log.unlink(missing_ok=True)
        self.wrote = []
        child = Child(program, log)

        def watch() -> None:
            clock = time.monotonic()
            if metrics is not None:
                self.wrote += [clock] * (len(lines_of(metrics)) - len(self.wrote))
                if 0 < steps <= len(self.wrote):
                    raise Enough
            if clock - self._looked > 1:
                self._looked = clock
                self._look(child, clock)

        try:
            local.wait_for(child, *others, watch=watch)
        except Enough:
            pass
        finally:
            child.kill() if steps else child.stop()

    def _look(self, child: Child, clock: float) -> None:
        size = sum(file.stat().st_size for pattern in ("*.log", "metrics.jsonl") for file in self.folder.rglob(pattern))
        if size != self._bytes:
            self._bytes, self._grew = size, clock
        if clock > self._ends or clock - self._grew > self.quiet_s:
            how = "took longer than it may" if clock > self._ends else f"wrote nothing for {clock - self._grew:.0f} s"
            with suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGABRT)  # the stacks of its threads end up in its log
            time.sleep(1)
            raise ProgramFailed(f"{child.program.name} {how}:\n{last_lines(child.log)}")

    def actor(self, *given: str, name: str = "actor", others: Sequence[Child] = (), steps: int | None = None) -> Lines:
        """The metrics of an actor that is ended after its last step, or with ``steps=0`` ends by itself."""
        folder = self.folder / name
        words = (*self.rollouts(), *given, *self.size.everywhere)
        enough = self.size.steps if steps is None else steps
        metrics = folder / "metrics.jsonl"
        program = trainer("train_ppo_actor", folder, *words)
        self.program(program, folder / "actor.log", *others, metrics=metrics, steps=enough)
        return lines_of(metrics)

    def rollouts(self) -> tuple[str, ...]:
        """Overrides of an actor: the policy, the prompts, the shape of a step, and those of the check."""
        prompts = "prompts.jsonl" if self.check.prompt == PROMPT_TOKENS else f"prompts_{self.check.prompt}.jsonl"
        return (
            f"model.path={self.models / 'policy'}", f"data.train_path={self.models / prompts}",
            f"generation.max_length={self.length}", "generation.ignore_eos=true",
            "generation.gpu_memory_utilization=0.3", f"algorithm.num_rollout_samples={self.size.samples}",
            "algorithm.mini_batches=4", f"algorithm.max_steps={self.size.steps}", "checkpoint.save_interval=-1",
            *self.check.overrides, *self.size.sampling,
        )  # fmt: skip

    @contextmanager
    def critic(self, name: str = "critic") -> Iterator[tuple[Child, str]]:
        """A critic server, and the override by which an actor finds it."""
        folder = self.folder / name
        words = [f"model.path={self.models / 'reward'}", *self.check.critic, *self.size.everywhere]
        child = Child(server("serve_ppo_critic", folder, *words), folder / "server.log")
        try:
            port = child.ready(120 * self.size.patience)["port"]
            yield child, f"remote_critic_rm.port={port}"
        finally:
            child.stop()

    @contextmanager
    def engine(self, name: str = "actor") -> Iterator[None]:
        """An engine for the actor of that name, on the actor's card, once it has written the configuration."""
        config, ended = self.folder / name / "engines" / "this_run.yaml", threading.Event()

        def serve() -> None:
            while not config.exists() and not ended.wait(0.2):
                pass
            if not ended.is_set():
                program = engine_program("engine-0", config.parent, {})
                child = Child(program, self.folder / f"{name}_engine.log")
                while not ended.wait(0.5):
                    if child.poll() is not None:  # the actor waits for it, or another
                        break
                child.stop(5)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def json_of(self, command: Sequence[object], log: Path) -> Figures:
        """The JSON object in the last line of a script's output."""
        self.program(Program(log.stem, [str(word) for word in command]), log)
        return dict(json.loads(log.read_text().splitlines()[-1]))


def lines_of(metrics: Path) -> Lines:
    """The whole lines of a metrics.jsonl that is still written."""
    if not metrics.exists():
        return []
    whole = map(json.loads, metrics.read_text().rpartition("\n")[0].splitlines())
    return [line for line in whole if "timers/step" in line or "train/loss" in line]


def last_lines(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-LAST_LINES:]) if log.exists() else ""


def figures_of(lines: Lines) -> Figures:
    """The median of the steps after the first, and of gaps and memory the largest of all."""
    found: Figures = {"steps": len(lines)}
    for name, key in SHOWN.items():
        if values := [line[key] for line in lines if line.get(key) is not None]:
            found[name] = max(values) if "GiB" in name or "gap" in name else statistics.median(values[1:] or values)
    return found


def compared(one: Path, other: Path) -> str:
    """Where two runs part: the first step and keys of the metrics, or the tensors of the export. Empty if nowhere."""
    timed = ("timers/", "clock/", "memory/", "gpu/", "placement/", "engines/")
    for a, b in zip(lines_of(one / "metrics.jsonl"), lines_of(other / "metrics.jsonl"), strict=True):
        keys = [key for key in sorted({*a, *b}) if not key.startswith(timed)]
        if parted := [key for key in keys if json.dumps(a.get(key)) != json.dumps(b.get(key))]:
            return f"step {a['step']}: {', '.join(parted[:8])}"
    files = sorted((one / "export").glob("*.safetensors"))
    assert files, "nothing was exported"
    parted = [file.name for file in files if file.read_bytes() != (other / "export" / file.name).read_bytes()]
    return f"the export: {', '.join(parted)}" if parted else ""


class Memory(threading.Thread):
    """Peak GiB on the card as the driver counts them: of everything, and by program."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._peaks: dict[str, int] = defaultdict(int)

    def run(self) -> None:
        try:
            from vllm.third_party import pynvml

            pynvml.nvmlInit()
            card = pynvml.nvmlDeviceGetHandleByIndex(0)
            while True:
                self._note("card", pynvml.nvmlDeviceGetMemoryInfo(card).used)
                for process in pynvml.nvmlDeviceGetComputeRunningProcesses(card):
                    self._note(_program(process.pid), process.usedGpuMemory or 0)
                time.sleep(0.2)
        except Exception as error:  # noqa: BLE001 told in the table
            print(f"the driver tells nothing of memory: {error!r}", file=sys.stderr, flush=True)

    def _note(self, name: str, used: int) -> None:
        self._peaks[name] = max(self._peaks[name], used)

    def take(self) -> dict[str, float]:
        """The peaks since the last call."""
        taken, self._peaks = self._peaks, defaultdict(int)
        return {name: round(size / 2**30, 2) for name, size in taken.items()}


def _program(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        words = ""
    return next((name for name, program in PROGRAMS.items() if program in words), "other")


def planned(attempt: Attempt, *given: str, device_gib: float, log: Path) -> subprocess.Popen[bytes]:
    """Start trainers/plan.py for the settings of a check, and ``given``."""
    critic = [f"critic.model.path={attempt.models / 'reward'}", *(f"critic.{each}" for each in attempt.check.critic)]
    words = [*attempt.rollouts(), *given, *critic, "run.device=cuda", f"device_gib={device_gib:g}"]
    if "placement.share=turns" not in words:
        words.append("together=true")
    log.parent.mkdir(parents=True, exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "trainers/plan.py", *words], cwd=ROOT, stdout=log.open("w"), stderr=subprocess.STDOUT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
