"""The form of what goes over the wire to the critic."""

from nemo_style_rlhf.critic_service import protocol
from tests.unit.critic_service.batches import train_inputs


def test_three_endpoints_take_tensors_and_a_plan_is_not_counted() -> None:
    sizes = {each.name: protocol.largest_tensors(each, 4096) for each in protocol.ENDPOINTS}
    tensors = {"critic_infer": 4096, "reward_infer": 4096, "critic_train": 4096 + 17 * 2**20}
    assert {name: size for name, size in sizes.items() if size} == tensors


def test_the_digest_of_a_step_does_not_depend_on_its_parts() -> None:
    whole = tuple(train_inputs()[spec.name] for spec in protocol.TRAIN.inputs[:5])
    first = tuple(array[:size] for array, size in zip(whole, (2, 1, 2, 2, 2), strict=True))
    second = tuple(array[size:] for array, size in zip(whole, (2, 1, 2, 2, 2), strict=True))
    digest = protocol.train_digest([whole], [[0, 1]], [2])
    assert protocol.train_digest([first, second], [[0, 1]], [2]) == digest
    assert protocol.train_digest([second, first], [[0, 1]], [2]) != digest
    assert protocol.train_digest([whole], [[1, 0]], [2]) != digest
