"""A small train request."""

import numpy as np

from nemo_style_rlhf.critic_service import protocol
from nemo_style_rlhf.critic_service.protocol import Limits
from nemo_style_rlhf.wire import messages

LIMITS = Limits(vocab_size=10, max_length=8, max_request_bytes=4096)


def train_inputs(lease: str = "L", step: int = 1, part: int = 1, parts: int = 1, **changes: np.ndarray) -> dict:
    arrays = (
        np.array([1, 2, 3, 4, 5], np.int32),
        np.array([2, 3], np.int32),
        np.zeros(5, np.float32),
        np.zeros(5, np.float32),
        np.array([1, 0, 0, 1, 0], np.float32),
    )
    plan = protocol.part_plan(
        lease=lease, step=step, part=part, parts=[arrays] * parts, mini_batches=[[0, 1]], normalizers=[2]
    )
    tensors = (*arrays, messages.json_tensor(plan))
    return {spec.name: tensor for spec, tensor in zip(protocol.TRAIN.inputs, tensors, strict=True)} | changes
