"""A request is read whole, or refused with the tensor and the rule."""

import numpy as np
import pytest

from nemo_style_rlhf.critic_service import validation
from nemo_style_rlhf.wire import messages
from nemo_style_rlhf.wire.messages import Code, ProtocolError
from tests.unit.critic_service.batches import LIMITS, train_inputs

PLAN = {"lease": "L", "step": 1, "part": 1, "parts": 1, "mini_batches": [[0, 1]], "digest": "d"}


def test_a_train_part_is_read_whole() -> None:
    part = validation.read_train(train_inputs(), LIMITS)
    assert (part.lease, part.step, part.part, part.parts) == ("L", 1, 1, 1)
    assert part.plan is not None
    assert part.plan.mini_batches == [[0, 1]]


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"tokens": np.array([1, 2, 3, 4, 10], np.int32)}, r"tokens\[4\] is 10, outside the vocabulary 0\.\.9"),
        ({"sequence_lengths": np.array([2, 2], np.int32)}, "sequence_lengths add up to 4 but tokens has 5"),
        ({"returns": np.zeros(4, np.float32)}, "returns has 4 entries but tokens has 5"),
        ({"old_values": np.array([0, 0, np.inf, 0, 0], np.float32)}, r"old_values\[2\] is NaN or infinite"),
        ({"mask": np.array([1, 1, 0, 1, 0], np.float32)}, "mask is 1 at the last token of sequence 0"),
        ({"mask": np.array([1, 0, 0, 2, 0], np.float32)}, r"mask\[3\] is neither 0 nor 1"),
        ({"plan": messages.json_tensor({"lease": "L"})}, "plan.step is missing"),
        ({"plan": messages.bytes_tensor(b'{"lease": NaN}')}, "plan.lease is NaN, expected a string"),
        (
            {"plan": messages.json_tensor({**PLAN, "normalizers": [10**400]})},
            "plan.normalizers is .*expected a list of numbers",
        ),
        ({"tokens": np.zeros(2000, np.int32)}, "expected at most 4096"),
    ],
)
def test_a_bad_part_is_refused_with_the_tensor_and_the_rule(changes: dict, sentence: str) -> None:
    with pytest.raises(ProtocolError, match=sentence) as refusal:
        validation.read_train(train_inputs(**changes), LIMITS)
    assert refusal.value.code is Code.INVALID


def test_a_request_may_be_as_long_as_the_limit_says() -> None:
    """JSON beside the tensors does not count: the client that splits a batch does not count it."""

    def ragged(lengths: list[int]) -> tuple[np.ndarray, np.ndarray]:
        return np.ones(sum(lengths), np.int32), np.array(lengths, np.int32)

    tokens, lengths = ragged([8] * 113 + [6])  # 4 bytes for each of 910 tokens and 114 lengths
    wanted = messages.json_tensor({"want": "values"})
    inputs = {"tokens": tokens, "sequence_lengths": lengths, "request": wanted}
    assert len(validation.read_infer(inputs, LIMITS)[0].lengths) == 114
    tokens, lengths = ragged([8] * 30 + [4, 4])  # 16 bytes for each of 248 tokens, 4 for each of 32 lengths
    numbers = np.zeros(248, np.float32)
    part = train_inputs(tokens=tokens, sequence_lengths=lengths, returns=numbers, old_values=numbers, mask=numbers)
    assert validation.read_train(part, LIMITS).nbytes == LIMITS.max_request_bytes
