"""Reports on traffic."""
