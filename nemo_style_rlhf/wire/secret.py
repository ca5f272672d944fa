"""The shared secret: read from a file or the environment, never from a command line, and kept from child processes."""

import ctypes
import logging
import os
import secrets
from contextlib import suppress
from pathlib import Path

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.common import TokenConfig

LOGGER = logging.getLogger(__name__)
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_from_environment: dict[str, str] = {}


def read_token(config: TokenConfig, *, key: str = "token.token_file") -> str | None:
    """The token, or None if neither a file nor the environment variable is given.

    The variable is removed from the environment, so that no child process inherits it. It is also overwritten in the memory
    that the kernel shows as /proc/PID/environ, because this user's other processes can read that file.

    Args:
        key: the user's name for the file's setting, for errors.

    Raises:
        UserError: the file is missing or empty, or the token does not fit into a header.
    """
    if config.token_env in os.environ:
        _from_environment[config.token_env] = os.environ[config.token_env]
        _overwrite(config.token_env)
        del os.environ[config.token_env]
    if config.token_file is not None:
        path = Path(config.token_file).expanduser()
        if not path.is_file():
            raise UserError(f"{key}={config.token_file} does not exist: write the shared secret into it")
        if path.stat().st_mode & 0o077:
            LOGGER.warning("others can read %s=%s: chmod 600 it", key, config.token_file)
        return _usable(path.read_text(), f"{key}={config.token_file}")
    if config.token_env in _from_environment:
        return _usable(_from_environment[config.token_env], f"the environment variable {config.token_env}")
    return None


def _overwrite(variable: str) -> None:
    """Overwrite the variable's value with x in place: the environment block of a process outlives ``unsetenv``."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    if address := getenv(variable.encode()):
        ctypes.memset(address, ord("x"), len(ctypes.string_at(address)))


def own_token_file() -> Path:
    """Path of the token of this user's servers on loopback that are configured without one."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "nemo_style_rlhf" / "token"


def own_token() -> str | None:
    """The token of this user's servers on loopback; None before the first server has made it.

    Raises:
        UserError: other users could read or replace it, or it cannot be looked for.
    """
    path = own_token_file()
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UserError(
            f"{path}, where the token of your servers would be, cannot be read ({error.strerror}): set HOME to a folder of your "
            "own, or give both processes a token of yours (server.token.token_file, remote_critic_rm.token.token_file)"
        ) from error
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise UserError(f"{path} holds the token of your servers and is not yours alone: chmod 600 it, or delete it")
    return _usable(path.read_text(), str(path))


def own_token_made() -> str:
    """Like :func:`own_token`, but make the token if there is none.

    Raises:
        UserError: other users could read or replace it, or it cannot be written.
    """
    path = own_token_file()
    if (token := own_token()) is not None:
        return token
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        beside = path.with_name(f"{secrets.token_hex(8)}.tmp")
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
        with suppress(FileExistsError):
            os.link(beside, path)  # do not replace a token that another server has just made
        beside.unlink()
    except OSError as error:
        raise UserError(
            f"{path}, the token of your servers, cannot be written ({error.strerror}): set server.token.token_file or the "
            "environment variable server.token.token_env instead"
        ) from error
    return own_token_made()


def _usable(raw: str, source: str) -> str:
    token = raw.strip()
    if not token or not token.isascii() or not token.isprintable():
        raise UserError(
            f"{source} holds no usable token: expected printable ASCII characters, e.g. from `openssl rand -hex 32`"
        )
    return token
