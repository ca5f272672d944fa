"""Numbers of rollouts and validation, and the samples that a warning shows."""

import math
from concurrent.futures import Future
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from nemo_style_rlhf.data.prompts import Prompt
from nemo_style_rlhf.generation.interface import Completion, GenerationRequest, SampleId
from nemo_style_rlhf.ppo.metrics import excerpts, ngram_metrics, rollout_metrics, validation_metrics
from nemo_style_rlhf.rollout.types import Rollout, Sampled
from nemo_style_rlhf.schema.algorithm import ShapingConfig
from nemo_style_rlhf.scoring.interface import Scores
from tests.support.rollouts import PROMPTS, LengthScorer, UnluckyScorer, collect, make_collector


class ConstantScorer(LengthScorer):
    """Gives every sample of the first two prompts 0.7, the others their length."""

    def score(self, samples):
        scores = super().score(samples).result()
        for index, sample in enumerate(samples):
            if sample.label in ("0", "1"):
                scores.rewards[index] = 0.7
        future = Future()
        future.set_result(scores)
        return future


def test_groups_whose_rewards_are_all_equal_are_counted():
    settings = {"scorer": ConstantScorer(), "advantage_estimator": "grpo", "normalize_advantages": False}
    experience = collect(**settings)
    assert rollout_metrics(experience)["train_rollouts/frac_reward_zero_std"] == 2 / 4
    teaches = [part.any() for part in experience.advantages.split(experience.lengths)]
    assert not any(teaches[:20]) and all(teaches[20:])
    # Scores count as shaping left them: charged for their lengths, all groups differ.
    charged = collect(**settings, shaping=ShapingConfig(overlong_buffer=5))
    assert rollout_metrics(charged)["train_rollouts/frac_reward_zero_std"] == 0
    single = make_collector(scorer=ConstantScorer())
    single.algorithm.samples_per_prompt = 1
    single.algorithm.num_rollout_samples = 4
    alone = single.collect(lambda count: PROMPTS[:count], step=1)
    assert "train_rollouts/frac_reward_zero_std" not in rollout_metrics(alone)


def test_means_over_samples_leave_out_those_that_train_nothing():
    experience = collect(scorer=UnluckyScorer(), normalize_advantages=False)
    learned = 38  # of 40, two have no score
    experience = replace(experience, kl=torch.full_like(experience.kl, 0.25))
    metrics = rollout_metrics(experience)
    tokens = float(experience.mask.sum())
    assert metrics["train_rollouts/init_policy_kl_per_sample"] == pytest.approx(0.25 * tokens / learned)
    scores = experience.scores.rewards.nansum()  # KL is 0 in the first step
    assert metrics["train_rollouts/rewards_with_kl"] == pytest.approx(float(scores) / learned)
    assert metrics["train_rollouts/rewards_with_kl"] == pytest.approx(metrics["train_rollouts/rewards"])


def test_corrections_show_what_they_mask_and_what_is_left():
    experience = collect()
    weights = torch.zeros_like(experience.mask)
    learned = experience.mask.nonzero().squeeze(1)
    weights[learned[:10]], weights[learned[10:30]] = 2.0, 1.0
    weights[experience.mask == 0] = 100.0
    n = len(learned)
    metrics = rollout_metrics(replace(experience, correction=weights))
    # the sum is 10 * 2 + 20 = 40, that of squares 10 * 4 + 20 = 60
    assert metrics["train_rollouts/correction_weight"] == pytest.approx(40 / n)
    assert metrics["train_rollouts/correction_masked_fraction"] == pytest.approx((n - 30) / n)
    assert metrics["train_rollouts/correction_ess"] == pytest.approx(1600 / (n * 60))
    assert (
        rollout_metrics(replace(experience, correction=torch.zeros_like(weights)))["train_rollouts/correction_ess"] == 0
    )


def rollout(prompt: int, index: int, tokens: list[int]) -> Rollout:
    request = GenerationRequest(SampleId(0, prompt, index), (1,), 0, 9)
    return Rollout.from_completion(
        Completion(request, torch.tensor(tokens), torch.zeros(len(tokens)), "stop", 0),
        Prompt(0, list(request.prompt), ""),
    )


def test_validation_counts_passes_per_sample_and_per_prompt():
    rollouts = [rollout(prompt, index, [2, 3]) for prompt in range(2) for index in range(2)]
    sampled = Sampled(rollouts, Scores(rewards=torch.tensor([1.0, 0.0, 0.2, 0.4])))
    metrics = validation_metrics(sampled, pass_score=1.0)
    assert (metrics["val_rollouts/pass@1"], metrics["val_rollouts/pass@2"]) == (0.25, 0.5)
    assert metrics["val_rollouts/rewards"] == pytest.approx(0.4)
    assert not any("pass@" in name for name in validation_metrics(sampled, pass_score=None))


@pytest.mark.parametrize("score", [0.1, 0.3, 0.7, 0.9])
def test_a_score_that_equals_the_pass_score_passes(score):
    # In fp32 .7 is .69999999 and .9 is .89999998: below what the configuration says.
    scores = torch.tensor([score, score - 1e-6, math.nan])
    sampled = Sampled([rollout(prompt, 0, [2, 3]) for prompt in range(3)], Scores(rewards=scores))
    assert validation_metrics(sampled, pass_score=score)["val_rollouts/pass@1"] == pytest.approx(1 / 3)


def test_repetition_is_the_share_of_4_grams_seen_before():
    def repetition(*responses: list[int]) -> float:
        return ngram_metrics([np.array(response) for response in responses])["repetition"]

    assert repetition([1, 2, 3]) == 0
    assert repetition([1, 2, 3, 4, 5]) == 0
    assert repetition([1] * 7) == 0.75  # four 4-grams, three of them repeated
    assert repetition([1] * 7, [1] * 7, [2, 3]) == 0.5  # each response by itself


def test_ngrams_are_counted_as_sets_count_them():
    draw = np.random.default_rng(0)
    for vocabulary in (2, 7, 100, 150_000):
        responses = [draw.integers(0, vocabulary, draw.integers(1, 60)) for _ in range(40)]
        bigrams = [pair for response in responses for pair in pairwise(response.tolist())]
        shares = []
        for response in responses:
            ngrams = [tuple(response[start : start + 4].tolist()) for start in range(len(response) - 3)]
            shares.append(1 - len(set(ngrams)) / len(ngrams) if ngrams else 0)
        found = ngram_metrics(responses)
        assert found["distinct_2"] == len(set(bigrams)) / len(bigrams)
        assert found["repetition"] == pytest.approx(sum(shares) / len(shares))


def test_samples_in_a_warning_are_lines_that_a_terminal_survives():
    def lines_of(*samples: tuple[str, float]) -> list[str]:
        return excerpts([reward for _, reward in samples], lambda row: ("say\nit", samples[row][0]))

    lines = lines_of(("dull", 0.5), ("\x1b[2J\r\u202eu" + "u" * 500, 9.97), ("?", math.nan), ("good", 3.0))
    assert lines[0].startswith(r"reward 9.97: 'say\nit' -> '\x1b[2J\r\u202euuuuu") and lines[0].endswith("uuu...")
    assert lines[1] == r"reward 0.5: 'say\nit' -> 'dull'"
    assert all(line.isprintable() and len(line) < 140 for line in lines) and len(lines) == 2
    assert lines_of(("alone", 1.0)) == [r"reward 1: 'say\nit' -> 'alone'"]
    assert lines_of(("?", math.nan)) == []
