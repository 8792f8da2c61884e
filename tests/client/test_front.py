"""The front of the package: all that it names is there, and nothing is imported for nothing."""

import subprocess
import sys

import psqlmessages

USES_NODE = """
import sys
from psqlmessages import Node
assert not {"psqlmessages.client.async_link", "psqlmessages.pubsub"} & set(sys.modules)
from psqlmessages import *
assert AsyncNode and PubSub
"""


def test_all_that_the_package_names_is_there() -> None:
    assert set(psqlmessages.__all__) <= set(dir(psqlmessages))
    assert all(getattr(psqlmessages, name).__name__ == name for name in psqlmessages.__all__)


def test_what_is_not_there_is_an_attribute_error() -> None:
    assert not hasattr(psqlmessages, "Nodes")


def test_who_uses_a_node_alone_does_not_import_the_other_halves() -> None:
    subprocess.run([sys.executable, "-c", USES_NODE], check=True)
