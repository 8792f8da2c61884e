-- Retention of stream messages: the tables are filled in turn, and truncated when their messages are not needed. If a
-- table has few needed rows left, they are moved to the table that is being filled.

CREATE OR REPLACE FUNCTION messages._expire_subscriptions()
RETURNS int
LANGUAGE plpgsql
AS $$
DECLARE
    v_names text[];
    v_topics bigint[];
    v_expired bigint[];
BEGIN
    SELECT array_agg(DISTINCT s.topic::text) INTO v_names FROM psqlmessages_subscription AS s
    WHERE s.is_alive AND s.pinged_at + make_interval(secs => s.timeout) <= clock_timestamp()
      AND NOT messages._is_alive(s);
    IF v_names IS NULL THEN
        RETURN 0;
    END IF;
    WITH locked AS (
        SELECT t.id, t.name FROM psqlmessages_topic AS t
        WHERE t.name = ANY (v_names) FOR NO KEY UPDATE SKIP LOCKED
    )
    SELECT array_agg(l.id), array_agg(l.name::text) INTO v_topics, v_names FROM locked AS l;
    WITH expired AS (
        SELECT s.id FROM psqlmessages_subscription AS s
        WHERE s.topic = ANY (v_names) AND s.is_alive
          AND s.pinged_at + make_interval(secs => s.timeout) <= clock_timestamp()
          AND NOT messages._is_alive(s)
        FOR NO KEY UPDATE SKIP LOCKED
    )
    SELECT array_agg(e.id) INTO v_expired FROM expired AS e;
    UPDATE psqlmessages_subscription AS s SET is_alive = false WHERE s.id = ANY (v_expired);
    PERFORM messages._rebuild_topics(v_topics);
    RETURN coalesce(cardinality(v_expired), 0);
END
$$;

COMMENT ON FUNCTION messages._expire_subscriptions IS
    'Mark subscriptions that were not pinged in time as dead, so that their messages are not needed. Returns how many. Never waits.';


CREATE OR REPLACE FUNCTION messages._forget_subscriptions()
RETURNS void
LANGUAGE sql
AS $$
    DELETE FROM psqlmessages_subscription AS s
    WHERE s.id IN (
        SELECT d.id FROM psqlmessages_subscription AS d
        WHERE NOT d.is_alive
          AND d.pinged_at + make_interval(days => 30, secs => d.timeout) <= clock_timestamp()
        FOR UPDATE SKIP LOCKED
    );
    DELETE FROM messages._stream_gone AS g
    WHERE g.topic IN (
        SELECT o.topic FROM messages._stream_gone AS o
        WHERE NOT EXISTS (SELECT FROM psqlmessages_subscription AS s WHERE s.topic = o.topic)
        FOR UPDATE SKIP LOCKED
    )
$$;

COMMENT ON FUNCTION messages._forget_subscriptions IS
    'Delete subscriptions 30 days after their end: until then a late client learns that it missed messages. Never waits.';


CREATE OR REPLACE FUNCTION messages._unused_topics()
RETURNS SETOF bigint
LANGUAGE sql
STABLE
AS $$
    SELECT t.id FROM psqlmessages_topic AS t
    WHERE t.is_made_by_publish AND t.subscriptions = 0 AND t.retention = 0
      AND NOT EXISTS (SELECT FROM psqlmessages_membership AS m WHERE m.topic_id = t.id)
      AND NOT EXISTS (SELECT FROM psqlmessages_auth AS a WHERE a.type = 'Topic' AND a.dest = t.name)
      AND NOT EXISTS (SELECT FROM psqlmessages_streammessage AS m WHERE m.topic_id = t.id)
$$;

COMMENT ON FUNCTION messages._unused_topics IS
    'Topics made by publish that have no message, subscription, member or rule.';


