"""Which checkpoints are compared on which prompts with which seeds."""

import pytest

from nemo_style_rlhf.data.prompts import Prompt
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.evaluation.sampling import requests_for
from nemo_style_rlhf.schema.evaluation import Checkpoint, EvaluationConfig
from nemo_style_rlhf.schema.generation import SamplingOverrides


@pytest.mark.parametrize(
    ("given", "name", "path"),
    [
        ("outputs/ppo/export", "ppo", "outputs/ppo/export"),
        ("outputs/ppo/best/", "best", "outputs/ppo/best/"),
        ("Qwen/Qwen2.5-0.5B", "Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B"),
        ("tuned:../models/a:b", "tuned", "../models/a:b"),
        ("/export", "/export", "/export"),
    ],
)
def test_a_checkpoint_is_named_by_its_user_or_its_folder(given: str, name: str, path: str):
    assert Checkpoint.parse(given) == Checkpoint(name, path)


@pytest.mark.parametrize("given", ["", ":path", "name:"])
def test_half_a_checkpoint_is_refused(given: str):
    with pytest.raises(UserError, match="expected path or name:path"):
        Checkpoint.parse(given)


def test_two_checkpoints_with_one_name_are_refused():
    with pytest.raises(UserError, match=r"2 checkpoints have the name ppo: .*first:\.\.\.,second"):
        EvaluationConfig(checkpoints=["a/ppo/export", "b/ppo"]).validate()


def test_a_seed_is_a_function_of_run_seed_prompt_and_sample_number_alone():
    config = EvaluationConfig(checkpoints=["a"], samples_per_prompt=2)
    prompts = [Prompt(3, [1], "x"), Prompt(8, [2, 2], "y", sampling=SamplingOverrides(max_length=5))]
    requests = requests_for(prompts, config)
    seeds = {(request.sample.prompt_id, request.sample.index): request.seed for request in requests}
    assert len(set(seeds.values())) == len(seeds) == 4
    assert [request.max_tokens for request in requests] == [512, 512, 5, 5]
    others = [Prompt(0, [5], "z"), Prompt(8, [9, 9, 9], "tokenised otherwise")]
    for request in requests_for(others, config)[2:]:
        assert request.seed == seeds[request.sample.prompt_id, request.sample.index]
    config.run.seed += 1
    assert not set(seeds.values()) & {request.seed for request in requests_for(prompts, config)}
