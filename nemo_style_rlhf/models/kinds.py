"""Finds the kind of model in a checkpoint by its config.json and the names of its weights; refuses one that does not fit.

Needs neither torch nor transformers, so programs can check before loading them: see precheck/.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.models.heads import StoredHead, head_of_layers

CAUSAL_LM = ("ForCausalLM", "LMHeadModel", "WithLMHead", "ForConditionalGeneration")
"""Endings of causal LM class names, including models that read images or sound as well as text."""
POOLED = "ForSequenceClassification"


class ConfigFile:
    """Values in the config.json of a folder, by the names that transformers' configs have; None where it states none."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    @staticmethod
    def read(path: str) -> "ConfigFile | None":
        """Read the file; None for a hub name, and for a file that is not a JSON object."""
        file = Path(path) / "config.json"
        try:
            values = json.loads(file.read_bytes()) if file.is_file() else None
        except ValueError:
            return None
        return ConfigFile(values) if isinstance(values, dict) else None

    def __getattr__(self, name: str) -> Any:
        return self._values.get(name)

    def get_text_config(self) -> "ConfigFile":
        inner = self._values.get("text_config")
        return ConfigFile(inner) if isinstance(inner, dict) else self

    @property
    def num_labels(self) -> int:
        """Number of labels. transformers gives a classifier two unless its config names them."""
        return len(self._values.get("id2label") or ()) or self._values.get("num_labels") or 2


def require_full_weights(path: str, hf_config: Any) -> None:
    """Raise UserError if the checkpoint is quantized. Its weights cannot be trained; a frozen reward model is refused, too."""
    parts = (hf_config, hf_config.get_text_config())
    for settings in (getattr(part, "quantization_config", None) for part in parts):
        if settings:
            method = settings.get("quant_method", "no quant_method")
            raise UserError(
                f"{path} is quantized (quantization_config in its config.json: {method}), and only full weights can be trained "
                "or scored with here: give the checkpoint that it was made from, or dequantize it with transformers and save it"
            )


def require_decoder(path: str, config: Any) -> None:
    """Raise UserError if the model is an encoder-decoder.

    Args:
        config: a config of transformers, or a :class:`ConfigFile`; as in all functions of this file.
    """
    if config.is_encoder_decoder:
        raise UserError(
            f"{path} is an encoder-decoder ({config.model_type}), a reward model must be a decoder: give a causal LM, "
            "or a reward model made from one"
        )


def is_pooled(config: Any, head: StoredHead | None) -> bool:
    """True if the model is an encoder that classifies whole sequences."""
    return head is None and any(name.endswith(POOLED) for name in config.architectures or ())


def require_reward_head(path: str, config: Any, head: StoredHead | None) -> None:
    """Raise UserError if the model has no head that makes rewards."""
    if head is not None or is_pooled(config, head):
        return
    if layers := head_of_layers(path):
        raise UserError(
            f"{path} has a score head of several layers ({', '.join(layers)}), a reward model's must be a single linear "
            "layer: serve it by a program of its own, and take reward=endpoints"
        )
    if kind := language_model(config):
        raise UserError(
            f"{path} is {kind}, no reward model: train one from it with trainers/train_reward_model.py, or give another "
            "path; a critic server without a reward model (reward_model.combine_rm_and_critic_server=false) starts its critic "
            "from it"
        )


def language_model(config: Any) -> str | None:
    """The kind of language model that config.json names; None if it names none."""
    for name in config.architectures or ():
        if name.endswith(CAUSAL_LM):
            return f"a causal LM ({name})"
        if name.endswith("Model") and "Reward" not in name:
            return f"a model without a head ({name})"
    return None


def require_weights_of_labels(path: str, labels: int, given: Sequence[float] | None) -> None:
    """Raise UserError unless there is one weight for each label."""
    if (given is None and labels == 1) or (given is not None and len(given) == labels):
        return
    weights = "none" if given is None else f"{len(given)} weights"
    raise UserError(
        f"the reward model {path} has {labels} labels and label_weights are {weights}: give it one number per label, "
        "reward_model.label_weights=[...] to a critic server, reward.label_weights=[...] to a reward server and "
        "reward.model.label_weights=[...] to trainers/evaluate.py"
    )


def fitting_weights(head: StoredHead, given: Sequence[float] | None) -> Sequence[float] | None:
    """``given``, a reward model's label_weights; None if several for a start with one label, such as an earlier critic."""
    return None if head.labels == 1 and len(given or ()) > 1 else given


def refuse_encoder(path: str, class_name: str) -> NoReturn:
    """Always raise UserError: the critic server's reward model gives no score per token."""
    raise UserError(
        f"the reward model {path} is an encoder ({class_name}), which gives no score per token: serve it "
        "with servers/serve_reward_model.py, set reward_model.combine_rm_and_critic_server=false, and start the critic from a "
        "decoder (value_model.path)"
    )
