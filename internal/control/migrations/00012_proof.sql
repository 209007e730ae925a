-- +goose Up

-- Where a walk may begin, because the receiver provably holds what comes before.
ALTER TABLE backfill_control.request
    ADD COLUMN proof_at    timestamptz, -- when it was settled, NULL before
    ADD COLUMN proven_rows bigint NOT NULL DEFAULT 0,
    ADD COLUMN proven_key  text[];      -- the walk begins after it

-- Leaves the source's agent has hashed, for the receiver's to compare.
CREATE TABLE backfill_control.leaf (
    request_id bigint NOT NULL,
    n          integer NOT NULL,
    after_key  text[],
    upto_key   text[] NOT NULL,
    rows       bigint NOT NULL,
    sum1       text NOT NULL,
    sum2       text NOT NULL,
    -- the queue's end once everything the leaf's snapshot saw in the outbox was pushed:
    -- the receiver may be looked at from there on
    seq        bigint NOT NULL,
    equal      boolean, -- NULL until the receiver's agent has looked
    PRIMARY KEY (request_id, n)
);

-- +goose Down
DROP TABLE backfill_control.leaf;
ALTER TABLE backfill_control.request DROP COLUMN proof_at, DROP COLUMN proven_rows, DROP COLUMN proven_key;
