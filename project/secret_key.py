"""Django's secret key: from the environment, or generated once and kept beside the project."""

import os
from pathlib import Path

from django.core.management.utils import get_random_secret_key

from project.kept import kept


def secret_key(path: Path) -> str:
    """Return SECRET_KEY of the environment, else the key kept in `path`, made if need be."""
    return os.environ.get("SECRET_KEY") or kept(path, get_random_secret_key)
