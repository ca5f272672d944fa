import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_style_rlhf.data.ragged import micro_batches, pad, unpad

lengths_lists = st.lists(st.integers(1, 40), min_size=1, max_size=30)


@given(lengths_lists, st.integers(1, 200))
def test_micro_batches_hold_every_index_once_within_the_budget(lengths, budget):
    batches = micro_batches(lengths, token_budget=budget)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        padded = len(batch) * max(lengths[index] for index in batch)
        assert padded <= budget or len(batch) == 1


@given(lengths_lists, st.integers(1, 200), st.integers(1, 9), st.integers(1, 4))
def test_micro_batches_for_ranks_take_no_further_round_and_leave_none_idle_that_a_smaller_budget_would_occupy(
    lengths, budget, ranks, multiple
):
    batches = micro_batches(lengths, token_budget=budget, ranks=ranks, row_multiple=multiple)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    padded = [len(batch) * max(lengths[index] for index in batch) for batch in batches]
    assert all(size <= budget or len(batch) == 1 for size, batch in zip(padded, batches, strict=True))
    fewest = len(micro_batches(lengths, token_budget=budget))
    if multiple == 1:
        assert -(-len(batches) // ranks) == -(-fewest // ranks)
    spread = [micro_batches(lengths, token_budget=smaller, ranks=ranks) for smaller in range(1, budget + 1)]
    if multiple == 1:
        assert len(batches) == max(len(each) for each in spread if -(-len(each) // ranks) <= -(-fewest // ranks))


def test_equal_sequences_are_spread_evenly_and_padding_rows_are_not_spread():
    def sizes(samples: int, ranks: int, multiple: int = 1) -> list[int]:
        split = micro_batches([100] * samples, token_budget=1600, ranks=ranks, row_multiple=multiple)
        return [len(batch) for batch in split]

    assert sizes(16, 1) == [16]
    assert sizes(16, 4) == [4, 4, 4, 4]
    assert sizes(24, 4) == [6, 6, 6, 6]
    assert sizes(16, 32) == [1] * 16
    assert sizes(16, 4, multiple=8) == [8, 8]
    assert sizes(48, 4, multiple=8) == [16, 16, 16]
    assert sizes(80, 4, multiple=8) == [16, 16, 16, 16, 16]  # two rounds: with 8 rows each it would be three


@given(lengths_lists, st.integers(0, 3))
def test_unpad_inverts_pad(lengths, more_rows):
    flat = torch.arange(sum(lengths))
    padded = pad(flat, lengths, value=-1, rows=len(lengths) + more_rows)
    assert padded.shape == (len(lengths) + more_rows, max(lengths))
    assert torch.equal(unpad(padded, lengths), flat)
    assert int((padded == -1).sum()) == padded.numel() - sum(lengths)
