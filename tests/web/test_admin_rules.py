"""Rules in the admin: what a change touches is told, and only what was meant is saved."""

import pytest
from django.contrib.admin.models import LogEntry

from project.postgres import Server
from psqlmessages.models import Auth
from tests.web.desks import RULES, SURE, Desk


def modes() -> dict[str, str]:
    return dict(Auth.objects.values_list("ident", "mode"))


@pytest.fixture
def board(desk: Desk) -> Desk:
    """BOARD listens to PRICES and sends to NEWS, SENDER sends to PRICES, EYE observes all."""
    world = desk.world
    world.rules(
        "user1 BOARD Topic PRICES RW 10",
        "user1 BOARD Topic NEWS W 10",
        "user2 SENDER Topic PRICES W 10",
        "user3 EYE Topic * O 10",
    )
    board, sender, eye = (
        world.node("user1", "BOARD"),
        world.node("user2", "SENDER"),
        world.node("user3", "EYE"),
    )
    board.ok("topic_listen", "PRICES")
    board.ok("topic_notify", "NEWS")
    sender.ok("topic_notify", "PRICES")
    eye.ok("topic_observe", "PRI*")
    return desk


def test_the_form_names_the_role_of_this_site(desk: Desk) -> None:
    page = desk.open(f"{RULES}add/")
    assert f"This site connects as {Server.owner}." in page.text


# What a change touches


def test_a_right_that_is_taken_away_is_told_with_whom_it_ended(board: Desk) -> None:
    page = board.send(board.open_rule(ident="BOARD", dest="PRICES"), "Save", mode="W")
    assert "At once, BOARD no longer listens to PRICES." in page.messages
    assert "Applies to the connected node BOARD." in page.messages


def test_sending_that_ends_is_told(board: Desk) -> None:
    page = board.send(board.open_rule(ident="SENDER"), "Save", mode="R")
    assert "At once, SENDER no longer sends to PRICES." in page.messages


def test_observing_that_ends_is_told(board: Desk) -> None:
    page = board.send(board.open_rule(ident="EYE"), "Save", dest="NEWS*")
    assert "At once, EYE no longer observes PRI*." in page.messages


def test_a_node_that_loses_its_last_rule_is_told_as_disconnected(board: Desk) -> None:
    page = board.open_rule(ident="SENDER")
    page = board.send(board.follow(page, "Delete"), SURE)
    assert "At once, SENDER is disconnected." in page.messages


def test_who_is_renamed_in_a_rule_loses_what_the_rule_gave(board: Desk) -> None:
    page = board.send(board.open_rule(ident="SENDER"), "Save", ident="BOARD")
    assert page.messages[1:] == ["At once, SENDER is disconnected."], "BOARD is user1's"


def test_a_right_that_another_rule_gives_too_ends_nothing(board: Desk) -> None:
    board.world.rules("user1 BO* Topic * R 10")
    page = board.send(board.open_rule(ident="BOARD", dest="PRICES"), "Save", mode="W")
    assert not any(message.startswith("At once") for message in page.messages)


def test_a_new_rule_tells_to_which_connected_nodes_it_applies(board: Desk) -> None:
    page = board.add_rule("user1 B* Topic ORDERS R 10")
    assert "Applies to the connected node BOARD." in page.messages


def test_a_rule_for_nobody_connected_says_so(board: Desk) -> None:
    page = board.add_rule("user1 ELSE Topic ORDERS R 10")
    assert "No connected node is touched." in page.messages


def test_a_node_whose_connection_is_gone_is_not_called_connected(board: Desk) -> None:
    board.world.kill(board.world.programs[-1])
    page = board.add_rule("user3 EYE Topic ORDERS R 10")
    assert "No connected node is touched." in page.messages


def test_what_was_edited_in_the_list_is_told_in_one_message(board: Desk) -> None:
    keys = dict(Auth.objects.filter(dest="PRICES").values_list("ident", "pk"))
    page = board.edit_list(
        board.open(RULES), {keys["BOARD"]: {"mode": "W"}, keys["SENDER"]: {"mode": "R"}}
    )
    assert (
        "At once, BOARD no longer listens to PRICES; SENDER no longer sends to PRICES."
        in page.messages
    )
    assert Auth.objects.get(ident="SENDER").mode == "R"


def test_a_list_saved_without_a_change_touches_nothing(board: Desk) -> None:
    page = board.edit_list(board.open(RULES), {})
    assert page.messages == []


def test_rules_deleted_together_tell_whom_it_ended(board: Desk) -> None:
    keys = list(Auth.objects.exclude(ident="EYE").values_list("pk", flat=True))
    page = board.send(
        board.open(RULES), "0", action="delete_selected", _selected_action=keys, index="0"
    )
    assert page.messages == [], "asked first"
    page = board.send(page, SURE)
    assert "At once, BOARD is disconnected; SENDER is disconnected." in page.messages
    assert list(modes()) == ["EYE"]


