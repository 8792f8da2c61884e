"""The command ``python -m project.postgres``: start, stop and inspect the embedded server."""

import argparse
import sys
from pathlib import Path

from project.postgres import CLUSTERS, Server, ServerError, binaries_of_wheel
from project.postgres.home import Home


def main() -> int:
    """Run the command line and return the exit code."""
    arguments = _parser().parse_args()
    try:
        if arguments.action == "binaries":
            print(binaries_of_wheel(arguments.major))
            return 0
        if arguments.action == "remove":
            return _remove_all()
        binaries = arguments.bin or binaries_of_wheel(18)
        return _run(arguments.action, Server(arguments.data or CLUSTERS / "18", binaries))
    except (ServerError, PermissionError) as error:
        print(error, file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m project.postgres", description="The embedded PostgreSQL server."
    )
    actions = parser.add_subparsers(dest="action", required=True)
    for action, description in {
        "start": "start the server, unless it is running",
        "stop": "stop the server",
        "status": "print whether the server is running; the exit code is 1 if it is not",
        "url": "start the server, and print the URL of its database with the password",
    }.items():
        subparser = actions.add_parser(action, help=description)
        subparser.add_argument("--bin", type=Path, help="the folder of PostgreSQL's programs")
        subparser.add_argument("--data", type=Path, help="the folder of the cluster")
    actions.add_parser("remove", help=f"stop all servers under {CLUSTERS.name}/ and delete them")
    binaries = actions.add_parser("binaries", help="print the folder of the wheel's programs")
    binaries.add_argument("major", type=int, choices=(16, 18))
    return parser


def _run(action: str, server: Server) -> int:
    if action == "url":
        print(server.start().url())
        return 0
    if action == "stop":
        print("stopped" if server.stop() else "was not running")
        return 0
    if action == "start":
        server.start()
    postmaster = server.postmaster
    if postmaster is None or not server.is_running:
        print("not running")
        return 1
    port, data = server.home.port, postmaster.data
    print(f"running on 127.0.0.1:{port}, pid {postmaster.pid}, data in {data}")
    return 0


def _remove_all() -> int:
    # Clusters in the fallback folder stay if the project's folder is deleted.
    parents = {CLUSTERS, Home(CLUSTERS / "18").folder.parent}
    names = {folder.name for parent in parents for folder in parent.glob("*/")}
    for name in names:
        if not name.startswith("binaries-"):  # copies of programs
            server = Server(CLUSTERS / name, binaries_of_wheel(18))
            server.stop()
            server.home.remove()
    return 0


if __name__ == "__main__":
    sys.exit(main())
