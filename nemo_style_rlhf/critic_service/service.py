"""A server without its network. It answers with its status and through the given endpoints."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch

from nemo_style_rlhf.critic_service import protocol
from nemo_style_rlhf.critic_service.compute_lock import ComputeLock
from nemo_style_rlhf.critic_service.identity import Identity
from nemo_style_rlhf.critic_service.protocol import Limits, Status
from nemo_style_rlhf.wire import messages
from nemo_style_rlhf.wire.messages import Array, Endpoint

Tensors = dict[str, Array]
Handler = Callable[[Mapping[str, Array]], Tensors]


class Service:
    """:meth:`handle` takes named arrays and returns named arrays; it may be called from many threads."""

    def __init__(
        self,
        identity: Identity,
        limits: Limits,
        roles: list[str],
        handlers: Mapping[Endpoint, Handler],
        compute_lock: ComputeLock,
        *,
        extended: Callable[[Status], Status] = lambda status: status,
        dismiss: Callable[[], None] = lambda: None,
    ) -> None:
        """Serve ``handlers`` and the status.

        Args:
            roles: as in :class:`protocol.Status`.
            handlers: handlers of all endpoints of these roles except ``critic_status``. That one needs no lock.
            extended: adds the critic's fields to the status.
            dismiss: lets other ranks end, too; nothing is computed after it.
        """
        self.compute_lock = compute_lock
        self.dismiss = dismiss
        self.roles = roles
        self._handlers = {endpoint.name: handler for endpoint, handler in handlers.items()}
        self._handlers[protocol.STATUS.name] = lambda _: {
            messages.RESPONSE.name: messages.bytes_tensor(self.status().to_json())
        }
        self._identity = identity
        self._limits = limits
        self._extended = extended

    def handle(self, endpoint: str, inputs: Mapping[str, Array]) -> Tensors:
        """Answer one request to an endpoint of :attr:`roles`.

        Raises:
            ProtocolError: the request was refused and changed nothing.
            Exception: anything else is a fault of this process. The process must end.
        """
        return self._handlers[endpoint](inputs)

    def status(self) -> Status:
        return self._extended(
            Status(
                protocol_version=protocol.PROTOCOL_VERSION,
                boot_id=self.compute_lock.boot_id,
                roles=self.roles,
                **asdict(self._identity),
                max_request_bytes=self._limits.max_request_bytes,
                max_staged_bytes=0,
                critic_step=0,
                last_committed=None,
                lease_holder=None,
                busy=self.compute_lock.busy,
                ranks=1,
                asleep=self.compute_lock.asleep,
                repeatable=torch.are_deterministic_algorithms_enabled(),
            )
        )


def response(answer: Mapping[str, Any]) -> Tensors:
    """The only output of most endpoints."""
    return {messages.RESPONSE.name: messages.json_tensor(answer)}
