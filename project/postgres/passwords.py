"""The passwords of one cluster's roles, in a file that psql understands too (PGPASSFILE)."""

import secrets
from pathlib import Path

from project.postgres.files import write_whole

BYTES_OF_A_PASSWORD = 24


def new_password() -> str:
    """Return a random password of letters, digits, '-' and '_': it needs no quoting anywhere."""
    return secrets.token_urlsafe(BYTES_OF_A_PASSWORD)


class Passwords:
    """A file of lines ``*:*:*:role:password``, readable by its owner alone."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def get(self, role: str) -> str | None:
        """Return the password kept for a role, None if there is none."""
        return self._read().get(role)

    def keep(self, role: str, password: str) -> None:
        """Keep a role's password; the file is replaced at once, never half written."""
        passwords = {**self._read(), role: password}
        write_whole(self.path, "".join(f"*:*:*:{r}:{p}\n" for r, p in passwords.items()))

    def _read(self) -> dict[str, str]:
        if not self.path.exists():
            return {}
        lines = self.path.read_text().splitlines()
        return {role: password for *_, role, password in (line.split(":") for line in lines)}