CREATE OR REPLACE FUNCTION messages._remove_topics()
RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    v_topics bigint[] := ARRAY(SELECT messages._unused_topics());
BEGIN
    IF v_topics = '{}' THEN
        RETURN;
    END IF;
    BEGIN
        LOCK TABLE messages._gate, psqlmessages_membership IN ROW SHARE MODE NOWAIT;
    EXCEPTION WHEN lock_not_available THEN
        -- A change of rules may name one of the topics. Or the memberships are locked, and DELETE would wait when it
        -- checks the foreign key.
        RETURN;
    END;
    WITH locked AS (
        SELECT t.id FROM psqlmessages_topic AS t WHERE t.id = ANY (v_topics) FOR UPDATE SKIP LOCKED
    )
    SELECT array_agg(l.id) INTO v_topics FROM locked AS l;
    -- Check again: now that the topics are locked, no transaction publishes to them or joins them.
    v_topics := ARRAY(SELECT u.id FROM messages._unused_topics() AS u (id) WHERE u.id = ANY (v_topics));
    -- A subscription that returns to a topic of this name must learn that it missed messages.
    WITH missed AS (
        SELECT s.id FROM psqlmessages_subscription AS s
        JOIN psqlmessages_topic AS t ON t.name = s.topic
        JOIN messages._stream_last AS l ON l.topic_id = t.id
        WHERE t.id = ANY (v_topics) AND s.position < l.id
        FOR NO KEY UPDATE OF s SKIP LOCKED
    )
    UPDATE psqlmessages_subscription AS s SET is_recovered = false WHERE s.id IN (SELECT m.id FROM missed AS m);
    INSERT INTO messages._stream_gone AS g (topic, id)
    SELECT t.name, l.id FROM psqlmessages_topic AS t JOIN messages._stream_last AS l ON l.topic_id = t.id
    WHERE t.id = ANY (v_topics) AND EXISTS (SELECT FROM psqlmessages_subscription AS s WHERE s.topic = t.name)
    ON CONFLICT (topic) DO UPDATE SET id = greatest(g.id, excluded.id);
    DELETE FROM messages._stream_last AS l WHERE l.topic_id = ANY (v_topics);
    DELETE FROM psqlmessages_topic AS t WHERE t.id = ANY (v_topics);
END
$$;

COMMENT ON FUNCTION messages._remove_topics IS
    'Remove topics made by publish that have no message and subscription left. Never waits.';


CREATE OR REPLACE FUNCTION messages._stream_table(
    slot int
)
RETURNS regclass
LANGUAGE sql
STABLE
AS $$
    SELECT ('psqlmessages_streammessage_' || slot)::regclass
$$;

COMMENT ON FUNCTION messages._stream_table IS
    'The table of a slot.';


CREATE OR REPLACE FUNCTION messages._next_stream_slot(
    least_age interval,
    least_share float8
)
RETURNS int
LANGUAGE plpgsql
AS $$
DECLARE
    v_stream messages._stream;
    v_next int;
    v_others bigint;
BEGIN
    SELECT * INTO v_stream FROM messages._stream;
    SELECT min(s.slot) FILTER (WHERE pg_relation_size(messages._stream_table(s.slot)) = 0),
           sum(pg_relation_size(messages._stream_table(s.slot)))
    INTO v_next, v_others
    FROM generate_series(0, 3) AS s (slot) WHERE s.slot <> v_stream.slot;
    IF v_next IS NOT NULL
        AND pg_relation_size(messages._stream_table(v_stream.slot)) > v_others * least_share
        AND (v_stream.switched_at + least_age <= clock_timestamp() OR v_stream.switched_at > clock_timestamp())
    THEN
        RETURN v_next;
    END IF;
    RETURN NULL;
END
$$;

COMMENT ON FUNCTION messages._next_stream_slot IS
    'An empty table to fill from now on, if the present one has been filled for least_age and is larger than least_share of the others; else null.';


CREATE OR REPLACE FUNCTION messages._switch_stream(
    least_age interval,
    least_share float8
)
RETURNS void
LANGUAGE sql
AS $$
    UPDATE messages._stream AS s SET slot = n.slot, switched_at = clock_timestamp()
    FROM messages._next_stream_slot(least_age, least_share) AS n (slot) WHERE n.slot IS NOT NULL
$$;

COMMENT ON FUNCTION messages._switch_stream IS
    'Fill the next table from now on, if _next_stream_slot returns one.';

-- The tables of streams: find the needed rows, move them, and truncate the tables.

CREATE OR REPLACE FUNCTION messages._stream_needs()
RETURNS TABLE (
    topic_id bigint,
    after_id bigint,
    kept_since timestamp with time zone
)
LANGUAGE sql
STABLE
AS $$
    WITH gaps AS MATERIALIZED (
        -- Each gap within a retention extends it, so that an earlier gap may also lie within it.
        SELECT g.ended_at - g.began_at AS length,
               g.ended_at + coalesce(sum(g.ended_at - g.began_at) OVER (
                   ORDER BY g.ended_at DESC ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
               ), '0') AS counts_from
        FROM messages._clock_gap AS g
    )
    SELECT t.id, n.after_id,
           CASE WHEN t.retention > 0 THEN clock_timestamp() - make_interval(secs => t.retention) - coalesce(
               (SELECT sum(g.length) FROM gaps AS g
                WHERE g.counts_from > clock_timestamp() - make_interval(secs => t.retention)), '0'
           ) END
    FROM psqlmessages_topic AS t
    LEFT JOIN (
        SELECT s.topic, min(s.position) AS after_id FROM psqlmessages_subscription AS s
        WHERE s.is_alive GROUP BY s.topic
    ) AS n ON n.topic = t.name
    WHERE t.subscriptions > 0 OR t.retention > 0
