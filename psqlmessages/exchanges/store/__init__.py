"""Stored exchanges of a Django project: definitions, missing rules, graph, worker, statistics."""
