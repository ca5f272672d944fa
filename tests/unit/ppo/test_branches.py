"""An episode with several rollouts is learned as if it were one."""

import math
from dataclasses import replace

import pytest
import torch

from nemo_style_rlhf.algorithms.reward_shaping import RunningNormalizer
from nemo_style_rlhf.data.prompts import Prompt
from nemo_style_rlhf.data.ragged import pad
from nemo_style_rlhf.distributed.ranks import Ranks
from nemo_style_rlhf.generation.interface import Completion, GenerationRequest, SampleId
from nemo_style_rlhf.ppo.update import (
    episode_sizes,
    loss_normalizer,
    micro_batch_loss,
    mini_batch_plan,
    samples_per_step,
)
from nemo_style_rlhf.rollout.experience import early_rewards
from nemo_style_rlhf.rollout.logprobs import action_mask, micro_batch_iterator
from nemo_style_rlhf.rollout.training_signal import Shaped, estimate, shape_scores
from nemo_style_rlhf.rollout.types import Experience, Rollout, Turn, episodes, sums
from nemo_style_rlhf.schema.algorithm import AlgorithmConfig, ShapingConfig
from nemo_style_rlhf.schema.common import EngineConfig
from nemo_style_rlhf.scoring.interface import Scores
from tests.support.experience import MAX_LENGTH, experience, policy
from tests.support.rollouts import CPU, rollout

AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_sum_constant")
SPLIT = {2: 3, 5: 4, 7: 6}
"""Samples of the experience, and the number of the action before which each is split."""


def branched(whole: Experience) -> Experience:
    """The same experience, whose samples of ``SPLIT`` have two rollouts: both hold the tokens up to the split, the first learns
    them, and the second one learns the rest."""
    ends = torch.tensor([0, *whole.lengths]).cumsum(0).tolist()
    rollouts, places, hidden = [], [], []
    for number, sample in enumerate(whole.rollouts):
        own = torch.arange(ends[number], ends[number + 1])
        cut = SPLIT.get(number)
        if cut is None:
            parts, learned = [own], [torch.ones(len(own))]
        else:
            begin = sample.prompt_length - 1 + cut  # the position of the first action of the second part
            parts = [own[: begin + 1], own]
            learned = [(torch.arange(begin + 1) < begin).float(), (torch.arange(len(own)) >= begin).float()]
        for branch, part in enumerate(parts):
            rollouts.append(replace(sample, tokens=whole.tokens[part], branch=branch))
        places += parts
        hidden += learned
    order = torch.cat(places)
    moved = {
        name: getattr(whole, name)[order]
        for name in ("tokens", "sampler_logprobs", "logprobs", "ref_logprobs", "kl", "advantages", "correction")
    }
    temperatures = torch.cat(
        [whole.temperatures[number].repeat(2 if number in SPLIT else 1) for number in range(len(whole.rollouts))]
    )
    return replace(
        whole, rollouts=rollouts, lengths=[len(part) for part in places], mask=whole.mask[order] * torch.cat(hidden),
        temperatures=temperatures, **moved,
    )  # fmt: skip


def test_the_split_experience_learns_the_same_tokens():
    whole = experience(AlgorithmConfig())
    split = branched(whole)
    assert len(split.lengths) == len(whole.lengths) + len(SPLIT)
    assert split.branches == [2 if number in SPLIT else 1 for number in range(8)]
    assert split.advantages[split.mask.bool()].tolist() == whole.advantages[whole.mask.bool()].tolist()


@pytest.mark.parametrize("micro_batch_tokens", [40, 10_000])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_losses_and_gradients_are_those_of_whole_episodes(aggregation, micro_batch_tokens):
    config = AlgorithmConfig(loss_aggregation=aggregation, entropy_bonus=0.01, kl_in="loss")
    whole = experience(config)
    expected = gradient(config, whole, 10_000)
    actual = gradient(config, branched(whole), micro_batch_tokens)
    assert actual[0] == pytest.approx(expected[0], rel=1e-6)
    assert float(expected[1].norm()) > 0
    assert float((actual[1] - expected[1]).norm()) <= 1e-6 * float(expected[1].norm())


