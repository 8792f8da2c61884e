-- The public functions of subscriptions.

CREATE OR REPLACE FUNCTION messages._check_reader(
    client_id text,
    topic text,
    timeout int,
    max_rows int
)
RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    v_fault json;
BEGIN
    v_fault := messages._subscription_fault(client_id, topic, 'R');
    IF v_fault IS NULL AND coalesce(timeout, 0) <= 0 THEN
        v_fault := messages._error(60, 'timeout');
    ELSIF v_fault IS NULL AND coalesce(max_rows, 0) <= 0 THEN
        v_fault := messages._error(60, 'max_rows');
    END IF;
    IF v_fault IS NOT NULL THEN
        PERFORM messages._raise(v_fault);
    END IF;
END
$$;

COMMENT ON FUNCTION messages._check_reader IS
    'Raise where this role may not read as that node, or not like this.';


CREATE OR REPLACE FUNCTION messages.subscribe(
    client_id text,
    topic text,
    timeout int,
    max_rows int DEFAULT 1000
)
RETURNS SETOF messages.stream_rows
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
DECLARE
    v_can_read boolean;
    v_topic record;
    v_subscription psqlmessages_subscription;
BEGIN
    PERFORM messages._check_isolation('subscribe');
    PERFORM messages._log_command('subscribe', client_id, topic);
    IF length(client_id) <= 100 AND length(topic) <= 100 AND timeout > 0 AND max_rows > 0 THEN
        SELECT r.can_read INTO v_can_read FROM messages._rights(session_user, client_id, 'Topic', topic) AS r;
    END IF;
    IF v_can_read IS NOT TRUE THEN
        PERFORM messages._check_reader(client_id, topic, timeout, max_rows);
    END IF;
    -- Before any snapshot that reads: what a truncation moved is then seen where it went.
    LOCK TABLE psqlmessages_streammessage IN ACCESS SHARE MODE;
    SELECT * INTO v_subscription FROM psqlmessages_subscription AS s
    WHERE s.ident = client_id AND s.topic = subscribe.topic FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        -- There is none, or another connection has it, for as long as it likes: the right may go meanwhile.
        SELECT * INTO v_subscription FROM psqlmessages_subscription AS s
        WHERE s.ident = client_id AND s.topic = subscribe.topic FOR UPDATE;
        PERFORM messages._check_reader(client_id, topic, timeout, max_rows);
    END IF;
    SELECT t.id, t.wakes INTO v_topic FROM psqlmessages_topic AS t WHERE t.name = topic;
    IF FOUND AND messages._is_alive(v_subscription) THEN
        RETURN QUERY SELECT * FROM messages._read(v_subscription, v_topic.id, timeout, max_rows);
        PERFORM messages._see_to_wakes(client_id, v_topic.id, v_topic.wakes);
    ELSE
        PERFORM messages._check_reader(client_id, topic, timeout, max_rows);
        PERFORM messages._start_subscription(client_id, topic, timeout);
    END IF;
    PERFORM messages._evaluate_if_due();
END
$$;

COMMENT ON FUNCTION messages.subscribe IS
    'The first call subscribes from now on, for timeout seconds after each call; each further call returns what came since, oldest first, and moves on in this transaction. Errors: 54, 1, 15, 16, 9, 2, 3, 60.';


CREATE OR REPLACE FUNCTION messages.unsubscribe(
    client_id text,
    topic text
)
RETURNS json
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
DECLARE
    v_fault json;
    v_topic bigint;
BEGIN
    PERFORM messages._log_command('unsubscribe', client_id, topic);
    v_fault := messages._subscription_fault(client_id, topic, '');
    IF v_fault IS NOT NULL THEN
        RETURN v_fault;
    END IF;
    DELETE FROM psqlmessages_subscription AS s WHERE s.ident = client_id AND s.topic = unsubscribe.topic;
    IF NOT FOUND THEN
        RETURN '{"Err":"0","Already":1}';
    END IF;
    PERFORM messages._share_gate();
    SELECT t.id INTO v_topic FROM psqlmessages_topic AS t WHERE t.name = topic FOR NO KEY UPDATE;
    PERFORM messages._rebuild_topics(ARRAY[v_topic]);
    PERFORM messages._evaluate_if_due();
    RETURN '{"Err":"0"}';
