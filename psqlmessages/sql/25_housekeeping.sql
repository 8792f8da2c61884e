-- Housekeeping: at commit, end dead sessions, follow changed role memberships, and maintain queues, bodies and streams.

-- A row requests housekeeping at the commit of the transaction that inserted it; the trigger deletes it. Housekeeping
-- locks rows of dead nodes and tables of streams, and a function cannot know whether it runs in an explicit
-- transaction, which would hold these locks for long. So it runs at the commit. The key is the transaction and not the
-- pid, because after PREPARE TRANSACTION the row still exists while the session starts other transactions.
CREATE UNLOGGED TABLE IF NOT EXISTS messages._housekeeping_request (
    xact int PRIMARY KEY
);


-- When a check of queues or streams last found nothing to do; the columns maintained_at store the last run that wrote.
-- setval of an UNLOGGED sequence needs no transaction id and writes no WAL, so idle nodes write nothing. A value
-- consists of the milliseconds since the epoch and 20 bits of maintained_at. If these bits differ from those of the
-- column, the value is ignored: a later run or a crash of the server makes it invalid.
CREATE UNLOGGED SEQUENCE IF NOT EXISTS messages._queues_checked;
CREATE UNLOGGED SEQUENCE IF NOT EXISTS messages._streams_checked;


CREATE OR REPLACE FUNCTION messages._maintained_at_bits(
    maintained_at timestamp with time zone
)
RETURNS bigint
LANGUAGE sql
STABLE
AS $$
    SELECT CASE WHEN isfinite(maintained_at) THEN (date_part('epoch', maintained_at) * 1000000)::bigint & 1048575 END
$$;

COMMENT ON FUNCTION messages._maintained_at_bits IS
    'The 20 bits of maintained_at that the values of _queues_checked and _streams_checked contain; null if maintained_at is infinite.';


CREATE OR REPLACE FUNCTION messages._last_checked_at(
    sequence regclass,
    maintained_at timestamp with time zone
)
RETURNS timestamp with time zone
LANGUAGE plpgsql
AS $$
DECLARE
    v_value bigint := pg_sequence_last_value(sequence);
BEGIN
    RETURN CASE WHEN v_value & 1048575 = messages._maintained_at_bits(maintained_at)
        THEN to_timestamp((v_value >> 20) / 1000.0) ELSE maintained_at END;
END
$$;

COMMENT ON FUNCTION messages._last_checked_at IS
    'When housekeeping of queues or streams last ran or found nothing to do. sequence: _queues_checked or _streams_checked.';


CREATE OR REPLACE FUNCTION messages._store_check(
    sequence regclass,
    maintained_at timestamp with time zone,
    checked_at timestamp with time zone
)
RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
    PERFORM setval(
        sequence,
        (floor(date_part('epoch', checked_at) * 1000)::bigint << 20) | messages._maintained_at_bits(maintained_at)
    );
END
$$;

COMMENT ON FUNCTION messages._store_check IS
    'Store in this sequence when a check found nothing to do. A rollback does not undo it.';


CREATE OR REPLACE FUNCTION messages._has_work()
RETURNS boolean
LANGUAGE plpgsql
-- A transaction may have locked a whole table.
SET lock_timeout = '50ms'
AS $$
DECLARE
    v_has_work boolean;
