"""Scripts: the SQL of this version as files, and their digest. Needs no Django."""

import hashlib
from pathlib import Path

# Of PostgreSQL.
MIN_VERSION = 15

SCRIPTS = Path(__file__).parent
MIGRATIONS = SCRIPTS.parent / "migrations"


def scripts(folder: Path = SCRIPTS) -> list[Path]:
    """List the numbered scripts of a folder, in the order to run them."""
    return sorted(folder.glob("[0-9][0-9]_*.sql"))


def digest(folder: Path = SCRIPTS) -> str:
    """Compute sixteen hexadecimal digits that change with any character of any script."""
    whole = hashlib.sha256()
    for script in scripts(folder):
        whole.update(script.name.encode() + b"\0" + script.read_bytes() + b"\0")
    return whole.hexdigest()[:16]
