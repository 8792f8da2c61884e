"""Runs `manage.py` commands in forks of a process that has imported Django, which takes a second.

A program: for each line of its input, a JSON list of arguments, it prints one with the exit code,
the output and the errors. A fork imports the settings and apps of the project as they are then.
"""

import importlib
import json
import os
import runpy
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile

from django.core.exceptions import ImproperlyConfigured

PRELOADED = (
    "daphne.server", "django.contrib.admin.views.main", "django.contrib.auth.views",
    "django.contrib.sessions.backends.db", "django.core.management.commands.shell",
    "django.db.backends.postgresql.base", "django.db.migrations.executor",
    "psqlmessages.admin", "psqlmessages.checks", "psqlmessages.cli.main", "psqlmessages.django",
    "yaml",
)  # fmt: skip


def main() -> None:
    sys.path[0] = str(Path.cwd())
    for name in PRELOADED:
        # What a module imports before it needs the settings is loaded nevertheless.
        with suppress(ImproperlyConfigured):
            importlib.import_module(name)
    for line in sys.stdin:
        with TemporaryFile("w+") as output, TemporaryFile("w+") as errors:
            child = os.fork()
            if child == 0:
                os.dup2(output.fileno(), 1)
                os.dup2(errors.fileno(), 2)
                sys.argv = json.loads(line)
                runpy.run_path(sys.argv[0], run_name="__main__")
                return
            _, status = os.waitpid(child, 0)
            shown = [(file.seek(0), file.read())[1] for file in (output, errors)]
        print(json.dumps([os.waitstatus_to_exitcode(status), *shown]), flush=True)


if __name__ == "__main__":
    main()
