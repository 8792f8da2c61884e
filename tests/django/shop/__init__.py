"""An app with handlers, which tell what they did on channels of PostgreSQL."""
