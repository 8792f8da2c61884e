-- Evaluation: at a commit, bury who ended without deinit, and follow changed role memberships.

-- A row lives here only inside a transaction: it asks for one evaluation at its commit.
-- At commit, because a function cannot tell whether an explicit transaction surrounds it, and a transaction
-- left open must not hold what others need: the rows of a dead node, the tables of streams.
-- By transaction and not by pid: one that is prepared keeps its row for long after its session went on.
CREATE UNLOGGED TABLE IF NOT EXISTS messages._evaluation (
    xact int PRIMARY KEY
);
DO $$
BEGIN
    ALTER TABLE messages._evaluation RENAME pid TO xact;
EXCEPTION WHEN undefined_column THEN
    NULL;
END
$$;


CREATE OR REPLACE FUNCTION messages._schedule_housekeeping()
RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
    -- Above READ COMMITTED the evaluation would not see what others committed meanwhile.
    -- What it locks stays locked while a transaction lasts: not for whom no rule trusts with anything.
    IF current_setting('transaction_isolation') = 'read committed'
        AND current_setting('transaction_read_only') = 'off'
        AND messages._has_any_rule(session_user)
    THEN
        PERFORM set_config(
            'messages.evaluated', to_hex(date_part('epoch', clock_timestamp())::bigint), false
        );
        -- The caller may have set all constraints immediate: then it would run at the end of this INSERT.
        SET CONSTRAINTS messages.evaluate_at_commit DEFERRED;
        INSERT INTO messages._evaluation (xact)
        VALUES ((pg_current_xact_id()::text::bigint % 2147483648)::int)
        ON CONFLICT DO NOTHING;
    END IF;
END
$$;

COMMENT ON FUNCTION messages._schedule_housekeeping IS
    'Evaluate when this transaction commits.';


CREATE OR REPLACE FUNCTION messages._is_evaluated()
RETURNS boolean
LANGUAGE sql
VOLATILE
AS $$
    SELECT current_setting('messages.evaluated', true) = to_hex(date_part('epoch', clock_timestamp())::bigint)
        AND NOT current_setting('client_min_messages') ^@ 'debug'
$$;

COMMENT ON FUNCTION messages._is_evaluated IS
    'Whether this session evaluated within this second, and its client does not want to see commands: nothing is left to do. Inlined where it is called.';


CREATE OR REPLACE FUNCTION messages._run_housekeeping_if_due()
RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
    IF current_setting('messages.evaluated', true)
        IS DISTINCT FROM to_hex(date_part('epoch', clock_timestamp())::bigint)
    THEN
        PERFORM messages._schedule_housekeeping();
    END IF;
END
$$;

COMMENT ON FUNCTION messages._run_housekeeping_if_due IS
    'Schedule an evaluation unless this session did within this second. Compared as text: the setting is the caller''s to forge.';


CREATE OR REPLACE FUNCTION messages._is_ending(
    context text
)
RETURNS boolean
LANGUAGE plpgsql
AS $$
DECLARE
    v_query text := rtrim(current_query(), E' \t\r\n;');
