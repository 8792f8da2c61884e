"""Sessions in files; a file named `down` makes every read fail, and `down-once` a single one."""

from pathlib import Path

from django.conf import settings
from django.contrib.sessions.backends import file


class SessionStore(file.SessionStore):
    """A session in a file; the folder is read anew from the settings."""

    @classmethod
    def _get_storage_path(cls) -> str:
        return settings.SESSION_FILE_PATH

    def load(self) -> dict[str, object]:
        folder = Path(settings.SESSION_FILE_PATH)
        is_down_once = (folder / "down-once").exists()
        (folder / "down-once").unlink(missing_ok=True)
        if is_down_once or (folder / "down").exists():
            raise ConnectionError("the session store is down")
        return super().load()
