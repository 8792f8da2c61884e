"""Problems that an operator must act on now: their form and order. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from django.utils.translation import gettext

from psqlmessages.cli.output import one_line

if TYPE_CHECKING:
    from psqlmessages.conf import Settings

Rows = Sequence[Sequence[Any]]

_DOCTOR: Final = "python manage.py psqlmessages doctor"


class Severity(StrEnum):
    """How urgent a problem is. ERROR: messages are blocked or lost. WARNING: act soon."""

    ERROR = "error"
    WARNING = "warning"


class Link(NamedTuple):
    """The page that shows a problem: a list, or with a ``name`` the page of one object.

    The name of an exchange is its primary key, because its page is in the admin.
    """

    page: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is wrong now.

    ``since`` is None if the time is unknown. ``find_problems`` sets ``check``, the check's name.
    ``permissions``: those that a user needs for the cure on the page.
    """

    name: str
    severity: Severity
    sentence: str
    link: Link | None
    cure: str
    since: datetime | None = None
    check: str = ""
    permissions: Sequence[str] = ()

    @property
    def id(self) -> str:
        """An id that stays the same as long as the problem exists."""
        return f"{self.check}:{self.name}" if self.name else self.check


Describe = Callable[[Rows, datetime, "Settings"], Iterator[Problem]]


@dataclass(frozen=True, slots=True)
class ProblemCheck:
    """A check: a query with its values, and the function that describes its rows."""

    name: str
    query: str
    describe: Describe
    values: Callable[[Settings], Sequence[Any]]


def find_problems(
    answers: Iterable[tuple[ProblemCheck, Rows | None]], now: datetime, settings: Settings
) -> list[Problem]:
    """Return the problems, errors first. ``answers``: the rows of checks; None if one failed."""
    problems: list[Problem] = []
    for check, rows in answers:
        if rows is None:
            problems.append(_unchecked(check))
            continue
        # Escape control characters in names, also those that change the direction of text: the
        # checks need no isolate().
        problems += (
            replace(
                problem,
                name=one_line(problem.name),
                sentence=one_line(problem.sentence),
                cure=one_line(problem.cure),
                check=check.name,
            )
            for problem in check.describe(rows, now, settings)
        )
    # Alphabetical order puts "error" before "warning".
    return sorted(problems, key=lambda problem: problem.severity)


def database_problem() -> Problem:
    """Return the problem of a database that does not answer."""
    return Problem(
        "",
        Severity.ERROR,
        gettext("PostgreSQL cannot be reached."),
        None,
        gettext("Check that the server runs, then run: {command}").format(command=_DOCTOR),
        check="database",
    )


def process_problems(parts: Iterable[str]) -> list[Problem]:
    """Return the problems of the parts of this process that do not work."""
    text = gettext("The part “{part}” of this server process does not work.")
    cure = gettext("Read the log of the process. If the problem stays, restart the process.")
    return [
        Problem(part, Severity.ERROR, text.format(part=part), None, cure, check="process")
        for part in parts
    ]


def _unchecked(check: ProblemCheck) -> Problem:
    text = gettext(
        "The check “{check}” could not run: its query took too long, is not allowed,"
        " or lacks a table or function."
    )
    cure = gettext("Run: {command}").format(command=_DOCTOR)
    sentence = text.format(check=check.name)
    return Problem(check.name, Severity.WARNING, sentence, None, cure, check="unchecked")
