"""Files that are there whole or not at all, whoever is killed while they are written."""

import os
import tempfile
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a file that only we may read, in place of what may be there."""
    descriptor, draft = tempfile.mkstemp(prefix=f"{path.name}-", dir=path.parent)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    Path(draft).replace(path)
