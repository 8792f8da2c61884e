"""The catalogue: all that is installed, as names and definitions to compare."""

from django.db.backends.base.base import BaseDatabaseWrapper

Catalogue = dict[str, tuple[str, ...]]
OURS = r"""
    (c.relnamespace = 'messages'::regnamespace
     OR c.relnamespace = 'public'::regnamespace AND c.relname LIKE 'psqlmessages\_%')
"""
ACL = "ARRAY(SELECT a::text FROM unnest({}) AS a ORDER BY a::text)::text"
QUERIES = {
    "schema": f"""
        SELECT n.nspname, n.nspowner::regrole, {ACL.format("n.nspacl")},
               obj_description(n.oid, 'pg_namespace')
        FROM pg_namespace AS n WHERE n.nspname = 'messages'
    """,
    "relation": f"""
        SELECT c.oid::regclass, c.relkind, c.relpersistence, c.relowner::regrole,
               c.reloptions::text, {ACL.format("c.relacl")}, obj_description(c.oid, 'pg_class'),
               pg_get_expr(c.relpartbound, c.oid), pg_get_partkeydef(c.oid),
               CASE c.relkind WHEN 'v' THEN pg_get_viewdef(c.oid) END
        FROM pg_class AS c WHERE c.relkind IN ('r', 'p', 'v', 'S') AND {OURS}
    """,
    "column": f"""
        SELECT c.oid::regclass || '.' || a.attname, a.attnum, format_type(a.atttypid, a.atttypmod),
               a.attnotnull, a.attidentity, a.attstorage, l.collname,
               col_description(c.oid, a.attnum), pg_get_expr(d.adbin, c.oid)
        FROM pg_class AS c
        JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
        LEFT JOIN pg_collation AS l ON l.oid = a.attcollation
        LEFT JOIN pg_attrdef AS d ON (d.adrelid, d.adnum) = (c.oid, a.attnum)
        WHERE c.relkind IN ('r', 'p', 'v') AND {OURS}
    """,
    "constraint": f"""
        SELECT c.oid::regclass || '.' || k.conname, pg_get_constraintdef(k.oid), k.condeferrable,
               k.condeferred, k.convalidated
        FROM pg_class AS c JOIN pg_constraint AS k ON k.conrelid = c.oid WHERE {OURS}
    """,
    "index": f"""
        SELECT i.indexrelid::regclass, pg_get_indexdef(i.indexrelid), i.indisvalid
        FROM pg_class AS c JOIN pg_index AS i ON i.indrelid = c.oid WHERE {OURS}
    """,
    "trigger": f"""
        SELECT c.oid::regclass || '.' || t.tgname, pg_get_triggerdef(t.oid), t.tgenabled
        FROM pg_class AS c JOIN pg_trigger AS t ON t.tgrelid = c.oid
        WHERE NOT t.tgisinternal AND {OURS}
    """,
    "sequence": f"""
        SELECT c.oid::regclass, s.seqtypid::regtype, s.seqstart, s.seqincrement, s.seqcache,
               s.seqcycle
        FROM pg_class AS c JOIN pg_sequence AS s ON s.seqrelid = c.oid WHERE {OURS}
    """,
    "function": f"""
        SELECT p.oid::regprocedure, pg_get_functiondef(p.oid), p.proowner::regrole,
               {ACL.format("p.proacl")}, obj_description(p.oid, 'pg_proc')
        FROM pg_proc AS p WHERE p.pronamespace = to_regnamespace('messages')
    """,
}


def catalogue(database: BaseDatabaseWrapper) -> Catalogue:
    """Read everything of ours: "kind name" and what the catalogue says of it."""
    found = {}
    with database.cursor() as cursor:
        cursor.execute("SELECT to_regnamespace('messages')::text")
        is_there = cursor.fetchone()[0] is not None
        for kind, query in QUERIES.items():
            # Before the schema is there, its name cannot be cast to it.
            cursor.execute(query if is_there else query.replace("'messages'::regnamespace", "0"))
            for name, *definition in cursor.fetchall():
                found[f"{kind} {name}"] = tuple(str(part) for part in definition)
    return found
