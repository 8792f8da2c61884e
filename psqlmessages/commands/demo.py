"""demo: the whole conversation of two nodes, each step as SQL with what PostgreSQL answered."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

from psqlmessages.client.options import conninfo
from psqlmessages.commands import demo_traffic
from psqlmessages.commands.demo_roles import (
    CONVERSATION_RULES,
    ROLE1,
    ROLE2,
    TRAFFIC_RULES,
    Admin,
    insert_rules,
    login,
    tidy_rules,
)
from psqlmessages.commands.demo_stage import ANY, Only, Party, Stage

NAME = "demo"
HELP = "show the whole conversation of two nodes, each step with what PostgreSQL answers"


def configure(parser: ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "--traffic", action="store_true", help="then send live traffic, until Ctrl-C"
    )
    parser.add_argument(
        "--brief", action="store_true", help="print the titles and the result, and no rates"
    )


def run(arguments: Namespace) -> int:
    """Converse; fail where PostgreSQL answered otherwise than expected. Then traffic, if asked."""
    dsn, stage = arguments.dsn, Stage(is_brief=arguments.brief)
    with tidy_rules(dsn), psycopg.connect(conninfo(dsn, "demo"), autocommit=True) as admin:
        dsns = (login(admin, dsn, ROLE1), login(admin, dsn, ROLE2))
        _converse(stage, admin, *dsns)
    code = stage.conclude()
    if code == 0 and arguments.traffic:
        with tidy_rules(dsn):
            with psycopg.connect(conninfo(dsn, "demo"), autocommit=True) as admin:
                admin.execute(insert_rules(TRAFFIC_RULES))
            demo_traffic.run(*dsns, shown=None if arguments.brief else dsn)
    return code


def _converse(stage: Stage, admin: Admin, dsn1: str, dsn2: str) -> None:
    with _party(stage, "DEMO1", dsn1) as demo1, _party(stage, "DEMO2", dsn2) as demo2:
        _rules(stage, admin)
        _register(stage, demo1, demo2)
        _send(stage, demo1, demo2)
        _send_much(stage, demo1, demo2)
        _ask(stage, demo1, demo2)
        _overstep(stage, demo1, demo2)
        _crash(stage, demo1, demo2)


@contextmanager
def _party(stage: Stage, ident: str, dsn: str) -> Iterator[Party]:
    with psycopg.connect(conninfo(dsn, ident), autocommit=True) as connection:
        yield Party(stage, ident, connection)


def _rules(stage: Stage, admin: Admin) -> None:
    stage.chapter("The owner allows it: DEMO1 sends to a topic and asks DEMO2, which receives")
    owner = Party(stage, "owner", admin)
    owner.does(insert_rules(CONVERSATION_RULES), f"INSERT 0 {len(CONVERSATION_RULES)}")


def _register(stage: Stage, demo1: Party, demo2: Party) -> None:
    stage.chapter("Both register; what a node does, the others who may know it are told")
    demo1.asks("init", "DEMO1", expected={"Err": "0", "Channel": ANY})
    demo2.asks("init", "DEMO2", expected={"Err": "0", "Channel": ANY})
    demo1.hears({"Type": "Sys", "Evt": "connect", "Ident": "DEMO2"})
    demo1.asks(
        "topic_auth",
        "DEMO.ORDERS",
        expected={"Err": "0", "Notifiers": Only("DEMO1"), "Listeners": Only("DEMO2")},
    )
    demo2.asks("topic_listen", "DEMO.ORDERS", expected={"Err": "0"})
    demo1.hears({"Type": "Sys", "Evt": "topic_listen", "Ident": "DEMO2", "Topic": "DEMO.ORDERS"})
    demo1.asks("topic_notify", "DEMO.ORDERS", expected={"Err": "0"})
    demo2.hears({"Type": "Sys", "Evt": "topic_notify", "Ident": "DEMO1", "Topic": "DEMO.ORDERS"})
    demo1.asks(
        "topic_status",
        "DEMO.ORDERS",
        expected={"Err": "0", "Notifiers": ["DEMO1"], "Listeners": ["DEMO2"]},
    )


def _send(stage: Stage, demo1: Party, demo2: Party) -> None:
    stage.chapter("A short message travels in the notification")
    demo1.asks("topic_send", "DEMO.ORDERS", "Order 1: two apples", expected={"Err": "0"})
    demo2.hears(
        {"Type": "Topic", "From": "DEMO1", "To": "DEMO.ORDERS", "Size": 19, "Id": ANY},
        "Order 1: two apples",
    )


def _send_much(stage: Stage, demo1: Party, demo2: Party) -> None:
    stage.chapter("A long one is kept, and fetched with get_data")
    body = "Order 2: " + "many apples, " * 2000
    header = {"Type": "Topic", "From": "DEMO1", "To": "DEMO.ORDERS", "Size": len(body), "Id": ANY}
    demo1.asks("topic_send", "DEMO.ORDERS", body, expected={"Err": "0"})
    payload = demo2.hears(header | {"Dkey": ANY})
    demo2.fetches(payload, {"Err": "0"} | header, body)


def _ask(stage: Stage, demo1: Party, demo2: Party) -> None:
    stage.chapter("DEMO1 asks DEMO2; the token it receives lets DEMO2 answer, and nobody else")
    demo1.asks("rpc", "DEMO2", "question-1", "How many apples are left?", expected={"Err": "0"})
    payload = demo2.hears(
        {"Type": "Rpc", "From": "DEMO1", "To": "DEMO2", "Size": 25, "Token": ANY, "Id": ANY},
        "How many apples are left?",
    )
    token = demo2.token_of(payload)
    demo2.asks("return", "DEMO1", token, "Seven", expected={"Err": "0"})
    answer = {"Type": "Return", "From": "DEMO2", "To": "DEMO1", "Token": "question-1"}
    demo1.hears(answer | {"Size": 5, "Id": ANY}, "Seven")
    forged = ("1" if token[0] == "0" else "0") + token[1:]
    demo2.asks("return", "DEMO1", forged, "Eight", expected={"Err": "20", "Errstr": ANY})


def _overstep(stage: Stage, demo1: Party, demo2: Party) -> None:
    stage.chapter("What no rule allows is refused")
    demo1.asks(
        "topic_listen",
        "DEMO.ORDERS",
        expected={"Err": "3", "Errstr": "cannot auth R with Topic DEMO.ORDERS"},
    )
    demo2.asks("rpc", "DEMO1", "question-2", "And you?", expected={"Err": "2", "Errstr": ANY})


def _crash(stage: Stage, demo1: Party, demo2: Party) -> None:
    stage.chapter("DEMO2 crashes: its connection ends without deinit, and DEMO1 is told")
    demo2.crashes()
    demo1.evaluates({"Type": "Sys", "Evt": "crash", "Ident": "DEMO2"})
    topic = {"Topic": "DEMO.ORDERS"}
    demo1.hears(
        {"Type": "Sys", "Evt": "topic_unlisten", "Ident": "DEMO2"} | topic, in_any_order=True
    )
    demo1.hears({"Type": "Sys", "Evt": "topic_none_listen"} | topic, in_any_order=True)
    demo1.hears({"Type": "Sys", "Evt": "crash", "Ident": "DEMO2"}, in_any_order=True)
    demo1.asks(
        "topic_send",
        "DEMO.ORDERS",
        "Order 3",
        expected={"Err": "10", "Errstr": "cannot listeners for Topic DEMO.ORDERS"},
    )
    demo1.asks("deinit", "DEMO1", expected={"Err": "0"})
