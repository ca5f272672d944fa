"""The engines of a run: found by their files in a folder, started again when they die, all with the same weights.

A ready engine writes ``<folder>/<name>.json``, with its host and port. The engines of ``generation.engines.launch`` are child
processes of the trainer's first rank.
"""

import json
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from nemo_style_rlhf.checkpoint.files import write_atomically
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.generation.broadcast import PREFIX, Groups
from nemo_style_rlhf.generation.engine_client import EngineClient
from nemo_style_rlhf.generation.weight_store import StoredWeights
from nemo_style_rlhf.launch.entry import config_file
from nemo_style_rlhf.launch.local import LocalLauncher
from nemo_style_rlhf.launch.program import ACTOR_PYTHON, ROOT, Program
from nemo_style_rlhf.schema.common import ModelConfig, RunConfig
from nemo_style_rlhf.schema.generation import EnginesConfig, GenerationConfig, TrainingGenerationConfig
from nemo_style_rlhf.transport.connection import ServerRestarted, ServerUnreachable
from nemo_style_rlhf.transport.messages import ProtocolError
from nemo_style_rlhf.transport.secret import own_token_made, read_token

log = logging.getLogger(__name__)
T = TypeVar("T")
LOST = (ServerUnreachable, ServerRestarted)
POLL_S = 0.2
WATCH_S = 2.0
"""How often an engine is asked how it is."""
RETRIES = 1
"""Attempts of a request after the first: another engine can do it, too."""
CALLS = 64
"""Maximum number of calls of one engine at a time."""
CONFIG = "this_run"
"""Name of the engines' configuration; ``engine`` would be that of conf/."""


class Abandoned(Exception):
    """Nobody wants the samples any more."""


@dataclass
class EngineProcess:
    """An engine that answers and holds the current weights."""

    name: str
    client: EngineClient
    where: dict[str, Any]
    """Content of its ready file."""
    calls: int = 0
    """Calls under way."""
    gap: float = 0.0
    """The gap that its last load found on the probe, in nats."""
    cache_share: float = 0.0
    """Largest share of its KV cache that was in use since its last load, when it last said so."""
    steps: int = 0
    """Steps that it had made when it last said so."""
    advanced: float = field(default_factory=time.monotonic)
    """Time at which it last had nothing to do, or had made more steps."""
    gone: "Future[object]" = field(default_factory=Future)
    """Resolves, to the reason, when the engine is given up."""
    _threads: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, CALLS, "engine"))

    def call(self, ask: Callable[[], T]) -> T:
        """The answer to a call. It is waited for in another thread, as one to an engine that hangs lasts until its time is over.

        Raises:
            ServerUnreachable: the engine was given up meanwhile; and whatever ``ask`` raises.
        """
        asked = self._threads.submit(ask)
        either: list[Future[Any]] = [asked, self.gone]
        wait(either, return_when=FIRST_COMPLETED)
        if not asked.done():
            raise ServerUnreachable(str(self.gone.result()))
        return asked.result()

    def give_up(self, reason: object) -> None:
        """Have nobody wait for an answer any more."""
        with suppress(InvalidStateError):
            self.gone.set_result(reason)


