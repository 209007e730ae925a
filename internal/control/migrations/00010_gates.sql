-- +goose Up

-- Gates hold back walks and releases of a site, or of one of its tables. What was
-- last measured for one stands beside it: the side's agent writes it.
CREATE TABLE backfill_control.gate (
    site        text NOT NULL REFERENCES backfill_control.site,
    name        text NOT NULL,
    side        text NOT NULL,
    table_id    integer REFERENCES backfill_control.table_config ON DELETE CASCADE, -- NULL: all tables of the site
    kind        text NOT NULL,
    "limit"     double precision NOT NULL,
    url         text NOT NULL DEFAULT '',
    query       text NOT NULL DEFAULT '',
    max_age     double precision NOT NULL DEFAULT 0, -- seconds, 0 for the default
    value       double precision,
    problem     text NOT NULL DEFAULT '', -- why there is no value
    measured_at timestamptz,
    PRIMARY KEY (site, name),
    FOREIGN KEY (site, side) REFERENCES backfill_control.side (site, name)
);

-- How long closed gates have held a request back, by gate.
CREATE TABLE backfill_control.throttled (
    request_id bigint NOT NULL,
    gate       text NOT NULL,
    kind       text NOT NULL,
    seconds    double precision NOT NULL,
    PRIMARY KEY (request_id, gate)
);
-- Since when a closed gate has held it back without a break.
ALTER TABLE backfill_control.request ADD COLUMN waiting_since timestamptz;

-- +goose Down
ALTER TABLE backfill_control.request DROP COLUMN waiting_since;
DROP TABLE backfill_control.throttled, backfill_control.gate;
