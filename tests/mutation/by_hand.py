"""Mutants that no rule makes: a weaker secret, the rights of another, a lock less."""

# What a MAC is computed of, and a part of it that is left out.
WITHOUT = "convert_to(regexp_replace(content, {}), 'UTF8')"
PARTS = ("'^[0-9]+', ''", "' node [^ ]+', ''", r"'[0-9]+( [^ ]+)$', '\1'", "'[^ ]+$', ''")
BY_HAND = (
    ("_rights", "bool_or(a.mode = 'O')", "true"),
    ("_patterns", "least(length(v_prefix), 100)", "length(v_prefix)"),
    ("_has_any_rule", "RETURN EXISTS (", "RETURN true OR EXISTS ("),
    ("_open_session", "gen_random_uuid()::text", "md5(random()::text)"),
    ("init", "right(ident, 1) <> '*' AND", ""),
    ("_remove_listener", "array_remove(t.channels, _remove_listener.channel)", "t.channels"),
    ("get_data", "(1?[0-9]|20)", "([0-9]+)"),
    ("get_data", "OR NOT EXISTS (", "OR false AND NOT EXISTS ("),
    ("_reply_token_mac", "asker || ' ' || answerer", "left(asker::text, 0) || answerer"),
    ("_reply_token_mac", "' ' || answerer || ' '", "left(answerer, 0) || ' '"),
    ("_reply_token_mac", "|| timeout ||", "|| left(timeout, 0) ||"),
    ("_reply_token_mac", "timeout || ' ' || token", "timeout || ' ' || left(token, 0)"),
    *(("_hmac", "convert_to(content, 'UTF8')", WITHOUT.format(part)) for part in PARTS),
    ("_hmac", "'hex'), 32)", "'hex'), 2) || repeat('0', 30)"),
    ("_hmac", "outer_pad || ", ""),
    ("_hmac", "inner_pad || ", ""),
    (
        "_make_secret",
        "v_key bytea := sha256(",
        "v_key bytea := sha256('x'); v_unused bytea := sha256(",
    ),
    ("_make_secret", "0 .. 31 LOOP", "0 .. 7 LOOP"),
    (
        "rpc",
        "messages._rights(session_user, p.own_ident, 'Rpc', node) AS r",
        "(SELECT true AS can_write, 5 AS timeout) AS r",
    ),
    ("rpc", "messages._rights(session_user, ", "messages._rights('user2', "),
    ("rpc", "'Rpc', node)", "'Topic', node)"),
    ("_publishers", "WHERE messages._publishing_proof", "WHERE true OR messages._publishing_proof"),
    ("_is_ending", "strpos(context, E'\\n') = 0", "true"),
    ("_is_ending", "(v_query IS NULL", "(true"),
    ("read_stream", "v_last := messages._watermark(v_topic);", "v_last := 9223372036854775807;"),
    ("_lock_elements", "            FOR UPDATE\n", "            FOR UPDATE SKIP LOCKED\n"),
)
