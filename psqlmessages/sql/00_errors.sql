-- Errors: the numbers and texts of the protocol, and the functions that return or raise them.
-- In all scripts, literals with a backslash are written E'...', because callers may turn standard_conforming_strings
-- off. Many functions set enable_seqscan = off: PL/pgSQL caches plans, and a plan made while a few nodes are connected
-- must stay fast for thousands. They also set jit = off: an avoided kind of plan has a high estimated cost, for which
-- PostgreSQL would compile the plan.

CREATE OR REPLACE VIEW messages.errors AS
SELECT e.number, e.errstr
FROM (VALUES
    (1, 'destination is missing'),
    (2, 'cannot use $type to $dest'),
    (3, 'cannot auth $mode with $type $dest'),
    (4, 'cannot init without identity'),
    (5, 'there are no permissions for ident $ident'),
    (6, 'Client $ident exists with same pid'),
    (7, 'Client $ident already exists with pid $pid and user $role'),
    (8, 'Client $ident already exists with pid $pid'),
    (9, 'Topic $topic is not existent'),
    (10, 'cannot listeners for Topic $topic'),
    (11, 'You are not listening from topic $topic'),
    (12, 'Message $dkey expired'),
    (13, 'Message $dkey not exists'),
    (14, 'Token empty'),
    (15, 'Ident empty'),
    (16, 'Client $ident don''t exist'),
    (17, 'Client $ident is not connected'),
    (18, 'token_tm_crypt malformed'),
    (19, 'Client $ident don''t exist'),
    (20, '$ident cannot return to $dest with token $token'),
    (21, '$ident cannot send to $topic prior to call topic_notify'),
    (50, 'call messages.init first'),
    (51, 'body of $size bytes exceeds $max'),
    (52, 'malformed message JSON'),
    (53, '$ident is not a node of this session'),
    (54, 'name or token too long'),
    (55, 'unknown encoding $enc'),
    (56, 'the request failed'),
    (57, 'malformed frame: $reason'),
    (58, 'more than $limit'),
    (59, 'the relay has no connection to PostgreSQL'),
    (60, '$argument must be positive'),
    (61, '$ident has no subscription to $topic'),
    (62, 'Queue $queue is not existent'),
    (63, 'malformed $argument: $value'),
    (64, '$n of $m staged rows exist: stage them again'),
    (65, 'batch $batch of $query follows batch $last: an older checkpoint was restored'),
    (66, 'Queue $queue has elements')
) AS e (number, errstr);

COMMENT ON VIEW messages.errors IS
    'Every error number with its text. Words that begin with $ are placeholders for values.';


CREATE OR REPLACE FUNCTION messages._error_text(
    number int,
    VARIADIC arguments text[]
)
RETURNS text
LANGUAGE sql
STABLE
AS $$
    SELECT format(
        regexp_replace(replace(e.errstr, '%', '%%'), '[$][a-z]+', '%s', 'g'),
        VARIADIC arguments
    )
    FROM messages.errors AS e
    WHERE e.number = _error_text.number
$$;

COMMENT ON FUNCTION messages._error_text IS
    'The text of an error, with its placeholders replaced by the arguments in order.';


CREATE OR REPLACE FUNCTION messages._error(
    number int,
    VARIADIC arguments text[] DEFAULT '{}'
)
RETURNS json
LANGUAGE plpgsql
AS $$
DECLARE
    v_text text := messages._error_text(number, VARIADIC arguments);
BEGIN
    RAISE WARNING 'Messages err:% %', number, v_text;
    RETURN (
        '{"Err":"' || number || '","Errstr":' || to_json(v_text) || '}'
    )::json;
END
$$;

COMMENT ON FUNCTION messages._error IS
    'Raise a WARNING for an error, and return the JSON answer for it.';


CREATE OR REPLACE FUNCTION messages._raise(
    error json
)
RETURNS void
LANGUAGE plpgsql STRICT
AS $$
BEGIN
    RAISE EXCEPTION '%', error ->> 'Errstr'
        USING ERRCODE = 'PM' || lpad(error ->> 'Err', 3, '0');
END
$$;

COMMENT ON FUNCTION messages._raise IS
    'Raise an answer of _error as an exception, unless it is null: for functions that return rows, and to undo what the call has changed. SQLSTATE: PM and the error number.';


CREATE OR REPLACE FUNCTION messages._log_command(
    VARIADIC words text[]
)
RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
    IF current_setting('client_min_messages') ^@ 'debug' THEN
        RAISE DEBUG 'Messages command: %', array_to_string(words, ' ', '');
    END IF;
END
$$;

COMMENT ON FUNCTION messages._log_command IS
    'Send a DEBUG message about a call to the client if its client_min_messages allows it. The words must not contain tokens or bodies.';
