"""A run on a Ray cluster: the commands of the other launchers, each started by a host in its slot, and started again there or
elsewhere when it or its node dies.

Ray places and watches; the processes speak to each other as under every launcher, and no tensor goes through Ray.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.launch.follow_up import after_ppo
from nemo_style_rlhf.launch.local import POLL_S, STOP_GRACE_S, Child
from nemo_style_rlhf.launch.overrides import override
from nemo_style_rlhf.launch.ppo_run import (
    ACTOR,
    AGAIN,
    CRITIC,
    PPORun,
    configurations,
    configured,
    pythons_of,
    require_environments,
)
from nemo_style_rlhf.launch.program import CHECKED, ENGINE_CONFIG, Program, engine_program
from nemo_style_rlhf.launch.ray_cluster import Cluster, PlacedRank, connect, gpus_there, leave, lost
from nemo_style_rlhf.launch.ray_host import RANKS_BESIDE
from nemo_style_rlhf.launch.ray_placement import engine_names, place
from nemo_style_rlhf.launch.run_certificates import RunSecrets
from nemo_style_rlhf.launch.starting import PART
from nemo_style_rlhf.schema.ray import PPORayConfig

ASK_S = 0.3
"""Seconds between two checks that a host's process runs."""
LAST_WORDS_S = 3.0
"""Seconds for the other ranks to report their errors, once a rank has ended with one."""


def run_on_ray(config: PPORayConfig) -> int:
    """Run critic server, engines and actor to the end; returns the actor's exit code.

    Raises:
        UserError: a process refused its configuration or its inputs, or the cluster cannot run it.
        ProgramFailed: processes died too often, or the cluster's head is lost.
    """
    folder = Path(config.run.output_dir).resolve()
    require_environments(config)
    connect(config.ray)
    secrets = RunSecrets(folder / "secrets")
    try:
        on_gpus = config.run.device != "cpu" and gpus_there()
        if config.run.device == "cuda" and not on_gpus:
            raise UserError(
                "run.device=cuda but the Ray cluster has no GPU: give run.device=cpu, or start its nodes with GPUs"
            )
        mark = (secrets.token.with_name("mark"), secrets.mark)
        placement = place(config, on_gpus=on_gpus)
        cluster = Cluster(placement, config.ray, pythons=pythons_of(config), folder=Path.cwd(), mark=mark, say=_say)
        programs = make_programs(config, folder, secrets)
        run = RayRun(programs, folder, cluster, secrets, restarts=config.restarts, then=after_ppo(config))
        try:
            return run.to_its_end()
        finally:
            run.close()
    finally:
        secrets.remove()
        leave()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def make_programs(config: PPORayConfig, folder: Path, secrets: RunSecrets) -> list[Program]:
    """The critic server, if the run needs one, the engines and the actor, without the addresses that each start gives them."""
    values = configurations(config, folder)
    connection, server = values[ACTOR]["remote_critic_rm"], values[CRITIC]["server"]
    connection["token"]["token_file"] = server["token"]["token_file"] = str(secrets.token)
    connection["tls"]["ca"] = str(secrets.ca)
    engines = values[ACTOR]["generation"]["engines"]
    if config.launched_engines:
        engines["launch"] = False
        engines["tls"]["ca"], engines["token"]["token_file"] = str(secrets.ca), str(secrets.token)

    def program(name: str, ranks: int) -> Program:
        return Program(name, configured(name, folder, values[name]), {PART: name, CHECKED: "yes"}, ranks, Path.cwd())

    where = folder / ACTOR / "engines"
    (where / f"{ENGINE_CONFIG}.yaml").unlink(missing_ok=True)  # of an earlier start
    made = [program(CRITIC, config.critic_ranks)] if config.uses_critic_process else []
    for name in engine_names(config.launched_engines):
        made.append(engine_program(name, where, {PART: name}))
    return [*made, program(ACTOR, config.ranks)]