def test_the_history_says_what_was_and_what_is(board: Desk) -> None:
    board.send(board.open_rule(ident="SENDER"), "Save", mode="RW", timeout="20")
    page = board.follow(board.open_rule(ident="SENDER"), "History")
    assert "Mode: W → RW; Timeout: 10 → 20" in page.text


def test_the_history_of_a_deletion_names_the_whole_rule(desk: Desk) -> None:
    name = "N" * 100
    desk.world.rules(f"user1 {name} Topic {name[::-1]}X R 10".replace("NX", "X"))
    desk.send(desk.follow(desk.open_rule(ident=name), "Delete"), SURE)
    said = LogEntry.objects.latest("pk").change_message
    assert said == f"Deleted {name} (user1): R Topic {'N' * 99}X."


# What is odd, and saved all the same


ODD = {
    "nobody A Topic T R 9": (
        "PostgreSQL has no role nobody: a rule for it lets nobody in until the role is made."
    ),
    "user1 A*B Topic T R 9": (
        "In the ident A*B a * stands before the end: there it is a plain character, and matches"
        " nothing but itself."
    ),
    "user1 A Topic *T* R 9": (
        "In the destination *T* a * stands before the end: there it is a plain character, and"
        " matches nothing but itself."
    ),
}
NOT_FOR_RPC = (
    "Mode {} means nothing for Rpc: a rule says who may ask (W), and who is asked needs none to"
    " answer."
)
REFUSED = {
    "user1 A Rpc B R 9": NOT_FOR_RPC.format("R"),
    "user1 A Rpc B O 9": NOT_FOR_RPC.format("O"),
    "user1 A Queue B O 9": "Mode O is for topics only: a queue cannot be observed.",
    "user1 A Topic B R 0": "The timeout must be 1 second or more.",
    "user1 A Topic B R -5": "The timeout must be 1 second or more.",
    "user1 A Topic B R 2147483648": "The timeout must be 2,147,483,647 seconds or less.",
    f"user1 {'A' * 101} Topic B R 9": "Ensure this value has at most 100 characters (it has 101).",
    f"{'r' * 64} A Topic B R 9": "Ensure this value has at most 63 characters (it has 64).",
    "user1 A Stream B R 9": "Select a valid choice. Stream is not one of the available choices.",
}


@pytest.mark.parametrize("rule", ODD)
def test_what_is_hardly_meant_is_saved_and_remarked(desk: Desk, rule: str) -> None:
    page = desk.add_rule(rule)
    assert ODD[rule] in page.messages
    assert Auth.objects.count() == 1


def test_a_rule_for_a_queue_is_saved_without_a_remark(desk: Desk) -> None:
    page = desk.add_rule("user1 A Queue Q RW 9")
    assert [text for text in page.messages if "was added" not in text] == [
        "No connected node is touched."
    ]


def test_a_blank_around_a_name_is_kept_and_remarked(desk: Desk) -> None:
    page = desk.add_rule("user1 A Topic T R 9", dest="T ")
    assert (
        "The destination “T ” begins or ends with a blank, which belongs to the name."
        in page.messages
    )
    assert Auth.objects.get().dest == "T "


def test_an_ordinary_rule_is_not_remarked(desk: Desk) -> None:
    page = desk.add_rule("user1 A* Topic T.* R 9")
    assert [message for message in page.messages if "successfully" not in message] == [
        "No connected node is touched."
    ]


# What cannot mean anything


@pytest.mark.parametrize("rule", REFUSED)
def test_what_cannot_mean_anything_is_refused(desk: Desk, rule: str) -> None:
    page = desk.add_rule(rule)
    assert page.errors == [REFUSED[rule]]
    assert not Auth.objects.exists()


def test_an_empty_name_is_refused(desk: Desk) -> None:
    assert desk.add_rule("user1 A Topic T R 9", ident="").errors == ["This field is required."]


def test_a_second_rule_of_the_same_names_is_refused(desk: Desk) -> None:
    desk.world.rules("user1 A Topic T R 9")
    page = desk.add_rule("user1 A Topic T W 9")
    assert page.errors == ["This role, ident, type and destination have a rule."]


def test_what_cannot_mean_anything_is_refused_in_the_list_too(desk: Desk) -> None:
    desk.world.rules("user1 A Rpc B W 9", "user1 A Topic T R 9")
    rpc, topic = Auth.objects.get(type="Rpc").pk, Auth.objects.get(type="Topic").pk
    page = desk.edit_list(desk.open(RULES), {rpc: {"mode": "RW"}, topic: {"timeout": "20"}})
    assert page.errors == [NOT_FOR_RPC.format("RW")]
    assert Auth.objects.get(type="Topic").timeout == 9, "all or nothing"
