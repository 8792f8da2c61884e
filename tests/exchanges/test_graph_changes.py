"""Changes of exchanges: the difference is shown, all of it is done or nothing."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest
from django.db import DatabaseError, connections

from psqlmessages.exchanges.model import QueueRef
from psqlmessages.exchanges.store import repository
from psqlmessages.exchanges.store.definitions import DefinedDestination, DefinedExchange
from psqlmessages.models import Auth, Destination, Exchange, ExchangeCount
from tests.exchanges.asking import defined
from tests.exchanges.field import Field

WAITING = "SELECT count(*) = 1 FROM pg_locks WHERE NOT granted"


def exchange(name: str = "x", *destinations: str, **fields: Any) -> DefinedExchange:
    return defined("a", *destinations or ("b",), name=name, **fields)


def load(*wanted: DefinedExchange, **options: Any) -> repository.ExchangeDifference:
    now = repository.read_all()
    todo = repository.compare(now, wanted, **options)
    repository.apply(todo, repository.fingerprint(now))
    return todo


@pytest.mark.django_db
def test_exchanges_are_added_changed_left_and_removed():
    old, same, other = exchange("old"), exchange("same"), exchange("other")
    load(old, same, other)
    repository.set_running("other", is_running=False)
    before = {row.name: row for row in Exchange.objects.all()}
    ExchangeCount.objects.create(exchange=before["old"], worker=uuid4(), outcome="ok")
    new = exchange("new", "b", "c", "b", parallel=3, wsize=9, reserve=False)
    wanted = (new, same, exchange("other", "c"))
    todo = load(*wanted, replace_all=True)
    assert todo.describe() == [
        "+ new: default/a -> default/b, default/c, default/b",
        "~ other: default/a -> default/c",
        '    dst[0].queue: "b" -> "c"',
        "- old: default/a -> default/b",
    ]
    assert todo.summary() == "1 added, 1 changed, 1 unchanged, 1 removed"
    assert set(repository.read_all()) == set(wanted)
    assert not ExchangeCount.objects.exists()
    after = {row.name: row for row in Exchange.objects.all()}
    # A changed exchange keeps its row and its state; others stay unchanged.
    assert (after["other"].pk, after["other"].is_running) == (before["other"].pk, False)
    assert after["other"].changed_at > before["other"].changed_at
    assert after["same"].changed_at == before["same"].changed_at
    rows = Destination.objects.filter(exchange__name="new").values_list("position", "queue")
    assert list(rows) == [(0, "b"), (1, "c"), (2, "b")]
    assert load(*wanted, replace_all=True).describe() == []


def test_each_field_that_changes_is_shown_from_and_to():
    old = exchange("x", "b", "c", "d", parallel=1)
    selected = DefinedDestination(QueueRef("eu", "b"), 'msg.body == "é"')
    new = replace(old, parallel=2, destinations=(selected, old.destinations[1]))
    assert repository.compare([old], [new]).describe() == [
        "~ x: default/a -> eu/b, default/c",
        "    consumer.parallel: 1 -> 2",
        '    dst[0].ns: "default" -> "eu"',
        '    dst[0].selector: nothing -> "msg.body == \\"é\\""',
        '    dst[2]: {"ns": "default", "queue": "d"} -> nothing',
    ]


@pytest.mark.django_db
def test_nothing_is_done_where_the_present_is_another_or_one_of_several_is_refused():
    load(exchange("x"))
    now = repository.read_all()
    todo = repository.compare(now, [exchange("y"), exchange("z", parallel=99)])
    with pytest.raises(DatabaseError):
        repository.apply(todo, repository.fingerprint(now), with_rules=True)
    Destination.objects.update(selector="false")
    with pytest.raises(repository.ExchangesChanged):
        repository.apply(repository.compare(now, [exchange("y")]), repository.fingerprint(now))
    assert [row.name for row in Exchange.objects.all()] == ["x"]
    assert not Auth.objects.filter(ident__startswith="exchange.").exists()


@pytest.mark.usefixtures("committing")
def test_concurrent_saves_of_the_same_exchange_find_it(field: Field):
    repository.store(exchange("x"))
    other = field.default.connection
    other.execute("BEGIN")
    other.execute("LOCK TABLE psqlmessages_exchange IN SHARE ROW EXCLUSIVE MODE")
    with ThreadPoolExecutor(1) as thread:
        late = thread.submit(repository.store, exchange("y"))
        field.until(lambda: field.default.query(WAITING))
        other.execute("UPDATE psqlmessages_exchange SET name = 'y'")
        other.execute("COMMIT")
        with pytest.raises(repository.ExchangeExists):
            late.result()
        thread.submit(connections.close_all).result()
