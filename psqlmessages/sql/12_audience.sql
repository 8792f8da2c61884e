-- Audiences: which connected nodes may hear of an event.

CREATE OR REPLACE FUNCTION messages._clients_of(
    rules bigint[]
)
RETURNS bigint[]
LANGUAGE plpgsql
STABLE
-- A plan made while few were connected is kept, and must do for thousands.
SET enable_seqscan = off
SET jit = off
AS $$
BEGIN
    RETURN ARRAY(
        SELECT DISTINCT c.id
        FROM psqlmessages_auth AS a
        CROSS JOIN LATERAL messages._names_like(a.ident) AS n
        -- A range of the index for each rule, forced by OFFSET: a plan made for few compares each node
        -- with each rule.
        CROSS JOIN LATERAL (
            SELECT m.id, m.role FROM psqlmessages_client AS m
            WHERE m.ident BETWEEN n.low AND n.high AND starts_with(m.ident, n.low) OFFSET 0
        ) AS c
        WHERE a.id = ANY (rules) AND (a.role = c.role OR messages._is_member(c.role, a.role))
    );
END
$$;

COMMENT ON FUNCTION messages._clients_of IS
    'The connected nodes that these rules are about.';


CREATE OR REPLACE FUNCTION messages._topic_audience(
    topic text
)
RETURNS bigint[]
LANGUAGE sql
STABLE
SET enable_seqscan = off
SET jit = off
AS $$
    SELECT messages._clients_of(ARRAY(
        SELECT a.id FROM psqlmessages_auth AS a
        WHERE a.type = 'Topic' AND a.dest = ANY (messages._patterns(topic))
    ))
$$;

COMMENT ON FUNCTION messages._topic_audience IS
    'The connected nodes with any rule for this topic.';


CREATE OR REPLACE FUNCTION messages._hearing_of(
    ident text,
    former psqlmessages_auth[],
    OUT topics text[],
    OUT nodes text[],
    OUT rules bigint[]
)
LANGUAGE plpgsql
STABLE
SET enable_seqscan = off
SET jit = off
AS $$
DECLARE
    v_patterns text[] := messages._patterns(ident);
BEGIN
    SELECT array_agg(DISTINCT r.dest) FILTER (WHERE r.type = 'Topic'),
           array_agg(DISTINCT r.dest) FILTER (WHERE r.type = 'Rpc')
    INTO topics, nodes
    FROM (
        SELECT a.type, a.dest FROM psqlmessages_auth AS a WHERE a.ident = ANY (v_patterns)
        UNION ALL
        SELECT f.type, f.dest FROM unnest(former) AS f WHERE f.ident = ANY (v_patterns)
    ) AS r;
    rules := ARRAY(
        SELECT a.id FROM psqlmessages_auth AS a
        WHERE a.type = 'Rpc' AND a.dest = ANY (v_patterns) ORDER BY a.id
    );
END
$$;

COMMENT ON FUNCTION messages._hearing_of IS
    'What decides who hears of a node; where it is equal, the audience is: topics and nodes that its rules name, null where none, and the Rpc rules that name it. former: rules just removed, still counted.';


CREATE OR REPLACE FUNCTION messages._audience(
    topics text[],
    nodes text[],
    rules bigint[]
)
RETURNS bigint[]
LANGUAGE plpgsql
STABLE
-- A plan made while few were connected is kept, and must do for thousands.
SET enable_seqscan = off
SET jit = off
AS $$
DECLARE
    v_rules bigint[] := rules;
    v_audience bigint[];
BEGIN
    IF topics IS NOT NULL THEN
        v_rules := v_rules || ARRAY(
            SELECT a.id
            FROM unnest(topics) AS d (dest)
            CROSS JOIN unnest(messages._patterns(d.dest)) AS p (pattern)
            JOIN psqlmessages_auth AS a ON a.type = 'Topic' AND a.dest = p.pattern
            UNION
            SELECT a.id
            FROM unnest(topics) AS d (dest)
            CROSS JOIN LATERAL messages._names_like(d.dest) AS n
            CROSS JOIN LATERAL (
                SELECT r.id FROM psqlmessages_auth AS r
                WHERE r.type = 'Topic' AND r.dest BETWEEN n.low AND n.high
                  AND starts_with(r.dest, n.low) OFFSET 0
            ) AS a
            WHERE right(d.dest, 1) = '*'
        );
    END IF;
    v_audience := messages._clients_of(v_rules);
    IF nodes IS NOT NULL THEN
        v_audience := v_audience || ARRAY(
            SELECT DISTINCT c.id
            FROM unnest(nodes) AS d (dest)
            CROSS JOIN LATERAL messages._names_like(d.dest) AS n
            CROSS JOIN LATERAL (
                SELECT m.id FROM psqlmessages_client AS m
                WHERE m.ident BETWEEN n.low AND n.high AND starts_with(m.ident, n.low) OFFSET 0
            ) AS c
        );
    END IF;
    RETURN v_audience;
END
$$;

COMMENT ON FUNCTION messages._audience IS
    'The connected nodes of what _hearing_of tells of a node. One may be named twice.';


CREATE OR REPLACE FUNCTION messages._node_audience(
    ident text,
    former psqlmessages_auth[]
)
RETURNS bigint[]
LANGUAGE sql
STABLE
AS $$
    SELECT messages._audience(h.topics, h.nodes, h.rules) FROM messages._hearing_of(ident, former) AS h
$$;

COMMENT ON FUNCTION messages._node_audience IS
    'The connected nodes that may share a topic with this one or have an Rpc rule in either direction; former: rules just removed, still counted.';
