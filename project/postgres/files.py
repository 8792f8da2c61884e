"""Atomic writing of files. If the process is killed, the old content remains."""

import os
import tempfile
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Create or replace a file that only its owner can read."""
    descriptor, draft = tempfile.mkstemp(prefix=f"{path.name}-", dir=path.parent)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    Path(draft).replace(path)
