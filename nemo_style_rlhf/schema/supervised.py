"""The supervised stages: SFT and reward model."""

from dataclasses import dataclass, field

from omegaconf import MISSING

from nemo_style_rlhf.algorithms.preference_loss import REWARD_MODEL_LOSSES
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.base import require, require_choice
from nemo_style_rlhf.schema.common import ModelConfig, OptimizerConfig, RunConfig, SchedulerConfig
from nemo_style_rlhf.schema.data import PromptTemplateConfig
from nemo_style_rlhf.schema.tracking import TrackingConfig


@dataclass
class SupervisedModelConfig(ModelConfig):
    """The model a supervised stage starts from."""

    init: str = "pretrained"
    """pretrained, or random: fresh weights of the architecture in config_path (SFT only)."""
    config_path: str | None = None
    """With init=random: a Hugging Face config JSON; null takes config.json in model.path. The tokenizer is model.path's."""

    def validate(self) -> None:
        super().validate()
        require_choice("model.init", self.init, ("pretrained", "random"))
        if self.config_path is not None and self.init != "random":
            raise UserError(
                "model.config_path is set but model.init=pretrained does not read it: set model.init=random"
            )


@dataclass
class SupervisedDataConfig(PromptTemplateConfig):
    """Rows of a supervised stage: JSONL, JSONL.gz, Parquet, or anything the `datasets` library loads."""

    train_path: str = MISSING
    """A .jsonl, .jsonl.gz or .parquet file, a folder written by `datasets`, or a hub name (`owner/name:split`)."""
    val_path: str | None = None
    """Held-out rows, same forms; null turns validation off."""
    prompt_key: str = "prompt"
    """The prompt. In SFT, rows without it are plain text under response_key or `text`."""
    max_length: int = 1024
    """Tokens of prompt and response together; longer rows are dropped and counted."""
    append_eos: bool = True
    """End every response with the end-of-text token; a policy that never saw one never stops."""

    def validate(self) -> None:
        super().validate()
        require(self.max_length > 1, "data.max_length", self.max_length, "a number of tokens above 1")


@dataclass
class SFTDataConfig(SupervisedDataConfig):
    """prompt and response (loss on the response alone), messages (loss on the last answer), or plain text (loss on all)."""

    format: str = "auto"
    """auto (by the keys of the first row), prompt_response, text or messages."""
    response_key: str = "response"
    text_key: str = "text"
    messages_key: str = "messages"

    def validate(self) -> None:
        super().validate()
        require_choice("data.format", self.format, ("auto", "prompt_response", "text", "messages"))


@dataclass
class PreferenceDataConfig(SupervisedDataConfig):
    """prompt, chosen and rejected; or two Anthropic-HH transcripts."""

    format: str = "auto"
    """auto (pairs where rows have prompt_key, else hh), pairs, or hh."""
    chosen_key: str = "chosen"
    rejected_key: str = "rejected"
    margin_key: str | None = None
    """By how much the chosen response is better, for the loss's margin; null for none."""

    def validate(self) -> None:
        super().validate()
        require_choice("data.format", self.format, ("auto", "pairs", "hh"))


@dataclass
class FitConfig:
    """How long and in which batches (carried out by Lightning's Trainer)."""

    max_epochs: float = 1
    """Passes over the training rows; parts of one are possible."""
    max_steps: int = 0
    """Optimizer steps; 0 lets max_epochs decide."""
    batch_size: int = 64
    """Rows (SFT) or pairs (reward model) per optimizer step."""
    micro_batch_size: int = 0
    """Of these, so many in one forward and backward; 0 for all at once. The loss is normalised over the whole step."""
    val_interval: int = 0
    """Optimizer steps between validations; 0 validates once, at the end."""
    val_batch_size: int = 64
    log_interval: int = 10
    """Optimizer steps between lines of metrics.jsonl."""

    def validate(self) -> None:
        require(self.max_epochs > 0, "trainer.max_epochs", self.max_epochs, "a number above 0")
        require(self.max_steps >= 0, "trainer.max_steps", self.max_steps, "a number of steps, or 0 for max_epochs")
        require(self.batch_size > 0, "trainer.batch_size", self.batch_size, "a number of rows above 0")
        require(self.val_batch_size > 0, "trainer.val_batch_size", self.val_batch_size, "a number of rows above 0")
        require(
            self.val_interval >= 0, "trainer.val_interval", self.val_interval, "a number of steps, or 0 for the end"
        )
        require(self.log_interval > 0, "trainer.log_interval", self.log_interval, "a number of steps above 0")
        divides = self.micro_batch_size >= 0 and self.batch_size % (self.micro_batch_size or self.batch_size) == 0
        require(
            divides,
            "trainer.micro_batch_size",
            self.micro_batch_size,
            f"0 or a divisor of batch_size={self.batch_size}",
        )


@dataclass
class SupervisedEngineConfig:
    """AdamW and its learning rate."""

    optim: OptimizerConfig = field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    gradient_clip_val: float = 1.0
    """Global L2 norm the gradient is clipped to; 0 turns clipping off."""

    def validate(self) -> None:
        require(
            self.gradient_clip_val >= 0, "engine.gradient_clip_val", self.gradient_clip_val, "a norm, or 0 for none"
        )


@dataclass
class SupervisedConfig:
    """What every supervised stage has."""

    run: RunConfig = field(default_factory=RunConfig)
    model: SupervisedModelConfig = field(default_factory=SupervisedModelConfig)
    trainer: FitConfig = field(default_factory=FitConfig)
    engine: SupervisedEngineConfig = field(default_factory=SupervisedEngineConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    export_dir: str | None = None
    """Where the trained model goes as a plain Hugging Face directory; null is run.output_dir/export."""

    @property
    def export_path(self) -> str:
        """`export_dir`, or its default."""
        return self.export_dir or f"{self.run.output_dir}/export"


@dataclass
class SFTConfig(SupervisedConfig):
    """trainers/train_sft.py"""

    data: SFTDataConfig = field(default_factory=SFTDataConfig)


@dataclass
class RewardModelConfig(SupervisedConfig):
    """trainers/train_reward_model.py"""

    data: PreferenceDataConfig = field(default_factory=PreferenceDataConfig)
    loss: str = "sigmoid"
    """sigmoid or logexp: the Bradley-Terry loss in two notations."""

    def validate(self) -> None:
        require_choice("loss", self.loss, REWARD_MODEL_LOSSES)
        require(self.model.init == "pretrained", "model.init", self.model.init, "pretrained, for a reward model")
