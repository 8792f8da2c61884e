"""Checks of questions and answers: the token is the only permission, and nobody makes one."""

from tests.reliability.mutation import Mutation

FORGED = "sql/test_rpc.py::test_a_forged_token_is_refused"
HMAC = "sql/test_secret.py::test_a_token_is_the_hmac_of_the_secret"
SECRET = "sql/test_secret.py::test_a_secret_is_256_random_bits"

MUTATIONS = {
    "mac_without_asker": Mutation(
        "_mac", "asker || ' ' || answerer", "left(asker::text, 0) || answerer",
        "sql/test_rpc.py::test_a_token_answers_its_asker_only",
    ),
    "mac_without_answerer": Mutation(
        "_mac", "' ' || answerer || ' '", "left(answerer, 0) || ' '",
        "sql/test_rpc.py::test_a_node_that_was_not_asked_may_not_answer",
    ),
    "mac_without_timeout": Mutation("_mac", "|| timeout ||", "|| left(timeout, 0) ||", FORGED),
    "mac_without_token": Mutation("_mac", "|| token;", "|| left(token, 0);", FORGED),
    "mac_without_outer_secret": Mutation("_mac", "v_secret.outer_pad || ", "", HMAC),
    "mac_without_inner_secret": Mutation("_mac", "v_secret.inner_pad || ", "", HMAC),
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
        "sql/test_rpc.py::test_an_observer_may_not_answer",
    ),
    "answers_to_the_dead": Mutation(
        "_return", "messages._is_gone(v_asker.session_id)", "false",
        "sql/test_rpc.py::test_an_asker_killed_a_moment_ago_is_not_connected",
    ),
    "answers_of_any_encoding": Mutation(
        "_return", "IF v_fault IS NOT NULL THEN", "IF false THEN",
        "sql/test_secret.py::test_an_encoding_that_there_is_not_is_no_answer",
    ),
    "questions_to_patterns": Mutation(
        "_rpc_fault", "right(node, 1) = '*' OR", "",
        "sql/test_rpc.py::test_a_pattern_is_no_name_of_a_node",
    ),
    "questions_without_a_rule": Mutation(
        "rpc", "messages._rpc_fault(v_me.role, v_me.ident, node, token)", "NULL",
        "sql/test_errors.py::test_a_refused_call_answers_with_number_text_and_warning",
    ),
    "questions_to_the_dead": Mutation(
        "rpc", "OR messages._is_gone(v_target.session_id)", "",
        "sql/test_rpc.py::test_a_callee_killed_a_moment_ago_is_not_connected",
    ),
    "questions_though_the_rule_went": Mutation(
        "rpc",
        "IF v_timeout IS NULL THEN",
        "v_timeout := coalesce(v_timeout, 1);\n    IF false THEN",
        "sql/test_concurrency.py::test_a_rule_that_goes_during_a_send_refuses_it",
    ),
}  # fmt: skip
