-- Views: what is public of the tables.

CREATE OR REPLACE VIEW messages.auth AS
SELECT a.id, a.role, a.ident, a.type, a.dest, a.mode, a.timeout
FROM psqlmessages_auth AS a;

COMMENT ON VIEW messages.auth IS
    'The rules, to be read and changed by the owner and by those the owner grants it to.';


CREATE OR REPLACE VIEW messages.topics
WITH (security_barrier) AS
WITH live (session_id) AS MATERIALIZED (
    SELECT s.id
    FROM psqlmessages_session AS s
    JOIN pg_catalog.pg_locks AS l
        ON l.locktype = 'advisory' AND l.classid = 1886612839 AND l.objsubid = 2
        AND l.objid = s.id::oid AND l.pid = s.pid AND l.mode = 'ExclusiveLock' AND l.granted
    WHERE l.database = (SELECT d.oid FROM pg_catalog.pg_database AS d WHERE d.datname = current_database())
)
SELECT t.name::text AS topic,
    ARRAY(
        SELECT c.ident::text
        FROM psqlmessages_membership AS m
        JOIN psqlmessages_client AS c ON c.id = m.client_id
        WHERE m.topic_id = t.id AND m.kind = 'notify'
          AND c.session_id IN (SELECT live.session_id FROM live)
        ORDER BY c.ident
    ) AS notifiers,
    ARRAY(
        SELECT c.ident::text
        FROM psqlmessages_membership AS m
        JOIN psqlmessages_client AS c ON c.id = m.client_id
        WHERE m.topic_id = t.id AND m.kind = 'listen'
          AND c.session_id IN (SELECT live.session_id FROM live)
        ORDER BY c.ident
    ) AS listeners
FROM psqlmessages_topic AS t
WHERE pg_has_role(
        session_user,
        (SELECT k.relowner FROM pg_catalog.pg_class AS k WHERE k.oid = 'psqlmessages_topic'::regclass),
        'MEMBER'
    )
    OR EXISTS (
        SELECT FROM psqlmessages_auth AS a
        WHERE a.type = 'Topic'
          AND (a.dest = t.name OR right(a.dest, 1) = '*' AND starts_with(t.name, left(a.dest, -1)))
          AND (a.role = session_user OR EXISTS (
              SELECT FROM pg_catalog.pg_roles AS r
              WHERE r.rolname = a.role AND pg_has_role(session_user, r.oid, 'MEMBER')
          ))
    );

COMMENT ON VIEW messages.topics IS
    'The topics that a rule lets this role use (all, for the owner): who sends and who listens now.';
