-- +goose Up

-- How many reads of the source were made safe on it, as far as anything read was
-- stored here. A source that remembers fewer was set back since.
ALTER TABLE backfill_control.direction ADD COLUMN reads bigint NOT NULL DEFAULT 0;
ALTER TABLE backfill_control.side
    ADD COLUMN epoch integer NOT NULL DEFAULT 1, -- the latest the side was seen in
    -- why the side may not go on until an admin opens a new epoch or corrects where
    -- its agent looks, NULL when it may: nothing of it is released or applied
    ADD COLUMN halted text;

-- +goose Down
ALTER TABLE backfill_control.side DROP COLUMN halted, DROP COLUMN epoch;
ALTER TABLE backfill_control.direction DROP COLUMN reads;
