"""Exchanges in a Django project: their definitions, their rules, the graph they make, their loops.

``psqlmessages.exchanges`` is the pure part: what a message's way is, without any database.
"""
