"""The one command of the app."""
