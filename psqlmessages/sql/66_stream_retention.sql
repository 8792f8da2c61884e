-- Expiry of subscriptions, and retention of stream messages. Publishers fill four partitions in turn: messages._stream
-- has the number (slot) of the current one. Housekeeping truncates another partition when no subscription and no
-- retention needs its messages. If few messages are still needed, it first moves them to the current partition.

CREATE OR REPLACE FUNCTION messages._expire_subscriptions()
RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    v_names text[];
    v_topics bigint[];
BEGIN
    SELECT array_agg(DISTINCT s.topic::text) INTO v_names FROM psqlmessages_subscription AS s
    WHERE s.is_alive AND s.pinged_at + make_interval(secs => s.timeout) <= clock_timestamp()
      AND NOT messages._is_alive(s);
    IF v_names IS NULL THEN
        RETURN;
    END IF;
    WITH locked AS (
        SELECT t.id, t.name FROM psqlmessages_topic AS t
        WHERE t.name = ANY (v_names) FOR NO KEY UPDATE SKIP LOCKED
    )
    SELECT array_agg(l.id), array_agg(l.name::text) INTO v_topics, v_names FROM locked AS l;
    UPDATE psqlmessages_subscription AS s SET is_alive = false
    WHERE s.id = ANY (ARRAY(
        SELECT e.id FROM psqlmessages_subscription AS e
        WHERE e.topic = ANY (v_names) AND e.is_alive
          AND e.pinged_at + make_interval(secs => e.timeout) <= clock_timestamp()
          AND NOT messages._is_alive(e)
        FOR NO KEY UPDATE SKIP LOCKED
    ));
    PERFORM messages._rebuild_topics(v_topics);
END
$$;

COMMENT ON FUNCTION messages._expire_subscriptions IS
    'Mark subscriptions as expired whose timeout has passed. Skips locked rows.';


CREATE OR REPLACE FUNCTION messages._delete_dead_subscriptions()
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
    -- Only a subscription asks which messages of a removed topic are missing.
    DELETE FROM messages._removed_topic AS g
    WHERE g.topic IN (
        SELECT o.topic FROM messages._removed_topic AS o
        WHERE NOT EXISTS (SELECT FROM psqlmessages_subscription AS s WHERE s.topic = o.topic)
        FOR UPDATE SKIP LOCKED
    )
$$;

COMMENT ON FUNCTION messages._delete_dead_subscriptions IS
    'Delete subscriptions 30 days after they have expired: until then a node that returns learns that it missed messages. Also delete the rows of removed topics that have no subscription. Skips locked rows.';


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
    'Ids of topics that publish created and that have no message, subscription, retention, member or rule.';


CREATE OR REPLACE FUNCTION messages._delete_unused_topics()
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
        LOCK TABLE messages._rules_lock, psqlmessages_membership IN ROW SHARE MODE NOWAIT;
    EXCEPTION WHEN lock_not_available THEN
        -- A change of rules holds the rules lock, and may name one of the topics. Or the memberships are locked, and
        -- DELETE would wait when it checks their foreign key.
        RETURN;
    END;
    v_topics := ARRAY(
        SELECT t.id FROM psqlmessages_topic AS t WHERE t.id = ANY (v_topics) FOR UPDATE SKIP LOCKED
    );
    -- Check again: now that the topics are locked, no other transaction can publish to them, subscribe or join.
    v_topics := ARRAY(SELECT u.id FROM messages._unused_topics() AS u (id) WHERE u.id = ANY (v_topics));
    -- The topic may be created again. Then a subscription that has not read all must learn that it missed messages:
    -- is_recovered is false until its node connects again.
    WITH behind AS (
        SELECT s.id FROM psqlmessages_subscription AS s
        JOIN psqlmessages_topic AS t ON t.name = s.topic
        JOIN messages._last_removed_message AS l ON l.topic_id = t.id
        WHERE t.id = ANY (v_topics) AND s.position < l.id
        FOR NO KEY UPDATE OF s SKIP LOCKED
    )
    UPDATE psqlmessages_subscription AS s SET is_recovered = false WHERE s.id IN (SELECT b.id FROM behind AS b);
    INSERT INTO messages._removed_topic AS g (topic, id)
    SELECT t.name, l.id FROM psqlmessages_topic AS t JOIN messages._last_removed_message AS l ON l.topic_id = t.id
    WHERE t.id = ANY (v_topics) AND EXISTS (SELECT FROM psqlmessages_subscription AS s WHERE s.topic = t.name)
    ON CONFLICT (topic) DO UPDATE SET id = greatest(g.id, excluded.id);
    DELETE FROM messages._last_removed_message AS l WHERE l.topic_id = ANY (v_topics);
    DELETE FROM psqlmessages_topic AS t WHERE t.id = ANY (v_topics);
