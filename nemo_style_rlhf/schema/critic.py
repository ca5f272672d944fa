"""Configuration of the critic process, ``conf/ppo_critic.yaml``."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from nemo_style_rlhf.schema.base import require, setting
from nemo_style_rlhf.schema.common import EngineConfig, ModelConfig, RunConfig, TokenConfig
from nemo_style_rlhf.schema.paths import CHECK, existing_file, model_folder


def require_label_weights(key: str, weights: list[float] | None) -> None:
    require(
        weights is None or (bool(weights) and all(map(math.isfinite, weights)) and any(weights)),
        key, weights, "finite numbers that are not all 0, one for each label, or null",
    )  # fmt: skip


@dataclass
class ValueModelConfig:
    """The critic's starting point, and its loss."""

    enabled: bool = True
    """false loads, trains and saves no critic: the server then serves only the reward model, for algorithms without a critic
    (algorithm=grpo and others). Commands that start both processes set it by the algorithm."""
    path: str | None = field(default=None, metadata={CHECK: model_folder})
    """The critic's starting point: a Hugging Face directory or hub name of a reward model, of an earlier run's critic, or of a
    language model (it gets a new score head); null is model.path."""
    loss_clip_val: float | None = setting(0.2, gt=0, expected="a number above 0, or null for no clipping")
    """PPO's value clipping: predictions may move this far from the rollout's values; null turns it off."""


@dataclass
class ServedRewardModelConfig:
    """The frozen reward model of the critic server."""

    combine_rm_and_critic_server: bool = True
    """Also serve the frozen reward model in this process; false serves only values, and then model.path may be a language model,
    too."""
    label_weights: list[float] | None = None
    """One weight for each label of a reward model with several. The reward is the weighted sum of the labels."""
    append_eos: bool | None = None
    """In reward_infer, end every response with the end-of-text token; null does as in the reward model's training."""
    normalize_rewards: bool = False
    """Serve (reward - mean) / std, by the statistics stored with the reward model, and values on that scale."""
    offload_reward_model: bool = False
    """Keep the reward model's weights in host memory while the critic trains (CUDA only; no effect on CPU). Otherwise it stays on
    the device, with engine.zero_stage=3 sharded over the ranks."""

    def validate(self) -> None:
        require_label_weights("reward_model.label_weights", self.label_weights)


@dataclass
class ServerTlsConfig:
    """Certificates of the server, as PEM files; without them the protocol is plain HTTP."""

    certificate: str | None = field(default=None, metadata={CHECK: existing_file})
    """The server's certificate, followed by its chain."""
    key: str | None = field(default=None, metadata={CHECK: existing_file})
    """Its private key, without a passphrase; null if the certificate's file holds it."""
    client_ca: str | None = field(default=None, metadata={CHECK: existing_file})
    """Authorities for mutual TLS: clients must show a certificate that one of them signed."""

    def validate(self) -> None:
        given = self.key or self.client_ca
        require(self.certificate is not None or given is None, "server.tls.certificate", None,
                f"a certificate beside {given}")  # fmt: skip


@dataclass
class ServerConfig:
    """The front door: the server's address, and the conditions of access."""

    host: str = "127.0.0.1"
    """Name or address to bind. Any address but loopback needs a token."""
    port: int = setting(5567, ge=0, lt=65536, expected="a TCP port, or 0 for a free one")
    """HTTP port; 0 takes a free one (see ready_file)."""
    token: TokenConfig = field(default_factory=TokenConfig)
    """The secret that every request must carry in the header x-critic-token. If you give none, a server on loopback makes
    ~/.config/nemo_style_rlhf/token, and your actor on the same host reads it."""
    tls: ServerTlsConfig = field(default_factory=ServerTlsConfig)
    ready_file: str | None = None
    """JSON file with host, port, pid and boot_id, written when the server answers and removed when it ends."""
    max_request_bytes: int = setting(64 * 2**20, ge=4096, lt=2**31, expected="4096 to 2147483647 bytes")
    """Maximum tensor bytes of one request; clients split larger ones."""


@dataclass
class CriticServerConfig(ServerConfig):
    """The front door of a critic or reward server, and the backend behind it."""

    backend: str = setting("pytriton", among=("pytriton", "native"))
    """pytriton: NVIDIA's Triton answers; this needs the environment .venv-server. native: the server's own process answers, in
    that environment or the trainers'. docs/server-backend.md compares them."""
    metrics: bool = False
    """Serve Triton's Prometheus metrics at /metrics, to callers with the token."""
    verbose: bool = False
    """Show Triton's own log."""
    shutdown_grace_s: float = setting(20.0, gt=0, expected="seconds above 0")
    """Seconds after SIGTERM for a running call to finish; then it is abandoned and counts as not applied."""

    def idle(self) -> Iterator[tuple[str, str]]:
        """See :func:`base.idle_settings`."""
        if self.backend == "native":
            yield "verbose", "does nothing: it is Triton's log, and server.backend=native has none"

    def validate(self) -> None:
        require(not self.metrics or self.backend == "pytriton", "server.metrics", self.metrics,
                "false beside server.backend=native: they are Triton's")  # fmt: skip


@dataclass
class TrainingServerConfig(CriticServerConfig):
    """The front door of a critic server, and the limits of its sequences and train steps."""

    max_length: int = setting(0, ge=0, expected="a number of tokens, or 0 for the model's own")
    """Longest accepted sequence, in tokens; 0 takes the model's own limit, with value_model.path the smaller of both."""
    max_staged_bytes: int = 512 * 2**20
    """Maximum tensor bytes of an incomplete train step that is sent in parts: 16 per token and 4 per sequence, so that the
    default holds 4,000 sequences of 8,000 tokens. The bytes are copied once more when the step is complete."""

    def validate(self) -> None:
        super().validate()
        require(
            self.max_staged_bytes >= self.max_request_bytes,
            "server.max_staged_bytes",
            self.max_staged_bytes,
            f"server.max_request_bytes={self.max_request_bytes} bytes or more",
        )


@dataclass
class PPOCriticConfig:
    """Configuration of ``servers/serve_ppo_critic.py``."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    """The reward model, in a layout of docs/models.md. The critic starts as its copy unless value_model.path is set. Without a
    served reward model, it may be a language model."""
    value_model: ValueModelConfig = field(default_factory=ValueModelConfig)
    reward_model: ServedRewardModelConfig = field(default_factory=ServedRewardModelConfig)
    server: TrainingServerConfig = field(default_factory=TrainingServerConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    """Training of the critic."""

    @property
    def critic_start(self) -> ModelConfig:
        """The model from which the critic starts; the reward model if there is no critic."""
        return replace(
            self.model, path=(self.value_model.path if self.value_model.enabled else None) or self.model.path
        )

    @property
    def roles(self) -> list[str]:
        """See :attr:`protocol.Status.roles`."""
        if not self.value_model.enabled:
            return ["reward", "tokens"]
        return ["critic", "reward"] if self.reward_model.combine_rm_and_critic_server else ["critic"]

    def idle(self) -> Iterator[tuple[str, str]]:
        """See :func:`base.idle_settings`."""
        if not self.value_model.enabled:
            for name in ("value_model.path", "value_model.loss_clip_val", "server.max_staged_bytes"):
                yield name, "does nothing: there is no critic (value_model.enabled=false)"

    def validate(self) -> None:
        self.engine.validate_with(self.model)
        require(
            self.value_model.enabled or self.reward_model.combine_rm_and_critic_server,
            "reward_model.combine_rm_and_critic_server",
            False,
            "true with value_model.enabled=false, which leaves a server nothing else to serve",
        )
