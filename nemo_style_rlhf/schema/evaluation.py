"""Configuration of `trainers/evaluate.py`."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from omegaconf import MISSING

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.base import require_choice, setting, validate
from nemo_style_rlhf.schema.common import ModelConfig, RunConfig
from nemo_style_rlhf.schema.data import PromptRowsConfig
from nemo_style_rlhf.schema.generation import GenerationConfig
from nemo_style_rlhf.schema.paths import CHECK, data_source, model_folder
from nemo_style_rlhf.schema.reward import FunctionRewardConfig
from nemo_style_rlhf.schema.sources import require_sources

EXPORT_FOLDER = "export"


@dataclass(frozen=True)
class Checkpoint:
    """One of the compared models."""

    name: str
    path: str

    @staticmethod
    def parse(given: str) -> "Checkpoint":
        """Parse `path` or `name:path`. The default name is the folder's, or for a folder `export` its parent's."""
        name, separator, path = given.partition(":")
        if separator and name and path:
            return Checkpoint(name, path)
        parts = [part for part in PurePath(given).parts if part not in ("/", "..", EXPORT_FOLDER)]
        if separator or not given:
            raise UserError(f"checkpoints has the entry {given!r}: expected path or name:path")
        return Checkpoint(parts[-1] if parts else given, given)


@dataclass
class EvaluationModelConfig:
    """Settings for the computation with the checkpoints."""

    dtype: str = "bfloat16"
    """bfloat16 or float32."""
    attn_implementation: str = "auto"
    """As in training; applies to generation.backend=hf and to the reward model."""
    trust_remote_code: bool = False
    """Run Python code that comes with a checkpoint."""

    def at(self, path: str, dtype: str | None = None) -> ModelConfig:
        """The model at ``path`` with these settings."""
        return ModelConfig(
            path=path,
            dtype=dtype or self.dtype,
            attn_implementation=self.attn_implementation,
            trust_remote_code=self.trust_remote_code,
        )

    def validate(self) -> None:
        validate(self.at(""), "model.")


@dataclass
class EvaluationDataConfig(PromptRowsConfig):
    """The prompts that every checkpoint answers."""

    path: Any = field(default=MISSING, metadata={CHECK: data_source})
    """A file of rows, a data set, or a list of these, as data.train_path of a PPO run."""
    max_prompts: int = setting(0, ge=0, expected="a number of prompts, or 0 for all")
    """Number of prompts, from the first on; 0 for all."""

    def validate(self) -> None:
        super().validate()
        require_sources("data.path", self.path)


@dataclass
class EvaluationGenerationConfig(GenerationConfig):
    """As in training; top_k=1 makes it greedy."""

    gpu_memory_utilization: float = 0.85
    """Share of the GPU's memory that vLLM may take; nothing else uses the GPU meanwhile."""


@dataclass
class RewardModelSourceConfig:
    """A reward model, loaded in this process, with its own tokenizer, template and chat template."""

    path: str | None = field(default=None, metadata={CHECK: model_folder})
    """null for none."""
    weight: float = 1.0
    """Weight of the reward model's scores in the sum."""
    dtype: str | None = None
    """bfloat16 or float32; null is model.dtype."""
    append_eos: bool | None = None
    """End every response with the end-of-text token; null does as in the reward model's training."""
    normalize_rewards: bool = False
    """Return (score - mean) / deviation, with the statistics that the reward model's training stored."""
    label_weights: list[float] | None = None
    """One weight for each label of a model with several. The reward is the weighted sum of the labels."""
    micro_batch_tokens: int = setting(16384, gt=0, expected="a number of tokens above 0")
    """Maximum padded tokens (rows x longest row) of one forward; a longer single sequence gets its own."""

    def validate(self) -> None:
        if self.dtype is not None:
            require_choice("reward.model.dtype", self.dtype, ("bfloat16", "float32"))


@dataclass
class FunctionSourceConfig(FunctionRewardConfig):
    """The reward functions of training, used if path is set."""

    weight: float = 1.0

    def validate(self) -> None:
        """Unlike a run, allow any weight without a path."""


@dataclass
class EvaluationRewardConfig:
    """Sources of scores. Those with a path are used, each times its weight; without any, responses are only shown."""

    model: RewardModelSourceConfig = field(default_factory=RewardModelSourceConfig)
    function: FunctionSourceConfig = field(default_factory=FunctionSourceConfig)
    on_error: str = setting("stop", among=("stop", "mask"))
    """Reaction to a source that fails on samples. stop: end the run with the reason; mask: leave the samples without a score."""
    special_tokens: bool = False
    """Keep special tokens in responses, here and in the results, such as a `<think>` that is one, but not the token that ends a
    response."""

    @property
    def sources(self) -> list[str]:
        """Paths of the sources in use."""
        given = [(self.model.path, self.model.weight), (self.function.path, self.function.weight)]
        return [path for path, weight in given if path and weight != 0]


@dataclass
class EvaluationConfig:
    """Configuration of `trainers/evaluate.py`."""

    run: RunConfig = field(default_factory=RunConfig)
    checkpoints: list[str] = field(
        default=MISSING, metadata={CHECK: lambda given, _: model_folder(Checkpoint.parse(given).path)}
    )
    """Hugging Face directories or hub names to compare, each as path or name:path. The others are compared with the first."""
    samples_per_prompt: int = setting(1, gt=0, expected="a number above 0")
    """Responses of each checkpoint to each prompt. A sample's seed depends on run.seed, its prompt and its number."""
    model: EvaluationModelConfig = field(default_factory=EvaluationModelConfig)
    data: EvaluationDataConfig = field(default_factory=EvaluationDataConfig)
    generation: EvaluationGenerationConfig = field(default_factory=EvaluationGenerationConfig)
    reward: EvaluationRewardConfig = field(default_factory=EvaluationRewardConfig)

    @property
    def unread(self) -> tuple[str, ...]:
        """Sections whose files this process does not read."""
        sources = {"model": self.reward.model.weight, "function": self.reward.function.weight}
        return tuple(f"reward.{name}" for name, weight in sources.items() if weight == 0)

    @property
    def parsed_checkpoints(self) -> list[Checkpoint]:
        """The checkpoints, in the given order."""
        return [Checkpoint.parse(given) for given in self.checkpoints]

    def validate(self) -> None:
        if not self.checkpoints:
            raise UserError("checkpoints is empty: expected at least one, e.g. checkpoints=[outputs/ppo/export]")
        ((name, count),) = Counter(checkpoint.name for checkpoint in self.parsed_checkpoints).most_common(1)
        if count > 1:
            raise UserError(
                f"{count} checkpoints have the name {name}: give each its own, checkpoints=[first:...,second:...]"
            )
