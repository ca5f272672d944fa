"""The actor's update on one rollout."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nemo_style_rlhf.algorithms.kl import kl_loss
from nemo_style_rlhf.algorithms.masking import aggregate
from nemo_style_rlhf.algorithms.policy_loss import policy_loss
from nemo_style_rlhf.distributed.ranks import Ranks
from nemo_style_rlhf.engine.engine import Engine
from nemo_style_rlhf.engine.steps import TokenMeans, optimizer_steps
from nemo_style_rlhf.rollout.logprobs import MicroBatch, PolicyForward, micro_batch_iterator
from nemo_style_rlhf.rollout.types import Experience
from nemo_style_rlhf.schema.algorithm import AlgorithmConfig

log = logging.getLogger(__name__)


def mini_batch_plan(experience: Experience, config: AlgorithmConfig, *, seed: int, step: int) -> list[list[int]]:
    """The rollouts of each optimizer step: ``ppo_epochs`` shuffled passes over the episodes, each cut into ``mini_batches``.

    The plan is a pure function of seed, step and mask; actor and critic follow the same plan. Rollouts without an action are
    left out, since an optimizer step on nothing would still move the weights.
    """
    learned = [bool(part.any()) for part in experience.mask.split(experience.lengths)]
    rows: dict[int, list[int]] = {}
    for row, episode in enumerate(episode_sizes(experience).episode):
        if learned[row]:
            rows.setdefault(episode, []).append(row)
    useful = list(rows.values())
    plan = []
    for epoch in range(config.ppo_epochs):
        order = np.random.default_rng((seed, step, epoch)).permutation(len(useful))
        parts = np.array_split(order, min(config.mini_batches, len(useful)))
        plan += [[row for index in part.tolist() for row in useful[index]] for part in parts]
    return plan


def update_actor(
    engine: Engine, experience: Experience, plan: Sequence[Sequence[int]], config: AlgorithmConfig, ranks: Ranks, *,
    max_length: int, seed: int, logprobs: Tensor | None = None,
) -> dict[str, float]:  # fmt: skip
    """Take one optimizer step for each entry of ``plan``. Returns metrics, averaged over tokens unless noted as the last
    step's.

    Every loss is divided by the token or sequence count of its whole optimizer step, so the split into micro-batches, shared by
    ``ranks``, does not change the gradient. An optimizer step whose gradient is 0 is taken all the same, and counted in
    ``train_optim/empty_steps``; with ``skip_empty_steps``, optimizer, schedule and weights then stay as they are.

    Args:
        max_length: the most tokens that a response may have, the constant of ``seq_sum_constant``.
        seed: dropout seed of this step and rank, so that a restored actor needs no saved state of a random generator.
        logprobs: [N] zeros on the CPU, overwritten by the log-probabilities that the last epoch computed for loss tokens, each
            before its own optimizer step.

    Raises:
        NonFiniteError: a loss or gradient is not finite.
    """
    last_epoch = len(plan) - len(plan) // config.ppo_epochs
    means, first = TokenMeans(), TokenMeans()
    sizes = episode_sizes(experience)
    normalizers = [
        loss_normalizer(sizes, rows, config.loss_aggregation, samples=samples, max_length=max_length)
        for rows, samples in zip(plan, samples_per_step(experience, plan), strict=True)
    ]
    teaching = _teaching_rows(experience, config)
    empty = [teaching is not None and not any(teaching[row] for row in rows) for rows in plan]
    micro_batches = (
        micro_batch_iterator(
            experience.tokens, experience.lengths, experience.mask, engine.config, engine.device, ranks, rows,
            experience.temperatures,
        )
        for rows in plan
    )  # fmt: skip

    def loss(number: int, batch: MicroBatch, counts: bool) -> Tensor:
        batch = batch if counts else batch.emptied()
        whole = sizes.whole(batch)
        value, statistics, computed = micro_batch_loss(
            engine, experience, batch, config, normalizers[number], whole=whole
        )
        if counts:
            if logprobs is not None and number >= last_epoch:
                logprobs[batch.positions] = computed.to(logprobs)
            means.add(len(batch.positions), **statistics)
            if number == 0:
                first.add(len(batch.positions), **statistics)
        return value

    steps = optimizer_steps(
        engine, micro_batches, loss, seed=seed, skipped=lambda number: config.skip_empty_steps and empty[number]
    )
    empty_steps = sum(empty)
    skipped_steps = empty_steps if config.skip_empty_steps else 0
    if empty_steps and ranks.is_first:
        log.warning(
            "%d of %d optimizer steps had nothing to learn from, every advantage was 0: %s", empty_steps, len(plan),
            "they were left out" if skipped_steps else "they moved the weights by momentum and weight decay alone "
            "(algorithm.skip_empty_steps=true leaves them out)",
        )  # fmt: skip
    own_loss = sum(loss for step in steps for loss in step.losses)
    if logprobs is not None:
        ranks.sum(logprobs)
    means, first = TokenMeans.of(ranks.all_gather(means)), TokenMeans.of(ranks.all_gather(first))
    return {
        "train_optim/loss": sum(ranks.all_gather(own_loss)) / len(plan),
        "train_optim/ppo_ratio": means.mean("ratio"),
        "train_optim/ppo_ratio_first_mini_batch": first.mean("ratio"),
        "train_optim/ratio_error_first_mini_batch": first.mean("ratio_error"),
        "train_optim/clip_fraction": means.mean("clip_fraction"),
        "train_optim/approx_kl": means.mean("approx_kl"),
        "train_optim/grad_norm": sum(step.grad_norm for step in steps) / len(steps),
        **({"train_optim/kl_loss": means.mean("kl_loss")} if "kl_loss" in means.totals else {}),
        "train_optim/lr": steps[-1].lr,
        "train_optim/optimizer_steps": len(plan) - skipped_steps,
        **({} if teaching is None else {"train_optim/empty_steps": empty_steps}),
    }


def _teaching_rows(experience: Experience, config: AlgorithmConfig) -> list[bool] | None:
    """[B] True if a token's policy loss has a factor other than 0; None if another term of the loss has a gradient."""
    kl_term = config.kl_in == "loss" and experience.ref_logprobs is not None and experience.kl_coef != 0
    if kl_term or config.entropy_bonus != 0:
        return None
    factor = experience.advantages * experience.mask
    factor = factor if experience.correction is None else factor * experience.correction
    return [bool(part.any()) for part in factor.split(experience.lengths)]


