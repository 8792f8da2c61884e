-- Removal of what no subscription needs: tables are filled in turn, and emptied by truncating them.
-- The few rows still needed in a table that is else over are moved to the one being filled.

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
    'Keep nothing more for subscriptions that nobody pinged in time; answers how many. Never waits.';


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
    'Where a client returns late, that it missed something can be told for so long. Never waits.';


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
    'Topics that publish made, and that have neither message, subscription, member nor rule any more.';


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
        -- Rules are being saved, and may name one of them. Or the memberships are locked, in which
        -- PostgreSQL looks for references after all else, and would wait.
        RETURN;
    END;
    WITH locked AS (
        SELECT t.id FROM psqlmessages_topic AS t WHERE t.id = ANY (v_topics) FOR UPDATE SKIP LOCKED
    )
    SELECT array_agg(l.id) INTO v_topics FROM locked AS l;
    -- Again: behind the locks nobody publishes to them or joins them.
    v_topics := ARRAY(SELECT u.id FROM messages._unused_topics() AS u (id) WHERE u.id = ANY (v_topics));
    -- Who comes back to a topic of this name must know that there was something.
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
    'A topic that publish made goes with its last subscription and message. Never waits.';


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
        AND (v_stream.switched_at + least_age <= clock_timestamp() OR v_stream.switched_at > clock_timestamp())
    THEN
        UPDATE messages._stream SET slot = v_next, switched_at = clock_timestamp();
    END IF;
END
$$;

COMMENT ON FUNCTION messages._switch_stream IS
    'Fill the next table, if one is empty, this one has been filled for so long, and it holds such a share of what the others hold.';
