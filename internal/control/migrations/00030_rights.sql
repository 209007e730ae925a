-- +goose Up
-- A role on every site, or a role for each of some sites.
ALTER TABLE backfill_control.token
    ALTER COLUMN role DROP NOT NULL,
    ADD COLUMN sites      jsonb CHECK (jsonb_typeof(sites) = 'object'),
    ADD COLUMN expires_at timestamptz,
    ADD CHECK ((role IS NULL) <> (sites IS NULL));

-- From where it was done, and by what way: token, session, header, temporal.
ALTER TABLE backfill_control.audit
    ADD COLUMN via     text NOT NULL DEFAULT '',
    ADD COLUMN address text NOT NULL DEFAULT '';

-- +goose Down
DELETE FROM backfill_control.token WHERE role IS NULL;
ALTER TABLE backfill_control.token DROP COLUMN sites, DROP COLUMN expires_at, ALTER COLUMN role SET NOT NULL;
ALTER TABLE backfill_control.audit DROP COLUMN via, DROP COLUMN address;
