-- +goose Up

-- Tables whose changes a receiver does not apply for now, because too many of their
-- rows were refused in a row. Their changes above seq wait, although the direction's
-- position goes on. The truth is in the receiver's own table.
CREATE TABLE backfill_control.stopped (
    direction integer NOT NULL,
    table_id  integer NOT NULL,
    seq       bigint NOT NULL,
    reason    text NOT NULL,
    since     timestamptz NOT NULL,
    wished_by text, -- who asked for it to be tried again
    PRIMARY KEY (direction, table_id)
);

ALTER TABLE backfill_control.table_side
    -- what the table was made of when the agent last looked
    ADD COLUMN shape text,
    -- when capture was last seen healthy
    ADD COLUMN capture_seen timestamptz,
    -- why rows may differ on the other side although all captured changes were applied,
    -- since when, and when last; NULL once a backfill that began later has finished
    ADD COLUMN gap text,
    ADD COLUMN gap_since timestamptz,
    ADD COLUMN gap_last timestamptz,
    ADD COLUMN gap_xid xid8; -- the source's last transaction with a gap

-- +goose Down
ALTER TABLE backfill_control.table_side DROP COLUMN shape, DROP COLUMN capture_seen, DROP COLUMN gap, DROP COLUMN gap_since, DROP COLUMN gap_last, DROP COLUMN gap_xid;
DROP TABLE backfill_control.stopped;