BEGIN
    RETURN
        -- Nothing has called the trigger: no function with SET CONSTRAINTS, no procedure with COMMIT.
        strpos(context, E'\n') = 0
        -- One statement is ending: a SELECT of its own, the COMMIT of a block, or, without a text, what was sent
        -- up to a Sync of the extended protocol. Not SET CONSTRAINTS, PREPARE TRANSACTION, or one of several.
        AND (v_query IS NULL
            OR v_query ~* '^[[:space:]]*select[^[:alnum:]_]' AND strpos(v_query, ';') = 0
            OR v_query ~* '^[[:space:]]*(commit|end)([[:space:]]+(work|transaction))?$')
        -- Other work at a commit may take any time: a message to a client that does not read, a cursor WITH
        -- HOLD, a deferred trigger or foreign key of a table that is not ours, the commit at another server, and
        -- ON COMMIT DELETE ROWS, which waits for whoever has shown a view of the temporary table.
        AND current_setting('client_min_messages') IN ('notice', 'warning', 'error')
        AND NOT EXISTS (SELECT FROM pg_catalog.pg_cursors AS c WHERE c.is_holdable)
        AND CASE WHEN pg_my_temp_schema() = 0 THEN true ELSE NOT EXISTS (
            SELECT FROM pg_catalog.pg_class AS t
            WHERE t.relnamespace = pg_my_temp_schema() AND t.relkind IN ('r', 'p')
        ) END
        AND NOT EXISTS (
            SELECT FROM pg_catalog.pg_locks AS l
            JOIN pg_catalog.pg_class AS r ON r.oid = l.relation
            JOIN pg_catalog.pg_class AS o ON o.oid = 'messages._evaluation'::regclass
            WHERE l.pid = pg_backend_pid() AND l.locktype = 'relation'
              AND (l.mode <> 'AccessShareLock' AND r.relkind IN ('r', 'p') OR r.relkind = 'f') AND (
                  r.relowner <> o.relowner
                  OR r.relnamespace <> o.relnamespace AND NOT r.relname ^@ 'psqlmessages_'
              )
        );
END
$$;

COMMENT ON FUNCTION messages._is_ending IS
    'Whether the commit trigger, called with this context, runs in a commit that nothing of the caller''s can hold up. Where it is not certain: no.';


CREATE OR REPLACE FUNCTION messages._run_housekeeping_at_commit()
RETURNS trigger
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
-- No statement_timeout ends what waits in a commit.
SET lock_timeout = '50ms'
AS $$
DECLARE
    v_context text;
BEGIN
    GET DIAGNOSTICS v_context = PG_CONTEXT;
    DELETE FROM messages._evaluation AS e WHERE e.xact = NEW.xact;
    -- PostgreSQL frees the room of a listener that has ended when it is asked how full the queue is. If nobody asks,
    -- a full queue stays full, and every transaction that notifies fails. This locks nothing.
    PERFORM pg_notification_queue_usage();
    -- What is locked here stays locked until the transaction ends. Another call does this work then.
    IF NOT messages._is_ending(v_context) THEN
        RETURN NULL;
    END IF;
    -- Nobody asked for any of this: somebody who has locked a whole table, or a full disk, ends an
    -- attempt and not the transaction. The next evaluation tries again.
    PERFORM messages._run_housekeeping(true);
    BEGIN
        -- It may notify sessions that wait for dead letters.
        IF pg_notification_queue_usage() < 0.95 THEN
            PERFORM messages._maintain_queues();
        END IF;
    EXCEPTION WHEN lock_not_available OR deadlock_detected OR insufficient_resources THEN
        RAISE DEBUG 'care of queues is put off: %', SQLERRM;
    END;
    -- Last the work that locks whole tables.
    BEGIN
        PERFORM messages._rotate_bodies();
    EXCEPTION WHEN lock_not_available OR deadlock_detected OR insufficient_resources THEN
        RAISE DEBUG 'care of bodies is put off: %', SQLERRM;
    END;
    BEGIN
        PERFORM messages._maintain_streams();
    EXCEPTION WHEN lock_not_available OR deadlock_detected OR insufficient_resources THEN
        RAISE DEBUG 'care of streams is put off: %', SQLERRM;
    END;
    RETURN NULL;
END
$$;

COMMENT ON FUNCTION messages._run_housekeeping_at_commit IS
    'Runs once in each transaction that asked for an evaluation, just before its commit, which it neither holds up nor fails.';

DROP TRIGGER IF EXISTS evaluate_at_commit ON messages._evaluation;
CREATE CONSTRAINT TRIGGER evaluate_at_commit
AFTER INSERT ON messages._evaluation
DEFERRABLE INITIALLY DEFERRED
FOR EACH ROW EXECUTE FUNCTION messages._run_housekeeping_at_commit();


