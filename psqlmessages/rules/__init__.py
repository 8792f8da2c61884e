"""Definitions: the rules and web identities as one JSON document, and what it would change."""
