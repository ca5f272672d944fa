"""Exports the trained policy as a Hugging Face directory, and its adapter separately."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nemo_style_rlhf.checkpoint.files import storage_errors
from nemo_style_rlhf.checkpoint.owner import require_owned
from nemo_style_rlhf.data.template_files import read_template, write_template
from nemo_style_rlhf.distributed.ranks import Ranks
from nemo_style_rlhf.engine.engine import Engine
from nemo_style_rlhf.engine.export import host_weights
from nemo_style_rlhf.models.export import export_model, rehearse_export
from nemo_style_rlhf.models.lora import adapter_weights, save_adapter
from nemo_style_rlhf.ppo.parts import Parts
from nemo_style_rlhf.schema.actor import PPOActorConfig
from nemo_style_rlhf.schema.placement import TRAIN

log = logging.getLogger(__name__)


class PolicyCopy:
    """A copy of the policy's weights in host memory, to write while the policy continues to train."""

    def __init__(
        self, engine: Engine, ranks: Ranks, config: PPOActorConfig, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        """Take the copy. Every rank calls this; the first keeps the weights, and writes them."""
        self._hf, self._config, self._tokenizer = engine.module.hf, config, tokenizer
        self._weights = host_weights(engine)
        self._adapter: dict[str, Tensor] = {}
        if config.model.lora.rank and ranks.is_first:
            self._adapter = adapter_weights(self._hf)

    def write(self, directory: Path, notes: Mapping[str, str] = {}) -> None:
        """Write ``directory``, with the texts ``notes`` as further files, and with adapters ``<directory>_adapter``."""
        write_policy(
            self._hf,
            directory,
            self._config,
            self._tokenizer,
            weights=self._weights,
            adapter=self._adapter,
            notes=notes,
        )

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in [*self._weights.values(), *self._adapter.values()])

    def drop(self) -> None:
        self._weights.clear()
        self._adapter.clear()


def write_policy(
    hf: PreTrainedModel, directory: Path, config: PPOActorConfig, tokenizer: PreTrainedTokenizerBase, *,
    weights: dict[str, Tensor] | None = None, adapter: dict[str, Tensor] | None = None, notes: Mapping[str, str] = {},
) -> None:  # fmt: skip
    """Write the policy ``hf`` as ``directory``, and with adapters ``<directory>_adapter``; by default with its own weights.

    Args:
        notes: texts of further files.
    """
    export_model(hf, directory, weights=weights, **_beside_weights(config, tokenizer, notes))
    if config.model.lora.rank:
        adapter_directory = directory.with_name(f"{directory.name}_adapter")
        save_adapter(hf, adapter_directory, config.model, weights=adapter, export=directory)


def rehearse_policy(hf: PreTrainedModel, config: PPOActorConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise UserError if :func:`write_policy` would fail after the training."""
    rehearse_export(hf, **_beside_weights(config, tokenizer, {}))


def _beside_weights(
    config: PPOActorConfig, tokenizer: PreTrainedTokenizerBase, notes: Mapping[str, str]
) -> dict[str, Any]:
    model, data = config.model, config.data

    def write_notes(directory: Path) -> None:
        write_template(
            directory, data.prompt_template, tokenizer, data.chat_template,
            append_eos=read_template(model.path).get("append_eos", True),
        )  # fmt: skip
        for name, text in notes.items():
            (directory / name).write_text(text)

    return {"source": model.path, "write_notes": write_notes, "trust_remote_code": model.trust_remote_code}


def export_policy(parts: Parts, config: PPOActorConfig, name: str, notes: Mapping[str, str] = {}) -> None:
    """Write the folder ``name`` of the run, and with adapters ``<name>_adapter``. Every rank calls this; the first writes.

    Args:
        notes: texts of further files in the folder.

    Raises:
        StorageError: the disk refused; on every rank.
    """
    parts.residency.enter(TRAIN)
    require_owned()
    copy, directory = PolicyCopy(parts.engine, parts.ranks, config, parts.tokenizer), Path(config.run.output_dir) / name

    def write() -> None:
        with storage_errors(f"the policy's export {directory}", folder=directory, needed=copy.nbytes):
            copy.write(directory, notes)
        log.info("exported the policy to %s", directory)

    parts.ranks.on_first(write)
