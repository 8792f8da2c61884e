"""Let everything run at once for a while, and tell what grew, what was lost and what was doubled.

python -m tests.reliability.soak [--minutes 30 | --seconds 20]
Exit code 1: something grew, was lost or doubled, or ended.
"""

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path

import django

from tests.own_server import own_server
from tests.servers import tested_binaries

# With DEBUG Django keeps the last 9,000 statements of each connection: that would be no leak.
PRODUCTION = {"DEBUG": "0", "PLAIN_HTTP": "1", "ALLOWED_HOSTS": "127.0.0.1"}


def main() -> int:
    """Read the arguments, start a server, and have Django know it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seconds", type=float)
    given = parser.parse_args()
    # What was started is stopped then, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with (
        tempfile.TemporaryDirectory(prefix="soak") as folder,
        own_server(Path(folder), tested_binaries()) as tested,
    ):
        os.environ |= {
            "DATABASE_URL": tested.url(), "DJANGO_SETTINGS_MODULE": "tests.web.site_settings",
            **PRODUCTION,
        }  # fmt: skip
        django.setup()
        # It needs Django's models.
        from tests.reliability.soak.everything import soak

        site = Path(folder) / "site"
        site.mkdir()
        return soak(tested, site, given.seconds or given.minutes * 60)


if __name__ == "__main__":
    sys.exit(main())
