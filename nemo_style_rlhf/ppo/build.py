"""Builds the trainer from a checked configuration: loads everything in the order that the libraries demand."""

from dataclasses import asdict
from functools import partial

from nemo_style_rlhf.checkpoint.starts import record_start
from nemo_style_rlhf.distributed.ranks import Ranks
from nemo_style_rlhf.engine.process_group import init_distributed, require_all_ranks
from nemo_style_rlhf.launch.starting import starting
from nemo_style_rlhf.models.decoding import backend, decoder_loader
from nemo_style_rlhf.ppo.critic import contact_critic, meet_critic_last
from nemo_style_rlhf.ppo.export import PolicyCopy
from nemo_style_rlhf.ppo.parts import Parts
from nemo_style_rlhf.ppo.policy import LoadedPolicy, load_policy, start_training
from nemo_style_rlhf.ppo.recovery import Recovery
from nemo_style_rlhf.ppo.residency import Residency
from nemo_style_rlhf.ppo.rewards import combine_sources, connect_sources
from nemo_style_rlhf.ppo.rollouts import make_producer, make_queue, start_generator
from nemo_style_rlhf.ppo.sampler_check import MAX_GAP, Probe
from nemo_style_rlhf.ppo.saving import Saver
from nemo_style_rlhf.ppo.session import RunSession
from nemo_style_rlhf.ppo.start import RunStart, agree_on_run_id, check_start
from nemo_style_rlhf.ppo.trainer import PPOTrainer
from nemo_style_rlhf.rollout.experience import ExperienceBuilder
from nemo_style_rlhf.schema.actor import PPOActorConfig
from nemo_style_rlhf.tracking.metrics import MetricsWriter
from nemo_style_rlhf.tracking.rollouts import RolloutWriter


def build_trainer(config: PPOActorConfig, *, whole: PPOActorConfig | None = None) -> PPOTrainer:
    """Load data and models, meet the servers, start DeepSpeed's engine, then vLLM.

    Cheap checks come first: data, checkpoints and servers are checked before any engine starts. A critic server that still loads
    is met after that: both processes load at the same time.

    Args:
        whole: the run that ``config`` tries out; its checks apply, too.
    """
    start = check_start(config, whole or config)
    policy = load_policy(start)
    init_distributed(start.device)
    ranks = Ranks(tensor_parallel=config.generation.sharing_ranks)
    critic, unmet = contact_critic(start, policy, ranks)
    sources = connect_sources(start, ranks)
    run_id = agree_on_run_id(start, ranks)
    recovery = Recovery(
        critic, start.store, ranks, run_id=run_id, output_dir=start.output_dir, restores=config.algorithm.uses_critic
    )
    models = start_training(start, policy, recovery, ranks)
    generator = start_generator(start, policy, models.engine, ranks)
    require_all_ranks()
    if unmet is not None:
        meet_critic_last(unmet, start, policy, ranks, [generator, *(source for source, _ in sources.values())])
    scoring = combine_sources(config, critic, sources, ranks)
    if ranks.is_first:
        record_start(start.output_dir, config, after=f"step_{start.resumed.step if start.resumed else 0:06d}")
    ranks.require_shared(start.output_dir)
    rollouts = make_rollout_writer(start) if ranks.is_first else None
    producer = make_producer(start, policy, generator, scoring, ranks)
    queue = make_queue(start, producer, generator, ranks, run_id=run_id)
    residency = Residency(models.engine, queue, critic, ranks, in_turns=config.placement.in_turns)
    # The one cycle: handing devices over takes the queue, the queue takes the producer, and the producer asks for the handover.
    if producer is not None and config.placement.in_turns:
        producer.turn = residency.enter_alone if config.generation.engines.count else residency.enter
    parts = Parts(
        engine=models.engine, residency=residency, queue=queue, critic=critic, sampler=start.sampler,
        experience=ExperienceBuilder(
            models.engine, models.reference, config.algorithm, config.engine, start.device, config.generation.temperature,
            ranks, scoring.ask_values,
        ),
        tokenizer=start.tokenizer, probe=make_probe(start, policy), rollouts=rollouts, ranks=ranks,
        metrics=MetricsWriter(start.output_dir, config.tracking, asdict(config)) if ranks.is_first else None,
    )  # fmt: skip
    saver = make_saver(start, parts, run_id)
    starting("taking the first step")
    session = RunSession(config, parts, start.store, saver, recovery, total_steps=start.total_steps)
    return PPOTrainer(config, parts, session)


def make_rollout_writer(start: RunStart) -> RolloutWriter:
    model, tracking = start.config.model, start.config.tracking
    load = decoder_loader(start.tokenizer, model.path, trust_remote_code=model.trust_remote_code)
    return RolloutWriter(start.output_dir / "rollouts", tracking.rollouts, load, backend(start.tokenizer))


def make_probe(start: RunStart, policy: LoadedPolicy) -> Probe:
    config = start.config
    max_gap = config.audit.max_probe_gap or MAX_GAP[config.model.dtype]
    return Probe(start.training.rows, policy.vocabulary, max_length=policy.max_length, max_gap=max_gap)


def make_saver(start: RunStart, parts: Parts, run_id: str) -> Saver:
    config = start.config
    policy = partial(PolicyCopy, parts.engine, parts.ranks, config, start.tokenizer)
    return Saver(
        config.checkpoint, start.store, parts.critic if config.algorithm.uses_critic else None, run_id=run_id,
        identity=start.identity, rollouts=parts.rollouts, policy=policy if config.checkpoint.save_hf else None,
    )  # fmt: skip
