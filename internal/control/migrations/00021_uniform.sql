-- +goose Up

-- Where releasing would do the same to every row of a chunk, and there is nothing to keep
-- of the receiver's rows, that is said once: the rows have no effects of their own.
ALTER TABLE backfill_control.judged ADD COLUMN uniform "char" CHECK (uniform IN ('i', '='));

-- +goose Down
INSERT INTO backfill_control.effect (request_id, n, effect)
SELECT j.request_id, n, j.uniform FROM (SELECT *, coalesce(lag(upto) OVER (PARTITION BY request_id ORDER BY upto), 0) AS after FROM backfill_control.judged) j,
       generate_series(j.after + 1, j.upto) n WHERE j.uniform IS NOT NULL;
ALTER TABLE backfill_control.judged DROP COLUMN uniform;
