"""`make pipeline`: Spark counts the live traffic of `make run` until Ctrl-C.

ARGS has further arguments of the job `traffic`: make pipeline ARGS="--once"
"""

import signal
import sys

from django.core.exceptions import ImproperlyConfigured
from django.core.management import ManagementUtility

from project.serve import prepare_database, take_terminal

# A node of the demo that is connected while `make run` is running.
TICKER = "DEMO.TICKER"
PAGE = "http://127.0.0.1:8000/monitor/traffic/"
# Spark runs two threads. More would slow down PostgreSQL and the demo on a small machine.
MASTER = "local[2]"


def main() -> int:
    """Count until Ctrl-C; return the exit code."""
    # A shell that starts this process in the background may let it ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with take_terminal():
            _run(sys.argv[1:])
    except KeyboardInterrupt:
        print("\nStopped.")
    except ImproperlyConfigured as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _run(arguments: list[str]) -> None:
    print("Starting PostgreSQL and Spark ...", flush=True)
    prepare_database()
    from psqlmessages.models import Client

    if not Client.objects.filter(ident=TICKER).exists():
        print("There is no live traffic: start `make run` in another terminal.", flush=True)
    print(f"Results: {PAGE} (use the port of `make run`). Press Ctrl-C to stop.\n", flush=True)
    command = ("manage.py", "psqlmessages", "pipeline", "traffic", "--master", MASTER)
    ManagementUtility([*command, *arguments]).execute()


if __name__ == "__main__":
    sys.exit(main())
