-- +goose Up
-- The oldest version whose programs can work with this schema: one that does not know
-- the newest migrations goes on when it knows this one. A migration that earlier
-- programs cannot live with raises it to its own number, in its own transaction:
--   UPDATE backfill_control.compatible SET oldest = 99;
CREATE TABLE backfill_control.compatible (
    one    boolean PRIMARY KEY DEFAULT true CHECK (one),
    oldest bigint NOT NULL
);
INSERT INTO backfill_control.compatible (oldest) VALUES (50);
