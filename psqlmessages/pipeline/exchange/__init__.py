"""Exchanges on Spark."""
