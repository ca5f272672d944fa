"""The exception type that is shown to users without a traceback."""


class UserError(Exception):
    """A mistake in what the user gave: one sentence with what was given, what is expected and what to change."""


class StorageError(UserError):
    """A disk refused to write: once there is room, the same succeeds."""
