"""Sessions in files of a store that can be down: while its folder holds a file named `down`."""

from pathlib import Path

from django.conf import settings
from django.contrib.sessions.backends import file


class SessionStore(file.SessionStore):
    """A session in a file; the folder is read anew from the settings."""

    @classmethod
    def _get_storage_path(cls) -> str:
        return settings.SESSION_FILE_PATH

    def load(self) -> dict[str, object]:
        if (Path(settings.SESSION_FILE_PATH) / "down").exists():
            raise ConnectionError("the session store is down")
        return super().load()
