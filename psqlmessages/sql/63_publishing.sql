-- Publishing: messages are stored first, then told to listeners and subscribers. It needs no session.

CREATE OR REPLACE FUNCTION messages._wake(
    topic text,
    wakes text[]
)
RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    v_event text := '{"Type":"Sys","Evt":"published","Topic":' || to_json(topic) || '}';
    v_channel text;
BEGIN
    -- Without an Id: of many in one transaction one arrives, which is all that is needed.
    FOREACH v_channel IN ARRAY wakes LOOP
        PERFORM pg_notify(v_channel, v_event);
    END LOOP;
END
$$;

COMMENT ON FUNCTION messages._wake IS
    'Tell connected subscribers that there is something to read.';


CREATE OR REPLACE FUNCTION messages._store_sent(
    topic text,
    sender text,
    payloads text[],
    enc text
)
RETURNS boolean
LANGUAGE plpgsql
AS $$
DECLARE
    v_topic record;
BEGIN
    SELECT * INTO v_topic FROM messages._stream_of(topic);
    IF v_topic.retention > 0 OR EXISTS (
        SELECT FROM psqlmessages_subscription AS s
        WHERE s.topic = _store_sent.topic AND s.is_alive
          AND (s.pinged_at + make_interval(secs => s.timeout) > clock_timestamp() OR messages._is_alive(s))
    ) THEN
        PERFORM messages._store(v_topic.id, v_topic.slot, v_topic.last_id, v_topic.secret, sender, payloads, enc);
        PERFORM messages._wake(topic, messages._allowed_wakes(topic, v_topic.wakes));
        RETURN true;
    END IF;
    RETURN false;
END
$$;

COMMENT ON FUNCTION messages._store_sent IS
    'Keep what topic_send sends, where a subscription or a retention wants it; false where none does any more.';


CREATE OR REPLACE FUNCTION messages._client_fault(
    ident text,
    topic text
)
RETURNS json
LANGUAGE plpgsql
AS $$
BEGIN
    IF length(ident) > 100 OR length(topic) > 100 THEN
        RETURN messages._error(54);
    ELSIF coalesce(topic, '') = '' THEN
        RETURN messages._error(1);
    ELSIF coalesce(ident, '') = '' THEN
        RETURN messages._error(15);
    ELSIF right(ident, 1) = '*' OR NOT messages._is_known(ident) THEN
        RETURN messages._error(16, ident);
    END IF;
    RETURN NULL;
END
$$;

COMMENT ON FUNCTION messages._client_fault IS
    'What is wrong with the names of a call that needs no session (errors 54, 1, 15, 16), or null.';


CREATE OR REPLACE FUNCTION messages._publishing_fault(
    ident text,
    topic text
)
RETURNS json
LANGUAGE plpgsql
AS $$
DECLARE
    v_fault json;
BEGIN
    IF length(ident) <= 100 AND length(topic) <= 100 AND ident <> '' AND topic <> ''
        AND right(ident, 1) <> '*' AND right(topic, 1) <> '*'
    THEN
        IF (SELECT r.can_write FROM messages._rights(session_user, ident, 'Topic', topic) AS r) THEN
            RETURN NULL;
        END IF;
    END IF;
    v_fault := coalesce(
        messages._client_fault(ident, topic),
        messages._topic_fault(session_user, ident, topic, 'W', true)
    );
    -- Null only where the rule came this moment, after the first look.
    RETURN coalesce(v_fault, messages._error(2, 'Topic', topic));
END
$$;

COMMENT ON FUNCTION messages._publishing_fault IS
    'Why this role may not publish as that node to that topic, be it there or not; or null.';


CREATE OR REPLACE FUNCTION messages._hold_topic(
    ident text,
    topic text
)
RETURNS boolean
LANGUAGE plpgsql
AS $$
BEGIN
    LOOP
        PERFORM FROM psqlmessages_topic AS t WHERE t.name = topic FOR KEY SHARE;
        IF FOUND THEN
            RETURN true;
        END IF;
        PERFORM messages._share_gate();
        IF messages._topic_fault(session_user, ident, topic, 'W', true) IS NOT NULL THEN
            RETURN false;
        END IF;
        PERFORM messages._make_topics(ARRAY[topic], true);
    END LOOP;
END
$$;

COMMENT ON FUNCTION messages._hold_topic IS
    'Keep a topic that comes and goes with its messages from going until the commit, and make it where it is not there; false where the rule for that went away this moment.';


CREATE OR REPLACE FUNCTION messages._publish(
    command text,
    client_id text,
    topic text,
    payloads text[],
    enc text
)
RETURNS json
LANGUAGE plpgsql
AS $$
DECLARE
    v_largest int := (SELECT max(octet_length(p.payload)) FROM unnest(payloads) AS p (payload));
    v_fault json := messages._publishing_fault(client_id, topic);
    v_topic record;
    v_timeout int;
    v_id bigint;
