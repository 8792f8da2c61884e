"""Error of the embedded PostgreSQL."""


class ServerError(RuntimeError):
    """The embedded PostgreSQL cannot be found, started, stopped or used; the text says why."""