END
$$;

COMMENT ON FUNCTION messages.unsubscribe IS
    'End a subscription; nothing is kept for it any more. Already: 1 where there was none. Errors: 54, 1, 15, 16, 9, 2.';


CREATE OR REPLACE FUNCTION messages.subscription(
    client_id text,
    topic text
)
RETURNS json
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
DECLARE
    v_fault json;
    v_topic psqlmessages_topic;
    v_subscription psqlmessages_subscription;
    v_is_alive boolean;
    v_backlog bigint := 0;
BEGIN
    PERFORM messages._log_command('subscription', client_id, topic);
    v_fault := messages._subscription_fault(client_id, topic, 'R');
    IF v_fault IS NOT NULL THEN
        RETURN v_fault;
    END IF;
    -- As in subscribe: _has_all reads with the snapshot of the statement that calls it.
    LOCK TABLE psqlmessages_streammessage IN ACCESS SHARE MODE;
    SELECT * INTO v_topic FROM psqlmessages_topic AS t WHERE t.name = topic;
    SELECT * INTO v_subscription FROM psqlmessages_subscription AS s
    WHERE s.ident = client_id AND s.topic = subscription.topic;
    IF v_subscription.id IS NULL THEN
        RETURN messages._error(61, client_id, topic);
    END IF;
    v_is_alive := messages._is_alive(v_subscription);
    IF v_is_alive THEN
        SELECT count(*) INTO v_backlog FROM psqlmessages_streammessage AS m
        WHERE m.topic_id = v_topic.id AND m.id > v_subscription.position;
    END IF;
    RETURN (
        '{"Err":"0","Recovered":' || to_json(
            CASE
                WHEN v_is_alive THEN v_subscription.is_recovered
                ELSE messages._has_all(v_topic.id, v_subscription)
            END
        )
        || ',"Since":' || to_json(v_subscription.started_at)
        || ',"Backlog":' || v_backlog
        || ',"Expires":' || to_json(v_subscription.pinged_at + make_interval(secs => v_subscription.timeout))
        || '}'
    )::json;
END
$$;

COMMENT ON FUNCTION messages.subscription IS
    'The state of a subscription. Recovered: false where it timed out and messages were missed; Since: when it began, or began anew; Backlog: messages that wait; Expires: when, if nobody calls subscribe. Errors: 54, 1, 15, 16, 9, 2, 3, 61.';


CREATE OR REPLACE FUNCTION messages.connect_stream(
    client_id text
)
RETURNS json
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
DECLARE
    v_answer json := messages.init(client_id);
    v_topics text[];
BEGIN
    IF v_answer ->> 'Err' <> '0' THEN
        RETURN v_answer;
    END IF;
    -- It is back in time, so from now on nothing has been missed. A reader in a transaction is not waited for.
    UPDATE psqlmessages_subscription AS s SET is_recovered = true
    WHERE s.id IN (
        SELECT r.id FROM psqlmessages_subscription AS r
        WHERE r.ident = client_id AND NOT r.is_recovered AND messages._is_alive(r)
          AND (SELECT t.can_read FROM messages._rights(session_user, client_id, 'Topic', r.topic) AS t)
        FOR NO KEY UPDATE SKIP LOCKED
    );
    v_topics := ARRAY(
        SELECT s.topic::text FROM psqlmessages_subscription AS s
        WHERE s.ident = client_id AND messages._is_alive(s)
          AND (SELECT t.can_read FROM messages._rights(session_user, client_id, 'Topic', s.topic) AS t)
        ORDER BY s.topic
    );
    RETURN (
        left(v_answer::text, -1) || ',"Subscriptions":' || to_json(v_topics) || '}'
    )::json;
END
$$;

COMMENT ON FUNCTION messages.connect_stream IS
    'Register a node as init does, to be woken when there is something to read. Subscriptions: the topics of those that are alive and that this role may read. Errors: 54, 4, 5, 7, 8; 6 as a warning.';
