"""Traffic reports."""
