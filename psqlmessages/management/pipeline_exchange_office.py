"""The office of an exchange on Spark: a thread that uses Django while the query runs."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Thread
from time import monotonic
from typing import TYPE_CHECKING, Final

from django.db import InterfaceError, OperationalError, connections

from psqlmessages.commands.output import one_line
from psqlmessages.management.pipeline_exchange_clerk import Clerk
from psqlmessages.models import Exchange

if TYPE_CHECKING:
    from psqlmessages.pipeline.exchange import SparkExchanges

_LOOK_SECONDS: Final = 0.5
_WRITE_SECONDS: Final = 2.0


class Office(Thread):
    """Takes up what changes in the definition, and writes what is counted, as Spark runs."""

    def __init__(
        self, name: str, clerk: Clerk, exchanges: SparkExchanges, say: Callable[[str], object]
    ) -> None:
        super().__init__(name=f"exchange {name}")
        self._name = one_line(name)
        self._clerk = clerk
        self._exchanges = exchanges
        self._tell = say
        self._write_at = 0.0
        self._said = ""
        self._ending = Event()
        self._error: BaseException | None = None

    def look(self) -> None:
        """Let run what is to run; raises Exchange.DoesNotExist."""
        graphed = self._clerk.look()
        self._exchanges.define([] if graphed is None else [graphed])
        state = f"{self._name} is stopped" if graphed is None else f"runs {self._name}"
        self._say(state if graphed is None else f"{state}; Ctrl-C ends it")

    def run(self) -> None:
        """Do so until closed, or until the exchange is no more, which ends its query."""
        try:
            while not self._ending.wait(_LOOK_SECONDS):
                self._mind()
        except Exchange.DoesNotExist:
            self._say(f"{self._name} is removed")
            self._exchanges.stop()
        except BaseException as error:  # noqa: BLE001 - raised by whoever closes
            self._error = error
            self._exchanges.stop()
        finally:
            connections.close_all()

    def close(self) -> None:
        """End, once all is written; raises what went wrong."""
        self._ending.set()
        self.join()
        if self._error is not None:
            raise self._error
        try:
            self._clerk.write()
        except (OperationalError, InterfaceError) as error:
            self._say(f"what was counted last is not written: {_line(error)}")

    def _mind(self) -> None:
        try:
            self.look()
            if monotonic() >= self._write_at:
                self._clerk.write()
                self._write_at = monotonic() + _WRITE_SECONDS
        except (OperationalError, InterfaceError) as error:
            connections.close_all()
            self._say(f"the definition cannot be read: {_line(error)}")

    def _say(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self._tell(text)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
