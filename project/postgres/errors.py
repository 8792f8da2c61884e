"""What the starter raises, in words that say what to do."""


class ServerError(RuntimeError):
    """The embedded PostgreSQL cannot do what was asked."""
