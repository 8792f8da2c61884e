"""Command prune with Django: also removes old traffic windows."""

from __future__ import annotations

import json
from argparse import Namespace

from psqlmessages import traffic_retention
from psqlmessages.cli import prune

NAME, configure = prune.NAME, prune.configure
HELP = "remove expired bodies, stream messages and traffic windows now, as the owner of the tables"


def run(arguments: Namespace) -> int:
    """Remove expired data, and print the amount."""
    emptied = prune.emptied(arguments.dsn)
    removed = traffic_retention.prune(arguments.database)
    if arguments.json:
        print(json.dumps({"emptied_tables": emptied, "removed_windows": removed}))
    else:
        windows = f"{removed:,} traffic window{'' if removed == 1 else 's'}"
        print(f"{prune.sentence(emptied)}; removed {windows}")
    return 0
