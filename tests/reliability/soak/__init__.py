"""The soak test: everything runs for half an hour, while gauges that must not grow are read."""
