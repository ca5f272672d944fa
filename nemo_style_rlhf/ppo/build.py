"""Builds the trainer from a checked configuration: loads everything in the order that the libraries demand."""

import dataclasses
import importlib.metadata
import json
import logging
import os
import uuid
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nemo_style_rlhf.checkpoint.starts import (
    log_differences,
    record_start,
    require_reachable,
    require_same,
    require_work,
)
from nemo_style_rlhf.checkpoint.store import ACTOR, CheckpointStore, Manifest
from nemo_style_rlhf.critic_service.protocol import Want
from nemo_style_rlhf.critic_service.remote_critic import RemoteCritic
from nemo_style_rlhf.data.encoding import decode_response
from nemo_style_rlhf.data.mixtures import TrainingRows
from nemo_style_rlhf.data.prompts import Prompt, load_prompts, load_training_prompts
from nemo_style_rlhf.data.templates import check_reward_template, check_template, log_date
from nemo_style_rlhf.distributed.ranks import Ranks, require_tensor_parallel
from nemo_style_rlhf.engine.engine import Engine, sharded
from nemo_style_rlhf.engine.process_group import init_distributed, require_all_ranks
from nemo_style_rlhf.engines.factory import make_engine_pool, make_weight_store
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.generation.factory import (
    keeping_threads,
    make_generator,
    require_host,
    require_supported,
    weights_for_generator,
)
from nemo_style_rlhf.generation.interface import Generator
from nemo_style_rlhf.generation.transfer import shapes_of
from nemo_style_rlhf.generation.weight_store import WeightStore
from nemo_style_rlhf.launch.bootstrap import setup
from nemo_style_rlhf.launch.starting import starting
from nemo_style_rlhf.models.decoding import backend, decoder_loader
from nemo_style_rlhf.models.digests import model_fingerprint, rows_fingerprint, tokenizer_digest
from nemo_style_rlhf.models.loading import load_causal_lm, load_tokenizer
from nemo_style_rlhf.models.lora import add_lora, lora_identity
from nemo_style_rlhf.models.policy import PolicyModel
from nemo_style_rlhf.ppo.agents import make_runner
from nemo_style_rlhf.ppo.export import PolicyCopy, rehearse_policy
from nemo_style_rlhf.ppo.limits import max_sequence_length, number_of_steps, prompts_to_take
from nemo_style_rlhf.ppo.metrics import validation_metrics
from nemo_style_rlhf.ppo.recovery import Recovery, require_critic_checkpoint, wait_together
from nemo_style_rlhf.ppo.residency import Residency
from nemo_style_rlhf.ppo.sampler_check import MAX_GAP, Probe
from nemo_style_rlhf.ppo.saving import IDENTITY_FILE, Saver
from nemo_style_rlhf.ppo.session import RunSession
from nemo_style_rlhf.ppo.trainer import Parts, PPOTrainer
from nemo_style_rlhf.rollout.experience import ExperienceBuilder
from nemo_style_rlhf.rollout.producer import Producer
from nemo_style_rlhf.rollout.queue import BatchQueue
from nemo_style_rlhf.rollout.reference import AdaptersOff, FrozenCopy, Reference, require_comparable
from nemo_style_rlhf.rollout.schedule import Schedule
from nemo_style_rlhf.schema.actor import PPOActorConfig
from nemo_style_rlhf.schema.model_files import stop_ids
from nemo_style_rlhf.scoring.combined import CombinedScorer
from nemo_style_rlhf.scoring.contract import columns
from nemo_style_rlhf.scoring.interface import Scorer
from nemo_style_rlhf.scoring.remote import RemoteCriticScorer, RewardServerScorer, served_by
from nemo_style_rlhf.scoring.sources import text_sources
from nemo_style_rlhf.tracking.metrics import MetricsWriter
from nemo_style_rlhf.tracking.rollouts import RolloutWriter

log = logging.getLogger(__name__)
VALIDATION_SEED_OFFSET = 2**32
"""Keeps the seeds of validation samples apart from those of training; they are the same at every validation."""
REFERENCE = "the KL reference (model.reference_path)"
"""Its name in a checkpoint's identity."""
PACKAGES = ("torch", "transformers", "deepspeed", "numpy")


