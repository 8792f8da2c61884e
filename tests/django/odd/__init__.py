"""A project whose settings differ from most, for `manage.py test`."""
