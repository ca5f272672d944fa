"""Settings that other projects have as flags, and the values that they refuse."""

import pytest
from omegaconf import OmegaConf

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.actor import CheckpointConfig
from nemo_style_rlhf.schema.algorithm import AlgorithmConfig
from nemo_style_rlhf.schema.base import build
from nemo_style_rlhf.schema.supervised import SupervisedCheckpointConfig


@pytest.mark.parametrize(("interval", "due"), [(-1, []), (1, [0, 1, 2, 3, 4, 5]), (2, [0, 2, 4]), (50, [0])])
def test_an_interval_of_minus_1_asks_for_no_checkpoint_before_the_end(interval: int, due: list[int]) -> None:
    config = build(CheckpointConfig, OmegaConf.create({"save_interval": interval}))
    assert [step for step in range(6) if config.is_due(step)] == due


@pytest.mark.parametrize(
    ("schema", "refused"), [(CheckpointConfig, (0, -2)), (SupervisedCheckpointConfig, (-2,))], ids=["PPO", "supervised"]
)
def test_other_intervals_are_refused(schema: type, refused: tuple[int, ...]) -> None:
    for interval in refused:
        with pytest.raises(UserError, match=rf"save_interval={interval} is not possible: .*-1 for the last step alone"):
            build(schema, OmegaConf.create({"save_interval": interval}))
    assert build(schema, OmegaConf.create({"save_interval": -1})).save_interval == -1


def test_a_division_that_is_turned_off_twice_is_refused_with_what_was_meant() -> None:
    settings = {"advantage_std_norm": False, "normalize_advantages": False}
    with pytest.raises(
        UserError, match=r"advantage_std_norm=false only changes whitening.*advantage_estimator=dr_grpo"
    ):
        build(AlgorithmConfig, OmegaConf.create(settings))
    assert build(AlgorithmConfig, OmegaConf.create({"advantage_std_norm": False})).normalize_advantages
