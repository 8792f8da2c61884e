"""The soak: everything at once for half an hour, while what must not grow is watched."""
