package side

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"backfill/internal/backfill"
	"backfill/internal/row"
)

// Identity is the cluster and timeline a side runs on.
type Identity struct{ System, Timeline string }

// Standing is which database a side is, and what it remembers.
type Standing struct {
	Identity
	Database uint32 // its oid in the cluster
	Epoch    int
	Batch    int64  // the number of the last push whose records were deleted here
	Nonce    string // and its nonce
	Reads    int64  // how many reads were made safe here
}

// Standing reads where this side stands. It is Refused when this cannot be the
// side's database: a standby, one that was not set up, or one that holds what was
// set up for another side of the site.
func (db *DB) Standing(ctx context.Context) (s Standing, err error) {
	err = db.in(ctx, reading, func(tx pgx.Tx) error {
		if err := tx.QueryRow(ctx, identitySQL+`, (SELECT oid FROM pg_database WHERE datname = current_database())`).Scan(&s.System, &s.Timeline, &s.Database); err != nil {
			return err
		}
		if s.Timeline == "" {
			return backfill.Errorf(backfill.Refused,
				"%s is a standby now: an agent works on the primary, because a standby's snapshots cannot be compared; let the agent's connection string lead there", db.Side)
		}
		setUp, others, err := db.apart(ctx, tx)
		if err != nil {
			return err
		}
		if !setUp {
			return db.notSetUp(others)
		}
		return db.orNotSetUp(tx.QueryRow(ctx, `SELECT epoch, batch, nonce, reads FROM `+db.schema+`.pushed`).Scan(&s.Epoch, &s.Batch, &s.Nonce, &s.Reads))
	})
	return s, err
}

// AppliedPosition reads how far the other side's changes have been applied here.
func (db *DB) AppliedPosition(ctx context.Context) (at Position, err error) {
	err = db.in(ctx, reading, func(tx pgx.Tx) error {
		return tx.QueryRow(ctx, `SELECT seq, nonce FROM `+db.schema+`.applied`).Scan(&at.Seq, &at.Nonce)
	})
	return at, db.orNotSetUp(err)
}

// Place is one database of one running server, however it was reached.
type Place struct {
	System   string
	Database uint32
	Started  string // a copy of the cluster has another time
}

// Place reads where the side's database is.
func (db *DB) Place(ctx context.Context) (p Place, err error) {
	err = db.in(ctx, reading, func(tx pgx.Tx) error {
		return tx.QueryRow(ctx, `
			SELECT (SELECT system_identifier::text FROM pg_control_system()), oid, pg_postmaster_start_time()::text FROM pg_database WHERE datname = current_database()`).
			Scan(&p.System, &p.Database, &p.Started)
	})
	return p, err
}

// identitySQL reads the cluster's system identifier, which a failover keeps, and the
// timeline, which it changes; the timeline comes from the WAL's present position,
// because the last checkpoint lags behind a promotion. A standby has none.
const identitySQL = `
	SELECT (SELECT system_identifier::text FROM pg_control_system()),
	       CASE WHEN pg_is_in_recovery() THEN '' ELSE substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8) END`

// ShareDatabase says that both sides of the site are in one database.
func (db *DB) ShareDatabase() { db.shared.Store(true) }

// Apart fails when the database holds what was set up for the other side of the site.
func (db *DB) Apart(ctx context.Context) error {
	return db.in(ctx, reading, func(tx pgx.Tx) error {
		_, _, err := db.apart(ctx, tx)
		return err
	})
}

// apart fails when the database holds what was set up for the other side of the
// site: it is the same database, however it was reached, or a copy of it. It tells
// whether the side itself is set up, and what else is.
func (db *DB) apart(ctx context.Context, tx pgx.Tx) (setUp bool, others []string, err error) {
	if err := tx.QueryRow(ctx, `
		SELECT coalesce(bool_or(l = $1), false), coalesce(array_agg(l ORDER BY l) FILTER (WHERE l <> $1), '{}')
		  FROM pg_namespace, obj_description(oid, 'pg_namespace') l
		 WHERE starts_with(nspname::text, 'backfill_') AND starts_with(l, 'Backfill: site ')`, label(db.Site, db.Side)).Scan(&setUp, &others); err != nil {
		return false, nil, err
	}
	for _, l := range others {
		if name, ok := strings.CutPrefix(l, label(db.Site, "")); ok && !db.shared.Load() {
			return false, nil, backfill.Errorf(backfill.Refused,
				"the database %s given for side %s holds what was set up for side %s of the same site: a site needs two databases, so check the connection string; if it is a copy of that database, first run there: DROP SCHEMA %s CASCADE",
				db.Where(), db.Side, name, row.Ident(SchemaName(db.Site, name)))
		}
	}
	return setUp, others, nil
}

