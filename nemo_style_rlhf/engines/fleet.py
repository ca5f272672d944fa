"""The engines of a run: found by their files in a folder, all with the same weights. A supervisor learns of lost engines, and
starts them again if ``generation.engines.launch`` makes them child processes of the trainer's first rank.
"""

import logging
import secrets
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from nemo_style_rlhf.engines.broadcast import Broadcast
from nemo_style_rlhf.engines.client import EngineClient, EngineProcess
from nemo_style_rlhf.engines.files import client_of, ready_files
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.generation.weight_store import PublishedWeights
from nemo_style_rlhf.launch.program import ACTOR_PYTHON, ENGINE_CONFIG, engine_program
from nemo_style_rlhf.launch.supervisor import Supervisor
from nemo_style_rlhf.schema.common import TokenConfig
from nemo_style_rlhf.schema.generation import EnginesConfig
from nemo_style_rlhf.wire.connection import ServerRestarted, ServerUnreachable
from nemo_style_rlhf.wire.messages import ProtocolError
from nemo_style_rlhf.wire.secret import read_token

log = logging.getLogger(__name__)
LOST = (ServerUnreachable, ServerRestarted)
POLL_S = 0.2
WATCH_S = 2.0
"""Seconds between health checks."""
END_S = 10.0
"""Seconds in which launched engines must end. They hold nothing that is worth a longer wait."""


class CallAbandoned(Exception):
    """The samples are no longer wanted."""


