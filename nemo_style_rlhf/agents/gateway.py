"""The trainer's end of the gateway: episodes of programs that talk to the policy through an OpenAI endpoint.

The endpoint is a separate process (gateway_process.py). If it dies, its episodes begin again in a new one.
"""

import contextlib
import json
import logging
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nemo_style_rlhf.agents import gateway_process
from nemo_style_rlhf.agents.api_requests import Offer
from nemo_style_rlhf.agents.environment import Action, Observation, Task
from nemo_style_rlhf.agents.events import Asked, Called, Emit, Ended, Event, Failed
from nemo_style_rlhf.agents.programs import as_json
from nemo_style_rlhf.agents.session_registry import GatewaySettings
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.processes.child import ChildProcess
from nemo_style_rlhf.schema.gateway import GatewayConfig
from nemo_style_rlhf.wire.listening import BACKLOG, take_port
from nemo_style_rlhf.wire.secret import LOOPBACK, own_token_made, read_token

LOGGER = logging.getLogger(__name__)
DEATHS = 5
"""Deaths of the gateway's process that its episodes survive. The count restarts when an episode ends."""
END_S = 10.0
LOOK_S = 1.0
SILENT_LOOKS = 60
"""Checks without a message from the gateway's process after which it counts as hung. Checks are counted rather than seconds, to
leave out time in which the trainer itself was stopped."""


@dataclass
class _RunningEpisode:
    task: Task
    attempt: int = 1
    left: int = 1
    """Attempts left, including the running one."""


