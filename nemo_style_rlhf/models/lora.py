"""LoRA adapters (arXiv 2106.09685), put into a model's own linear layers by peft."""

import json
import logging
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from nemo_style_rlhf.checkpoint.files import published
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.models.digests import model_fingerprint
from nemo_style_rlhf.models.loading import first_line
from nemo_style_rlhf.schema.common import ModelConfig

if TYPE_CHECKING:
    from peft import LoraConfig  # its import takes seconds; runs without adapters skip it

log = logging.getLogger(__name__)
ADAPTER = "default"
CARRIED_FILES = ("prompt_template.json", "chat_template.jinja", "generation_config.json")
"""Files next to a model that are copied with it."""
MODEL_CONFIG = "model_config.json"
"""File next to an adapter: config of the trained model, with what training added (pad token, reward statistics)."""
HEAD = "score"
"""The head of a scalar model. It is trained in full."""
START = "the model in model.path"
"""Name, in a checkpoint's identity, of the model from which training started."""
NOT_ADAPTED = (HEAD, "lm_head", "embed_out")
"""Last names of linear layers that get no adapter."""
_BASE, _WHOLE = ".base_layer.", f".modules_to_save.{ADAPTER}."


def add_lora(hf: PreTrainedModel, model: ModelConfig) -> None:
    """Freeze ``hf`` and give it trainable adapters as configured in ``model.lora``; with rank 0, do nothing.

    A new adapter changes no output: it starts as the product of noise and zeros.

    Raises:
        UserError: a name in ``model.lora.target_modules`` names no layer that can have an adapter, or peft refuses one.
    """
    if not model.lora.rank:
        return
    from peft import inject_adapter_in_model

    experts, given = expert_blocks(hf), model.lora.target_modules or []
    layers = _linear_layers(hf)
    unknown = [name for name in given if not any(f".{layer}".endswith(f".{name}") for layer in layers)]
    if unknown:
        frozen = " outside of the blocks with experts, which stay frozen" if experts else ""
        raise UserError(
            f"model.lora.target_modules={given}: {unknown[0]} names no linear layer of {type(hf).__name__}{frozen}: give names "
            "such as q_proj, or null for all linear layers"
        )
    config = _peft_config(hf, model)
    try:
        inject_adapter_in_model(config, hf, ADAPTER)
    except ValueError as error:
        raise UserError(
            f"peft cannot put adapters into {type(hf).__name__} ({first_line(error)}): name other layers in "
            "model.lora.target_modules"
        ) from error
    if experts:
        log.info(
            "%s has experts: they and all else in their blocks (%s) stay frozen, adapters go to %s",
            model.path, ", ".join(sorted(experts)), ", ".join(given or _last_names(layers)),
        )  # fmt: skip


def expert_blocks(hf: PreTrainedModel) -> set[str]:
    """Last names of the blocks with experts, such as ``mlp``; empty for a dense model."""
    return {
        name.split(".")[-2]
        for name, part in hf.named_modules()
        if not isinstance(part, nn.Conv1d) and any(parameter.ndim == 3 for parameter in part.parameters(recurse=False))
    }


def lora_identity(model: ModelConfig) -> dict[str, Any]:
    """Settings that a checkpoint must share to be resumed: the original model and the adapters."""
    return {START: model_fingerprint(model.path), "model.lora": asdict(model.lora)}


def has_lora(module: nn.Module) -> bool:
    return any(hasattr(part, "lora_A") for part in module.modules())


