-- +goose Up

-- What the source table was made of when the walk began: rows read under another
-- shape are doubtful.
ALTER TABLE backfill_control.request ADD COLUMN shape text;
-- How far changes had been applied at least when the receiver's agent judged the
-- staged rows: what it found identical may have been changed by entries above.
ALTER TABLE backfill_control.request ADD COLUMN judged_seq bigint;
-- Where the site's present epoch begins: the receiver applies what comes after.
ALTER TABLE backfill_control.direction ADD COLUMN epoch_seq bigint NOT NULL DEFAULT 0;

-- +goose Down
ALTER TABLE backfill_control.direction DROP COLUMN epoch_seq;
ALTER TABLE backfill_control.request DROP COLUMN judged_seq;
ALTER TABLE backfill_control.request DROP COLUMN shape;
