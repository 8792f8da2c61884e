"""Errors of selectors: what is refused when an expression is compiled, and what stops one."""

from __future__ import annotations

from psqlmessages.exceptions import InvalidArgument, MessagesError


class SelectorError(InvalidArgument):
    """An expression that cannot be compiled, or that could exceed its bounds: nothing is stored."""


class SelectorsUnavailable(MessagesError):
    """The package that compiles expressions is not installed."""

    hint = "pip install 'psqlmessages[exchanges]'"


class SelectorFailed(MessagesError):
    """An evaluation that failed; it counts as no, and the other destinations go on."""