def build_trainer(config: PPOActorConfig, *, whole: PPOActorConfig | None = None) -> PPOTrainer:
    """Load data and models, meet the servers, start DeepSpeed's engine, then vLLM.

    Cheap checks come first: data, checkpoints and servers are checked before any engine starts. A critic server that still loads
    is met after that, so that both processes load at the same time.

    Args:
        whole: the run that ``config`` tries out; its checks apply, too.
    """
    whole = whole or config
    require_tensor_parallel(int(os.environ.get("WORLD_SIZE", "1")), config.generation.sharing_ranks)
    device = setup(config.run)
    if config.generation.engines.launch or not config.generation.engines.count:
        apart = config.generation.engines.count > 0
        require_host(config.generation, device, repeatable=config.run.repeatable(device.type) and not apart)
    output_dir = Path(config.run.output_dir)
    store = CheckpointStore(output_dir / "checkpoints", config.checkpoint.keep_last)
    found, saved = _found(whole) if os.environ.get("RANK", "0") == "0" else (None, {})
    tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
    training = _training_prompts(config, tokenizer)
    prompts, val_prompts = training.rows, _validation_prompts(config, tokenizer)
    log_date(config.data, tokenizer)
    identity = run_identity(config, training)
    require_same(saved, identity, whole.run.output_dir)
    total_steps = min(number_of_steps(each, len(prompts)) for each in (whole, config))
    if found is not None:
        wanted = number_of_steps(whole, len(prompts))
        require_reachable(found.step, wanted, "algorithm.max_steps", whole.run.output_dir)
        require_work(found.step, wanted, whole, "algorithm.max_steps")
    log.info(
        "%s of %s: %d steps of %d samples on %s; metrics, rollouts and checkpoints go to %s",
        config.algorithm.label, config.model.path, total_steps,
        config.algorithm.num_rollout_samples, device, output_dir,
    )  # fmt: skip
    starting("loading the policy")
    policy = load_causal_lm(config.model)
    require_supported(policy, config.model.path, config.generation)
    rehearse_policy(policy, config, tokenizer)
    max_length = max_sequence_length(whole, [*prompts, *val_prompts], policy.config)
    require_comparable(config.model, tokenizer, policy, max_length)
    check_template(config.model.path, config.data, tokenizer)
    init_distributed(device)
    engines, staleness = config.generation.engines.count, config.algorithm.staleness
    ranks = Ranks(tensor_parallel=config.generation.sharing_ranks)
    turns = config.placement.in_turns
    critic = RemoteCritic(config.remote_critic_rm) if config.uses_critic_process else None
    meet = partial(_meet_critic, config, critic, tokenizer, policy, max_length, ranks, store)
    patient = not turns and config.remote_critic_rm.wait_for_server_s > 0
    later = critic is not None and patient and not all(ranks.everyone(critic.answers))
    if critic is not None and later:
        log.info("%s does not answer yet: the policy and its generator load meanwhile", critic.where)
        if config.agent.in_use and not config.algorithm.uses_critic:
            log.warning(
                "the run waits for a reward model beside the environment's own rewards: if these are all, give reward=environment"
            )
    else:
        meet()
    sources = _sources(config, [*prompts, *val_prompts], ranks, store)
    run_id = ranks.from_first(uuid.uuid4().hex[:12] if found is None or whole is not config else found.run_id)
    add_lora(policy, config.model)
    optimizer_steps = (total_steps - config.algorithm.critic_warmup_steps) * _optimizer_steps_per_rollout(config)
    engine = Engine(_policy_model(config, policy), config.engine, device=device, total_steps=optimizer_steps)
    engine.eval()
    uses_critic = config.algorithm.uses_critic
    recovery = Recovery(critic, store, ranks, run_id=run_id, output_dir=output_dir, restores=uses_critic)
    if turns:
        engine.offload()
        recovery.clear_device()
    reference = _reference(config, engine, device, ranks) if config.needs_reference else None
    shapes = shapes_of(weights_for_generator(engine.hf_weights(), policy, config.generation))
    stop_strings = any(prompt.sampling.stop for prompt in [*prompts, *val_prompts])
    stop_strings |= config.agent.in_use and config.generation.backend == "vllm"  # environments may bring some
    generator: Generator | None = None
    if not engines:
        starting("loading the generator")
        with keeping_threads(device):
            generator = make_generator(
                config.model, config.generation, tokenizer=tokenizer, device=device, seed=config.run.seed,
                max_model_len=max_length, weight_shapes=shapes, stop_strings=stop_strings, sleeps=turns,
            )  # fmt: skip
    elif ranks.is_first:  # the other ranks receive what the first one makes
        generator = make_engine_pool(
            config.model, config.generation, config.run, device=device, max_model_len=max_length, weight_shapes=shapes,
            stop_strings=stop_strings, one_by_one=config.agent.in_use, placement=config.placement,
        )  # fmt: skip
    require_all_ranks()
    if later:
        starting("waiting for the critic server")
        try:
            meet()
        except BaseException:
            if generator is not None:
                generator.close()
            for source, _ in sources.values():
                source.close()
            raise
    critic_ranks = ranks.from_first(1 if critic is None else critic.ranks)
    values_alone = config.algorithm.uses_critic and config.reward.critic.weight == 0
    values_late = config.values_late or (critic_ranks > 1 and values_alone)  # one request has work for all of the ranks
    scorer = _scorer(config, critic, sources, values_late=values_late)
    if ranks.is_first:
        record_start(output_dir, config, after=f"step_{found.step if found else 0:06d}")
    ranks.require_shared(output_dir)
    sampler = training.sampler(config.run.seed, config.data.shuffle)
    rollouts = _rollout_writer(config, tokenizer) if ranks.is_first else None
    producer = None
    if generator is not None:
        runner = None
        if config.agent.in_use:
            vocabulary = policy.config.get_text_config().vocab_size
            runner = make_runner(config, tokenizer, prompts, max_tokens=max_length, vocabulary=vocabulary, ranks=ranks)
        producer = Producer(
            generator,
            scorer,
            take=lambda position, count: [prompts[index] for index in sampler.take(position, count)],
            decode=partial(decode_response, tokenizer, special_but=_ends(config, tokenizer)),
            algorithm=config.algorithm,
            max_length=config.generation.max_length,
            run_seed=config.run.seed,
            ranks=Ranks(alone=True) if engines else ranks,
            scoring_ranks=critic_ranks if config.reward.critic.weight != 0 else 1,
            episodes=runner,
            most=prompts_to_take(whole, len(prompts)),
            on_first=config.agent.listen is not None,
        )
    else:
        scorer.close()
    queue = BatchQueue(
        producer,
        generator,
        schedule=Schedule(staleness, total_steps),
        prompts={prompt.prompt_id: prompt for prompt in prompts},
        validate=partial(_validate, config, val_prompts[: config.algorithm.num_val_samples]),
        store=_weight_store(config, run_id) if ranks.is_first and (engines or staleness or turns) else None,
        beside=engines > 0,
        ranks=ranks,
        turns=turns,
    )
    residency = Residency(engine, queue, critic, ranks, in_turns=turns)
    if producer is not None and turns:
        producer.turn = residency.enter_alone if engines else residency.enter
    parts = Parts(
        engine=engine,
        residency=residency,
        queue=queue,
        experience=ExperienceBuilder(
            engine,
            reference,
            config.algorithm,
            config.engine,
            device,
            config.generation.temperature,
            ranks,
            ask_values=RemoteCriticScorer(critic, want="values").ask if critic is not None and values_late else None,
        ),
        critic=critic,
        sampler=sampler,
        tokenizer=tokenizer,
        probe=Probe(
            prompts,
            policy.config.get_text_config().vocab_size,
            max_length=max_length,
            max_gap=config.audit.max_probe_gap or MAX_GAP[config.model.dtype],
        ),
        metrics=MetricsWriter(output_dir, config.tracking, dataclasses.asdict(config)) if ranks.is_first else None,
        rollouts=rollouts,
        ranks=ranks,
    )
    saver = Saver(
        store, critic if uses_critic else None, run_id=run_id, keep_last=config.checkpoint.keep_last,
        max_failures=config.checkpoint.max_failed_saves, identity=identity,
        versions={name: importlib.metadata.version(name) for name in PACKAGES}, rollouts=rollouts,
        policy=partial(PolicyCopy, engine, ranks, config, tokenizer) if config.checkpoint.save_hf else None,
    )  # fmt: skip
    starting("taking the first step")
    session = RunSession(config, engine, queue, store, saver, recovery, residency, ranks, total_steps=total_steps)
    return PPOTrainer(config, parts, session, total_steps=total_steps)


