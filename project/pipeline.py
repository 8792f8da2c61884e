"""`make pipeline`: Spark counts the live traffic of `make run`, until Ctrl-C.

What follows on the command line is handed on: ARGS="--once".
"""

import signal
import sys

from django.core.exceptions import ImproperlyConfigured
from django.core.management import ManagementUtility

from project.serve import bring_up, foreground

# One of those that talk as long as `make run` does.
TICKER = "DEMO.TICKER"
PAGE = "http://127.0.0.1:8000/monitor/traffic/"
# PostgreSQL and the demonstration need something to run on as well.
MASTER = "local[2]"


def main() -> int:
    """Count until Ctrl-C; return the exit code."""
    # Whoever starts programs in the background may have left Ctrl-C ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with foreground():
            _run(sys.argv[1:])
    except KeyboardInterrupt:
        print("\nEnded.")
    except ImproperlyConfigured as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _run(arguments: list[str]) -> None:
    print("Starting PostgreSQL and Spark ...", flush=True)
    bring_up()
    from psqlmessages.models import Client

    if not Client.objects.filter(ident=TICKER).exists():
        print("Nobody talks just now: start `make run` in another terminal.", flush=True)
    print(f"The figures: {PAGE} (the port is that of `make run`). Ctrl-C ends it.\n", flush=True)
    command = ("manage.py", "psqlmessages", "pipeline", "traffic", "--master", MASTER)
    ManagementUtility([*command, *arguments]).execute()


if __name__ == "__main__":
    sys.exit(main())
