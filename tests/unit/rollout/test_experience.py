"""From samples to experience: alignment, masks, plans and seeds."""

import json
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from nemo_style_rlhf.data.prompts import Prompt
from nemo_style_rlhf.distributed.ranks import Ranks
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.generation.hf import HFGenerator
from nemo_style_rlhf.generation.interface import Completion, GenerationRequest, SampleId, sample_seed
from nemo_style_rlhf.models.policy import PolicyModel
from nemo_style_rlhf.ppo.metrics import rollout_columns, rollout_metrics
from nemo_style_rlhf.ppo.update import mini_batch_plan
from nemo_style_rlhf.rollout.experience import ExperienceBuilder, ShapingState
from nemo_style_rlhf.rollout.logprobs import action_mask, micro_batch_iterator
from nemo_style_rlhf.rollout.producer import NothingToLearnError, Producer, Timers, make_requests
from nemo_style_rlhf.rollout.reference import FrozenCopy
from nemo_style_rlhf.rollout.types import Experience, Rollout, Turn
from nemo_style_rlhf.schema.algorithm import AlgorithmConfig, FilterConfig, ShapingConfig
from nemo_style_rlhf.schema.common import EngineConfig
from nemo_style_rlhf.schema.generation import GenerationConfig, SamplingOverrides
from nemo_style_rlhf.scoring.interface import Scores
from nemo_style_rlhf.tracking.rollouts import RolloutWriter
from tests.support.models import SHAPE, save_tokenizer

CPU = torch.device("cpu")
PROMPTS = [Prompt(index, list(range(2, 4 + index)), f"prompt {index}", label=str(index)) for index in range(4)]
BY_ID = {prompt.prompt_id: prompt for prompt in PROMPTS}


def rollout(prompt_length: int, response_length: int, finish_reason: str = "stop") -> Rollout:
    request = GenerationRequest(SampleId(1, 0, 0), tuple(range(prompt_length)), 5, 9)
    tokens = list(range(100, 100 + response_length))
    completion = Completion(request, tokens, -torch.arange(1.0, response_length + 1), finish_reason, 3)
    return Rollout.from_completion(completion, Prompt(0, list(range(prompt_length)), "text"))


def test_a_rollout_marks_what_the_policy_produced():
    sample = rollout(2, 3)
    assert sample.tokens.tolist() == [0, 1, 100, 101, 102]
    assert sample.response_mask.tolist() == [False, False, True, True, True]
    assert sample.sampler_logprobs.tolist() == [0, 0, -1, -2, -3]
    assert sample.weights_version.tolist() == [-1, -1, 3, 3, 3]
    assert sample.response_tokens.tolist() == [100, 101, 102]
    assert sample.turns == (Turn(2, 5, "stop"),) and sample.response_length == 3


def test_the_action_mask_is_one_where_the_next_token_is_the_policys():
    assert action_mask([rollout(2, 2), rollout(1, 1)]).tolist() == [0, 1, 1, 0, 1, 0]


def test_seeds_are_a_function_of_run_step_prompt_and_index_alone():
    seeds = {
        sample_seed(run, SampleId(step, prompt, index))
        for run in (1, 2)
        for step in range(5)
        for prompt in range(5)
        for index in range(5)
    }
    assert len(seeds) == 250
    assert all(0 <= seed < 2**31 for seed in seeds)
    # the first 4 bytes of sha256("7/1/2/3"), shifted right by one: printf 7/1/2/3 | sha256sum
    assert sample_seed(7, SampleId(1, 2, 3)) == 189544295


