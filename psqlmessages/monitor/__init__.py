"""The live monitor: what the nodes do, as it happens."""