END
$$;

COMMENT ON FUNCTION messages._delete_unused_topics IS
    'Delete the topics of _unused_topics. Skips locked ones.';


CREATE OR REPLACE FUNCTION messages._stream_partition(
    slot int
)
RETURNS regclass
LANGUAGE sql
STABLE
AS $$
    SELECT ('psqlmessages_streammessage_' || slot)::regclass
$$;

COMMENT ON FUNCTION messages._stream_partition IS
    'The partition with this number.';


CREATE OR REPLACE FUNCTION messages._next_stream_slot(
    min_age interval,
    min_ratio float8
)
RETURNS int
LANGUAGE plpgsql
AS $$
DECLARE
    v_stream messages._stream;
    v_next int;
    v_other_bytes bigint;
BEGIN
    SELECT * INTO v_stream FROM messages._stream;
    SELECT min(s.slot) FILTER (WHERE pg_relation_size(messages._stream_partition(s.slot)) = 0),
           sum(pg_relation_size(messages._stream_partition(s.slot)))
    INTO v_next, v_other_bytes
    FROM generate_series(0, 3) AS s (slot) WHERE s.slot <> v_stream.slot;
    RETURN CASE
        WHEN pg_relation_size(messages._stream_partition(v_stream.slot)) > v_other_bytes * min_ratio
            AND (v_stream.switched_at + min_age <= clock_timestamp() OR v_stream.switched_at > clock_timestamp())
        THEN v_next
    END;
END
$$;

COMMENT ON FUNCTION messages._next_stream_slot IS
    'The number of an empty partition, if it is time to fill it: the current one has been current for min_age, and is larger than min_ratio times the others together. Otherwise null.';


CREATE OR REPLACE FUNCTION messages._switch_stream_partition(
    min_age interval,
    min_ratio float8
)
RETURNS void
LANGUAGE sql
AS $$
    UPDATE messages._stream AS s SET slot = n.slot, switched_at = clock_timestamp()
    FROM messages._next_stream_slot(min_age, min_ratio) AS n (slot) WHERE n.slot IS NOT NULL
$$;

COMMENT ON FUNCTION messages._switch_stream_partition IS
    'Make the partition of _next_stream_slot the current one, if it returns one.';


CREATE OR REPLACE FUNCTION messages._needed_ranges()
RETURNS TABLE (
    topic_id bigint,
    after_id bigint,
    retained_since timestamp with time zone
)
LANGUAGE sql
STABLE
AS $$
    WITH gaps AS MATERIALIZED (
        -- A retention is longer by each clock gap within it: a gap is a period without housekeeping. So the lengths of
        -- the later gaps decide whether an earlier one is within it.
        SELECT g.ended_at - g.began_at AS length,
               g.ended_at + coalesce(sum(g.ended_at - g.began_at) OVER (
                   ORDER BY g.ended_at DESC ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
               ), '0') AS end_plus_later_gaps
        FROM messages._clock_gap AS g
    )
    SELECT t.id, n.after_id,
           CASE WHEN t.retention > 0 THEN clock_timestamp() - make_interval(secs => t.retention) - coalesce(
               (SELECT sum(g.length) FROM gaps AS g
                WHERE g.end_plus_later_gaps > clock_timestamp() - make_interval(secs => t.retention)), '0'
           ) END
    FROM psqlmessages_topic AS t
    LEFT JOIN (
        SELECT s.topic, min(s.position) AS after_id FROM psqlmessages_subscription AS s
        WHERE s.is_alive GROUP BY s.topic
    ) AS n ON n.topic = t.name
    WHERE t.subscriptions > 0 OR t.retention > 0
$$;

COMMENT ON FUNCTION messages._needed_ranges IS
    'For each topic with a subscription or a retention, its needed messages: those with ids above after_id (null: no subscription), and those published after retained_since (null: no retention).';