class Fleet:
    """Knows which engines can be asked. Safe to use from several threads."""

    def __init__(self, config: EnginesConfig, folder: Path, *, devices: Sequence[str] = (), bits: bool = False) -> None:
        """Prepare the fleet; :meth:`start` launches it.

        Args:
            devices: CUDA_VISIBLE_DEVICES of each launched engine; none on a CPU.
            bits: refuse engines whose samples depend on what they are batched with.
        """
        self._config, self._folder, self._bits = config, folder, bits
        self._environments = [{"CUDA_VISIBLE_DEVICES": each} for each in devices] or [{}] * config.count
        self._supervisor = Supervisor(
            folder / "logs", config.restarts, key="generation.engines.restarts", since="at one version of the weights"
        )
        self._token = secrets.token_hex(32) if config.launch else read_token(config.token)
        self._engines: dict[str, EngineProcess] = {}
        self._joining: dict[str, EngineProcess] = {}
        """Engines that load the weights for the first time."""
        self._closing = threading.Event()
        self._lock = threading.RLock()
        self._losses, self._warned = 0, False
        self._dead: dict[str, dict[str, Any]] = {}
        """Ready files of engines that were lost."""
        self._broken: Exception | None = None
        """The error that callers get once there will be no more engines."""
        self._published: PublishedWeights | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._broadcast = None if config.weights == "auto" else Broadcast(folder, config.weights)
        self.abandoned = threading.Event()
        """While it is set, no thread waits for an engine that starts."""
        self._asleep = False
        """True if all engines sleep. None is then started again: it would take memory that others use."""
        self.lease = ""
        """Names the trainer and its current weights to the engines."""

    def start(self) -> None:
        """Launch the engines if ``generation.engines.launch`` says so, and begin to watch them."""
        if self._config.launch:
            for ready in self._folder.glob("*.json"):  # of a start before this one
                ready.unlink()
            for number in range(self._config.count):
                environment = {TokenConfig.token_env: self._token or "", **self._environments[number]}
                self._supervisor.start(engine_program(f"engine-{number}", self._folder, environment))
        else:
            log.info("waiting for engines, at most %g s: %s", self._config.ready_timeout_s, self._advice)
        threading.Thread(target=self._watch, name="engines-watch", daemon=True).start()

    def load(self, published: PublishedWeights, shapes: dict[str, tuple[int, ...]]) -> float:
        """Make every engine load a version of the weights, also those that join later; returns the largest gap on the probe, in
        nats.

        Raises:
            UserError: no engine is ready in time, or one failed too often.
        """
        with self._lock:
            self._published, self._shapes, self.lease = published, shapes, secrets.token_hex(8)
            self._supervisor.progressed()
            self._asleep = False
        engines = self._ready()
        for engine in engines:
            engine.advanced = time.monotonic()  # it may have slept for long
        with ThreadPoolExecutor(len(engines) or 1) as pool:
            if self._broadcast is not None and engines:
                self._broadcast.send(engines, published, lease=self.lease, shapes=shapes, pool=pool)
            load = partial(self._load, lease=self.lease, published=published)
            for engine, failure in zip(engines, pool.map(load, engines)):
                if failure is not None:
                    self.lost(engine, failure)
        while not (gaps := [engine.gap for engine in self._ready()]):
            self._wait_for_one()
        return max(gaps)

    def sleep(self) -> dict[str, int]:
        """Make every engine free its device until :meth:`load`, also those that are still starting.

        Returns:
            Bytes that each still holds, by name.

        Raises:
            UserError: an engine that was started is not ready in time, or one failed too often.
        """
        held: dict[str, int] = {}
        with self._lock:
            self.lease = secrets.token_hex(8)  # drops the requests of streams that were abandoned
        deadline = time.monotonic() + self._config.ready_timeout_s
        while True:
            for engine in [each for each in self._ready() if each.name not in held]:
                try:
                    engine.call(partial(engine.client.acquire, self.lease, self._shapes))
                    held[engine.name] = engine.call(partial(engine.client.sleep, self.lease))
                except LOST as error:
                    self.lost(engine, error)
            # Engines start asleep. One that was lost starts again, and loads the last version first.
            asleep = len(self._new()) if self._published is None else len(held)
            if not self._config.launch or asleep >= self._config.count:
                self._asleep = True
                return held
            if self._broken is not None:
                raise self._broken
            if time.monotonic() > deadline:
                raise UserError(
                    f"{self._config.count - asleep} engines were not ready to sleep within "
                    f"generation.engines.ready_timeout_s={self._config.ready_timeout_s:g}: {self._advice}"
                )
            time.sleep(POLL_S)

    def _ready(self) -> list[EngineProcess]:
        with self._lock:
            return list(self._engines.values())

    def engine(self) -> EngineProcess:
        """The engine with the fewest calls under way; call :meth:`release` or :meth:`lost` afterwards.

        Raises:
            UserError: none is ready in time, or one failed too often.
        """
        while True:
            if self._broken is not None:
                raise self._broken
            with self._lock:
                if self._engines:
                    chosen = min(self._engines.values(), key=lambda engine: (engine.calls, engine.name))
                    chosen.calls += 1
                    return chosen
            self._wait_for_one()

    def release(self, engine: EngineProcess) -> None:
        with self._lock:
            engine.calls -= 1

    def lost(self, engine: EngineProcess, reason: object) -> None:
        """Give up an engine that died, hangs or failed, and start it again.

        Raises:
            UserError: it was lost too often at one version of the weights.
        """
        with self._lock:
            if self._engines.get(engine.name) is engine:  # else another thread has noticed it, too
                del self._engines[engine.name]
                self._give_up(engine, reason)

    def _look(self) -> None:
        """Let engines join that have become ready, each in a thread of its own."""
        with self._lock:
            if self._closing.is_set() or self._published is None:
                return
            if len(self._engines) + len(self._joining) >= self._config.count:
                return
            new = []
            for name, where in self._new():
                try:
                    new.append(EngineProcess(name, self._client(name, where), where))
                except UserError as error:
                    if not self._engines:
                        raise
                    self._dead[name] = where
                    log.warning("engine %s does not join: %s", name, error)
            self._joining |= {engine.name: engine for engine in new}
        for engine in new:
            threading.Thread(target=self._join, args=(engine,), name=f"{engine.name}-joins", daemon=True).start()

    def _join(self, engine: EngineProcess) -> None:
        """Make an engine load the newest weights, and let it be asked."""
        try:
            while not self._joined(engine):
                pass
        except Exception as error:  # noqa: BLE001 raised to callers of engine()
            self._broken = self._broken or error
        finally:
            with self._lock:
                del self._joining[engine.name]

    def _joined(self, engine: EngineProcess) -> bool:
        """True if it can be asked, or was given up. False if newer weights have come while it loaded."""
        with self._lock:
            lease, published = self.lease, self._published
        try:
            failure = self._load(engine, lease, published)
        except (FileNotFoundError, UserError) as error:
            if self.lease != lease:  # the weights that were being sent are gone
                return False
            if not self._ready():
                raise
            failure = error  # a wrong token or certificate: the run continues without it
        with self._lock:
            if failure is not None:
                self._give_up(engine, failure)
            elif self.lease == lease:
                self._engines[engine.name] = engine
                log.info("engine %s at %s joins", engine.name, engine.client.address)
            return failure is not None or self.lease == lease

    def _client(self, name: str, where: dict[str, Any]) -> EngineClient:
        return client_of(name, where, self._config, self._token)

    def _watch(self) -> None:
        """Let new engines join, and give up engines that end or hang."""
        looked = time.monotonic()
        while not self._closing.wait(POLL_S):
            if self._asleep:
                continue
            try:
                self._look()
                if time.monotonic() - looked < WATCH_S:
                    continue
                looked = time.monotonic()
                self._start_again()
                with self._lock:
                    engines = [*self._engines.values(), *self._joining.values()]
                for engine in engines:
                    self._look_at(engine)
            except Exception as error:  # noqa: BLE001 raised to callers of engine()
                self._broken = self._broken or error

    def _start_again(self) -> None:
        """Start launched engines again that ended before they were ready, and look again at others that were lost.

        Raises:
            UserError: the first engine ended for a mistake in its configuration, or one ended too often.
        """
        with self._lock:
            if self._closing.is_set():
                return
            lost = {name: where for name, where in self._dead.items() if name not in self._engines}
            for child in self._supervisor.ended:
                assert child.program.ready_file is not None
                if not child.program.ready_file.exists():
                    self._report(child.program.name, f"it {child.end}", mistakes=bool(self._engines))
        for name, where in () if self._config.launch else lost.items():
            with suppress(ProtocolError, UserError, *LOST):  # else it answers again: it was the network
                self._client(name, where).status(retry=False)
                with self._lock:
                    self._dead.pop(name, None)

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
            with self._lock:
                joining = self._joining.get(engine.name) is engine
            if joining:
                engine.give_up(reason)  # ends the call by which it loads
            else:
                with suppress(UserError):  # raised to callers of engine()
                    self.lost(engine, reason)

    @property
    def metrics(self) -> dict[str, float]:
        """`engines/*` count the engines that can be asked now, the losses of engines, and with generation.engines.weights the
        engines that received the last weights at once; `kv_cache_share` is the largest of their caches' shares in use."""
        with self._lock:
            shares = [engine.cache_share for engine in self._engines.values()]
        counts = {"engines/ready": float(len(shares)), "engines/lost": float(self._losses)}
        counts["engines/kv_cache_share"] = max(shares, default=0.0)
        if self._broadcast is not None:
            counts["engines/received_at_once"] = float(self._broadcast.reached)
        return counts

    def close(self) -> None:
        """End the launched engines, and make every thread that waits for one raise :class:`CallAbandoned`."""
        with self._lock:  # none is being started again
            self._closing.set()
            self._broken = CallAbandoned()
            engines = [*self._engines.values(), *self._joining.values()]
        for engine in engines:
            engine.give_up("the trainer ends")
            engine.client.close()
        if self._broadcast is not None:
            self._broadcast.close()
        self._supervisor.stop_all(END_S)

    def _load(self, engine: EngineProcess, lease: str, published: PublishedWeights | None) -> Exception | None:
        """Make one engine load the published weights; returns the error by which it was lost."""
        assert published is not None
        try:
            engine.call(partial(engine.client.acquire, lease, self._shapes))
            engine.gap, loses_bits = engine.call(partial(engine.client.load, lease, published))
            repeatable = not self._bits or engine.call(engine.client.status).repeatable
        except LOST as error:
            return error
        if not repeatable:
            raise UserError(
                f"run.deterministic=true, but engine {engine.name} was started without it: start it with run.deterministic=true"
            )
        if loses_bits and self._bits:
            raise UserError(
                f"run.deterministic=true, but on {engine.name} the bits of this model's samples depend on {loses_bits}, and so "
                "on the clock: give run.deterministic=null, or another dtype, card or model"
            )
        if loses_bits and not self._warned:
            self._warned = True
            log.warning(
                "log-probabilities of this model's samples depend, by rounding, on %s: runs agree with each other up to that, "
                "not to the bit", loses_bits,
            )  # fmt: skip
        return None

    def _give_up(self, engine: EngineProcess, reason: object) -> None:
        name = engine.name
        engine.give_up(reason)
        engine.client.close()
        self._dead[name] = engine.where
        self._report(name, reason, mistakes=True)

    def _report(self, name: str, reason: object, *, mistakes: bool) -> None:
        """Report a lost engine to the supervisor, which starts it again if it was launched.

        Args:
            mistakes: True if an engine that refused its configuration is started again, too.

        Raises:
            UserError: the engine refused its configuration, or was lost too often at one version of the weights.
        """
        if self._closing.is_set():
            return
        self._losses += 1
        log.warning("engine %s is lost: %s", name, reason)
        try:
            self._supervisor.lost(name, reason, mistakes=mistakes)
        except UserError as error:
            self._broken = error
            raise

    def _new(self) -> list[tuple[str, dict[str, Any]]]:
        """Name and ready file of engines that are neither in use nor known to be dead."""
        return [
            (name, where)
            for name, where in ready_files(self._folder)
            if name not in self._engines and name not in self._joining and self._dead.get(name) != where
        ]

    def _wait_for_one(self) -> None:
        """Wait until an engine can be asked.

        Raises:
            UserError: none is ready in time, or one failed too often.
        """
        deadline = time.monotonic() + self._config.ready_timeout_s
        while not self._ready():
            if self.abandoned.is_set():
                raise CallAbandoned
            if self._broken is not None:
                raise self._broken
            if self._joining:
                deadline = time.monotonic() + self._config.ready_timeout_s  # the watch limits the time of a load
            if time.monotonic() > deadline:
                raise UserError(
                    f"no engine was ready within generation.engines.ready_timeout_s={self._config.ready_timeout_s:g}: "
                    f"{self._advice}"
                )
            time.sleep(POLL_S)

    @property
    def _advice(self) -> str:
        if self._config.launch:
            return f"look at {self._folder}/logs"
        return (
            f"start {ACTOR_PYTHON} servers/serve_engine.py --config-dir={self._folder} --config-name={ENGINE_CONFIG} "
            f"server.port=0 server.ready_file={self._folder}/NAME.json"
        )
