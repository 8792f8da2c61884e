"""Queues: SQL, by programs of ordinary roles."""
