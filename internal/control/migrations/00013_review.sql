-- +goose Up

-- Whoever asked for a backfill may not approve it.
ALTER TABLE backfill_control.site ADD COLUMN second_person boolean NOT NULL DEFAULT false;
-- By what way a decision came, where that is not the API: 'temporal' for a signal.
ALTER TABLE backfill_control.request ADD COLUMN reviewed_via text NOT NULL DEFAULT '';

-- ?: looked at, and not decided by what is there.
ALTER TABLE backfill_control.effect DROP CONSTRAINT effect_effect_check;
ALTER TABLE backfill_control.effect ADD CONSTRAINT effect_effect_check CHECK (effect IN ('i', 'o', '=', '?'));

-- The effects of each chunk of staged rows that was judged, so that the millionth
-- row of an effect is found without counting through the others.
CREATE TABLE backfill_control.judged (
    request_id  bigint NOT NULL,
    upto        bigint NOT NULL, -- the last staged position of the chunk; it begins after the one before
    n_insert    bigint NOT NULL,
    n_overwrite bigint NOT NULL,
    n_identical bigint NOT NULL,
    PRIMARY KEY (request_id, upto)
);

CREATE INDEX staged_superseded ON backfill_control.staged (request_id, n) WHERE superseded_by IS NOT NULL;

-- +goose Down
DROP INDEX backfill_control.staged_superseded;
DROP TABLE backfill_control.judged;
DELETE FROM backfill_control.effect WHERE effect = '?';
ALTER TABLE backfill_control.effect DROP CONSTRAINT effect_effect_check;
ALTER TABLE backfill_control.effect ADD CONSTRAINT effect_effect_check CHECK (effect IN ('i', 'o', '='));
ALTER TABLE backfill_control.request DROP COLUMN reviewed_via;
ALTER TABLE backfill_control.site DROP COLUMN second_person;
