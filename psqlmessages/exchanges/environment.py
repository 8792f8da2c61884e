"""The environment of one traversal: what selectors see, converted once as long as it stays."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from psqlmessages.exchanges.compiling import Window, environment
from psqlmessages.exchanges.conversion import Intake
from psqlmessages.exchanges.errors import SelectorFailed

if TYPE_CHECKING:
    from cel_expr_python.cel import Activation

    from psqlmessages.exchanges.messages import Message


@dataclass
class Env:
    """What a selector sees: ``msg``, ``state`` (a map that lives through one traversal), ``now``.

    A selector in code gets copies: what it changes in place counts once it has returned.
    """

    msg: Message
    state: dict[str, Any] = field(default_factory=dict)
    now: datetime | None = None


class View:
    """Gives expressions what they see of an Env.

    Those of an exchange share one conversion, unless it would be too much for one of them or has
    something that CEL cannot hold: then each has its own, and only those fail that look there.
    """

    def __init__(self, env: Env, shared: Window | None = None) -> None:
        self.env = env
        self._shared = shared
        self._activations: dict[Window, Activation | SelectorFailed] = {}

    def forget(self) -> None:
        """Convert anew from here on, because something has changed."""
        self._activations.clear()

    def activation(self, window: Window) -> Activation:
        """Return what a window shows; raise SelectorFailed where it cannot."""
        if self._shared is not None:
            together = self._converted(self._shared)
            if not isinstance(together, SelectorFailed):
                return together
        alone = self._converted(window)
        if isinstance(alone, SelectorFailed):
            raise alone
        return alone

    def _converted(self, window: Window) -> Activation | SelectorFailed:
        known = self._activations.get(window)
        if known is None:
            try:
                known = self._convert(window)
            except SelectorFailed as failure:
                known = failure
            self._activations[window] = known
        return known

    def _convert(self, window: Window) -> Activation:
        env = self.env
        values = Intake(window.units).part({"msg": vars(env.msg), "state": env.state}, window.look)
        if "now" in window.look:
            if env.now is None:
                raise SelectorFailed("now is not given")
            values["now"] = env.now
        return environment().Activation(values)
