"""Configuration of `trainers/inspect_data.py`."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.base import require_choice, setting, validate
from nemo_style_rlhf.schema.common import ModelConfig
from nemo_style_rlhf.schema.data import PromptTemplateConfig
from nemo_style_rlhf.schema.supervised import (
    PairDataConfig,
    PreferenceDataConfig,
    SFTDataConfig,
    SupervisedDataConfig,
    UnpairedDataConfig,
)

STAGES: dict[str, type[SupervisedDataConfig]] = {
    "sft": SFTDataConfig,
    "reward_model": PreferenceDataConfig,
    "dpo": PairDataConfig,
    "kto": UnpairedDataConfig,
}


@dataclass
class InspectedDataConfig(SFTDataConfig, UnpairedDataConfig, PreferenceDataConfig):
    """The `data` keys of every stage."""

    format: str = "auto"
    """Same values as in the stage."""
    learn: str = "all_answers"
    """As in SFT."""
    max_length: int = 1024
    """Maximum tokens of a sample."""

    def validate(self) -> None:
        """Check only the templates. The class of the stage checks the rest, as far as the stage reads it."""
        PromptTemplateConfig.validate(self)


@dataclass
class InspectDataConfig:
    """Configuration of `trainers/inspect_data.py`."""

    stage: str = "sft"
    """sft, reward_model, dpo or kto: the stage whose samples are formed."""
    num_samples: int = setting(5, ge=0, expected="a number of samples from 0 up")
    """Number of samples to show, from the first row on."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """Only its tokenizer and config are loaded."""
    data: InspectedDataConfig = field(default_factory=InspectedDataConfig)

    @property
    def stage_data(self) -> SupervisedDataConfig:
        """``data`` in the form that the stage's trainer reads."""
        names = {field.name for field in dataclasses.fields(STAGES[self.stage])}
        return STAGES[self.stage](**{name: getattr(self.data, name) for name in names})

    def idle(self) -> Iterator[tuple[str, str]]:
        """See :func:`base.idle_settings`."""
        for key in dataclasses.fields(self.model):
            if key.name not in ("path", "trust_remote_code"):
                yield f"model.{key.name}", "does nothing: no model is loaded, only its tokenizer"

    def validate(self) -> None:
        if self.stage in ("prompts", "ppo"):
            raise UserError(
                f"stage={self.stage} is not possible: a prompt has no learned tokens to show; trainers/train_ppo_actor.py ... "
                "--dry-run reads a run's prompts and names those it drops"
            )
        require_choice("stage", self.stage, STAGES)
        read = {field.name for field in dataclasses.fields(STAGES[self.stage])}
        for key in dataclasses.fields(self.data):
            if key.name not in read and getattr(self.data, key.name) != key.default:
                stages = " or ".join(
                    name
                    for name, schema in STAGES.items()
                    if key.name in {field.name for field in dataclasses.fields(schema)}
                )
                raise UserError(
                    f"data.{key.name} is set but stage={self.stage} does not read it: set stage to {stages}"
                )
        validate(self.stage_data, "data.")
