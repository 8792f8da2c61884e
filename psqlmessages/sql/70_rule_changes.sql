-- Changes of rules: they make topics, and end at once what is no longer allowed.

CREATE OR REPLACE FUNCTION messages._lost_memberships(
    nodes bigint[]
)
RETURNS SETOF bigint
LANGUAGE sql
STABLE
AS $$
    SELECT m.id
    FROM psqlmessages_membership AS m
    JOIN psqlmessages_client AS c ON c.id = m.client_id
    JOIN psqlmessages_topic AS t ON t.id = m.topic_id
    CROSS JOIN LATERAL messages._rights(c.role, c.ident, 'Topic', t.name) AS r
    WHERE m.client_id = ANY (nodes)
      AND NOT coalesce(CASE m.kind WHEN 'listen' THEN r.can_read ELSE r.can_write END, false)
    ORDER BY t.name, m.kind, m.id
$$;

COMMENT ON FUNCTION messages._lost_memberships IS
    'The listening and sending of these nodes that no rule allows any more.';


CREATE OR REPLACE FUNCTION messages._lost_observations(
    nodes bigint[]
)
RETURNS SETOF bigint
LANGUAGE sql
STABLE
AS $$
    SELECT o.id
    FROM psqlmessages_observation AS o
    JOIN psqlmessages_client AS c ON c.id = o.client_id
    CROSS JOIN LATERAL messages._rights(c.role, c.ident, 'Topic', o.pattern) AS r
    WHERE o.client_id = ANY (nodes) AND NOT coalesce(r.can_observe, false)
    ORDER BY o.id
$$;

COMMENT ON FUNCTION messages._lost_observations IS
    'The observations of these nodes that no rule allows any more.';


CREATE OR REPLACE FUNCTION messages._nodes_without_right(
    nodes bigint[]
)
RETURNS bigint[]
LANGUAGE sql
STABLE
AS $$
    SELECT ARRAY(
        SELECT c.id FROM psqlmessages_client AS c
        WHERE c.id = ANY (nodes) AND NOT messages._has_rule(c.role, c.ident)
        UNION
        SELECT m.client_id FROM messages._lost_memberships(nodes) AS l (id)
        JOIN psqlmessages_membership AS m ON m.id = l.id
        UNION
        SELECT o.client_id FROM messages._lost_observations(nodes) AS l (id)
        JOIN psqlmessages_observation AS o ON o.id = l.id
    )
$$;

COMMENT ON FUNCTION messages._nodes_without_right IS
    'Those of these nodes that do something no rule allows any more.';


CREATE OR REPLACE FUNCTION messages._revoke(
    nodes bigint[],
    former psqlmessages_auth[]
)
RETURNS int
LANGUAGE plpgsql
AS $$
DECLARE
    v_id bigint;
    v_observation psqlmessages_observation;
    v_events int := 0;
BEGIN
    PERFORM FROM psqlmessages_client AS c WHERE c.id = ANY (nodes) ORDER BY c.id FOR UPDATE;
    PERFORM messages._lock_topics(messages._topics_of(nodes));
    FOR v_id IN SELECT messages._lost_memberships(nodes) LOOP
        v_events := v_events + messages._end_membership(v_id, 'revoke');
    END LOOP;
    FOR v_observation IN
        SELECT o.* FROM messages._lost_observations(nodes) AS l (id)
        JOIN psqlmessages_observation AS o ON o.id = l.id
    LOOP
        PERFORM messages._end_observation(v_observation.client_id, v_observation.pattern);
        -- Nobody but the observer knew of it.
        v_events := v_events + messages._emit(
            ARRAY[v_observation.client_id], 'topic_unobserve',
            (SELECT c.ident FROM psqlmessages_client AS c WHERE c.id = v_observation.client_id),
            v_observation.pattern, NULL
        );
    END LOOP;
    FOR v_id IN
        SELECT c.id FROM psqlmessages_client AS c
        WHERE c.id = ANY (nodes) AND NOT messages._has_rule(c.role, c.ident)
        ORDER BY c.ident
    LOOP
        v_events := v_events + messages._end_node(v_id, 'disconnect', true, former);
    END LOOP;
    RETURN v_events;
END
$$;

COMMENT ON FUNCTION messages._revoke IS
    'End what these nodes may do no more, with its events. former: rules just removed, for who is to be told.';


CREATE OR REPLACE FUNCTION messages._refresh_timeouts(
    nodes bigint[]
)
RETURNS void
LANGUAGE sql
AS $$
    UPDATE psqlmessages_membership AS m
    SET timeout = r.timeout
    FROM psqlmessages_client AS c, psqlmessages_topic AS t,
        LATERAL messages._rights(c.role, c.ident, 'Topic', t.name) AS r
    WHERE m.client_id = ANY (nodes) AND c.id = m.client_id AND t.id = m.topic_id
      AND m.timeout <> r.timeout
$$;

