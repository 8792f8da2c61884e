-- Settings of SECURITY DEFINER functions, and grants: public functions and views for all roles, all else for the owner.

-- Any role may set these, and PostgreSQL would then log channels and plans with the values of variables to the client.
-- Set here for all functions at a time; a version of PostgreSQL may lack some.
DO $$
DECLARE
    v_alter text;
BEGIN
    FOR v_alter IN
        SELECT format('ALTER FUNCTION %s %s', p.oid::regprocedure, s.pins)
        FROM pg_catalog.pg_proc AS p
        CROSS JOIN (
            SELECT string_agg(format('SET %I = off', g.name), ' ') AS pins
            FROM pg_catalog.pg_settings AS g
            WHERE g.name IN (
                'trace_notify', 'trace_sort', 'debug_print_raw_parse', 'debug_print_parse', 'debug_print_rewritten',
                'debug_print_plan'
            )
        ) AS s
        WHERE p.pronamespace = 'messages'::regnamespace
          AND (p.prosecdef OR p.prorettype = 'trigger'::regtype)
    LOOP
        EXECUTE v_alter;
    END LOOP;
END
$$;

REVOKE ALL ON ALL FUNCTIONS IN SCHEMA messages FROM PUBLIC;
REVOKE ALL ON ALL TABLES IN SCHEMA messages FROM PUBLIC;
REVOKE ALL ON ALL SEQUENCES IN SCHEMA messages FROM PUBLIC;
GRANT USAGE ON SCHEMA messages TO PUBLIC;

GRANT SELECT ON
    messages.errors, messages.topics,
    messages.stream_clients, messages.stream_topics, messages.stream_subscriptions,
    messages.queues, messages.stored, messages.queued
TO PUBLIC;

-- Not the column role, so that writers cannot choose it.
GRANT INSERT (staging, place, bodies, encs, headers, keys) ON messages.staged TO PUBLIC;

GRANT EXECUTE ON FUNCTION
    messages.init, messages.deinit, messages.crash, messages.use,
    messages.topic_auth, messages.topic_status, messages.topic_status_as,
    messages.topic_notify, messages.topic_unnotify, messages.topic_listen, messages.topic_unlisten,
    messages.topic_observe, messages.topic_unobserve,
    messages.topic_send, messages.topic_send_many, messages.topic_send_as,
    messages.connect_stream, messages.publish, messages.publish_many,
    messages.subscribe, messages.unsubscribe, messages.subscription,
    messages.stream_horizons, messages.subscribe_from, messages.read_stream,
    messages.push, messages.push_many, messages.pop, messages.reserve,
    messages.commit, messages.rollback, messages.release, messages.renew,
    messages.remove, messages.pause, messages.resume, messages.drain, messages.sizes, messages.peek, messages.queue_listen,
    messages.take, messages.deliver,
    messages.publish_staged, messages.push_staged, messages.unstage,
    messages.list_topics, messages.list_streams, messages.list_subscriptions, messages.list_subscribers,
    messages.list_stored, messages.list_queues, messages.list_queued,
    messages.get_data, messages.rpc, messages.return, messages.return_error,
    messages.audience, messages.evaluate
TO PUBLIC;