BEGIN
    PERFORM messages._log_command(command, client_id, topic);
    v_fault := coalesce(v_fault, messages._content_fault(NULL, enc, v_largest));
    IF v_fault IS NOT NULL THEN
        RETURN v_fault;
    END IF;
    SELECT * INTO v_topic FROM messages._stream_of(topic);
    IF v_topic.is_made_by_publish IS NOT FALSE THEN
        IF NOT messages._hold_topic(client_id, topic) THEN
            RETURN messages._error(2, 'Topic', topic);
        END IF;
        SELECT * INTO v_topic FROM messages._stream_of(topic);
    END IF;
    SELECT r.timeout INTO v_timeout FROM messages._rights(session_user, client_id, 'Topic', topic) AS r;
    IF v_timeout IS NULL THEN
        -- The last rule for it went away this moment.
        RETURN messages._error(2, 'Topic', topic);
    END IF;
    v_id := messages._store(v_topic.id, v_topic.slot, v_topic.last_id, v_topic.secret, client_id, payloads, enc);
    IF v_topic.channels <> '{}' THEN
        PERFORM messages._notify_all(
            v_topic.id, v_timeout,
            messages._topic_header(
                ',"To":' || to_json(topic) || ',"From":' || to_json(client_id), v_topic.id, NULL, v_timeout, NULL, enc
            ),
            v_topic.channels, payloads, v_largest
        );
    END IF;
    PERFORM messages._wake(topic, messages._allowed_wakes(topic, v_topic.wakes));
    PERFORM messages._evaluate_if_due();
    RETURN (
        '{"Err":"0","Id":' || coalesce(v_id::text, 'null') || ',"Listeners":' || v_topic.listeners
        || ',"Subscribers":' || v_topic.subscriptions || '}'
    )::json;
END
$$;

COMMENT ON FUNCTION messages._publish IS
    'Store and send any number of payloads, or say why not. Id: of the last.';


CREATE OR REPLACE FUNCTION messages.publish(
    client_id text,
    topic text,
    payload text,
    enc text DEFAULT NULL
)
RETURNS json
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
DECLARE
    v_topic bigint;
    v_slot smallint;
    v_last bigint;
    v_secret bytea;
    v_wakes text[];
    v_subscriptions int;
    v_is_first boolean;
    v_is_due boolean;
BEGIN
    -- The common case is decided by one statement and done without further functions: a rule names
    -- node and topic as they are, nobody listens, and the topic stays. Much is asked at once: what
    -- a function's expressions cost here is their preparation, anew in each transaction.
    SELECT t.id, m.slot, pg_sequence_last_value('messages._stream_id'), m.secret, nullif(t.wakes, '{}'),
           t.subscriptions, pg_current_xact_id_if_assigned() IS NULL, messages._is_evaluated() IS NOT TRUE
    INTO v_topic, v_slot, v_last, v_secret, v_wakes, v_subscriptions, v_is_first, v_is_due
    FROM psqlmessages_topic AS t, psqlmessages_auth AS a, messages._stream AS m
    WHERE t.name = topic AND NOT t.is_made_by_publish AND t.channels = '{}'
      AND messages._is_settled()
      AND octet_length(payload) <= 8192 AND (enc IS NULL OR enc IN ('b64', 'json'))
      AND a.ident = client_id AND a.type = 'Topic' AND a.dest = topic AND a.role = session_user
      AND a.mode IN ('W', 'RW') AND a.ident NOT LIKE '%*' AND a.dest NOT LIKE '%*';
    -- Not in the statement: in a transaction that goes on publishing, these would be prepared for nothing.
    IF (CASE WHEN v_is_first THEN messages._begin_first(v_topic, v_last, v_secret) END) IS NOT TRUE THEN
        IF messages._begin_publishing(v_topic, v_last, v_secret) IS NULL THEN
            RETURN messages._publish('publish', client_id, topic, ARRAY[payload], enc);
        END IF;
    END IF;
    INSERT INTO psqlmessages_streammessage (topic_id, id, slot, sender, published_at, enc, payload)
    VALUES (v_topic, nextval('messages._stream_id'), v_slot, client_id, clock_timestamp(), enc, payload);
    IF v_wakes IS NOT NULL THEN
        PERFORM messages._wake(topic, v_wakes);
    END IF;
    IF v_is_due THEN
        PERFORM messages._log_command('publish', client_id, topic);
        PERFORM messages._evaluate_if_due();
    END IF;
    -- Nobody listens where there are no channels.
    RETURN concat(
        '{"Err":"0","Id":', currval('messages._stream_id'), ',"Listeners":0,"Subscribers":', v_subscriptions, '}'
    )::json;
END
$$;

COMMENT ON FUNCTION messages.publish IS
    'Store a message for a topic''s subscriptions, and send it to its listeners, at commit. Needs no session; makes the topic where a pattern allows it. Errors: 54, 1, 15, 16, 9, 2, 3, 55, 51.';


CREATE OR REPLACE FUNCTION messages.publish_many(
    client_id text,
    topic text,
    payloads text[],
    enc text DEFAULT NULL
)
RETURNS json
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
BEGIN
    RETURN messages._publish('publish_many', client_id, topic, coalesce(payloads, '{}'), enc);
END
$$;

COMMENT ON FUNCTION messages.publish_many IS
    'Publish many messages in one call, checked once. Id: of the last. On an error nothing is stored. Errors: 54, 1, 15, 16, 9, 2, 3, 55, 51.';