def test_the_kl_gradient_of_stale_samples_is_that_of_the_divergence() -> None:
    """By enumeration: a uniform policy has sampled each of the 64 tokens once, and neither the policy before the update nor the
    one that is trained is uniform."""
    prompt, size = (1, 2), 64
    rollouts = []
    for token in range(size):
        completion = Completion(
            GenerationRequest(SampleId(1, token, 0), prompt, 0, 1), torch.tensor([token]), torch.zeros(1), "stop", 0
        )
        rollouts.append(Rollout.from_completion(completion, Prompt(token, list(prompt), "")))
    generator = torch.Generator().manual_seed(4)
    drawn = torch.randn(2, size, dtype=torch.float64, generator=generator).log_softmax(-1)
    per_token = torch.zeros(3, size, 3, dtype=torch.float64)
    per_token[:, :, 1] = torch.stack([torch.full((size,), -math.log(size)), *drawn])
    sampler, before, reference = per_token.flatten(1)
    nothing = torch.zeros_like(sampler)
    batch = Experience(
        rollouts=rollouts, lengths=[3] * size, temperatures=torch.ones(size), tokens=torch.cat([r.tokens for r in rollouts]),
        mask=action_mask(rollouts), sampler_logprobs=sampler, logprobs=before, ref_logprobs=reference,
        scores=Scores(torch.zeros(size)), kl=nothing, kl_coef=1.0, advantages=nothing, rewards=torch.empty(0), returns=None,
        correction=None, counts={}, stale=True,
    )  # fmt: skip
    _, actual = gradient(AlgorithmConfig(kl_in="loss", kl_estimator="k3"), batch, 10_000)
    exact = policy("eager")
    row = torch.tensor([[*prompt, 0]])
    mask = torch.zeros_like(row)
    mask[0, 1] = 1
    logprobs = torch.stack(
        [exact(row.masked_fill(torch.tensor([[False, False, True]]), token), mask, temperature=1.0).logprobs[0]
         for token in range(size)]
    )  # fmt: skip
    (logprobs.exp() * (logprobs - drawn[1])).sum().backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in exact.parameters()])
    assert float((actual - expected).norm()) <= 1e-6 * float(expected.norm())
    fresh = gradient(AlgorithmConfig(kl_in="loss", kl_estimator="k3"), replace(batch, stale=False), 10_000)[1]
    assert float((fresh - expected).norm()) > 0.1 * float(expected.norm())


def gradient(config: AlgorithmConfig, batch: Experience, micro_batch_tokens: int) -> tuple[float, torch.Tensor]:
    model, sizes = policy("eager"), episode_sizes(batch)
    engine = EngineConfig(micro_batch_tokens=micro_batch_tokens, row_multiple=2)
    [plan] = [mini_batch_plan(batch, replace(config, ppo_epochs=1, mini_batches=1), seed=3, step=1)]
    (samples,) = samples_per_step(batch, plan)
    parts = micro_batch_iterator(
        batch.tokens, batch.lengths, batch.mask, engine, CPU, Ranks(alone=True), plan[0], batch.temperatures
    )
    normalizer = loss_normalizer(sizes, plan[0], config.loss_aggregation, samples=samples, max_length=MAX_LENGTH)
    total = 0.0
    for part, _ in parts:
        loss, *_ = micro_batch_loss(model, batch, part, config, normalizer, whole=sizes.whole(part))
        loss.backward()
        total += float(loss.detach())
    return total, torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def test_mini_batches_are_cut_between_episodes_and_keep_their_sizes():
    config = AlgorithmConfig(mini_batches=3, ppo_epochs=2)
    whole = experience(config)
    split = branched(whole)
    by_episode = [[number for number in range(8) for _ in range(split.branches[number])][row] for row in range(11)]
    expected, plan = (mini_batch_plan(each, config, seed=3, step=5) for each in (whole, split))
    assert [list(dict.fromkeys(by_episode[row] for row in rows)) for rows in plan] == expected
    assert sorted(row for rows in plan[:3] for row in rows) == [row for row in range(11) if by_episode[row] != 0]
    assert samples_per_step(split, plan) == samples_per_step(whole, expected)


