"""Finds ready engines: each writes ``<folder>/<name>.json``, with its host and port."""

import json
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from nemo_style_rlhf.engines.client import EngineClient
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.generation import EnginesConfig
from nemo_style_rlhf.wire.secret import LOOPBACK, own_token_made

RETRIES = 1
"""Attempts of a request after the first: another engine can do it, too."""


def ready_files(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and ready file of each engine, in the order of names."""
    for path in sorted(folder.glob("*.json")):
        with suppress(OSError, ValueError):  # the engine may be removing it
            yield path.stem, json.loads(path.read_text())


def client_of(name: str, where: dict[str, Any], config: EnginesConfig, token: str | None) -> EngineClient:
    """A client of the engine ``name``, from the content ``where`` of its ready file.

    Raises:
        UserError: it is on another host and listens only there, or it wants a token and there is none.
    """
    host = where["host"]
    if host in LOOPBACK and where["hostname"] != socket.gethostname():
        raise UserError(
            f"engine {name} on {where['hostname']} listens on {host}, which leads to this host, {socket.gethostname()}: "
            "start it with server.host=, an address of its own host"
        )
    if token is None:
        if host not in LOOPBACK:
            raise UserError(
                f"engine {name} at {host} wants a token: give that of its server.token in "
                f"generation.engines.token.token_file or the environment variable {config.token.token_env}"
            )
        token = own_token_made()
    return EngineClient(
        host, where["port"], token=token, retries=RETRIES, timeout_s=config.request_timeout_s, tls=config.tls
    )
