"""Episodes of several turns between the policy and an environment."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.base import setting
from nemo_style_rlhf.schema.gateway import GatewayConfig
from nemo_style_rlhf.schema.paths import CHECK, environment_file, only_environment

OF_ENVIRONMENTS = ("name", "workers", "episodes_per_worker", "max_turns", "step_timeout_s", "history")
"""Keys that do not apply to programs."""


@dataclass
class AgentConfig(GatewayConfig):
    """Episodes of several turns: with an environment (a class in a Python file), or of programs that call an OpenAI endpoint."""

    path: str | None = field(default=None, metadata={CHECK: environment_file})
    """Python file with the environment's class. Without path, command and listen, samples are single responses."""
    name: str = ""
    """Name of the class in the file; empty for the only environment that the file defines."""
    workers: int = setting(2, gt=0, expected="a number above 0")
    """Number of processes in which episodes run."""
    episodes_per_worker: int = setting(64, gt=0, expected="a number above 0")
    """Maximum number of episodes that run side by side in one process; further ones wait."""
    max_turns: int = setting(16, gt=0, expected="a number above 0")
    """Maximum number of the policy's responses in an episode."""
    max_tokens: int | None = setting(None, gt=0, expected="a number above 0, or null")
    """Maximum length of a whole episode, the environment's tokens included; null is the number of the model's positions."""
    step_timeout_s: float = setting(60.0, gt=0, expected="seconds above 0")
    """Longest time that an environment may take for one answer; then the attempt has failed."""
    episode_timeout_s: float = setting(600.0, gt=0, expected="seconds above 0")
    """Longest time that an environment may take in a whole episode, without the policy's part."""
    attempts: int = setting(3, gt=0, expected="a number above 0")
    """Total number of attempts at an episode. If the last attempt fails, the sample is left out of training."""
    tool_parser: str | None = None
    """Name of the vLLM parser that finds tool calls in responses; null looks for none."""
    history: str = setting("keep", among=("keep", "template"))
    """The policy's input if the chat template rewrites past turns. keep: the tokens as they were sampled. template: the
    conversation as the template renders it, in a row of its own after each rewrite."""

    @property
    def class_name(self) -> str:
        """``name``, or the name of the file's only environment."""
        return self.name or only_environment(Path(self.path or "")) or "Environment"

    @property
    def in_use(self) -> bool:
        return self.path is not None or self.serves_programs

    @property
    def serves_programs(self) -> bool:
        return bool(self.command) or self.listen is not None

    def idle(self) -> Iterator[tuple[str, str]]:
        """See :func:`base.idle_settings`."""
        of_programs = [each.name for each in dataclasses.fields(GatewayConfig)]
        for name in [each.name for each in dataclasses.fields(self)]:
            if not self.in_use:
                yield name, "does nothing: there is no agent (agent.path, agent.command or agent.listen)"
            elif name in of_programs and not self.serves_programs:
                yield (
                    name,
                    "does nothing: it is for programs (agent.command, agent.listen), and agent.path is an environment",
                )
            elif name in OF_ENVIRONMENTS and self.serves_programs:
                yield name, "does nothing: it is for environments (agent.path), and the agent is a program"

    def validate(self) -> None:
        super().validate()
        if self.path is not None and self.serves_programs:
            raise UserError(
                f"agent.path={self.path} names an environment, and agent.command or agent.listen programs: give one of them"
            )
