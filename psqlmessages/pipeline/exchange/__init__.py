"""Exchanges that run on Spark."""