$$;

COMMENT ON FUNCTION messages._stream_needs IS
    'For each topic with needed messages: they have ids above after_id or were published after kept_since; each may be null.';


CREATE OR REPLACE FUNCTION messages._needed(
    slot int,
    max_rows int
)
RETURNS SETOF psqlmessages_streammessage
LANGUAGE plpgsql
AS $$
BEGIN
    RETURN QUERY EXECUTE replace(
        'SELECT m.* FROM messages._stream_needs() AS n CROSS JOIN LATERAL ('
        '    (SELECT r.* FROM <table> AS r'
        '     WHERE r.topic_id = n.topic_id AND r.id > n.after_id ORDER BY r.id LIMIT $1)'
        '    UNION ALL'
        '    (SELECT k.* FROM ('
        -- The newest first: usually the first one decides.
        '        SELECT r.* FROM <table> AS r WHERE n.kept_since IS NOT NULL AND r.topic_id = n.topic_id'
        '            AND r.id <= coalesce(n.after_id, 9223372036854775807) ORDER BY r.id DESC LIMIT $1'
        '    ) AS k WHERE k.published_at > n.kept_since)'
        ') AS m LIMIT $1',
        '<table>', messages._stream_table(slot)::text
    ) USING max_rows;
END
$$;

COMMENT ON FUNCTION messages._needed IS
    'At most max_rows rows of a table that a subscription or a retention needs.';


CREATE OR REPLACE FUNCTION messages._is_needed(
    slot int
)
RETURNS boolean
LANGUAGE sql
AS $$
    SELECT EXISTS (SELECT FROM messages._needed(slot, 1))
$$;

COMMENT ON FUNCTION messages._is_needed IS
    'Whether any row of a table is needed.';


CREATE OR REPLACE FUNCTION messages._needed_bytes(
    slot int
)
RETURNS float8
LANGUAGE plpgsql
AS $$
DECLARE
    v_size bigint := pg_relation_size(messages._stream_table(slot));
    v_share float8;
BEGIN
    -- A sample of about a hundred pages, because a count reads the whole table.
    EXECUTE format(
        'SELECT avg(coalesce(m.id > n.after_id OR m.published_at > n.kept_since, false)::int)'
        ' FROM %s AS m TABLESAMPLE SYSTEM ($1)'
        ' LEFT JOIN messages._stream_needs() AS n ON n.topic_id = m.topic_id',
        messages._stream_table(slot)
    ) INTO v_share USING least(100, 100 * 100 * 8192.0 / greatest(v_size, 1));
    RETURN v_size * coalesce(v_share, 0);
END
$$;

COMMENT ON FUNCTION messages._needed_bytes IS
    'Estimate of the needed bytes of a table, without TOASTed payloads.';


CREATE OR REPLACE FUNCTION messages._is_worth_emptying(
    slot int
)
RETURNS boolean
LANGUAGE plpgsql
AS $$
DECLARE
    v_needed float8 := messages._needed_bytes(slot);
    v_current int := (SELECT s.slot FROM messages._stream AS s);
    v_filled bigint := pg_relation_size(messages._stream_table(v_current));
BEGIN
    IF v_needed <= pg_relation_size(messages._stream_table(slot)) * 0.25 THEN
        RETURN true;
    END IF;
    -- No table is empty, and the table being filled is at least twice as large as the rows to move, and mostly unneeded.
    RETURN v_needed * 2 <= v_filled
        AND NOT EXISTS (
            SELECT FROM generate_series(0, 3) AS s (slot) WHERE pg_relation_size(messages._stream_table(s.slot)) = 0
        )
        AND messages._needed_bytes(v_current) * 2 <= v_filled;
END
$$;

COMMENT ON FUNCTION messages._is_worth_emptying IS
    'Whether a table has so few needed rows that moving them costs less than keeping the others.';


CREATE OR REPLACE FUNCTION messages._move_needed(
    slot int
)
RETURNS bigint
LANGUAGE plpgsql
AS $$
DECLARE
    v_moved bigint;
