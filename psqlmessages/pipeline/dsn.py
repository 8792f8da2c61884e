"""DSN: where the database is, read from the environment or a file, and never from an option.

Options are pickled into plans and shown in Spark's pages; the environment and files are not.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from psqlmessages.pipeline.errors import DsnMissing

VARIABLE = "PSQLMESSAGES_DSN"
OPTION = "dsnFile"

# Names are read as UTF-8, and a server that is gone without a word is found out within a minute.
_DEFAULTS = {
    "application_name": "psqlmessages pipeline",
    "connect_timeout": "10",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
}


def dsn(options: Mapping[str, str] | None = None, namespace: str = "default") -> str:
    """Return the address of a namespace's database, as libpq takes it.

    The file of the option ``dsnFile`` counts most, then the variable PSQLMESSAGES_DSN, then the
    file that PSQLMESSAGES_DSN_FILE names; another namespace than "default" has variables of its
    own: PSQLMESSAGES_DSN_<NAME> and PSQLMESSAGES_DSN_<NAME>_FILE. Read anew at each call, on the
    driver and on executors. Raises DsnMissing.
    """
    variable = variable_of(namespace)
    path = _option(options)
    if path is None and os.environ.get(variable):
        return _checked(os.environ[variable], variable)
    path = path or os.environ.get(f"{variable}_FILE")
    if not path:
        raise DsnMissing(
            f"no database is named: set {variable}, or {variable}_FILE, or the option {OPTION},"
            " where the pipeline's processes can read it"
        )
    return _checked(_read(path), f"the file {path}")


def connectable(address: str) -> str:
    """Complete an address with what the pipeline needs, where the address does not say it."""
    given = conninfo_to_dict(address)
    missing = {name: value for name, value in _DEFAULTS.items() if name not in given}
    return make_conninfo(address, client_encoding="UTF8", **missing)


def variable_of(namespace: str) -> str:
    """Return the name of the variable with a namespace's address."""
    if namespace == "default":
        return VARIABLE
    return f"{VARIABLE}_{re.sub(r'[^A-Z0-9]', '_', namespace.upper())}"


def _option(options: Mapping[str, str] | None) -> str | None:
    # Spark hands options on in lower case, or in a mapping that does not care.
    given = {name.lower(): value for name, value in (options or {}).items()}
    return given.get(OPTION.lower())


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise DsnMissing(f"the file with the database's address cannot be read: {error}") from None


def _checked(address: str, origin: str) -> str:
    try:
        conninfo_to_dict(address)
    except ProgrammingError:
        # Its text may hold the password.
        raise DsnMissing(f"{origin} holds no address that libpq understands") from None
    if not address:
        raise DsnMissing(f"{origin} is empty")
    return address