class Fleet:
    """Knows which engines can be asked. Safe to use from several threads."""

    def __init__(self, config: EnginesConfig, folder: Path, *, devices: Sequence[str] = ()) -> None:
        """
        Args:
            devices: CUDA_VISIBLE_DEVICES of each launched engine; none on a CPU.
        """
        self._config, self._folder = config, folder
        self._devices = devices or [""] * config.count
        self._launcher = LocalLauncher(folder / "logs") if config.launch else None
        self._token = own_token_made() if config.launch else read_token(config.token) or own_token_made()
        self._engines: dict[str, EngineProcess] = {}
        self._joining: dict[str, EngineProcess] = {}
        """Engines that load the weights for the first time."""
        self._closing = threading.Event()
        self._changed = threading.Condition()
        self._restarts: Counter[str] = Counter()
        """Losses of each engine at the current version of the weights."""
        self._losses, self._warned = 0, False
        self._dead: dict[str, dict[str, Any]] = {}
        """Ready files of engines that were lost."""
        self._broken: UserError | None = None
        """Why there will be no more engines."""
        self._published: StoredWeights | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._groups, self._members, self._group_name = Groups(folder), "", ""
        """The group in which weights are sent to all engines at once, the ready files of its engines, and its name."""
        self._reached = 0
        """Engines that received the last weights in it."""
        self.abandoned = threading.Event()
        """While it is set, nobody waits for an engine that starts."""
        self.lease = ""
        """Names the trainer and its current weights to the engines."""

    def start(self) -> None:
        """Launch the engines, if that is this fleet's business."""
        if self._launcher is not None:
            for ready in self._folder.glob("*.json"):  # of a start before this one
                ready.unlink()
            for number in range(self._config.count):
                self._launcher.start(_program(f"engine-{number}", self._folder, self._devices[number]))
        threading.Thread(target=self._watch, name="engines-watch", daemon=True).start()

    def load(self, published: StoredWeights, shapes: dict[str, tuple[int, ...]]) -> float:
        """Have every engine load a version of the weights, and those that join later; returns the largest gap on the probe, in
        nats.

        Raises:
            UserError: no engine is ready in time, or one failed too often.
        """
        with self._changed:
            self._published, self._shapes, self.lease = published, shapes, secrets.token_hex(8)
            self._restarts.clear()
            engines = list(self._engines.values())
        with ThreadPoolExecutor(len(engines) or 1) as pool:
            if self._config.weights != "auto" and engines:
                self._broadcast(engines, pool)
            load = partial(self._load, lease=self.lease, published=published)
            for engine, failure in zip(engines, pool.map(load, engines)):
                if failure is not None:
                    self.lost(engine, failure)
        while not self._engines:
            self._wait_for_new()
            self.look()
        return max(engine.gap for engine in self._engines.values())

    def _broadcast(self, engines: Sequence[EngineProcess], pool: ThreadPoolExecutor) -> None:
        """Send the published weights to all engines at once. An engine that does not get them so is sent them when it loads."""
        published, lease, size = self._published, self.lease, len(engines) + 1
        assert published is not None
        members = json.dumps([engine.where for engine in engines])
        if members != self._members:
            self._forget_group()
            self._members, self._group_name = members, PREFIX + secrets.token_hex(8)
        name = self._group_name

        def receive(rank: int, engine: EngineProcess) -> None:
            engine.client.acquire(lease, self._shapes)
            engine.client.receive(lease, published, group=name, rank=rank, size=size, backend=self._config.weights)

        calls = [pool.submit(engine.call, partial(receive, rank, engine)) for rank, engine in enumerate(engines, 1)]
        try:
            group = self._groups.meet(name, 0, size, self._config.weights)
            for path in published.files:
                group.send(path)
        except RuntimeError as error:
            self._forget_group()
            log.warning("the weights were not sent to all engines at once, each is sent them by itself: %s", error)
        self._reached = sum(call.exception() is None for call in calls)

    def _forget_group(self) -> None:
        self._groups.forget()
        self._members = ""
        for meeting in self._folder.glob(f"{PREFIX}*"):
            meeting.unlink(missing_ok=True)

    def engine(self) -> EngineProcess:
        """The engine with the fewest calls under way; call :meth:`release` or :meth:`lost` afterwards.

        Raises:
            UserError: none is ready in time, or one failed too often.
        """
        while True:
            if self._broken is not None:
                raise self._broken
            if len(self._engines) < self._config.count:
                self.look()
            with self._changed:
                if self._engines:
                    chosen = min(self._engines.values(), key=lambda engine: (engine.calls, engine.name))
                    chosen.calls += 1
                    return chosen
            self._wait_for_new()

    def release(self, engine: EngineProcess) -> None:
        with self._changed:
            engine.calls -= 1

    def lost(self, engine: EngineProcess, reason: object) -> None:
        """Do without an engine that died, hangs or failed, and start it again.

        Raises:
            UserError: it was lost too often at one version of the weights.
        """
        with self._changed:
            if self._engines.get(engine.name) is engine:  # else another thread has noticed it, too
                del self._engines[engine.name]
                self._give_up(engine, reason)

    def look(self) -> None:
        """Let engines join that have become ready."""
        with self._changed:
            new = [EngineProcess(name, self._client(where), where) for name, where in self._new()]
            self._joining |= {engine.name: engine for engine in new}
        for engine in new:
            try:
                self._join(engine)
            finally:
                with self._changed:
                    del self._joining[engine.name]

    def _join(self, engine: EngineProcess) -> None:
        """Have an engine load the newest weights, and let it be asked."""
        while True:
            with self._changed:
                lease, published = self.lease, self._published
            failure = self._load(engine, lease, published)
            with self._changed:
                if failure is not None:
                    return self._give_up(engine, failure)
                if self.lease == lease:  # else newer weights have come meanwhile
                    self._engines[engine.name] = engine
                    return log.info("engine %s at %s joins", engine.name, engine.client.address)

    def _client(self, where: dict[str, Any]) -> EngineClient:
        return EngineClient(
            where["host"], where["port"], token=self._token, retries=RETRIES, timeout_s=self._config.request_timeout_s,
            tls=self._config.tls,
        )  # fmt: skip

    def _watch(self) -> None:
        """Do without engines that hang."""
        while not self._closing.wait(WATCH_S):
            with self._changed:
                engines = [*self._engines.values(), *self._joining.values()]
            for engine in engines:
                self._look_at(engine)

    def _look_at(self, engine: EngineProcess) -> None:
        how = "it does not answer"
        with suppress(UserError, ProtocolError, *LOST):
            status = engine.client.status(retry=False)
            how = f"it has {status.running} requests and does not advance"
            engine.cache_share = status.cache_share
            if status.running == 0 or status.steps != engine.steps:
                engine.steps, engine.advanced = status.steps, time.monotonic()
        if (silent := time.monotonic() - engine.advanced) > self._config.hung_after_s:
            reason = f"{how} for {silent:.0f} s (generation.engines.hung_after_s)"
            with self._changed:
                joining = self._joining.get(engine.name) is engine
            if joining:
                engine.give_up(reason)  # whoever has it load the weights then does without it
            else:
                with suppress(UserError):  # raised to whoever asks for an engine
                    self.lost(engine, reason)

    @property
    def metrics(self) -> dict[str, float]:
        """`engines/*` count the engines that can be asked now, how often one was lost, and with generation.engines.weights those
        that received the last weights at once; `kv_cache_share` is that of the engine that used most of its cache."""
        with self._changed:
            shares = [engine.cache_share for engine in self._engines.values()]
        counts = {"engines/ready": float(len(shares)), "engines/lost": float(self._losses)}
        counts["engines/kv_cache_share"] = max(shares, default=0.0)
        return counts if self._config.weights == "auto" else counts | {"engines/received_at_once": float(self._reached)}

    def close(self) -> None:
        """End the launched engines."""
        self._closing.set()
        self._forget_group()
        for engine in self._engines.values():
            engine.client.close()
        if self._launcher is not None:
            self._launcher.__exit__(None, None, None)

    def _load(self, engine: EngineProcess, lease: str, published: StoredWeights | None) -> Exception | None:
        """Have one engine load the published weights; returns the error by which it was lost."""
        assert published is not None
        try:
            engine.call(partial(engine.client.acquire, lease, self._shapes))
            engine.gap, keeps_bits = engine.call(partial(engine.client.load, lease, published))
        except LOST as error:
            return error
        if not keeps_bits and not self._warned:
            self._warned = True
            log.warning(
                "log-probabilities of this model's samples depend, by rounding, on what an engine samples beside them: runs "
                "agree with each other up to that, not to the bit"
            )
        return None

    def _give_up(self, engine: EngineProcess, reason: object) -> None:
        name = engine.name
        engine.give_up(reason)
        engine.client.close()
        self._dead[name] = engine.where
        self._restarts[name] += 1
        self._losses += 1
        log.warning("engine %s is lost: %s", name, reason)
        if self._restarts[name] > self._config.restarts:
            self._broken = UserError(
                f"engine {name} was lost {self._restarts[name]} times at one version of the weights, more than "
                f"generation.engines.restarts={self._config.restarts} allow; the last time: {reason}"
            )
            raise self._broken
        if self._launcher is not None:
            self._launcher[name].kill()
            self._launcher.restart(name)

    def _new(self) -> list[tuple[str, dict[str, Any]]]:
        """Name and ready file of engines that are neither in use nor known to be dead."""
        found = []
        for path in sorted(self._folder.glob("*.json")):
            with suppress(OSError, ValueError):  # the engine may be removing it
                where = json.loads(path.read_text())
                known = path.stem in self._engines or path.stem in self._joining
                if not known and self._dead.get(path.stem) != where:
                    found.append((path.stem, where))
        return found

    def _wait_for_new(self) -> None:
        deadline = time.monotonic() + self._config.ready_timeout_s
        while not self._new() and not self._engines:
            if self.abandoned.is_set():
                raise Abandoned
            if self._broken is not None:
                raise self._broken
            self._require_children()
            if time.monotonic() > deadline:
                raise UserError(
                    f"no engine was ready within generation.engines.ready_timeout_s={self._config.ready_timeout_s:g}: "
                    f"{self._advice}"
                )
            time.sleep(POLL_S)

    @property
    def _advice(self) -> str:
        if self._launcher is not None:
            return f"look at {self._folder}/logs"
        return (
            f"start {ACTOR_PYTHON} servers/serve_engine.py --config-dir={self._folder} --config-name={CONFIG} server.port=0 "
            f"server.ready_file={self._folder}/NAME.json"
        )

    def _require_children(self) -> None:
        """
        Raises:
            UserError: a launched engine ended before it was ready, for instance for a mistake in its configuration.
        """
        for number in range(self._config.count if self._launcher is not None else 0):
            assert self._launcher is not None
            child = self._launcher[f"engine-{number}"]
            if child.poll() is not None and not child.program.ready_file.exists():  # type: ignore[union-attr]
                raise UserError(str(child.failed()))


