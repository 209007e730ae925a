-- +goose Up

-- later says whether a read under snapshot a came after a read under snapshot b.
-- Snapshots of one primary are totally ordered: by xmax, and of equal xmax the
-- one with fewer transactions in progress is the later.
-- +goose StatementBegin
CREATE FUNCTION backfill_control.later(a pg_snapshot, b pg_snapshot) RETURNS boolean
    LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT pg_snapshot_xmax(a) > pg_snapshot_xmax(b)
        OR pg_snapshot_xmax(a) = pg_snapshot_xmax(b)
       AND (SELECT count(*) FROM pg_snapshot_xip(a)) < (SELECT count(*) FROM pg_snapshot_xip(b))
$$;
-- +goose StatementEnd

CREATE TABLE backfill_control.site (
    name       text PRIMARY KEY,
    epoch      integer NOT NULL DEFAULT 1, -- raised when an admin declares a new beginning
    created_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

CREATE TABLE backfill_control.side (
    site              text NOT NULL REFERENCES backfill_control.site,
    name              text NOT NULL,
    system_identifier text, -- with timeline: the cluster this side was when first met
    timeline          text,
    agent             text,
    agent_seen_at     timestamptz,
    database          text, -- where the agent looks, without credentials
    problem           text, -- why the agent does nothing, NULL when it works
    PRIMARY KEY (site, name)
);

CREATE TABLE backfill_control.direction (
    id          integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    site        text NOT NULL REFERENCES backfill_control.site,
    from_side   text NOT NULL,
    to_side     text NOT NULL,
    -- the last push: its number and nonce, and the nonce before it. The source
    -- stores the same with the outbox's deletion; they may differ by one push.
    push_batch  bigint NOT NULL DEFAULT 0,
    push_nonce  text NOT NULL DEFAULT '',
    prev_nonce  text NOT NULL DEFAULT '',
    -- entries up to here are acknowledged: history rather than queue
    applied_seq bigint NOT NULL DEFAULT 0,
    applied_at  timestamptz,
    UNIQUE (site, from_side),
    FOREIGN KEY (site, from_side) REFERENCES backfill_control.side (site, name),
    FOREIGN KEY (site, to_side) REFERENCES backfill_control.side (site, name)
);

CREATE TABLE backfill_control.layout (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    fingerprint text NOT NULL UNIQUE,
    definition  jsonb NOT NULL
);

CREATE TABLE backfill_control.table_config (
    id            integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    site          text NOT NULL REFERENCES backfill_control.site,
    name          text NOT NULL,
    active        boolean NOT NULL DEFAULT true,
    op_create     boolean NOT NULL DEFAULT true,
    op_update     boolean NOT NULL DEFAULT true,
    op_delete     boolean NOT NULL DEFAULT true,
    captured_from text[] NOT NULL,
    apply_order   integer NOT NULL DEFAULT 0,
    excluded      text[] NOT NULL DEFAULT '{}',
    updated_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    UNIQUE (site, name)
);

-- What the agent of a side last reported of a table.
CREATE TABLE backfill_control.table_side (
    table_id      integer NOT NULL REFERENCES backfill_control.table_config,
    side          text NOT NULL,
    key           text[],
    key_types     text[],
    layout_id     bigint REFERENCES backfill_control.layout,
    row_count     bigint,
    estimated     boolean NOT NULL DEFAULT false,
    counted_at    timestamptz,
    capture_ok    boolean NOT NULL DEFAULT false,
    capture_since timestamptz,
    problem       text,
    dropped       bigint NOT NULL DEFAULT 0, -- changes captured here and not sent
    PRIMARY KEY (table_id, side)
);

-- Queue and history in one: an entry is history once its seq is at or below its
-- direction's applied_seq. Two tables would let a row slip between them while
-- release checks what has overtaken it.
CREATE TABLE backfill_control.entry (
    direction  integer NOT NULL,
    table_id   integer NOT NULL,
    seq        bigint GENERATED ALWAYS AS IDENTITY (CACHE 1),
    layout_id  bigint,
    request_id bigint, -- NULL: captured; else released by that request
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    snap       pg_snapshot NOT NULL, -- the read that produced it
    op         "char" NOT NULL CHECK (op IN ('c', 'u', 'd', 't', 'm')),
    dropped    boolean NOT NULL DEFAULT false, -- not delivered, but still overtakes staged rows
    key        text[] COLLATE "C",
    row        text[] COLLATE "C",
    PRIMARY KEY (direction, seq)
);
COMMENT ON COLUMN backfill_control.entry.op IS
    'c create, u update, d delete, t truncate, m marker: the captured spelling of the key is gone, its row lives under another';

-- Every batch that added entries. The nonce lets the receiver notice a control
-- database that was restored and has given its numbers out again.
CREATE TABLE backfill_control.batch (
    direction integer NOT NULL,
    first_seq bigint NOT NULL,
    last_seq  bigint NOT NULL,
    nonce     text NOT NULL,
    at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (direction, last_seq)
);

-- When the receiver acknowledged up to which entry.
CREATE TABLE backfill_control.ack (
    direction integer NOT NULL,
    seq       bigint NOT NULL,
    at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (direction, seq)
);

-- Changes the receiver has set aside: held (it waits for a parent row) or
-- quarantined (it was refused). The truth is in the receiver's own table; skipped
-- ones stay here only.
CREATE TABLE backfill_control.quarantine (
    direction integer NOT NULL,
    seq       bigint NOT NULL,
    table_id  integer NOT NULL,
    key       text[],
    state     text NOT NULL CHECK (state IN ('held', 'quarantined', 'skipped')),
    reason    text NOT NULL,
    since     timestamptz NOT NULL,
    wish      text CHECK (wish IN ('retry', 'skip')), -- what a person asked the receiving agent to do
    wished_by text,
    PRIMARY KEY (direction, seq)
);

CREATE TABLE backfill_control.request (
    id             bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    direction      integer NOT NULL REFERENCES backfill_control.direction,
    table_id       integer NOT NULL REFERENCES backfill_control.table_config,
    mode           text NOT NULL,
    key            text[],
    state          text NOT NULL DEFAULT 'PENDING',
    paused         boolean NOT NULL DEFAULT false,
    requested_by   text NOT NULL,
    requested_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    note           text NOT NULL DEFAULT '',
    started_at     timestamptz,
    walked_at      timestamptz,
    reviewed_by    text,
    reviewed_at    timestamptz,
    review_note    text NOT NULL DEFAULT '',
    closed_at      timestamptz,
    reason         text NOT NULL DEFAULT '',
    waiting        text NOT NULL DEFAULT '',
    revision       bigint NOT NULL DEFAULT 0,
    expected       bigint NOT NULL DEFAULT 0,
    staged         bigint NOT NULL DEFAULT 0,
    resume_key     text[],
    upper_key      text[],
    layout_id      bigint REFERENCES backfill_control.layout,
    -- the lease: who walks until when; epoch fences out an older holder
    epoch          bigint NOT NULL DEFAULT 0,
    holder         text NOT NULL DEFAULT '',
    lease_until    timestamptz,
    -- taken before the first page: entries up to start_seq were read before it,
    -- and no history read later than floor may be removed while this is open
    start_seq      bigint,
    floor          pg_snapshot,
    -- effects, counted as the receiver's agent goes through the staged rows
    classified     bigint NOT NULL DEFAULT 0, -- the last staged position it has judged
    n_insert       bigint NOT NULL DEFAULT 0,
    n_overwrite    bigint NOT NULL DEFAULT 0,
    n_identical    bigint NOT NULL DEFAULT 0,
    -- release
    skip_identical boolean NOT NULL DEFAULT false,
    checked_seq    bigint, -- entries up to here have been looked at for overtaken rows
    released_up_to bigint NOT NULL DEFAULT 0,
    released       bigint NOT NULL DEFAULT 0,
    skipped        bigint NOT NULL DEFAULT 0,
    superseded     bigint NOT NULL DEFAULT 0,
    superseded_undelivered bigint NOT NULL DEFAULT 0
);

-- One open request per table and direction, and one per row; whatever the race.
CREATE UNIQUE INDEX request_open ON backfill_control.request (direction, table_id, coalesce(key, '{}'))
    WHERE state IN ('PENDING', 'IN_PROGRESS', 'AWAITING_REVIEW', 'RELEASING');
CREATE INDEX request_by_table ON backfill_control.request (direction, table_id, id);

-- Rows a walk has read. n numbers them in key order within a request.
CREATE TABLE backfill_control.staged (
    request_id    bigint NOT NULL,
    n             bigint NOT NULL,
    superseded_by bigint, -- the entry that overtook the row
    snap          pg_snapshot NOT NULL,
    key           text[] COLLATE "C" NOT NULL,
    row           text[] COLLATE "C" NOT NULL,
    PRIMARY KEY (request_id, n),
    UNIQUE (request_id, key)
);

CREATE TABLE backfill_control.effect (
    request_id bigint NOT NULL,
    n          bigint NOT NULL,
    effect     "char" NOT NULL CHECK (effect IN ('i', 'o', '=')),
    receiver   text[] COLLATE "C", -- the receiver's row, in the layout of the staged one, when it differs
    PRIMARY KEY (request_id, n)
);
CREATE INDEX effect_by_kind ON backfill_control.effect (request_id, effect, n);

CREATE TABLE backfill_control.token (
    id         integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name       text NOT NULL UNIQUE,
    role       text NOT NULL CHECK (role IN ('viewer', 'requester', 'reviewer', 'admin')),
    sha256     bytea NOT NULL UNIQUE,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    used_at    timestamptz,
    revoked_at timestamptz
);

CREATE TABLE backfill_control.idempotency (
    account    text NOT NULL,
    key        text NOT NULL,
    method     text NOT NULL,
    path       text NOT NULL,
    body_hash  bytea NOT NULL,
    status     integer, -- NULL while the first call is under way
    location   text,
    body       bytea,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (account, key)
);

CREATE TABLE backfill_control.audit (
    id      bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    account text NOT NULL,
    action  text NOT NULL,
    site    text,
    subject text NOT NULL DEFAULT '',
    detail  jsonb NOT NULL DEFAULT '{}'
);

-- +goose Down
DROP SCHEMA backfill_control CASCADE;
