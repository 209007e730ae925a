-- +goose Up
-- Whom a sign-in provider vouches for may have a role on every site and a higher one on
-- some. A program that does not know this sees the roles on those sites only.
ALTER TABLE backfill_control.account
    DROP CONSTRAINT account_check,
    ADD CONSTRAINT account_check CHECK (role IS NOT NULL OR sites IS NOT NULL);

-- +goose Down
UPDATE backfill_control.account SET role = NULL WHERE sites IS NOT NULL;
ALTER TABLE backfill_control.account
    DROP CONSTRAINT account_check,
    ADD CONSTRAINT account_check CHECK ((role IS NULL) <> (sites IS NULL));
