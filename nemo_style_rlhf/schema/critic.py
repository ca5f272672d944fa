"""Configuration of the critic process, ``conf/ppo_critic.yaml``."""

from dataclasses import dataclass, field

from nemo_style_rlhf.schema.base import require
from nemo_style_rlhf.schema.common import EngineConfig, ModelConfig, RunConfig, TokenConfig
from nemo_style_rlhf.schema.paths import CHECK, existing_file


@dataclass
class CriticConfig:
    """What the critic learns and what is served beside it."""

    loss_clip_val: float | None = 0.2
    """PPO's value clipping: predictions may move this far from the rollout's values; null turns it off."""
    combine_rm_and_critic_server: bool = True
    """Serve the frozen reward model in this process too; false serves values only."""
    max_length: int = 0
    """Longest sequence accepted, in tokens; 0 takes the model's max_position_embeddings."""
    append_eos: bool | None = None
    """Whether reward_infer ends every response with the end-of-text token; null does as the reward model's training noted."""
    max_staged_bytes: int = 512 * 2**20
    """Tensor bytes of a train step that came in parts and is not complete: 16 per token and 4 per sequence, so that the default
    holds 4,000 sequences of 8,000 tokens. They are copied once more when the step is."""
    normalize_rewards: bool = False
    """Serve (reward - mean) / std, by the statistics stored with the reward model, and values on that scale."""
    offload_reward_model: bool = False
    """Keep the reward model's weights in host memory while the critic trains (CUDA only; no effect on CPU)."""

    def validate(self) -> None:
        clip = self.loss_clip_val
        require(clip is None or clip > 0, "critic.loss_clip_val", clip, "a number above 0, or null for no clipping")
        require(
            self.max_length >= 0, "critic.max_length", self.max_length, "a number of tokens, or 0 for the model's own"
        )


@dataclass
class ServerTlsConfig:
    """Certificates of the server, as PEM files; without them the protocol is plain HTTP."""

    certificate: str | None = field(default=None, metadata={CHECK: existing_file})
    """The server's certificate, its chain after it."""
    key: str | None = field(default=None, metadata={CHECK: existing_file})
    """Its private key, without a passphrase; null where it stands in the certificate's file."""
    client_ca: str | None = field(default=None, metadata={CHECK: existing_file})
    """For mutual TLS: clients must show a certificate that one of these signed."""

    def validate(self) -> None:
        given = self.key or self.client_ca
        require(self.certificate is not None or given is None, "server.tls.certificate", None,
                f"a certificate beside {given}")  # fmt: skip


@dataclass
class ServerConfig:
    """The door: where the server listens and who may come in."""

    host: str = "127.0.0.1"
    """Name or address to bind. Anything but loopback needs a token."""
    port: int = 5567
    """HTTP port; 0 takes a free one (see ready_file)."""
    metrics: bool = False
    """Serve Triton's Prometheus metrics at /metrics, to callers with the token."""
    token: TokenConfig = field(default_factory=TokenConfig)
    """The secret every request must carry in the header x-critic-token. Without one of your own a server on loopback makes
    ~/.config/nemo_style_rlhf/token, and your actor on the same host reads it."""
    tls: ServerTlsConfig = field(default_factory=ServerTlsConfig)
    shutdown_grace_s: float = 20.0
    """After SIGTERM a running call may take this long to finish; then it is abandoned and counts as not applied."""
    ready_file: str | None = None
    """JSON with host, port, pid and boot_id, written when the server answers and removed when it ends."""
    max_request_bytes: int = 64 * 2**20
    """Tensor bytes of one request; clients split."""
    verbose: bool = False
    """Show Triton's own log."""

    def validate(self) -> None:
        require(0 <= self.port < 65536, "server.port", self.port, "a TCP port, or 0 for a free one")
        require(self.shutdown_grace_s > 0, "server.shutdown_grace_s", self.shutdown_grace_s, "seconds above 0")
        require(
            4096 <= self.max_request_bytes < 2**31,
            "server.max_request_bytes",
            self.max_request_bytes,
            "4096 to 2147483647 bytes",
        )


@dataclass
class PPOCriticConfig:
    """``servers/serve_ppo_critic.py``."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    """The reward model: a sequence-classification checkpoint with one label. The critic starts as its copy."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    """How the critic is trained."""

    def validate(self) -> None:
        self.engine.validate_with(self.model)
        require(
            self.critic.max_staged_bytes >= self.server.max_request_bytes,
            "critic.max_staged_bytes",
            self.critic.max_staged_bytes,
            f"server.max_request_bytes={self.server.max_request_bytes} bytes or more",
        )
