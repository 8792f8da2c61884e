"""The exceptions and the front of the package: a class per number, the tree, all names there."""

import inspect
import subprocess
import sys
from importlib.metadata import version

import pytest

import psqlmessages
from psqlmessages import exceptions
from psqlmessages.client.calls import raise_for_error
from psqlmessages.client.refused_calls import caller_of
from psqlmessages.exceptions import ConnectionLost, MessagesError, error_for

MEMBERS = inspect.getmembers(exceptions, inspect.isclass)
CLASSES = {name: member for name, member in MEMBERS if issubclass(member, MessagesError)}
IMPORTS = """
import sys
from importlib.metadata import version
from psqlmessages import Node
assert not {"psqlmessages.client.async_session", "psqlmessages.pubsub"} & set(sys.modules)
from psqlmessages import *
assert AsyncNode and PubSub
import psqlmessages.cli.main
assert not [name for name in sys.modules if name.split('.')[0] == 'django']
"""


def test_an_error_is_found_by_its_number_and_says_what_to_do():
    error = error_for(9, "Topic X is not existent")
    assert type(error) is exceptions.TopicNotExistent
    assert error.__notes__ == [f"See {error.url}"]
    insert = "INSERT INTO messages.auth (role, ident, type, dest, mode, timeout) VALUES ('ROLE', "
    for number, text, values in (
        (2, "cannot use Queue to it's", "'NODE', 'Queue', 'it''s', 'RW', 60)"),
        (2, "cannot use Rpc to A", "'NODE', 'Rpc', 'A', 'W', 60)"),
        (5, "there are no permissions for ident A", "'A', 'Topic', 'TOPIC', 'RW', 60)"),
        (9, "Topic {X} is not existent", "'NODE', 'Topic', '{X}', 'RW', 60)"),
        (10, "cannot listeners for Topic X", "'NODE', 'Topic', 'X', 'R', 60)"),
        (16, "Client A don't exist", ("'A', 'Topic', 'TOPIC', 'RW', 60), "
         "('ROLE', 'NODE', 'Rpc', 'A', 'W', 60) ON CONFLICT DO NOTHING")),
        (9, "in other words", "'NODE', 'Topic', 'TOPIC', 'RW', 60)"),
    ):  # fmt: skip
        assert str(error_for(number, text)).startswith(f"{number}: {text} (")
        assert f"{insert}{values})" in str(error_for(number, text))
    assert all(found.__doc__ for found in CLASSES.values())
    unknown = error_for(98, "of a newer server")
    assert (type(unknown), unknown.number) == (MessagesError, 98)
    assert caller_of("a", "messages.read_stream", ([], "B")) == exceptions.Caller("a", mode="R")
    assert "call topic_notify first" in str(error_for(21, "A cannot send"))
    assert issubclass(exceptions.CallTimeout, TimeoutError)
    assert issubclass(ConnectionLost, ConnectionError)
    for answer in (None, "", {}, [], {"Errstr": "x"}):
        with pytest.raises(MessagesError, match="unexpected answer"):
            raise_for_error(answer)


def test_the_package_names_all_that_is_public_and_imports_nothing_for_nothing():
    names = [name for name in psqlmessages.__all__ if name != "__version__"]
    assert names == sorted(names)
    assert all(getattr(psqlmessages, name).__name__ == name for name in names)
    assert psqlmessages.__version__ == version("psqlmessages")
    assert set(CLASSES) <= set(dir(exceptions))
    assert not set(CLASSES) & set(dir(psqlmessages))
    assert not hasattr(psqlmessages, "Nodes")
    subprocess.run([sys.executable, "-c", IMPORTS], check=True, timeout=110)
