"""The supervised stages: SFT, reward model, DPO and KTO."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from nemo_style_rlhf.algorithms.names import DPO_LOSSES, REWARD_MODEL_LOSSES
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.base import require, require_choice, setting
from nemo_style_rlhf.schema.common import ModelConfig, OptimizerConfig, SchedulerConfig, TrainerRunConfig
from nemo_style_rlhf.schema.data import PromptTemplateConfig, TrainingDataConfig
from nemo_style_rlhf.schema.paths import CHECK, config_source
from nemo_style_rlhf.schema.tracking import TrackingConfig

ZERO_STAGES = {"zero1": 1, "zero2": 2, "zero3": 3}
"""ZeRO stage by ``trainer.strategy``."""


@dataclass
class SupervisedModelConfig(ModelConfig):
    """The model that a supervised stage starts from."""

    init: str = setting("pretrained", among=("pretrained", "random"))
    """pretrained, or random: fresh weights of the architecture in config_path (SFT only)."""
    config_path: str | None = field(default=None, metadata={CHECK: config_source})
    """Hugging Face config JSON for init=random; null takes config.json in model.path. The tokenizer is model.path's."""

    def validate(self) -> None:
        super().validate()
        if self.config_path is not None and self.init != "random":
            raise UserError(
                "model.config_path is set but model.init=pretrained does not read it: set model.init=random"
            )
        if self.init == "random" and self.lora.rank:
            raise UserError("model.lora.rank is set but model.init=random has no trained weights to adapt: set it to 0")


@dataclass
class SupervisedDataConfig(TrainingDataConfig, PromptTemplateConfig):
    """Rows of a supervised stage."""

    max_length: int = setting(1024, gt=1, expected="a number of tokens above 1")
    """Maximum tokens of prompt and response together; longer rows are dropped and counted."""
    append_eos: bool = True
    """End every response with the end-of-text token: a policy trained without it never stops."""

    def validate(self) -> None:
        super().validate()
        self.validate_sources()


@dataclass
class SFTDataConfig(SupervisedDataConfig):
    """Rows of prompt and response (loss on the response), messages (loss on the answers), or plain text (loss on all)."""

    format: str = setting("auto", among=("auto", "prompt_response", "text", "messages"))
    """auto (by the columns of each row), prompt_response, text or messages."""
    response_key: str | None = None
    """Column of the response, a text or messages; null is `response`, `completion` or Alpaca's `output`."""
    text_key: str = "text"
    """Column of texts without a prompt, for data.format=text."""
    messages_key: str | None = None
    """Column of the conversation; null is `messages` or ShareGPT's `conversations`."""
    learn: str = setting("all_answers", among=("all_answers", "last_answer"))
    """Turns of a conversation whose tokens are loss tokens: all_answers of the assistant, or only the last_answer."""

    def validate(self) -> None:
        super().validate()
        if self.format == "text" and self.apply_chat_template:
            raise UserError("data.apply_chat_template=true but data.format=text has no prompts: set it to false")


@dataclass
class PairDataConfig(SupervisedDataConfig):
    """Rows of prompt, chosen and rejected, as texts or as conversations; without a prompt's column, the beginning that both texts
    or conversations share is the prompt. Or two Anthropic-HH transcripts."""

    FORMATS: ClassVar[tuple[str, ...]] = ("auto", "pairs", "hh")

    format: str = "auto"
    """auto (hh if a row has transcripts and no prompt), pairs, or hh."""
    chosen_key: str = "chosen"
    """Column of the better answer, a text or messages."""
    rejected_key: str = "rejected"
    """Column of the worse answer."""

    def validate(self) -> None:
        super().validate()
        require_choice("data.format", self.format, self.FORMATS)


@dataclass
class PreferenceDataConfig(PairDataConfig):
    """Pairs for a reward model."""

    margin_key: str | None = None
    """Column that says by how much the chosen response is better, for the loss's margin; null for none."""
    subset_key: str | None = None
    """Column of a row's subset (a source, a topic); pair_evaluation.json has figures for each subset. null for none."""


