"""Description of the served checkpoint in ``critic_status``."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from nemo_style_rlhf.critic_service.protocol import Limits
from nemo_style_rlhf.data.templates import read_template
from nemo_style_rlhf.models.digests import module_digest, tokenizer_digest
from nemo_style_rlhf.models.scalar import ScalarModel

MAX_LENGTH_WITHOUT_A_LIMIT = 2**20


@dataclass(frozen=True)
class Identity:
    """Fields as in :class:`protocol.Status`."""

    model_digest: str
    config_digest: str
    tokenizer_digest: str
    vocab_size: int
    max_length: int
    templates: dict[str, Any]

    @classmethod
    def of(
        cls,
        model: ScalarModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        path: str,
        max_length: int,
        decisive: dict[str, Any],
    ) -> "Identity":
        """
        Args:
            path: folder of the model and of the note about its templates.
            max_length: the configured limit in tokens; 0 takes the model's own.
            decisive: all settings that decide the numbers.
        """
        of_model = getattr(model.hf.config, "max_position_embeddings", None)
        limits = [limit for limit in (max_length, of_model) if limit]
        return cls(
            model_digest=module_digest(model),
            config_digest=hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest(),
            tokenizer_digest=tokenizer_digest(tokenizer),
            vocab_size=model.hf.get_input_embeddings().num_embeddings,
            max_length=min(limits, default=MAX_LENGTH_WITHOUT_A_LIMIT),
            templates=read_template(path),
        )

    def limits(self, max_request_bytes: int) -> Limits:
        """The bounds of a request to the served model."""
        return Limits(self.vocab_size, self.max_length, max_request_bytes)
