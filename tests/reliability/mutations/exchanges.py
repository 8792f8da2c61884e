"""Checks of exchanges: what one may deliver, of which elements, and to which queues."""

from tests.reliability.mutation import Mutation

ABUSE, DELIVER, PUSH = "queues/test_abuse.py", "queues/test_deliver.py", "queues/test_push.py"
MODE = f"{PUSH}::test_every_function_checks_the_mode_of_the_rule"
NO_COPY = f"{DELIVER}::test_a_queue_that_is_there_takes_no_copy_without_the_right_to_push"
ASIDE_ONCE = f"{DELIVER}::test_without_a_rule_an_element_is_put_aside_once"

MUTATIONS = {
    "deliver_without_r": Mutation(
        "deliver", "messages._may_use(client_id, source, 'R') IS NOT TRUE", "false",
        f"{DELIVER}::test_delivering_needs_the_right_to_take",
    ),
    "copy_without_w": Mutation(
        "_copy_fault", "messages._may_use(client_id, copy.queue, 'W') IS NOT TRUE", "false",
        f"{DELIVER}::test_an_element_with_a_refused_copy_comes_back_and_its_other_copies_are_made_once",
    ),
    "no_route_with_another_body": Mutation(
        "_copy_fault", "AND copy.body IS NULL", "",
        f"{DELIVER}::test_no_route_without_a_rule_takes_only_what_is_as_at_the_source",
    ),
    "no_route_with_other_headers": Mutation(
        "_copy_fault", "AND copy.headers IS NULL", "",
        f"{DELIVER}::test_no_route_without_a_rule_takes_only_what_is_as_at_the_source",
    ),
    "no_route_many_times": Mutation(
        "deliver", "> cardinality(v_held.ids)", "> 1000000",
        f"{ABUSE}::test_without_a_rule_an_element_is_put_aside_once",
    ),
    "elements_of_another_queue": Mutation(
        "_hold_elements", "AND l.queue_id = source", "",
        f"{DELIVER}::test_an_element_of_another_queue_cannot_be_delivered",
        times=2,
    ),
    "elements_that_another_holds": Mutation(
        "_hold_elements", "AND l.available_at <= clock_timestamp()", "",
        f"{DELIVER}::test_an_element_that_another_holds_by_lease_cannot_be_delivered_by_its_id",
    ),
    "elements_by_a_lease_that_is_over": Mutation(
        "_hold_elements", "AND l.lease = n.lease", "",
        f"{DELIVER}::test_what_others_have_taken_over_is_lost_and_nothing_is_done_for_it",
    ),
    "leased_elements_that_are_locked": Mutation(
        "_hold_elements", "            FOR UPDATE\n", "            FOR UPDATE SKIP LOCKED\n",
        f"{DELIVER}::test_a_leased_element_that_is_locked_for_a_moment_is_not_lost",
    ),
    "deliver_at_once_by_writing": Mutation(
        "deliver", "messages._used_queue(client_id, source, 'R')",
        "messages._used_queue(client_id, source, 'W')", MODE,
    ),
    "deliver_any_number": Mutation(
        "deliver", "cardinality(elements) > 4096 OR cardinality(copy_of) > 65536", "false",
        "sql/test_errors.py::test_a_refused_call_answers_with_number_text_and_warning",
    ),
    "forward_by_reading": Mutation(
        "_forward_queues", "messages._used_queue(client_id, n.name, 'W')",
        "messages._used_queue(client_id, n.name, 'R')", NO_COPY,
    ),
    "forward_to_any_queue": Mutation(
        "_forward_queues", "AND n.name IN ('__no_route__', '__too_many_hops__')", "", NO_COPY
    ),
    "forward_though_a_queue_is_missing": Mutation(
        "_forward_queues", "cardinality(v_queues) < cardinality(v_names)", "false", NO_COPY
    ),
    "forward_to_no_route_many_times": Mutation(
        "_forward_queues", "HAVING count(*) > 1", "HAVING count(*) > 1000000", ASIDE_ONCE
    ),
    "forward_to_no_route_by_many_names": Mutation(
        "_plain_ids", "'^[1-9][0-9]{0,17}(,[1-9][0-9]{0,17})*$'",
        "'^[0-9]{1,18}(,[0-9]{1,18})*$'", ASIDE_ONCE,
    ),
    "forward_elements_of_another_queue": Mutation(
        "_forward", "AND l.queue_id = source", "",
        f"{DELIVER}::test_an_element_of_another_queue_cannot_be_delivered",
    ),
    "forward_elements_that_another_holds": Mutation(
        "_forward", "AND l.available_at <= clock_timestamp()", "",
        f"{DELIVER}::test_an_element_that_another_holds_by_lease_cannot_be_delivered_by_its_id",
    ),
    "forward_copies_again": Mutation(
        "_forward", "WHERE g.delivered IS NULL OR c.mark IS NULL OR c.mark <> ALL (g.delivered)",
        "",
        f"{DELIVER}::test_an_element_with_a_refused_copy_comes_back_and_its_other_copies_are_made_once",
    ),
}  # fmt: skip
