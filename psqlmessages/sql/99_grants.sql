-- Settings of SECURITY DEFINER functions, and grants: public functions and views for all roles, all else for the owner.

-- Any role may switch these settings on, and PostgreSQL would then show the client channels, and plans with the values
-- of variables. So switch them off in each function. Not every version of PostgreSQL has all of them.
DO $$
DECLARE
    v_alter text;
BEGIN
    FOR v_alter IN
        SELECT format('ALTER FUNCTION %s %s', p.oid::regprocedure, s.settings)
        FROM pg_catalog.pg_proc AS p
        CROSS JOIN (
            SELECT string_agg(format('SET %I = off', g.name), ' ') AS settings
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
    messages.topic_send(text, text, text, text),
    messages.topic_send(text, jsonb, text),
    messages.topic_send_as(text, text, text, text, text),
    messages.topic_send_as(text, text, jsonb, text),
    messages.publish(text, text, text, text),
    messages.publish(text, text, jsonb),
    messages.rpc(text, text, text, text),
    messages.rpc(text, text, jsonb),
    messages.rpc_many,
    messages.return(text, text, text, text),
    messages.return(text, text, jsonb),
    messages.return_many,
    messages.push(text, text, text, text, text, timestamptz, float8, int, text),
    messages.push(text, text, jsonb, jsonb, interval, timestamptz, float8, int, text),
    messages.push(text, text, text, interval, text, timestamptz, float8, int, text, text),
    messages.reserve(text, text, int, float8),
    messages.reserve(text, text, int, interval),
    messages.renew(text, text, float8, text[]),
    messages.renew(text, text, interval, text[]),
    messages.rollback(text, float8, text[]),
    messages.rollback(text, text),
    messages.init, messages.deinit, messages.crash, messages.use,
    messages.topic_auth, messages.topic_status, messages.topic_status_as,
    messages.topic_notify, messages.topic_unnotify, messages.topic_listen, messages.topic_unlisten,
    messages.topic_observe, messages.topic_unobserve,
    messages.topic_send_many,
    messages.connect_stream, messages.publish_many,
    messages.subscribe, messages.unsubscribe, messages.subscription,
    messages.stream_horizons, messages.subscribe_from, messages.read_stream,
    messages.push_many, messages.pop,
    messages.commit, messages.release,
    messages.remove, messages.pause, messages.resume, messages.drain, messages.sizes, messages.peek, messages.queue_listen,
    messages.configure_queue, messages.remove_queue, messages.remove_elements, messages.move_elements,
    messages.take, messages.deliver,
    messages.publish_staged, messages.push_staged, messages.unstage,
    messages.list_topics, messages.list_streams, messages.list_subscriptions, messages.list_subscribers,
    messages.list_stored, messages.list_queues, messages.list_queued,
    messages.get_data, messages.return_error,
    messages.audience, messages.evaluate
TO PUBLIC;
