"""The reward-only server: rewards of texts."""

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch

from nemo_style_rlhf.critic_service import protocol, validation
from nemo_style_rlhf.critic_service.batches import Batches
from nemo_style_rlhf.critic_service.compute_lock import ComputeLock
from nemo_style_rlhf.critic_service.identity import Identity
from nemo_style_rlhf.critic_service.reward_model import RewardModel
from nemo_style_rlhf.critic_service.service import Handler, Service, Tensors
from nemo_style_rlhf.critic_service.worker_group import WorkerGroup
from nemo_style_rlhf.data.reward_text import RewardText
from nemo_style_rlhf.data.template_files import read_template
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.models.compiled import compile_forward
from nemo_style_rlhf.models.loading import load_tokenizer
from nemo_style_rlhf.models.scalar import PooledModel, pad_token
from nemo_style_rlhf.models.scalar_loading import load_reward_model
from nemo_style_rlhf.schema.chat import Chat
from nemo_style_rlhf.schema.common import row_multiple
from nemo_style_rlhf.schema.reward_server import RewardServerProcessConfig
from nemo_style_rlhf.wire.messages import Array, Code, ProtocolError


def reward_handler(reward: RewardModel, limits: protocol.Limits, compute_lock: ComputeLock) -> Handler:
    """``reward_infer`` of a reward model."""

    def infer(inputs: Mapping[str, Array]) -> Tensors:
        request = validation.read_reward(inputs, limits)
        texts = zip(request.prompts, request.responses, strict=True)
        sequences = [_token_ids(reward.text, row, *pair) for row, pair in enumerate(texts)]
        tokenised = validation.read_tokenised(sequences, limits)
        with compute_lock.models(f"scoring of {len(sequences)} texts"):
            return {protocol.REWARDS.name: reward.rewards(tokenised)}

    return infer


def _token_ids(text: RewardText, row: int, prompt: str | Chat, response: str) -> list[int]:
    try:
        return text.token_ids(prompt, response)
    except UserError as error:
        raise ProtocolError(Code.INVALID, f"prompts[{row}]: {error!s:.500}") from error


def load_reward_server(config: RewardServerProcessConfig, device: torch.device, _: Path) -> Service:
    """Load the service. Raise :class:`UserError` for several ranks, or a checkpoint that is missing or not a reward model."""
    if (ranks := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise UserError(f"a reward server is one rank, WORLD_SIZE is {ranks}: start several servers instead")
    tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
    model = load_reward_model(
        config.model, normalize=config.reward.normalize_rewards, label_weights=config.reward.label_weights
    )
    if config.model.compile:
        compile_forward(model.hf if isinstance(model, PooledModel) else model)
    text = RewardText(
        config.model.path, tokenizer, append_eos=config.reward.append_eos, as_pair=isinstance(model, PooledModel)
    )
    identity = Identity.of(
        [model],
        tokenizer,
        path=config.model.path,
        reads_conversations=text.reads_conversations,
        max_length=config.reward.max_length,
        decisive={
            "reward": asdict(config.reward),
            "dtype": config.model.dtype,
            "templates": read_template(config.model.path),
        },
    )
    batches = Batches(
        micro_batch_tokens=config.reward.micro_batch_tokens,
        row_multiple=row_multiple(config.reward.row_multiple, device.type),
        pad_token_id=pad_token(model.hf),
        device=device,
    )
    compute_lock, limits = ComputeLock(), identity.limits(config.server.max_request_bytes)
    reward = RewardModel(model, text, batches, WorkerGroup())
    handlers = {protocol.REWARD_INFER: reward_handler(reward, limits, compute_lock)}
    return Service(identity, limits, ["reward"], handlers, compute_lock)
