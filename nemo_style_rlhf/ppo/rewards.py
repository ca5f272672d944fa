"""Connects the reward sources that a run uses, and the critic's values, as one scorer."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from nemo_style_rlhf.critic_service.protocol import Want
from nemo_style_rlhf.critic_service.remote_critic import RemoteCritic
from nemo_style_rlhf.distributed.ranks import Ranks
from nemo_style_rlhf.ppo.recovery import wait_together
from nemo_style_rlhf.ppo.start import RunStart
from nemo_style_rlhf.schema.actor import PPOActorConfig
from nemo_style_rlhf.scoring.combined import CombinedScorer
from nemo_style_rlhf.scoring.contract import columns
from nemo_style_rlhf.scoring.interface import Scorer, Scores
from nemo_style_rlhf.scoring.remote import RemoteCriticScorer, RewardServerScorer, served_by
from nemo_style_rlhf.scoring.sources import text_sources

log = logging.getLogger(__name__)
WeightedSources = dict[str, tuple[Scorer, float]]
"""Reward sources by name, with their weights."""


@dataclass(frozen=True)
class Scoring:
    """All scores of a run."""

    scorer: Scorer
    """Rewards, and the critic's values unless ``ask_values`` asks for them."""
    ranks: int
    """Number of ranks that answer one request of ``scorer``."""
    ask_values: "Callable[[Sequence[Tensor], int], Future[Scores]] | None"
    """Asks the critic of a given step for the values of sequences when a step begins. None if ``scorer`` brings the values, or
    the run has none."""


def connect_sources(start: RunStart, ranks: Ranks) -> WeightedSources:
    """The reward sources in use, except for the critic server. Every rank calls this."""
    config, prompts = start.config, start.prompts
    reward, sources = config.reward, WeightedSources()
    if reward.server.weight != 0:
        served = partial(
            served_by, reward.server, log.info, needs_bits=bool(config.run.deterministic),
            conversations=any(prompt.chat is not None and prompt.chat.question is None for prompt in prompts),
        )  # fmt: skip
        model = wait_together(ranks, start.store, served)
        server = RewardServerScorer(reward.server, model, prompt_template=config.data.prompt_template, rank=ranks.rank)
        sources["server"] = server, reward.server.weight
    fields = columns(prompt.metadata for prompt in prompts)
    return sources | text_sources(reward, fields, verdicts=start.output_dir / "verdicts", rank=ranks.rank)


def combine_sources(
    config: PPOActorConfig, critic: RemoteCritic | None, sources: WeightedSources, ranks: Ranks
) -> Scoring:
    """One scorer of ``sources`` and, if the run has a critic server, of its rewards and values. Every rank calls this."""
    critic_ranks = ranks.from_first(1 if critic is None else critic.ranks)
    weight, uses_critic = config.reward.critic.weight, config.algorithm.uses_critic
    # One request for all values has work for each of the critic's ranks.
    values_late = config.values_late or (critic_ranks > 1 and uses_critic and weight == 0)
    with_values = uses_critic and not values_late
    ask_values = None
    if critic is not None:
        if with_values or weight != 0:
            want: Want = "rewards" if not with_values else "both" if weight != 0 else "values"
            sources = {"critic": (RemoteCriticScorer(critic, want=want), weight), **sources}
        if values_late:
            ask_values = RemoteCriticScorer(critic, want="values").ask
    scorer = CombinedScorer(sources, on_error=config.reward.on_error)
    return Scoring(scorer, critic_ranks if weight != 0 else 1, ask_values)
