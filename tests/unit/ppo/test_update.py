"""The actor's optimizer steps on one rollout, with a real engine in one process on CPU."""

import logging
from dataclasses import replace

import pytest
import torch

from nemo_style_rlhf.distributed.ranks import Ranks
from nemo_style_rlhf.engine.engine import Engine
from nemo_style_rlhf.engine.process_group import init_distributed
from nemo_style_rlhf.ppo.update import episode_sizes, loss_normalizer, mini_batch_plan, samples_per_step, update_actor
from nemo_style_rlhf.schema.algorithm import AlgorithmConfig
from nemo_style_rlhf.schema.common import EngineConfig, OptimizerConfig, SchedulerConfig
from tests.support.digests import digest_of_state
from tests.support.experience import MAX_LENGTH, experience, policy
from tests.support.rollouts import collect

CPU = torch.device("cpu")
FULL = [[1, 2, 3, 4, 5, 6, 7]]
HALVES = [[1, 2, 3, 4], [5, 6, 7]]
OTHER_TERMS = {"entropy": {"entropy_bonus": 0.01}, "kl": {"kl_in": "loss"}}


@pytest.fixture(autouse=True, scope="module")
def _process_group():
    init_distributed(CPU)


def make_engine(zero_stage: int) -> Engine:
    config = EngineConfig(
        zero_stage=zero_stage, micro_batch_tokens=48, row_multiple=1, optim=OptimizerConfig(lr=1e-2, weight_decay=0.1),
        scheduler=SchedulerConfig(name="cosine", warmup_steps=2, total_steps=10),
    )  # fmt: skip
    return Engine(policy("eager").float(), config, device=CPU)


def update(engine: Engine, plan: list[list[int]] = FULL, *, silent: str = "", **algorithm: object) -> dict[str, float]:
    """One update; ``silent`` names what is 0 at every token, or in the second half of the samples."""
    config = AlgorithmConfig(**algorithm)
    seen = experience(config)
    if not algorithm.get("corrected"):
        seen = replace(seen, correction=None)
    if silent == "advantages":
        seen = replace(seen, advantages=torch.where(seen.mask.bool(), 0.0, seen.advantages))
    elif silent == "second half":
        seen.advantages[sum(seen.lengths[:5]) :] = 0
    elif silent == "correction":
        seen = replace(seen, correction=torch.zeros_like(seen.advantages))
    return update_actor(engine, seen, plan, config, Ranks(), max_length=MAX_LENGTH, seed=0)


def test_the_last_epochs_log_probabilities_are_handed_out():
    """Two epochs of one mini-batch: the second computes them after the first's optimizer step, which the ratio's mean shows."""
    config = AlgorithmConfig(ppo_epochs=2)
    seen = replace(experience(config), correction=None)
    found = torch.zeros_like(seen.logprobs)
    engine = make_engine(0)
    metrics = update_actor(
        engine, seen, [*FULL, *FULL], config, Ranks(), max_length=MAX_LENGTH, seed=0, logprobs=found
    )  # fmt: skip
    planned = torch.zeros_like(seen.mask, dtype=torch.bool)
    planned[seen.lengths[0] :] = seen.mask.bool()[seen.lengths[0] :]  # FULL leaves out sample 0
    ratio = (found - seen.logprobs).exp()[planned]
    assert not found[~planned].any() and found[planned].all()
    first = metrics["train_optim/ppo_ratio_first_mini_batch"]
    assert float(ratio.mean()) == pytest.approx(2 * metrics["train_optim/ppo_ratio"] - first, rel=1e-5)
    assert abs(float(ratio.mean()) - first) > 1e-4


def state(engine: Engine) -> str:
    """Digest of weights, optimizer states, schedule and counters."""
    return digest_of_state(list(engine.snapshot().files.values()))


def weights(engine: Engine) -> torch.Tensor:
    return torch.cat([weight.detach().flatten().clone() for _, weight in engine.named_weights()])


def test_dr_grpos_constant_is_one_that_no_mask_changes():
    """arXiv 2503.20783: the sum over tokens divided by samples x max_length, those that train nothing included."""
    seen = experience(AlgorithmConfig())  # 8 samples
    for plan, expected in (
        ([[0, 1, 2, 3], [4, 5, 6, 7]], [4, 4]),
        ([[0, 1, 2], [4, 5, 6]], [4, 4]),
        ([[0, 1, 2], [4]], [6, 2]),
    ):
        assert samples_per_step(seen, plan) == expected
    assert loss_normalizer(episode_sizes(seen), [], "seq_sum_constant", samples=4, max_length=10) == 40


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("silent", ["advantages", "correction"])
def test_a_step_without_any_signal_moves_the_weights_unless_it_is_skipped(zero_stage, silent, caplog):
    engine, without = make_engine(zero_stage), make_engine(zero_stage)
    learned = update(engine)
    update(without)
    assert learned["train_optim/empty_steps"] == 0 and not caplog.messages
    before = state(engine)
    with caplog.at_level(logging.WARNING):
        skipped = update(engine, HALVES, silent=silent, skip_empty_steps=True)
    assert state(engine) == before
    assert caplog.messages == [
        "2 of 2 optimizer steps had nothing to learn from, every advantage was 0: they were left out"
    ]
    assert skipped.keys() == learned.keys()
    assert skipped["train_optim/empty_steps"] == 2 and skipped["train_optim/optimizer_steps"] == 0
    assert skipped["train_optim/loss"] == skipped["train_optim/grad_norm"] == 0
    assert skipped["train_optim/lr"] > learned["train_optim/lr"]  # that of the next step
    # What follows is what would have come without it.
    assert update(engine) == update(without)
    assert state(engine) == state(without)

    moved = weights(engine)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        taken = update(engine, silent=silent)
    assert not torch.equal(weights(engine), moved)
    assert taken["train_optim/grad_norm"] == 0 and taken["train_optim/empty_steps"] == 1
    assert (
        "they moved the weights by momentum and weight decay alone (algorithm.skip_empty_steps=true"
        in caplog.messages[0]
    )


def test_only_the_optimizer_steps_without_a_signal_are_skipped():
    engine, without = make_engine(0), make_engine(0)
    metrics = update(engine, HALVES, silent="second half", skip_empty_steps=True)
    assert (metrics["train_optim/empty_steps"], metrics["train_optim/optimizer_steps"]) == (1, 1)
    update(without, HALVES[:1], silent="second half")
    assert torch.equal(weights(engine), weights(without))


@pytest.mark.parametrize("term", OTHER_TERMS)
def test_a_step_with_another_term_is_never_empty(term):
    engine = make_engine(0)
    before = weights(engine)
    metrics = update(engine, silent="advantages", skip_empty_steps=True, **OTHER_TERMS[term])
    assert "train_optim/empty_steps" not in metrics and metrics["train_optim/grad_norm"] > 0
    assert not torch.equal(weights(engine), before)


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
