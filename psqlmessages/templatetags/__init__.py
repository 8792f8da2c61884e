"""Template tags for the admin, the monitor and the page of the REST API."""
