"""``RemoteRewardModel``: the reward model of a reward-only server, or of one that also has a critic."""

from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from nemo_style_rlhf.critic_service import protocol
from nemo_style_rlhf.critic_service.client import ServerClient, split
from nemo_style_rlhf.transport import messages
from nemo_style_rlhf.transport.messages import Array


class RemoteRewardModel(ServerClient):
    """Client of one server of a reward model. It changes nothing there, and needs neither handshake nor lease."""

    def score_text(
        self, prompts: Sequence[str], responses: Sequence[str], *, rendered: bool = False
    ) -> "Future[Array]":
        """Rewards float32 [B] of responses to prompts, tokenised by the server as its reward model was trained.

        The policy's tokenizer may be another one. Big batches are split.

        Args:
            rendered: prompts come from a chat template that wrote all special tokens, of the server's tokenizer; else they
                are a user's own words, which the server puts the template of its reward model around.
        """
        return self._infer_pool.submit(self._score_text, list(prompts), list(responses), rendered)

    def _score_text(self, prompts: list[str], responses: list[str], rendered: bool) -> Array:
        status = self.status()
        self.require_rewards(status)
        sizes = [messages.text_nbytes((p.encode(), r.encode())) for p, r in zip(prompts, responses, strict=True)]
        rewards = np.empty(len(prompts), dtype=np.float32)
        for rows in split(sizes, min(self._config.max_request_bytes, status.max_request_bytes)):
            texts = [prompts[row] for row in rows], [responses[row] for row in rows]
            inputs = protocol.reward_tensors(*texts, rendered=rendered)
            answer = self._connection.call(protocol.REWARD_INFER, inputs, timeout_s=self._config.infer_timeout_s)
            rewards[rows] = answer[protocol.REWARDS.name]
        return rewards
