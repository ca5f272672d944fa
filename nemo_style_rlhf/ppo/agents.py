"""Builds the runner of a policy's episodes, with an environment or a program."""

import logging
from collections.abc import Callable, Sequence
from functools import partial

from transformers import PreTrainedTokenizerBase

from nemo_style_rlhf.agents.api_requests import Offer
from nemo_style_rlhf.agents.environment import Action, Task
from nemo_style_rlhf.agents.events import Asked, Called, Emit, EpisodeSource
from nemo_style_rlhf.agents.gateway import Gateway
from nemo_style_rlhf.agents.workers import EpisodeWorkers
from nemo_style_rlhf.data.chat_templates import classify
from nemo_style_rlhf.data.encoding import Encoder
from nemo_style_rlhf.data.prompts import Prompt
from nemo_style_rlhf.distributed.ranks import Ranks
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
    config: PPOActorConfig, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], *, max_tokens: int, vocabulary: int,
    ranks: Ranks,
) -> EpisodeRunner:  # fmt: skip
    """Start the source of episodes: workers with an environment, or the gateway to programs. With agent.listen the gateway has
    one address, so only the first rank has it, and makes all episodes.

    Args:
        max_tokens: limit on all tokens of an episode.
        vocabulary: number of the policy's token ids.
        ranks: the ranks that call this: all, or only the first if engines sample.

    Raises:
        UserError: the environment's file cannot be used, the chat template refuses conversations of several turns, or vLLM knows
            no such parser of tool calls.
    """
    agent, encoder = config.agent, Encoder(tokenizer, chat_template=config.data.chat_template, today=config.data.today)
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
    if agent.listen is not None and ranks.size > 1:
        if not ranks.is_first:
            source = Elsewhere
        elif not generation.engines.count:
            log.warning(
                "agent.listen=%s is one address: the first of the %d ranks makes all episodes, and the others wait; "
                "generation.engines.count gives every device a part", agent.listen, ranks.size,
            )  # fmt: skip
    reader = None if agent.tool_parser is None else tool_call_reader(agent.tool_parser, tokenizer, tools)
    return EpisodeRunner(
        source, encoder, agent, max_length=config.generation.max_length, max_tokens=max_tokens,
        vocabulary=vocabulary, scores_text=bool(config.reward.weights), read_message=reader,
        takes_stop=config.generation.backend == "vllm",
    )  # fmt: skip


class Elsewhere:
    """A source that makes no episodes: another rank has them."""

    def __init__(self, emit: Emit) -> None: ...

    def start(self, episode: int, task: Task) -> None:
        raise AssertionError("episodes are made on the first rank")

    def answer(self, asked: Asked | Called, action: Action) -> None: ...

    def finish(self, asked: Asked | Called, reason: str = "") -> None: ...

    def waits_for(self, episode: int) -> str:
        raise AssertionError("episodes are made on the first rank")

    def forget(self) -> None: ...

    def close(self) -> None: ...
