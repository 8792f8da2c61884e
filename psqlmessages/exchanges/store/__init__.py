"""Stored exchanges of a Django project: definitions, missing rules, graph, worker, statistics.

``psqlmessages.exchanges`` is the pure part, which routes messages without a database.
"""