CREATE OR REPLACE FUNCTION messages._needed_rows(
    slot int,
    max_rows int
)
RETURNS SETOF psqlmessages_streammessage
LANGUAGE plpgsql
AS $$
BEGIN
    RETURN QUERY EXECUTE replace(
        'SELECT m.* FROM messages._needed_ranges() AS n CROSS JOIN LATERAL ('
        '    (SELECT r.* FROM <partition> AS r'
        '     WHERE r.topic_id = n.topic_id AND r.id > n.after_id ORDER BY r.id LIMIT $1)'
        '    UNION ALL'
        '    (SELECT k.* FROM ('
        -- Newest first: if the newest is too old, all are.
        '        SELECT r.* FROM <partition> AS r WHERE n.retained_since IS NOT NULL AND r.topic_id = n.topic_id'
        '            AND r.id <= coalesce(n.after_id, 9223372036854775807) ORDER BY r.id DESC LIMIT $1'
        '    ) AS k WHERE k.published_at > n.retained_since)'
        ') AS m LIMIT $1',
        '<partition>', messages._stream_partition(slot)::text
    ) USING max_rows;
END
$$;

COMMENT ON FUNCTION messages._needed_rows IS
    'At most max_rows rows of a partition that a subscription or a retention needs.';


CREATE OR REPLACE FUNCTION messages._has_needed_rows(
    slot int
)
RETURNS boolean
LANGUAGE sql
AS $$
    SELECT EXISTS (SELECT FROM messages._needed_rows(slot, 1))
$$;

COMMENT ON FUNCTION messages._has_needed_rows IS
    'Whether any row of a partition is needed.';


CREATE OR REPLACE FUNCTION messages._estimate_needed_bytes(
    slot int
)
RETURNS float8
LANGUAGE plpgsql
AS $$
DECLARE
    v_size bigint := pg_relation_size(messages._stream_partition(slot));
    v_share float8;
BEGIN
    -- From a sample of about a hundred pages, because a count would read the whole partition.
    EXECUTE format(
        'SELECT avg(coalesce(m.id > n.after_id OR m.published_at > n.retained_since, false)::int)'
        ' FROM %s AS m TABLESAMPLE SYSTEM ($1)'
        ' LEFT JOIN messages._needed_ranges() AS n ON n.topic_id = m.topic_id',
        messages._stream_partition(slot)
    ) INTO v_share USING least(100, 100 * 100 * 8192.0 / greatest(v_size, 1));
    RETURN v_size * coalesce(v_share, 0);
END
$$;

COMMENT ON FUNCTION messages._estimate_needed_bytes IS
    'Estimate the size of the needed rows of a partition, without TOASTed payloads.';


CREATE OR REPLACE FUNCTION messages._should_move_needed_rows(
    slot int
)
RETURNS boolean
LANGUAGE plpgsql
AS $$
DECLARE
    v_needed_bytes float8 := messages._estimate_needed_bytes(slot);
    v_current int := (SELECT s.slot FROM messages._stream AS s);
    v_current_bytes bigint := pg_relation_size(messages._stream_partition(v_current));
BEGIN
    IF v_needed_bytes <= pg_relation_size(messages._stream_partition(slot)) * 0.25 THEN
        RETURN true;
    END IF;
    -- While no partition is empty, the current one grows. To empty one sooner, move rows even if they are many: if the
    -- current partition is at least twice as large as these rows, and at least half of it is not needed.
    RETURN v_needed_bytes * 2 <= v_current_bytes
        AND NOT EXISTS (
            SELECT FROM generate_series(0, 3) AS s (slot) WHERE pg_relation_size(messages._stream_partition(s.slot)) = 0
        )
        AND messages._estimate_needed_bytes(v_current) * 2 <= v_current_bytes;
END
$$;

COMMENT ON FUNCTION messages._should_move_needed_rows IS
    'Whether to move the needed rows of a partition, so that it can be truncated.';


CREATE OR REPLACE FUNCTION messages._move_needed_rows(
    slot int
)
RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
    EXECUTE format(
        'WITH needed AS MATERIALIZED ('
        '    SELECT n.topic_id, n.id, sum(pg_column_size(n.payload))'
        '        OVER (ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS bytes_before'
        '    FROM messages._needed_rows($1, 10000) AS n'
        '), deleted AS ('
        '    DELETE FROM %s AS m USING needed AS n'
        '    WHERE m.topic_id = n.topic_id AND m.id = n.id AND coalesce(n.bytes_before, 0) < 10000000'
        '    RETURNING m.*'
        ') '
        'INSERT INTO psqlmessages_streammessage (topic_id, id, slot, sender, published_at, enc, payload)'
        ' SELECT d.topic_id, d.id, s.slot, d.sender, d.published_at, d.enc, d.payload'
        ' FROM deleted AS d CROSS JOIN messages._stream AS s',
        messages._stream_partition(slot)
    ) USING slot;
