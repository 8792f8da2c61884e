"""Error of the embedded PostgreSQL."""


class ServerError(RuntimeError):
    """The embedded PostgreSQL cannot be started, stopped or found; the text names the remedy."""
