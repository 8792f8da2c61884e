-- Overloads of public functions with jsonb bodies and interval times. Each calls the function with text and seconds.

CREATE OR REPLACE FUNCTION messages.topic_send(
    topic text,
    message jsonb,
    token text DEFAULT NULL
)
RETURNS json
LANGUAGE sql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
    SELECT messages.topic_send(topic, message::text, token, 'json');
$$;

COMMENT ON FUNCTION messages.topic_send(text, jsonb, text) IS
    'As topic_send with text, for a JSON value.';


CREATE OR REPLACE FUNCTION messages.topic_send_as(
    ident text,
    topic text,
    message jsonb,
    token text DEFAULT NULL
)
RETURNS json
LANGUAGE sql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
    SELECT messages.topic_send_as(ident, topic, message::text, token, 'json');
$$;

COMMENT ON FUNCTION messages.topic_send_as(text, text, jsonb, text) IS
    'As topic_send_as with text, for a JSON value.';


CREATE OR REPLACE FUNCTION messages.rpc(
    node text,
    token text,
    param jsonb
)
RETURNS json
LANGUAGE sql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
    SELECT messages.rpc(node, token, param::text, 'json');
$$;

COMMENT ON FUNCTION messages.rpc(text, text, jsonb) IS
    'As rpc with text, for a JSON value.';


CREATE OR REPLACE FUNCTION messages.return(
    node text,
    token text,
    param jsonb
)
RETURNS json
LANGUAGE sql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
    SELECT messages.return(node, token, param::text, 'json');
$$;

COMMENT ON FUNCTION messages.return(text, text, jsonb) IS
    'As return with text, for a JSON value.';


CREATE OR REPLACE FUNCTION messages.publish(
    client_id text,
    topic text,
    payload jsonb
)
RETURNS json
LANGUAGE sql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
    SELECT messages.publish(client_id, topic, payload::text, 'json');
$$;

COMMENT ON FUNCTION messages.publish(text, text, jsonb) IS
    'As publish with text, for a JSON value.';


-- A call of push with null or untyped values must match only the function with text. So the order of the parameters
-- matters: at each position that function has text, which PostgreSQL prefers, or all functions have the same type. No
-- overload has arrays of jsonb, because PostgreSQL prefers neither text[] nor jsonb[].
CREATE OR REPLACE FUNCTION messages.push(
    client_id text,
    queue text,
    body jsonb,
    headers jsonb DEFAULT NULL,
    after interval DEFAULT NULL,
    mature timestamp with time zone DEFAULT NULL,
    delay float8 DEFAULT NULL,
    tries int DEFAULT 0,
    key text DEFAULT NULL
)
RETURNS json
LANGUAGE sql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
    SELECT messages.push(
        client_id, queue, body::text, 'json', headers::text, mature,
        coalesce(extract(epoch FROM after)::float8, delay), tries, key
    );
$$;

COMMENT ON FUNCTION messages.push(text, text, jsonb, jsonb, interval, timestamptz, float8, int, text) IS
    'As push with text, for a JSON value and headers as a JSON object. after: the delay.';


CREATE OR REPLACE FUNCTION messages.push(
    client_id text,
    queue text,
    body text,
    after interval,
    headers text DEFAULT NULL,
    mature timestamp with time zone DEFAULT NULL,
    delay float8 DEFAULT NULL,
    tries int DEFAULT 0,
    key text DEFAULT NULL,
    enc text DEFAULT NULL
)
RETURNS json
LANGUAGE sql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
    SELECT messages.push(
        client_id, queue, body, enc, headers, mature,
        coalesce(extract(epoch FROM after)::float8, delay), tries, key
    );
$$;

COMMENT ON FUNCTION messages.push(text, text, text, interval, text, timestamptz, float8, int, text, text) IS
    'As push with seconds. after: the delay.';


CREATE OR REPLACE FUNCTION messages.reserve(
    client_id text,
    queue text,
    count int,
    duration interval
)
RETURNS SETOF messages.element_rows
LANGUAGE sql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
    SELECT * FROM messages.reserve(client_id, queue, count, extract(epoch FROM duration)::float8);
$$;

COMMENT ON FUNCTION messages.reserve(text, text, int, interval) IS
    'As reserve with seconds.';


CREATE OR REPLACE FUNCTION messages.renew(
    client_id text,
    queue text,
    duration interval,
    VARIADIC leases text[]
)
RETURNS SETOF messages.element_rows
LANGUAGE sql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
    SELECT * FROM messages.renew(client_id, queue, extract(epoch FROM duration)::float8, VARIADIC leases);
$$;

COMMENT ON FUNCTION messages.renew(text, text, interval, text[]) IS
    'As renew with seconds.';


-- No overload has the delay as an interval: a call with a null or untyped delay would match both functions.
CREATE OR REPLACE FUNCTION messages.rollback(
    client_id text,
    lease text
)
RETURNS json
LANGUAGE sql
SECURITY DEFINER
SET search_path = pg_catalog, public, pg_temp
AS $$
    SELECT messages.rollback(client_id, NULL, lease);
$$;

COMMENT ON FUNCTION messages.rollback(text, text) IS
    'As rollback of one lease without a delay.';
