-- Removal of what no subscription needs: tables are filled in turn, and emptied by truncating them.
-- The few rows still needed in a table that is else over are moved to the one being filled.

CREATE OR REPLACE FUNCTION messages._expire_subscriptions()
RETURNS int
LANGUAGE plpgsql
AS $$
DECLARE
    v_expired bigint[];
    v_topics bigint[];
    v_locked int;
BEGIN
    WITH expired AS (
        SELECT s.id FROM psqlmessages_subscription AS s
        WHERE s.is_alive AND NOT messages._is_alive(s.pinged_at, s.timeout)
        FOR UPDATE SKIP LOCKED
    )
    SELECT array_agg(e.id) INTO v_expired FROM expired AS e;
    -- Where a client returns later, that it missed something can be told for so long.
    DELETE FROM psqlmessages_subscription AS s
    WHERE NOT s.is_alive AND NOT messages._is_alive(s.pinged_at + interval '30 days', s.timeout);
    IF v_expired IS NULL THEN
        RETURN 0;
    END IF;
    v_topics := ARRAY(
        SELECT DISTINCT t.id FROM psqlmessages_subscription AS s
        JOIN psqlmessages_topic AS t ON t.name = s.topic
        WHERE s.id = ANY (v_expired)
    );
    WITH locked AS (
        SELECT t.id FROM psqlmessages_topic AS t
        WHERE t.id = ANY (v_topics) FOR NO KEY UPDATE SKIP LOCKED
    )
    SELECT count(*) INTO v_locked FROM locked;
    IF v_locked < cardinality(v_topics) THEN
        RETURN 0;
    END IF;
    UPDATE psqlmessages_subscription AS s SET is_alive = false WHERE s.id = ANY (v_expired);
    PERFORM messages._rebuild_topics(v_topics);
    RETURN cardinality(v_expired);
END
$$;

COMMENT ON FUNCTION messages._expire_subscriptions IS
    'Keep nothing more for subscriptions that nobody pinged in time; answers how many. Never waits.';


CREATE OR REPLACE FUNCTION messages._remove_topics()
RETURNS void
LANGUAGE sql
AS $$
    WITH unused AS (
        SELECT t.id FROM psqlmessages_topic AS t
        WHERE t.is_made_by_publish AND t.subscriptions = 0 AND t.retention = 0
          AND NOT EXISTS (SELECT FROM psqlmessages_membership AS m WHERE m.topic_id = t.id)
          AND NOT EXISTS (SELECT FROM psqlmessages_auth AS a WHERE a.type = 'Topic' AND a.dest = t.name)
          AND NOT EXISTS (SELECT FROM psqlmessages_streammessage AS m WHERE m.topic_id = t.id)
        FOR UPDATE SKIP LOCKED
    ), removed AS (
        DELETE FROM psqlmessages_topic AS t WHERE t.id IN (SELECT u.id FROM unused AS u)
        RETURNING t.id
    )
    DELETE FROM messages._stream_last AS l WHERE l.topic_id IN (SELECT r.id FROM removed AS r)
$$;

COMMENT ON FUNCTION messages._remove_topics IS
    'A topic that publish made goes with its last subscription and message.';


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


CREATE OR REPLACE FUNCTION messages._switch_stream(
    least_age interval,
    least_share float8
)
RETURNS void
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
        AND v_stream.switched_at + least_age <= clock_timestamp()
    THEN
        UPDATE messages._stream SET slot = v_next, switched_at = clock_timestamp();
    END IF;
END
$$;

COMMENT ON FUNCTION messages._switch_stream IS
    'Fill the next table, if one is empty, this one has been filled for so long, and it holds such a share of what the others hold.';


CREATE OR REPLACE FUNCTION messages._needed(
    slot int,
    max_rows int
)
RETURNS SETOF psqlmessages_streammessage
LANGUAGE plpgsql
AS $$
BEGIN
    -- The newest of each topic are looked at first, and no more than asked for.
    RETURN QUERY EXECUTE
        'SELECT m.* FROM ('
        '    SELECT t.id, t.retention,'
        '           (SELECT min(s.position) FROM psqlmessages_subscription AS s'
        '            WHERE s.topic = t.name AND s.is_alive) AS position'
        '    FROM psqlmessages_topic AS t WHERE t.subscriptions > 0 OR t.retention > 0'
        ') AS n CROSS JOIN LATERAL ('
        '    SELECT * FROM ' || messages._stream_table(slot) || ' AS r'
        '    WHERE r.slot = $1 AND r.topic_id = n.id ORDER BY r.id DESC LIMIT $2'
        ') AS m'
        ' WHERE m.id > n.position'
        '    OR m.published_at > clock_timestamp() - make_interval(secs => n.retention)'
        ' LIMIT $2'
    USING slot::smallint, max_rows;
END
$$;

COMMENT ON FUNCTION messages._needed IS
    'Rows of a table that a subscription or a retention still needs, so many at most.';


