"""Django's secret key: from the environment, or generated once and kept beside the project."""

import os
import tempfile
from pathlib import Path

from django.core.management.utils import get_random_secret_key


def secret_key(path: Path) -> str:
    """Return SECRET_KEY of the environment, else the key kept in `path`, which is made if needed.

    Processes that start together all read the key of the first; only its owner can read the file.
    """
    if key := os.environ.get("SECRET_KEY"):
        return key
    if not path.exists():
        descriptor, draft = tempfile.mkstemp(prefix=f"{path.name}-", dir=path.parent)
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(get_random_secret_key())
            os.link(draft, path)
        except FileExistsError:
            pass  # another process was faster: its key counts
        finally:
            Path(draft).unlink()
    return path.read_text()
