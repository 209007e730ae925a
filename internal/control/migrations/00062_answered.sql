-- +goose Up
-- Who has had the answer on record. A program that does not know this puts an answer on
-- record once, for whoever asks first.
ALTER TABLE backfill_control.cutover ADD COLUMN answered_to text[] NOT NULL DEFAULT '{}';

-- +goose Down
ALTER TABLE backfill_control.cutover DROP COLUMN answered_to;
