-- The grants on views and functions: kind and name of the object, and the statement that restores the grant, with %s in
-- place of the object.

SELECT o.kind, o.name, format(
    'GRANT %s ON %s %%s TO %I%s',
    g.privilege_type, o.kind, r.rolname, CASE WHEN g.is_grantable THEN ' WITH GRANT OPTION' ELSE '' END
)
FROM (
    SELECT 'FUNCTION' AS kind, p.proname AS name, p.proowner AS owner, p.proacl AS acl
    FROM pg_catalog.pg_proc AS p WHERE p.pronamespace = to_regnamespace('messages')
    UNION ALL
    SELECT 'TABLE', c.relname, c.relowner, c.relacl
    FROM pg_catalog.pg_class AS c WHERE c.relnamespace = to_regnamespace('messages') AND c.relkind = 'v'
) AS o
CROSS JOIN LATERAL aclexplode(o.acl) AS g
JOIN pg_catalog.pg_roles AS r ON r.oid = g.grantee
WHERE g.grantee <> o.owner
ORDER BY 1, 2, 3;
