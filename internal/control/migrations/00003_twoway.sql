-- +goose Up

-- Tables captured on both sides. A stamp says up to which entry of the other
-- direction the side that read a row had seen that key's changes.
ALTER TABLE backfill_control.entry ADD COLUMN stamp bigint;
ALTER TABLE backfill_control.staged ADD COLUMN stamp bigint;
-- Of what was read for a request every row's stamp is at least that; and how far the
-- reverse direction was looked at for what its rows give way to.
ALTER TABLE backfill_control.request ADD COLUMN floor_stamp bigint;
ALTER TABLE backfill_control.request ADD COLUMN reverse_seq bigint;
-- Up to here the receiver has seen every change of a two-way table: none of them is
-- set aside or yet to come.
ALTER TABLE backfill_control.direction ADD COLUMN reach bigint NOT NULL DEFAULT 0;

-- What decides conflicts of a two-way table: a side that wins, 'quarantine', or ''
-- while the table is captured on one side. Two changes are judged by what was in
-- force when the earlier of them was pushed, which both sides know.
CREATE TABLE backfill_control.conflict_policy (
    table_id integer NOT NULL REFERENCES backfill_control.table_config ON DELETE CASCADE,
    since    bigint NOT NULL, -- for entries above it
    winner   text NOT NULL,
    PRIMARY KEY (table_id, since)
);

-- Entries that lost a conflict: what they hold is nowhere but in history.
CREATE TABLE backfill_control.conflict (
    direction integer NOT NULL,
    seq       bigint NOT NULL,
    to_seq    bigint, -- the entry that won, NULL when it had not been pushed
    note      uuid UNIQUE, -- of the side that noticed
    at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (direction, seq)
);

-- With the cluster's identifier: which database a side is, to notice two sites over
-- the same two.
ALTER TABLE backfill_control.side ADD COLUMN database_oid oid;

-- +goose Down
ALTER TABLE backfill_control.side DROP COLUMN database_oid;
DROP TABLE backfill_control.conflict;
DROP TABLE backfill_control.conflict_policy;
ALTER TABLE backfill_control.direction DROP COLUMN reach;
ALTER TABLE backfill_control.request DROP COLUMN reverse_seq;
ALTER TABLE backfill_control.request DROP COLUMN floor_stamp;
ALTER TABLE backfill_control.staged DROP COLUMN stamp;
ALTER TABLE backfill_control.entry DROP COLUMN stamp;
