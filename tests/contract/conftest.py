"""The fixture `world` of the SQL tests, for the contract tests."""

from tests.sql.conftest import world

__all__ = ["world"]
