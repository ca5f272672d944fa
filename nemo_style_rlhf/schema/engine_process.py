"""Configuration of a generation engine, ``conf/engine.yaml``."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from nemo_style_rlhf.schema.base import require, setting
from nemo_style_rlhf.schema.common import ModelConfig, RunConfig
from nemo_style_rlhf.schema.critic import ServerConfig
from nemo_style_rlhf.schema.generation import GenerationConfig
from nemo_style_rlhf.schema.placement import PlacementConfig


@dataclass
class EngineRunConfig(RunConfig):
    """Device, seed and threads of the engine."""

    output_dir: str = "."
    """Unused: an engine writes only its ready file."""


@dataclass
class SequencesConfig:
    """The sequences that an engine must have room for."""

    max_length: int = setting(0, ge=0, expected="a number of tokens, or 0 for the model's own")
    """Tokens of the longest prompt and response together; 0 takes the model's max_position_embeddings."""
    stop_strings: bool = False
    """Let prompts bring stop strings of their own."""


@dataclass
class EngineProcessConfig:
    """Configuration of ``servers/serve_engine.py``."""

    run: EngineRunConfig = field(default_factory=EngineRunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    """The policy. The weights that the trainer publishes replace its own."""
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    sequences: SequencesConfig = field(default_factory=SequencesConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    """With share=turns the engine sleeps until it is sent weights, and whenever the trainer asks it to."""
    server: ServerConfig = field(default_factory=lambda: ServerConfig(port=5569))

    def idle(self) -> Iterator[tuple[str, str]]:
        """See :func:`base.idle_settings`."""
        for name in ("model.lora", "model.gradient_checkpointing"):
            yield name, "does nothing: an engine trains nothing"

    def validate(self) -> None:
        require(
            not self.run.dry_run,
            "run.dry_run",
            self.run.dry_run,
            "false: an engine has no rehearsal, --dry-run of the trainer starts its engines, too",
        )
