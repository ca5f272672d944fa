"""Admits requests that carry the token and name this host.

A browser shows the token once, in the link that the terminal prints, and gets it back as a cookie that other sites cannot read.
"""

import hashlib
import hmac
import ipaddress
import socket
import ssl
from dataclasses import dataclass, field

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.common import TokenConfig
from nemo_style_rlhf.wire.front_door import tls_context
from nemo_style_rlhf.wire.listening import take_port
from nemo_style_rlhf.wire.secret import LOOPBACK, own_token_made, read_token

TOKEN_ENV = "NSR_WATCH_TOKEN"
PORT_PATIENCE_S = 1.0
"""Seconds to wait for a port that a page, stopped a moment ago, may still hold."""


@dataclass(frozen=True)
class Door:
    """The address of the page, bound and not yet listening, and the conditions of access."""

    listener: socket.socket
    token: str = field(repr=False)
    link_shows_token: bool
    """True if the token is the page's own. The user types a token of their own."""
    names: frozenset[str]
    """Names of this host that a request may use, as well as addresses. An attacker's name may lead here, too (DNS rebinding)."""
    tls: ssl.SSLContext | None

    @property
    def url(self) -> str:
        host, port = self.listener.getsockname()[:2]
        scheme = "http" if self.tls is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}/"

    @property
    def link(self) -> str:
        """Address to open in a browser."""
        return f"{self.url}?token={self.token}" if self.link_shows_token else self.url

    def is_here(self, host: str) -> bool:
        """True if a request's Host header, with or without a port, names this host."""
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return name.lower() in self.names
        return True


def take_door(host: str, port: int, token_file: str | None, certificate: str | None, key: str | None) -> Door:
    """Bind the page's address.

    Raises:
        UserError: the address needs a token and has none, the port is in use, or the certificate does not load.
    """
    given = read_token(TokenConfig(token_file, TOKEN_ENV), key="--token-file")
    if host.strip("[]") not in LOOPBACK and given is None:
        raise UserError(
            f"--host={host} would open the page to the network without a token: set --token-file or the environment variable "
            f"{TOKEN_ENV}, or bind 127.0.0.1"
        )
    if key is not None and certificate is None:
        raise UserError(f"--key={key} needs the certificate that it belongs to: give --certificate, too")
    try:
        tls = None if certificate is None else tls_context(certificate, key, None)
    except (OSError, ssl.SSLError) as error:
        raise UserError(
            f"--certificate={certificate} does not load ({error}): expected PEM files, certificate and chain, and --key with a "
            "private key without a passphrase"
        ) from error
    listener = take_port(host, port, prefix="--", patience_s=PORT_PATIENCE_S)
    names = {"localhost", host.lower()}
    if host.strip("[]") not in LOOPBACK:
        names |= {socket.gethostname().lower(), socket.getfqdn().lower()}  # the latter asks a name server
    return Door(listener, given or _page_token(), given is None, frozenset(names), tls)


def _page_token() -> str:
    """Derive the page's token from the token of this user's servers: a link stays valid across starts, but servers refuse it."""
    return hmac.new(own_token_made().encode(), b"watch", hashlib.sha256).hexdigest()
