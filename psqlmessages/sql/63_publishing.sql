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
    SELECT s.id, s.retention, s.wakes, s.subscribers INTO v_topic FROM messages._stream_of(topic) AS s;
    IF v_topic.retention > 0 OR v_topic.subscribers > 0 THEN
        PERFORM messages._store(v_topic.id, sender, payloads, enc);
        PERFORM messages._wake(topic, v_topic.wakes);
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
    topic text,
    enc text,
    size bigint
)
RETURNS json
LANGUAGE plpgsql
AS $$
BEGIN
    RETURN coalesce(
        messages._client_fault(ident, topic),
        messages._topic_fault(session_user, ident, topic, 'W', true),
        messages._content_fault(NULL, enc, size)
    );
END
$$;

COMMENT ON FUNCTION messages._publishing_fault IS
    'Why this role may not publish this as that node, or null.';


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
    enc text,
    largest int
)
RETURNS json
LANGUAGE plpgsql
AS $$
DECLARE
    v_fault json;
    v_topic record;
    v_id bigint;
BEGIN
    IF length(client_id) > 100 OR length(topic) > 100 THEN
        RETURN messages._error(54);
    END IF;
    SELECT r.can_write, r.timeout, s.* INTO v_topic
    FROM messages._rights(session_user, client_id, 'Topic', topic) AS r
    LEFT JOIN messages._stream_of(topic) AS s ON true;
    IF v_topic.can_write IS NOT TRUE OR largest > 8192 OR enc NOT IN ('b64', 'json')
        OR client_id = '' OR topic = '' OR right(client_id, 1) = '*' OR right(topic, 1) = '*'
    THEN
        -- Not so in most calls, and looking costs half as much as all the rest.
        v_fault := messages._publishing_fault(client_id, topic, enc, largest);
        IF v_fault IS NOT NULL THEN
            RETURN v_fault;
        ELSIF v_topic.can_write IS NOT TRUE THEN
            -- The rule came this moment, after the first look.
            RETURN messages._error(2, 'Topic', topic);
        END IF;
    END IF;
    IF v_topic.is_made_by_publish IS NOT FALSE THEN
        IF NOT messages._hold_topic(client_id, topic) THEN
            RETURN messages._error(2, 'Topic', topic);
        END IF;
        SELECT v_topic.can_write, v_topic.timeout, s.* INTO v_topic FROM messages._stream_of(topic) AS s;
    END IF;
    v_id := messages._store(v_topic.id, client_id, payloads, enc);
    IF v_topic.channels <> '{}' THEN
        PERFORM messages._notify_all(
            v_topic.id, v_topic.timeout,
            messages._topic_header(
                ',"To":' || to_json(topic) || ',"From":' || to_json(client_id),
                v_topic.id, NULL, v_topic.timeout, NULL, enc
            ),
            v_topic.channels, payloads, largest
        );
    END IF;
    IF v_topic.wakes <> '{}' THEN
        PERFORM messages._wake(topic, v_topic.wakes);
    END IF;
    IF current_setting('messages.evaluated', true)
            IS DISTINCT FROM extract(epoch FROM clock_timestamp())::bigint::text
        OR current_setting('client_min_messages') ^@ 'debug'
    THEN
        PERFORM messages._log_command(command, client_id, topic);
        PERFORM messages._evaluate_if_due();
    END IF;
    RETURN (
        '{"Err":"0","Id":' || coalesce(v_id::text, 'null') || ',"Listeners":' || v_topic.listeners
        || ',"Subscribers":' || v_topic.subscribers || '}'
    )::json;
END
$$;

COMMENT ON FUNCTION messages._publish IS
    'Store and send any number of payloads, the largest of so many bytes, or say why not. Id: of the last.';


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
BEGIN
    RETURN messages._publish('publish', client_id, topic, ARRAY[payload], enc, octet_length(payload));
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
    RETURN messages._publish(
        'publish_many', client_id, topic, coalesce(payloads, '{}'), enc,
        (SELECT max(octet_length(p.payload)) FROM unnest(payloads) AS p (payload))
    );
END
$$;

COMMENT ON FUNCTION messages.publish_many IS
    'Publish many messages in one call, checked once. Id: of the last. On an error nothing is stored. Errors: 54, 1, 15, 16, 9, 2, 3, 55, 51.';
