"""The parent of temporary folders with sockets: the path of a socket has at most 107 characters."""

import os
import tempfile

from nemo_style_rlhf.errors import UserError

LONGEST = 39
"""Maximum characters of the folder's path, to leave room for the rest."""
OTHERS = ("/tmp", "/var/tmp", "/dev/shm")


def parent_of_sockets() -> str:
    """The usual folder of temporary files, or another one if its path is too long.

    Raises:
        UserError: no folder is short enough.
    """
    usual = tempfile.gettempdir()
    for folder in (usual, *OTHERS):
        if len(os.fsencode(folder)) <= LONGEST and os.access(folder, os.W_OK | os.X_OK):
            return folder
    raise UserError(
        f"TMPDIR={usual} is too long for the paths of sockets: set it to a folder of at most {LONGEST} characters"
    )
