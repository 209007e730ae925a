-- +goose Up

-- A leaf is hashed as a whole, where sums of its rows' hashes were taken before.
ALTER TABLE backfill_control.run_leaf ADD COLUMN source_digest text NOT NULL DEFAULT '', ADD COLUMN receiver_digest text;
UPDATE backfill_control.run_leaf SET source_digest = CASE WHEN source_sums[1] <> '' THEN array_to_string(source_sums, ' ') ELSE '' END, receiver_digest = array_to_string(receiver_sums, ' ');
ALTER TABLE backfill_control.run_leaf DROP COLUMN source_sums, DROP COLUMN receiver_sums;
DELETE FROM backfill_control.leaf;
ALTER TABLE backfill_control.leaf DROP COLUMN sum1, DROP COLUMN sum2, ADD COLUMN digest text NOT NULL;

-- +goose Down
DELETE FROM backfill_control.leaf;
ALTER TABLE backfill_control.leaf DROP COLUMN digest, ADD COLUMN sum1 text NOT NULL, ADD COLUMN sum2 text NOT NULL;
ALTER TABLE backfill_control.run_leaf ADD COLUMN source_sums text[] NOT NULL DEFAULT '{"",""}', ADD COLUMN receiver_sums text[];
UPDATE backfill_control.run_leaf SET source_sums = ARRAY[source_digest, ''], receiver_sums = ARRAY[receiver_digest, ''];
ALTER TABLE backfill_control.run_leaf DROP COLUMN source_digest, DROP COLUMN receiver_digest;
