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


CREATE OR REPLACE FUNCTION messages._tell_left(
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
            + messages._emit(v_audience, 'topic_un' || (v_topic ->> 0), ident, v_topic ->> 1, ident);
        IF (v_topic ->> 2)::boolean THEN
            v_events := v_events
                + messages._emit(v_audience, 'topic_none_' || (v_topic ->> 0), NULL, v_topic ->> 1, ident);
        END IF;
    END LOOP;
    RETURN v_events;
END
$$;

COMMENT ON FUNCTION messages._tell_left IS
    'Tell that a node left these topics, as _drop_nodes names them; audiences: of _shared_audiences, others are looked up. Answers the number of events.';


CREATE OR REPLACE FUNCTION messages._tell_dead(
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
        v_events := v_events + messages._tell_left(v_ident, left_topics -> v_ident, v_audiences);
        SELECT h.* INTO v_hearing FROM messages._hearing_of(v_ident, '{}') AS h;
        IF v_audience IS NULL OR v_hearing IS DISTINCT FROM v_last THEN
            v_audience := messages._audience(v_hearing.topics, v_hearing.nodes, v_hearing.rules);
            v_last := v_hearing;
        END IF;
        v_events := v_events + messages._emit(v_audience, 'crash', v_ident, NULL, v_ident);
    END LOOP;
    RETURN v_events;
END
$$;

COMMENT ON FUNCTION messages._tell_dead IS
    'Tell that these nodes crashed, which are removed, and what each left, as _drop_nodes answers; answers the number of events.';


CREATE OR REPLACE FUNCTION messages._bury(
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
        v_events := messages._tell_dead(v_idents, v_left);
    END IF;
    DELETE FROM psqlmessages_session AS s WHERE s.id = session;
    RETURN v_events;
END
$$;

COMMENT ON FUNCTION messages._bury IS
    'End every node of a dead session with its events; answers their number. Does nothing where another has done it.';


CREATE OR REPLACE FUNCTION messages._can_bury(
    session int
)
RETURNS boolean
LANGUAGE plpgsql
AS $$
DECLARE
    v_nodes bigint[];
BEGIN
    PERFORM FROM psqlmessages_session AS s WHERE s.id = session FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    v_nodes := ARRAY(SELECT c.id FROM psqlmessages_client AS c WHERE c.session_id = session);
    RETURN messages._can_end(v_nodes);
END
$$;

COMMENT ON FUNCTION messages._can_bury IS
    'Take all that burying a session locks, without waiting; false where somebody holds a part of it.';


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


CREATE OR REPLACE FUNCTION messages._bury_dead()
RETURNS int
LANGUAGE plpgsql
AS $$
DECLARE
    v_session int;
    v_events int := 0;
BEGIN
    FOR v_session IN
        SELECT s.id FROM psqlmessages_session AS s
        WHERE s.id NOT IN (SELECT messages._live_sessions())
        ORDER BY s.id
    LOOP
        IF messages._can_bury(v_session) THEN
            v_events := v_events + messages._bury(v_session);
        END IF;
    END LOOP;
    RETURN v_events;
END
$$;

COMMENT ON FUNCTION messages._bury_dead IS
    'End the dead sessions of which nobody holds a part.';
