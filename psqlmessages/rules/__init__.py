"""Rules and web identities as code or as a JSON document, and their changes."""