class Rank:
    """One process, run by a host."""

    def __init__(self, placed: PlacedRank, program: Program, log: Path, awaited: Path | None) -> None:
        self.placed, self.lost = placed, False
        self._program, self._log, self._awaited = program, log, awaited
        self._code: int | None = None
        self._answer: Any = None
        self._next, self._heard = 0.0, time.monotonic()

    def poll(self) -> int | None:
        """The exit code (SIGKILL's if the process is lost with its host), or None."""
        if self._answer is None:
            if self._awaited is not None and not self._awaited.exists():
                return self._code
            self._answer = self.placed.handle.start.remote(self._program, self._log)
        if self._code is None and time.monotonic() > self._next and ray.wait([self._answer], timeout=0)[0]:
            try:
                self._code = ray.get(self._answer)
                self._heard = time.monotonic()
            except RayActorError as error:
                if lost(error, self._heard):
                    self.lose()
            self._next = time.monotonic() + ASK_S
            if self._code is None:
                self._answer = self.placed.handle.poll.remote()
        return self._code

    def lose(self) -> None:
        self.lost, self._code = True, -signal.SIGKILL

    def signal(self, number: int) -> None:
        if not self.lost and self._answer is not None:
            self.placed.handle.signal.remote(number)

    def clear(self, leftovers: Path | None) -> Any:
        """The pending answer of the host that kills what is left; None if nothing was started, or it is lost."""
        if self.lost or self._answer is None:
            self._code = -signal.SIGKILL if self._code is None else self._code
            return None
        return self.placed.handle.clear.remote(leftovers)

    def cleared(self, answer: Any) -> int:
        try:
            self._code = int(ray.get(answer, timeout=STOP_GRACE_S))
        except (RayActorError, GetTimeoutError):
            self.lose()
        assert self._code is not None
        return self._code


class RayChild(Child):
    """A program of one or several ranks, each in its slot. Rank 0 writes ``log``, the others logs of their own next to it."""

    def __init__(
        self, program: Program, log: Path, ranks: list[Rank], logs: list[Path], forget: Callable[[PlacedRank], None]
    ) -> None:
        """``forget`` is called for the hosts of ranks that are found to be lost."""
        self.ranks, self._logs, self._forget = ranks, logs, forget
        self._failed_at: float | None = None
        self.leftovers: Path | None = None
        """The actor's folder, once the run is over."""
        for each in logs:
            each.parent.mkdir(parents=True, exist_ok=True)
            each.touch()
        self._begins = [each.stat().st_size for each in logs]
        super().__init__(program, log)

    def _start(self) -> None:
        self.poll()

    def poll(self) -> int | None:
        """0 once every rank has ended; after an error, a failed rank's code once all ranks have ended or had time to report."""
        codes = [rank.poll() for rank in self.ranks]
        if None not in codes:
            return next((code for code in codes if code), 0)
        if any(codes):
            self._failed_at = self._failed_at or time.monotonic()
            if time.monotonic() - self._failed_at > LAST_WORDS_S:
                return next(code for code in codes if code)
        return None

    def wait(self, timeout_s: float) -> int:
        deadline = time.monotonic() + timeout_s
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(list(self.program.argv), timeout_s)
            time.sleep(POLL_S)
        return code

    def signal(self, number: int) -> None:
        for rank in self.ranks:
            rank.signal(number)

    def interrupt(self) -> None:
        self.signal(signal.SIGINT)

    def kill(self) -> int:
        answers = [rank.clear(self.leftovers) for rank in self.ranks]
        codes = [rank.poll() if answer is None else rank.cleared(answer) for rank, answer in zip(self.ranks, answers)]
        for rank in self.ranks:
            if rank.lost:
                self._forget(rank.placed)
        return next((code for code in codes if code), 0)

    def said(self, text: str) -> str | None:
        texts = [log.read_bytes()[begin:] for log, begin in zip(self._logs, self._begins)]
        lines = [line for each in texts for line in each.decode(errors="replace").splitlines()]
        return next((line for line in reversed(lines) if text in line), None)

    @property
    def lost_nodes(self) -> set[str]:
        return {rank.placed.info.node for rank in self.ranks if rank.lost}

    @property
    def end(self) -> str:
        if lost := sorted({rank.placed.info.address for rank in self.ranks if rank.lost}):
            return f"was lost on node {', '.join(lost)}"
        return super().end


