"""How a request is divided among ranks."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_style_rlhf.critic_service.batches import Batches
from nemo_style_rlhf.critic_service.protocol import InferRequest


@given(st.lists(st.integers(1, 20), min_size=1, max_size=20), st.integers(1, 5), st.randoms())
def test_each_sequence_of_a_step_counts_on_one_rank_which_has_it(lengths, ranks, random):
    request = InferRequest(np.arange(sum(lengths), dtype=np.int32), np.array(lengths, dtype=np.int32))
    starts = {row: start for row, start in enumerate(request.offsets[:-1])}
    steps = [random.sample(range(len(lengths)), random.randint(1, len(lengths))) for _ in range(3)]
    batches = Batches(micro_batch_tokens=30, row_multiple=1, pad_token_id=0, device=torch.device("cpu"), ranks=ranks)
    shares = batches.shares(request.lengths, steps)
    assert len(shares) == ranks
    for number, rows in enumerate(steps):
        assert len({len(share.steps[number]) for share in shares}) == 1
        counted = [
            share.rows[place]
            for share in shares
            for places, counts in share.steps[number]
            for place in places
            if counts
        ]
        assert sorted(counted) == sorted(rows)
    for share in shares:
        own = share.of(request)
        firsts = [int(own.tokens[offset]) for offset in own.offsets[:-1]]
        assert firsts == [starts[row] for row in share.rows]
        assert np.array_equal(share.pick(request.tokens, request), own.tokens)
