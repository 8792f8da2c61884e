"""Passwords of a cluster's roles, in a file that psql can use as PGPASSFILE."""

import secrets
from pathlib import Path

from project.postgres.files import write_atomically

PASSWORD_BYTES = 24


def new_password() -> str:
    """Return a random password of letters, digits, '-' and '_', which needs no quoting."""
    return secrets.token_urlsafe(PASSWORD_BYTES)


class Passwords:
    """A file of lines ``*:*:*:role:password`` that only its owner can read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def get(self, role: str) -> str | None:
        """Return the stored password of a role; None if there is none."""
        return self._read().get(role)

    def store(self, role: str, password: str) -> None:
        """Store a role's password; replace the file atomically."""
        passwords = {**self._read(), role: password}
        write_atomically(self.path, "".join(f"*:*:*:{r}:{p}\n" for r, p in passwords.items()))

    def _read(self) -> dict[str, str]:
        if not self.path.exists():
            return {}
        lines = self.path.read_text().splitlines()
        return {role: password for *_, role, password in (line.split(":") for line in lines)}