class RayRun(PPORun):
    """The programs of a run in their slots; the last one is the actor."""

    def __init__(
        self, programs: list[Program], folder: Path, cluster: Cluster, secrets: RunSecrets, *, restarts: int, then: str
    ) -> None:
        self._cluster, self._secrets = cluster, secrets
        self._critic: tuple[str, str, int] | None = None
        """Node, host and port of the critic server."""
        self._gone_with: set[Child] = set()
        """The children that lost ranks when a node was lost. Together they count as one death."""
        for program in programs:
            cluster.slots(program.name)
        super().__init__(programs, folder, restarts=restarts, then=then)
        cluster.say = self._screen.say

    def _start(self, program: Program, log: Path) -> Child:
        while True:
            with suppress(RayActorError, GetTimeoutError):  # a host was lost just now
                return self._start_in_seats(program, log)

    def _start_in_seats(self, program: Program, log: Path) -> Child:
        slots = self._cluster.slots(program.name)
        words = self._words(program.name, slots)
        shared: dict[str, str] = {}
        if len(slots) > 1:
            host = slots[0].info.address
            shared = {
                "WORLD_SIZE": str(len(slots)),
                "MASTER_ADDR": host,
                "MASTER_PORT": str(slots[0].ask("free_port")),
            }
        ranks, logs = [], []
        for placed in slots:
            slot = placed.slot
            mine = {**program.env, **shared}
            if len(slots) > 1:
                mine |= {
                    "RANK": str(slot.rank),
                    "LOCAL_RANK": str(slot.local_rank),
                    "LOCAL_WORLD_SIZE": str(slot.local_ranks),
                }
                mine |= {RANKS_BESIDE: str(slot.local_ranks)}
            if visible := self._cluster.gpus(slot):
                mine["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
            logs.append(log if slot.rank == 0 else log.with_name(f"{slot.name}.log"))
            awaited = self._engine_config if program.name.startswith("engine") else None
            one = replace(program, argv=[*program.argv, *words], env=mine, ranks=1)
            ranks.append(Rank(placed, one, logs[-1], awaited))
        return RayChild(program, log, ranks, logs, self._cluster.forget)

    @property
    def _engine_config(self) -> Path:
        return self._folder / ACTOR / "engines" / f"{ENGINE_CONFIG}.yaml"

    def _words(self, name: str, slots: list[PlacedRank]) -> list[str]:
        """The arguments that tell a program its own address, or the critic server's."""
        info = slots[0].info
        if name == ACTOR:
            if self._critic is None:
                return []
            return [f"remote_critic_rm.host={self._critic[1]}", f"remote_critic_rm.port={self._critic[2]}"]
        certificate, key = self._secrets.certificate(name, info.address)
        tls = [override("server.tls.certificate", certificate), override("server.tls.key", key)]
        if name != CRITIC:
            return [f"server.host={info.address}", override("server.token.token_file", self._secrets.token), *tls]
        if self._critic is None or self._critic[0] != info.node:
            self._critic = (info.node, info.address, slots[0].ask("free_port"))
        return [f"server.host={self._critic[1]}", f"server.port={self._critic[2]}", *tls]

    def _restart(self, dead: Child) -> None:
        before = self._critic
        super()._restart(dead)
        actor = self._actor
        if self._critic != before and actor.poll() is None:  # one that is dead learns the address when its turn comes
            self._screen.say("actor is started again: the critic server has moved to another node")
            words = [*actor.program.argv, *([] if AGAIN in actor.program.argv else [AGAIN])]
            self._supervisor.restart(ACTOR, replace(actor.program, argv=words))

    def _counts(self, dead: Child) -> bool:
        assert isinstance(dead, RayChild)
        if not dead.lost_nodes:
            return True
        if dead in self._gone_with:
            return False
        self._gone_with = {
            child for child in self._children if isinstance(child, RayChild)
            and dead.lost_nodes & {rank.placed.info.node for rank in child.ranks}
        }  # fmt: skip
        return True

    def _watch(self) -> None:
        self._cluster.require_head()

    def _interrupted(self, *_: object) -> None:
        super()._interrupted()
        self._cluster.given_up.set()

    def close(self) -> None:
        for child in self._children[:-1]:
            if child.program.name != CRITIC:
                child.signal(signal.SIGTERM)
        for child in self._children:
            assert isinstance(child, RayChild)
            child.leftovers = self._folder / ACTOR
        super().close()
