"""Template tags of the admin, the monitor and the page of the REST API."""