BEGIN
    -- Above READ COMMITTED the check would not see recent commits of other sessions.
    IF current_setting('transaction_isolation') <> 'read committed'
        OR current_setting('transaction_read_only') = 'on'
    THEN
        RETURN true;
    END IF;
    -- This call frees the notifications of listeners that have ended.
    PERFORM pg_notification_queue_usage();
    BEGIN
        v_has_work := EXISTS (
                SELECT FROM psqlmessages_session AS s WHERE s.id NOT IN (SELECT messages._live_sessions())
            )
            OR NOT messages._rules_are_applied()
            OR EXISTS (SELECT FROM messages._recheck)
            OR EXISTS (SELECT FROM messages._unfinished)
            OR messages._role_membership_checksum() IS DISTINCT FROM (
                SELECT k.sum FROM messages._role_memberships AS k ORDER BY k.id DESC LIMIT 1
            )
            OR messages._queues_have_work()
            OR EXISTS (
                SELECT FROM generate_series(0, 6) AS k (class)
                WHERE pg_relation_size(to_regclass('psqlmessages_body_' || messages._body_slot(k.class, 1))) > 0
            )
            OR messages._streams_have_work();
        -- The exception rolls the block back, which releases its locks: an open transaction of the caller would
        -- otherwise delay a TRUNCATE.
        RAISE EXCEPTION USING ERRCODE = 'transaction_rollback';
    EXCEPTION
        WHEN transaction_rollback THEN
            NULL;
        WHEN lock_not_available OR deadlock_detected THEN
            v_has_work := true;
    END;
    RETURN v_has_work;
END
$$;

COMMENT ON FUNCTION messages._has_work IS
    'Whether housekeeping has anything to do; true if it cannot find out. Needs no transaction id. Waits for a lock at most 50 ms, and holds none afterwards.';


CREATE OR REPLACE FUNCTION messages._request_housekeeping()
RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
    IF current_setting('transaction_isolation') = 'read committed'
        AND current_setting('transaction_read_only') = 'off'
    THEN
        -- If the caller has set all constraints immediate, the trigger would fire at the end of this INSERT.
        SET CONSTRAINTS messages.run_housekeeping DEFERRED;
        INSERT INTO messages._housekeeping_request (xact)
        VALUES ((pg_current_xact_id()::text::bigint % 2147483648)::int)
        ON CONFLICT DO NOTHING;
    END IF;
END
$$;

COMMENT ON FUNCTION messages._request_housekeeping IS
    'Make this transaction run housekeeping at its commit. Does nothing above READ COMMITTED, because housekeeping would not see recent commits of others.';


CREATE OR REPLACE FUNCTION messages._schedule_housekeeping()
RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
    -- Housekeeping locks rows until the transaction ends, so roles without any rule do not run it.
    IF messages._has_any_rule() THEN
        -- The second of the last call in this session.
        PERFORM set_config(
            'messages.housekeeping_at', to_hex(date_part('epoch', clock_timestamp())::bigint), false
        );
        IF messages._has_work() THEN
            PERFORM messages._request_housekeeping();
        END IF;
    END IF;
END
$$;

COMMENT ON FUNCTION messages._schedule_housekeeping IS
    'Look whether housekeeping has anything to do. If so, make this transaction run it at its commit.';


CREATE OR REPLACE FUNCTION messages._nothing_is_due()
RETURNS boolean
LANGUAGE sql
VOLATILE
AS $$
    SELECT current_setting('messages.housekeeping_at', true) = to_hex(date_part('epoch', clock_timestamp())::bigint)
        AND NOT current_setting('client_min_messages') ^@ 'debug'
$$;

COMMENT ON FUNCTION messages._nothing_is_due IS
    'Whether a call can skip both _log_command, because the client gets no DEBUG messages, and _schedule_housekeeping, because this session called it in this second. Null, which means no, if this session never called it. Inlined where it is called.';


CREATE OR REPLACE FUNCTION messages._schedule_housekeeping_if_due()
RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
    IF current_setting('messages.housekeeping_at', true)
        IS DISTINCT FROM to_hex(date_part('epoch', clock_timestamp())::bigint)
    THEN
        PERFORM messages._schedule_housekeeping();
    END IF;
END
$$;

COMMENT ON FUNCTION messages._schedule_housekeeping_if_due IS
    'Call _schedule_housekeeping unless this session did so in this second. The setting is compared as text, because the caller may have set it to any value.';


