"""Secrets that are generated once and stored in files of the project's folder."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def read_or_generate(path: Path, generate: Callable[[], str]) -> str:
    """Return the secret in a file; if the file is missing, create it, readable by its owner only.

    If several processes create the file at the same time, all return the same secret.
    """
    if not path.exists():
        descriptor, draft = tempfile.mkstemp(prefix=f"{path.name}-", dir=path.parent)
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(generate())
            os.link(draft, path)
        except FileExistsError:
            pass  # another process has created the file: use its secret
        finally:
            Path(draft).unlink()
    return path.read_text()