CREATE OR REPLACE FUNCTION messages._is_worth_emptying(
    slot int
)
RETURNS boolean
LANGUAGE plpgsql
AS $$
DECLARE
    v_needed bigint := (SELECT count(*) FROM messages._needed(slot, 10001));
    v_rows bigint;
BEGIN
    IF v_needed > 0 AND v_needed <= 10000 THEN
        EXECUTE 'SELECT count(*) FROM (SELECT FROM ' || messages._stream_table(slot) || ' LIMIT $1) AS r'
        INTO v_rows USING 4 * v_needed;
    END IF;
    RETURN v_needed = 0 OR v_rows = 4 * v_needed;
END
$$;

COMMENT ON FUNCTION messages._is_worth_emptying IS
    'Whether nothing in a table is needed any more, or so little that it can be moved.';


CREATE OR REPLACE FUNCTION messages._empty_stream_table(
    slot int
)
RETURNS boolean
LANGUAGE plpgsql
AS $$
DECLARE
    v_table regclass := messages._stream_table(slot);
    v_current smallint;
BEGIN
    BEGIN
        EXECUTE format('LOCK TABLE %s IN ACCESS EXCLUSIVE MODE NOWAIT', v_table);
    EXCEPTION WHEN lock_not_available THEN
        -- A transaction that published to it or subscribes is open; later is early enough.
        RETURN false;
    END;
    -- Again: behind the lock no subscription begins or moves, and nobody writes here.
    IF NOT messages._is_worth_emptying(slot) THEN
        RETURN false;
    END IF;
    SELECT s.slot INTO v_current FROM messages._stream AS s;
    INSERT INTO psqlmessages_streammessage (slot, topic_id, id, sender, published_at, enc, payload)
    SELECT v_current, n.topic_id, n.id, n.sender, n.published_at, n.enc, n.payload
    FROM messages._needed(slot, 10000) AS n;
    EXECUTE format(
        'INSERT INTO messages._stream_last AS l (topic_id, id, published_at)'
        ' SELECT t.id, m.id, m.published_at FROM psqlmessages_topic AS t'
        ' CROSS JOIN LATERAL ('
        '     SELECT r.id, r.published_at FROM %s AS r'
        '     WHERE r.slot = $1 AND r.topic_id = t.id ORDER BY r.id DESC LIMIT 1'
        ' ) AS m'
        ' ON CONFLICT (topic_id) DO UPDATE SET id = excluded.id, published_at = excluded.published_at'
        ' WHERE l.id < excluded.id', v_table
    ) USING slot::smallint;
    EXECUTE format('TRUNCATE %s', v_table);
    RETURN true;
END
$$;

COMMENT ON FUNCTION messages._empty_stream_table IS
    'Move what is still needed of a table, and truncate it; false where that is not possible now. Readers wait for the commit.';


CREATE OR REPLACE FUNCTION messages._empty_streams()
RETURNS int
LANGUAGE plpgsql
AS $$
DECLARE
    v_emptied int := 0;
BEGIN
    FOR v_slot IN 0 .. 3 LOOP
        IF pg_relation_size(messages._stream_table(v_slot)) > 0
            AND v_slot <> (SELECT s.slot FROM messages._stream AS s)
            AND messages._is_worth_emptying(v_slot)
            AND messages._empty_stream_table(v_slot)
        THEN
            v_emptied := v_emptied + 1;
        END IF;
    END LOOP;
    RETURN v_emptied;
END
$$;

COMMENT ON FUNCTION messages._empty_streams IS
    'Empty the tables that are over, other than the one being filled; answers how many.';


CREATE OR REPLACE FUNCTION messages._tend_streams()
RETURNS int
LANGUAGE plpgsql
AS $$
BEGIN
    PERFORM FROM messages._stream AS s
    WHERE s.tended_at < clock_timestamp() - interval '1 second' FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN 0;
    END IF;
    UPDATE messages._stream SET tended_at = clock_timestamp();
    PERFORM messages._expire_subscriptions();
    PERFORM messages._remove_topics();
    PERFORM messages._switch_stream('10 seconds', 0.5);
    RETURN messages._empty_streams();
END
$$;

COMMENT ON FUNCTION messages._tend_streams IS
    'Once a second, by whichever session comes first: expire, switch, empty. Never waits.';


CREATE OR REPLACE FUNCTION messages._prune_streams()
RETURNS int
LANGUAGE plpgsql
AS $$
DECLARE
    v_emptied int;
BEGIN
    PERFORM FROM messages._stream FOR UPDATE;
    PERFORM messages._expire_subscriptions();
    v_emptied := messages._empty_streams();
    PERFORM messages._switch_stream('0', 0);
    v_emptied := v_emptied + messages._empty_streams();
    PERFORM messages._remove_topics();
    RETURN v_emptied;
END
$$;

COMMENT ON FUNCTION messages._prune_streams IS
    'Remove all that can be removed now, however little; answers how many tables were emptied.';
