-- +goose Up
-- People whom a sign-in provider vouches for: who they are there, whatever they are called.
CREATE TABLE backfill_control.person (
    issuer  text,
    subject text,
    account text NOT NULL UNIQUE REFERENCES backfill_control.account ON DELETE CASCADE,
    PRIMARY KEY (issuer, subject)
);

-- +goose Down
DROP TABLE backfill_control.person;
