"""Checks of sends and of kept bodies: who sends what to whom, and who fetches it."""

from tests.reliability.mutation import Mutation

BODIES, SEND_AS = "sql/test_bodies.py", "sql/test_send_as.py"
ONLY_LISTENS = "sql/test_topics.py::test_who_only_listens_sends_nothing"
ENCODING = "sql/test_hostile.py::test_an_encoding_writes_nothing_into_the_header"
SETTING = "sql/test_hostile_settings.py::test_one_setting_of_another_session_makes_nobody_its_node"
# Each table of bodies is read by a statement of its own.
SLOTS = 21
LISTENERS = "sql/test_listeners.py"
ITS_CHANNEL = f"{LISTENERS}::test_a_channel_goes_whatever_else_its_node_does"
REFUSED = "sql/test_errors.py::test_a_refused_call_answers_with_number_text_and_warning"

MUTATIONS = {
    "route_of_any_node": Mutation(
        "_route", "AND m.client_id::text = current_setting('messages.node', true)", "",
        "sql/test_topics.py::test_the_newest_node_of_a_session_acts_until_use_chooses_another",
    ),
    "route_of_listeners": Mutation("_route", "AND m.kind = 'notify'", "", ONLY_LISTENS),
    "route_of_any_channel": Mutation(
        "_route", "AND m.channel = current_setting('messages.channel', true)", "", SETTING
    ),
    "route_of_any_pid": Mutation(
        "_route", "AND m.pid = pg_backend_pid()", "",
        "sql/test_hostile_settings.py::test_the_settings_of_another_session_make_nobody_its_node",
    ),
    "route_of_any_role": Mutation(
        "_route", "AND m.role = session_user", "",
        "sql/test_crash.py::test_another_role_with_the_pid_of_a_dead_session_cannot_act_as_its_node",
    ),
    "encoding_into_the_header": Mutation(
        "topic_send",
        """WHEN enc = 'b64' THEN ',"Enc":"b64","Id":'""",
        """ELSE ',"Enc":"' || enc || '","Id":'""",
        ENCODING,
    ),
    "encoding_of_any_kind": Mutation(
        "_content_fault", "enc NOT IN ('b64', 'json')", "false", ENCODING
    ),
    "token_of_any_length": Mutation(
        "_content_fault", "octet_length(token) > 1000", "false", REFUSED,
    ),
    "body_of_any_size": Mutation(
        "_content_fault", "size > 8192 AND messages._is_too_large(size)", "false", REFUSED
    ),
    "sent_body_of_any_size": Mutation(
        "topic_send",
        "OR octet_length(message) > 8192 AND messages._is_too_large(octet_length(message))", "",
        f"{BODIES}::test_the_maximum_of_djangos_settings_binds_every_connection",
    ),
    "unlistened_channel_kept": Mutation(
        "_remove_listener", "ELSE array_remove(t.channels, _remove_listener.channel)",
        "ELSE t.channels",
        f"{LISTENERS}::test_a_channel_stays_until_the_last_of_its_nodes_has_left",
    ),
    "channel_kept_by_another_topic": Mutation(
        "_remove_listener", "m.topic_id = topic AND", "", ITS_CHANNEL
    ),
    "channel_kept_by_sending": Mutation(
        "_remove_listener", "AND m.kind = 'listen'", "", ITS_CHANNEL
    ),
    "channel_kept_by_another_listener": Mutation(
        "_remove_listener", "AND m.channel = _remove_listener.channel", "",
        f"{LISTENERS}::test_a_channel_stays_until_the_last_of_its_nodes_has_left",
    ),
    "channel_kept_by_another_pattern": Mutation(
        "_remove_listener", "v.pattern = ANY (messages._patterns(t.name)) AND", "", ITS_CHANNEL
    ),
    "channel_kept_by_another_observer": Mutation(
        "_remove_listener", "AND v.channel = _remove_listener.channel", "", ITS_CHANNEL
    ),
    "channels_of_the_dead_kept": Mutation(
        "_bury", "PERFORM messages._rebuild_topics(v_topics);", "",
        f"{LISTENERS}::test_a_channel_goes_with_its_dead_session",
    ),
    "send_as_a_pattern": Mutation(
        "topic_send_as", "right(ident, 1) = '*' OR", "",
        f"{SEND_AS}::test_the_rules_of_the_role_that_logged_in_decide",
    ),
    "send_as_without_a_rule": Mutation(
        "topic_send_as", "messages._topic_fault(session_user, ident, topic, 'W', false)", "NULL",
        f"{SEND_AS}::test_the_rules_of_the_role_that_logged_in_decide",
    ),
    "send_as_answered_to_another_role": Mutation(
        "topic_send_as", "AND c.role = session_user", "",
        f"{SEND_AS}::test_a_token_needs_the_node_connected_by_the_same_role_and_alive",
    ),
    "send_as_answered_to_the_dead": Mutation(
        "topic_send_as", "OR messages._is_gone(v_client.session_id)", "",
        f"{SEND_AS}::test_a_token_needs_the_node_connected_by_the_same_role_and_alive",
    ),
    "send_as_though_the_rule_went": Mutation(
        "topic_send_as",
        "IF v_timeout IS NULL THEN",
        "v_timeout := coalesce(v_timeout, 1);\n    IF false THEN",
        "sql/test_concurrency.py::test_a_rule_that_goes_during_a_send_refuses_it",
    ),
    "body_key_of_any_length": Mutation(
        "get_data", "OR length(split_part(v_dkey, '.', 4)) <> 32", "",
        f"{BODIES}::test_an_altered_key_finds_nothing",
    ),
    "body_after_its_time": Mutation(
        "_select_body", " AND b.expires_at > clock_timestamp()", "",
        f"{BODIES}::test_an_expired_body_is_told_apart_even_when_it_is_removed", times=SLOTS,
    ),
    "body_for_everybody": Mutation(
        "get_data", "OR messages._receives(v_node.id, v_body.topic_id)", "OR true",
        f"{BODIES}::test_a_body_seems_not_to_exist_to_all_but_listeners_and_observers",
    ),
    "body_of_an_rpc_for_everybody": Mutation(
        "get_data", "v_body.client_id = v_node.id", "v_body.client_id IS NOT NULL",
        f"{BODIES}::test_the_body_of_an_rpc_is_for_the_node_asked_only",
    ),
    "body_by_any_id": Mutation(
        "_select_body", " AND b.id = key", "",
        f"{BODIES}::test_an_altered_key_finds_nothing", times=SLOTS,
    ),
    "body_of_any_slot": Mutation(
        "get_data", "(1?[0-9]|20)", "([0-9]+)", f"{BODIES}::test_an_altered_key_finds_nothing"
    ),
    "body_by_the_listening_to_another_topic_at_once": Mutation(
        "_select_body", "m.topic_id = b.topic_id AND ", "",
        "sql/test_bodies.py::test_the_one_statement_fetches_for_the_listener_only", times=SLOTS,
    ),
    "body_for_its_sender_at_once": Mutation(
        "_select_body", " AND m.kind = 'listen'", "",
        "sql/test_bodies.py::test_the_one_statement_fetches_for_the_listener_only", times=SLOTS,
    ),
    "body_by_the_listening_of_another_at_once": Mutation(
        "_select_body", "AND m.client_id::text = current_setting('messages.node', true)", "",
        "sql/test_bodies.py::test_the_one_statement_fetches_for_the_listener_only", times=SLOTS,
    ),
    "body_by_the_channel_of_another_at_once": Mutation(
        "_select_body", "AND m.channel = current_setting('messages.channel', true)", "",
        "sql/test_bodies.py::test_the_one_statement_fetches_for_the_listener_only",
        times=SLOTS,
    ),
    "body_for_everybody_at_once": Mutation(
        "get_data", "v_body.is_ours AND", "v_body.answer IS NOT NULL AND",
        "sql/test_bodies.py::test_the_one_statement_fetches_for_the_listener_only",
    ),
    "body_of_one_table_after_its_time": Mutation(
        "_select_body", "WHERE b.slot = 7 AND b.id = key AND b.expires_at > clock_timestamp()",
        "WHERE b.slot = 7 AND b.id = key",
        "sql/test_bodies.py::test_each_table_of_bodies_is_read_by_the_same_statement",
    ),
    "bodies_locked_by_strangers": Mutation(
        "get_data", "OR NOT EXISTS (", "OR false AND NOT EXISTS (",
        "sql/test_bodies.py::test_who_has_no_session_locks_no_table_of_bodies",
    ),
    "body_received_by_everybody": Mutation(
        "_receives", "messages._listens(node, topic_id)", "true",
        f"{BODIES}::test_a_body_seems_not_to_exist_to_all_but_listeners_and_observers",
    ),
    "body_by_the_listening_of_another": Mutation(
        "_listens", "m.client_id = node AND", "",
        f"{BODIES}::test_another_node_of_the_session_and_one_that_lost_its_right_find_nothing",
    ),
    "body_for_its_sender": Mutation(
        "_listens", "AND m.kind = 'listen'", "",
        f"{BODIES}::test_a_body_seems_not_to_exist_to_all_but_listeners_and_observers",
    ),
    "body_by_the_observation_of_another": Mutation(
        "_receives", "AND o.client_id = node", "",
        f"{BODIES}::test_a_body_seems_not_to_exist_to_all_but_listeners_and_observers",
    ),
    "body_told_of_to_strangers": Mutation(
        "_refuse_data",
        "(SELECT r.can_read FROM messages._rights(role, ident, 'Topic', v_topic) AS r)",
        "v_topic IS NOT NULL",
        f"{BODIES}::test_a_body_seems_not_to_exist_to_all_but_listeners_and_observers",
    ),
}  # fmt: skip