@contextmanager
def adapters_off(module: nn.Module) -> Iterator[None]:
    """Switch adapters off within the context: ``module`` then computes as before training, and is its own reference."""
    layers: list[Any] = [part for part in module.modules() if hasattr(part, "lora_A")]
    for layer in layers:
        layer._disable_adapters = True  # enable_adapters() would also freeze the adapters
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def merged(weights: Iterable[tuple[str, Tensor]], module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The named ``weights`` of ``module`` with adapters merged into their layers, under the names of a model without adapters."""
    layers: dict[str, Any] = {name: part for name, part in module.named_modules() if hasattr(part, "lora_A")}
    for name, tensor in weights:
        if ".lora_" in name or ".original_module." in name:
            continue
        layer, base, rest = name.partition(_BASE)
        if base and rest == "weight":
            delta = layers[layer].get_delta_weight(ADAPTER).detach()
            tensor = (tensor.float() + delta.float()).to(tensor.dtype)
        yield name.replace(_BASE, ".").replace(_WHOLE, "."), tensor
        del tensor  # the next one may be as large


def adapter_weights(hf: PreTrainedModel) -> dict[str, Tensor]:
    """Copies in host memory of the adapter's weights, and of the head that is trained in full, under peft's names."""
    return {
        f"base_model.model.{name}".replace(f".{ADAPTER}.", ".").replace(".modules_to_save.", "."): tensor.to(
            "cpu", copy=True
        ).contiguous()
        for name, tensor in hf.state_dict().items()
        if ".lora_" in name or _WHOLE in name
    }


def save_adapter(
    hf: PreTrainedModel, directory: Path, model: ModelConfig, *, weights: dict[str, Tensor] | None = None,
    export: Path | None = None,
) -> None:  # fmt: skip
    """Write only the adapter, as peft does: ``PeftModel.from_pretrained(base, directory)`` loads it.

    Args:
        weights: its :func:`adapter_weights`, if ``hf`` has been trained further since.
        export: the merged model's folder, whose notes (prompt template, chat template) are copied to the adapter, too.
    """
    config = _peft_config(hf, model)
    config.inference_mode = True
    with published(directory) as beside:
        config.save_pretrained(str(beside))
        save_file(weights or adapter_weights(hf), beside / "adapter_model.safetensors")
        (beside / MODEL_CONFIG).write_text(hf.config.to_json_string(use_diff=False))
        if export is not None:
            copy_notes(str(export), beside)


def merge_adapter(directory: str, target: Path, *, trust_remote_code: bool = False) -> None:
    """Merge the adapter in ``directory`` into the model it was trained from and write a plain Hugging Face directory.

    Raises:
        UserError: the adapter is missing, or its base model is no longer where it was.
    """
    from peft import PeftModel, TaskType
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    from nemo_style_rlhf.models.heads import stored_head
    from nemo_style_rlhf.models.scalar import add_bias, scalar_class

    path = Path(directory) / "adapter_config.json"
    if not path.is_file():
        raise UserError(f"there is no adapter at {directory} (no adapter_config.json): give the folder that holds it")
    settings = json.loads(path.read_text())
    base = settings["base_model_name_or_path"]
    scalar = settings["task_type"] == TaskType.SEQ_CLS.value
    trained_config = Path(directory) / MODEL_CONFIG
    config = AutoConfig.from_pretrained(
        trained_config if trained_config.is_file() else base, trust_remote_code=trust_remote_code
    )
    config.use_cache = True
    head = stored_head(base) if scalar else None
    auto_class: Any = scalar_class(config, head) if scalar else AutoModelForCausalLM
    try:
        hf = auto_class.from_pretrained(
            base, config=config, trust_remote_code=trust_remote_code,
            ignore_mismatched_sizes=scalar,  # the adapter brings its own head
        )  # fmt: skip
        if head is not None and head.has_bias and hf.score.bias is None:
            add_bias(hf, torch.zeros(hf.score.out_features))  # as the adapter's head has one
        whole = PeftModel.from_pretrained(hf, directory).merge_and_unload()
        whole.generation_config = GenerationConfig.from_model_config(whole.config)  # the base's own is copied
        with published(target) as beside:
            whole.save_pretrained(beside)
            AutoTokenizer.from_pretrained(base, trust_remote_code=trust_remote_code).save_pretrained(beside)
            copy_notes(base, beside)
            copy_notes(directory, beside)
    except (OSError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"the adapter at {directory} cannot be merged into {base} as {target} ({reason}): put that model back, or correct "
            "base_model_name_or_path in adapter_config.json"
        ) from error


def copy_notes(source: str, target: Path) -> None:
    """Copy the ``CARRIED_FILES`` of ``source``: a folder, or a hub name. Loading it has fetched some of its files."""
    for name in CARRIED_FILES:
        path: object = Path(source) / name
        if not Path(source).exists():
            path = try_to_load_from_cache(source, name)
        if isinstance(path, str | Path) and Path(path).is_file():
            shutil.copy(path, target / name)


def _peft_config(hf: PreTrainedModel, model: ModelConfig) -> "LoraConfig":
    from peft import LoraConfig, TaskType

    scalar = hasattr(hf, HEAD)
    return LoraConfig(
        task_type=TaskType.SEQ_CLS if scalar else TaskType.CAUSAL_LM,
        r=model.lora.rank,
        lora_alpha=model.lora.alpha,
        lora_dropout=model.lora.dropout,
        target_modules=model.lora.target_modules or _last_names(_linear_layers(hf)),
        modules_to_save=[HEAD] if scalar else None,
        base_model_name_or_path=model.path,
    )


def _linear_layers(hf: PreTrainedModel) -> list[str]:
    """Names of all linear layers outside the head and blocks with experts; once some have adapters, only the names of these.

    transformers fuses experts into tensors, and peft takes the names of the dense layers next to them for the experts' own when
    it loads an adapter.
    """
    adapted = [name.removesuffix(".base_layer") for name, _ in hf.named_modules() if name.endswith(".base_layer")]
    if adapted:
        return adapted
    experts = expert_blocks(hf)
    layers = [name for name, part in hf.named_modules() if isinstance(part, (nn.Linear, Conv1D))]
    return [name for name in layers if not experts & {*name.split(".")} and name.split(".")[-1] not in NOT_ADAPTED]


def _last_names(layers: Iterable[str]) -> list[str]:
    return sorted({name.split(".")[-1] for name in layers})
