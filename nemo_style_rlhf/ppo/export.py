"""The trained policy as a Hugging Face directory, and its adapter alone."""

import logging
from functools import partial
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nemo_style_rlhf.checkpoint.files import storage_errors
from nemo_style_rlhf.checkpoint.owner import require_owned
from nemo_style_rlhf.data.templates import read_template, write_template
from nemo_style_rlhf.distributed.ranks import Ranks
from nemo_style_rlhf.engine.engine import Engine
from nemo_style_rlhf.engine.export import host_weights
from nemo_style_rlhf.models.export import export_model
from nemo_style_rlhf.models.lora import adapter_weights, save_adapter
from nemo_style_rlhf.schema.actor import PPOActorConfig

log = logging.getLogger(__name__)


class PolicyCopy:
    """A copy of the policy's weights in host memory, which can be written while the policy trains on."""

    def __init__(
        self, engine: Engine, ranks: Ranks, config: PPOActorConfig, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        """Take the copy. Every rank calls this; the first keeps the weights, and writes them."""
        self._hf, self._config, self._tokenizer = engine.module.hf, config, tokenizer
        self._weights = host_weights(engine)
        self._adapter: dict[str, Tensor] = {}
        if config.model.lora.rank and ranks.is_first:
            self._adapter = adapter_weights(self._hf)

    def write(self, directory: Path) -> None:
        """Write ``directory``, and with adapters ``<directory>_adapter``."""
        write_policy(self._hf, directory, self._config, self._tokenizer, weights=self._weights, adapter=self._adapter)

    def drop(self) -> None:
        self._weights.clear()
        self._adapter.clear()


def write_policy(
    hf: PreTrainedModel, directory: Path, config: PPOActorConfig, tokenizer: PreTrainedTokenizerBase, *,
    weights: dict[str, Tensor] | None = None, adapter: dict[str, Tensor] | None = None,
) -> None:  # fmt: skip
    """Write the policy ``hf`` as ``directory``, and with adapters ``<directory>_adapter``; by default with its own weights."""
    model, data = config.model, config.data
    write_notes = partial(
        write_template, template=data.prompt_template, tokenizer=tokenizer, chat_template=data.chat_template,
        append_eos=read_template(model.path).get("append_eos", True),
    )  # fmt: skip
    export_model(
        hf, directory, source=model.path, weights=weights, write_notes=write_notes,
        trust_remote_code=model.trust_remote_code,
    )  # fmt: skip
    if model.lora.rank:
        save_adapter(hf, directory.with_name(f"{directory.name}_adapter"), model, weights=adapter, export=directory)


def export_policy(
    engine: Engine, ranks: Ranks, directory: Path, config: PPOActorConfig, *, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Write ``directory``, and with adapters ``<directory>_adapter``. Every rank calls this; the first writes.

    Raises:
        StorageError: the disk refused.
    """
    require_owned()
    copy = PolicyCopy(engine, ranks, config, tokenizer)
    if ranks.is_first:
        with storage_errors(f"the policy's export {directory}"):
            copy.write(directory)
        log.info("exported the policy to %s", directory)
