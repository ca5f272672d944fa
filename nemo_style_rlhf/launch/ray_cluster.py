"""A run's part of a Ray cluster: the bundles that Ray reserves for it, and a host in its slot for every process."""

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import ray
from ray.exceptions import ActorUnavailableError, AuthenticationError, GetTimeoutError, RayActorError
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.launch.interpreter import ROOT
from nemo_style_rlhf.launch.local import ProgramFailed
from nemo_style_rlhf.launch.ray_host import LEASE_S, Host, NodeInfo
from nemo_style_rlhf.launch.ray_placement import Placement, Slot, remedy
from nemo_style_rlhf.schema.ray import RayConfig

STRANGERS_CALL = "/ray.rpc.InternalKVGcsService/InternalKVKeys"
"""A call to a cluster's head that needs its token, if it has one."""
HEARTBEAT_S = 1.0
HEAD_TIMEOUT_S = 2.0
HEAD_FAILURES = 3
"""Failed connections to the cluster's head in a row after which it is lost."""
ANSWER_S = 10.0
"""Seconds to wait for a host's answer to a short question."""
SOON_S = 5.0
"""Seconds in which nodes that exist are reserved; after them, the user learns what the run waits for."""


def connect(config: RayConfig) -> None:
    """Connect this process to the cluster.

    Raises:
        UserError: there is none, it refuses this process, or it accepts unauthenticated clients.
    """
    address = os.environ.get("RAY_ADDRESS", "auto") if config.address == "auto" else config.address
    if address != "auto" and not answers(address):  # Ray itself would try for a minute
        raise UserError(
            f"no Ray cluster answers at ray.address={address}: give HOST:PORT of its head, as `ray start --head` prints it, or "
            "start one, see docs/ray.md"
        )
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    except AuthenticationError as error:
        raise UserError(
            f"the Ray cluster at ray.address={address} wants a token that this process does not have: set "
            "RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to the file with the token"
        ) from error
    except (ConnectionError, ValueError, RuntimeError) as error:
        first = str(error).strip().partition("\n")[0]
        raise UserError(
            f"ray.address={address} leads to no Ray cluster ({first}): start one, `ray start --head`, see docs/ray.md, or give "
            "the address of its head"
        ) from error
    if config.require_token:
        require_token(ray.get_runtime_context().gcs_address)


def answers(head: str) -> bool:
    """True if something listens at HOST:PORT."""
    host, _, port = head.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), HEAD_TIMEOUT_S).close()
    except (OSError, ValueError, OverflowError):
        return False
    return True


def require_token(head: str) -> None:
    """Raise UserError unless the cluster's head refuses a call without a token."""
    with _channel(head) as channel:
        try:
            channel.unary_unary(STRANGERS_CALL)(b"", timeout=ANSWER_S)
            said = "answers callers without a token"
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:  # type: ignore[attr-defined]
                return
            said = f"did not say whether it wants a token ({error.code().name})"  # type: ignore[attr-defined]
    raise UserError(
        f"the Ray cluster at {head} {said}: whoever reaches it could run any code as you; start every node of it with "
        "RAY_AUTH_MODE=token, see docs/ray.md, or give ray.require_token=false where its network keeps others out"
    )


def _channel(head: str) -> grpc.Channel:
    """A connection as Ray makes it, but without its token."""
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return grpc.insecure_channel(head)
    files = (os.environ[f"RAY_TLS_{name}"] for name in ("CA_CERT", "SERVER_KEY", "SERVER_CERT"))
    return grpc.secure_channel(head, grpc.ssl_channel_credentials(*(Path(file).read_bytes() for file in files)))


@dataclass
class PlacedRank:
    """A host in its slot."""

    slot: Slot
    handle: Any
    """Ray's handle of the actor."""
    info: NodeInfo

    def ask(self, method: str, *arguments: Any, timeout_s: float = ANSWER_S) -> Any:
        """Call a method of the host.

        Raises:
            RayActorError: the host is lost.
            ray.exceptions.GetTimeoutError: it does not answer.
        """
        return ray.get(getattr(self.handle, method).remote(*arguments), timeout=timeout_s)