def test_a_prompt_that_occurs_twice_in_a_step_gets_new_samples():
    requests = make_requests(
        [PROMPTS[0], PROMPTS[1], PROMPTS[0]], step=4, samples_per_prompt=2, max_tokens=9, run_seed=1
    )
    assert [(r.sample.prompt_id, r.sample.index) for r in requests] == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3)]
    assert len({request.seed for request in requests}) == 6


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=20), st.integers(10, 100))
def test_micro_batches_select_every_action_once_and_in_its_place(shapes, budget):
    samples = [rollout(prompt, response) for prompt, response in shapes]
    lengths = [len(sample.tokens) for sample in samples]
    tokens, mask = torch.cat([sample.tokens for sample in samples]), action_mask(samples)
    config = EngineConfig(micro_batch_tokens=budget, row_multiple=4)
    seen = []
    for batch in micro_batch_iterator(tokens, lengths, mask, config, CPU):
        rows, time = batch.input_ids.shape
        longest = max(int(row.nonzero().max()) + 2 for row in batch.action_mask if row.any())
        assert rows * longest <= budget or rows == 1
        assert rows % 4 == 0 or (rows + 1) * longest > budget
        assert time % 8 == 0
        assert torch.equal(batch.input_ids[batch.action_mask.bool()], tokens[batch.positions])
        seen += batch.positions.tolist()
    assert sorted(seen) == mask.nonzero().squeeze(1).tolist()


class LengthScorer:
    """Scores a sequence by its number of tokens; values are all 0.5."""

    def score(self, samples):
        future = Future()
        lengths = [float(len(sample.tokens)) for sample in samples]
        future.set_result(Scores(rewards=torch.tensor(lengths), values=torch.full((int(sum(lengths)),), 0.5)))
        return future


class UnluckyScorer(LengthScorer):
    """Cannot score the first sample of a group."""

    def score(self, samples):
        scores = super().score(samples).result()
        scores.failed = torch.arange(len(samples)) == 0
        scores.rewards[0] = torch.nan
        future = Future()
        future.set_result(scores)
        return future


class TrainedBetween(LengthScorer):
    """Its critic is trained after the first group."""

    def __init__(self):
        self.groups = 0

    def score(self, samples):
        scores = super().score(samples).result()
        scores.critic_steps, self.groups = frozenset({min(self.groups, 1)}), self.groups + 1
        future = Future()
        future.set_result(scores)
        return future


class Rollouts:
    """A producer and what makes experience of its batches."""

    def __init__(self, producer: Producer, builder: ExperienceBuilder) -> None:
        self.producer, self.builder = producer, builder
        self.algorithm = builder.algorithm

    def collect(self, take, *, step) -> Experience:
        self.producer.take = lambda position, count: take(count)
        return self.builder.build(self.producer.batch(step, 0, 0, Timers()), Timers())

    @property
    def kl_coef(self) -> float:
        return self.builder.state.kl_coef


def make_collector(max_length=6, stop=range(24), scorer=None, **algorithm):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    # 24 of 64 tokens end a response, so both kinds of samples occur.
    config = GenerationConfig(backend="hf", max_length=max_length, stop_token_ids=list(stop))
    generator = HFGenerator(model, config, device=CPU, eos_token_ids=[], weight_shapes=shapes)
    engine = EngineConfig(row_multiple=1)
    policy = PolicyModel(model, temperature=1.0).eval()
    settings = AlgorithmConfig(num_rollout_samples=40, samples_per_prompt=10, **algorithm)
    reference = FrozenCopy(policy, engine, CPU, Ranks(), cpu_offload=False)
    producer = Producer(
        generator, scorer or LengthScorer(), lambda position, count: PROMPTS[:count], lambda prompt, response: str(response),
        settings, max_length, run_seed=3, ranks=Ranks(),
    )  # fmt: skip
    return Rollouts(producer, ExperienceBuilder(policy, reference, settings, engine, CPU, 1.0, Ranks()))


def collect(takes=None, **settings):
    def take(count):
        if takes is not None:
            takes.append(count)
        return PROMPTS[:count]

    return make_collector(**settings).collect(take, step=1)


@pytest.mark.parametrize(("target", "resumed"), [(0.0, 0.1), (0.05, 0.02)])
def test_a_resumed_run_takes_the_kl_coefficient_from_its_checkpoint_only_where_it_is_steered(target, resumed):
    collector = make_collector(initial_policy_kl_penalty=0.1, kl_target=target)
    collector.builder.state = ShapingState(0.02, {})
    assert collector.kl_coef == resumed


