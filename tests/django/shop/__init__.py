"""An app with handlers, for processes that tests start."""

# Whoever holds this advisory lock keeps a handler at work.
WORK = 987_654
