"""Benchmarks: what it costs, measured; each prints its figures."""
