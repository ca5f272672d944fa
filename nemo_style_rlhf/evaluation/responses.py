"""Stores the responses of each checkpoint before scoring: after a later failure they are not generated again."""

import dataclasses
import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from nemo_style_rlhf.checkpoint.files import storage_errors, write_atomically
from nemo_style_rlhf.checkpoint.owner import require_owned
from nemo_style_rlhf.data.prompts import Prompt
from nemo_style_rlhf.evaluation.samples import Sample
from nemo_style_rlhf.models.digests import model_fingerprint, rows_fingerprint
from nemo_style_rlhf.schema.evaluation import Checkpoint, EvaluationConfig

log = logging.getLogger(__name__)
OF_PROMPTS = ("label", "metadata", "chat")
"""Fields of a sample that its prompt has."""
OF_SCORING = ("score", "extra")
CAPACITY = ("kv_cache_gib", "gpu_memory_utilization", "tensor_parallel_size", "max_num_seqs", "max_num_batched_tokens")
"""Settings of the generator that change where and how fast it samples, but not the samples."""


class Responses:
    """The responses of one checkpoint of one evaluation, in ``<run.output_dir>/responses``."""

    def __init__(self, config: EvaluationConfig, checkpoint: Checkpoint, prompts: Sequence[Prompt]) -> None:
        self._path = Path(config.run.output_dir) / "responses" / f"{quote(checkpoint.name, safe=' ')}.jsonl"
        self._name, self._prompts = checkpoint.name, {prompt.prompt_id: prompt for prompt in prompts}
        generation = {
            name: value for name, value in dataclasses.asdict(config.generation).items() if name not in CAPACITY
        }
        content = {
            "model": model_fingerprint(checkpoint.path), "dtype": config.model.dtype, "generation": generation,
            "prompts": rows_fingerprint((prompt.prompt_id, prompt.token_ids) for prompt in prompts),
            "sampling": [repr(prompt.sampling) for prompt in prompts], "seed": config.run.seed,
            "samples_per_prompt": config.samples_per_prompt, "special_tokens": config.reward.special_tokens,
        }  # fmt: skip
        self._identity = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()

    def load(self) -> list[Sample] | None:
        """The responses that an earlier start wrote with the same model, prompts and settings; None without."""
        try:
            first, *rows = map(json.loads, self._path.read_text(encoding="utf-8").splitlines())
            if first != {"identity": self._identity, "responses": len(rows)}:
                return None
            return [self._sample(row) for row in rows]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            log.warning("%s is damaged: the responses of %s are generated again", self._path, self._name)
            return None

    def _sample(self, row: dict[str, Any]) -> Sample:
        prompt = self._prompts[row["prompt_id"]]
        row["token_ids"] = tuple(row["token_ids"])
        return Sample(**row, label=prompt.label, metadata=prompt.metadata, chat=prompt.chat)

    def store(self, samples: Sequence[Sample]) -> None:
        """Write ``samples`` for a later start.

        Raises:
            StorageError: the disk refused.
        """
        require_owned()
        lines = [{"identity": self._identity, "responses": len(samples)}, *map(_row, samples)]
        with storage_errors(self._path, "make room or change run.output_dir"):
            write_atomically(self._path, "".join(json.dumps(line) + "\n" for line in lines).encode())


def _row(sample: Sample) -> dict[str, Any]:
    names = (field.name for field in dataclasses.fields(sample))
    return {name: getattr(sample, name) for name in names if name not in (*OF_PROMPTS, *OF_SCORING)}
