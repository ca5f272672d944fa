"""What a rollout says of its tokens."""

from nemo_style_rlhf.rollout.types import Turn
from tests.support.rollouts import rollout


def test_a_rollout_marks_what_the_policy_produced():
    sample = rollout(2, 3)
    assert sample.tokens.tolist() == [0, 1, 100, 101, 102]
    assert sample.response_mask.tolist() == [False, False, True, True, True]
    assert sample.sampler_logprobs.tolist() == [0, 0, -1, -2, -3]
    assert sample.weights_version.tolist() == [-1, -1, 3, 3, 3]
    assert sample.response_tokens.tolist() == [100, 101, 102]
    assert sample.turns == (Turn(2, 5, "stop"),) and sample.response_length == 3