COMMENT ON FUNCTION messages._refresh_timeouts IS
    'Bring the timeouts that sends read in line with the rules.';


CREATE OR REPLACE FUNCTION messages._follow_rules(
    former psqlmessages_auth[],
    idents text[],
    topics text[]
)
RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    -- The gate is closed, and all wait: somebody may have evaluated in a transaction that does not end.
    v_patience text := messages._bound_waits();
    v_nodes bigint[];
BEGIN
    IF topics IS NOT NULL THEN
        PERFORM messages._make_topics(topics);
    END IF;
    IF EXISTS (SELECT FROM unnest(former) AS f WHERE f.type = 'Queue') THEN
        PERFORM messages._move_channels();
    END IF;
    v_nodes := ARRAY(
        SELECT DISTINCT c.id
        FROM psqlmessages_client AS c
        CROSS JOIN LATERAL unnest(messages._patterns(c.ident)) AS p (pattern)
        WHERE p.pattern = ANY (idents)
    );
    IF v_nodes <> '{}' THEN
        PERFORM messages._revoke(messages._nodes_without_right(v_nodes), former);
        PERFORM messages._refresh_timeouts(v_nodes);
        PERFORM messages._rebuild_subscribed(v_nodes);
    END IF;
    PERFORM set_config('lock_timeout', v_patience, true);
END
$$;

COMMENT ON FUNCTION messages._follow_rules IS
    'Bring topics and connected nodes in line with rules that changed. former: as they were; idents, topics: those they name.';


CREATE OR REPLACE FUNCTION messages._follow_role_memberships()
RETURNS int
LANGUAGE plpgsql
AS $$
DECLARE
    v_memberships numeric;
    v_known numeric := (SELECT g.role_memberships FROM messages._gate AS g);
    v_nodes bigint[];
    v_lost bigint[];
BEGIN
    -- Rules name a group, which may be renamed; and a superuser is a member of all.
    SELECT coalesce(sum(hashtextextended(m.membership, 0)), 0) INTO v_memberships
    FROM (
        -- As text: whether a member inherits is an option of the membership only since PostgreSQL 16.
        SELECT g.rolname || ' ' || m::text || ' ' || l.rolinherit AS membership
        FROM pg_catalog.pg_auth_members AS m
        JOIN pg_catalog.pg_roles AS g ON g.oid = m.roleid
        JOIN pg_catalog.pg_roles AS l ON l.oid = m.member
        UNION ALL
        SELECT 'superuser ' || r.oid FROM pg_catalog.pg_roles AS r WHERE r.rolsuper
    ) AS m;
    IF v_memberships = v_known THEN
        RETURN 0;
    END IF;
    BEGIN
        LOCK TABLE messages._gate IN EXCLUSIVE MODE NOWAIT;
    EXCEPTION WHEN lock_not_available THEN
        -- State is changing; the next evaluation tries again.
        RETURN 0;
    END;
    -- Rules may have been changed since.
    v_known := (SELECT g.role_memberships FROM messages._gate AS g);
    -- Only those that a rule of another role than their own may be about.
    v_nodes := ARRAY(
        SELECT DISTINCT c.id
        FROM psqlmessages_client AS c
        CROSS JOIN LATERAL unnest(messages._patterns(c.ident)) AS p (pattern)
        JOIN psqlmessages_auth AS a ON a.ident = p.pattern AND a.role <> c.role
    );
    IF v_known = 'NaN' THEN
        v_nodes := ARRAY(SELECT c.id FROM psqlmessages_client AS c);
    END IF;
    v_lost := messages._nodes_without_right(v_nodes);
    IF NOT messages._can_end(v_lost) THEN
        RETURN 0;
    END IF;
    UPDATE messages._gate SET role_memberships = v_memberships;
    PERFORM messages._move_channels();
    PERFORM messages._refresh_timeouts(v_nodes);
    PERFORM messages._rebuild_subscribed(v_nodes);
    RETURN messages._revoke(v_lost, '{}');
END
$$;

COMMENT ON FUNCTION messages._follow_role_memberships IS
    'GRANT and REVOKE of a group role fire no trigger: compare a sum over who is a member of what, and act where it changed. Also where rules were changed above READ COMMITTED.';


CREATE OR REPLACE FUNCTION messages._rules_change()
RETURNS trigger
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
BEGIN
    PERFORM messages._close_gate();
    RETURN NULL;
END
$$;

COMMENT ON FUNCTION messages._rules_change IS
    'Before any statement that changes rules.';


CREATE OR REPLACE FUNCTION messages._rules_inserted()
RETURNS trigger
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
BEGIN
    PERFORM messages._follow_rules(
        '{}',
        (SELECT array_agg(DISTINCT n.ident::text) FROM new_rules AS n),
        (SELECT array_agg(DISTINCT n.dest::text) FROM new_rules AS n
         WHERE n.type = 'Topic' AND right(n.dest, 1) <> '*')
    );
    RETURN NULL;