CREATE OR REPLACE FUNCTION messages._commits_immediately(
    context text
)
RETURNS boolean
LANGUAGE plpgsql
AS $$
DECLARE
    v_query text := rtrim(current_query(), E' \t\r\n;');
BEGIN
    RETURN
        -- The context has one line: the trigger was not fired in a function by SET CONSTRAINTS or in a procedure by
        -- COMMIT.
        strpos(context, E'\n') = 0
        -- The transaction ends with this statement: a single SELECT, a COMMIT, or, if there is no text, a Sync of the
        -- extended protocol. It is no SET CONSTRAINTS, no PREPARE TRANSACTION and not one of several statements.
        AND (v_query IS NULL
            OR v_query ~* '^[[:space:]]*select[^[:alnum:]_]' AND strpos(v_query, ';') = 0
            OR v_query ~* '^[[:space:]]*(commit|end)([[:space:]]+(work|transaction))?$')
        -- No other work delays this commit: no DEBUG message to a client that does not read, no cursor WITH HOLD, no
        -- deferred trigger or foreign key of another table, no commit at another server, and no ON COMMIT DELETE ROWS,
        -- which waits for transactions that have used the temporary table.
        AND current_setting('client_min_messages') IN ('notice', 'warning', 'error')
        AND NOT EXISTS (SELECT FROM pg_catalog.pg_cursors AS c WHERE c.is_holdable)
        AND CASE WHEN pg_my_temp_schema() = 0 THEN true ELSE NOT EXISTS (
            SELECT FROM pg_catalog.pg_class AS t
            WHERE t.relnamespace = pg_my_temp_schema() AND t.relkind IN ('r', 'p')
        ) END
        AND NOT EXISTS (
            SELECT FROM pg_catalog.pg_locks AS l
            JOIN pg_catalog.pg_class AS r ON r.oid = l.relation
            JOIN pg_catalog.pg_class AS o ON o.oid = 'messages._housekeeping_request'::regclass
            WHERE l.pid = pg_backend_pid() AND l.locktype = 'relation'
              AND (l.mode <> 'AccessShareLock' AND r.relkind IN ('r', 'p') OR r.relkind = 'f') AND (
                  r.relowner <> o.relowner
                  OR r.relnamespace <> o.relnamespace AND NOT r.relname ^@ 'psqlmessages_'
              )
        );
END
$$;

COMMENT ON FUNCTION messages._commits_immediately IS
    'Whether the transaction commits right after the trigger run_housekeeping, without a delay that the caller controls; false if that is not certain. context: PG_CONTEXT in the trigger function.';


CREATE OR REPLACE FUNCTION messages._run_housekeeping_at_commit()
RETURNS trigger
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
-- statement_timeout does not end waits in a commit.
SET lock_timeout = '50ms'
AS $$
DECLARE
    v_context text;
BEGIN
    GET DIAGNOSTICS v_context = PG_CONTEXT;
    DELETE FROM messages._housekeeping_request AS e WHERE e.xact = NEW.xact;
    -- This call makes PostgreSQL free the notifications of listeners that have ended. Without it, a full notification
    -- queue stays full, and every transaction that notifies fails. The call locks nothing.
    PERFORM pg_notification_queue_usage();
    -- Locks taken here last until the transaction ends. If that may take long, do nothing: another call does this work.
    IF NOT messages._commits_immediately(v_context) THEN
        RETURN NULL;
    END IF;
    -- A locked table or a full disk must not fail the caller's transaction: the next housekeeping tries again.
    PERFORM messages._maintain_sessions_and_rules(true);
    BEGIN
        -- This may notify sessions that wait for dead letters, which needs space in the notification queue.
        IF pg_notification_queue_usage() < 0.95 THEN
            PERFORM messages._maintain_queues();
        END IF;
    EXCEPTION WHEN lock_not_available OR deadlock_detected OR insufficient_resources THEN
        RAISE DEBUG 'maintenance of queues is postponed: %', SQLERRM;
    END;
    -- Work that locks whole tables comes last.
    BEGIN
        PERFORM messages._truncate_expired_bodies();
    EXCEPTION WHEN lock_not_available OR deadlock_detected OR insufficient_resources THEN
        RAISE DEBUG 'removal of expired bodies is postponed: %', SQLERRM;
    END;
    BEGIN
        PERFORM messages._maintain_streams();
    EXCEPTION WHEN lock_not_available OR deadlock_detected OR insufficient_resources THEN
        RAISE DEBUG 'maintenance of streams is postponed: %', SQLERRM;
    END;
    RETURN NULL;
