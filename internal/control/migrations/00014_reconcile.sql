-- +goose Up

CREATE TABLE backfill_control.reconciliation (
    id              bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    direction       integer NOT NULL REFERENCES backfill_control.direction,
    table_id        integer NOT NULL REFERENCES backfill_control.table_config,
    mode            text NOT NULL CHECK (mode IN ('full', 'sampled', 'leaves', 'repair')),
    sample          integer, -- leaves compared in full by a sampled run
    parent          bigint REFERENCES backfill_control.reconciliation, -- whose leaves are looked at again
    state           text NOT NULL DEFAULT 'PENDING' CHECK (state IN ('PENDING', 'RUNNING', 'FINISHED', 'CANCELLED', 'FAILED')),
    requested_by    text NOT NULL,
    requested_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    note            text NOT NULL DEFAULT '',
    started_at      timestamptz,
    closed_at       timestamptz,
    reason          text NOT NULL DEFAULT '',
    waiting         text NOT NULL DEFAULT '',
    -- how the receiver's table was made when its agent first looked
    receiver_layout bigint REFERENCES backfill_control.layout,
    receiver_shape  text,
    receiver_order  text[], -- of the key columns, as that side sorts them
    -- and the source's; with that the run begins
    layout_id       bigint REFERENCES backfill_control.layout,
    shape           text,
    normaliser      integer,
    excluded        text[] NOT NULL DEFAULT '{}',
    buckets         integer NOT NULL DEFAULT 0, -- 0: leaves are ranges of keys
    leaf_rows       integer,
    floor           pg_snapshot, -- taken before the first leaf was read
    touched         boolean NOT NULL DEFAULT false, -- a repair's keys were recorded for sending
    cut             boolean NOT NULL DEFAULT false, -- every leaf is there
    leaves          bigint NOT NULL DEFAULT 0,
    -- set when it closes
    verdict         text CHECK (verdict IN ('EQUAL', 'DIFFERENT', 'UNKNOWN')),
    root            text,
    receiver_rows   bigint
);
-- One open run per table and direction, whatever the race.
CREATE UNIQUE INDEX reconciliation_open ON backfill_control.reconciliation (direction, table_id) WHERE state IN ('PENDING', 'RUNNING');
CREATE INDEX reconciliation_by_table ON backfill_control.reconciliation (direction, table_id, id);

-- cut: to be read on the source; hashed: to be compared by hash; suspect: its rows
-- are to be listed; listed: to be compared row by row. The others are final.
CREATE TABLE backfill_control.run_leaf (
    run_id         bigint NOT NULL,
    n              bigint NOT NULL,
    bucket         integer NOT NULL DEFAULT 0,
    attempts       integer NOT NULL DEFAULT 0, -- times its rows were listed
    sampled        boolean NOT NULL DEFAULT true,
    state          text NOT NULL CHECK (state IN ('cut', 'hashed', 'suspect', 'listed', 'equal', 'different', 'unknown', 'counted')),
    lower          text[] COLLATE "C",
    upper          text[] COLLATE "C",
    source_count   bigint NOT NULL DEFAULT 0,
    source_sums    text[] NOT NULL DEFAULT '{"",""}',
    receiver_count bigint,
    receiver_sums  text[],
    -- the source's last read: entries read later than snap have a seq above after_seq;
    -- the receiver looks once everything up to wait_seq is applied there
    snap           pg_snapshot,
    after_seq      bigint,
    wait_seq       bigint,
    source_position bigint, -- how far the other direction was applied on the source then
    not_before     timestamptz, -- when to list it again
    judged_at      timestamptz,
    origin         bigint, -- the leaf of the run it was taken from
    PRIMARY KEY (run_id, n)
);
CREATE INDEX run_leaf_by_state ON backfill_control.run_leaf (run_id, state, n);

-- Rows of a suspect leaf as the source has listed them; gone once they are judged.
CREATE TABLE backfill_control.leaf_row (
    run_id bigint NOT NULL,
    leaf   bigint NOT NULL,
    key    text[] COLLATE "C" NOT NULL,
    found  boolean NOT NULL,
    "row"  text[] COLLATE "C"
);
CREATE INDEX leaf_row_by_leaf ON backfill_control.leaf_row (run_id, leaf);

-- Keys that differ, or are not settled yet.
CREATE TABLE backfill_control.difference (
    run_id     bigint NOT NULL,
    n          bigint GENERATED ALWAYS AS IDENTITY,
    leaf       bigint NOT NULL,
    kind       text NOT NULL CHECK (kind IN ('missing', 'different', 'surplus')),
    settled    boolean NOT NULL, -- false: it was in flight when it was last looked at
    state      text NOT NULL DEFAULT 'open' CHECK (state IN ('open', 'repaired', 'waived')),
    repair     bigint, -- the run that sends it again
    key        text[] COLLATE "C" NOT NULL,
    here       text[] COLLATE "C", -- the receiver's spelling of the key
    source     text[] COLLATE "C",
    receiver   text[] COLLATE "C",
    cause      text NOT NULL DEFAULT '',
    decided_by text,
    decided_at timestamptz,
    note       text NOT NULL DEFAULT '',
    PRIMARY KEY (run_id, n)
);
CREATE INDEX difference_by_leaf ON backfill_control.difference (run_id, leaf);
CREATE INDEX difference_open ON backfill_control.difference (run_id, n) WHERE settled AND state = 'open';

-- Tables that are reconciled by the clock.
CREATE TABLE backfill_control.reconcile_schedule (
    direction integer NOT NULL REFERENCES backfill_control.direction,
    table_id  integer NOT NULL REFERENCES backfill_control.table_config ON DELETE CASCADE,
    every     interval NOT NULL CHECK (every >= interval '1 minute'),
    mode      text NOT NULL CHECK (mode IN ('full', 'sampled')),
    sample    integer,
    set_by    text NOT NULL,
    PRIMARY KEY (direction, table_id)
);

-- The key that signs certificates, made when the first one is asked for.
CREATE TABLE backfill_control.signing_key (
    one        boolean PRIMARY KEY DEFAULT true CHECK (one),
    seed       bytea NOT NULL,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- The reconciliation whose differing keys a request walks, in mode differences.
ALTER TABLE backfill_control.request ADD COLUMN run_id bigint REFERENCES backfill_control.reconciliation;

-- +goose Down
ALTER TABLE backfill_control.request DROP COLUMN run_id;
DROP TABLE backfill_control.signing_key, backfill_control.reconcile_schedule, backfill_control.difference, backfill_control.leaf_row,
    backfill_control.run_leaf, backfill_control.reconciliation;
