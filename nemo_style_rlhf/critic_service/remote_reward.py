"""``RemoteRewardModel``: the reward model of a reward-only server, or of one that also has a critic."""

from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from nemo_style_rlhf.critic_service import protocol
from nemo_style_rlhf.critic_service.client import ServerClient, split
from nemo_style_rlhf.schema.chat import Chat
from nemo_style_rlhf.wire import messages
from nemo_style_rlhf.wire.messages import Array


class RemoteRewardModel(ServerClient):
    """Client of one server of a reward model. It changes nothing there, and needs neither handshake nor lease."""

    def score_text(self, prompts: Sequence[str | Chat], responses: Sequence[str]) -> "Future[Array]":
        """Rewards float32 [B] of responses to prompts, tokenized by the server as its reward model was trained.

        The policy's tokenizer may be another one. Big batches are split.

        Args:
            prompts: all a user's own words, for the template of the server's reward model; or all conversations, for its chat
                template.
        """
        return self._infer_pool.submit(self._score_text, list(prompts), list(responses))

    def _score_text(self, prompts: list[str | Chat], responses: list[str]) -> Array:
        status = self.status()
        self.require_rewards(status)
        sizes = [
            messages.text_nbytes((protocol.prompt_text(prompt).encode(), response.encode()))
            for prompt, response in zip(prompts, responses, strict=True)
        ]
        rewards = np.empty(len(prompts), dtype=np.float32)
        for rows in split(sizes, min(self._config.max_request_bytes, status.max_request_bytes)):
            inputs = protocol.reward_tensors([prompts[row] for row in rows], [responses[row] for row in rows])
            answer = self._connection.call(protocol.REWARD_INFER, inputs, timeout_s=self._config.infer_timeout_s)
            rewards[rows] = answer[protocol.REWARDS.name]
        return rewards
