"""Configuration of the actor's connection to the critic process."""

from dataclasses import dataclass, field
from typing import ClassVar

from nemo_style_rlhf.schema.base import require, setting
from nemo_style_rlhf.schema.common import TokenConfig
from nemo_style_rlhf.schema.paths import CHECK, existing_file

SYSTEM = "system"


def _existing_ca(path: str, _: object = None) -> str | None:
    return None if path == SYSTEM else existing_file(path)


@dataclass
class ClientTlsConfig:
    """PEM files to verify a server that has a certificate."""

    ca: str | None = field(default=None, metadata={CHECK: _existing_ca})
    """Trusted signers of the server's certificate, or that certificate itself; "system" takes the host's. null: plain HTTP."""
    certificate: str | None = field(default=None, metadata={CHECK: existing_file})
    """The certificate that this process shows, for mutual TLS."""
    key: str | None = field(default=None, metadata={CHECK: existing_file})
    """Its private key, without a passphrase; null if the certificate's file holds it."""

    def validate_in(self, section: str) -> None:
        """Raise UserError if keys contradict each other."""
        given = self.certificate or self.key
        require(self.ca is not None or given is None, f"{section}.tls.ca", None, f"a file, or system, beside {given}")


@dataclass(frozen=True)
class Peer:
    """Names of a server, its script and its keys in error sentences."""

    name: str
    script: str
    """Script that starts the server."""
    section: str
    """Section of the actor's configuration about the server."""
    arguments: str
    """Arguments that the script requires."""
    address: str = ""
    """Source of the server's address; empty: ``host`` and ``port`` of the section."""

    def command(self, port: int) -> str:
        """The command that starts the server, in the repository's folder."""
        return f".venv-server/bin/python {self.script} {self.arguments} server.port={port}"


@dataclass
class RemoteCriticConfig:
    """Address, timeouts and sizes of the remote critic."""

    peer: ClassVar[Peer] = Peer(
        "critic server", "servers/serve_ppo_critic.py", "remote_critic_rm", "run.output_dir=OUTPUT_DIR model.path=REWARD_MODEL"
    )  # fmt: skip

    host: str = "127.0.0.1"
    """Name or address of the server's host."""
    port: int = setting(5567, gt=0, lt=65536, expected="a TCP port, 1 to 65535")
    """server.port of the critic process."""
    token: TokenConfig = field(default_factory=TokenConfig)
    """The secret with which the server was started. Without it, requests to loopback carry the token of this user's own servers,
    see server.token."""
    tls: ClientTlsConfig = field(default_factory=ClientTlsConfig)
    wait_for_server_s: float = setting(600.0, ge=0, expected="seconds from 0 up")
    """Longest wait for a server that is still loading, or gone."""
    infer_timeout_s: float = setting(300.0, gt=0, expected="seconds above 0")
    """Longest wait for one inference answer."""
    train_timeout_base_s: float = setting(300.0, gt=0, expected="seconds above 0")
    """Longest wait for the answer to a train step or a checkpoint, plus ..."""
    train_timeout_per_1k_tokens_s: float = 2.0
    """... this for every 1,000 tokens of the step."""
    retries: int = setting(8, ge=0, expected="a number from 0 up")
    """Attempts after a broken connection, a timeout or the refusal of a stopping server, 0.5 s apart at first, up to 10 s;
    retries never train twice."""
    max_request_bytes: int = setting(64 * 2**20, ge=4096, expected="4096 bytes or more")
    """Maximum tensor bytes of one request; larger batches are split. If the server's own limit is smaller, that one applies."""

    def validate(self) -> None:
        self.tls.validate_in(self.peer.section)