BEGIN
    EXECUTE format(
        'WITH needed AS MATERIALIZED ('
        '    SELECT n.topic_id, n.id, sum(pg_column_size(n.payload))'
        '        OVER (ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS bytes_before'
        '    FROM messages._needed($1, 10000) AS n'
        '), gone AS ('
        '    DELETE FROM %s AS m USING needed AS n'
        '    WHERE m.topic_id = n.topic_id AND m.id = n.id AND (n.bytes_before < 10000000) IS NOT FALSE'
        '    RETURNING m.*'
        '), kept AS ('
        '    INSERT INTO psqlmessages_streammessage (topic_id, id, slot, sender, published_at, enc, payload)'
        '    SELECT g.topic_id, g.id, s.slot, g.sender, g.published_at, g.enc, g.payload'
        '    FROM gone AS g CROSS JOIN messages._stream AS s'
        ') SELECT count(*) FROM gone',
        messages._stream_table(slot)
    ) INTO v_moved USING slot;
    RETURN v_moved;
END
$$;

COMMENT ON FUNCTION messages._move_needed IS
    'Move some needed rows of a table, a few MB at most, to the table being filled. Returns how many rows.';


CREATE OR REPLACE FUNCTION messages._empty_stream_table(
    slot int
)
RETURNS boolean
LANGUAGE plpgsql
AS $$
DECLARE
    v_table regclass := messages._stream_table(slot);
BEGIN
    -- Block writers and not readers, because the next statements take longer with more topics.
    EXECUTE format('LOCK TABLE %s IN SHARE MODE NOWAIT', v_table);
    IF messages._is_needed(slot) THEN
        RETURN false;
    END IF;
    EXECUTE format(
        'INSERT INTO messages._stream_last AS l (topic_id, id, published_at)'
        ' SELECT t.id, m.id, m.published_at FROM psqlmessages_topic AS t'
        ' CROSS JOIN LATERAL ('
        '     SELECT r.id, r.published_at FROM %s AS r'
        '     WHERE r.topic_id = t.id ORDER BY r.id DESC LIMIT 1'
        ' ) AS m'
        ' ON CONFLICT (topic_id) DO UPDATE SET id = excluded.id, published_at = excluded.published_at'
        ' WHERE l.id < excluded.id', v_table
    );
    EXECUTE format('LOCK TABLE %s IN ACCESS EXCLUSIVE MODE NOWAIT', v_table);
    -- Check again: now that the table is locked, no subscription starts or moves.
    IF messages._is_needed(slot) THEN
        RAISE lock_not_available;
    END IF;
    EXECUTE format('TRUNCATE %s', v_table);
    RETURN true;
EXCEPTION WHEN lock_not_available OR object_in_use THEN
    -- An open transaction has published to it or reads it. The next housekeeping tries again.
    RETURN false;
END
$$;

COMMENT ON FUNCTION messages._empty_stream_table IS
    'Truncate a table without needed rows; false if a transaction uses it. Readers wait for the commit.';


CREATE OR REPLACE FUNCTION messages._empty_streams()
RETURNS int
LANGUAGE plpgsql
AS $$
DECLARE
    v_emptied int := 0;
BEGIN
    FOR v_slot IN 0 .. 3 LOOP
        CONTINUE WHEN pg_relation_size(messages._stream_table(v_slot)) = 0
            OR v_slot = (SELECT s.slot FROM messages._stream AS s);
        IF messages._is_needed(v_slot) AND messages._is_worth_emptying(v_slot) THEN
            PERFORM messages._move_needed(v_slot);
        END IF;
        IF NOT messages._is_needed(v_slot) AND messages._empty_stream_table(v_slot) THEN
            v_emptied := v_emptied + 1;
        END IF;
    END LOOP;
    RETURN v_emptied;
END
$$;

COMMENT ON FUNCTION messages._empty_streams IS
    'Truncate the tables that can be emptied, except the one being filled. Returns how many.';


CREATE OR REPLACE FUNCTION messages._maintain_streams()
RETURNS int
LANGUAGE plpgsql
AS $$
DECLARE
    v_stream messages._stream;
    v_emptied int;
BEGIN
    -- A time in the future was stored before the clock was put back. Infinity stops housekeeping, for tests.
    SELECT * INTO v_stream FROM messages._stream AS s
    WHERE s.tended_at NOT BETWEEN clock_timestamp() - interval '1 second' AND clock_timestamp()
      AND s.tended_at < 'infinity'
    FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN 0;
    END IF;
    PERFORM messages._check_clock();
    PERFORM messages._expire_subscriptions();
    PERFORM messages._switch_stream('10 seconds', 0.5);
    v_emptied := messages._empty_streams();
    IF v_emptied > 0
        OR v_stream.cleared_at NOT BETWEEN clock_timestamp() - interval '10 seconds' AND clock_timestamp()
    THEN
        PERFORM messages._remove_topics();
        PERFORM messages._forget_subscriptions();
        PERFORM messages._forget_staged();
        UPDATE messages._stream SET cleared_at = clock_timestamp();
    END IF;
    RETURN v_emptied;
