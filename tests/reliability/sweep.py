"""A plugin of pytest: the test of each mutation, without it and with it, on one database."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable

import psycopg
import pytest
from django.db import connection

from tests.conftest import TestedServer
from tests.reliability.mutation import MutationError
from tests.reliability.mutations import MUTATIONS
from tests.servers import SERVER

# What a mutation is that has merely broken the function: no proof that the check is guarded.
BROKEN = re.compile(r"(SyntaxError|Undefined\w+|Ambiguous\w+|DatatypeMismatch|CannotCoerce): ")
VERDICTS = "killed", "SURVIVED", "ERROR"
WHY = re.compile(r"^E .*$", re.MULTILINE)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take the names."""
    parser.addoption("--mutations", nargs="+", default=[])


def pytest_configure(config: pytest.Config) -> None:
    """Run the tests in our way."""
    config.pluginmanager.register(Sweep(config.getoption("mutations")))


class Sweep:
    """Runs what was collected."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._verdicts: Counter[str] = Counter()
        self._failed: list[pytest.TestReport] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note what fails."""
        if report.failed:
            self._failed.append(report)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run no test once, but those of each mutation."""
        # The first one makes the database, in which a mutation can be installed then.
        self._first_failing(session, session.items[:1])
        for name in self._names:
            what, how = self._verdict(session, name)
            self._verdicts[what] += 1
            print(f"{what:8} {name}: {how}", flush=True)
        print(*(f"{self._verdicts[what]} {what}" for what in VERDICTS), sep=", ")
        session.testsfailed = self._verdicts["SURVIVED"] + self._verdicts["ERROR"]
        return True

    def _verdict(self, session: pytest.Session, name: str) -> tuple[str, str]:
        """What becomes of a mutation, and how that shows."""
        mutation = MUTATIONS[name]
        server = TestedServer(session.config.stash[SERVER], connection.settings_dict["NAME"])
        found = re.compile(rf"tests/{re.escape(mutation.test)}($|\[|::)")
        items = [item for item in session.items if found.match(item.nodeid)]
        with psycopg.connect(server.url(), autocommit=True) as owner, owner.cursor() as cursor:
            try:
                with mutation.installed(cursor):
                    killer = self._first_failing(session, items)
            except (MutationError, psycopg.Error) as error:
                return "ERROR", f"this is no mutation: {error}"
        if killer is None:
            return "SURVIVED", mutation.test
        if BROKEN.search(self._failed[0].longreprtext):
            return "ERROR", "\n".join(WHY.findall(self._failed[0].longreprtext))
        # Without it the same must pass, whatever the mutations before have left.
        if self._first_failing(session, [killer]):
            return "ERROR", f"{killer.nodeid} fails without it\n{self._failed[0].longreprtext}"
        return "killed", killer.nodeid

    def _first_failing(
        self, session: pytest.Session, items: Iterable[pytest.Item]
    ) -> pytest.Item | None:
        """Run tests until one fails, as `_failed` tells."""
        # What a module's fixtures made, tests of other mutations have emptied.
        session._setupstate.teardown_exact(session)  # type: ignore[arg-type]
        self._failed.clear()
        for item in items:
            item.ihook.pytest_runtest_protocol(item=item, nextitem=item.parent)
            if self._failed:
                return item
        return None