def test_the_kl_coefficient_waits_for_the_policy_to_learn():
    collector = make_collector(initial_policy_kl_penalty=0.1, kl_target=0.05, kl_horizon=400, critic_warmup_steps=2)
    coefs = []
    for step in (1, 2, 3):
        collector.collect(lambda count: PROMPTS[:count], step=step)
        coefs.append(collector.kl_coef)
    assert coefs == [0.1, 0.1, pytest.approx(0.1 * (1 - 0.2 * 40 / 400))]  # KL is 0: an error of -1, clipped at -.2


def test_the_least_kl_multiplier_is_the_configurations():
    collector = make_collector(initial_policy_kl_penalty=0.1, kl_target=0.05, kl_horizon=4, kl_min_multiplier=0.75)
    collector.collect(lambda count: PROMPTS[:count], step=1)
    assert collector.kl_coef == pytest.approx(0.075)


@pytest.mark.parametrize("multiplier", [0.0, -0.5, 1.5, float("nan")])
def test_a_kl_multiplier_that_could_turn_the_penalty_around_is_refused(multiplier):
    with pytest.raises(UserError, match=r"algorithm\.kl_min_multiplier=.* is not possible: expected a number above 0"):
        AlgorithmConfig(kl_min_multiplier=multiplier).validate()


def test_an_experience_lists_samples_in_the_order_of_their_requests():
    experience = collect()
    expected = [(prompt.prompt_id, index) for prompt in PROMPTS for index in range(10)]
    assert [(sample.sample.prompt_id, sample.sample.index) for sample in experience.rollouts] == expected
    assert [sample.prompt.label for sample in experience.rollouts[::10]] == ["0", "1", "2", "3"]
    assert experience.scores.rewards.tolist() == [float(length) for length in experience.lengths]
    assert torch.equal(experience.kl, torch.zeros_like(experience.kl))
    gap = (experience.logprobs - experience.sampler_logprobs)[experience.mask.bool()].abs().max()
    assert gap < 1e-5
    counted = experience.mask.bool()
    assert experience.advantages[counted].mean().abs() < 1e-5
    assert experience.advantages[counted].std() == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("settings", [{}, {"filter": FilterConfig(low=-1.0, high=100.0)}])
def test_values_of_one_rollout_that_two_critic_steps_gave_are_refused(settings):
    """40 samples are two scoring requests."""
    with pytest.raises(
        UserError, match="values of one rollout are from its steps 0, 1: another run trains or restores"
    ):
        collect(scorer=TrainedBetween(), **settings)
    assert collect(scorer=TrainedBetween(), advantage_estimator="grpo", **settings).returns is None


def test_without_whitening_returns_are_the_scores_where_gamma_and_lambda_are_one():
    experience = collect(normalize_advantages=False, gae_lambda=1.0)
    parts = zip(
        experience.returns.split(experience.lengths),
        experience.mask.split(experience.lengths),
        experience.scores.rewards,
    )
    for returns, mask, score in parts:
        torch.testing.assert_close(returns[mask.bool()], score.expand(int(mask.sum())))


def test_truncated_samples_are_kept_masked_or_penalised():
    kept, masked = collect(), collect(truncated_samples="mask")
    penalised = collect(
        truncated_samples="penalise", truncation_penalty=-3.0, normalize_advantages=False, gae_lambda=1.0
    )
    truncated = torch.tensor([sample.truncated for sample in kept.rollouts])
    assert 0 < int(truncated.sum()) < 40
    for keep, mask, cut in zip(kept.mask.split(kept.lengths), masked.mask.split(masked.lengths), truncated):
        assert torch.equal(mask, keep * float(not cut))
    returns = torch.stack([part[mask.bool()][0] for part, mask in zip(
        penalised.returns.split(penalised.lengths), penalised.mask.split(penalised.lengths))])  # fmt: skip
    torch.testing.assert_close(returns, penalised.scores.rewards - 3.0 * truncated)
    replaced = collect(truncated_samples="replace", truncation_penalty=-3.0, normalize_advantages=False, gae_lambda=1.0)
    returns = torch.stack([part[mask.bool()][0] for part, mask in zip(
        replaced.returns.split(replaced.lengths), replaced.mask.split(replaced.lengths))])  # fmt: skip
    torch.testing.assert_close(returns, replaced.scores.rewards.masked_fill(truncated, -3.0))
    assert rollout_metrics(kept)["train_rollouts/truncated_fraction"] == pytest.approx(float(truncated.float().mean()))


