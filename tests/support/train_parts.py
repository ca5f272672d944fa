"""The requests of one train step, one by one."""

import numpy as np

from nemo_style_rlhf.critic_service import protocol
from nemo_style_rlhf.critic_service.client import parse_json
from nemo_style_rlhf.critic_service.remote_critic import RemoteCritic
from nemo_style_rlhf.wire import messages
from tests.support.critic_server import train_batch


def parts_of(critic: RemoteCritic, step: int, parts: int = 2) -> list[dict]:
    """The requests of one train step, as the client would send them."""
    batch = train_batch(3, count=8)
    rows = np.array_split(np.arange(8), parts)
    arrays = [
        (
            *messages.ragged([batch.sequences[row] for row in group]).values(),
            *(
                np.concatenate([field[row] for row in group])
                for field in (batch.returns, batch.old_values, batch.masks)
            ),
        )
        for group in rows
    ]
    normalizers = [sum(float(batch.masks[row].sum()) for row in rows) for rows in batch.mini_batches]
    requests = []
    for number in range(1, parts + 1):
        plan = protocol.part_plan(
            lease=critic._require_lease(),
            step=step,
            part=number,
            parts=arrays,
            mini_batches=batch.mini_batches,
            normalizers=normalizers,
        )
        tensors = (*arrays[number - 1], messages.json_tensor(plan))
        requests.append({spec.name: tensor for spec, tensor in zip(protocol.TRAIN.inputs, tensors, strict=True)})
    return requests


def send(critic: RemoteCritic, request: dict) -> dict:
    return parse_json(critic._connection.call(protocol.TRAIN, request, timeout_s=60))
