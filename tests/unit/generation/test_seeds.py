"""Seeds of samples."""

from nemo_style_rlhf.generation.interface import SampleId
from nemo_style_rlhf.generation.seeds import sample_seed


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