CREATE OR REPLACE FUNCTION messages._begin_change()
RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
    PERFORM messages._share_rules_lock();
    -- A node that is being disconnected waits for us, or we find it gone. A new session has none.
    IF messages._node_id() IS NOT NULL THEN
        PERFORM FROM psqlmessages_client AS c
        WHERE c.id = (SELECT a.id FROM messages._acting() AS a) FOR KEY SHARE;
    END IF;
END
$$;

COMMENT ON FUNCTION messages._begin_change IS
    'First step of all that changes state, once it is known to be allowed; then check again. Locks are taken in this order: gate, session, node, topics by name.';


CREATE OR REPLACE FUNCTION messages._run_housekeeping(
    is_commit boolean DEFAULT false
)
RETURNS int
LANGUAGE plpgsql
-- Where somebody has locked a whole table. No statement_timeout would end what waits in a commit.
SET lock_timeout = '50ms'
AS $$
DECLARE
    v_events int := 0;
BEGIN
    -- Asking how full it is, is also what frees the notification queue of a listener that has gone:
    -- one that was full stayed so, and every send failed.
    IF pg_notification_queue_usage() >= 0.95 THEN
        RETURN 0;
    END IF;
    BEGIN
        v_events := messages._end_dead_sessions();
    EXCEPTION WHEN lock_not_available OR deadlock_detected OR insufficient_resources THEN
        RAISE DEBUG 'burying is put off: %', SQLERRM;
    END;
    BEGIN
        v_events := v_events + messages._follow_role_memberships(is_commit);
    EXCEPTION WHEN lock_not_available OR deadlock_detected OR insufficient_resources THEN
        RAISE DEBUG 'following role memberships is put off: %', SQLERRM;
    END;
    RETURN v_events;
END
$$;

COMMENT ON FUNCTION messages._run_housekeeping IS
    'Evaluate now, waiting for no lock longer than a moment: what is held is left for the next evaluation, all while the notification queue has no room for events.';


CREATE OR REPLACE FUNCTION messages._count_events()
RETURNS int
LANGUAGE plpgsql
AS $$
DECLARE
    v_events int := 0;
BEGIN
    -- The block is rolled back, which releases its locks.
    v_events := messages._run_housekeeping();
    RAISE EXCEPTION USING ERRCODE = 'transaction_rollback';
EXCEPTION WHEN transaction_rollback THEN
    RETURN v_events;
END
$$;

COMMENT ON FUNCTION messages._count_events IS
    'How many events an evaluation would send now. Changes nothing, and holds nothing.';


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
    IF messages._has_any_rule(session_user) THEN
        v_events := messages._count_events();
        PERFORM messages._schedule_housekeeping();
    END IF;
    RETURN ('{"Err":"0","Events":' || v_events || '}')::json;
END
$$;

COMMENT ON FUNCTION messages.evaluate IS
    'Evaluate changes of state when this call commits; Events: how many are to be sent then. Call it outside of transactions, every second while idle. Errors: none.';


DO $$
DECLARE
    v_function text;
    v_setting text;
BEGIN
    -- The caller's settings must not make a plan that takes long while others wait.
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

-- Burying: end the nodes of sessions that ended without deinit, and tell of it.

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
    WITH gone AS (
        DELETE FROM psqlmessages_membership AS m
        USING psqlmessages_client AS c, psqlmessages_topic AS t
        WHERE m.client_id = ANY (nodes) AND c.id = m.client_id AND t.id = m.topic_id
        RETURNING c.ident, t.id, t.name, m.kind
    ), placed AS (
        SELECT g.ident, g.name, g.kind,
               row_number() OVER (PARTITION BY g.id, g.kind ORDER BY g.ident DESC) = 1
               AND NOT EXISTS (
                   SELECT FROM psqlmessages_membership AS o
                   WHERE o.topic_id = g.id AND o.kind = g.kind AND o.client_id <> ALL (nodes)
               ) AS is_last
        FROM gone AS g
    ), by_node AS (
        SELECT p.ident,
               jsonb_agg(jsonb_build_array(p.kind, p.name, p.is_last) ORDER BY p.name, p.kind) AS left_topics
        FROM placed AS p
        GROUP BY p.ident
    )
    SELECT jsonb_object_agg(n.ident, n.left_topics) INTO v_left FROM by_node AS n;
    DELETE FROM psqlmessages_observation AS o WHERE o.client_id = ANY (nodes);
    DELETE FROM psqlmessages_client AS c WHERE c.id = ANY (nodes);
    RETURN v_left;