def _ends(config: PPOActorConfig, tokenizer: PreTrainedTokenizerBase) -> frozenset[int] | None:
    """The tokens that end a response, where reward sources read its other special tokens; else None."""
    return stop_ids(tokenizer) | {*config.generation.stop_token_ids} if config.reward.special_tokens else None


def run_identity(config: PPOActorConfig, training: TrainingRows[Prompt] | None = None) -> dict[str, Any]:
    """Settings that give the weights, optimizer states and data position of a checkpoint their meaning. Without ``training``,
    those that depend on them are missing. engine.zero_stage and the number of ranks may change, so they are not among them."""
    identity = {
        **lora_identity(config.model), "model.dtype": config.model.dtype, "run.seed": config.run.seed,
        "data.shuffle": config.data.shuffle, "algorithm.staleness": config.algorithm.staleness,
    }  # fmt: skip
    if config.algorithm.staleness:  # batches of later steps are sampled already, so many of each prompt
        identity["algorithm.samples_per_prompt"] = config.algorithm.samples_per_prompt
    if config.needs_reference:
        identity[REFERENCE] = model_fingerprint(config.model.reference_model.path)
    if training is not None:
        fingerprint = rows_fingerprint((prompt.prompt_id, prompt.token_ids) for prompt in training.rows)
        identity |= {**training.identity, "training prompts": fingerprint}
    return identity