class Cluster:
    """The hosts of a run. A thread tells them that this process lives, and checks that the cluster's head does."""

    def __init__(
        self,
        placement: Placement,
        config: RayConfig,
        *,
        pythons: Collection[Path],
        folder: Path,
        mark: tuple[Path, str],
        say: Callable[[str], None],
    ) -> None:
        """Reserve the bundles.

        Args:
            pythons: interpreters that every node must have.
            folder: where the programs run.
            mark: see :meth:`Host.look`.

        Raises:
            UserError: no nodes could hold them in time.
        """
        self._placement, self._config, self._mark = placement, config, mark
        self._needed = (ROOT / "trainers", *pythons, folder)
        self.say, self.given_up = say, threading.Event()
        """``given_up`` ends every wait."""
        self._placed: dict[str, PlacedRank] = {}
        self._starts = 0
        self.head = str(ray.get_runtime_context().gcs_address)
        self.head_lost = threading.Event()
        self._group = placement_group(list(placement.bundles), strategy=placement.strategy)
        self._reserve()
        threading.Thread(target=self._beat, name="ray-heartbeat", daemon=True).start()

    def slots(self, program: str) -> list[PlacedRank]:
        """The hosts of a program, by rank; new ones in slots whose host does not answer.

        Raises:
            UserError: no node could hold one in time, or one lacks what the run needs.
        """
        for slot in self._placement.of(program):
            if (there := self._placed.get(slot.name)) is not None:
                try:
                    there.ask("renew")
                except (RayActorError, GetTimeoutError):
                    self.forget(there)
            if slot.name not in self._placed:
                self._placed[slot.name] = self._place(slot)
        return [self._placed[slot.name] for slot in self._placement.of(program)]

    def gpus(self, slot: Slot) -> list[str]:
        """The GPUs that the process at ``slot`` sees."""
        sharers = [
            each for program in {each.program for each in self._placement.sharers(slot)} for each in self.slots(program)
        ]
        there = {each.slot: each.info.gpus for each in sharers}
        return [gpu for each in self._placement.sharers(slot) for gpu in there[each]]

    def forget(self, placed: PlacedRank) -> None:
        """Make :meth:`slots` put another host into this one's slot."""
        if self._placed.get(placed.slot.name) is placed:
            del self._placed[placed.slot.name]
            with contextlib.suppress(Exception):  # it may only be out of reach
                ray.kill(placed.handle)

    def require_head(self) -> None:
        """Raise ProgramFailed if the cluster's head is lost."""
        if self.head_lost.is_set():
            raise ProgramFailed(
                f"the head of the Ray cluster, {self.head}, is lost, and the run with it: the same command goes on"
            )

    def _place(self, slot: Slot) -> PlacedRank:
        deadline = time.monotonic() + self._config.wait_s
        bundle = self._placement.bundles[slot.bundle]
        while True:
            self._starts += 1
            strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=slot.bundle)
            handle: Any = (
                ray.remote(num_cpus=self._config.cpus, num_gpus=slot.gpus, max_restarts=0)(Host)
                .options(name=f"{slot.name} (start {self._starts})", scheduling_strategy=strategy)
                .remote(slot.name)
            )
            looked = handle.look.remote(self._needed, self._mark)
            with contextlib.suppress(RayActorError):  # the node that was to hold it is lost, too
                if self._answered(looked, deadline, f"{slot.name}, which needs {_amounts(bundle)} on one node,"):
                    info: NodeInfo = ray.get(looked)
                    if info.fault:
                        raise UserError(f"node {info.address} of the Ray cluster cannot run {slot.name}: {info.fault}")
                    return PlacedRank(slot, handle, info)

    def _answered(self, answer: Any, deadline: float, who: str) -> bool:
        said = time.monotonic() + SOON_S
        while not ray.wait([answer], timeout=HEARTBEAT_S)[0]:
            self._go_on(deadline, f"no node could hold {who}")
            if said is not None and time.monotonic() > said:
                self.say(
                    f"waiting up to {self._config.wait_s:g} s for a node that can hold {who} the cluster {self._has()}"
                )
                said = float("inf")
        return True

    def _reserve(self) -> None:
        needs = "; ".join(_amounts(bundle) for bundle in self._placement.bundles)
        deadline = time.monotonic() + self._config.wait_s
        if self._group.wait(min(SOON_S, self._config.wait_s)):
            return
        self.say(
            f"waiting up to {self._config.wait_s:g} s for nodes that can hold the run, {needs}; the cluster {self._has()}: "
            f"{remedy(self._placement.bundles, _nodes())}"
        )
        while not self._group.wait(HEARTBEAT_S):
            self._go_on(deadline, f"no nodes could hold the run, which needs {needs},")

    def _go_on(self, deadline: float, what: str) -> None:
        """Raise UserError if the time is over, ProgramFailed if the head is lost, KeyboardInterrupt if the user ended the run."""
        self.require_head()
        if self.given_up.is_set():
            raise KeyboardInterrupt
        if time.monotonic() > deadline:
            raise UserError(
                f"{what} within ray.wait_s={self._config.wait_s:g} s; the cluster {self._has()}: "
                f"{remedy(self._placement.bundles, _nodes())}"
            )

    def _has(self) -> str:
        nodes = _nodes()
        amounts = "; ".join(map(_amounts, nodes))
        return f"has {len(nodes)} node{'s' * (len(nodes) != 1)} ({amounts}), of which others may use a part"

    def _beat(self) -> None:
        failures = 0
        while True:
            time.sleep(HEARTBEAT_S)
            for placed in list(self._placed.values()):
                with contextlib.suppress(Exception):  # a later question finds that its process is lost
                    placed.handle.renew.remote()
            failures = 0 if answers(self.head) else failures + 1
            if failures >= HEAD_FAILURES:
                self.head_lost.set()


def lost(error: RayActorError, since: float) -> bool:
    """True if a host that did not answer is lost. One that is only out of reach has ended its process when its lease is over."""
    return not isinstance(error, ActorUnavailableError) or time.monotonic() - since > LEASE_S


def gpus_there() -> bool:
    return ray.cluster_resources().get("GPU", 0) > 0


def leave() -> None:
    """Disconnect, in a moment even if the head is lost."""
    ending = threading.Thread(target=ray.shutdown, daemon=True)
    ending.start()
    ending.join(ANSWER_S)


def _nodes() -> list[dict[str, float]]:
    """CPUs and GPUs of each living node, as its `ray start` counted them."""
    alive = (node["Resources"] for node in ray.nodes() if node["Alive"])
    return [{name: there.get(name, 0.0) for name in ("CPU", "GPU")} for there in alive]


def _amounts(bundle: dict[str, float]) -> str:
    return " and ".join(
        f"{amount:g} {name}{'s' * (amount != 1)}" for name, amount in bundle.items() if amount or name == "CPU"
    )
