"""Live monitor: pages that show node activity in real time."""
