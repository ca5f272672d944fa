"""Description of the served checkpoint in ``critic_status``."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from nemo_style_rlhf.critic_service.protocol import Limits
from nemo_style_rlhf.data.template_files import read_template
from nemo_style_rlhf.models.digests import module_digest, tokenizer_digest
from nemo_style_rlhf.models.scalar import PooledModel, ScalarModel, max_positions

MAX_LENGTH_WITHOUT_A_LIMIT = 2**20


@dataclass(frozen=True)
class Identity:
    """Fields as in :class:`protocol.Status`."""

    model_digest: str
    config_digest: str
    tokenizer_digest: str
    vocab_size: int
    max_length: int
    reads_conversations: bool
    templates: dict[str, Any]

    @classmethod
    def of(
        cls,
        models: Sequence[ScalarModel | PooledModel],
        tokenizer: PreTrainedTokenizerBase,
        *,
        path: str,
        reads_conversations: bool,
        max_length: int,
        decisive: dict[str, Any],
    ) -> "Identity":
        """Describe the served models.

        Args:
            models: the reward model, the critic, or both in this order. The limits are the smallest of all.
            path: folder with the note about templates.
            reads_conversations: True if there is a reward model that reads conversations of several turns.
            max_length: the configured limit in tokens; 0 takes the model's own.
            decisive: all settings that decide the numbers.
        """
        of_models = [max_positions(model.hf) for model in models]
        limits = [limit for limit in (max_length, *of_models) if limit]
        return cls(
            model_digest=module_digest(models[0]),
            config_digest=hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest(),
            tokenizer_digest=tokenizer_digest(tokenizer),
            vocab_size=min(model.hf.get_input_embeddings().num_embeddings for model in models),
            max_length=min(limits, default=MAX_LENGTH_WITHOUT_A_LIMIT),
            reads_conversations=reads_conversations,
            templates=read_template(path),
        )

    def limits(self, max_request_bytes: int) -> Limits:
        """The bounds of a request to the served model."""
        return Limits(self.vocab_size, self.max_length, max_request_bytes)