def test_rewards_of_turns_stand_at_their_last_actions_and_the_rest_at_the_episodes_last():
    """Two episodes: one of two turns in one rollout and a third turn in another, and one of a single turn."""
    first = replace(rollout(2, 7), turns=(Turn(2, 4, "stop", 0.5), Turn(6, 9, "stop", -1.0)))
    second = replace(rollout(5, 3), turns=(Turn(5, 8, "stop", 2.0),), branch=1)
    single = replace(rollout(3, 2), turns=(Turn(3, 5, "stop", 4.0),))
    rows = [first, second, single]
    lengths = sums([len(row.tokens) for row in rows], [2, 1])
    assert [len(each) for each in episodes(rows)] == [2, 1]
    raw = Shaped(torch.zeros(2), torch.ones(2), torch.zeros(2))
    early = early_rewards(rows, lengths, raw)
    assert early.shape == (2, 17)
    assert {tuple(place): float(early[tuple(place)]) for place in early.nonzero().tolist()} == {
        (0, 2): 0.5, (0, 7): -1.0,
    }  # fmt: skip
    assert early_rewards([single], [5], Shaped(*(torch.ones(1),) * 2, torch.zeros(1))) is None

    mask = torch.zeros(2, 17)
    mask[0, [1, 2, 5, 6, 7, 13, 14, 15]] = 1
    mask[1, [2, 3]] = 1
    scores, nothing = torch.tensor([1.5, 4.0]), torch.zeros(2, 17)
    config = AlgorithmConfig(discount_factor=1.0, gae_lambda=1.0, normalize_advantages=False)
    signal = estimate(scores, nothing, nothing, mask, config, kl_coef=0.0, early=early)
    assert signal.rewards[0, [2, 7, 15]].tolist() == [0.5, -1.0, 2.0]
    assert signal.rewards.sum(-1).tolist() == [1.5, 4.0]
    # Without discount, the return of an action is the sum of the rewards from there on, through all rollouts of the episode.
    assert signal.returns[0, [1, 2, 5, 7, 13, 15]].tolist() == [1.5, 1.5, 1.0, 1.0, 2.0, 2.0]
    grouped = replace(config, advantage_estimator="dr_grpo", samples_per_prompt=2)
    compared = estimate(scores, nothing, None, mask, grouped, kl_coef=0.0, early=early)
    assert compared.advantages[0, [1, 15]].tolist() == pytest.approx([-1.25, -1.25])


SHAPINGS = {
    "none": (ShapingConfig(), [5.0, 1.0, 1.0], [1.0, 2.0, -1.0]),
    # The totals 7 and 2 have the mean 4.5 and the deviation 5 / sqrt(2), by which every turn's reward is divided.
    "normalized": (ShapingConfig(normalize="running"), [5.0, 1.0, 1.0], [1.0, 2.0, -1.0]),
    "clipped": (ShapingConfig(clip_low=-3.5, clip_high=3.5), [2.5, 0.5, 0.5], [1.0, 2.0, -1.0]),
}


@pytest.mark.parametrize("name", SHAPINGS)
def test_shaping_keeps_what_a_turn_is_worth_beside_the_others(name: str) -> None:
    """What a turn returns is what it and the later ones earned, in the unit of the shaped scores; a mean that is taken from whole
    episodes is taken at their beginning."""
    shaping, *earned = SHAPINGS[name]
    starts = [2, 5, 8]
    rows = [
        replace(
            rollout(2, 8), turns=tuple(Turn(start, start + 2, "stop", reward) for start, reward in zip(starts, given))
        )
        for given in ([5.0, 1.0, 1.0], [1.0, 2.0, -1.0])
    ]
    config = AlgorithmConfig(discount_factor=1.0, gae_lambda=1.0, normalize_advantages=False, shaping=shaping)
    totals, none = torch.tensor([7.0, 2.0]), torch.tensor([False, False])
    shaped = shape_scores(
        totals, none, torch.tensor([6, 6]), none, config, max_length=10, normalizer=RunningNormalizer()
    )
    lengths = [len(row.tokens) for row in rows]
    mask, nothing = torch.zeros(2, max(lengths)), torch.zeros(2, max(lengths))
    for start in starts:
        mask[:, start - 1 : start + 1] = 1
    early = early_rewards(rows, lengths, shaped)
    signal = estimate(shaped.scores, nothing, nothing, mask, config, kl_coef=0.0, early=early)
    unit = 5 / math.sqrt(2) if name == "normalized" else 1.0
    for row, rewards in enumerate(earned):
        for turn in (1, 2):  # the first one has the mean, too
            assert float(signal.returns[row, starts[turn]]) == pytest.approx(sum(rewards[turn:]) / unit, abs=1e-4)
        assert float(signal.returns[row, starts[0] - 1]) == pytest.approx(float(shaped.scores[row]), abs=1e-4)


def test_padding_is_no_part_of_an_episodes_size():
    split = branched(experience(AlgorithmConfig()))
    sizes = episode_sizes(split)
    per_row = pad(split.mask, split.lengths).sum(-1)
    expected = [float(per_row[[row for row in range(11) if sizes.episode[row] == own]].sum()) for own in range(8)]
    assert sizes.loss_tokens.tolist() == [expected[own] for own in sizes.episode]
