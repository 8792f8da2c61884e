"""An app with handlers, for processes that tests start."""

# While a session holds this advisory lock, a handler waits.
WORK = 987_654