@dataclass
class UnpairedDataConfig(PairDataConfig):
    """Rows of prompt, completion (a text or messages) and a label that says whether it is desirable; a pair (as for DPO) counts
    as one desirable and one undesirable row."""

    FORMATS: ClassVar[tuple[str, ...]] = ("auto", "unpaired", "pairs", "hh")

    format: str = "auto"
    """auto (rows with chosen_key but without label_key are pairs or hh), unpaired, pairs, or hh."""
    completion_key: str | None = None
    """Column of the completion, a text or messages; null is `completion`, `response` or `output`, or without them the last turn
    of the conversation."""
    label_key: str = "label"
    """Column that holds true or 1 for a desirable completion, false or 0 for an undesirable one."""


@dataclass
class FitConfig:
    """Length of training and size of batches; Lightning's Trainer does the training."""

    max_epochs: float = setting(1, gt=0, expected="a number above 0")
    """Passes over the training rows; fractions are possible."""
    max_steps: int = setting(0, ge=0, expected="a number of steps, or 0 for max_epochs")
    """Optimizer steps; 0 lets max_epochs decide."""
    batch_size: int = setting(64, gt=0, expected="a number of rows above 0")
    """Rows (SFT, KTO) or pairs (reward model, DPO) per optimizer step."""
    micro_batch_size: int = 0
    """Rows in one forward and backward; 0 for all at once. The loss is normalized over the whole step."""
    micro_batch_tokens: int = setting(0, ge=0, expected="tokens, or 0")
    """Instead of micro_batch_size: maximum tokens of one forward and backward, counted as rows x longest row, or with
    model.packing as their sum (the longer text of a pair counts). A longer row gets its own."""
    val_interval: int = setting(0, ge=0, expected="a number of steps, or 0 for the end")
    """Optimizer steps between validations; 0 validates once, at the end."""
    val_batch_size: int = setting(64, gt=0, expected="a number of rows above 0")
    """Maximum number of rows or pairs of a validation batch."""
    log_interval: int = setting(10, gt=0, expected="a number of steps above 0")
    """Optimizer steps between lines of metrics.jsonl."""
    strategy: str = setting("auto", among=("auto", *ZERO_STAGES))
    """auto (one device, or DDP over the ranks of torchrun), or DeepSpeed's zero1, zero2, zero3: optimizer states, gradients,
    weights sharded over the ranks. Their checkpoints resume with the same strategy and number of ranks."""

    def validate(self) -> None:
        divides = self.micro_batch_size >= 0 and self.batch_size % (self.micro_batch_size or self.batch_size) == 0
        require(
            divides,
            "trainer.micro_batch_size",
            self.micro_batch_size,
            f"0 or a divisor of trainer.batch_size={self.batch_size}",
        )
        if self.micro_batch_size and self.micro_batch_tokens:
            raise UserError(
                f"trainer.micro_batch_size={self.micro_batch_size} and trainer.micro_batch_tokens={self.micro_batch_tokens} both "
                "say how a step is split: set one of them to 0"
            )


@dataclass
class SupervisedEngineConfig:
    """AdamW and its learning rate."""

    optim: OptimizerConfig = field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    gradient_clip_val: float = setting(1.0, ge=0, expected="a norm, or 0 for none")
    """Global L2 norm to which the gradient is clipped; 0 turns clipping off."""


@dataclass
class SupervisedCheckpointConfig:
    """Checkpoints of an unfinished run, in <run.output_dir>/checkpoints; run.resume reads them."""

    save_interval: int = setting(500, ge=-1, expected="a number of steps, 0 for none, or -1 for the last step alone")
    """Optimizer steps between checkpoints. The last step is saved, too; -1 saves only that one, and 0 saves none."""
    keep_last: int = setting(1, gt=0, expected="at least 1")
    """Number of checkpoints that are kept."""
    save_on_interrupt: bool = False
    """The first Ctrl-C ends the stage after the running step, with a checkpoint; only the second one ends it at once."""

    def is_due(self, step: int) -> bool:
        """True if ``save_interval`` asks for a checkpoint after ``step``."""
        return self.save_interval > 0 and step % self.save_interval == 0


