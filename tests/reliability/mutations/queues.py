"""Checks of queues: who pushes and takes, and whose lease it is."""

from tests.reliability.mutation import Mutation

ABUSE, PUSH = "queues/test_abuse.py", "queues/test_push.py"
RIGHTS, STAGED, LEASES = "queues/test_rights.py", "queues/test_staged.py", "queues/test_leases.py"
MODE = f"{PUSH}::test_every_function_checks_the_mode_of_the_rule"
TAKEN_BY_NO_NAME = f"{RIGHTS}::test_what_is_no_name_of_a_node_takes_nothing_though_a_rule_covers_it"
NO_NAME = f"{RIGHTS}::test_what_is_no_name_gets_nothing_though_a_rule_covers_it"
THEIRS = f"{STAGED}::test_rows_that_another_role_put_under_ones_own_name_are_not_there"
ELSE = f"{RIGHTS}::test_a_rule_for_something_else_pushes_nothing"
GUESSED = f"{LEASES}::test_guessed_leases_settle_nothing"
ONE_QUEUE = f"{LEASES}::test_a_queue_without_the_right_among_others_settles_none_of_them"
COUNT = f"{RIGHTS}::test_a_count_out_of_bounds_takes_nothing"

MUTATIONS = {
    "queue_written_by_any_mode": Mutation(
        "_may_use", "WHEN 'W' THEN v_rights.can_write", "WHEN 'W' THEN true", MODE,
    ),
    "queue_read_by_any_mode": Mutation(
        "_may_use", "WHEN 'R' THEN v_rights.can_read", "WHEN 'R' THEN true", MODE,
    ),
    "queue_ruled_by_any_mode": Mutation(
        "_may_use", "ELSE v_rights.can_write AND v_rights.can_read", "ELSE true", MODE,
    ),
    "queue_used_by_a_pattern": Mutation("_may_use", "AND right(ident, 1) <> '*'", "", NO_NAME),
    "pattern_as_queue": Mutation("_may_use", "AND right(queue, 1) <> '*'", "", NO_NAME),
    "queue_by_the_rule_of_another_role": Mutation(
        "_used_queue", "AND a.role = session_user", "",
        f"{RIGHTS}::test_the_rule_of_another_role_takes_nothing",
    ),
    "queue_lease_by_the_rule_of_another_role": Mutation(
        "_used_queue", "AND a.role = session_user", "",
        f"{RIGHTS}::test_a_stolen_lease_is_of_no_use_to_another_role[commit]",
    ),
    "queue_at_once_by_any_mode": Mutation(
        "_used_queue", "AND a.mode IN (_used_queue.mode, 'RW')", "", MODE
    ),
    "queue_at_once_by_a_pattern": Mutation(
        "_used_queue", "AND right(ident, 1) <> '*'", "", TAKEN_BY_NO_NAME
    ),
    "queue_at_once_by_a_name_of_any_length": Mutation(
        "_used_queue", "length(ident) BETWEEN 1 AND 100", "length(ident) >= 1", TAKEN_BY_NO_NAME
    ),
    "queue_at_once_by_no_name": Mutation(
        "_used_queue", "length(ident) BETWEEN 1 AND 100", "length(ident) <= 100", TAKEN_BY_NO_NAME
    ),
    "headers_of_any_size": Mutation(
        "_parsed_headers", "octet_length(headers) <= 65536", "true",
        f"{PUSH}::test_headers_that_are_no_object_are_refused",
    ),
    "push_without_w": Mutation(
        "_push", "messages._may_use(client_id, queue, 'W') IS NOT TRUE", "false",
        f"{PUSH}::test_who_may_not_push_is_told_why", times=2,
    ),
    "push_any_size": Mutation(
        "push", "octet_length(body) <= 8192", "true",
        f"{RIGHTS}::test_a_body_over_the_maximum_is_refused",
    ),
    "push_any_encoding": Mutation(
        "push", "AND coalesce(enc, 'json') IN ('json', 'b64')", "",
        f"{RIGHTS}::test_an_encoding_that_there_is_not_is_refused",
    ),
    "push_at_once_by_reading": Mutation(
        "push",
        "messages._used_queue(client_id, queue, 'W')",
        "messages._used_queue(client_id, queue, 'R')",
        MODE,
    ),
    "push_many_at_once_by_reading": Mutation(
        "push_many",
        "messages._used_queue(client_id, queue, 'W')",
        "messages._used_queue(client_id, queue, 'R')",
        MODE,
    ),
    "push_many_any_size": Mutation(
        "push_many",
        "WHERE NOT EXISTS (SELECT FROM (SELECT unnest(bodies) AS body) AS b"
        " WHERE octet_length(b.body) > 8192)",
        "", f"{RIGHTS}::test_a_body_over_the_maximum_is_refused",
    ),
    "push_many_any_encoding": Mutation(
        "push_many", "AND coalesce(enc, 'json') IN ('json', 'b64')", "",
        f"{RIGHTS}::test_an_encoding_that_there_is_not_is_refused",
    ),
    "pop_at_once_by_writing": Mutation(
        "pop",
        "messages._used_queue(client_id, queue, 'R')",
        "messages._used_queue(client_id, queue, 'W')",
        MODE,
    ),
    "reserve_at_once_by_writing": Mutation(
        "reserve",
        "messages._used_queue(client_id, queue, 'R')",
        "messages._used_queue(client_id, queue, 'W')",
        MODE,
    ),
    "take_at_once_by_writing": Mutation(
        "take",
        "messages._used_queue(client_id, queue, 'R')",
        "messages._used_queue(client_id, queue, 'W')",
        MODE,
    ),
    "queue_at_once_by_a_rule_of_another_node": Mutation(
        "_used_queue", "a.ident = _used_queue.ident AND", "", ELSE,
    ),
    "queue_at_once_by_a_rule_of_another_type": Mutation(
        "_used_queue", "AND a.type = 'Queue'", "", ELSE,
    ),
    "queue_at_once_by_a_rule_of_another_queue": Mutation(
        "_used_queue", "AND a.dest = _used_queue.queue", "", ELSE,
    ),
    "queue_at_once_by_any_mode_of_a_pattern_write": Mutation(
        "_used_queue", "WHEN 'W' THEN r.can_write", "WHEN 'W' THEN true", MODE,
    ),
    "queue_at_once_by_any_mode_of_a_pattern_read": Mutation(
        "_used_queue", "WHEN 'R' THEN r.can_read", "WHEN 'R' THEN true", MODE,
    ),
    "commit_at_once_by_writing": Mutation(
        "commit",
        "messages._used_queue(client_id, q.name, 'R')",
        "messages._used_queue(client_id, q.name, 'W')",
        MODE,
    ),
    "key_of_any_length": Mutation(
        "_element_fault", "length(k.key) > 200", "false", f"{PUSH}::test_a_long_key_is_refused"
    ),
    "take_without_r": Mutation(
        "_taken_queue", "messages._may_use(client_id, queue, 'R') IS NOT TRUE", "false", MODE
    ),
    "pop_any_number": Mutation("pop", "count BETWEEN 1 AND 4096", "count > 0", COUNT),
    "reserve_any_number": Mutation("reserve", "count BETWEEN 1 AND 4096", "count > 0", COUNT),
    "take_any_number": Mutation("take", "count BETWEEN 1 AND 4096", "count > 0", COUNT),
    "commit_by_a_guessed_lease": Mutation(
        "commit",
        "AND e.lease::text IS NOT DISTINCT FROM substr(leases[1], strpos(leases[1], '.') + 1)", "",
        f"{LEASES}::test_a_guessed_lease_commits_nothing",
    ),
    "commit_by_guessed_leases": Mutation(
        "commit", "AND (e.id || '.' || e.lease IN (SELECT unnest(leases))) IS TRUE", "", GUESSED,
    ),
    "lease_guessed": Mutation(
        "_leased", "AND (h.id || '.' || h.lease IN (SELECT unnest(leases))) IS TRUE", "", GUESSED,
    ),
    "lease_of_any_number": Mutation(
        "_leased_id", "BETWEEN 1 AND 18", ">= 1",
        f"{LEASES}::test_a_malformed_lease_is_refused",
    ),
    "leases_of_any_number": Mutation(
        "_leased_ids", "cardinality(leases) > 4096", "false",
        "sql/test_errors.py::test_a_refused_call_answers_with_number_text_and_warning",
    ),
    "commit_without_r": Mutation(
        "commit", "AND EXISTS (SELECT FROM messages._used_queue(client_id, q.name, 'R'))", "", MODE
    ),
    "lease_without_r": Mutation(
        "_held_fault", "messages._may_use(client_id, v_queue, 'R') IS NOT TRUE", "false", MODE
    ),
    "lease_without_r_in_one_queue": Mutation(
        "_held_fault", "AS u (id)))", "AS u (id) ORDER BY 1 LIMIT 1))", ONE_QUEUE,
    ),
    "leases_settled_though_refused": Mutation(
        "commit", "IF v_fault IS NOT NULL THEN", "IF false THEN", ONE_QUEUE,
    ),
    "leased_though_refused": Mutation(
        "_leased", "fault := messages._held_fault(client_id, leases, ids, v_queues);", "NULL;",
        ONE_QUEUE,
    ),
    "lease_of_any_form": Mutation(
        "_lease_fault",
        "v_lease !~ '^[0-9]{1,18}[.][0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$' OR", "",
        f"{ABUSE}::test_a_lease_with_a_tail_is_malformed",
    ),
    "renew_of_another_queue": Mutation(
        "renew", "AND e.queue_id = (SELECT v_queue.id)", "",
        f"{STAGED}::test_leases_of_another_queue_are_left_out",
    ),
    "remove_by_any_mode": Mutation(
        "remove",
        "messages._may_use(client_id, queue, 'RW')",
        "messages._may_use(client_id, queue, 'R')",
        MODE,
    ),
    "remove_of_another_queue": Mutation(
        "remove",
        "AND l.queue_id = (SELECT q.id FROM psqlmessages_queue AS q WHERE q.name = queue)",
        "", f"{RIGHTS}::test_an_element_is_removed_from_its_own_queue_only",
    ),
    "pause_by_any_mode": Mutation(
        "_set_paused",
        "messages._begin_queue_change(client_id, queue, 'RW')",
        "messages._begin_queue_change(client_id, queue, 'R')",
        MODE,
    ),
    "drain_by_any_mode": Mutation(
        "drain",
        "messages._may_use(client_id, queue, 'RW')",
        "messages._may_use(client_id, queue, 'W')",
        MODE,
    ),
    "sizes_without_a_rule": Mutation(
        "sizes", "messages._queue_fault(client_id, queue, '')", "NULL",
        "sql/test_errors.py::test_a_refused_call_answers_with_number_text_and_warning",
    ),
    "waiting_without_r": Mutation(
        "queue_listen", "v_fault IS NOT NULL", "false", MODE
    ),
    "waiting_outside_the_gate": Mutation(
        "_recheck_rules",
        "PERFORM messages._note_unfinished(NULL, NULL, messages._move_channels());",
        "",
        f"{ABUSE}::test_a_right_taken_away_while_somebody_is_just_listening_is_gone_after_it",
    ),
    "queues_shown_to_all": Mutation(
        "_listed_queues", "'*' = ANY (v_allowed)", "true",
        f"{PUSH}::test_the_view_shows_the_queues_that_a_rule_allows",
    ),
    "queues_shown_by_the_rules_of_others": Mutation(
        "_allowed", "pg_catalog.pg_has_role(session_user, r.oid, 'USAGE')", "true",
        f"{PUSH}::test_the_view_shows_the_queues_that_a_rule_allows",
    ),
    "peeked_without_r": Mutation(
        "peek", "IF messages._may_use(client_id, queue, 'R') IS NOT TRUE THEN", "IF false THEN",
        f"{RIGHTS}::test_the_rule_of_another_role_takes_nothing",
    ),
    "dead_letters_forged": Mutation(
        "_put_back",
        "AND l.queue_id = (SELECT d.id FROM psqlmessages_queue AS d"
        " WHERE d.name = v_queue.dead_letter_queue)",
        "",
        f"{ABUSE}::test_a_forged_dead_letter_is_not_put_back_beside_a_true_one",
    ),
    "staged_rows_of_others_counted": Mutation(
        "_rows_fault", "AND s.role = session_user", "",
        f"{STAGED}::test_rows_of_another_role_are_not_there",
    ),
    "staged_rows_of_others_published": Mutation(
        "_store_staged", "AND r.role = session_user", "", THEIRS
    ),
    "staged_rows_of_others_pushed": Mutation(
        "_staged_rows", "AND r.role = session_user", "", THEIRS,
    ),
    "staged_rows_of_others_removed": Mutation(
        "_unstage", "AND s.role = session_user", "",
        f"{STAGED}::test_rows_of_another_role_are_not_there",
    ),
}  # fmt: skip
