"""Exceptions that are shown to users without a traceback."""

USER_ERROR_EXIT = 2
"""Exit code of a program after a :class:`UserError`."""


class UserError(Exception):
    """A user's mistake, as one sentence that says what was given, what is expected and what to change."""


class StorageError(UserError):
    """A disk refused to write; the same write succeeds once there is room."""