END
$$;

COMMENT ON FUNCTION messages._run_housekeeping_at_commit IS
    'Run housekeeping before the commit of a transaction that requested it. Waits for a lock at most 50 ms, and does not make the commit fail.';

DROP TRIGGER IF EXISTS run_housekeeping ON messages._housekeeping_request;
CREATE CONSTRAINT TRIGGER run_housekeeping
AFTER INSERT ON messages._housekeeping_request
DEFERRABLE INITIALLY DEFERRED
FOR EACH ROW EXECUTE FUNCTION messages._run_housekeeping_at_commit();


CREATE OR REPLACE FUNCTION messages._begin_state_change()
RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
    PERFORM messages._share_rules_lock();
    -- A transaction that ends the node waits for this lock, or has ended it already. A new session has no node.
    IF messages._unverified_node_id() IS NOT NULL THEN
        PERFORM FROM psqlmessages_client AS c
        WHERE c.id = (SELECT a.id FROM messages._acting_node() AS a) FOR KEY SHARE;
    END IF;
END
$$;

COMMENT ON FUNCTION messages._begin_state_change IS
    'Share the rules lock and lock the acting node, as the first step of a state change. Call it if the permission exists, and then check the permission again. Locks are taken in this order: rules lock, session, node, topics by name.';


CREATE OR REPLACE FUNCTION messages._maintain_sessions_and_rules(
    is_commit boolean DEFAULT false
)
RETURNS int
LANGUAGE plpgsql
-- A transaction may have locked a whole table, and statement_timeout does not end waits in a commit.
SET lock_timeout = '50ms'
AS $$
DECLARE
    v_events int := 0;
BEGIN
    -- This call also frees the notifications of listeners that have ended.
    IF pg_notification_queue_usage() >= 0.95 THEN
        RETURN 0;
    END IF;
    BEGIN
        v_events := messages._end_dead_sessions();
    EXCEPTION WHEN lock_not_available OR deadlock_detected OR insufficient_resources THEN
        RAISE DEBUG 'ending dead sessions is postponed: %', SQLERRM;
    END;
    BEGIN
        v_events := v_events + messages._apply_role_membership_changes(is_commit);
    EXCEPTION WHEN lock_not_available OR deadlock_detected OR insufficient_resources THEN
        RAISE DEBUG 'applying rules and role memberships is postponed: %', SQLERRM;
    END;
    RETURN v_events;
END
$$;

COMMENT ON FUNCTION messages._maintain_sessions_and_rules IS
    'End dead sessions, and apply unfinished changes of rules and role memberships. Waits for a lock at most 50 ms, and skips locked rows until the next time. Does nothing while the notification queue is almost full. Returns the number of events. is_commit: as in _finish_rule_changes.';


CREATE OR REPLACE FUNCTION messages.evaluate()
RETURNS json
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
DECLARE
    v_events int := 0;
BEGIN
    PERFORM messages._log_command('evaluate');
    IF messages._has_any_rule() AND messages._has_work() THEN
        BEGIN
            -- Only to count the events: the exception rolls the block back, which releases its locks.
            v_events := messages._maintain_sessions_and_rules();
            RAISE EXCEPTION USING ERRCODE = 'transaction_rollback';
        EXCEPTION WHEN transaction_rollback THEN
            NULL;
        END;
        PERFORM messages._request_housekeeping();
    END IF;
    RETURN ('{"Err":"0","Events":' || v_events || '}')::json;
