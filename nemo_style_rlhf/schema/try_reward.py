"""Configuration of `trainers/try_reward.py`."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from omegaconf import MISSING

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.base import setting
from nemo_style_rlhf.schema.paths import CHECK, data_source
from nemo_style_rlhf.schema.reward import RewardConfig


@dataclass
class TryRewardDataConfig:
    """Rows with a prompt and a response, both as text; a reward function may ask for their other fields by name."""

    path: str = field(default=MISSING, metadata={CHECK: data_source})
    """A file, a pattern of files, a folder or a hub name, in the forms of a run's data.train_path; also a run's
    rollouts/step_XXXXXX.parquet."""
    prompt_key: str = "prompt"
    """Column of the prompt."""
    response_key: str = "response"
    """Column of the response."""
    label_key: str | None = "label"
    """The reference answer, as data.label_key of a run; rows may lack it."""
    num_samples: int = setting(16, ge=0, expected="a number of rows from 0 up")
    """Number of rows to try, from the first on; 0 tries all."""


@dataclass
class TryRewardConfig:
    """Configuration of `trainers/try_reward.py`."""

    data: TryRewardDataConfig = field(default_factory=TryRewardDataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    """The sources of a run; those that need a model, critic and server, cannot be tried."""

    @property
    def unread(self) -> tuple[str, ...]:
        """Sections whose files this process does not read."""
        return self.reward.unread

    def idle(self) -> Iterator[tuple[str, str]]:
        """See :func:`base.idle_settings`."""
        yield "reward.server", "does nothing: reward models cannot be tried without a model"
        yield "reward.on_error", "does nothing: all failures are shown"
        yield "reward.special_tokens", "does nothing: responses are read as they stand in the file"

    def validate(self) -> None:
        self.reward.require_source()
        for name in ("critic", "server"):
            if name in self.reward.weights:
                raise UserError(
                    f"reward.{name}.weight={self.reward.weights[name]:g} asks a reward model, but without a model only "
                    f"functions, endpoints and judges can be tried: set reward.{name}.weight=0, or give reward=function"
                )
