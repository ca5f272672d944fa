"""Builds what runs the episodes of a policy with an environment."""

import logging
from collections.abc import Callable, Sequence
from functools import partial

from transformers import PreTrainedTokenizerBase

from nemo_style_rlhf.agents.api_requests import Offer
from nemo_style_rlhf.agents.events import Emit, EpisodeSource
from nemo_style_rlhf.agents.gateway import Gateway
from nemo_style_rlhf.agents.history import classify
from nemo_style_rlhf.agents.workers import EpisodeWorkers
from nemo_style_rlhf.data.encoding import Encoder
from nemo_style_rlhf.data.prompts import Prompt
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.generation.tool_calls import tool_call_reader
from nemo_style_rlhf.rollout.episodes import EpisodeRunner
from nemo_style_rlhf.schema.actor import PPOActorConfig

log = logging.getLogger(__name__)
HISTORY = {
    "keep": "the policy goes on reading what it has read and sampled (agent.history=keep)",
    "template": "each rewrite begins a row of its own (agent.history=template)",
}


def make_runner(
    config: PPOActorConfig, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], *, max_tokens: int
) -> EpisodeRunner:
    """Start what makes episodes: workers with an environment, or the gateway to programs.

    Args:
        max_tokens: limit on all tokens of an episode.

    Raises:
        UserError: the environment's file cannot be used, the chat template refuses conversations of several turns, or vLLM knows
            no such parser of tool calls.
    """
    agent, encoder = config.agent, Encoder(tokenizer, chat_template=config.data.chat_template)
    chats = [prompt.chat for prompt in prompts if prompt.chat is not None]
    tools = next((chat.tools for chat in chats if chat.tools), None)
    if chats:
        found = classify(encoder, tools)
        if found.kind == "refuses":
            raise UserError(f"{found.reason} Set data.chat_template to one that can.")
        kept = f": {HISTORY[agent.history]}" if found.kind == "rewrites" else ""
        log.info("%s%s", found.reason.removesuffix("."), kept)
    generation = config.generation
    offer = Offer(
        temperature=generation.temperature, top_p=generation.top_p,
        max_length=min(generation.max_length, max_tokens),
    )  # fmt: skip
    source: Callable[[Emit], EpisodeSource] = partial(EpisodeWorkers, agent)
    if agent.serves_programs:
        source = partial(
            Gateway, agent, offer=offer, attempts=agent.attempts, episode_timeout_s=agent.episode_timeout_s
        )
    reader = None if agent.tool_parser is None else tool_call_reader(agent.tool_parser, tokenizer, tools)
    return EpisodeRunner(
        source, encoder, agent, max_length=config.generation.max_length, max_tokens=max_tokens,
        read_message=reader, takes_stop=config.generation.backend == "vllm",
    )  # fmt: skip