def _weight_store(config: PPOActorConfig, run_id: str) -> WeightStore:
    hosts_apart = os.environ.get("LOCAL_WORLD_SIZE", "1") != os.environ.get("WORLD_SIZE", "1")
    shared = config.placement.in_turns and hosts_apart and not config.generation.engines.count
    return make_weight_store(run_id, config.run.output_dir, shared=shared)


def _rollout_writer(config: PPOActorConfig, tokenizer: PreTrainedTokenizerBase) -> RolloutWriter:
    model = config.model
    load = decoder_loader(tokenizer, model.path, trust_remote_code=model.trust_remote_code)
    folder = Path(config.run.output_dir) / "rollouts"
    return RolloutWriter(folder, config.tracking.rollouts, load, backend(tokenizer))


def _found(config: PPOActorConfig) -> tuple[Manifest | None, dict[str, Any]]:
    """The newest checkpoint of the run, from which ``config`` may resume, and the identity saved in it. Logs settings that
    differ from the last start.

    Raises:
        UserError: ``run.resume`` forbids resuming, or ``config`` differs from the saved identity.
    """
    log_differences(Path(config.run.output_dir), config)
    store = CheckpointStore(Path(config.run.output_dir) / "checkpoints", config.checkpoint.keep_last)
    if store.committed_steps() and config.run.resume == "never":
        raise UserError(
            f"run.resume=never but {config.run.output_dir} holds checkpoints: give another run.output_dir, or run.resume=auto"
        )
    manifest = store.latest()
    if manifest is None:
        if config.run.resume == "must":
            raise UserError(f"run.resume=must but {config.run.output_dir} holds no checkpoint: use run.resume=auto")
        return None, {}
    saved = json.loads((store.part(manifest.step, ACTOR) / IDENTITY_FILE).read_bytes())
    require_same(saved, run_identity(config), config.run.output_dir)
    if config.algorithm.uses_critic:
        require_critic_checkpoint(manifest)
    return manifest, saved


def _training_prompts(config: PPOActorConfig, tokenizer: PreTrainedTokenizerBase) -> TrainingRows[Prompt]:
    whole = config.algorithm.old_logprobs == "sampler"
    training = load_training_prompts(config.data, tokenizer, whole_distribution=whole)
    for report in training.reports:
        log.info("%s", report)
    return training


