-- Events: system messages, each sent once to every session with a node that may hear of it.

-- Ids of messages and events. CACHE saves most sends the WAL record of a drawn number.
CREATE SEQUENCE IF NOT EXISTS messages._message_id CACHE 100;


CREATE OR REPLACE FUNCTION messages._send_event(
    audience bigint[],
    evt text,
    ident text,
    topic text,
    skip text
)
RETURNS int
LANGUAGE plpgsql
-- A plan made while few were connected is kept, and must do for thousands.
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
        -- One look-up for each session, forced by LIMIT: a plan made for a few nodes compares thousands
        -- with each other, one made for thousands reads whole tables for a few.
        SELECT t.session_id, s.channel, t.told, t.is_subject_told,
               EXISTS (
                   SELECT FROM psqlmessages_client AS n WHERE n.session_id = t.session_id OFFSET 1
               ) AS has_others
        FROM (
            SELECT c.session_id, count(*) AS told, bool_or(c.ident = _send_event.ident) AS is_subject_told
            FROM psqlmessages_client AS c
            WHERE c.id = ANY (audience) AND c.ident IS DISTINCT FROM skip
            GROUP BY c.session_id
        ) AS t
        CROSS JOIN LATERAL (
            SELECT e.channel FROM psqlmessages_session AS e WHERE e.id = t.session_id LIMIT 1
        ) AS s
    LOOP
        v_nodes := '';
        IF v_session.has_others AND v_session.told <= 20 THEN
            v_nodes := ',"Nodes":' || to_json(ARRAY(
                SELECT c.ident FROM psqlmessages_client AS c
                WHERE c.id = ANY (audience) AND c.session_id = v_session.session_id
                  AND c.ident IS DISTINCT FROM skip
                ORDER BY c.ident
            ));
            IF octet_length(v_event) + octet_length(v_nodes) > 7960 THEN
                v_nodes := '';
            END IF;
        END IF;
        IF v_session.has_others AND v_nodes = '' AND v_session.is_subject_told THEN
            -- audience() leaves out the node an event is about: it is told by itself.
            PERFORM pg_notify(
                v_session.channel,
                v_event || ',"Nodes":' || to_json(ARRAY[ident]) || ',"Id":' || nextval('messages._message_id') || '}'
            );
        END IF;
        -- PostgreSQL drops the second of two equal notifications of a transaction: the Id makes them differ.
        PERFORM pg_notify(v_session.channel, v_event || v_nodes || ',"Id":' || nextval('messages._message_id') || '}');
    END LOOP;
    RETURN 1;
END
$$;

COMMENT ON FUNCTION messages._send_event IS
    'Send one event to the sessions of these nodes. skip: the node that is not told, because it caused the event.';


CREATE OR REPLACE FUNCTION messages._send_node_event(
    evt text,
    ident text,
    told boolean,
    former psqlmessages_auth[] DEFAULT '{}'
)
RETURNS int
LANGUAGE sql
AS $$
    SELECT messages._send_event(
        messages._node_audience(ident, former)
            || ARRAY(SELECT c.id FROM psqlmessages_client AS c WHERE c.ident = _send_node_event.ident AND told),
        evt, ident, NULL, CASE WHEN NOT told THEN ident END
    )
$$;

COMMENT ON FUNCTION messages._send_node_event IS
    'Send an event about a node. told: whether that node hears of it itself.';


CREATE OR REPLACE FUNCTION messages._send_topic_event(
    evt text,
    ident text,
    topic text,
    skip text,
    told text DEFAULT NULL
)
RETURNS int
LANGUAGE sql
AS $$
    SELECT messages._send_event(
        messages._topic_audience(topic)
            || ARRAY(SELECT c.id FROM psqlmessages_client AS c WHERE c.ident = told),
        evt, ident, topic, skip
    )
$$;

COMMENT ON FUNCTION messages._send_topic_event IS
    'Send an event about a topic. skip: the node that is not told; told: a node that is, even without a rule.';


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
    v_nodes text[];
BEGIN
    PERFORM messages._log_command('audience');
    SELECT * INTO v_node FROM messages._acting();
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
    v_nodes := ARRAY(
        SELECT c.ident FROM psqlmessages_client AS c
        WHERE c.session_id = v_node.session_id AND c.id = ANY (v_audience)
          AND (c.ident <> v_ident OR v_ident IS NULL)
        ORDER BY c.ident
    );
    RETURN ('{"Err":"0","Nodes":' || to_json(v_nodes) || '}')::json;
END
$$;

COMMENT ON FUNCTION messages.audience IS
    'Which nodes of this session may hear of this event (the payload received). For gateways with many nodes. Errors: 50, 52.';
