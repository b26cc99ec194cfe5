"""The tables and functions of a run in PostgreSQL, in a schema called `mbpa`.

`head` has one row. Every function that writes locks it first, so writers take turns until they
commit, positions have no gaps, and rows become visible in the order of their positions. `events` is
the ordered log: what changed and which ids, but no texts. `examples` holds the examples as they are
after the last event, so that reading both tables in one statement, or in one transaction, gives the
state at exactly one position.

Each event has a hash over the one before it. A replica whose last hash is not in the log has
followed a history that the database has lost.
"""

FORMAT = 1
MIN_SERVER_VERSION = 140000  # bit_xor, gen_random_uuid
CHANNEL = "mbpa"  # of notifications about new events
PRUNING_INTERVAL = 10_000  # events

_TABLES = """
CREATE SCHEMA mbpa;
CREATE TABLE mbpa.head (
    is_single boolean PRIMARY KEY DEFAULT true CHECK (is_single),
    format integer NOT NULL, run uuid NOT NULL, position bigint NOT NULL, hash bytea NOT NULL,
    last_id bigint NOT NULL, requests bigint NOT NULL, examples bigint NOT NULL,
    checksum bigint NOT NULL
);
CREATE TABLE mbpa.events (
    position bigint PRIMARY KEY, time_ms bigint NOT NULL, name text, action text NOT NULL,
    first bigint NOT NULL, count bigint NOT NULL, label text, new_label text,
    ids bigint[] NOT NULL, nonce uuid, hash bytea
);
CREATE TABLE mbpa.examples (
    id bigint PRIMARY KEY, is_restored boolean NOT NULL, label text NOT NULL, text text,
    picture bytea, key bytea, time_ms bigint, name text, checksum bigint NOT NULL
);
ALTER TABLE mbpa.examples ALTER picture SET STORAGE EXTERNAL, ALTER key SET STORAGE EXTERNAL;
CREATE INDEX examples_by_label ON mbpa.examples (label);
CREATE TABLE mbpa.requests (
    number bigint PRIMARY KEY, name bytea NOT NULL UNIQUE, first bigint NOT NULL,
    count bigint NOT NULL, content bytea, keys bytea
);
CREATE TABLE mbpa.models (
    position bigint PRIMARY KEY, digest text NOT NULL, info bytea NOT NULL, files bytea
);
"""