END
$$;

COMMENT ON FUNCTION messages.evaluate IS
    'Run housekeeping when this call commits; Events: how many events it will send. Call it outside of transactions, every second while idle. Errors: none.';


DO $$
DECLARE
    v_function text;
    v_setting text;
BEGIN
    -- The caller's planner settings must not lead to slow plans, because other sessions wait for these functions.
    FOREACH v_function IN ARRAY '{_run_housekeeping_at_commit,evaluate}'::text[] LOOP
        FOREACH v_setting IN ARRAY ARRAY[
            'enable_indexscan = on', 'enable_indexonlyscan = on', 'enable_bitmapscan = on', 'enable_nestloop = on',
            'enable_hashjoin = on', 'enable_mergejoin = on', 'enable_sort = on', 'seq_page_cost = 1',
            'random_page_cost = 4', 'cpu_tuple_cost = 0.01', 'cpu_index_tuple_cost = 0.005',
            'cpu_operator_cost = 0.0025', 'work_mem = 4096', 'max_parallel_workers_per_gather = 0',
            'plan_cache_mode = auto', 'jit = off', 'geqo = off', 'from_collapse_limit = 8', 'join_collapse_limit = 8'
        ] LOOP
            EXECUTE format('ALTER FUNCTION messages.%I() SET %s', v_function, v_setting);
        END LOOP;
    END LOOP;
END
$$;

-- Dead sessions: end the nodes of connections that were lost without deinit, with their events.

CREATE OR REPLACE FUNCTION messages._drop_nodes(
    nodes bigint[]
)
RETURNS jsonb
LANGUAGE plpgsql
SET enable_seqscan = off
SET jit = off
AS $$
DECLARE
    v_left jsonb;
BEGIN
    WITH deleted AS (
        DELETE FROM psqlmessages_membership AS m
        USING psqlmessages_client AS c, psqlmessages_topic AS t
        WHERE m.client_id = ANY (nodes) AND c.id = m.client_id AND t.id = m.topic_id
        RETURNING c.ident, t.id, t.name, m.kind
    ), marked AS (
        SELECT d.ident, d.name, d.kind,
               row_number() OVER (PARTITION BY d.id, d.kind ORDER BY d.ident DESC) = 1
               AND NOT EXISTS (
                   SELECT FROM psqlmessages_membership AS o
                   WHERE o.topic_id = d.id AND o.kind = d.kind AND o.client_id <> ALL (nodes)
               ) AS is_last
        FROM deleted AS d
    ), by_node AS (
        SELECT k.ident,
               jsonb_agg(jsonb_build_array(k.kind, k.name, k.is_last) ORDER BY k.name, k.kind) AS left_topics
        FROM marked AS k
        GROUP BY k.ident
    )
    SELECT jsonb_object_agg(n.ident, n.left_topics) INTO v_left FROM by_node AS n;
    DELETE FROM psqlmessages_observation AS o WHERE o.client_id = ANY (nodes);
    DELETE FROM psqlmessages_client AS c WHERE c.id = ANY (nodes);
    RETURN v_left;
END
$$;

COMMENT ON FUNCTION messages._drop_nodes IS
    'Remove these nodes, whose topics the caller has locked. Returns for each node name the topics that the node listened or sent to, each as [kind, topic, whether it was the last listener or sender]; null if they had none.';


CREATE OR REPLACE FUNCTION messages._shared_audiences(
    left_topics jsonb
)
RETURNS jsonb
LANGUAGE plpgsql
STABLE
AS $$
DECLARE
    v_topic text;
    v_audience bigint[];
    v_topics text[];
    v_audiences text[];
    v_size int := 0;