// notSetUp says that the side's objects are not there, and whose are.
func (db *DB) notSetUp(others []string) error {
	message := fmt.Sprintf("side %s of site %s is not set up in the database %s: run backfill setup --site %s --side %s, or check the connection string",
		db.Side, db.Site, db.Where(), db.Site, db.Side)
	if len(others) > 0 {
		message += "; what is set up there is: " + strings.ReplaceAll(strings.Join(others, "; "), "Backfill: ", "")
	}
	return backfill.Errorf(backfill.Refused, "%s", message)
}

// orNotSetUp says so when a statement failed because the side was not set up.
func (db *DB) orNotSetUp(err error) error {
	switch SQLState(err) {
	case "42P01", "3F000":
		return db.notSetUp(nil)
	case "42501":
		return backfill.Errorf(backfill.Refused, "the agent's role %s may not use what is set up for side %s (%s): as an administrator run backfill setup --site %s --side %[2]s --role %[1]s", db.role(), db.Side, brief(err), db.Site)
	case "42703":
		return backfill.Errorf(backfill.Refused, "side %s of site %s was set up by an earlier version: run backfill setup --site %s --side %s", db.Side, db.Site, db.Site, db.Side)
	}
	return err
}

// met is the database a side was found on and found right.
type met struct {
	Identity
	reads int64
}

// Meet says which database the side was found on, and found right: its cluster and
// timeline, and how many reads it remembered at least. From then on nothing is read
// on another, or on one that was set back: a new connection can lead elsewhere.
func (db *DB) Meet(id Identity, reads int64) { db.met.Store(&met{id, reads}) }

// same fails when a transaction runs elsewhere than where the side was met. What it
// was met as is given, because it must have been known before the snapshot.
func (db *DB) same(ctx context.Context, tx pgx.Tx, as *met) error {
	if as == nil {
		return nil
	}
	var now met
	if err := tx.QueryRow(ctx, identitySQL+`, reads FROM `+db.schema+`.pushed`).Scan(&now.System, &now.Timeline, &now.reads); err != nil {
		return db.orNotSetUp(err)
	}
	switch {
	case now.Identity != as.Identity:
		return backfill.Errorf(backfill.Refused, "%s has become another cluster or timeline (system %s timeline %s, was %s timeline %s)",
			db.Side, now.System, now.Timeline, as.System, as.Timeline)
	case now.reads < as.reads:
		return backfill.Errorf(backfill.Refused, "%s has been set back to an earlier state", db.Side)
	}
	return nil
}

// beat makes one small synchronous write, which counts the read before it. What
// was read, though it may have been committed asynchronously, is then safe on disk
// too: a crash cannot take it back and give its transaction ids out again. And a
// side that later remembers fewer reads than were heard of was restored.
//
// It is made in a session of its own before the reading transaction ends. When
// that then ends well, its session has lived through the write: had the server
// crashed and come back in between, the write would prove nothing.
func (db *DB) beat(ctx context.Context, as *met) (reads int64, err error) {
	err = db.over(ctx, db.beats, writing, func(tx pgx.Tx) error {
		if err := db.same(ctx, tx, as); err != nil {
			return err
		}
		return db.orNotSetUp(tx.QueryRow(ctx, `UPDATE `+db.schema+`.pushed SET reads = reads + 1 RETURNING reads`).Scan(&reads))
	})
	return reads, err
}

// Begin starts a new epoch on this side, unless it has begun: the number and nonce
// of the last push and the position are taken over, and what was set aside is
// forgotten. Captured keys stay in the outbox.
func (db *DB) Begin(ctx context.Context, epoch int, batch int64, nonce string, at Position) error {
	return db.in(ctx, writing, func(tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, `UPDATE `+db.schema+`.pushed SET epoch = $1, batch = $2, nonce = $3 WHERE epoch < $1`, epoch, batch, nonce)
		if err != nil || tag.RowsAffected() == 0 {
			return err
		}
		if _, err := tx.Exec(ctx, `UPDATE `+db.schema+`.applied SET seq = $1, nonce = $2`, at.Seq, at.Nonce); err != nil {
			return err
		}
		_, err = tx.Exec(ctx, `DELETE FROM `+db.schema+`.held; DELETE FROM `+db.schema+`.refused; DELETE FROM `+db.schema+`.own`)
		return err
	})
}