class Gateway:
    """A source of episodes (:class:`~nemo_style_rlhf.agents.events.EpisodeSource`) that asks for answers with
    :class:`~nemo_style_rlhf.agents.events.Called`."""

    def __init__(
        self,
        config: GatewayConfig,
        emit: Emit,
        *,
        offer: Offer,
        attempts: int,
        episode_timeout_s: float,
        folder: Path | None = None,
    ) -> None:
        """Open the endpoint.

        Args:
            emit: receives events, in a thread of this object.
            offer: the run's sampling settings; requests for anything else are refused.
            attempts: maximum attempts at each episode.
            episode_timeout_s: maximum seconds of an attempt from its start, or from when a service fetched it. Time in which
                calls wait for the policy does not count.
            folder: working directory of programs; the current one by default.

        Raises:
            UserError: the address needs a token and has none, or the port is in use.
        """
        host, port = config.address
        token = read_token(config.token, key="agent.token.token_file")
        if host not in LOOPBACK and token is None:
            raise UserError(
                f"agent.listen={config.listen} would open the policy to the network without a token: set "
                f"agent.token.token_file or the environment variable {config.token.token_env}, or listen on 127.0.0.1"
            )
        self._listener = take_port(host, port, prefix="agent.listen: ")
        self._listener.listen(BACKLOG)
        self.host, self.port = self._listener.getsockname()[:2]
        near = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        self.url = f"http://{f'[{near}]' if ':' in near else near}:{self.port}/v1"
        """OPENAI_BASE_URL of programs on this host."""
        self._settings = GatewaySettings(
            listener=self._listener.fileno(),
            url=self.url,
            token=token or own_token_made(),
            command=tuple(config.command),
            folder=str(folder or Path.cwd()),
            programs=config.programs,
            calls_per_program=config.calls_per_program,
            max_request_bytes=config.max_request_bytes,
            episode_timeout_s=episode_timeout_s,
            offer=offer,
        )
        self._emit, self._attempts = emit, attempts
        self._lock = threading.RLock()
        """Guards the attributes below, and is held while an event is emitted."""
        self._running: dict[int, _RunningEpisode] = {}
        self._epoch = 0
        """Number of calls of :meth:`forget`; events of earlier epochs are dropped."""
        self._deaths = 0
        self._silent = 0
        """Checks since the last message from the gateway's process."""
        self._closing = threading.Event()
        self._orders: queue.SimpleQueue[tuple[socket.socket, bytes] | None] = queue.SimpleQueue()
        self._begin()
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._write, self._read, self._watch)]
        for thread in self._threads:
            thread.start()
        LOGGER.info("programs reach the policy at %s", self.url)

    def start(self, episode: int, task: Task) -> None:
        with self._lock:
            self._running[episode] = _RunningEpisode(task, left=self._attempts)
            if self._deaths > DEATHS:
                self._give_up()
            else:
                self._order_start(episode)

    def answer(self, asked: Asked | Called, action: Action) -> None:
        self._order("answer", asked, action=asdict(action), prompt_tokens=action.prompt_tokens)

    def finish(self, asked: Asked | Called, reason: str = "") -> None:
        """Answer the call with a client error that says ``reason``, such as a conversation that the chat template cannot render.
        Without a reason, all further calls get an error, too. The episode then ends when its program ends, with any exit code and
        with or without a reward."""
        self._order("refuse", asked, sentence=reason) if reason else self._order("finish", asked)

    def waits_for(self, episode: int) -> str:
        return " ".join(self._settings.command) or "a service"

    def forget(self) -> None:
        with self._lock:
            self._epoch += 1
            self._running.clear()
            self._send({"kind": "forget", "epoch": self._epoch})

    def close(self) -> None:
        with self._lock:
            self._closing.set()
            self._epoch += 1
            self._running.clear()
        with contextlib.suppress(OSError):  # it has ended already
            self._link.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._orders.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(END_S)
        self._link.close()
        self._listener.close()

    # --- orders -------------------------------------------------------------------------------------------------------

    def _order(self, kind: str, asked: Asked | Called, **content: Any) -> None:
        if not isinstance(asked, Called):
            raise ValueError("programs call; they do not ask")
        known = {"kind": kind, "episode": asked.episode, "attempt": asked.attempt, "call": asked.call}
        with self._lock:
            self._send(known | content)

    def _order_start(self, episode: int) -> None:
        running = self._running[episode]
        numbers = {"episode": episode, "attempt": running.attempt, "left": running.left}
        task = asdict(running.task) | {"row": dict(running.task.row)}
        self._send({"kind": "start", **numbers, "task": task})

    def _send(self, order: Mapping[str, Any]) -> None:
        """Queue an order for the current process. A later process does not get it."""
        self._orders.put((self._link, as_json(order).encode() + b"\n"))

    def _write(self) -> None:
        while (order := self._orders.get()) is not None:
            link, line = order
            try:
                link.sendall(line)
            except OSError:  # its process has ended
                continue

    # --- events -------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._silent = 0
        self._link, theirs = socket.socketpair()
        with theirs:
            self._process = ChildProcess(
                [sys.executable, "-m", gateway_process.__name__],
                stdin=theirs.fileno(),
                pass_fds=[self._listener.fileno()],
            )
        self._send(asdict(self._settings))

    def _read(self) -> None:
        while True:
            with self._link.makefile("rb") as lines:
                try:
                    for line in lines:
                        self._silent = 0
                        self._hear(json.loads(line))
                except OSError:
                    pass  # a reset of the link
            with self._lock:
                if self._closing.is_set():
                    return
                self._link.close()
                self._process.kill()
                if not self._begin_again():
                    return

    def _watch(self) -> None:
        """Kill the gateway's process if it hangs; :meth:`_read` then starts a new one."""
        while not self._closing.wait(LOOK_S):
            self._silent += 1
            if self._silent > SILENT_LOOKS and self._process.poll() is None:
                LOGGER.warning("the gateway's process has said nothing for %g s: it is killed", SILENT_LOOKS * LOOK_S)
                self._process.kill()

    def _begin_again(self) -> bool:
        """Begin all episodes again in a new process. Return False if too many have died."""
        self._deaths += 1
        if self._deaths > DEATHS:
            self._give_up()
            return False
        reason = f"the gateway's process ended with exit code {self._process.returncode}"
        LOGGER.warning("%s; another begins", reason)
        self._begin()
        self._send({"kind": "forget", "epoch": self._epoch})
        for episode, running in [*self._running.items()]:
            running.attempt += 1
            self._emit(Failed(episode, running.attempt - 1, reason, timed_out=False, last=False, charged=False))
            if episode in self._running:
                self._order_start(episode)
        return True

    def _give_up(self) -> None:
        reason = f"the gateway's process died {self._deaths} times, last with exit code {self._process.returncode}"
        failed = [
            Failed(episode, each.attempt, reason, timed_out=False, last=True) for episode, each in self._running.items()
        ]
        self._running.clear()
        for each in failed:
            self._emit(each)

    def _hear(self, content: Mapping[str, Any]) -> None:
        if content["kind"] == "alive":
            return
        with self._lock:
            running = self._running.get(content["episode"])
            if content["epoch"] != self._epoch or running is None or running.attempt != content["attempt"]:
                return
            event = _event(content)
            if isinstance(event, Failed) and not event.last:
                running.attempt += 1
                running.left -= 1
            elif isinstance(event, Ended | Failed):
                del self._running[event.episode]
                self._deaths = 0
            self._emit(event)


def _event(content: Mapping[str, Any]) -> Event:
    episode, attempt = content["episode"], content["attempt"]
    if content["kind"] == "called":
        return Called(episode, attempt, content["call"], content["prompt"], content["tools"], content["sampling"])
    if content["kind"] == "ended":
        return Ended(
            episode, attempt, Observation(**content["observation"], done=True), content["seconds"], content["answer"]
        )
    return Failed(episode, attempt, content["reason"], content["timed_out"], content["last"])
