"""Secrets that are generated once and kept in a file beside the project."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def kept(path: Path, make: Callable[[], str]) -> str:
    """Return what `path` holds; where there is no such file, make it, for its owner alone.

    Processes that start together all read what the first has made.
    """
    if not path.exists():
        descriptor, draft = tempfile.mkstemp(prefix=f"{path.name}-", dir=path.parent)
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(make())
            os.link(draft, path)
        except FileExistsError:
            pass  # another process was faster: what it made counts
        finally:
            Path(draft).unlink()
    return path.read_text()