END
$$;

COMMENT ON FUNCTION messages._rules_inserted IS
    'After rules were added.';


CREATE OR REPLACE FUNCTION messages._rules_updated()
RETURNS trigger
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
BEGIN
    PERFORM messages._follow_rules(
        (SELECT array_agg(o::psqlmessages_auth) FROM old_rules AS o),
        (SELECT array_agg(r.ident::text)
         FROM (SELECT o.ident FROM old_rules AS o UNION SELECT n.ident FROM new_rules AS n) AS r),
        (SELECT array_agg(DISTINCT n.dest::text) FROM new_rules AS n
         WHERE n.type = 'Topic' AND right(n.dest, 1) <> '*')
    );
    RETURN NULL;
END
$$;

COMMENT ON FUNCTION messages._rules_updated IS
    'After rules were changed.';


CREATE OR REPLACE FUNCTION messages._rules_deleted()
RETURNS trigger
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
BEGIN
    PERFORM messages._follow_rules(
        (SELECT array_agg(o::psqlmessages_auth) FROM old_rules AS o),
        (SELECT array_agg(DISTINCT o.ident::text) FROM old_rules AS o),
        NULL
    );
    RETURN NULL;
END
$$;

COMMENT ON FUNCTION messages._rules_deleted IS
    'After rules were removed.';


CREATE OR REPLACE FUNCTION messages._rules_truncated()
RETURNS trigger
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
DECLARE
    v_patience text := messages._bound_waits();
BEGIN
    PERFORM messages._move_channels();
    PERFORM messages._revoke(ARRAY(SELECT c.id FROM psqlmessages_client AS c), '{}');
    PERFORM set_config('lock_timeout', v_patience, true);
    RETURN NULL;
END
$$;

COMMENT ON FUNCTION messages._rules_truncated IS
    'After TRUNCATE, which fires no other trigger: nobody has a rule any more.';


-- Which role a rule was saved for: a later one may have the same name. Not a column of Django's, and none that any
-- right is looked up by.
DO $$
BEGIN
    -- ADD COLUMN IF NOT EXISTS would lock out all readers of rules at each installation.
    IF NOT EXISTS (
        SELECT FROM pg_catalog.pg_attribute AS a
        WHERE a.attrelid = 'psqlmessages_auth'::regclass AND a.attname = 'role_identity'
    ) THEN
        ALTER TABLE psqlmessages_auth ADD COLUMN role_identity text;
    END IF;
END
$$;


CREATE OR REPLACE FUNCTION messages._note_role()
RETURNS trigger
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
BEGIN
    NEW.role_identity := (
        SELECT r.oid || ' ' || messages._cluster() FROM pg_catalog.pg_roles AS r WHERE r.rolname = NEW.role
    );
    RETURN NEW;
END
$$;

COMMENT ON FUNCTION messages._note_role IS
    'Note with a rule the oid of its role, which means something in this database only; null if there is no such role.';


CREATE OR REPLACE TRIGGER note_role
BEFORE INSERT OR UPDATE ON psqlmessages_auth
FOR EACH ROW EXECUTE FUNCTION messages._note_role();

CREATE OR REPLACE TRIGGER rules_change
BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON psqlmessages_auth
FOR EACH STATEMENT EXECUTE FUNCTION messages._rules_change();

CREATE OR REPLACE TRIGGER rules_inserted
AFTER INSERT ON psqlmessages_auth
REFERENCING NEW TABLE AS new_rules
FOR EACH STATEMENT EXECUTE FUNCTION messages._rules_inserted();

CREATE OR REPLACE TRIGGER rules_updated
AFTER UPDATE ON psqlmessages_auth
REFERENCING OLD TABLE AS old_rules NEW TABLE AS new_rules
FOR EACH STATEMENT EXECUTE FUNCTION messages._rules_updated();

CREATE OR REPLACE TRIGGER rules_deleted
AFTER DELETE ON psqlmessages_auth
REFERENCING OLD TABLE AS old_rules
FOR EACH STATEMENT EXECUTE FUNCTION messages._rules_deleted();

CREATE OR REPLACE TRIGGER rules_truncated
AFTER TRUNCATE ON psqlmessages_auth
FOR EACH STATEMENT EXECUTE FUNCTION messages._rules_truncated();


CREATE OR REPLACE FUNCTION messages._disconnect(
    ident text
)
RETURNS boolean
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
DECLARE
    v_node bigint;
BEGIN
    PERFORM messages._share_gate();
    SELECT c.id INTO v_node FROM psqlmessages_client AS c WHERE c.ident = _disconnect.ident;
    IF v_node IS NULL THEN
        RETURN false;
    END IF;
    PERFORM messages._end_node(v_node, 'disconnect', true);
    RETURN true;
END
$$;

COMMENT ON FUNCTION messages._disconnect IS
    'For the administrator: deregister one node of any session; the others of its session stay. False where it is not connected.';
