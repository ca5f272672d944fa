"""A real reward server process for tests, and what transformers says of its model's rewards."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from nemo_style_rlhf.schema.reward import RewardServerConfig
from nemo_style_rlhf.wire.messages import Array
from tests.support.critic_server import CriticServer


@dataclass
class RewardServer(CriticServer):
    """`servers/serve_reward_model.py` as a user starts it."""

    def command(self, *extra: str) -> list[str]:
        return [
            str(self.python), "servers/serve_reward_model.py", f"model.path={self.model}", "model.dtype=float32",
            "run.num_threads=1", f"server.backend={self.backend}", f"server.port={self.port}",
            f"server.ready_file={self.ready_file}", *self.overrides, *extra,
        ]  # fmt: skip

    def config(self, **changes: object) -> RewardServerConfig:
        return RewardServerConfig(**{"port": self.port, "retries": 0, **changes})  # type: ignore[arg-type]


def plain_rewards(model_dir: Path, prompts: list[str], responses: list[str]) -> Array:
    """Rewards [N] that transformers computes for prompt, response and end-of-text, one sequence at a time."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForSequenceClassification.from_pretrained(model_dir).eval()
    rewards = []
    for prompt, response in zip(prompts, responses, strict=True):
        ids = [*tokenizer(prompt)["input_ids"], *tokenizer(response)["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            rewards.append(float(model(torch.tensor([ids])).logits[0, 0]))
    return np.array(rewards, dtype=np.float32)
