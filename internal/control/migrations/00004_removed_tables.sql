-- +goose Up

-- A table taken out of a site keeps its row, which history, requests and audit name;
-- configured again it is another table, with a row of its own.
ALTER TABLE backfill_control.table_config ADD COLUMN removed_at timestamptz;
ALTER TABLE backfill_control.table_config DROP CONSTRAINT table_config_site_name_key;
CREATE UNIQUE INDEX table_config_name ON backfill_control.table_config (site, name) WHERE removed_at IS NULL;

-- +goose Down
DROP INDEX backfill_control.table_config_name;
ALTER TABLE backfill_control.table_config ADD UNIQUE (site, name);
ALTER TABLE backfill_control.table_config DROP COLUMN removed_at;