END
$$;

COMMENT ON FUNCTION messages._maintain_streams IS
    'Once a second, by the first session that gets the row lock: expire subscriptions, switch tables, move some needed rows, truncate. Returns the number of truncated tables. Never waits.';


CREATE OR REPLACE FUNCTION messages._streams_have_leftovers()
RETURNS boolean
LANGUAGE plpgsql
AS $$
BEGIN
    RETURN EXISTS (SELECT messages._unused_topics())
        OR EXISTS (
            SELECT FROM psqlmessages_subscription AS s
            WHERE NOT s.is_alive AND s.pinged_at + make_interval(days => 30, secs => s.timeout) <= clock_timestamp()
        )
        OR EXISTS (
            SELECT FROM messages._stream_gone AS g
            WHERE NOT EXISTS (SELECT FROM psqlmessages_subscription AS s WHERE s.topic = g.topic)
        )
        OR messages._staged_have_expired();
END
$$;

COMMENT ON FUNCTION messages._streams_have_leftovers IS
    'Whether _remove_topics, _forget_subscriptions or _forget_staged has anything to remove.';


CREATE OR REPLACE FUNCTION messages._streams_have_work()
RETURNS boolean
LANGUAGE plpgsql
AS $$
DECLARE
    v_stream messages._stream;
    v_last timestamp with time zone;
    v_now timestamp with time zone;
BEGIN
    SELECT * INTO v_stream FROM messages._stream;
    v_last := messages._last_check('messages._streams_checked', v_stream.tended_at);
    -- After that, or a check that another session stores meanwhile would look like a clock that was put back.
    v_now := clock_timestamp();
    IF v_last = 'infinity' OR v_last BETWEEN v_now - interval '1 second' AND v_now THEN
        RETURN false;
    END IF;
    IF v_last NOT BETWEEN v_now - interval '10 seconds' AND v_now
        OR v_stream.switched_at > v_now
        OR v_stream.cleared_at > v_now
        OR EXISTS (
            SELECT FROM psqlmessages_subscription AS s
            WHERE s.pinged_at > v_now + interval '10 seconds'
               OR s.is_alive AND s.pinged_at + make_interval(secs => s.timeout) <= v_now AND NOT messages._is_alive(s)
        )
        OR messages._next_stream_slot('10 seconds', 0.5) IS NOT NULL
        OR EXISTS (
            SELECT FROM generate_series(0, 3) AS t (slot)
            WHERE t.slot <> v_stream.slot AND pg_relation_size(messages._stream_table(t.slot)) > 0
              AND (NOT messages._is_needed(t.slot) OR messages._is_worth_emptying(t.slot))
        )
        -- In the first check of each ten seconds.
        OR floor(date_part('epoch', v_last) / 10) <> floor(date_part('epoch', v_now) / 10)
            AND messages._streams_have_leftovers()
    THEN
        RETURN true;
    END IF;
    PERFORM messages._record_check('messages._streams_checked', v_stream.tended_at, v_now);
    RETURN false;
END
$$;

COMMENT ON FUNCTION messages._streams_have_work IS
    'Whether _maintain_streams has anything to write. False within a second after a check that found nothing.';


CREATE OR REPLACE FUNCTION messages._prune_streams()
RETURNS int
LANGUAGE plpgsql
AS $$
DECLARE
    v_emptied int;
BEGIN
    IF current_setting('transaction_isolation') IN ('repeatable read', 'serializable') THEN
        RAISE EXCEPTION 'streams are pruned in a transaction in READ COMMITTED'
            USING ERRCODE = 'feature_not_supported',
                HINT = 'To an older snapshot, what was published since would be missing, and its table empty.';
    END IF;
    PERFORM FROM messages._stream FOR UPDATE;
    PERFORM messages._check_clock();
    PERFORM messages._expire_subscriptions();
    v_emptied := messages._empty_streams();
    PERFORM messages._switch_stream('0', 0);
    v_emptied := v_emptied + messages._empty_streams();
    PERFORM messages._remove_topics();
    PERFORM messages._forget_subscriptions();
    PERFORM messages._forget_staged();
    RETURN v_emptied;
END
$$;

COMMENT ON FUNCTION messages._prune_streams IS
    'Remove all messages that are not needed, even if few. Returns how many tables were truncated. Raises 0A000 above READ COMMITTED.';
