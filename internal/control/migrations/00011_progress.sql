-- +goose Up

-- How a walk and a release went: a bounded number of points per request.
CREATE TABLE backfill_control.progress (
    request_id bigint NOT NULL,
    at         timestamptz NOT NULL DEFAULT clock_timestamp(),
    releasing  boolean NOT NULL,
    rows       bigint NOT NULL,           -- staged, or passed by the release
    throttled  double precision NOT NULL, -- seconds that gates have taken so far
    position   double precision,          -- part of the keys the walk has passed, as PostgreSQL estimates
    PRIMARY KEY (request_id, at)
);

ALTER TABLE backfill_control.request
    ADD COLUMN position     double precision,
    -- the last forecast: rows per second while not throttled, the part of the time
    -- that is, and the seconds left when it was made
    ADD COLUMN forecast_at  timestamptz,
    ADD COLUMN rate         double precision NOT NULL DEFAULT 0,
    ADD COLUMN duty         double precision NOT NULL DEFAULT 0,
    ADD COLUMN left_p50     double precision,
    ADD COLUMN left_p90     double precision,
    -- the queue for a place among the walks that may go on at once
    ADD COLUMN queued_at    timestamptz,
    ADD COLUMN queued_seen  timestamptz,
    ADD COLUMN admitted_until timestamptz;

-- What waits in the outboxes, as the agents last reported it.
ALTER TABLE backfill_control.side ADD COLUMN outbox_at timestamptz;
ALTER TABLE backfill_control.table_side
    ADD COLUMN outbox        bigint NOT NULL DEFAULT 0,
    ADD COLUMN outbox_first  bigint,      -- the oldest record's number
    ADD COLUMN outbox_oldest timestamptz; -- when it was seen first, at the latest

-- Control workers that live, so that one can tell when none does.
CREATE TABLE backfill_control.attendance (
    name    text PRIMARY KEY,
    seen_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- What requests that retention has removed had staged, released and been throttled,
-- so that totals never fall.
CREATE TABLE backfill_control.tally (
    direction integer NOT NULL,
    table_id  integer NOT NULL,
    what      text NOT NULL,
    value     double precision NOT NULL,
    PRIMARY KEY (direction, table_id, what)
);
CREATE INDEX ack_by_time ON backfill_control.ack (direction, at);

-- +goose Down
DROP INDEX backfill_control.ack_by_time;
DROP TABLE backfill_control.tally;
DROP TABLE backfill_control.attendance, backfill_control.progress;
ALTER TABLE backfill_control.table_side DROP COLUMN outbox, DROP COLUMN outbox_first, DROP COLUMN outbox_oldest;
ALTER TABLE backfill_control.side DROP COLUMN outbox_at;
ALTER TABLE backfill_control.request DROP COLUMN position, DROP COLUMN forecast_at, DROP COLUMN rate, DROP COLUMN duty,
    DROP COLUMN left_p50, DROP COLUMN left_p90, DROP COLUMN queued_at, DROP COLUMN queued_seen, DROP COLUMN admitted_until;
