"""Benchmarks: each measures costs and compares them with other programs."""
