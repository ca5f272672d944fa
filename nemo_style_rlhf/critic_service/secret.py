"""The shared secret of the two processes: read from a file or the environment, never from a command line."""

import os
from pathlib import Path

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.common import TokenConfig


def read_token(config: TokenConfig) -> str | None:
    """The token, or None where neither a file nor the environment variable is given.

    Raises:
        UserError: the file is missing or empty, or the token does not fit into a header.
    """
    if config.token_file is not None:
        path = Path(config.token_file).expanduser()
        if not path.is_file():
            raise UserError(f"token.token_file={config.token_file} does not exist: write the shared secret into it")
        source, token = f"token.token_file={config.token_file}", path.read_text().strip()
    elif config.token_env in os.environ:
        source, token = f"the environment variable {config.token_env}", os.environ[config.token_env].strip()
    else:
        return None
    if not token or not token.isascii() or not token.isprintable():
        raise UserError(
            f"{source} holds no usable token: expected printable ASCII characters, e.g. from `openssl rand -hex 32`"
        )
    return token