@dataclass
class SupervisedConfig:
    """Settings of every supervised stage."""

    run: TrainerRunConfig = field(default_factory=TrainerRunConfig)
    model: SupervisedModelConfig = field(default_factory=SupervisedModelConfig)
    trainer: FitConfig = field(default_factory=FitConfig)
    engine: SupervisedEngineConfig = field(default_factory=SupervisedEngineConfig)
    checkpoint: SupervisedCheckpointConfig = field(default_factory=SupervisedCheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    export_dir: str | None = None
    """Folder for the trained model, as a plain Hugging Face directory; null is run.output_dir/export."""

    def idle(self) -> Iterator[tuple[str, str]]:
        """See :func:`base.idle_settings`."""
        yield "tracking.rollouts", "does nothing: a supervised stage makes no rollouts"

    @property
    def export_path(self) -> str:
        """`export_dir`, or its default."""
        return self.export_dir or f"{self.run.output_dir}/export"


@dataclass
class SFTConfig(SupervisedConfig):
    """Configuration of trainers/train_sft.py."""

    data: SFTDataConfig = field(default_factory=SFTDataConfig)


@dataclass
class RewardModelConfig(SupervisedConfig):
    """Configuration of trainers/train_reward_model.py."""

    data: PreferenceDataConfig = field(default_factory=PreferenceDataConfig)
    loss: str = setting("sigmoid", among=REWARD_MODEL_LOSSES)
    """sigmoid or logexp: the Bradley-Terry loss in two notations."""
    centring: float = setting(0.0, ge=0, expected="a coefficient from 0 up")
    """Coefficient of (chosen + rejected)^2, to keep the scores around 0 (arXiv 2312.09244, with 0.01); 0 for none."""
    statistics_pairs: int = setting(2048, ge=0, expected="a number of pairs, or 0")
    """Number of training pairs whose mean reward and deviation are stored with the model (see reward_model.normalize_rewards); 0
    for none."""

    def validate(self) -> None:
        _require_pretrained(self.model, "a reward model")


@dataclass
class DPOConfig(SupervisedConfig):
    """Configuration of trainers/train_dpo.py."""

    data: PairDataConfig = field(default_factory=PairDataConfig)
    beta: float = setting(0.1, gt=0, expected="a number above 0")
    """Strength of the pull towards the reference policy, the model before training; for ipo, 1 / (2 beta) is the margin."""
    loss: str = setting("sigmoid", among=DPO_LOSSES)
    """sigmoid (DPO), or ipo (on log-probabilities per token)."""
    label_smoothing: float = setting(0.0, ge=0, lt=0.5, expected="a share from 0 to below 0.5")
    """Share of pairs assumed to be labeled the wrong way round (cDPO), below 0.5; only with loss=sigmoid."""
    nll_weight: float = setting(0.0, ge=0, expected="a weight from 0 up")
    """Weight of the chosen response's negative log-likelihood per token (arXiv 2404.19733, with 1); 0 for none."""

    def validate(self) -> None:
        if self.label_smoothing:
            require(self.loss == "sigmoid", "label_smoothing", self.label_smoothing, f"0 with loss={self.loss}")
        _require_pretrained(self.model, "DPO")


@dataclass
class KTOConfig(SupervisedConfig):
    """Configuration of trainers/train_kto.py."""

    data: UnpairedDataConfig = field(default_factory=UnpairedDataConfig)
    beta: float = setting(0.1, gt=0, expected="a number above 0")
    """Rate at which the value of gains and losses against the reference policy saturates."""
    desirable_weight: float = setting(1.0, ge=0, expected="a weight from 0 up")
    """Weight of the desirable rows' loss. The paper recommends weight x number of rows at 1 to 4/3 of the undesirable rows'."""
    undesirable_weight: float = setting(1.0, ge=0, expected="a weight from 0 up")
    """Weight of the undesirable rows' loss."""

    def validate(self) -> None:
        rows = self.trainer.batch_size
        require(
            rows > 1, "trainer.batch_size", rows, "at least 2: the KL is estimated from the responses to other rows"
        )
        _require_pretrained(self.model, "KTO")


def _require_pretrained(model: SupervisedModelConfig, stage: str) -> None:
    require(model.init == "pretrained", "model.init", model.init, f"pretrained, for {stage}")