END
$$;

COMMENT ON FUNCTION messages._move_needed_rows IS
    'Move needed rows of a partition, at most about 10 MB, to the current partition.';


CREATE OR REPLACE FUNCTION messages._truncate_stream_partition(
    slot int
)
RETURNS boolean
LANGUAGE plpgsql
AS $$
DECLARE
    v_partition regclass := messages._stream_partition(slot);
BEGIN
    -- Do not block readers yet, because the next statements take long if there are many topics.
    EXECUTE format('LOCK TABLE %s IN SHARE MODE NOWAIT', v_partition);
    IF messages._has_needed_rows(slot) THEN
        RETURN false;
    END IF;
    EXECUTE format(
        'INSERT INTO messages._last_removed_message AS l (topic_id, id, published_at)'
        ' SELECT t.id, m.id, m.published_at FROM psqlmessages_topic AS t'
        ' CROSS JOIN LATERAL ('
        '     SELECT r.id, r.published_at FROM %s AS r'
        '     WHERE r.topic_id = t.id ORDER BY r.id DESC LIMIT 1'
        ' ) AS m'
        ' ON CONFLICT (topic_id) DO UPDATE SET id = excluded.id, published_at = excluded.published_at'
        ' WHERE l.id < excluded.id', v_partition
    );
    EXECUTE format('LOCK TABLE %s IN ACCESS EXCLUSIVE MODE NOWAIT', v_partition);
    -- Check again: now that the partition is locked, no subscription can start or move.
    IF messages._has_needed_rows(slot) THEN
        RAISE lock_not_available;
    END IF;
    EXECUTE format('TRUNCATE %s', v_partition);
    RETURN true;
EXCEPTION WHEN lock_not_available OR object_in_use THEN
    -- An open transaction has published to the partition or reads it. The next housekeeping tries again.
    RETURN false;
END
$$;

COMMENT ON FUNCTION messages._truncate_stream_partition IS
    'Truncate a partition and record the last message of each topic in it; false if it has needed rows or a transaction uses it. Readers then wait for the commit.';


CREATE OR REPLACE FUNCTION messages._empty_old_partitions()
RETURNS int
LANGUAGE plpgsql
AS $$
DECLARE
    v_truncated int := 0;
BEGIN
    FOR v_slot IN 0 .. 3 LOOP
        CONTINUE WHEN pg_relation_size(messages._stream_partition(v_slot)) = 0
            OR v_slot = (SELECT s.slot FROM messages._stream AS s);
        IF messages._has_needed_rows(v_slot) AND messages._should_move_needed_rows(v_slot) THEN
            PERFORM messages._move_needed_rows(v_slot);
        END IF;
        IF NOT messages._has_needed_rows(v_slot) AND messages._truncate_stream_partition(v_slot) THEN
            v_truncated := v_truncated + 1;
        END IF;
    END LOOP;
    RETURN v_truncated;
END
$$;

COMMENT ON FUNCTION messages._empty_old_partitions IS
    'Truncate the partitions without needed rows, except the current one; move needed rows out of a partition if that is worth it. Returns the number of truncated ones.';


CREATE OR REPLACE FUNCTION messages._maintain_streams()
RETURNS int
LANGUAGE plpgsql
AS $$
DECLARE
    v_stream messages._stream;
    v_truncated int;
BEGIN
    -- A time in the future was stored before the clock was set back. Tests stop housekeeping with infinity.
    SELECT * INTO v_stream FROM messages._stream AS s
    WHERE s.maintained_at NOT BETWEEN clock_timestamp() - interval '1 second' AND clock_timestamp()
      AND s.maintained_at < 'infinity'
    FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN 0;
    END IF;
    PERFORM messages._check_clock();
    PERFORM messages._expire_subscriptions();
    PERFORM messages._switch_stream_partition('10 seconds', 0.5);
    v_truncated := messages._empty_old_partitions();
    IF v_truncated > 0
        OR v_stream.garbage_removed_at NOT BETWEEN clock_timestamp() - interval '10 seconds' AND clock_timestamp()
    THEN
        PERFORM messages._delete_unused_topics();
        PERFORM messages._delete_dead_subscriptions();
        PERFORM messages._delete_expired_staged_rows();
        UPDATE messages._stream SET garbage_removed_at = clock_timestamp();
    END IF;
    RETURN v_truncated;
