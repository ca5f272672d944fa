"""Configuration of the endpoint through which the user's programs call the policy in training."""

from dataclasses import dataclass, field

from nemo_style_rlhf.schema.base import require, setting
from nemo_style_rlhf.schema.common import TokenConfig

AGENT_TOKEN_ENV = "NSR_AGENT_TOKEN"
LISTEN = "127.0.0.1:0"


@dataclass
class GatewayConfig:
    """Programs that know an OpenAI endpoint but not the training behind it."""

    command: list[str] = field(default_factory=list)
    """A program and its arguments, started once for each sample; its last line is the reward."""
    listen: str | None = None
    """HOST:PORT of the endpoint; port 0 takes a free one, and null is 127.0.0.1:0. Without a command, services fetch their tasks
    there, at /sessions/next. Any host but loopback needs a token."""
    programs: int = setting(16, gt=0, expected="a number above 0")
    """Maximum number of samples whose programs run at the same time."""
    calls_per_program: int = setting(64, gt=0, expected="a number above 0")
    """Maximum number of calls of one program that wait for answers at the same time."""
    max_request_bytes: int = setting(16 * 2**20, gt=0, expected="a number above 0")
    """Largest body of a request."""
    token: TokenConfig = field(default_factory=lambda: TokenConfig(token_env=AGENT_TOKEN_ENV))
    """The secret that opens /sessions/next. Every sample has its own secret, the API key of its program."""

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = (self.listen or LISTEN).rpartition(":")
        return host.strip("[]"), int(port)

    def validate(self) -> None:
        host, _, port = (self.listen or LISTEN).rpartition(":")
        right = bool(host) and port.isascii() and port.isdigit() and int(port) < 2**16
        require(right, "agent.listen", self.listen, "HOST:PORT, such as 127.0.0.1:0")
