"""Raises the limit on open files where the system allows it, and refuses to run if the limit is too low."""

import resource

from nemo_style_rlhf.errors import UserError

NEEDED, AMPLE = 512, 4096
"""Required and preferred limit. A small run had 156 files open in the server, 69 in the actor. The front door keeps up to 256
connections of unauthenticated clients in addition to its callers' connections. Each takes two files."""


def require_open_files() -> None:
    """Raise the limit if necessary. Raises UserError if it is too low and this process cannot raise it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= NEEDED:
        return
    possible = AMPLE if hard == resource.RLIM_INFINITY else min(hard, AMPLE)
    if possible < NEEDED:
        raise UserError(
            f"a process may open {hard} files here and {NEEDED} are needed: start it from a shell with `ulimit -n {AMPLE}`"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (possible, hard))