END
$$;

COMMENT ON FUNCTION messages._maintain_streams IS
    'Expire subscriptions, switch and empty partitions, and about every 10 seconds delete unused rows. Many sessions call this; it works at most once a second, in the session that gets the row lock. Returns the number of truncated partitions. Never waits for locks.';


CREATE OR REPLACE FUNCTION messages._streams_have_work()
RETURNS boolean
LANGUAGE plpgsql
AS $$
DECLARE
    v_stream messages._stream;
    v_last_check timestamp with time zone;
    v_now timestamp with time zone;
BEGIN
    SELECT * INTO v_stream FROM messages._stream;
    v_last_check := messages._last_checked_at('messages._streams_checked', v_stream.maintained_at);
    -- Read the clock only now: a check that another session stores in between would otherwise be in the future.
    v_now := clock_timestamp();
    IF v_last_check = 'infinity' OR v_last_check BETWEEN v_now - interval '1 second' AND v_now THEN
        RETURN false;
    END IF;
    -- Times in the future were stored before the clock was set back: housekeeping corrects them.
    IF v_last_check NOT BETWEEN v_now - interval '10 seconds' AND v_now
        OR v_stream.switched_at > v_now
        OR v_stream.garbage_removed_at > v_now
        OR EXISTS (
            SELECT FROM psqlmessages_subscription AS s
            WHERE s.pinged_at > v_now + interval '10 seconds'
               OR s.is_alive AND s.pinged_at + make_interval(secs => s.timeout) <= v_now AND NOT messages._is_alive(s)
        )
        OR messages._next_stream_slot('10 seconds', 0.5) IS NOT NULL
        OR EXISTS (
            SELECT FROM generate_series(0, 3) AS t (slot)
            WHERE t.slot <> v_stream.slot AND pg_relation_size(messages._stream_partition(t.slot)) > 0
              AND (NOT messages._has_needed_rows(t.slot) OR messages._should_move_needed_rows(t.slot))
        )
    THEN
        RETURN true;
    -- Search for unused rows, as _maintain_streams deletes them, only in the first check of each ten seconds.
    ELSIF floor(date_part('epoch', v_last_check) / 10) <> floor(date_part('epoch', v_now) / 10) THEN
        IF EXISTS (SELECT messages._unused_topics())
            OR EXISTS (
                SELECT FROM psqlmessages_subscription AS s
                WHERE NOT s.is_alive AND s.pinged_at + make_interval(days => 30, secs => s.timeout) <= v_now
            )
            OR EXISTS (
                SELECT FROM messages._removed_topic AS g
                WHERE NOT EXISTS (SELECT FROM psqlmessages_subscription AS s WHERE s.topic = g.topic)
            )
            OR messages._has_expired_staged_rows()
        THEN
            RETURN true;
        END IF;
    END IF;
    PERFORM messages._store_check('messages._streams_checked', v_stream.maintained_at, v_now);
    RETURN false;
END
$$;

COMMENT ON FUNCTION messages._streams_have_work IS
    'Whether _maintain_streams has anything to do. False within a second after a check that found nothing.';


CREATE OR REPLACE FUNCTION messages._prune_streams()
RETURNS int
LANGUAGE plpgsql
AS $$
DECLARE
    v_truncated int;
BEGIN
    PERFORM messages._require_read_committed('_prune_streams');
    PERFORM FROM messages._stream FOR UPDATE;
    PERFORM messages._check_clock();
    PERFORM messages._expire_subscriptions();
    v_truncated := messages._empty_old_partitions();
    PERFORM messages._switch_stream_partition('0', 0);
    v_truncated := v_truncated + messages._empty_old_partitions();
    PERFORM messages._delete_unused_topics();
    PERFORM messages._delete_dead_subscriptions();
    PERFORM messages._delete_expired_staged_rows();
    RETURN v_truncated;
END
$$;

COMMENT ON FUNCTION messages._prune_streams IS
    'For the administrator: remove messages that are not needed, also from the current partition. Returns the number of truncated partitions. Raises 0A000 above READ COMMITTED.';
