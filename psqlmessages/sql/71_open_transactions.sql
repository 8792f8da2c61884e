-- Open transactions that hold locks, for the administrator.

CREATE OR REPLACE FUNCTION messages._open_transactions()
RETURNS TABLE (
    pid int,
    transaction text,
    prepared text,
    role text,
    program text,
    state text,
    began_at timestamp with time zone,
    query text,
    waiting int
)
LANGUAGE sql
STABLE
AS $$
    WITH holders AS (
        -- Reading takes ACCESS SHARE locks, which do not block changes of rows.
        SELECT DISTINCT l.pid, l.virtualtransaction
        FROM pg_catalog.pg_locks AS l
        JOIN pg_catalog.pg_class AS c ON c.oid = l.relation AND c.relkind IN ('r', 'p')
        WHERE l.locktype = 'relation' AND l.granted AND l.mode <> 'AccessShareLock'
          AND l.database = (SELECT d.oid FROM pg_catalog.pg_database AS d WHERE d.datname = current_database())
          AND (c.relnamespace = 'messages'::regnamespace OR starts_with(c.relname, 'psqlmessages_'))
          AND l.pid IS DISTINCT FROM pg_backend_pid()
    ), waiting AS (
        SELECT DISTINCT l.pid, pg_blocking_pids(l.pid) AS blocking
        FROM pg_catalog.pg_locks AS l WHERE NOT l.granted
    )
    SELECT h.pid, h.virtualtransaction, p.gid, coalesce(a.usename, p.owner)::text, a.application_name, a.state,
           coalesce(a.xact_start, p.prepared), left(a.query, 200),
           -- A prepared transaction has no process; pg_blocking_pids shows 0 for it.
           (SELECT count(*) FROM waiting AS w WHERE coalesce(h.pid, 0) = ANY (w.blocking))::int
    FROM holders AS h
    LEFT JOIN pg_catalog.pg_stat_activity AS a ON a.pid = h.pid
    LEFT JOIN pg_catalog.pg_prepared_xacts AS p
        -- The locks of a prepared transaction have no pid. One of them is on its transaction id.
        ON h.pid IS NULL AND EXISTS (
            SELECT FROM pg_catalog.pg_locks AS x
            WHERE x.locktype = 'transactionid' AND x.transactionid = p.transaction AND x.pid IS NULL
              AND x.virtualtransaction = h.virtualtransaction
        )
    ORDER BY coalesce(a.xact_start, p.prepared), h.pid
$$;

COMMENT ON FUNCTION messages._open_transactions IS
    'The transactions in this database that hold locks on our tables, oldest first. pid: null for a prepared transaction; transaction: the virtual transaction id; prepared: the name for ROLLBACK PREPARED, or null; waiting: the number of processes that wait for the transaction. PostgreSQL shows state, began_at and query only to members of its role or of pg_read_all_stats.';


CREATE OR REPLACE FUNCTION messages._terminate(
    pid int,
    transaction text
)
RETURNS boolean
LANGUAGE plpgsql
AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM messages._open_transactions() AS o WHERE o.pid = $1 AND o.transaction = $2) THEN
        RETURN false;
    END IF;
    RETURN pg_terminate_backend(pid);
EXCEPTION WHEN insufficient_privilege THEN
    RAISE EXCEPTION 'role % may not end the connection with pid %', current_user, pid
        USING ERRCODE = 'insufficient_privilege',
            HINT = format(
                'Allow it with GRANT pg_signal_backend TO %I, or end it as a superuser: SELECT pg_terminate_backend(%s).',
                current_user, pid
            );
END
$$;

COMMENT ON FUNCTION messages._terminate IS
    'For the administrator: end the connection that runs this transaction; false if the transaction has ended.';
