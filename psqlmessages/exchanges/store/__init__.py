"""Stored exchanges of a Django project: definitions, missing rules, route graph, worker, statistics.

``psqlmessages.exchanges`` is the pure part, which routes messages without a database.
"""