class FarReference:
    """Finds every token certain: the KL estimate k1 is each token's log-probability."""

    def logprobs(self, tokens, lengths, mask, temperatures):
        return torch.zeros_like(mask)


@pytest.mark.parametrize("estimator", ["rloo", "grpo", "reinforce_baseline", "reinforce", "gae"])
def test_masked_samples_stay_in_the_baseline_with_their_kl(estimator):
    """Nothing changes for the samples that are learned from, but for whitening."""

    def experience(truncated_samples):
        collector = make_collector(
            truncated_samples=truncated_samples, advantage_estimator=estimator, normalize_advantages=False
        )
        collector.builder.reference = FarReference()
        return collector.collect(lambda count: PROMPTS[:count], step=1)

    kept, masked = experience("keep"), experience("mask")
    learned = masked.mask.bool()
    assert 0 < learned.sum() < kept.mask.sum()
    for name in ("rewards", "advantages", "logprobs", "kl"):
        torch.testing.assert_close(getattr(masked, name)[learned], getattr(kept, name)[learned])
    assert not masked.advantages[~learned].any() and not masked.rewards[~learned].any()
    if estimator == "gae":
        torch.testing.assert_close(masked.returns, kept.returns * learned)


def test_a_failed_sample_is_no_part_of_its_group_even_where_it_was_truncated():
    settings = {"advantage_estimator": "dr_grpo", "normalize_advantages": False, "truncated_samples": "mask"}
    experience = collect(scorer=UnluckyScorer(), **settings)
    groups = experience.scores.rewards.view(4, 10)  # NaN where the sample failed
    expected = (groups - groups.nanmean(-1, keepdim=True)).flatten()
    for part, mask, advantage in zip(
        experience.advantages.split(experience.lengths), experience.mask.split(experience.lengths), expected
    ):
        torch.testing.assert_close(part[mask.bool()], advantage.expand(int(mask.sum())))


def test_a_prompts_own_max_length_is_what_its_responses_are_charged_against():
    own = [replace(prompt, sampling=SamplingOverrides(max_length=3)) for prompt in PROMPTS[:2]]
    shaping = ShapingConfig(overlong_buffer=4)
    collector = make_collector(shaping=shaping, normalize_advantages=False, gae_lambda=1.0, truncated_samples="keep")
    experience = collector.collect(lambda count: [*own, *PROMPTS[2:count]], step=1)
    for sample, score, returns, mask in zip(
        experience.rollouts, experience.scores.rewards, experience.returns.split(experience.lengths),
        experience.mask.split(experience.lengths),
    ):  # fmt: skip
        length = sample.response_length
        # of 6 tokens the last 4 cost; of 3 tokens all do
        charge = length / 3 if sample.sample.prompt_id < 2 else max(0, length - 2) / 4
        assert float(returns[mask.bool()][0]) == pytest.approx(float(score) - charge)
    assert any(sample.truncated for sample in experience.rollouts[:20])


def test_a_rollout_with_nothing_to_learn_from_stops_the_run():
    with pytest.raises(
        NothingToLearnError, match=r"all 40 samples of this step were truncated .* raise generation\.max_length"
    ):
        collect(stop=[], truncated_samples="mask")


