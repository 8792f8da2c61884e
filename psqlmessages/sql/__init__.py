"""SQL scripts of this version, and their digest. Needs no Django."""

import hashlib
from pathlib import Path

# The oldest version of PostgreSQL that runs the scripts.
MIN_VERSION = 15

SCRIPTS = Path(__file__).parent
MIGRATIONS = SCRIPTS.parent / "migrations"


def scripts(folder: Path = SCRIPTS) -> list[Path]:
    """Return the numbered scripts of a folder, in the order in which to run them."""
    return sorted(folder.glob("[0-9][0-9]_*.sql"))


def digest(folder: Path = SCRIPTS) -> str:
    """Compute 16 hexadecimal digits that depend on the names and contents of the scripts."""
    whole = hashlib.sha256()
    for script in scripts(folder):
        whole.update(script.name.encode() + b"\0" + script.read_bytes() + b"\0")
    return whole.hexdigest()[:16]
