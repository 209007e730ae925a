-- +goose Up
-- People who sign in with a password. Names differ by more than case.
CREATE TABLE backfill_control.account (
    name       text PRIMARY KEY,
    role       text CHECK (role IN ('viewer', 'requester', 'reviewer', 'admin')),
    sites      jsonb CHECK (jsonb_typeof(sites) = 'object'),
    password   text NOT NULL, -- argon2id, with its salt and cost
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    signed_in_at timestamptz,
    CHECK ((role IS NULL) <> (sites IS NULL))
);
CREATE UNIQUE INDEX account_person ON backfill_control.account (lower(name));

-- Who is signed in on the web pages: with a password, or with a token.
CREATE TABLE backfill_control.session (
    sha256     bytea PRIMARY KEY, -- of what is in the cookie
    account    text REFERENCES backfill_control.account ON DELETE CASCADE,
    token      bytea, -- sha256 of its secret: another secret under its name is another token
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    seen_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    expires_at timestamptz NOT NULL,
    address    text NOT NULL,
    CHECK ((account IS NULL) <> (token IS NULL))
);

-- How often signing in was tried of late under a name, and from an address.
CREATE TABLE backfill_control.sign_in (
    subject text PRIMARY KEY,
    tries   integer NOT NULL,
    since   timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- Links that sign in once.
CREATE TABLE backfill_control.sign_in_link (
    sha256     bytea PRIMARY KEY,
    expires_at timestamptz NOT NULL,
    used_at    timestamptz
);

-- +goose Down
DROP TABLE backfill_control.sign_in_link, backfill_control.sign_in, backfill_control.session, backfill_control.account;
