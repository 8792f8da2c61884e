"""Checks of sends and of kept bodies: who sends what to whom, and who fetches it."""

from tests.reliability.mutation import Mutation

BODIES, SEND_AS = "sql/test_bodies.py", "sql/test_send_as.py"
ONLY_LISTENS = "sql/test_topics.py::test_who_only_listens_sends_nothing"
ENCODING = "sql/test_hostile.py::test_an_encoding_writes_nothing_into_the_header"
SETTING = "sql/test_hostile_settings.py::test_one_setting_of_another_session_makes_nobody_its_node"
REFUSED = "sql/test_errors.py::test_a_refused_call_answers_with_number_text_and_warning"

MUTATIONS = {
    "route_of_any_node": Mutation(
        "_route", "AND m.client_id = messages._node_id()", "",
        "sql/test_topics.py::test_a_message_comes_from_the_node_that_use_chose",
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
        "topic_send", "AND (enc IS NULL OR enc IN ('b64', 'json'))", "", ENCODING
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
        "topic_send", "OR messages._is_too_large(v_size)", "",
        f"{BODIES}::test_the_maximum_of_djangos_settings_binds_every_connection",
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
        f"{SEND_AS}::test_a_token_needs_the_node_connected_by_the_same_role",
    ),
    "send_as_answered_to_the_dead": Mutation(
        "topic_send_as", "OR messages._is_gone(v_client.session_id)", "",
        f"{SEND_AS}::test_a_token_needs_the_node_alive",
    ),
    "send_as_though_the_rule_went": Mutation(
        "topic_send_as",
        "IF v_timeout IS NULL THEN",
        "v_timeout := coalesce(v_timeout, 1);\n    IF false THEN",
        "sql/test_concurrency.py::test_a_rule_that_goes_during_a_send_refuses_it",
    ),
    "body_key_of_any_length": Mutation(
        "get_data", "AND length(split_part(v_dkey, '.', 4)) = 32", "",
        f"{BODIES}::test_an_altered_key_finds_nothing",
    ),
    "body_after_its_time": Mutation(
        "get_data", "AND b.expires_at > clock_timestamp()", "",
        f"{BODIES}::test_an_expired_body_is_told_apart_even_when_it_is_removed",
    ),
    "body_for_everybody": Mutation(
        "get_data", "OR messages._receives(v_node.id, v_topic)", "OR true",
        f"{BODIES}::test_the_sender_of_a_body_is_no_reader_of_it",
    ),
    "body_of_an_rpc_for_everybody": Mutation(
        "get_data", "v_client = v_node.id", "v_client IS NOT NULL",
        f"{BODIES}::test_the_body_of_an_rpc_is_for_the_node_asked_only",
    ),
    "body_by_the_listening_of_another": Mutation(
        "_listens", "m.client_id = node AND", "",
        f"{BODIES}::test_another_node_of_the_same_session_is_not_the_listener",
    ),
    "body_for_its_sender": Mutation(
        "_listens", "AND m.kind = 'listen'", "",
        f"{BODIES}::test_the_sender_of_a_body_is_no_reader_of_it",
    ),
    "body_by_the_observation_of_another": Mutation(
        "_receives", "AND o.client_id = node", "",
        f"{BODIES}::test_an_observer_opens_nothing_for_others",
    ),
    "body_told_of_to_strangers": Mutation(
        "_refuse_data",
        "(SELECT r.can_read FROM messages._rights(role, ident, 'Topic', v_topic) AS r)",
        "v_topic IS NOT NULL",
        f"{BODIES}::test_the_body_of_a_topic_without_r_seems_not_to_exist",
    ),
}  # fmt: skip