BEGIN
    FOR v_topic IN
        SELECT l.value ->> 1
        FROM jsonb_each(left_topics) AS n
        CROSS JOIN LATERAL jsonb_array_elements(n.value) AS l
        GROUP BY 1 HAVING count(*) > 1
        ORDER BY count(*) DESC
    LOOP
        v_audience := messages._topic_audience(v_topic);
        v_size := v_size + cardinality(v_audience);
        -- About a megabyte.
        EXIT WHEN v_size > 100000;
        v_topics := array_append(v_topics, v_topic);
        v_audiences := array_append(v_audiences, v_audience::text);
    END LOOP;
    RETURN jsonb_object(v_topics, v_audiences);
END
$$;

COMMENT ON FUNCTION messages._shared_audiences IS
    'The audiences of the topics that several nodes left, by topic name: arrays as text, for the most frequent topics, up to about a megabyte. left_topics: the result of _drop_nodes.';


CREATE OR REPLACE FUNCTION messages._send_crash_events(
    idents text[],
    left_topics jsonb
)
RETURNS int
LANGUAGE plpgsql
AS $$
DECLARE
    v_version bigint;
    v_audiences jsonb;
    v_ident text;
    v_left record;
    v_topic_audience bigint[];
    v_key record;
    v_last_key record;
    v_audience bigint[];
    v_events int := 0;
BEGIN
    FOREACH v_ident IN ARRAY idents LOOP
        -- Nodes of one session often share topics and rules: look up their audiences once, and again if rules change.
        IF v_version IS DISTINCT FROM (SELECT r.version FROM messages._rules AS r) THEN
            SELECT r.version INTO v_version FROM messages._rules AS r;
            v_audiences := messages._shared_audiences(left_topics);
            v_audience := NULL;
        END IF;
        FOR v_left IN
            SELECT e.value ->> 0 AS kind, e.value ->> 1 AS topic, (e.value ->> 2)::boolean AS is_last
            FROM jsonb_array_elements(left_topics -> v_ident) AS e
        LOOP
            v_topic_audience := coalesce(
                (v_audiences ->> v_left.topic)::bigint[], messages._topic_audience(v_left.topic)
            );
            v_events := v_events + messages._send_event(
                v_topic_audience, 'topic_un' || v_left.kind, v_ident, v_left.topic, v_ident
            );
            IF v_left.is_last THEN
                v_events := v_events + messages._send_event(
                    v_topic_audience, 'topic_none_' || v_left.kind, NULL, v_left.topic, v_ident
                );
            END IF;
        END LOOP;
        SELECT h.* INTO v_key FROM messages._event_audience_key(v_ident, '{}') AS h;
        IF v_audience IS NULL OR v_key IS DISTINCT FROM v_last_key THEN
            v_audience := messages._audience_of_key(v_key.topics, v_key.nodes, v_key.rules);
            v_last_key := v_key;
        END IF;
        v_events := v_events + messages._send_event(v_audience, 'crash', v_ident, NULL, v_ident);
    END LOOP;
    RETURN v_events;
END
$$;

COMMENT ON FUNCTION messages._send_crash_events IS
    'Send the events of crashed nodes that _drop_nodes has removed, and return their number. left_topics: its result.';


CREATE OR REPLACE FUNCTION messages._end_dead_session(
    session int
)
RETURNS int
LANGUAGE plpgsql
SET enable_seqscan = off
SET jit = off
AS $$
DECLARE
    v_nodes bigint[];
    v_idents text[];
    v_topics bigint[];
    v_channel text;
    v_left jsonb;
    v_events int := 0;
