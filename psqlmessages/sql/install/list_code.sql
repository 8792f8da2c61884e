-- The installed triggers, views and functions: oid, and a mark that changes when the object is replaced.

SELECT p.oid, p.xmin::text || p.ctid::text
FROM pg_catalog.pg_proc AS p WHERE p.pronamespace = to_regnamespace('messages')
UNION ALL
SELECT c.oid, r.xmin::text || r.ctid::text
FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_rewrite AS r ON r.ev_class = c.oid
WHERE c.relnamespace = to_regnamespace('messages') AND c.relkind = 'v'
UNION ALL
SELECT t.oid, t.xmin::text || t.ctid::text
FROM pg_catalog.pg_trigger AS t JOIN pg_catalog.pg_proc AS p ON p.oid = t.tgfoid
WHERE p.pronamespace = to_regnamespace('messages') AND NOT t.tgisinternal;
