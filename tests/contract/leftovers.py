"""Leftovers: what an older version of the scripts may have left in a database."""

FUNCTION = "CREATE FUNCTION messages._old() RETURNS int LANGUAGE sql AS 'SELECT 1'"
LEFTOVERS = {
    "a function": FUNCTION,
    "a view": "CREATE VIEW messages.old AS SELECT 1 AS one",
    "a view of a function": f"{FUNCTION}; CREATE VIEW messages.old AS SELECT messages._old()",
    "a function of a view": """
        CREATE VIEW messages.old AS SELECT 1 AS one;
        CREATE FUNCTION messages._old() RETURNS SETOF messages.old LANGUAGE sql
            BEGIN ATOMIC SELECT * FROM messages.old; END
    """,
    "a trigger and its function": """
        CREATE FUNCTION messages._old() RETURNS trigger LANGUAGE plpgsql
            AS 'BEGIN RETURN NULL; END';
        CREATE TRIGGER old AFTER INSERT ON psqlmessages_auth EXECUTE FUNCTION messages._old()
    """,
    "a trigger of a function still there": """
        CREATE TRIGGER old BEFORE INSERT ON psqlmessages_topic
            EXECUTE FUNCTION messages._rules_change()
    """,
    "fewer parameters": """
        CREATE FUNCTION messages.topic_send(text, text) RETURNS json LANGUAGE sql
            AS $$ SELECT '{}'::json $$
    """,
    "another type of parameter": """
        CREATE FUNCTION messages.get_data(message json) RETURNS text LANGUAGE sql
            AS $$ SELECT '' $$
    """,
    "another result": """
        DROP FUNCTION messages.evaluate();
        CREATE FUNCTION messages.evaluate() RETURNS int LANGUAGE sql AS 'SELECT 1'
    """,
    "another name of a parameter": """
        DROP FUNCTION messages.init(text);
        CREATE FUNCTION messages.init(name text) RETURNS json LANGUAGE sql
            AS $$ SELECT '{}'::json $$
    """,
    "another name of a column": "ALTER TABLE messages._evaluation RENAME xact TO pid",
    "another view": """
        DROP VIEW messages.errors CASCADE;
        CREATE VIEW messages.errors AS SELECT 1 AS one;
        GRANT SELECT ON messages.errors TO PUBLIC
    """,
}