def test_a_plan_shuffles_every_useful_sample_into_each_epoch_once():
    experience = collect(truncated_samples="mask")
    useful = {index for index, sample in enumerate(experience.rollouts) if not sample.truncated}
    config = AlgorithmConfig(num_rollout_samples=40, ppo_epochs=3, mini_batches=4)
    plan = mini_batch_plan(experience, config, seed=1, step=2)
    assert len(plan) == 12
    for epoch in range(3):
        batches = plan[4 * epoch : 4 * epoch + 4]
        assert sorted(index for batch in batches for index in batch) == sorted(useful)
        assert max(map(len, batches)) - min(map(len, batches)) <= 1
    assert plan == mini_batch_plan(experience, config, seed=1, step=2)
    assert plan != mini_batch_plan(experience, config, seed=1, step=3)
    assert plan[:4] != plan[4:8]


def test_a_sample_without_a_score_trains_nothing_and_is_counted():
    experience = collect(scorer=UnluckyScorer())
    failed = experience.scores.failures.nonzero().squeeze(1).tolist()
    assert failed == [0, 32]  # groups of 32
    masks = experience.mask.split(experience.lengths)
    assert [index for index, mask in enumerate(masks) if not mask.any()] == failed
    assert all(torch.isfinite(part).all() for part in (experience.rewards, experience.advantages, experience.returns))
    metrics = rollout_metrics(experience)
    assert metrics["train_rollouts/reward_failures"] == 2
    assert metrics["train_rollouts/rewards"] == pytest.approx(float(experience.scores.rewards.nanmean()))


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


class BrokenCritic(LengthScorer):
    """Has no number for the value of one action in each group of 32, and for all states after the last action."""

    def __init__(self, at):
        self.at = at

    def score(self, samples):
        scores = super().score(samples).result()
        ends = torch.tensor([len(sample.tokens) for sample in samples]).cumsum(0) - 1
        scores.values[ends] = torch.nan
        scores.values[int(ends[3]) + self.at] = torch.inf
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


def test_what_a_failed_sample_lacks_is_null_on_disk(tmp_path):
    """Readers of JSON Lines other than Python's refuse NaN. The process that writes needs the folder and the tokenizer only."""
    save_tokenizer(tmp_path)
    experience = collect(scorer=UnluckyScorer())
    failed = experience.scores.failures
    experience.scores.extra["length"] = torch.where(failed, torch.nan, 3.0)
    writer = RolloutWriter(tmp_path / "rollouts", partial(AutoTokenizer.from_pretrained, tmp_path))
    for step in (1, 2):
        writer.write(step, rollout_columns(experience))
    writer.flush()
    writer.close()
    texts = [(tmp_path / "rollouts" / f"step_{step:06d}.jsonl").read_text() for step in (1, 2)]
    assert texts[0] == texts[1] and "NaN" not in texts[0]
    rows = [json.loads(line) for line in texts[0].splitlines()]
    lacking = [row["reward"] is None and row["length"] is None for row in rows]
    assert lacking == failed.tolist() and any(lacking) and not all(lacking)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert [row["response"] for row in rows] == [tokenizer.decode(r.response_tokens) for r in experience.rollouts]
    assert [row["response_tokens"] for row in rows] == [len(r.response_tokens) for r in experience.rollouts]


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


def test_values_that_are_not_finite_stop_the_run_in_one_sentence():
    with pytest.raises(
        UserError, match=r"^the critic's values of 2 of 40 samples are not finite \(the first is inf\): "
    ):
        collect(scorer=BrokenCritic(at=-1))
    assert collect(scorer=BrokenCritic(at=0)).advantages.isfinite().all()  # no action's value
    assert collect(scorer=BrokenCritic(at=-1), advantage_estimator="rloo").advantages.isfinite().all()  # asks for none


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


def test_a_filter_that_nothing_passes_stops_the_run():
    with pytest.raises(NothingToLearnError, match=r"dropped all 16 prompts of 4 rollouts: widen algorithm\.filter"):
        collect(filter=FilterConfig(low=1000.0))


def test_ranks_that_no_tensor_parallel_size_divides_are_refused():
    with pytest.raises(
        UserError, match=r"generation\.tensor_parallel_size=2 with 1 ranks of the actor, which it must divide"
    ):
        Ranks(tensor_parallel=2)
