-- +goose Up

-- How the receiver's rows are made from the source's, as it was given, and as it was checked.
ALTER TABLE backfill_control.table_config ADD COLUMN mapping jsonb, ADD COLUMN made jsonb, ADD COLUMN mapping_version integer NOT NULL DEFAULT 0;

-- Both sides are in one database: each table goes to another one there.
ALTER TABLE backfill_control.site ADD COLUMN one_database boolean NOT NULL DEFAULT false;

-- What a mapping makes of a staged row, or why it cannot.
ALTER TABLE backfill_control.effect ADD COLUMN result text[] COLLATE "C", ADD COLUMN problem text;
-- In which columns that is, and the receiver's row beside it.
ALTER TABLE backfill_control.request ADD COLUMN result_layout bigint REFERENCES backfill_control.layout;

-- A mapping that is checked against both sides before it is set; whoever asked removes it.
CREATE TABLE backfill_control.mapping_trial (
    id            bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    site          text NOT NULL,
    source_side   text NOT NULL,
    receiver_side text NOT NULL,
    source        text NOT NULL,
    target        text NOT NULL,
    mapping       jsonb NOT NULL,
    sample        integer NOT NULL, -- rows to try it on
    layout        jsonb,            -- of the source's table, once its agent has looked
    rows          jsonb,            -- of the source, then with what is made of them
    made          jsonb,            -- once the receiver's agent has looked
    fields        jsonb,            -- what is wrong with it, once that is known
    agreed        boolean NOT NULL DEFAULT false, -- the source's agent has looked again
    asked_at      timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- +goose Down
DROP TABLE backfill_control.mapping_trial;
ALTER TABLE backfill_control.request DROP COLUMN result_layout;
ALTER TABLE backfill_control.effect DROP COLUMN result, DROP COLUMN problem;
ALTER TABLE backfill_control.site DROP COLUMN one_database;
ALTER TABLE backfill_control.table_config DROP COLUMN mapping, DROP COLUMN made, DROP COLUMN mapping_version;
