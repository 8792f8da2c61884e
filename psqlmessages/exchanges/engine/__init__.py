"""Runs exchanges with asyncio: takes elements, routes them, pushes copies. No Django."""
