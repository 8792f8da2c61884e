"""A plugin of pytest: instead of all tests once, the killer of each mutant, with and without it."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import psycopg
import pytest
from django.db import connection

from tests.mutation.catalogue import Catalogue, Killers
from tests.mutation.mutants import Mutant
from tests.servers import SERVER

# The mutant is merely broken: no proof that the condition is guarded.
BROKEN = re.compile(r"(SyntaxError|Undefined\w+|Ambiguous\w+|DatatypeMismatch|CannotCoerce): ")
VERDICTS = "killed", "SURVIVED", "ERROR", "without a killer"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--mutants", default="", help="beginning of the names")
    parser.addoption("--find", type=int, default=0, help="how many more to look for killers of")
    parser.addoption("--files", type=int, default=10, help="how many files to try for each")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Sweep(config))


class Owner:
    def __init__(self, url: str) -> None:
        self._url = url
        self.connection = psycopg.connect(url, autocommit=True)

    def execute(self, statement: str) -> None:
        try:
            self.connection.execute(statement)
        except psycopg.OperationalError:
            self.connection = psycopg.connect(self._url, autocommit=True)
            self.connection.execute(statement)


class Sweep:
    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._failed: list[pytest.TestReport] = []
        self._verdicts: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.append(report)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run no test once, but those of each mutant."""
        self._fails_alone(session, session.items[0])  # it makes the database
        wanted, killers = self._config.getoption("mutants"), Killers()
        server = session.config.stash[SERVER]
        owner = Owner(server.url(connection.settings_dict["NAME"]))
        catalogue = Catalogue(owner.connection)
        found = catalogue.mutants(wanted)
        for name in sorted(killers.by_mutant):
            if name.startswith(wanted):
                killer = killers.by_mutant[name]
                items = [each for each in session.items if plain(each) == killer]
                self._tell(*self._verdict(session, owner, found.get(name), items), name)
        unknown = [name for name in found if name not in killers.by_mutant]
        number = min(len(unknown), self._config.getoption("find"))
        for name in random.sample(unknown, number):
            files = catalogue.files_for(found[name].function)[: self._config.getoption("files")]
            items = [item for file in files for item in session.items if item.path == file]
            verdict, how = self._verdict(session, owner, found[name], items)
            if verdict == "killed":
                killers.add(name, how)
            self._tell("without a killer" if verdict == "SURVIVED" else verdict, how, name)
        owner.connection.close()
        print(*(f"{self._verdicts[what]} {what}" for what in VERDICTS), sep=", ")
        session.testsfailed = self._verdicts["SURVIVED"] + self._verdicts["ERROR"]
        return True

    def _tell(self, verdict: str, how: str, name: str) -> None:
        self._verdicts[verdict] += 1
        print(f"{verdict:8} {name} | {how}", flush=True)

    def _verdict(
        self, session: pytest.Session, owner: Owner, mutant: Mutant | None, items: list[pytest.Item]
    ) -> tuple[str, str]:
        """What becomes of a mutant, and the test that shows it."""
        if mutant is None or not items:
            return "ERROR", "its function changed, or its test is gone: look for another killer"
        try:
            owner.execute(mutant.mutated)
        except psycopg.Error as error:
            return "ERROR", f"it cannot be made: {error}"
        try:
            killer = self._killer(session, items)
        finally:
            owner.execute(mutant.source)
        if killer is None:
            return "SURVIVED", plain(items[0])
        if broken := BROKEN.search(self._failed[0].longreprtext):
            return "ERROR", f"{plain(killer)}: {broken.group()}"
        if self._fails_alone(session, killer):
            return "ERROR", f"{plain(killer)} fails without it\n{self._failed[0].longreprtext}"
        return "killed", plain(killer)

    def _killer(self, session: pytest.Session, items: list[pytest.Item]) -> pytest.Item | None:
        """Return the first test that also fails when it runs alone.

        Others fail because of what an earlier test has left.
        """
        failing = self._failing(session, items)
        return next((item for item in failing if self._fails_alone(session, item)), None)

    def _fails_alone(self, session: pytest.Session, item: pytest.Item) -> bool:
        return any(self._failing(session, [item]))

    def _failing(self, session: pytest.Session, items: list[pytest.Item]) -> Iterator[pytest.Item]:
        """Run tests without the fixtures of earlier ones; those that fail, as `_failed` tells."""
        session._setupstate.teardown_exact(session)  # type: ignore[arg-type]
        for item, following in pairwise([*items, session]):
            self._failed.clear()
            item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
            if self._failed:
                yield item


def plain(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]