END
$$;

COMMENT ON FUNCTION messages._drop_nodes IS
    'Remove these nodes, whose topics are locked. Answers by ident what each listened to and sent to: [kind, topic, whether nobody is left].';


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
    v_kept int := 0;
BEGIN
    FOR v_topic IN
        SELECT l.value ->> 1
        FROM jsonb_each(left_topics) AS n
        CROSS JOIN LATERAL jsonb_array_elements(n.value) AS l
        GROUP BY 1 HAVING count(*) > 1
        ORDER BY count(*) DESC
    LOOP
        v_audience := messages._topic_audience(v_topic);
        v_kept := v_kept + cardinality(v_audience);
        -- About a megabyte.
        EXIT WHEN v_kept > 100000;
        v_topics := array_append(v_topics, v_topic);
        v_audiences := array_append(v_audiences, v_audience::text);
    END LOOP;
    RETURN jsonb_object(v_topics, v_audiences);
END
$$;

COMMENT ON FUNCTION messages._shared_audiences IS
    'The audiences of the topics that were left more than once, as arrays in text by topic: those left most, as many as have room.';


CREATE OR REPLACE FUNCTION messages._send_left_events(
    ident text,
    left_topics jsonb,
    audiences jsonb
)
RETURNS int
LANGUAGE plpgsql
AS $$
DECLARE
    v_topic jsonb;
    v_audience bigint[];
    v_events int := 0;
BEGIN
    FOR v_topic IN SELECT e.value FROM jsonb_array_elements(left_topics) AS e LOOP
        v_audience := coalesce(
            (audiences ->> (v_topic ->> 1))::bigint[], messages._topic_audience(v_topic ->> 1)
        );
        v_events := v_events
            + messages._send_event(v_audience, 'topic_un' || (v_topic ->> 0), ident, v_topic ->> 1, ident);
        IF (v_topic ->> 2)::boolean THEN
            v_events := v_events
                + messages._send_event(v_audience, 'topic_none_' || (v_topic ->> 0), NULL, v_topic ->> 1, ident);
        END IF;
    END LOOP;
    RETURN v_events;
END
$$;

COMMENT ON FUNCTION messages._send_left_events IS
    'Tell that a node left these topics, as _drop_nodes names them; audiences: of _shared_audiences, others are looked up. Answers the number of events.';


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
    v_hearing record;
    v_last record;
    v_audience bigint[];
    v_events int := 0;
BEGIN
    FOREACH v_ident IN ARRAY idents LOOP
        -- Looked up once for all, as those of one session mostly share their topics, and often their
        -- rules; again where rules have changed meanwhile.
        IF v_version IS DISTINCT FROM (SELECT r.version FROM messages._rules AS r) THEN
            SELECT r.version INTO v_version FROM messages._rules AS r;
            v_audiences := messages._shared_audiences(left_topics);
            v_audience := NULL;
        END IF;
        v_events := v_events + messages._send_left_events(v_ident, left_topics -> v_ident, v_audiences);
        SELECT h.* INTO v_hearing FROM messages._event_audience_key(v_ident, '{}') AS h;
        IF v_audience IS NULL OR v_hearing IS DISTINCT FROM v_last THEN
            v_audience := messages._audience(v_hearing.topics, v_hearing.nodes, v_hearing.rules);
            v_last := v_hearing;
        END IF;
        v_events := v_events + messages._send_event(v_audience, 'crash', v_ident, NULL, v_ident);
    END LOOP;
    RETURN v_events;
