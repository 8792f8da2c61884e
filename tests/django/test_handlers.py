"""The registry: which handlers a message is handed to."""

import pytest
from django.core.exceptions import ImproperlyConfigured

from psqlmessages import Message
from psqlmessages.handlers import Registry


def names(registry: Registry, message: Message, node: str | None) -> list[str]:
    return [handler.function.__name__ for handler in registry.matching(message, node)]


def order(topic: str = "ORDERS") -> Message:
    return Message("Topic", "shop", topic, "x", topic)


def question(node: str) -> Message:
    return Message("Rpc", "shop", node, "x")


def test_a_topic_s_handlers_are_those_of_its_name_and_of_its_patterns() -> None:
    registry = Registry()

    @registry.on_topic("ORDERS")
    def exact(message: Message) -> None: ...

    @registry.on_topic("ORD*")
    def by_pattern(message: Message) -> None: ...

    @registry.on_topic("PRICES")
    def another(message: Message) -> None: ...

    @registry.on_rpc
    def rpc(message: Message) -> None: ...

    assert names(registry, order(), "worker") == ["exact", "by_pattern"]
    assert names(registry, order("ORDINARY"), "worker") == ["by_pattern"]


def test_a_handler_may_be_for_some_nodes_alone() -> None:
    registry = Registry()

    @registry.on_topic("ORDERS", node="mail*")
    def mail(message: Message) -> None: ...

    assert names(registry, order(), "mail.1") == ["mail"]
    assert names(registry, order(), "worker") == []
    assert names(registry, order(), None) == ["mail"]


def test_an_rpc_goes_to_the_handler_that_names_the_node_closest() -> None:
    registry = Registry()

    @registry.on_rpc
    def every(message: Message) -> None: ...

    @registry.on_rpc(node="price*")
    def some(message: Message) -> None: ...

    @registry.on_rpc(node="prices")
    def one(message: Message) -> None: ...

    assert names(registry, question("prices"), "prices") == ["one"]
    assert names(registry, question("price.2"), "price.2") == ["some"]
    assert names(registry, question("stock"), "stock") == ["every"]


def test_two_handlers_for_the_same_rpcs_are_refused_by_their_names() -> None:
    registry = Registry()

    @registry.on_rpc
    def first(message: Message) -> None: ...

    with pytest.raises(ImproperlyConfigured, match=r"first and .*second"):

        @registry.on_rpc
        def second(message: Message) -> None: ...


def test_a_decorated_function_stays_what_it_was() -> None:
    registry = Registry()

    def handle(message: Message) -> str:
        return "done"

    assert registry.on_topic("ORDERS")(handle) is handle
    assert registry.on_rpc(handle) is handle
    assert registry.on_rpc(node="one")(handle) is handle


def test_a_handler_is_called_at_least_once() -> None:
    with pytest.raises(ValueError, match="tries=0"):
        Registry().on_topic("ORDERS", tries=0)
