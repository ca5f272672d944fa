"""The public parts of the package, for your own training loop: examples/own_loop.py is one in 60 lines.

Names in ``__all__`` stay importable from here; everything else may change without notice.
Batches are ragged: sequences lie end to end in flat [N] tensors, with their lengths alongside (:class:`Experience` documents
every field).

* Start: :func:`setup` (device, seeds, threads, quiet libraries), then engines (they join the process group), then a generator,
  because vLLM would make a process group of its own. :class:`Ranks` shares work.
* Configuration: the dataclasses of ``nemo_style_rlhf.schema``, whose docstrings are the reference of every key;
  :class:`UserError` is a mistake of the user, in one sentence.
* Policy: :func:`load_causal_lm`, :func:`load_tokenizer`, :class:`PolicyModel` (log-probabilities of tokens), :class:`Engine`
  (DeepSpeed), :class:`FrozenCopy` (the reference).
* Sampling: :class:`Prompt`, :func:`load_prompts`, :func:`make_requests`, :func:`make_generator`, :class:`Rollout`; new weights
  reach a generator as :class:`OwnWeights`, and a :class:`Probe` proves that they did.
* Rewards: any Python; :func:`text_sources` makes those that a configuration names.
* Batches: :func:`action_mask`, :func:`action_aligned`, :func:`micro_batch_iterator`, :func:`batch_logprobs`.
* Mathematics: the functions of ``nemo_style_rlhf.algorithms``, each with its paper.
* The whole run: :func:`run` is ``trainers/train_ppo_actor.py`` from a configuration. Call it below
  ``if __name__ == "__main__":``, since reward functions' processes import the main script again.
"""

# ruff: noqa: E402

from nemo_style_rlhf.launch.environment import prepare

prepare()  # otherwise the libraries below print greetings

from nemo_style_rlhf.algorithms.advantages import discounted_returns, gae, group_advantages
from nemo_style_rlhf.algorithms.corrections import importance_weights
from nemo_style_rlhf.algorithms.kl import AdaptiveKLController, FixedKLController, kl_estimate, kl_loss
from nemo_style_rlhf.algorithms.masking import aggregate, masked_mean, masked_whiten
from nemo_style_rlhf.algorithms.policy_loss import policy_loss
from nemo_style_rlhf.algorithms.preference_loss import dpo_loss, kto_loss, reward_model_loss
from nemo_style_rlhf.algorithms.reward_shaping import (
    RunningNormalizer,
    clip_scores,
    overlong_penalty,
    place_rewards,
    truncation_penalty,
)
from nemo_style_rlhf.algorithms.value_loss import value_loss
from nemo_style_rlhf.data.prompts import Prompt, load_prompts
from nemo_style_rlhf.distributed.ranks import Ranks
from nemo_style_rlhf.engine.engine import Engine
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.generation.factory import make_generator, weights_for_generator
from nemo_style_rlhf.generation.transfer import OwnWeights, shapes_of
from nemo_style_rlhf.launch.bootstrap import setup
from nemo_style_rlhf.models.loading import load_causal_lm, load_tokenizer
from nemo_style_rlhf.models.policy import PolicyModel
from nemo_style_rlhf.ppo.run import run
from nemo_style_rlhf.ppo.sampler_check import Probe
from nemo_style_rlhf.rollout.logprobs import action_aligned, action_mask, batch_logprobs, micro_batch_iterator
from nemo_style_rlhf.rollout.producer import make_requests
from nemo_style_rlhf.rollout.reference import FrozenCopy
from nemo_style_rlhf.rollout.types import Experience, Rollout
from nemo_style_rlhf.schema.actor import PPOActorConfig
from nemo_style_rlhf.schema.common import EngineConfig, ModelConfig, OptimizerConfig, RunConfig
from nemo_style_rlhf.schema.generation import GenerationConfig
from nemo_style_rlhf.scoring.sources import text_sources

__all__ = [
    "AdaptiveKLController",
    "Engine",
    "EngineConfig",
    "Experience",
    "FixedKLController",
    "FrozenCopy",
    "GenerationConfig",
    "ModelConfig",
    "OptimizerConfig",
    "OwnWeights",
    "PPOActorConfig",
    "PolicyModel",
    "Probe",
    "Prompt",
    "Ranks",
    "Rollout",
    "RunConfig",
    "RunningNormalizer",
    "UserError",
    "action_aligned",
    "action_mask",
    "aggregate",
    "batch_logprobs",
    "clip_scores",
    "discounted_returns",
    "dpo_loss",
    "gae",
    "group_advantages",
    "importance_weights",
    "kl_estimate",
    "kl_loss",
    "kto_loss",
    "load_causal_lm",
    "load_prompts",
    "load_tokenizer",
    "make_generator",
    "make_requests",
    "masked_mean",
    "masked_whiten",
    "micro_batch_iterator",
    "overlong_penalty",
    "place_rewards",
    "policy_loss",
    "reward_model_loss",
    "run",
    "setup",
    "shapes_of",
    "text_sources",
    "truncation_penalty",
    "value_loss",
    "weights_for_generator",
]
