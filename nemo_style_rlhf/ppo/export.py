"""The trained policy as a Hugging Face directory, and its adapter alone."""

import logging
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from nemo_style_rlhf.checkpoint.files import storage_errors
from nemo_style_rlhf.checkpoint.owner import require_owned
from nemo_style_rlhf.data.templates import read_template, write_template
from nemo_style_rlhf.distributed.ranks import Ranks
from nemo_style_rlhf.engine.engine import Engine
from nemo_style_rlhf.engine.export import export_engine
from nemo_style_rlhf.models.lora import save_adapter
from nemo_style_rlhf.schema.actor import PPOActorConfig

log = logging.getLogger(__name__)


def export_policy(
    engine: Engine, ranks: Ranks, output_dir: Path, name: str, config: PPOActorConfig, *, tokenizer: PreTrainedTokenizerBase
) -> None:  # fmt: skip
    """Write ``<output_dir>/<name>``, and with adapters ``<name>_adapter``. Every rank calls this; the first writes.

    Raises:
        StorageError: the disk refused.
    """
    directory, model, data = output_dir / name, config.model, config.data
    write_notes = partial(
        write_template, template=data.prompt_template, tokenizer=tokenizer, chat_template=data.chat_template,
        append_eos=read_template(model.path).get("append_eos", True),
    )  # fmt: skip
    require_owned()
    with storage_errors(f"the policy's export {directory}"):
        export_engine(engine, ranks, directory, model, write_notes=write_notes)
        if model.lora.rank and ranks.is_first:
            save_adapter(engine.module.hf, output_dir / f"{name}_adapter", model, export=directory)
    if ranks.is_first:
        log.info("exported the policy to %s", directory)