BEGIN
    SELECT s.channel INTO v_channel FROM psqlmessages_session AS s WHERE s.id = session FOR UPDATE;
    SELECT array_agg(c.id), array_agg(c.ident::text) INTO v_nodes, v_idents
    FROM (
        SELECT n.id, n.ident FROM psqlmessages_client AS n
        WHERE n.session_id = session ORDER BY n.ident FOR UPDATE
    ) AS c;
    IF v_nodes IS NOT NULL THEN
        v_topics := messages._topics_of_nodes(v_nodes);
        PERFORM messages._lock_topics(v_topics);
        -- The same result as by _rebuild_topics: no other session uses the channel.
        UPDATE psqlmessages_topic AS t
        SET listeners = t.listeners - coalesce(m.listeners, 0),
            channels = array_remove(t.channels, v_channel),
            subscriber_channels = array_remove(t.subscriber_channels, v_channel)
        FROM unnest(v_topics) AS n (id)
        LEFT JOIN (
            SELECT l.topic_id, count(*) AS listeners FROM psqlmessages_membership AS l
            WHERE l.client_id = ANY (v_nodes) AND l.kind = 'listen' GROUP BY l.topic_id
        ) AS m ON m.topic_id = n.id
        WHERE t.id = n.id;
        -- Remove all nodes before the first event: dead nodes need no events about each other.
        v_left := messages._drop_nodes(v_nodes);
        v_events := messages._send_crash_events(v_idents, v_left);
    END IF;
    DELETE FROM psqlmessages_session AS s WHERE s.id = session;
    RETURN v_events;
END
$$;

COMMENT ON FUNCTION messages._end_dead_session IS
    'End a dead session and its nodes, send the events, and return their number. Does nothing if another transaction has ended the session.';


CREATE OR REPLACE FUNCTION messages._try_lock_nodes(
    nodes bigint[]
)
RETURNS boolean
LANGUAGE plpgsql
SET enable_seqscan = off
SET jit = off
AS $$
DECLARE
    v_topics bigint[];
    v_locked bigint;
BEGIN
    SELECT count(*) INTO v_locked FROM (
        SELECT FROM psqlmessages_client AS c WHERE c.id = ANY (nodes) FOR UPDATE SKIP LOCKED
    ) AS l;
    IF v_locked < cardinality(nodes) THEN
        RETURN false;
    END IF;
    -- A change of rules that is not committed may have locked memberships.
    SELECT count(*) INTO v_locked FROM (
        SELECT FROM psqlmessages_membership AS m WHERE m.client_id = ANY (nodes) FOR UPDATE SKIP LOCKED
    ) AS l;
    IF v_locked < (SELECT count(*) FROM psqlmessages_membership AS m WHERE m.client_id = ANY (nodes)) THEN
        RETURN false;
    END IF;
    v_topics := messages._topics_of_nodes(nodes);
    SELECT count(*) INTO v_locked FROM (
        SELECT FROM psqlmessages_topic AS t WHERE t.id = ANY (v_topics) FOR NO KEY UPDATE SKIP LOCKED
    ) AS l;
    RETURN v_locked = cardinality(v_topics);
END
$$;

COMMENT ON FUNCTION messages._try_lock_nodes IS
    'Lock the rows of these nodes, of their memberships and of all their topics without waiting; false if another transaction has locked one of them.';


CREATE OR REPLACE FUNCTION messages._end_dead_sessions()
RETURNS int
LANGUAGE plpgsql
AS $$
DECLARE
    v_session int;
    v_nodes bigint[];
    v_events int := 0;
BEGIN
    FOR v_session IN
        SELECT s.id FROM psqlmessages_session AS s
        WHERE s.id NOT IN (SELECT messages._live_sessions())
        ORDER BY s.id
    LOOP
        PERFORM FROM psqlmessages_session AS s WHERE s.id = v_session FOR UPDATE SKIP LOCKED;
        CONTINUE WHEN NOT FOUND;
        v_nodes := ARRAY(SELECT c.id FROM psqlmessages_client AS c WHERE c.session_id = v_session);
        IF messages._try_lock_nodes(v_nodes) THEN
            v_events := v_events + messages._end_dead_session(v_session);
        END IF;
    END LOOP;
    RETURN v_events;
END
$$;

COMMENT ON FUNCTION messages._end_dead_sessions IS
    'End the dead sessions, except those with a row that another transaction has locked. Returns the number of events.';
