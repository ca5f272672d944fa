"""The components that the training loop connects."""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from nemo_style_rlhf.critic_service.remote_critic import RemoteCritic
from nemo_style_rlhf.data.sampling import Sampler
from nemo_style_rlhf.distributed.ranks import Ranks
from nemo_style_rlhf.engine.engine import Engine
from nemo_style_rlhf.ppo.residency import Residency
from nemo_style_rlhf.ppo.sampler_check import Probe
from nemo_style_rlhf.rollout.experience import ExperienceBuilder
from nemo_style_rlhf.rollout.queue import BatchQueue
from nemo_style_rlhf.tracking.metrics import MetricsWriter
from nemo_style_rlhf.tracking.rollouts import RolloutWriter


@dataclass(frozen=True)
class Parts:
    """See each class; every rank has its own."""

    engine: Engine
    residency: Residency
    queue: BatchQueue
    experience: ExperienceBuilder
    critic: RemoteCritic | None
    """None if neither the algorithm nor the reward needs the critic process. All ranks query it; only the first changes it."""
    sampler: Sampler
    tokenizer: PreTrainedTokenizerBase
    probe: Probe
    metrics: MetricsWriter | None
    """None except on the first rank."""
    rollouts: RolloutWriter | None
    """None except on the first rank."""
    ranks: Ranks
