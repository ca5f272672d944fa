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


@given(lengths_lists, st.integers(0, 3))
def test_unpad_inverts_pad(lengths, more_rows):
    flat = torch.arange(sum(lengths))
    padded = pad(flat, lengths, value=-1, rows=len(lengths) + more_rows)
    assert padded.shape == (len(lengths) + more_rows, max(lengths))
    assert torch.equal(unpad(padded, lengths), flat)
    assert int((padded == -1).sum()) == padded.numel() - sum(lengths)
