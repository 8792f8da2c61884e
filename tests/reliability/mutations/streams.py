"""Checks of streams: who publishes, who reads, and whom nobody can hold up."""

from tests.reliability.mutation import Mutation

HORIZON, PUBLISH = "streams/test_horizon.py", "streams/test_publish.py"
NO_ROLE = f"{HORIZON}::test_no_role_reads_pings_or_ends_the_subscription_of_another"
ELSE = f"{PUBLISH}::test_a_rule_for_something_else_publishes_nothing"
RACES = "streams/test_races.py"
DELAYS = "streams/test_delays.py::test_what_a_role_leaves_open_delays_no_call_of_another"

MUTATIONS = {
    "wakes_without_right": Mutation(
        "_wakes_of", "AND r.can_read", "",
        "streams/test_wakes.py::test_who_lost_the_right_is_woken_no_more_and_again_when_it_is_back",
    ),
    "readers_held_up_by_any_lock": Mutation(
        "_publishers", "WHERE messages._publishing_proof",
        "WHERE true OR messages._publishing_proof",
        f"{HORIZON}::test_the_locks_of_a_publisher_hold_nobody_back_in_the_hands_of_another",
    ),
    "readers_held_up_by_a_number_ahead": Mutation(
        "_horizon", "WHERE (v_last - p.last_id) & 4294967295 < 2147483648", "",
        f"{HORIZON}::test_a_number_ahead_of_the_sequence_holds_nobody_back",
    ),
    "a_forged_mark_believed": Mutation(
        "_begin_publishing", "v_first::bigint BETWEEN last_id - 1073741824 AND last_id", "true",
        f"{HORIZON}::test_no_message_of_a_forged_mark_is_passed_over",
    ),
    "housekeeping_before_the_commit": Mutation(
        "_is_ending", "strpos(context, E'\\n') = 0", "true", DELAYS
    ),
    "housekeeping_in_any_query": Mutation(
        "_is_ending", "(v_query IS NULL", "(true", DELAYS
    ),
    "housekeeping_beside_a_cursor": Mutation("_is_ending", "c.is_holdable", "false", DELAYS),
    "housekeeping_beside_a_trigger": Mutation(
        "_is_ending", "l.mode <> 'AccessShareLock'", "false", DELAYS
    ),
    "publish_without_w": Mutation(
        "_publishing_fault", "IF length(ident) <= 100", "RETURN NULL;\n    IF length(ident) <= 100",
        f"{PUBLISH}::test_publish_needs_the_mode_w",
    ),
    "publish_as_a_pattern": Mutation(
        "_publishing_fault", "AND right(ident, 1) <> '*' AND right(topic, 1) <> '*'", "",
        f"{PUBLISH}::test_a_pattern_is_no_name_even_where_a_rule_holds_it",
    ),
    "publish_by_the_rule_of_another_role": Mutation(
        "publish", "AND a.role = session_user", "", NO_ROLE
    ),
    "publish_by_a_rule_of_another_node": Mutation(
        "publish", "AND a.ident = client_id", "", ELSE
    ),
    "publish_by_a_rule_of_another_type": Mutation("publish", "AND a.type = 'Topic'", "", ELSE),
    "publish_by_a_rule_to_another_topic": Mutation("publish", "AND a.dest = topic", "", ELSE),
    "publish_by_any_mode": Mutation(
        "publish", "AND a.mode IN ('W', 'RW')", "", f"{PUBLISH}::test_publish_needs_the_mode_w"
    ),
    "publish_by_a_pattern_at_once": Mutation(
        "publish", "AND a.ident NOT LIKE '%*' AND a.dest NOT LIKE '%*'", "",
        f"{PUBLISH}::test_a_pattern_is_no_name_even_where_a_rule_holds_it",
    ),
    "publish_any_size": Mutation(
        "publish", "octet_length(payload) <= 8192", "true",
        f"{PUBLISH}::test_a_payload_over_the_maximum_is_refused_where_nobody_listens",
    ),
    "publish_any_encoding": Mutation(
        "publish", "AND (enc IS NULL OR enc IN ('b64', 'json'))", "",
        f"{PUBLISH}::test_an_encoding_that_there_is_not_is_refused",
    ),
    "topics_made_though_the_rule_went": Mutation(
        "_hold_topic", "messages._topic_fault(session_user, ident, topic, 'W', true) IS NOT NULL",
        "false", f"{PUBLISH}::test_a_topic_whose_rule_goes_away_meanwhile_is_not_made",
    ),
    "publish_though_the_rule_went": Mutation(
        "_publish",
        "IF v_timeout IS NULL THEN",
        "v_timeout := coalesce(v_timeout, 1);\n    IF false THEN",
        "sql/test_concurrency.py::test_a_rule_that_goes_during_a_send_refuses_it",
    ),
    "subscribe_without_r": Mutation(
        "subscribe", "IF v_can_read IS NOT TRUE THEN", "IF false THEN", NO_ROLE,
    ),
    "subscription_started_though_the_rule_went": Mutation(
        "_start_subscription", "IF v_fault IS NOT NULL THEN", "IF false THEN",
        f"{RACES}::test_a_first_call_whose_rule_goes_away_meanwhile_is_refused",
    ),
    "subscription_placed_though_the_rule_went": Mutation(
        "_place_subscriptions", "IF v_fault IS NOT NULL THEN", "IF false THEN",
        f"{RACES}::test_a_first_call_whose_rule_goes_away_meanwhile_is_refused",
    ),
    "unsubscribe_without_a_rule": Mutation(
        "unsubscribe", "IF v_fault IS NOT NULL THEN", "IF false THEN", NO_ROLE
    ),
    "horizons_by_the_rule_of_another_role": Mutation(
        "_readable_topics",
        "AND (a.role = session_user OR messages._is_member(session_user::text, a.role))", "",
        "streams/test_positions.py::test_a_pattern_means_nothing_that_another_rule_names",
    ),
    "horizons_by_any_mode": Mutation(
        "_readable_topics", "AND a.mode IN ('R', 'RW')", "",
        "streams/test_positions.py::test_a_pattern_means_nothing_that_another_rule_names",
    ),
    "horizons_by_any_type": Mutation(
        "_readable_topics", "AND a.type = 'Topic'", "",
        "streams/test_positions.py::test_a_pattern_means_nothing_that_another_rule_names",
    ),
    "horizons_without_r": Mutation(
        "_stream_names_fault", "ELSE messages._subscription_fault(client_id, v_topic, 'R')",
        "ELSE messages._client_fault(client_id, v_topic)",
        "sql/test_errors.py::test_a_refused_call_answers_with_number_text_and_warning",
    ),
    "stored_read_without_r": Mutation(
        "list_stored", "'{R,RW}'", "'{R,W,RW}'",
        "streams/test_positions.py::test_the_view_holds_what_a_rule_lets_the_role_read",
    ),
    "range_read_without_r": Mutation(
        "_readable_topic", "IF v_can_read IS NOT TRUE THEN", "IF false THEN",
        "streams/test_positions.py::test_a_range_is_read_only_as_rules_allow",
    ),
    "range_read_past_an_open_publisher": Mutation(
        "read_stream", "v_last := messages._horizon(v_topic);", "v_last := 9223372036854775807;",
        "streams/test_positions.py::test_a_range_of_ids_is_read_in_order_up_to_what_is_settled",
    ),
}  # fmt: skip
