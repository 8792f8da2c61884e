-- Changes of rules: they make topics, and end at once what is no longer allowed.

CREATE OR REPLACE FUNCTION messages._make_ruled_topics(
    names text[]
)
RETURNS boolean
LANGUAGE plpgsql
AS $$
DECLARE
    v_timeout text := current_setting('lock_timeout');
    v_are_made boolean := true;
    v_name text;
BEGIN
    -- A transaction may be making one of them, and not end.
    PERFORM set_config('lock_timeout', least(200, messages._rest_ms())::text, true);
    BEGIN
        PERFORM messages._make_topics(names);
    EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
        PERFORM set_config('lock_timeout', '1', true);
        FOREACH v_name IN ARRAY names LOOP
            BEGIN
                PERFORM messages._make_topics(ARRAY[v_name]);
            EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
                v_are_made := false;
            END;
        END LOOP;
    END;
    PERFORM set_config('lock_timeout', v_timeout, true);
    RETURN v_are_made;
END
$$;

COMMENT ON FUNCTION messages._make_ruled_topics IS
    'Make the topics that rules name; false where a transaction that does not end is making one of them.';


CREATE OR REPLACE FUNCTION messages._wait_for(
    nodes bigint[]
)
RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    v_deadline timestamp with time zone := clock_timestamp() + make_interval(secs => messages._rest_ms() / 1000.0);
BEGIN
    -- By trying again: waiting in the queue of one lock after the other would have no bound.
    WHILE NOT messages._can_end(nodes) AND clock_timestamp() < v_deadline LOOP
        PERFORM pg_sleep(0.01);
    END LOOP;
END
$$;

COMMENT ON FUNCTION messages._wait_for IS
    'Take the rows of these nodes, their memberships and topics; go on after a moment where somebody holds some of them.';


CREATE OR REPLACE FUNCTION messages._follow_rules(
    former psqlmessages_auth[],
    idents text[],
    topics text[]
)
RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    v_are_made boolean := true;
    v_channels jsonb;
    v_queues bigint[];
    v_nodes bigint[];
    v_lost bigint[];
    v_settled record;
BEGIN
    IF topics IS NOT NULL THEN
        v_are_made := messages._make_ruled_topics(topics);
    END IF;
    IF EXISTS (SELECT FROM unnest(former) AS f WHERE f.type = 'Queue') OR idents IS NULL THEN
        v_channels := messages._queue_channels();
        v_queues := messages._move_channels();
    END IF;
    v_nodes := messages._nodes_named(idents);
    IF v_nodes <> '{}' THEN
        v_lost := messages._nodes_without_right(v_nodes);
        IF v_lost <> '{}' THEN
            PERFORM messages._wait_for(v_lost);
        END IF;
        SELECT * INTO v_settled FROM messages._settle(v_lost, messages._subscribed_topics(v_nodes), former);
        PERFORM messages._refresh_timeouts(v_nodes);
        PERFORM messages._note_unfinished(v_settled.left_topics, v_settled.left_nodes, NULL);
    END IF;
    PERFORM messages._note_unfinished(NULL, NULL, v_queues);
    -- A snapshot does not show nodes and members that came after it.
    IF NOT v_are_made OR NOT messages._has_gate() OR current_setting('transaction_isolation') <> 'read committed' THEN
        INSERT INTO messages._recheck (idents, topics, channels) VALUES (idents, topics, v_channels);
    END IF;
END
$$;

COMMENT ON FUNCTION messages._follow_rules IS
    'Bring topics and connected nodes in line with rules that changed. former: as they were; idents, topics: those they name, all where idents is null.';


CREATE OR REPLACE FUNCTION messages._nodes_named(
    idents text[]
)
RETURNS bigint[]
LANGUAGE plpgsql
STABLE
AS $$
BEGIN
    IF idents IS NULL THEN
        RETURN ARRAY(SELECT c.id FROM psqlmessages_client AS c);
    END IF;
    RETURN ARRAY(
        SELECT DISTINCT c.id
        FROM psqlmessages_client AS c
        CROSS JOIN LATERAL unnest(messages._patterns(c.ident)) AS p (pattern)
        WHERE p.pattern = ANY (idents)
    );
END
$$;

COMMENT ON FUNCTION messages._nodes_named IS
    'The connected nodes that rules with these idents and patterns are about; all where it is null.';


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
BEGIN
    PERFORM messages._follow_rules('{}', NULL, NULL);
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
