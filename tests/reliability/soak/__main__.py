"""Run the soak test: all parts together, while memory, tables and lost messages are measured.

python -m tests.reliability.soak [--minutes 30 | --seconds 20]
Exit code 1: something grew, was lost or duplicated, or ended.
"""

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path

import django

from tests.servers import binaries_under_test
from tests.temporary_server import temporary_server

# With DEBUG, Django stores the last 9,000 statements of each connection.
PRODUCTION = {"DEBUG": "0", "PLAIN_HTTP": "1", "ALLOWED_HOSTS": "127.0.0.1"}


def main() -> int:
    """Start a server, configure Django to use it, and run the soak test."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seconds", type=float)
    given = parser.parse_args()
    # Stop all processes after SIGTERM too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with (
        tempfile.TemporaryDirectory(prefix="soak") as folder,
        temporary_server(Path(folder), binaries_under_test()) as tested,
    ):
        os.environ |= {
            "DATABASE_URL": tested.url(), "DJANGO_SETTINGS_MODULE": "tests.web.site_settings",
            **PRODUCTION,
        }  # fmt: skip
        django.setup()
        # This module imports Django models.
        from tests.reliability.soak.everything import soak

        site = Path(folder) / "site"
        site.mkdir()
        return soak(tested, site, given.seconds or given.minutes * 60)


if __name__ == "__main__":
    sys.exit(main())
