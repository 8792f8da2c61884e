"""The registry: which handlers a message is handed to."""

import pytest
from django.core.exceptions import ImproperlyConfigured

from psqlmessages import Message
from psqlmessages.handler_registry import HandlerRegistry


def named(name: str) -> object:
    def handle(message: Message) -> None: ...

    handle.__name__ = handle.__qualname__ = name
    return handle


FOUND = (
    ("Topic", "ORDERS", "worker", ["exact", "by pattern"]),
    ("Topic", "ORDINARY", "worker", ["by pattern"]), ("Topic", "MAIL", "mail.1", ["mail"]),
    ("Topic", "MAIL", "worker", []), ("Topic", "MAIL", None, ["mail"]),
    ("Rpc", "prices", "prices", ["one"]), ("Rpc", "price.2", "price.2", ["some"]),
    ("Rpc", "stock", "stock", ["every"]),
)  # fmt: skip


def test_a_message_goes_to_the_handlers_of_its_topic_or_the_one_that_names_the_node_closest() -> (
    None
):
    registry = HandlerRegistry()
    for decorate, name in (
        (registry.on_topic("ORDERS"), "exact"), (registry.on_topic("ORD*"), "by pattern"),
        (registry.on_topic("PRICES"), "another"), (registry.on_topic("MAIL", node="mail*"), "mail"),
        (registry.on_rpc, "every"), (registry.on_rpc(node="price*"), "some"),
        (registry.on_rpc(node="prices"), "one"),
    ):  # fmt: skip
        handle = named(name)
        assert decorate(handle) is handle, "a decorated function stays what it was"
    for type_, to, node, found in FOUND:
        handlers = registry.matching(Message(type_, "shop", to, "x", to), node)
        assert [handler.function.__name__ for handler in handlers] == found
    with pytest.raises(ImproperlyConfigured, match=r"every and .*second"):
        registry.on_rpc(named("second"))
    with pytest.raises(ValueError, match="at least 1, not 0"):
        registry.on_topic("ORDERS", tries=0)