END
$$;

COMMENT ON FUNCTION messages._send_crash_events IS
    'Tell that these nodes crashed, which are removed, and what each left, as _drop_nodes answers; answers the number of events.';


CREATE OR REPLACE FUNCTION messages._end_dead_session(
    session int
)
RETURNS int
LANGUAGE plpgsql
-- A plan made while few were connected is kept, and must do for thousands.
SET enable_seqscan = off
SET jit = off
AS $$
DECLARE
    v_nodes bigint[];
    v_idents text[];
    v_topics bigint[];
    v_left jsonb;
    v_events int := 0;
BEGIN
    PERFORM FROM psqlmessages_session AS s WHERE s.id = session FOR UPDATE;
    SELECT array_agg(c.id), array_agg(c.ident::text) INTO v_nodes, v_idents
    FROM (
        SELECT n.id, n.ident FROM psqlmessages_client AS n
        WHERE n.session_id = session ORDER BY n.ident FOR UPDATE
    ) AS c;
    IF v_nodes IS NOT NULL THEN
        v_topics := messages._topics_of(v_nodes);
        PERFORM messages._lock_topics(v_topics);
        -- All are gone before the first event: the dead are not told of each other, one by one.
        v_left := messages._drop_nodes(v_nodes);
        PERFORM messages._rebuild_topics(v_topics);
        v_events := messages._send_crash_events(v_idents, v_left);
    END IF;
    DELETE FROM psqlmessages_session AS s WHERE s.id = session;
    RETURN v_events;
END
$$;

COMMENT ON FUNCTION messages._end_dead_session IS
    'End every node of a dead session with its events; answers their number. Does nothing where another has done it.';


CREATE OR REPLACE FUNCTION messages._can_end(
    nodes bigint[]
)
RETURNS boolean
LANGUAGE plpgsql
-- A plan made while few were connected is kept, and must do for thousands.
SET enable_seqscan = off
SET jit = off
AS $$
DECLARE
    v_topics bigint[];
    v_locked bigint;
BEGIN
    WITH locked AS (
        SELECT c.id FROM psqlmessages_client AS c
        WHERE c.id = ANY (nodes) FOR UPDATE SKIP LOCKED
    )
    SELECT count(*) INTO v_locked FROM locked;
    IF v_locked < cardinality(nodes) THEN
        RETURN false;
    END IF;
    -- A change of rules that is not committed may have written these.
    WITH locked AS (
        SELECT m.id FROM psqlmessages_membership AS m
        WHERE m.client_id = ANY (nodes) FOR UPDATE SKIP LOCKED
    )
    SELECT count(*) INTO v_locked FROM locked;
    IF v_locked < (SELECT count(*) FROM psqlmessages_membership AS m WHERE m.client_id = ANY (nodes)) THEN
        RETURN false;
    END IF;
    v_topics := messages._topics_of(nodes);
    WITH locked AS (
        SELECT t.id FROM psqlmessages_topic AS t
        WHERE t.id = ANY (v_topics) FOR NO KEY UPDATE SKIP LOCKED
    )
    SELECT count(*) INTO v_locked FROM locked;
    RETURN v_locked = cardinality(v_topics);
END
$$;

COMMENT ON FUNCTION messages._can_end IS
    'Take the rows of these nodes, of their memberships and of all their topics, without waiting; false where one is held.';


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
        IF messages._can_end(v_nodes) THEN
            v_events := v_events + messages._end_dead_session(v_session);
        END IF;
    END LOOP;
    RETURN v_events;
END
$$;

COMMENT ON FUNCTION messages._end_dead_sessions IS
    'End the dead sessions of which nobody holds a part.';