_FUNCTIONS = """
-- A digest of 64 bits of an example, which reveals damage.
CREATE FUNCTION mbpa.digest(
    id bigint, is_restored boolean, label text, text text, picture bytea, key bytea
) RETURNS bigint LANGUAGE sql IMMUTABLE AS $$
    SELECT ('x' || left(encode(sha256(
        int8send(id) || boolsend(is_restored)
        || int4send(octet_length(label)) || convert_to(label, 'UTF8')
        || int4send(coalesce(octet_length(text), -1)) || convert_to(coalesce(text, ''), 'UTF8')
        || int4send(coalesce(octet_length(picture), -1)) || coalesce(picture, '')
        || int4send(coalesce(octet_length(key), -1)) || coalesce(key, '')
    ), 'hex'), 16))::bit(64)::bigint
$$;

-- The hash of an event, given that of the event before it. The nonce tells histories apart.
CREATE FUNCTION mbpa.link(
    previous bytea, nonce uuid, place bigint, time_ms bigint, name text, action text,
    first bigint, count bigint, label text, new_label text, ids bigint[]
) RETURNS bytea LANGUAGE sql STABLE AS $$
    SELECT sha256(previous || uuid_send(nonce) || convert_to(jsonb_build_array(
        place, time_ms, name, action, first, count, label, new_label, ids
    )::text, 'UTF8'))
$$;

-- Append an event, for which the caller holds the lock of the head.
CREATE FUNCTION mbpa.append(
    h mbpa.head, time_ms bigint, name text, action text, first bigint, count bigint,
    label text, new_label text, ids bigint[], last_id bigint, requests bigint,
    examples bigint, checksum bigint, kept_events bigint
) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    nonce uuid := gen_random_uuid();
    place bigint := h.position + 1;
    linked bytea := mbpa.link(
        h.hash, nonce, place, time_ms, name, action, first, count, label, new_label, ids
    );
BEGIN
    INSERT INTO mbpa.events VALUES (
        place, time_ms, name, action, first, count, label, new_label, ids, nonce, linked
    );
    UPDATE mbpa.head AS head SET position = place, hash = linked,
        last_id = append.last_id, requests = append.requests,
        examples = append.examples, checksum = append.checksum;
    IF place % <interval> = 0 THEN
        DELETE FROM mbpa.events AS event WHERE event.position <= place - kept_events
            AND event.action NOT IN ('rename', 'merge') AND NOT (
                event.action IN ('learn', 'restore') AND EXISTS (
                    SELECT 1 FROM mbpa.examples AS example WHERE example.id >= event.first
                    AND example.id < event.first + event.count
                )
            );
    END IF;
    PERFORM pg_notify('<channel>', place::text);
    RETURN place;
END $$;

-- Return the position and first id of new examples, or those of an earlier call of this name.
CREATE FUNCTION mbpa.learn(
    time_ms bigint, by_name text, is_restored boolean, labels text[], texts text[],
    pictures bytea[], keys bytea[], request bytea, content bytea, key_digests bytea,
    remembered bigint, kept_events bigint
) RETURNS TABLE (
    place bigint, first bigint, count bigint, known_content bytea, known_keys bytea,
    is_known boolean
) LANGUAGE plpgsql AS $$
#variable_conflict use_variable
DECLARE
    h mbpa.head;
    known mbpa.requests;
    added bigint := cardinality(labels);
    checksums bigint;
    start bigint;
BEGIN
    SELECT * INTO h FROM mbpa.head FOR UPDATE;
    IF request IS NOT NULL THEN
        SELECT * INTO known FROM mbpa.requests AS r WHERE r.name = request;
        IF FOUND THEN
            RETURN QUERY SELECT h.position, known.first, known.count, known.content, known.keys,
                true;
            RETURN;
        END IF;
    END IF;
    start := h.last_id + 1;
    WITH given AS (
        SELECT start + g.place - 1 AS id, g.label, g.text, g.picture, g.key
        FROM unnest(labels, texts, pictures, keys) WITH ORDINALITY
            AS g(label, text, picture, key, place)
    ), written AS (
        INSERT INTO mbpa.examples
        SELECT g.id, is_restored, g.label, g.text, g.picture, g.key, time_ms, by_name,
            mbpa.digest(g.id, is_restored, g.label, g.text, g.picture, g.key)
        FROM given AS g RETURNING checksum
    ) SELECT bit_xor(written.checksum) INTO checksums FROM written;
    IF request IS NOT NULL THEN
        INSERT INTO mbpa.requests VALUES (
            h.requests + 1, request, start, added, content, key_digests
        );
        DELETE FROM mbpa.requests AS r WHERE r.number <= h.requests + 1 - remembered;
    END IF;
    place := mbpa.append(
        h, time_ms, by_name, CASE WHEN is_restored THEN 'restore' ELSE 'learn' END, start, added,
        NULL, NULL, ARRAY(SELECT generate_series(start, start + added - 1)),
        start + added - 1, h.requests + (request IS NOT NULL)::int, h.examples + added,
        h.checksum # checksums, kept_events
    );
    RETURN QUERY SELECT place, start, added, NULL::bytea, NULL::bytea, false;
END $$;

-- Delete examples; return the position, and the ids of those that existed.
CREATE FUNCTION mbpa.forget(
    time_ms bigint, by_name text, wanted bigint[], wanted_label text, kept_events bigint
) RETURNS TABLE (place bigint, gone bigint[]) LANGUAGE plpgsql AS $$
#variable_conflict use_variable
DECLARE
    h mbpa.head;
    checksums bigint;
BEGIN
    SELECT * INTO h FROM mbpa.head FOR UPDATE;
    WITH deleted AS (
        DELETE FROM mbpa.examples AS e WHERE e.id = ANY(wanted) OR e.label = wanted_label
        RETURNING e.id, e.checksum
    ) SELECT coalesce(array_agg(d.id ORDER BY d.id), '{}'), bit_xor(d.checksum)
    INTO gone, checksums FROM deleted AS d;
    place := h.position;
    IF cardinality(gone) > 0 THEN
        place := mbpa.append(
            h, time_ms, by_name, 'forget', gone[1], cardinality(gone), NULL, NULL, gone,
            h.last_id, h.requests, h.examples - cardinality(gone), h.checksum # checksums,
            kept_events
        );
    END IF;
    RETURN QUERY SELECT place, gone;
END $$;

-- Give the examples of a label another one; those up to `last_trained`, if given, get new ids.
CREATE FUNCTION mbpa.rename(
    time_ms bigint, by_name text, old_label text, new_label text, last_trained bigint,
    kept_events bigint
) RETURNS TABLE (place bigint, old_ids bigint[], new_ids bigint[]) LANGUAGE plpgsql AS $$
#variable_conflict use_variable
DECLARE
    h mbpa.head;
    before bigint;
    after bigint;
    moved bigint;
BEGIN
    SELECT * INTO h FROM mbpa.head FOR UPDATE;
    SELECT coalesce(array_agg(e.id ORDER BY e.id), '{}'), bit_xor(e.checksum),
        count(*) FILTER (WHERE e.id <= last_trained)
    INTO old_ids, before, moved FROM mbpa.examples AS e WHERE e.label = old_label;
    place := h.position;
    new_ids := '{}';
    IF cardinality(old_ids) > 0 THEN
        new_ids := ARRAY(
            SELECT CASE WHEN o.place <= moved THEN h.last_id + o.place ELSE o.id END
            FROM unnest(old_ids) WITH ORDINALITY AS o(id, place) ORDER BY o.place
        );
        WITH renamed AS (
            UPDATE mbpa.examples AS e SET id = n.new_id, label = new_label,
                is_restored = e.is_restored AND last_trained IS NULL,
                checksum = mbpa.digest(
                    n.new_id, e.is_restored AND last_trained IS NULL, new_label, e.text,
                    e.picture, e.key
                )
            FROM unnest(old_ids, new_ids) AS n(old_id, new_id) WHERE e.id = n.old_id
            RETURNING e.checksum
        ) SELECT bit_xor(r.checksum) INTO after FROM renamed AS r;
        place := mbpa.append(
            h, time_ms, by_name, CASE WHEN last_trained IS NULL THEN 'rename' ELSE 'merge' END,
            (SELECT min(n) FROM unnest(new_ids) AS n), cardinality(old_ids), old_label, new_label,
            ARRAY(SELECT unnest(old_ids) UNION SELECT unnest(new_ids)),
            h.last_id + coalesce(moved, 0), h.requests, h.examples, h.checksum # before # after,
            kept_events
        );
    END IF;
    RETURN QUERY SELECT place, old_ids, new_ids;
END $$;

-- Make a model that of the run, and drop the files of earlier ones.
CREATE FUNCTION mbpa.change_model(
    time_ms bigint, by_name text, action text, digest text, info bytea, files bytea,
    examples bigint, kept_events bigint
) RETURNS bigint LANGUAGE plpgsql AS $$
#variable_conflict use_variable
DECLARE
    h mbpa.head;
    place bigint;
BEGIN
    SELECT * INTO h FROM mbpa.head FOR UPDATE;
    place := mbpa.append(
        h, time_ms, by_name, action, 1, examples, NULL, NULL, '{}', h.last_id, h.requests,
        h.examples, h.checksum, kept_events
    );
    UPDATE mbpa.models AS m SET files = NULL;
    INSERT INTO mbpa.models VALUES (place, digest, info, files);
    RETURN place;
END $$;
"""

