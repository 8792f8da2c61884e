-- Grants: the public functions and views to all, everything else to nobody but the owner.

REVOKE ALL ON ALL FUNCTIONS IN SCHEMA messages FROM PUBLIC;
REVOKE ALL ON ALL TABLES IN SCHEMA messages FROM PUBLIC;
REVOKE ALL ON ALL SEQUENCES IN SCHEMA messages FROM PUBLIC;
GRANT USAGE ON SCHEMA messages TO PUBLIC;

GRANT SELECT ON
    messages.errors, messages.topics,
    messages.stream_clients, messages.stream_topics, messages.stream_subscriptions,
    messages.queues, messages.stored, messages.queued
TO PUBLIC;

-- Whose rows they are is not for the one who writes them to say.
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
    messages.get_data, messages.rpc, messages.return, messages.return_error,
    messages.audience, messages.evaluate
TO PUBLIC;
