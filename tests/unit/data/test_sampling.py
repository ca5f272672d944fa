"""The data order is a pure function of seed and position."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from nemo_style_rlhf.data.sampling import PromptSampler

sizes = st.integers(1, 50)
seeds = st.integers(0, 2**31)
positions = st.integers(0, 500)


@given(sizes, seeds, positions, st.integers(0, 60), st.integers(0, 60), st.booleans())
def test_two_takes_equal_one_and_a_fresh_sampler_continues_anywhere(size, seed, position, first, second, shuffle):
    whole = PromptSampler(size, seed, shuffle).take(position, first + second)
    sampler = PromptSampler(size, seed, shuffle)
    sampler.take(0, 7)  # what was read before does not matter
    assert sampler.take(position, first) + PromptSampler(size, seed, shuffle).take(position + first, second) == whole


@given(sizes, seeds, st.integers(0, 8), st.booleans())
def test_every_epoch_holds_every_row_once(size, seed, epoch, shuffle):
    assert sorted(PromptSampler(size, seed, shuffle).take(epoch * size, size)) == list(range(size))


def test_epochs_and_seeds_differ_and_unshuffled_is_the_files_order():
    sampler = PromptSampler(100, 0)
    assert sampler.take(0, 100) != sampler.take(100, 100)
    assert sampler.take(0, 100) != PromptSampler(100, 1).take(0, 100)
    assert PromptSampler(3, 0, shuffle=False).take(2, 4) == [2, 0, 1, 2]


def test_no_prompts_is_a_programming_error():
    with pytest.raises(ValueError, match="at least 1"):
        PromptSampler(0, 0)