def describe(
    folder: Path, model: ModelConfig, config: TrainingGenerationConfig, run: RunConfig, *, max_length: int, stop_strings: bool
) -> None:  # fmt: skip
    """Write ``<folder>/this_run.yaml``, the configuration of every engine of a run."""
    content = {
        "run": {"seed": run.seed, "device": run.device, "num_threads": config.engines.threads or run.num_threads},
        "model": _part(ModelConfig, model),
        "generation": _part(GenerationConfig, config),
        "sequences": {"max_length": max_length, "stop_strings": stop_strings},
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / f"{CONFIG}.yaml", config_file("engine", content).encode())


def _part(schema: type[Any], given: Any) -> dict[str, Any]:
    """The fields of ``schema`` in an instance of a class that extends it."""
    return {name: value for name, value in asdict(given).items() if name in {each.name for each in fields(schema)}}


def devices_beside(ranks: int, visible: Sequence[str], engines: int, size: int) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each engine, which gets ``size`` of the GPUs that this host's first ``ranks`` leave.

    Raises:
        UserError: they are too few.
    """
    if len(visible) < (needed := ranks + engines * size):
        raise UserError(
            f"generation.engines.count={engines} with {size} GPUs each beside {ranks} ranks needs {needed} GPUs, this host shows "
            f"{len(visible)}: start fewer, or start them elsewhere and give generation.engines.launch=false"
        )
    return [",".join(visible[first : first + size]) for first in range(ranks, needed, size)]


def _program(name: str, folder: Path, devices: str) -> Program:
    ready = folder / f"{name}.json"
    words = [f"--config-dir={folder}", f"--config-name={CONFIG}", "server.port=0", f"server.ready_file={ready}"]
    argv = [str(ACTOR_PYTHON), str(ROOT / "servers" / "serve_engine.py"), *words]
    env = {"CUDA_VISIBLE_DEVICES": devices} if devices else {}
    return Program(name, argv, env, folder=Path.cwd(), ready_file=ready)
