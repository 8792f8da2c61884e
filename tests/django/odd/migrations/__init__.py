"""Migrations of the user model."""
