"""Checks of rules and sessions: who may be which node, and acts as it."""

from tests.reliability.mutation import Mutation

CRASH, HOSTILE, SETTINGS = (
    "sql/test_crash.py",
    "sql/test_hostile.py",
    "sql/test_hostile_settings.py",
)
NO_RULE = "sql/test_errors.py::test_a_role_without_a_rule_can_act_as_no_node"
STOLEN = f"{SETTINGS}::test_the_settings_of_another_session_make_nobody_its_node"

MUTATIONS = {
    "rights_of_any_role": Mutation(
        "_rights", "AND (a.role = _rights.role OR messages._is_member(_rights.role, a.role))", "",
        "sql/test_send_as.py::test_the_rules_of_the_role_that_logged_in_decide",
    ),
    "rights_of_any_ident": Mutation(
        "_rights", "a.ident = ANY ((SELECT messages._patterns(_rights.ident))::text[])", "true",
        "sql/test_errors.py::test_a_role_without_a_rule_can_act_as_no_node",
    ),
    "rights_of_any_type": Mutation(
        "_rights", "AND a.type = _rights.type", "",
        "sql/test_rules.py::test_who_lost_its_right_to_a_topic_is_out_of_it_and_told",
    ),
    "rights_to_any_dest": Mutation(
        "_rights", "AND a.dest = ANY ((SELECT messages._patterns(_rights.dest))::text[])", "",
        "sql/test_errors.py::test_a_refused_call_answers_with_number_text_and_warning",
    ),
    "rights_write_by_read": Mutation(
        "_rights", "a.mode IN ('W', 'RW')", "true",
        "streams/test_publish.py::test_publish_needs_the_mode_w",
    ),
    "rights_read_by_write": Mutation(
        "_rights", "a.mode IN ('R', 'RW')", "a.mode <> 'O'",
        "sql/test_bodies.py::test_a_body_seems_not_to_exist_to_all_but_listeners_and_observers",
    ),
    "rights_observe_by_any": Mutation(
        "_rights", "bool_or(a.mode = 'O')", "true",
        "sql/test_observers.py::test_only_what_a_rule_with_mode_o_covers_whole_can_be_observed",
    ),
    "patterns_of_giant_names": Mutation(
        "_patterns", "least(length(v_prefix), 100)", "length(v_prefix)",
        "reliability/test_meanings.py::test_the_patterns_of_a_giant_name_are_few",
    ),
    "member_of_everything": Mutation(
        "_is_member", "pg_catalog.pg_has_role(l.oid, r.oid, 'USAGE')", "true",
        "sql/test_roles.py::test_a_member_of_a_group_role_may_what_the_group_may_until_it_is_revoked",
    ),
    "has_rule_of_any_role": Mutation(
        "_has_rule", "AND (a.role = _has_rule.role OR messages._is_member(_has_rule.role, a.role))",
        "", NO_RULE,
    ),
    "has_rule_of_any_ident": Mutation(
        "_has_rule", "a.ident = ANY ((SELECT messages._patterns(_has_rule.ident))::text[])",
        "true", "sql/test_errors.py::test_a_refused_call_answers_with_number_text_and_warning",
    ),
    "strangers_evaluate": Mutation(
        "_has_any_rule", "RETURN EXISTS (", "RETURN true OR EXISTS (",
        "streams/test_strangers.py",
    ),
    "topic_names_of_any_length": Mutation(
        "_topic_fault", "length(topic) > 100", "false",
        "sql/test_errors.py::test_a_refused_call_answers_with_number_text_and_warning",
    ),
    "topics_without_a_rule": Mutation(
        "_topic_fault", "v_rights.timeout IS NULL THEN", "false THEN",
        "sql/test_errors.py::test_a_refused_call_answers_with_number_text_and_warning",
    ),
    "topics_read_without_r": Mutation(
        "_topic_fault", "OR mode = 'R' AND NOT v_rights.can_read", "",
        "sql/test_errors.py::test_a_refused_call_answers_with_number_text_and_warning",
    ),
    "topics_written_without_w": Mutation(
        "_topic_fault", "mode = 'W' AND NOT v_rights.can_write", "false",
        "sql/test_errors.py::test_a_refused_call_answers_with_number_text_and_warning",
    ),
    "topics_observed_without_o": Mutation(
        "_topic_fault", "OR mode = 'O' AND NOT v_rights.can_observe", "",
        "sql/test_observers.py::test_only_what_a_rule_with_mode_o_covers_whole_can_be_observed",
    ),
    "patterns_as_topics": Mutation(
        "_topic_fault", "OR right(topic, 1) = '*' AND mode <> 'O'", "",
        "streams/test_publish.py::test_a_pattern_is_no_name_even_where_a_rule_holds_it",
    ),
    "gate_open_to_older_snapshots": Mutation(
        "_share_gate", "PERFORM messages._check_snapshot();", "NULL;",
        "sql/test_isolation.py::test_a_snapshot_older_than_the_loss_of_a_rule_makes_no_member",
    ),
    "gate_waited_for_for_ever": Mutation(
        "_bound_waits", "WHEN '0' THEN '10s'", "WHEN '0' THEN '0'",
        "sql/test_rules.py::"
        "test_a_rule_that_cannot_be_saved_beside_another_says_why_and_what_to_do",
    ),
    "acting_without_channel": Mutation(
        "_acting", "AND s.channel = current_setting('messages.channel', true)", "",
        f"{CRASH}::test_the_same_role_with_a_reused_pid_needs_the_channel",
    ),
    "acting_with_any_pid": Mutation("_acting", "AND s.pid = pg_backend_pid()", "", STOLEN),
    "acting_as_any_role": Mutation(
        "_acting", "AND s.role = session_user", "",
        f"{CRASH}::test_another_role_with_the_pid_of_a_dead_session_cannot_act_as_its_node",
    ),
    "session_of_any_channel": Mutation(
        "_find_session", "s.channel = current_setting('messages.channel', true)", "true",
        f"{CRASH}::test_the_same_role_with_a_reused_pid_needs_the_channel",
    ),
    "session_of_any_pid": Mutation(
        "_find_session",
        "AND s.pid = pg_backend_pid() AND s.role = session_user;\n    -- Null",
        "AND s.role = session_user;\n    -- Null",
        f"{SETTINGS}::test_the_channel_of_another_session_is_never_listened_to",
    ),
    "session_of_any_role": Mutation(
        "_find_session",
        "AND s.pid = pg_backend_pid() AND s.role = session_user;\n    -- Null",
        "AND s.pid = pg_backend_pid();\n    -- Null",
        f"{CRASH}::test_a_reused_pid_neither_keeps_a_dead_session_alive_nor_deregisters_its_node",
    ),
    "session_of_the_former_login": Mutation(
        "_find_session",
        "WHERE s.pid = pg_backend_pid() AND s.role = session_user;\n        PERFORM",
        "WHERE s.pid = pg_backend_pid();\n        PERFORM",
        f"{HOSTILE}::test_a_connection_that_changed_its_login_finds_no_session_of_the_former_one",
    ),
    "alive_by_the_lock_of_another": Mutation(
        "_live_sessions", "AND l.pid = s.pid", "",
        f"{CRASH}::test_a_hostile_lock_neither_keeps_a_dead_session_alive_nor_blocks_its_return",
    ),
    "session_id_under_a_foreign_lock": Mutation(
        "_take_session_lock", "OR NOT pg_try_advisory_lock(1886612839, v_id)",
        "OR pg_try_advisory_lock(1886612839, v_id) IS NULL",
        f"{CRASH}::test_init_draws_another_id_where_a_hostile_lock_is_on_the_one_it_drew",
    ),
    "channel_from_a_weak_source": Mutation(
        "_open_session", "gen_random_uuid()::text", "md5(random()::text)",
        f"{HOSTILE}::test_a_channel_is_drawn_from_the_strong_source",
    ),
    "pattern_as_node": Mutation(
        "init", "right(ident, 1) <> '*' AND", "",
        f"{HOSTILE}::test_a_pattern_is_no_name_of_a_node_even_where_a_rule_covers_it",
    ),
    "init_without_a_rule": Mutation(
        "init", "IF NOT v_allowed THEN", "IF false THEN",
        "sql/test_errors.py::test_a_refused_call_answers_with_number_text_and_warning",
    ),
    "init_not_asked_again": Mutation(
        "init",
        "PERFORM messages._begin_change();\n"
        "        v_allowed := messages._has_rule(session_user, ident);",
        "PERFORM messages._begin_change();",
        "sql/test_concurrency.py::test_a_state_change_waits_for_an_uncommitted_deletion_of_its_rule",
    ),
    "living_nodes_buried": Mutation(
        "_register", "ELSIF v_other.session_id NOT IN (SELECT messages._live_sessions()) THEN",
        "ELSIF true THEN",
        "sql/test_errors.py::test_a_call_refused_for_the_state_of_things_answers_so_too",
    ),
    "nodes_of_others_buried": Mutation(
        "_bury", "WHERE n.session_id = session ", "WHERE true ",
        f"{CRASH}::test_a_crash_is_told_once_to_each_authorised_node_and_to_no_stranger",
    ),
    "crash_told_to_those_of_another": Mutation(
        "_tell_dead", "OR v_hearing IS DISTINCT FROM v_last", "",
        f"{CRASH}::test_each_node_and_topic_of_a_killed_session_is_told_of_to_those_of_its_own_rules",
    ),
    "told_by_rules_that_are_gone": Mutation(
        "_tell_dead",
        "IF v_version IS DISTINCT FROM (SELECT r.version FROM messages._rules AS r) THEN",
        "IF v_version IS NULL THEN",
        "sql/test_burying.py::test_who_loses_its_right_during_a_burial_hears_no_more_of_it",
    ),
    "whole_session_buried_for_a_name": Mutation(
        "_register", "PERFORM messages._end_node(v_other.id, 'crash', false);",
        "PERFORM messages._bury(v_other.session_id);",
        "sql/test_held.py::"
        "test_a_name_returns_while_a_topic_of_another_node_of_its_dead_session_is_held",
    ),
    "session_that_gave_its_lock_back_kept": Mutation(
        "_register", "IF v_session NOT IN (SELECT messages._live_sessions()) THEN", "IF false THEN",
        f"{CRASH}::test_discarding_or_unlocking_all_is_a_crash_and_init_makes_a_node_that_stays",
    ),
    "deinit_of_others": Mutation(
        "_deregister", "AND c.session_id = v_session;\n    IF v_node", ";\n    IF v_node",
        f"{CRASH}::test_a_gateway_tells_of_a_crash_of_one_node_of_its_own",
    ),
    "use_of_others": Mutation(
        "use", "AND c.session_id = v_session", "",
        "sql/test_errors.py::test_a_refused_call_answers_with_number_text_and_warning",
    ),
    "audience_of_other_sessions": Mutation(
        "audience", "c.session_id = v_node.session_id AND", "",
        "sql/test_observers.py::test_audience_names_the_nodes_of_this_session_that_may_hear",
    ),
    "memberships_outlive_their_rule": Mutation(
        "_lost_memberships", "WHERE m.client_id = ANY (nodes)", "WHERE false",
        "sql/test_rules.py::test_who_lost_its_right_to_a_topic_is_out_of_it_and_told",
    ),
    "observations_outlive_their_rule": Mutation(
        "_lost_observations", "WHERE o.client_id = ANY (nodes)", "WHERE false",
        "sql/test_rules.py::test_who_lost_its_right_to_a_topic_is_out_of_it_and_told",
    ),
    "observations_of_all_ended": Mutation(
        "_end_observation", "o.client_id = node AND", "",
        "sql/test_observers.py::test_an_observation_lasts_until_its_own_end",
    ),
    "topics_shown_to_all": Mutation(
        "topic_status_as", "messages._topic_fault(session_user, ident, topic, '', false),", "",
        f"{NO_RULE}",
    ),
    "ghosts_in_status": Mutation(
        "_topic_people", "AND c.session_id IN (SELECT messages._live_sessions())", "",
        f"{CRASH}::test_a_dead_node_is_no_ghost_in_status_and_view_even_before_evaluation",
    ),
}  # fmt: skip
