-- +goose Up

-- What has to be proven before the reads of a table move to the receiver.
CREATE TABLE backfill_control.cutover (
    direction  integer NOT NULL REFERENCES backfill_control.direction,
    table_id   integer NOT NULL REFERENCES backfill_control.table_config ON DELETE CASCADE,
    objective  double precision NOT NULL DEFAULT 0.0001 CHECK (objective > 0 AND objective < 1),
    soak       interval NOT NULL DEFAULT '24 h' CHECK (soak >= interval '1 minute'),
    proof_age  interval NOT NULL DEFAULT '24 h' CHECK (proof_age >= interval '1 minute'),
    max_lag    interval NOT NULL DEFAULT '30 s' CHECK (max_lag >= interval '1 s'),
    sample     integer NOT NULL DEFAULT 0, -- reads a minute that the source's agent makes by itself
    set_by     text NOT NULL DEFAULT '',
    soak_since timestamptz NOT NULL DEFAULT clock_timestamp(), -- reads reported before it do not count
    mismatches bigint NOT NULL DEFAULT 0, -- ever
    answer     text, -- the last one on record
    PRIMARY KEY (direction, table_id)
);

-- Reads as the old path served them. Those found to match, or stale, are counted and
-- go; the others stay for people to look at.
CREATE TABLE backfill_control.shadow_read (
    n           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    direction   integer NOT NULL REFERENCES backfill_control.direction,
    table_id    integer NOT NULL REFERENCES backfill_control.table_config ON DELETE CASCADE,
    sampled     boolean NOT NULL, -- by the agent, not by an application
    reported_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    since_seq   bigint NOT NULL, -- a change made after the read has an entry above it
    key         text[] COLLATE "C" NOT NULL, -- as reported, later in the source's spelling
    columns     text[] NOT NULL, -- that were reported
    "values"    text[] NOT NULL, -- and as which texts
    found       boolean NOT NULL, -- false: the old path found no such row
    run_id      bigint, -- by which it is judged
    served      text[] COLLATE "C", -- what was served, as rows are compared
    compared    integer[], -- the places in it of the reported columns
    same        boolean, -- the source's row, when last read, was what was served
    source      text[] COLLATE "C", -- that row, when it was not
    verdict     text CHECK (verdict IN ('match', 'stale', 'mismatch', 'unknown')),
    problem     text NOT NULL DEFAULT ''
);
CREATE INDEX shadow_read_pending ON backfill_control.shadow_read (direction, table_id, n) WHERE run_id IS NULL AND verdict IS NULL;
CREATE INDEX shadow_read_by_run ON backfill_control.shadow_read (run_id, key);
CREATE INDEX shadow_read_judged ON backfill_control.shadow_read (direction, table_id, n) WHERE verdict IS NOT NULL;

-- Verdicts by the minute in which reads were reported. A soak's first minute begins
-- with it.
CREATE TABLE backfill_control.shadow_count (
    direction integer NOT NULL,
    table_id  integer NOT NULL,
    at        timestamptz NOT NULL,
    match     bigint NOT NULL,
    stale     bigint NOT NULL,
    mismatch  bigint NOT NULL,
    "unknown" bigint NOT NULL,
    PRIMARY KEY (direction, table_id, at)
);

-- A reconciliation of mode shadow compares the keys that were read. It is beside the
-- others of the table; what it finds is repaired and waived like theirs.
ALTER TABLE backfill_control.reconciliation DROP CONSTRAINT reconciliation_mode_check;
ALTER TABLE backfill_control.reconciliation ADD CONSTRAINT reconciliation_mode_check CHECK (mode IN ('full', 'sampled', 'leaves', 'repair', 'shadow'));
DROP INDEX backfill_control.reconciliation_open;
CREATE UNIQUE INDEX reconciliation_open ON backfill_control.reconciliation (direction, table_id) WHERE state IN ('PENDING', 'RUNNING') AND mode <> 'shadow';
CREATE UNIQUE INDEX reconciliation_shadow ON backfill_control.reconciliation (direction, table_id) WHERE state IN ('PENDING', 'RUNNING') AND mode = 'shadow';

-- The sequences behind the table's columns, as the side's agent last saw them.
ALTER TABLE backfill_control.table_side ADD COLUMN sequences jsonb, ADD COLUMN sequences_at timestamptz;

-- Changes that were dropped since a moment are looked for.
CREATE INDEX entry_dropped ON backfill_control.entry (direction, table_id, seq) WHERE dropped;

-- +goose Down
DROP INDEX backfill_control.entry_dropped;
ALTER TABLE backfill_control.table_side DROP COLUMN sequences, DROP COLUMN sequences_at;
DELETE FROM backfill_control.difference WHERE run_id IN (SELECT id FROM backfill_control.reconciliation WHERE mode = 'shadow' OR parent IN (SELECT id FROM backfill_control.reconciliation WHERE mode = 'shadow'));
DELETE FROM backfill_control.run_leaf WHERE run_id IN (SELECT id FROM backfill_control.reconciliation WHERE mode = 'shadow' OR parent IN (SELECT id FROM backfill_control.reconciliation WHERE mode = 'shadow'));
DELETE FROM backfill_control.reconciliation WHERE parent IN (SELECT id FROM backfill_control.reconciliation WHERE mode = 'shadow');
DELETE FROM backfill_control.reconciliation WHERE mode = 'shadow';
DROP INDEX backfill_control.reconciliation_shadow, backfill_control.reconciliation_open;
CREATE UNIQUE INDEX reconciliation_open ON backfill_control.reconciliation (direction, table_id) WHERE state IN ('PENDING', 'RUNNING');
ALTER TABLE backfill_control.reconciliation DROP CONSTRAINT reconciliation_mode_check;
ALTER TABLE backfill_control.reconciliation ADD CONSTRAINT reconciliation_mode_check CHECK (mode IN ('full', 'sampled', 'leaves', 'repair'));
DROP TABLE backfill_control.shadow_count, backfill_control.shadow_read, backfill_control.cutover;