def samples_per_step(experience: Experience, plan: Sequence[Sequence[int]]) -> list[float]:
    """Number of episodes that each optimizer step of ``plan`` represents: its own, and an even share of those without a loss
    token."""
    episode = episode_sizes(experience).episode
    planned = {episode[row] for rows in plan for row in rows}
    return [len({episode[row] for row in rows}) * len(experience.branches) / len(planned) for rows in plan]


@dataclass(frozen=True)
class EpisodeSizes:
    episode: list[int]
    """[B] number of each rollout's episode."""
    own: Tensor
    """[B] int64 loss tokens of each rollout."""
    loss_tokens: Tensor
    """[B] int64 loss tokens of each rollout's whole episode."""

    def whole(self, batch: MicroBatch) -> Tensor | None:
        """``loss_tokens`` [rows] of a micro-batch on its device; None if every episode is a single rollout."""
        if self.episode[-1] + 1 == len(self.episode):
            return None
        padding = len(batch.input_ids) - len(batch.sequences)
        sizes = self.loss_tokens[batch.sequences]
        return torch.cat((sizes, sizes.new_zeros(padding))).to(batch.action_mask.device)


def episode_sizes(experience: Experience) -> EpisodeSizes:
    branches = torch.tensor(experience.branches)
    episode = torch.arange(len(branches)).repeat_interleave(branches)
    own = torch.stack([part.bool().sum() for part in experience.mask.split(experience.lengths)])
    return EpisodeSizes(episode.tolist(), own, torch.zeros_like(branches).index_add(0, episode, own)[episode])


def loss_normalizer(
    sizes: EpisodeSizes, rows: Sequence[int], aggregation: str, *, samples: float, max_length: int
) -> float:
    """Divisor of the micro-batch losses of an optimizer step on ``rows``: the number of its loss tokens, or of its episodes with
    a loss token, or for ``seq_sum_constant`` all its ``samples`` times ``max_length``, whatever the mask.
    """
    if aggregation == "seq_sum_constant":
        return samples * max_length
    own = sizes.own[list(rows)].tolist()
    if aggregation == "token_mean":
        return float(sum(own))
    return float(len({sizes.episode[row] for row, learned in zip(rows, own, strict=True) if learned}))


def micro_batch_loss(
    policy: PolicyForward, experience: Experience, batch: MicroBatch, config: AlgorithmConfig, normalizer: float, *,
    whole: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor], Tensor]:  # fmt: skip
    """The part that this micro-batch adds to the optimizer step's loss, means over its tokens, and their log-probabilities."""
    mask, rows = batch.action_mask, batch.rows
    with_entropy = config.entropy_bonus != 0
    result = policy(batch.input_ids, mask, with_entropy=with_entropy, temperature=batch.temperature)
    old = experience.logprobs[batch.positions]
    surrogate = policy_loss(
        rows(result.logprobs),
        rows(old),
        rows(experience.advantages[batch.positions]),
        mask,
        clip_low=config.ratio_eps,
        clip_high=config.ratio_eps if config.ratio_eps_high is None else config.ratio_eps_high,
        dual_clip=config.dual_clip,
        level=config.ratio_level,
        aggregation=config.loss_aggregation,
        normalizer=normalizer,
        weights=None if experience.correction is None else rows(experience.correction[batch.positions]),
        whole=whole,
    )
    loss = surrogate.loss

    def aggregated(per_action: Tensor) -> Tensor:
        return aggregate(rows(per_action), mask, mode=config.loss_aggregation, normalizer=normalizer, whole=whole)

    if with_entropy:
        loss = loss - config.entropy_bonus * aggregated(result.entropy)
    statistics = {
        "ratio": surrogate.ratio,
        "ratio_error": (result.logprobs.detach() - old.to(mask.device)).expm1().abs().mean(),
        "clip_fraction": surrogate.clip_fraction,
        "approx_kl": surrogate.approx_kl,
    }
    if config.kl_in == "loss" and experience.ref_logprobs is not None:
        reference = experience.ref_logprobs[batch.positions].to(mask.device)
        sampled = experience.under_the_sampler[batch.positions]
        kl = kl_loss(
            result.logprobs,
            reference,
            kind=config.kl_estimator,
            unbiased=config.kl_gradient == "unbiased",
            old_logprobs=sampled.to(mask.device),
        )
        loss = loss + experience.kl_coef * aggregated(kl)
        statistics["kl_loss"] = kl.detach().mean()
    return loss, statistics, result.logprobs.detach()
