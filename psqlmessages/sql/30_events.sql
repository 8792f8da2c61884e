-- System events: messages about nodes and topics. Each is sent once to every session that has a node in its audience.

-- Ids of messages and events. Thanks to CACHE, most sends write no WAL record for nextval.
CREATE SEQUENCE IF NOT EXISTS messages._message_id CACHE 100;


CREATE OR REPLACE FUNCTION messages._send_event(
    audience bigint[],
    evt text,
    ident text,
    topic text,
    excluded_node text
)
RETURNS int
LANGUAGE plpgsql
SET enable_seqscan = off
SET jit = off
AS $$
DECLARE
    v_event text := '{"Type":"Sys","Evt":' || to_json(evt)
        || coalesce(',"Ident":' || to_json(ident), '') || coalesce(',"Topic":' || to_json(topic), '');
    v_session record;
    v_nodes text;
BEGIN
    IF current_setting('client_min_messages') IN ('debug2', 'debug3', 'debug4', 'debug5') THEN
        RAISE DEBUG 'Messages event: %', concat_ws(' ', evt, ident, topic);
    END IF;
    FOR v_session IN
        -- LIMIT forces one lookup per session. Without it, a plan made for a few nodes compares thousands with each
        -- other, and one made for thousands reads whole tables for a few.
        SELECT t.session_id, s.channel, t.recipients, t.has_subject,
               EXISTS (
                   SELECT FROM psqlmessages_client AS n WHERE n.session_id = t.session_id OFFSET 1
               ) AS has_others
        FROM (
            SELECT c.session_id, count(*) AS recipients, bool_or(c.ident = _send_event.ident) AS has_subject
            FROM psqlmessages_client AS c
            WHERE c.id = ANY (audience) AND c.ident IS DISTINCT FROM excluded_node
            GROUP BY c.session_id
        ) AS t
        CROSS JOIN LATERAL (
            SELECT e.channel FROM psqlmessages_session AS e WHERE e.id = t.session_id LIMIT 1
        ) AS s
    LOOP
        v_nodes := '';
        IF v_session.has_others AND v_session.recipients <= 20 THEN
            v_nodes := ',"Nodes":' || to_json(ARRAY(
                SELECT c.ident FROM psqlmessages_client AS c
                WHERE c.id = ANY (audience) AND c.session_id = v_session.session_id
                  AND c.ident IS DISTINCT FROM excluded_node
                ORDER BY c.ident
            ));
            IF octet_length(v_event) + octet_length(v_nodes) > 7960 THEN
                v_nodes := '';
            END IF;
        END IF;
        IF v_session.has_others AND v_nodes = '' AND v_session.has_subject THEN
            -- Without Nodes the client calls audience(), which does not list the event's subject: notify it separately.
            PERFORM pg_notify(
                v_session.channel,
                v_event || ',"Nodes":' || to_json(ARRAY[ident]) || ',"Id":' || nextval('messages._message_id') || '}'
            );
        END IF;
        -- Of equal notifications in a transaction, PostgreSQL delivers only one: the Id makes them differ.
        PERFORM pg_notify(v_session.channel, v_event || v_nodes || ',"Id":' || nextval('messages._message_id') || '}');
    END LOOP;
    RETURN 1;
END
$$;

COMMENT ON FUNCTION messages._send_event IS
    'Send one event to the sessions of these nodes. excluded_node: the node that caused the event and does not receive it. Returns 1, the number of events, for callers that add up.';


CREATE OR REPLACE FUNCTION messages._send_node_event(
    evt text,
    ident text,
    includes_node boolean,
    former psqlmessages_auth[] DEFAULT '{}'
)
RETURNS int
LANGUAGE sql
AS $$
    SELECT messages._send_event(
        messages._node_audience(ident, former)
            || ARRAY(
                SELECT c.id FROM psqlmessages_client AS c WHERE c.ident = _send_node_event.ident AND includes_node
            ),
        evt, ident, NULL, CASE WHEN NOT includes_node THEN ident END
    )
$$;

COMMENT ON FUNCTION messages._send_node_event IS
    'Send an event about a node, and return 1. includes_node: whether the node receives it too. former: as in _event_audience_key.';


CREATE OR REPLACE FUNCTION messages._send_topic_event(
    evt text,
    ident text,
    topic text,
    excluded_node text,
    extra_node text DEFAULT NULL
)
RETURNS int
LANGUAGE sql
AS $$
    SELECT messages._send_event(
        messages._topic_audience(topic)
            || ARRAY(SELECT c.id FROM psqlmessages_client AS c WHERE c.ident = extra_node),
        evt, ident, topic, excluded_node
    )
$$;

COMMENT ON FUNCTION messages._send_topic_event IS
    'Send an event about a topic, and return 1. excluded_node: the node that does not receive it. extra_node: a node that receives it even without a rule.';


CREATE OR REPLACE FUNCTION messages.audience(
    event text
)
RETURNS json
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
DECLARE
    v_node record;
    v_event json;
    v_evt text;
    v_ident text;
    v_topic text;
    v_audience bigint[];
BEGIN
    PERFORM messages._log_command('audience');
    SELECT * INTO v_node FROM messages._acting_node();
    IF v_node.id IS NULL THEN
        RETURN messages._error(50);
    END IF;
    BEGIN
        v_event := split_part(event, E'\n', 1);
        v_evt := v_event ->> 'Evt';
        v_ident := v_event ->> 'Ident';
        v_topic := v_event ->> 'Topic';
    EXCEPTION WHEN data_exception OR program_limit_exceeded THEN
        v_evt := NULL;
    END;
    IF v_evt IS NULL OR coalesce(v_topic, v_ident) IS NULL
        OR greatest(length(v_topic), length(v_ident)) > 100
    THEN
        RETURN messages._error(52);
    ELSIF v_topic IS NOT NULL THEN
        v_audience := messages._topic_audience(v_topic);
    ELSE
        v_audience := messages._node_audience(v_ident, '{}');
    END IF;
    RETURN ('{"Err":"0","Nodes":' || to_json(ARRAY(
        SELECT c.ident FROM psqlmessages_client AS c
        WHERE c.session_id = v_node.session_id AND c.id = ANY (v_audience)
          AND (c.ident <> v_ident OR v_ident IS NULL)
        ORDER BY c.ident
    )) || '}')::json;
END
$$;

COMMENT ON FUNCTION messages.audience IS
    'List the nodes of this session that may receive an event, without its subject. event: the payload received. Nodes: their names. For gateways with many nodes. Errors: 50, 52.';
