"""Seeds of samples, and the probe that comes with new weights."""

import math

import pytest
import torch

from nemo_style_rlhf.generation.interface import ProbeTarget, SampleId, TransferError, sample_seed


def test_seeds_are_a_function_of_run_step_prompt_and_index_alone():
    seeds = {
        sample_seed(run, SampleId(step, prompt, index))
        for run in (1, 2)
        for step in range(5)
        for prompt in range(5)
        for index in range(5)
    }
    assert len(seeds) == 250
    assert all(0 <= seed < 2**31 for seed in seeds)
    # the first 4 bytes of sha256("7/1/2/3"), shifted right by one: printf 7/1/2/3 | sha256sum
    assert sample_seed(7, SampleId(1, 2, 3)) == 189544295


@pytest.mark.parametrize("wrong", [-1.5, math.nan, -math.inf])
def test_a_probe_that_differs_or_is_no_number_is_refused(wrong: float) -> None:
    probe = ProbeTarget(((1, 2, 3), (4, 5)), (torch.tensor([-1.0, -2.0]), torch.tensor([-0.5])), max_gap=0.25)
    close = [torch.tensor([-1.0, -2.125]), torch.tensor([-0.5])]
    assert probe.check(lambda sequences: close) == 0.125
    with pytest.raises(TransferError, match="does not hold the trainer's weights"):
        probe.check(lambda sequences: [close[0], torch.tensor([wrong])])
