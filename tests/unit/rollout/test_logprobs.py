"""Which tokens are actions, and how sequences become micro-batches."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_style_rlhf.distributed.ranks import Ranks
from nemo_style_rlhf.rollout.logprobs import action_mask, micro_batch_iterator
from nemo_style_rlhf.schema.common import EngineConfig
from tests.support.rollouts import CPU, rollout


def test_the_action_mask_is_one_where_the_next_token_is_the_policys():
    assert action_mask([rollout(2, 2), rollout(1, 1)]).tolist() == [0, 1, 1, 0, 1, 0]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=20), st.integers(10, 100))
def test_micro_batches_select_every_action_once_and_in_its_place(shapes, budget):
    samples = [rollout(prompt, response) for prompt, response in shapes]
    lengths = [len(sample.tokens) for sample in samples]
    tokens, mask = torch.cat([sample.tokens for sample in samples]), action_mask(samples)
    config = EngineConfig(micro_batch_tokens=budget, row_multiple=4)
    seen = []
    for batch, _ in micro_batch_iterator(tokens, lengths, mask, config, CPU, Ranks(alone=True)):
        rows, time = batch.input_ids.shape
        longest = max(int(row.nonzero().max()) + 2 for row in batch.action_mask if row.any())
        assert rows * longest <= budget or rows == 1
        assert rows % 4 == 0 or (rows + 1) * longest > budget
        assert time % 8 == 0
        assert torch.equal(batch.input_ids[batch.action_mask.bool()], tokens[batch.positions])
        seen += batch.positions.tolist()
    assert sorted(seen) == mask.nonzero().squeeze(1).tolist()
