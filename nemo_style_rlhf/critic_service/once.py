"""Endpoints for which a copy of a request changes nothing, however late it comes."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from nemo_style_rlhf.critic_service import protocol
from nemo_style_rlhf.critic_service.service import Handler, Tensors, response
from nemo_style_rlhf.wire import messages
from nemo_style_rlhf.wire.messages import Array, Code, ProtocolError
from nemo_style_rlhf.wire.reading import read

Changing = TypeVar(
    "Changing", protocol.AcquireRequest, protocol.CommitRequest, protocol.RestoreRequest, protocol.TurnRequest
)
REMEMBERED = 100
"""Answers that each of these endpoints can give again."""


def once(message: type[Changing], change: Callable[[Changing], dict[str, Any]]) -> Handler:
    """Calls ``change`` for a request that it has not answered yet. Each endpoint answers one request at a time."""
    answered: dict[str, tuple[Changing, dict[str, Any]]] = {}

    def endpoint(inputs: Mapping[str, Array]) -> Tensors:
        request = read(inputs[messages.REQUEST.name], message)
        if request.request_id is None:
            return response(change(request))
        if request.request_id not in answered:
            answered[request.request_id] = request, change(request)
            if len(answered) > REMEMBERED:
                del answered[next(iter(answered))]
        first, answer = answered[request.request_id]
        if first != request:
            raise ProtocolError(Code.CONFLICT, f"request_id {request.request_id} was used before, with other content")
        return response(answer)

    return endpoint