CREATE = _TABLES + _FUNCTIONS.replace("<interval>", str(PRUNING_INTERVAL)).replace(
    "<channel>", CHANNEL
)

# One statement sees one state of the database: the events from a position on, including the one at
# it, and the examples that the later ones have touched and that exist now. Nothing if there are too
# many events.
READ_CHANGES = """
SELECT position, hash, action, label, new_label, time_ms, name, first, count, ids,
    NULL::boolean, NULL::text, NULL::bytea
FROM mbpa.events WHERE position >= %(after)s
AND (SELECT position FROM mbpa.head) <= %(after)s + %(most)s
UNION ALL
SELECT id, NULL, NULL, label, NULL, NULL, NULL, NULL, NULL, NULL, is_restored, text, key
FROM mbpa.examples WHERE id = ANY(ARRAY(
    SELECT unnest(ids) FROM mbpa.events WHERE position > %(after)s
    AND (SELECT position FROM mbpa.head) <= %(after)s + %(most)s
))
"""

# Rows that do not hold what was written, and events whose hash does not follow from the one before.
FIND_ALTERED = """
SELECT id FROM mbpa.examples
WHERE checksum <> mbpa.digest(id, is_restored, label, text, picture, key) ORDER BY id LIMIT 1
"""
FIND_UNLINKED = """
SELECT position FROM (
    SELECT *, lag(hash) OVER (ORDER BY position) AS previous,
        lag(position) OVER (ORDER BY position) AS before FROM mbpa.events WHERE hash IS NOT NULL
) AS event WHERE before = position - 1 AND hash <> mbpa.link(
    previous, nonce, position, time_ms, name, action, first, count, label, new_label, ids
) ORDER BY position LIMIT 1
"""
COUNT = "SELECT count(*), coalesce(bit_xor(checksum), 0) FROM mbpa.examples"
