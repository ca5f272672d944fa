"""Which prompts are asked for, asked for again and dropped."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import accumulate

import pytest
import torch

from nemo_style_rlhf.rollout.producer import AllSolvedError, DataTakenError, NothingToLearnError, Timers, make_requests
from nemo_style_rlhf.schema.algorithm import FilterConfig
from nemo_style_rlhf.scoring.interface import Scores, ScoringSample
from tests.support.rollouts import PROMPTS, LengthScorer, collect, make_collector


def test_a_prompt_that_occurs_twice_in_a_step_gets_new_samples():
    requests = make_requests(
        [PROMPTS[0], PROMPTS[1], PROMPTS[0]], step=4, samples_per_prompt=2, max_tokens=9, run_seed=1
    )
    assert [(r.sample.prompt_id, r.sample.index) for r in requests] == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3)]
    assert len({request.seed for request in requests}) == 6


def test_a_rollout_with_nothing_to_learn_from_stops_the_run():
    with pytest.raises(
        NothingToLearnError, match=r"all 40 samples of this step were truncated .* raise generation\.max_length"
    ):
        collect(stop=[], truncated_samples="mask")


def test_filtering_draws_prompts_until_enough_of_them_teach():
    # The score is the length, so longer prompts score higher: the filter keeps some prompts and asks for the rest again.
    means = [sum(part.tolist()) / 10 for part in collect().scores.rewards.split(10)]
    high = sorted(means)[1] + 1e-3
    takes = []
    experience = collect(takes=takes, filter=FilterConfig(high=high, max_rounds=3))
    assert takes[0] == 4 and 1 < len(takes) <= 3
    assert all(mean < high for mean in experience.scores.rewards.view(-1, 10).mean(-1).tolist())
    assert experience.counts["rounds"] == len(takes)
    assert experience.counts["filtered_prompts"] == sum(takes) - len(experience.rollouts) // 10
    assert sum(experience.lengths) == len(experience.scores.values)
    ids = [rollout.sample for rollout in experience.rollouts]
    assert len(set(ids)) == len(ids)  # a prompt drawn again gives other samples


def test_of_more_prompts_than_wanted_the_first_that_teach_are_taken_in_the_order_of_the_data():
    takes = []

    def take(count):
        takes.append(count)
        return (PROMPTS * 2)[:count]

    experience = make_collector(filter=FilterConfig(low=-1000.0, oversample=1.3)).collect(take, step=1)
    assert takes == [6] and len(experience.rollouts) == 40  # 4 are wanted, and 1.3 times as many are 5.2
    assert [rollout.sample.prompt_id for rollout in experience.rollouts[::10]] == [0, 1, 2, 3]
    assert experience.counts["filtered_prompts"] == 0  # the other two would teach, too


class FieldsScorer(LengthScorer):
    """Notes what it is told about each sample's row."""

    def __init__(self):
        self.seen = []

    def score(self, samples):
        self.seen += [(sample.prompt, sample.label, dict(sample.metadata)) for sample in samples]
        return super().score(samples)


def test_a_source_is_told_the_fields_of_each_samples_row():
    scorer = FieldsScorer()
    prompts = [replace(prompt, metadata={"level": prompt.prompt_id}) for prompt in PROMPTS]
    make_collector(scorer=scorer).collect(lambda count: prompts[:count], step=1)
    assert sorted(scorer.seen) == sorted((f"prompt {i}", str(i), {"level": i}) for i in range(4) for _ in range(10))


class SharesScorer(LengthScorer):
    """Gives the samples of each prompt their scores in turn: 2 of 10 solved, 3 of 10 solved, each .9, each .2."""

    def __init__(self):
        shares = [1.0] * 2 + [0.0] * 8, [1.0] * 3 + [0.0] * 7, [0.9] * 10, [0.2] * 10
        self.scores = {str(label): iter(share) for label, share in enumerate(shares)}

    def score(self, samples):
        scores = super().score(samples).result()
        scores.rewards = torch.tensor([next(self.scores[sample.label]) for sample in samples])
        future = Future()
        future.set_result(scores)
        return future


def test_a_mean_that_equals_a_bound_lies_neither_above_nor_below_it():
    """In fp32 .2 is .200000003 and .9 is .89999998."""
    experience = collect(scorer=SharesScorer(), filter=FilterConfig(low=0.2, high=0.9, max_rounds=1))
    assert {rollout.sample.prompt_id for rollout in experience.rollouts} == {1}
    assert experience.counts["filtered_prompts"] == 3


def test_a_filter_that_nothing_passes_stops_the_run_and_says_what_to_change():
    sentence = (
        r"dropped all 16 prompts of 4 rollouts, 0 of them since they are above it, .*: lower algorithm\.filter\.low=1000, raise "
        r"algorithm\.filter\.max_rounds=4"
    )
    with pytest.raises(NothingToLearnError, match=sentence):
        collect(filter=FilterConfig(low=1000.0))
    sentence = r"dropped all 4 prompts .*, 1 of them since they are above it, .*low=0\.35, raise algorithm\.filter\.high=0\.4, "
    with pytest.raises(NothingToLearnError, match=sentence):
        collect(scorer=SharesScorer(), filter=FilterConfig(low=0.35, high=0.4, max_rounds=1))


def test_when_every_prompt_is_above_the_filter_there_is_nothing_left_to_learn():
    with pytest.raises(AllSolvedError, match=r"all 16 prompts of 4 rollouts reach algorithm\.filter\.high=-1000"):
        collect(filter=FilterConfig(high=-1000.0))


def test_a_run_with_a_filter_ends_when_its_passes_over_the_prompts_do():
    """Whatever the filter has dropped was taken, too."""
    producer = make_collector(filter=FilterConfig(low=-1000.0, oversample=1.5)).producer
    producer.most = 12
    assert len(producer.batch(1, 6, 0, Timers()).rollouts) == 40  # 4 prompts, of the 6 that are left
    with pytest.raises(
        DataTakenError, match=r"7 prompts were taken, as many steps of 6 as algorithm\.max_epochs=1 allows"
    ):
        producer.batch(2, 7, 0, Timers())
    producer.most = 3  # the first step is made whatever there is: fewer prompts than one takes are refused before
    assert len(producer.batch(1, 0, 0, Timers()).rollouts) == 40


class RecordingScorer(LengthScorer):
    def __init__(self) -> None:
        self.groups: list[list[list[int]]] = []

    def score(self, samples: "Sequence[ScoringSample]") -> "Future[Scores]":
        self.groups.append([sample.tokens.tolist() for sample in samples])
        return super().score(samples)


def test_requests_grow_with_the_ranks_that_answer_them():
    """All 40 samples of a step are fewer than 2 x 32: the first rank sends them together, in their order."""
    found = {}
    for scoring_ranks in (1, 2):
        scorer = RecordingScorer()
        producer = make_collector(scorer=scorer).producer
        producer.scoring_ranks = scoring_ranks
        batch = producer.batch(1, 0, 0, Timers())
        found[scoring_ranks] = batch.scores.result().rewards
        in_order = [rollout.tokens.tolist() for rollout in batch.rollouts]
        sizes = [20, 20] if scoring_ranks == 1 else [40]
        assert sorted(scorer.groups) == sorted(
            in_order[end - size : end] for end, size in zip(accumulate(sizes), sizes)
        )
    assert torch.equal(found[1], found[2])
