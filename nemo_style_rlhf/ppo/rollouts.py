"""Builds the parts that make rollouts: the generator, the producer of batches, and the queue that hands them to the trainer."""

import os
from functools import partial

from nemo_style_rlhf.data.encoding import decode_response
from nemo_style_rlhf.distributed.ranks import Ranks
from nemo_style_rlhf.engine.engine import Engine
from nemo_style_rlhf.engines.factory import make_engine_pool, make_weight_store
from nemo_style_rlhf.generation.factory import keeping_threads, make_generator, weights_for_generator
from nemo_style_rlhf.generation.interface import Generator
from nemo_style_rlhf.generation.transfer import shapes_of
from nemo_style_rlhf.generation.weight_store import WeightStore
from nemo_style_rlhf.launch.starting import starting
from nemo_style_rlhf.ppo.agents import make_runner
from nemo_style_rlhf.ppo.limits import prompts_to_take
from nemo_style_rlhf.ppo.policy import LoadedPolicy
from nemo_style_rlhf.ppo.rewards import Scoring
from nemo_style_rlhf.ppo.start import RunStart
from nemo_style_rlhf.ppo.validation import sample_validation
from nemo_style_rlhf.rollout.executors import InlineRollouts, ThreadedRollouts
from nemo_style_rlhf.rollout.producer import Producer
from nemo_style_rlhf.rollout.queue import BatchQueue
from nemo_style_rlhf.rollout.version_schedule import Schedule
from nemo_style_rlhf.schema.actor import PPOActorConfig
from nemo_style_rlhf.schema.model_files import stop_ids


def start_generator(start: RunStart, policy: LoadedPolicy, engine: Engine, ranks: Ranks) -> Generator | None:
    """Start the generator of this process, or the engines. Every rank calls this.

    Returns:
        None on ranks that receive what the first one's engines sample.
    """
    config, device = start.config, start.device
    shapes = shapes_of(weights_for_generator(engine.hf_weights(), policy.hf, config.generation))
    stop_strings = any(prompt.sampling.stop for prompt in start.prompts)
    stop_strings |= config.agent.in_use and config.generation.backend == "vllm"  # environments may bring some
    if config.generation.engines.count:
        return None if not ranks.is_first else make_engine_pool(
            config.model, config.generation, config.run, device=device, max_model_len=policy.max_length, weight_shapes=shapes,
            stop_strings=stop_strings, one_by_one=config.agent.in_use, placement=config.placement,
        )  # fmt: skip
    starting("loading the generator")
    with keeping_threads(device):
        return make_generator(
            config.model, config.generation, tokenizer=start.tokenizer, device=device, seed=config.run.seed,
            max_model_len=policy.max_length, weight_shapes=shapes, stop_strings=stop_strings, sleeps=config.placement.in_turns,
        )  # fmt: skip


def make_producer(
    start: RunStart, policy: LoadedPolicy, generator: Generator | None, scoring: Scoring, ranks: Ranks
) -> Producer | None:
    """The producer of batches. None on ranks without a generator; these score nothing either."""
    if generator is None:
        scoring.scorer.close()
        return None
    config, tokenizer, prompts = start.config, start.tokenizer, start.training.rows
    runner = None
    if config.agent.in_use:
        limits = {"max_tokens": policy.max_length, "vocabulary": policy.vocabulary}
        runner = make_runner(config, tokenizer, prompts, **limits, ranks=ranks)
    ends = None  # reward sources do not read special tokens
    if config.reward.special_tokens:
        ends = stop_ids(tokenizer) | {*config.generation.stop_token_ids}
    return Producer(
        generator,
        scoring.scorer,
        take=lambda position, count: [prompts[index] for index in start.sampler.take(position, count)],
        decode=partial(decode_response, tokenizer, special_but=ends),
        algorithm=config.algorithm,
        max_length=config.generation.max_length,
        run_seed=config.run.seed,
        ranks=Ranks(alone=True) if config.generation.engines.count else ranks,
        scoring_ranks=scoring.ranks,
        episodes=runner,
        most=prompts_to_take(start.whole, len(prompts)),
        on_first=config.agent.listen is not None,
    )


def make_queue(
    start: RunStart, producer: Producer | None, generator: Generator | None, ranks: Ranks, *, run_id: str
) -> BatchQueue:
    """Build the queue. Every rank calls this; ranks without a ``producer`` receive the batches of the first one."""
    config, algorithm = start.config, start.config.algorithm
    engines, turns = config.generation.engines.count > 0, config.placement.in_turns
    stores = ranks.is_first and (engines or algorithm.staleness > 0 or turns)
    return BatchQueue(
        producer,
        generator,
        schedule=Schedule(algorithm.staleness, start.total_steps),
        prompts={prompt.prompt_id: prompt for prompt in start.training.rows},
        validate=partial(sample_validation, config, start.validation[: algorithm.num_val_samples]),
        store=_weight_store(config, run_id) if stores else None,
        executor=ThreadedRollouts if engines and not turns else InlineRollouts,
        from_store=engines or turns,
        ranks=ranks,
        receivers=ranks if engines else Ranks(alone=True),
    )


def _weight_store(config: PPOActorConfig, run_id: str) -> WeightStore:
    hosts_apart = os.environ.get("LOCAL_WORLD_SIZE", "1") != os.environ.get("WORLD_SIZE", "1")
    shared = config.placement.in_turns and hosts_apart and not config.generation.engines.count
    return make_weight_store(run_id, config.run.output_dir, shared=shared)