def _validation_prompts(config: PPOActorConfig, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    if not config.data.val_path:
        return []
    prompts, report = load_prompts(config.data.val_path, config.data, tokenizer)
    log.info("%s", report)
    return prompts


def _optimizer_steps_per_rollout(config: PPOActorConfig) -> int:
    return config.algorithm.ppo_epochs * config.algorithm.mini_batches


def _validate(config: PPOActorConfig, prompts: list[Prompt], producer: Producer, version: int) -> dict[str, float]:
    algorithm = config.algorithm
    sampled = producer.sample(
        prompts,
        samples_per_prompt=algorithm.val_samples_per_prompt,
        run_seed=config.run.seed + VALIDATION_SEED_OFFSET,
        version=version,
    )
    return validation_metrics(sampled, pass_score=algorithm.val_pass_score)


Sources = dict[str, tuple[Scorer, float]]
"""Rewards by name, with their weights."""


def _sources(config: PPOActorConfig, prompts: Sequence[Prompt], ranks: Ranks, store: CheckpointStore) -> Sources:
    """The reward sources in use, but the critic server."""
    reward = config.reward
    sources: Sources = {}
    if reward.server.weight != 0:
        conversations = any(prompt.chat is not None and prompt.chat.question is None for prompt in prompts)
        model = wait_together(
            ranks,
            store,
            partial(
                served_by,
                reward.server,
                log.info,
                conversations=conversations,
                needs_bits=bool(config.run.deterministic),
            ),
        )
        server = RewardServerScorer(reward.server, model, prompt_template=config.data.prompt_template, rank=ranks.rank)
        sources["server"] = server, reward.server.weight
    verdicts = Path(config.run.output_dir) / "verdicts"
    fields = columns(prompt.metadata for prompt in prompts)
    return sources | text_sources(reward, fields, verdicts=verdicts, rank=ranks.rank)


def _scorer(config: PPOActorConfig, critic: RemoteCritic | None, sources: Sources, *, values_late: bool) -> Scorer:
    """All reward sources in use, and the critic's values unless they come ``values_late``."""
    weight = config.reward.critic.weight
    values = config.algorithm.uses_critic and not values_late
    if critic is not None and (values or weight != 0):
        want: Want = "rewards" if not values else "both" if weight != 0 else "values"
        sources = {"critic": (RemoteCriticScorer(critic, want=want), weight), **sources}
    return CombinedScorer(sources, on_error=config.reward.on_error)


def _meet_critic(
    config: PPOActorConfig, critic: RemoteCritic | None, tokenizer: PreTrainedTokenizerBase, policy: PreTrainedModel,
    max_length: int, ranks: Ranks, store: CheckpointStore,
) -> None:  # fmt: skip
    """Wait for the critic server, if the run has one, and check that it fits.

    Raises:
        UserError: it does not, or does not answer in time.
    """
    if critic is None:
        return
    status = wait_together(ranks, store, partial(critic.wait_until_ready, log.info))
    needs_rewards = config.reward.critic.weight != 0
    if needs_rewards:
        check_reward_template(
            f"the reward model of the critic server at {critic.address}", status.templates, config.data
        )
    status = critic.handshake(
        tokenizer_digest=tokenizer_digest(tokenizer),
        vocab_size=policy.config.get_text_config().vocab_size,
        needs_rewards=needs_rewards,
        needs_critic=config.algorithm.uses_critic,
        needs_bits=bool(config.run.deterministic),
    )
    if "critic" in status.roles and not config.algorithm.uses_critic and ranks.is_first:
        log.warning(
            "%s holds a critic, which algorithm.advantage_estimator=%s does not use: start it with "
            "value_model.enabled=false, and it needs only the reward model's memory",
            critic.where, config.algorithm.advantage_estimator,
        )  # fmt: skip
    if status.max_length < max_length:
        raise UserError(
            f"sequences may reach {max_length} tokens but the critic server takes at most {status.max_length}: lower "
            "data.max_prompt_length or generation.max_length, or serve a reward model with more positions"
        )


def _policy_model(config: PPOActorConfig, model: PreTrainedModel) -> PolicyModel:
    if config.model.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return PolicyModel(model, temperature=config.generation.temperature, compile_backbone=config.model.compile)


def _reference(config: PPOActorConfig, policy: Engine, device: torch.device, ranks: Ranks) -> Reference:
    if not config.model.has_second_model:
        return AdaptersOff(policy, policy.module, config.engine, device, ranks)
    model = _policy_model(config, load_causal_lm(config.model.reference_model))
    offload = config.model.reference == "cpu_offload" or config.placement.in_turns
    shards = config.engine.zero_stage == 3 and not offload
    forward = partial(sharded, config=config.engine, device=device) if shards else None
    return FrozenCopy(model, config.engine, device, ranks, cpu_offload=offload, sharded=forward)
