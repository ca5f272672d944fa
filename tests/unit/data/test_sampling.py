"""The data order is a pure function of seed and position."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from nemo_style_rlhf.data.sampling import MixtureSampler, PromptSampler

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


mixtures = st.lists(st.tuples(st.integers(1, 20), st.floats(0.01, 100)), min_size=1, max_size=4)


@given(mixtures, seeds, positions, st.integers(0, 100), st.integers(0, 100), st.booleans())
def test_a_mixture_goes_on_anywhere_as_if_it_had_never_stopped(mixture, seed, position, first, second, shuffle):
    sizes, weights = zip(*mixture)
    whole = MixtureSampler(sizes, weights, seed, shuffle).take(position, first + second)
    resumed = MixtureSampler(sizes, weights, seed, shuffle).take(position + first, second)
    assert MixtureSampler(sizes, weights, seed, shuffle).take(position, first) + resumed == whole


@given(mixtures, seeds, st.integers(1, 30), st.booleans())
def test_a_mixture_holds_its_shares_to_a_few_rows_and_each_source_once_per_epoch_of_its_own(
    mixture, seed, blocks, shuffle
):
    sizes, weights = zip(*mixture)
    rows = MixtureSampler(sizes, weights, seed, shuffle).take(0, blocks * MixtureSampler.BLOCK)
    start = 0
    for size, weight in mixture:
        drawn = [row - start for row in rows if start <= row < start + size]
        assert abs(len(drawn) - weight / sum(weights) * len(rows)) <= len(mixture)
        for epoch in range(len(drawn) // size):
            assert sorted(drawn[epoch * size : (epoch + 1) * size]) == list(range(size))
        start += size


def test_a_mixtures_order_depends_on_the_seed_and_unshuffled_takes_turns():
    orders = [MixtureSampler([50, 50], [1, 1], seed).take(0, 64) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert MixtureSampler([2, 4], [1, 3], 0, shuffle=False).take(0, 8) == [2, 0, 3, 4, 5, 1, 2, 3]
    assert MixtureSampler([2, 4], [1, 3], 0).epoch(12) == 2
