"""The registry: which handlers a message is handed to."""

import pytest
from django.core.exceptions import ImproperlyConfigured

from psqlmessages import Message
from psqlmessages.handlers import Registry


def named(name: str) -> object:
    def handle(message: Message) -> None: ...

    handle.__name__ = handle.__qualname__ = name
    return handle


@pytest.fixture
def registry() -> Registry:
    registry = Registry()
    registry.on_topic("ORDERS")(named("exact"))
    registry.on_topic("ORD*")(named("by pattern"))
    registry.on_topic("PRICES")(named("another"))
    registry.on_topic("MAIL", node="mail*")(named("mail"))
    registry.on_rpc(named("every"))
    registry.on_rpc(node="price*")(named("some"))
    registry.on_rpc(node="prices")(named("one"))
    return registry


@pytest.mark.parametrize(
    ("type_", "to", "node", "found"),
    [
        ("Topic", "ORDERS", "worker", ["exact", "by pattern"]),
        ("Topic", "ORDINARY", "worker", ["by pattern"]),
        ("Topic", "MAIL", "mail.1", ["mail"]),
        ("Topic", "MAIL", "worker", []),
        ("Topic", "MAIL", None, ["mail"]),
        ("Rpc", "prices", "prices", ["one"]),
        ("Rpc", "price.2", "price.2", ["some"]),
        ("Rpc", "stock", "stock", ["every"]),
    ],
)
def test_a_message_goes_to_the_handlers_of_its_topic_or_the_one_that_names_the_node_closest(
    registry: Registry, type_: str, to: str, node: str | None, found: list[str]
) -> None:
    message = Message(type_, "shop", to, "x", to)
    assert [handler.function.__name__ for handler in registry.matching(message, node)] == found


def test_two_handlers_for_the_same_rpcs_and_less_than_one_try_are_refused(
    registry: Registry,
) -> None:
    with pytest.raises(ImproperlyConfigured, match=r"every and .*second"):
        registry.on_rpc(named("second"))
    with pytest.raises(ValueError, match="tries=0"):
        registry.on_topic("ORDERS", tries=0)


def test_a_decorated_function_stays_what_it_was() -> None:
    registry, handle = Registry(), named("handle")
    assert registry.on_topic("ORDERS")(handle) is handle
    assert registry.on_rpc(handle) is handle
    assert registry.on_rpc(node="one")(handle) is handle
