"""Checks of questions and answers: the token is the only permission, and nobody makes one."""

from tests.reliability.mutation import Mutation

REFUSED = "sql/test_errors.py::test_a_refused_call_answers_with_number_text_and_warning"
FORGED = "sql/test_rpc.py::test_a_forged_token_is_refused"
FORGED_FOR_A_TOPIC = "sql/test_rpc.py::test_a_forged_token_is_refused"
CONTENT = "convert_to(content, 'UTF8')"
HMAC = "sql/test_secret.py::test_a_token_is_the_hmac_of_the_secret"
SECRET = "sql/test_secret.py::test_a_secret_is_256_random_bits"

MUTATIONS = {
    "mac_without_asker": Mutation(
        "_mac", "asker || ' ' || answerer", "left(asker::text, 0) || answerer",
        "sql/test_rpc.py::test_a_token_answers_its_asker_only",
    ),
    "mac_without_answerer": Mutation(
        "_mac", "' ' || answerer || ' '", "left(answerer, 0) || ' '",
        "sql/test_rpc.py::test_a_token_for_a_topic_answers_for_no_other_topic_and_no_node_nor_the_reverse",
    ),
    "mac_without_timeout": Mutation(
        "_mac", "|| timeout ||", "|| left(timeout, 0) ||", FORGED_FOR_A_TOPIC
    ),
    "mac_without_token": Mutation(
        "_mac", "timeout || ' ' || token", "timeout || ' ' || left(token, 0)", FORGED_FOR_A_TOPIC
    ),
    # The seal that rpc and return make by themselves, and _mac for all others.
    "seal_without_asker": Mutation(
        "_sealed", CONTENT, "convert_to(regexp_replace(content, '^[0-9]+', ''), 'UTF8')",
        "sql/test_rpc.py::test_a_token_answers_its_asker_only",
    ),
    "seal_without_answerer": Mutation(
        "_sealed", CONTENT, "convert_to(regexp_replace(content, ' node [^ ]+', ''), 'UTF8')",
        "sql/test_rpc.py::test_a_node_that_was_not_asked_may_not_answer",
    ),
    "seal_without_timeout": Mutation(
        "_sealed", CONTENT,
        "convert_to(regexp_replace(content, '[0-9]+( [^ ]+)$', '\\1'), 'UTF8')", FORGED,
    ),
    "seal_without_token": Mutation(
        "_sealed", CONTENT, "convert_to(regexp_replace(content, '[^ ]+$', ''), 'UTF8')", FORGED
    ),
    "seal_of_few_bits": Mutation("_sealed", "'hex'), 32)", "'hex'), 2) || repeat('0', 30)", HMAC),
    "seal_without_outer_secret": Mutation("_sealed", "outer_pad || ", "", HMAC),
    "seal_without_inner_secret": Mutation("_sealed", "inner_pad || ", "", HMAC),
    "secret_known": Mutation(
        "_make_secret",
        "v_key bytea := sha256(",
        "v_key bytea := sha256('x'); v_unused bytea := sha256(",
        SECRET,
    ),
    "secret_of_64_bits": Mutation("_make_secret", "0 .. 31 LOOP", "0 .. 7 LOOP", SECRET),
    "token_not_compared": Mutation(
        "_return",
        "v_token.mac IS DISTINCT FROM messages._mac(",
        "NULL IS DISTINCT FROM nullif(1, 1) AND '' <> messages._mac(",
        FORGED,
    ),
    "answers_of_strangers_to_a_topic": Mutation(
        "_return", "messages._listens(v_me.id, v_token.topic_id)", "true",
        "sql/test_rpc.py::test_who_listens_to_a_topic_may_answer_what_was_asked_of_it_and_nobody_else",
    ),
    "answers_to_the_dead": Mutation(
        "_return", "messages._is_gone(v_asker.session_id)", "false",
        "sql/test_rpc.py::test_who_was_killed_a_moment_ago_is_not_connected",
    ),
    "answers_of_any_encoding": Mutation(
        "_return", "IF v_fault IS NOT NULL THEN", "IF false THEN",
        "sql/test_secret.py::test_an_encoding_that_there_is_not_is_no_answer",
    ),
    "questions_to_patterns": Mutation(
        "_rpc_fault", "right(node, 1) = '*' OR", "",
        "sql/test_rpc.py::test_a_rule_lets_a_node_ask_itself_or_all_of_a_pattern_which_is_no_name",
    ),
    "questions_without_a_rule": Mutation(
        "_rpc", "messages._rpc_fault(v_me.role, v_me.ident, node, token)", "NULL", REFUSED,
    ),
    "questions_of_any_content": Mutation(
        "_rpc", "messages._content_fault(token, enc, octet_length(param))", "NULL", REFUSED,
    ),
    "questions_to_the_dead": Mutation(
        "_rpc", "OR messages._is_gone(v_target.session_id)", "",
        "sql/test_rpc.py::test_who_was_killed_a_moment_ago_is_not_connected",
    ),
    "questions_though_the_rule_went": Mutation(
        "_rpc",
        "IF v_timeout IS NULL THEN",
        "v_timeout := coalesce(v_timeout, 1);\n    IF false THEN",
        "sql/test_concurrency.py::test_a_rule_that_goes_during_a_send_refuses_it",
    ),
    "counterpart_of_any_node": Mutation(
        "_counterpart", "m.id = messages._node_id()", "true",
        "sql/test_rpc.py::test_the_right_to_ask_is_that_of_the_acting_node_and_of_its_role",
    ),
    "counterpart_of_any_channel": Mutation(
        "_counterpart", "AND o.channel = current_setting('messages.channel', true)", "",
        "sql/test_rpc.py::"
        "test_who_has_settings_or_pid_of_another_session_neither_asks_nor_answers",
    ),
    "counterpart_of_any_pid": Mutation(
        "_counterpart", "AND o.pid = pg_backend_pid()", "",
        "sql/test_rpc.py::"
        "test_who_has_settings_or_pid_of_another_session_neither_asks_nor_answers",
    ),
    "counterpart_of_any_role": Mutation(
        "_counterpart", "AND o.role = session_user", "",
        "sql/test_rpc.py::"
        "test_who_has_settings_or_pid_of_another_session_neither_asks_nor_answers",
    ),
    "asked_at_once_without_a_rule": Mutation(
        "rpc", "messages._rights(session_user, p.own_ident, 'Rpc', node) AS r",
        "(SELECT true AS can_write, 5 AS timeout) AS r",
        "sql/test_rpc.py::test_the_right_to_ask_is_that_of_the_acting_node_and_of_its_role",
    ),
    "asked_at_once_by_the_rule_of_another_role": Mutation(
        "rpc", "messages._rights(session_user, ", "messages._rights('user2', ",
        "sql/test_rpc.py::test_the_right_to_ask_is_that_of_the_acting_node_and_of_its_role",
    ),
    "asked_at_once_by_a_rule_of_another_type": Mutation(
        "rpc", "'Rpc', node)", "'Topic', node)",
        "sql/test_rpc.py::test_the_right_to_ask_is_that_of_the_acting_node_and_of_its_role",
    ),
    "asked_at_once_though_dead": Mutation(
        "rpc", "NOT pg_try_advisory_xact_lock_shared(1886612839, p.session_id)", "true",
        "sql/test_rpc.py::test_who_was_killed_a_moment_ago_is_not_connected",
    ),
    "asked_at_once_without_a_token": Mutation("rpc", "AND token <> ''", "", REFUSED),
    "asked_at_once_with_any_token": Mutation("rpc", "AND octet_length(token) <= 1000", "", REFUSED),
    "asked_at_once_in_any_encoding": Mutation(
        "rpc", "AND (enc IS NULL OR enc IN ('b64', 'json'))", "", REFUSED
    ),
    "answered_at_once_with_any_token": Mutation(
        "return", "left(token, 33) = messages._sealed(", "'' <> messages._sealed(", FORGED
    ),
    "answered_at_once_though_dead": Mutation(
        "return", "NOT pg_try_advisory_xact_lock_shared(1886612839, p.session_id)", "true",
        "sql/test_rpc.py::test_who_was_killed_a_moment_ago_is_not_connected",
    ),
    "answered_at_once_in_any_encoding": Mutation(
        "return", "AND (enc IS NULL OR enc IN ('b64', 'json'))", "",
        "sql/test_secret.py::test_an_encoding_that_there_is_not_is_no_answer",
    ),
}  # fmt: skip
