package control

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"backfill/internal/backfill"
	"backfill/internal/proof"
)

const runColumns = `r.id, t.name, d.id, d.site, d.from_side, d.to_side, t.id, r.mode, coalesce(r.sample, 0), coalesce(r.parent, 0), r.state,
	r.requested_by, r.requested_at, r.started_at, r.closed_at, r.note, r.reason, r.waiting,
	coalesce(r.layout_id, 0), coalesce(r.shape, ''), coalesce(r.receiver_layout, 0), coalesce(r.receiver_shape, ''), r.receiver_order,
	coalesce(r.normaliser, 0), CASE WHEN r.layout_id IS NULL THEN t.excluded ELSE r.excluded END, r.buckets, coalesce(r.leaf_rows, 0), coalesce(r.floor::text, ''),
	r.touched, r.cut, r.leaves, d.to_side = ANY (t.captured_from),
	r.mode = 'shadow' OR EXISTS (SELECT FROM backfill_control.reconciliation p WHERE p.id = r.parent AND p.mode = 'shadow'), coalesce(r.verdict, ''), coalesce(r.root, ''), coalesce(r.receiver_rows, 0)`

const runFrom = ` FROM backfill_control.reconciliation r
	JOIN backfill_control.direction d ON d.id = r.direction
	JOIN backfill_control.table_config t ON t.id = r.table_id `

// countColumns and countFrom are how a run's leaves and keys stand.
const countColumns = `, l.*, k.*`

const countFrom = runFrom + `,
	LATERAL (SELECT count(*) FILTER (WHERE state = 'equal'), count(*) FILTER (WHERE state = 'different'), count(*) FILTER (WHERE state = 'unknown'),
	                count(*) FILTER (WHERE state = 'counted'), count(*) FILTER (WHERE state IN ('cut', 'hashed', 'suspect', 'listed')),
	                coalesce(sum(source_count), 0)::bigint, coalesce(sum(source_count) FILTER (WHERE state IN ('equal', 'different')), 0)::bigint
	           FROM backfill_control.run_leaf WHERE run_id = r.id) l,
	LATERAL (SELECT count(*) FILTER (WHERE settled AND kind = 'missing'), count(*) FILTER (WHERE settled AND kind = 'different'), count(*) FILTER (WHERE settled AND kind = 'surplus'),
	                count(*) FILTER (WHERE NOT settled), count(*) FILTER (WHERE settled AND state = 'open'), count(*) FILTER (WHERE state = 'repaired'), count(*) FILTER (WHERE state = 'waived')
	           FROM backfill_control.difference WHERE run_id = r.id) k `

func runFields(r *backfill.Reconciliation) []any {
	return []any{&r.ID, &r.Table, &r.Direction.ID, &r.Site, &r.From, &r.To, &r.TableID, &r.Mode, &r.Sample, &r.Parent, &r.State,
		&r.RequestedBy, &r.RequestedAt, &r.StartedAt, &r.ClosedAt, &r.Note, &r.Reason, &r.Waiting,
		&r.LayoutID, &r.Shape, &r.ReceiverLayoutID, &r.ReceiverShape, &r.ReceiverOrder,
		&r.Normaliser, &r.Excluded, &r.Buckets, &r.LeafRows, &r.Floor, &r.Touched, &r.Cut, &r.LeafCount, &r.Both, &r.ByKey, &r.Verdict, &r.Root, &r.ReceiverRows}
}

func scanRun(row pgx.CollectableRow) (*backfill.Reconciliation, error) {
	var r backfill.Reconciliation
	c := &r.Counts
	return &r, row.Scan(append(runFields(&r), &c.Equal, &c.Different, &c.Unknown, &c.Counted, &c.Pending, &c.Rows, &c.Covered,
		&c.Missing, &c.DifferentValues, &c.Surplus, &c.Unsettled, &c.Open, &c.Repaired, &c.Waived)...)
}

// NewReconciliation is a comparison that somebody asks for.
type NewReconciliation struct {
	Direction int32
	TableID   int32
	Mode      backfill.RunMode
	Sample    int
	Parent    int64   // of modes leaves and repair
	Leaf      int64   // of mode leaves
	Keys      []int64 // of mode repair: the differences to send, nil for all that can be
	By, Note  string
}

// CreateReconciliation records a run. When one is open for the same table and
// direction it returns a Conflict that names it.
func (s *Store) CreateReconciliation(ctx context.Context, n NewReconciliation) (*backfill.Reconciliation, error) {
	var id, open int64
	err := s.in(ctx, func(tx pgx.Tx) error {
		err := tx.QueryRow(ctx, `
			INSERT INTO backfill_control.reconciliation (direction, table_id, mode, sample, parent, requested_by, note)
			VALUES ($1, $2, $3, nullif($4::int, 0), nullif($5::bigint, 0), $6, $7)
			ON CONFLICT (direction, table_id) WHERE state IN ('PENDING', 'RUNNING') AND mode <> 'shadow' DO NOTHING RETURNING id`,
			n.Direction, n.TableID, n.Mode, n.Sample, n.Parent, n.By, n.Note).Scan(&id)
		if errors.Is(err, pgx.ErrNoRows) {
			return tx.QueryRow(ctx, `SELECT id FROM backfill_control.reconciliation WHERE direction = $1 AND table_id = $2 AND state IN ('PENDING', 'RUNNING') AND mode <> 'shadow'`,
				n.Direction, n.TableID).Scan(&open)
		}
		if err != nil {
			return err
		}
		if n.Parent != 0 {
			if err := inherit(ctx, tx, id, n); err != nil {
				return err
			}
		}
		if err := auditRun(ctx, tx, id, n.By, "reconciliation."+string(n.Mode), map[string]any{"note": n.Note, "parent": n.Parent, "leaf": n.Leaf, "keys": n.Keys}); err != nil {
			return err
		}
		return notifyID(ctx, tx, "reconciliation", id)
	})
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return nil, backfill.Errorf(backfill.Conflict, "a reconciliation of this table and direction has just closed: ask again")
	case err != nil:
		return nil, err
	case open != 0:
		return nil, backfill.Errorf(backfill.Conflict, "reconciliation %d of this table and direction is open: wait for its end, or cancel it", open)
	}
	return s.Reconciliation(ctx, id)
}

// inherit gives a run the leaves of its parent that it is to look at again, and
// marks the keys a repair sends.
func inherit(ctx context.Context, tx pgx.Tx, id int64, n NewReconciliation) error {
	which, args := `l.n = $3`, []any{id, n.Parent, n.Leaf}
	if n.Mode == backfill.RunRepair {
		tag, err := tx.Exec(ctx, `
			UPDATE backfill_control.difference SET repair = $1, decided_by = $3, decided_at = clock_timestamp(), note = $4
			 WHERE run_id = $2 AND settled AND state = 'open' AND kind IN ('missing', 'different') AND ($5::bigint[] IS NULL OR n = ANY ($5))`, id, n.Parent, n.By, n.Note, n.Keys)
		if err != nil {
			return err
		}
		if tag.RowsAffected() == 0 {
			return backfill.Errorf(backfill.Refused, "reconciliation %d has no open key of these that is missing or different: there is nothing to send", n.Parent)
		}
		which, args = `l.n IN (SELECT leaf FROM backfill_control.difference WHERE run_id = $2 AND repair = $1)`, args[:2]
	}
	tag, err := tx.Exec(ctx, `
		INSERT INTO backfill_control.run_leaf (run_id, n, bucket, state, lower, upper, origin)
		SELECT $1, row_number() OVER (ORDER BY l.n), l.bucket, 'cut', l.lower, l.upper, l.n FROM backfill_control.run_leaf l WHERE l.run_id = $2 AND `+which, args...)
	if err != nil {
		return err
	}
	if tag.RowsAffected() == 0 {
		return backfill.Errorf(backfill.NotFound, "no leaf %d in reconciliation %d", n.Leaf, n.Parent)
	}
	_, err = tx.Exec(ctx, `
		UPDATE backfill_control.reconciliation r SET cut = true, leaves = $3, buckets = p.buckets, leaf_rows = p.leaf_rows
		  FROM backfill_control.reconciliation p WHERE r.id = $1 AND p.id = $2`, id, n.Parent, tag.RowsAffected())
	return err
}

// Reconciliation returns one run with its counts, or NotFound.
func (s *Store) Reconciliation(ctx context.Context, id int64) (*backfill.Reconciliation, error) {
	rows, err := s.pool.Query(ctx, `SELECT `+runColumns+countColumns+countFrom+`WHERE r.id = $1`, id)
	if err != nil {
		return nil, err
	}
	r, err := pgx.CollectExactlyOneRow(rows, scanRun)
	return r, one(err, "reconciliation %d", id)
}

func (s *Store) query(ctx context.Context, where string, args ...any) ([]*backfill.Reconciliation, error) {
	rows, err := s.pool.Query(ctx, `SELECT `+runColumns+countColumns+countFrom+where, args...)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, scanRun)
}

// Run returns one run without its counts, or NotFound.
func (s *Store) Run(ctx context.Context, id int64) (*backfill.Reconciliation, error) {
	var r backfill.Reconciliation
	err := s.pool.QueryRow(ctx, `SELECT `+runColumns+runFrom+`WHERE r.id = $1`, id).Scan(runFields(&r)...)
	return &r, one(err, "reconciliation %d", id)
}

// RunFilter narrows a list of runs; zero fields do not narrow.
type RunFilter struct {
	Site, Table, From string
	Sites             []string // any of these, nil for all
	Open              bool     // only those under way, which of shadow reads are never listed
	Whole             bool     // only finished ones of the whole table
	Before            int64    // ids below
	Limit             int
}

// Reconciliations lists runs newest first.
func (s *Store) Reconciliations(ctx context.Context, f RunFilter) ([]*backfill.Reconciliation, error) {
	return s.query(ctx, `
		 WHERE ($1 = '' OR d.site = $1) AND ($2 = '' OR t.name = $2) AND ($3 = '' OR d.from_side = $3)
		   AND (NOT $4 OR r.state IN ('PENDING', 'RUNNING')) AND (r.mode <> 'shadow' OR r.state NOT IN ('PENDING', 'RUNNING') AND EXISTS (SELECT FROM backfill_control.difference f WHERE f.run_id = r.id))
		   AND (NOT $5 OR r.state = 'FINISHED' AND r.mode IN ('full', 'sampled')) AND ($6 = 0 OR r.id < $6)
		   AND ($8::text[] IS NULL OR d.site = ANY ($8))
		 ORDER BY r.id DESC LIMIT $7`, f.Site, f.Table, f.From, f.Open, f.Whole, f.Before, f.Limit, f.Sites)
}

// ReceiverReady stores how the receiver's table is made, once.
func (s *Store) ReceiverReady(ctx context.Context, id, layoutID int64, shape string, order []string) error {
	return s.change(ctx, id, `receiver_layout = $2, receiver_shape = $3, receiver_order = $4`, `receiver_layout IS NULL`, layoutID, shape, order)
}

// Begun is how a run begins on the source.
type Begun struct {
	LayoutID   int64
	Shape      string
	Normaliser int
	Excluded   []string
	Buckets    int32 // 0: ranges of keys
	LeafRows   int
	Floor      string
}

// BeginRun stores how a run begins, once. A run with leaves of an earlier one keeps
// the way those were cut.
func (s *Store) BeginRun(ctx context.Context, id int64, b Begun) error {
	return s.in(ctx, func(tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, `
			UPDATE backfill_control.reconciliation SET layout_id = $2, shape = $3, normaliser = $4, excluded = $5, floor = $6::text::pg_snapshot,
			       buckets = CASE WHEN parent IS NULL THEN $7 ELSE buckets END, leaf_rows = CASE WHEN parent IS NULL THEN $8 ELSE leaf_rows END,
			       state = 'RUNNING', started_at = clock_timestamp(), waiting = '', cut = cut OR $7 > 0, leaves = CASE WHEN parent IS NULL THEN $7 ELSE leaves END
			 WHERE id = $1 AND state = 'PENDING' AND receiver_layout IS NOT NULL`, id, b.LayoutID, b.Shape, b.Normaliser, b.Excluded, b.Floor, b.Buckets, b.LeafRows)
		if err != nil || tag.RowsAffected() == 0 {
			return err
		}
		if b.Buckets > 0 {
			if _, err := tx.Exec(ctx, `
				INSERT INTO backfill_control.run_leaf (run_id, n, bucket, state) SELECT id, b + 1, b, 'cut' FROM backfill_control.reconciliation r, generate_series(0, $2::int - 1) b
				 WHERE r.id = $1 AND r.parent IS NULL`, id, b.Buckets); err != nil {
				return err
			}
			if err := drawSample(ctx, tx, id); err != nil {
				return err
			}
		}
		return notifyID(ctx, tx, "reconciliation", id)
	})
}

// drawSample draws the leaves that a sampled run compares in full.
func drawSample(ctx context.Context, tx pgx.Tx, id int64) error {
	_, err := tx.Exec(ctx, `
		UPDATE backfill_control.run_leaf l SET sampled = false
		  FROM (SELECT n, row_number() OVER (ORDER BY random()) AS drawn FROM backfill_control.run_leaf WHERE run_id = $1) x
		 WHERE l.run_id = $1 AND l.n = x.n AND x.drawn > (SELECT coalesce(sample, 2147483647) FROM backfill_control.reconciliation WHERE id = $1)`, id)
	return err
}

// change updates an open run, and does nothing when its condition no longer holds.
func (s *Store) change(ctx context.Context, id int64, set, where string, args ...any) error {
	return s.in(ctx, func(tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, `UPDATE backfill_control.reconciliation SET `+set+` WHERE id = $1 AND state IN ('PENDING', 'RUNNING') AND `+where, append([]any{id}, args...)...)
		if err != nil || tag.RowsAffected() == 0 {
			return err
		}
		return notifyID(ctx, tx, "reconciliation", id)
	})
}

// RunWaits says what a run waits for, for people to read; "" when nothing.
func (s *Store) RunWaits(ctx context.Context, id int64, why string) error {
	return s.change(ctx, id, `waiting = $2`, `waiting <> $2`, why)
}

// Evidence is what leaves were read under on the source.
type Evidence struct {
	Snapshot string
	AfterSeq int64 // LastSeq before the read: what is read later gets a higher one
	Position int64 // how far the other direction was applied there
	Reads    int64 // the number of the read, by which a source that is set back is noticed
}

func heardOf(ctx context.Context, tx pgx.Tx, run int64, e Evidence) error {
	_, err := tx.Exec(ctx, `
		UPDATE backfill_control.direction d SET reads = $2 FROM backfill_control.reconciliation r WHERE r.id = $1 AND d.id = r.direction AND d.reads < $2`, run, e.Reads)
	return err
}

// RunLeaf is a leaf of a run as it stands.
type RunLeaf struct {
	proof.Leaf
	State     string
	Shown     string // the state as people see it, of RunLeaves only
	Attempts  int
	Sampled   bool
	WaitSeq   int64
	Receiver  proof.Leaf // count and digest there
	JudgedAt  *time.Time
	Keys      int64 // that differ or are not settled
	OpenKeys  int64
	Unsettled int64
	Origin    int64
}

const leafColumns = `l.n, l.bucket, (SELECT buckets FROM backfill_control.reconciliation WHERE id = l.run_id), l.lower, l.upper, l.source_count, l.source_digest,
	l.state, l.attempts, l.sampled, coalesce(l.wait_seq, 0), coalesce(l.receiver_count, 0), coalesce(l.receiver_digest, ''), l.judged_at, coalesce(l.origin, 0)`

// leafShown is the state of a leaf (l) as people see it, by how many of its keys (k) differ and are open:
// one whose differences were all repaired or waived is repaired, one not judged yet is pending.
const leafShown = `CASE WHEN l.state = 'different' AND k.keys > 0 AND k.open = 0 THEN 'repaired' WHEN l.state IN ('cut', 'hashed', 'suspect', 'listed') THEN 'pending' ELSE l.state END`

func scanRunLeaf(row pgx.CollectableRow) (l RunLeaf, err error) {
	err = row.Scan(&l.N, &l.Bucket, &l.Buckets, &l.Lower, &l.Upper, &l.Count, &l.Digest,
		&l.State, &l.Attempts, &l.Sampled, &l.WaitSeq, &l.Receiver.Count, &l.Receiver.Digest, &l.JudgedAt, &l.Origin)
	return l, err
}

// LeavesFor returns up to limit leaves, in their order, that wait in a state for
// their next step: cut and suspect ones for the source (not before their time),
// hashed and listed ones for the receiver, once it is known what it has to apply
// first. All of them were listed equally often or not at all.
func (s *Store) LeavesFor(ctx context.Context, id int64, state string, limit int) ([]RunLeaf, error) {
	rows, err := s.pool.Query(ctx, `
		WITH ready AS (
		    SELECT l.* FROM backfill_control.run_leaf l
		     WHERE l.run_id = $1 AND l.state = $2 AND (l.not_before IS NULL OR l.not_before <= clock_timestamp()) AND (l.state IN ('cut', 'suspect') OR l.wait_seq IS NOT NULL)
		     ORDER BY l.attempts > CASE WHEN $2 = 'listed' THEN 1 ELSE 0 END DESC, l.n LIMIT $3)
		SELECT `+leafColumns+` FROM ready l
		 WHERE (l.attempts > CASE WHEN $2 = 'listed' THEN 1 ELSE 0 END) = (SELECT bool_or(attempts > CASE WHEN $2 = 'listed' THEN 1 ELSE 0 END) FROM ready) ORDER BY l.n`, id, state, limit)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, scanRunLeaf)
}

// Remaining is what is left of a run's work.
type Remaining struct {
	Cut     int64 // leaves that the source has not read yet
	Ahead   int64 // leaves that wait for the receiver
	Unsent  int64 // of those, the ones for which it is not known yet what has to be applied first
	Listing int64 // leaves to be listed now or later
	Final   int64
	Bad     int64 // leaves that differ, or may
}

// Done reports whether every leaf is judged, given that all are cut.
func (r Remaining) Done() bool { return r.Cut+r.Ahead+r.Listing == 0 }

// Remaining counts what is left of a run.
func (s *Store) Remaining(ctx context.Context, id int64) (r Remaining, err error) {
	err = s.pool.QueryRow(ctx, `
		SELECT count(*) FILTER (WHERE state = 'cut'), count(*) FILTER (WHERE state IN ('hashed', 'listed')), count(*) FILTER (WHERE state IN ('hashed', 'listed') AND wait_seq IS NULL),
		       count(*) FILTER (WHERE state = 'suspect'), count(*) FILTER (WHERE state IN ('equal', 'different', 'unknown', 'counted')), count(*) FILTER (WHERE state IN ('suspect', 'listed', 'different', 'unknown'))
		  FROM backfill_control.run_leaf WHERE run_id = $1`, id).Scan(&r.Cut, &r.Ahead, &r.Unsent, &r.Listing, &r.Final, &r.Bad)
	return r, err
}

// AddLeaves stores leaves that follow the have leaves there are, in the state given.
// end says that they reach to the end of the table. ErrFenced: another process has
// added leaves meanwhile, or the run is closed.
func (s *Store) AddLeaves(ctx context.Context, id, have int64, leaves []proof.Leaf, state string, e Evidence, end bool) error {
	return s.in(ctx, func(tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, `
			UPDATE backfill_control.reconciliation SET leaves = leaves + $3, cut = $4 WHERE id = $1 AND state = 'RUNNING' AND leaves = $2 AND NOT cut`, id, have, len(leaves), end)
		if err := fenced(tag.RowsAffected() == 1, err); err != nil {
			return err
		}
		text, err := json.Marshal(leaves)
		if err != nil {
			return err
		}
		key := func(name string) string {
			return `CASE WHEN json_typeof(l->'` + name + `') = 'array' THEN ARRAY(SELECT json_array_elements_text(l->'` + name + `')) END`
		}
		if _, err := tx.Exec(ctx, `
			INSERT INTO backfill_control.run_leaf (run_id, n, state, lower, upper, source_count, source_digest, snap, after_seq, source_position)
			SELECT $1, (l->>'n')::bigint, $3, `+key("lower")+`, `+key("upper")+`, (l->>'count')::bigint, l->>'digest', $4::text::pg_snapshot, $5, $6
			  FROM json_array_elements($2::text::json) l`, id, string(text), state, e.Snapshot, e.AfterSeq, e.Position); err != nil {
			return err
		}
		if end {
			if err := drawSample(ctx, tx, id); err != nil {
				return err
			}
		}
		if err := heardOf(ctx, tx, id, e); err != nil {
			return err
		}
		return notifyID(ctx, tx, "reconciliation", id)
	})
}

func fenced(held bool, err error) error {
	if err == nil && !held {
		return ErrFenced
	}
	return err
}

// LastUpper is the upper end of a run's last leaf.
func (s *Store) LastUpper(ctx context.Context, id, leaves int64) (key backfill.Key, err error) {
	if leaves == 0 {
		return nil, nil
	}
	err = s.pool.QueryRow(ctx, `SELECT upper FROM backfill_control.run_leaf WHERE run_id = $1 AND n = $2`, id, leaves).Scan(&key)
	return key, one(err, "leaf %d", leaves)
}

// Hashed stores what the source has read of cut leaves. ErrFenced: another process
// was faster, or the run is closed.
func (s *Store) Hashed(ctx context.Context, id int64, leaves []proof.Leaf, e Evidence) error {
	return s.update(ctx, id, leaves, e, `
		state = 'hashed', source_count = x.count, source_digest = x.digest, snap = $5::text::pg_snapshot, after_seq = $6, source_position = $7, wait_seq = NULL`, "cut",
		e.Snapshot, e.AfterSeq, e.Position)
}

// Compared stores what the receiver has read of hashed leaves: those of the same
// count and digest are equal, the others suspect.
func (s *Store) Compared(ctx context.Context, id int64, leaves []proof.Leaf) error {
	return s.update(ctx, id, leaves, Evidence{}, `
		state = CASE WHEN (l.source_count, l.source_digest) IS DISTINCT FROM (x.count, x.digest) THEN 'suspect' WHEN l.sampled THEN 'equal' ELSE 'counted' END,
		receiver_count = x.count, receiver_digest = x.digest, judged_at = clock_timestamp()`, "hashed")
}

func (s *Store) update(ctx context.Context, id int64, leaves []proof.Leaf, e Evidence, set, from string, args ...any) error {
	var ns, counts []int64
	var digests []string
	for _, l := range leaves {
		ns, counts, digests = append(ns, l.N), append(counts, l.Count), append(digests, l.Digest)
	}
	return s.in(ctx, func(tx pgx.Tx) error {
		if err := running(ctx, tx, id); err != nil {
			return err
		}
		tag, err := tx.Exec(ctx, `
			UPDATE backfill_control.run_leaf l SET `+set+`
			  FROM unnest($2::bigint[], $3::bigint[], $4::text[]) x (n, count, digest)
			 WHERE l.run_id = $1 AND l.n = x.n AND l.state = '`+from+`'`, append([]any{id, ns, counts, digests}, args...)...)
		if err := fenced(tag.RowsAffected() == int64(len(leaves)), err); err != nil {
			return err
		}
		if err := heardOf(ctx, tx, id, e); err != nil {
			return err
		}
		return notifyID(ctx, tx, "reconciliation", id)
	})
}

// running is ErrFenced when a run is closed, and keeps it from being closed until the
// transaction ends: what is stored of a run that somebody ends meanwhile would stay.
func running(ctx context.Context, tx pgx.Tx, id int64) error {
	tag, err := tx.Exec(ctx, `SELECT FROM backfill_control.reconciliation WHERE id = $1 AND state = 'RUNNING' FOR SHARE`, id)
	return fenced(tag.RowsAffected() == 1, err)
}

// UnsettledKeys are the keys of leaves that have to be looked at again.
func (s *Store) UnsettledKeys(ctx context.Context, id int64, leaves []int64) (map[int64][]backfill.Key, error) {
	rows, err := s.pool.Query(ctx, `SELECT leaf, key FROM backfill_control.difference WHERE run_id = $1 AND leaf = ANY ($2) AND NOT settled ORDER BY n`, id, leaves)
	if err != nil {
		return nil, err
	}
	out := map[int64][]backfill.Key{}
	var leaf int64
	var key backfill.Key
	_, err = pgx.ForEachRow(rows, []any{&leaf, &key}, func() error {
		out[leaf] = append(out[leaf], key)
		key = nil
		return nil
	})
	return out, err
}

// Listed stores the rows of suspect leaves as the source has read them. copyRows
// copies them in COPY's binary form (run_id, leaf, key, found, row) and returns what
// they were read under.
func (s *Store) Listed(ctx context.Context, id int64, leaves []int64, copyRows func(load func(io.Reader) error) (Evidence, error)) error {
	return s.in(ctx, func(tx pgx.Tx) error {
		e, err := copyRows(func(r io.Reader) error {
			_, err := tx.Conn().PgConn().CopyFrom(ctx, r, `COPY backfill_control.leaf_row (run_id, leaf, key, found, "row") FROM STDIN (FORMAT binary)`)
			return err
		})
		if err != nil {
			return err
		}
		if err := running(ctx, tx, id); err != nil {
			return err
		}
		tag, err := tx.Exec(ctx, `
			UPDATE backfill_control.run_leaf SET state = 'listed', attempts = attempts + 1, snap = $3::text::pg_snapshot, after_seq = $4, source_position = $5, wait_seq = NULL
			 WHERE run_id = $1 AND n = ANY ($2) AND state = 'suspect'`, id, leaves, e.Snapshot, e.AfterSeq, e.Position)
		if err := fenced(tag.RowsAffected() == int64(len(leaves)), err); err != nil {
			return err
		}
		if err := asServed(ctx, tx, id); err != nil {
			return err
		}
		if err := heardOf(ctx, tx, id, e); err != nil {
			return err
		}
		return notifyID(ctx, tx, "reconciliation", id)
	})
}

// Unsent lists the leaves for which it is not known what the receiver has to apply
// before it looks. Await tells that, once everything captured before they were read
// is in the queue up to seq.
func (s *Store) Unsent(ctx context.Context, id int64) (leaves []int64, err error) {
	err = s.pool.QueryRow(ctx, `
		SELECT coalesce(array_agg(n), '{}') FROM backfill_control.run_leaf WHERE run_id = $1 AND state IN ('hashed', 'listed') AND wait_seq IS NULL`, id).Scan(&leaves)
	return leaves, err
}

// Await makes the receiver look at leaves once it has applied everything up to seq.
func (s *Store) Await(ctx context.Context, id int64, leaves []int64, seq int64) error {
	return s.in(ctx, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `
			UPDATE backfill_control.run_leaf SET wait_seq = $3 WHERE run_id = $1 AND n = ANY ($2) AND state IN ('hashed', 'listed') AND wait_seq IS NULL`, id, leaves, seq); err != nil {
			return err
		}
		return notifyID(ctx, tx, "reconciliation", id)
	})
}

// CopyListed writes the listed rows of leaves in COPY's binary form: leaf, key, found, row.
func (s *Store) CopyListed(ctx context.Context, id int64, leaves []int64, w io.Writer) error {
	return s.copyTo(ctx, w, `COPY (SELECT leaf, key, found, "row" FROM backfill_control.leaf_row WHERE run_id = `+itoa(id)+` AND leaf = ANY ('`+array(leaves)+`')) TO STDOUT (FORMAT binary)`)
}

// maxAttempts is how often the rows of a leaf are listed before the keys of it that
// do not come to rest are UNKNOWN; of shadow reads, of which there are more every
// minute, less often.
const maxAttempts, maxReadAttempts = 12, 5

// Judge stores what differs between the listed rows of leaves and the receiver's, as
// COPY's binary form has it: leaf, key, here, kind, source, receiver, aside. The
// receiver had then applied everything up to at.
//
// Only now, after the receiver was read, is it asked which keys were in flight:
// those with an entry up to at that was read later than the source's rows and was
// delivered, and a truncate means all. Dropped, skipped and quarantined entries are no
// excuse, or a key that is written again and again without arriving would never be
// found. Differences of the other keys are real; keys in flight are listed again
// under a new snapshot, and what never rests is unknown.
//
// On a table captured on both sides a key is in flight as well while a change of the
// receiver has not reached the source: unsent, or sent and above the position that
// the source's rows were read at.
func (s *Store) Judge(ctx context.Context, run *backfill.Reconciliation, leaves []int64, at int64, differing io.Reader) error {
	return s.in(ctx, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `
			CREATE TEMP TABLE differing (leaf bigint, key text[] COLLATE "C", here text[] COLLATE "C", kind "char", source text[] COLLATE "C", receiver text[] COLLATE "C", aside text,
			    settled boolean NOT NULL DEFAULT true) ON COMMIT DROP`); err != nil {
			return err
		}
		if _, err := tx.Conn().PgConn().CopyFrom(ctx, differing, `COPY pg_temp.differing (leaf, key, here, kind, source, receiver, aside) FROM STDIN (FORMAT binary)`); err != nil {
			return err
		}
		if err := running(ctx, tx, run.ID); err != nil {
			return err
		}
		var held int
		if err := tx.QueryRow(ctx, `
			SELECT count(*) FROM (SELECT FROM backfill_control.run_leaf WHERE run_id = $1 AND n = ANY ($2) AND state = 'listed' FOR UPDATE) x`, run.ID, leaves).Scan(&held); err != nil {
			return err
		}
		if held != len(leaves) {
			return ErrFenced
		}
		if err := excuse(ctx, tx, run, leaves, at); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, `
			DELETE FROM backfill_control.difference WHERE run_id = $1 AND leaf = ANY ($2) AND NOT settled`, run.ID, leaves); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, `
			INSERT INTO backfill_control.difference (run_id, leaf, kind, settled, key, here, source, receiver, cause)
			SELECT $1, leaf, CASE kind WHEN 'm' THEN 'missing' WHEN 'd' THEN 'different' ELSE 'surplus' END, settled, key, here, source, receiver,
			       CASE aside WHEN 'held' THEN 'a change of it waits on the receiver for another row' WHEN 'quarantined' THEN 'a change of it is quarantined on the receiver'
			                  WHEN 'own' THEN 'the receiver has changed it and not sent that yet' ELSE CASE WHEN settled THEN '' ELSE 'it was changed while it was compared' END END
			  FROM pg_temp.differing ORDER BY leaf, key`, run.ID); err != nil {
			return err
		}
		attempts := maxAttempts
		if run.Mode == backfill.RunShadow {
			attempts = maxReadAttempts
		}
		if _, err := tx.Exec(ctx, `
			UPDATE backfill_control.run_leaf l
			   SET state = CASE WHEN d.unsettled AND l.attempts < $3 THEN 'suspect' WHEN d.settled THEN 'different' WHEN d.unsettled THEN 'unknown' ELSE 'equal' END,
			       not_before = clock_timestamp() + least(interval '50 ms' * power(2, l.attempts), interval '5 s'), judged_at = clock_timestamp()
			  FROM (SELECT x.n, coalesce(bool_or(d.settled), false) AS settled, coalesce(bool_or(NOT d.settled), false) AS unsettled
			          FROM unnest($2::bigint[]) x (n) LEFT JOIN backfill_control.difference d ON d.run_id = $1 AND d.leaf = x.n GROUP BY x.n) d
			 WHERE l.run_id = $1 AND l.n = d.n`, run.ID, leaves, attempts); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, `DELETE FROM backfill_control.leaf_row WHERE run_id = $1 AND leaf = ANY ($2)`, run.ID, leaves); err != nil {
			return err
		}
		return notifyID(ctx, tx, "reconciliation", run.ID)
	})
}

// excuse marks the differing keys that were in flight.
func excuse(ctx context.Context, tx pgx.Tx, run *backfill.Reconciliation, leaves []int64, at int64) error {
	_, err := tx.Exec(ctx, `
		WITH flying AS MATERIALIZED (
		    SELECT DISTINCT l.n AS leaf, e.key, e.op = 't' AS all
		      FROM backfill_control.run_leaf l
		      JOIN backfill_control.entry e ON e.direction = $3 AND e.table_id = $4 AND e.seq > l.after_seq AND e.seq <= $5 AND NOT e.dropped AND backfill_control.later(e.snap, l.snap)
		     WHERE l.run_id = $1 AND l.n = ANY ($2) AND l.n IN (SELECT leaf FROM pg_temp.differing)
		       AND NOT EXISTS (SELECT FROM backfill_control.quarantine q WHERE q.direction = e.direction AND q.seq = e.seq AND q.state IN ('quarantined', 'skipped'))
		    UNION
		    SELECT l.n, e.key, e.op = 't'
		      FROM backfill_control.run_leaf l JOIN backfill_control.direction d ON d.site = $6 AND d.from_side = $7
		      JOIN backfill_control.entry e ON e.direction = d.id AND e.table_id = $4 AND e.seq > l.source_position AND NOT e.dropped
		     WHERE $8 AND l.run_id = $1 AND l.n = ANY ($2))
		UPDATE pg_temp.differing d SET settled = false
		 WHERE aside IN ('held', 'own') OR (leaf, key) IN (SELECT leaf, key FROM flying WHERE key IS NOT NULL) OR (leaf, here) IN (SELECT leaf, key FROM flying WHERE key IS NOT NULL)
		    OR leaf IN (SELECT leaf FROM flying WHERE "all")`, run.ID, leaves, run.Direction.ID, run.TableID, at, run.Site, run.To, run.Both)
	return err
}

// RepairKeys are up to limit keys that a repair run has to send, after number after,
// and the number of the last.
func (s *Store) RepairKeys(ctx context.Context, run *backfill.Reconciliation, after int64, limit int) (keys []backfill.Key, last int64, err error) {
	rows, err := s.pool.Query(ctx, `SELECT n, key FROM backfill_control.difference WHERE run_id = $1 AND repair = $2 AND n > $3 ORDER BY n LIMIT $4`, run.Parent, run.ID, after, limit)
	if err != nil {
		return nil, after, err
	}
	return numbered(rows, after)
}

// Touched records that a repair's keys are on their way.
func (s *Store) Touched(ctx context.Context, id int64) error {
	return s.change(ctx, id, `touched = true`, `NOT touched`)
}

// Conclude closes a run whose leaves are all judged: verdict, root, what probably
// caused each difference, and what it says of the run whose leaves it looked at. A run
// that is closed already, or not at its end, stays as it is.
func (s *Store) Conclude(ctx context.Context, id int64) (*backfill.Reconciliation, error) {
	err := s.in(ctx, func(tx pgx.Tx) error {
		var cut bool
		if err := tx.QueryRow(ctx, `SELECT cut FROM backfill_control.reconciliation WHERE id = $1 AND state = 'RUNNING' FOR UPDATE`, id).Scan(&cut); errors.Is(err, pgx.ErrNoRows) || err == nil && !cut {
			return nil
		} else if err != nil {
			return err
		}
		run, err := s.tally(ctx, tx, id)
		if err != nil || run.Counts.Pending > 0 {
			return err
		}
		root, err := treeRoot(ctx, tx, id)
		if err != nil {
			return err
		}
		if err := causes(ctx, tx, run); err != nil {
			return err
		}
		if run.Parent != 0 {
			if err := tellParent(ctx, tx, run); err != nil {
				return err
			}
		}
		return s.closeRun(ctx, tx, run, backfill.RunFinished, TallyOf(run).Judge(true), root, "")
	})
	if err != nil {
		return nil, err
	}
	return s.Reconciliation(ctx, id)
}

// TallyOf is how a run's leaves stand.
func TallyOf(r *backfill.Reconciliation) proof.Tally {
	c := r.Counts
	return proof.Tally{Equal: c.Equal, Different: c.Different, Unknown: c.Unknown, Counted: c.Counted, Pending: c.Pending, Rows: c.Rows, Covered: c.Covered}
}

func (s *Store) tally(ctx context.Context, tx pgx.Tx, id int64) (*backfill.Reconciliation, error) {
	rows, err := tx.Query(ctx, `SELECT `+runColumns+countColumns+countFrom+`WHERE r.id = $1`, id)
	if err != nil {
		return nil, err
	}
	r, err := pgx.CollectExactlyOneRow(rows, scanRun)
	return r, one(err, "reconciliation %d", id)
}

func treeRoot(ctx context.Context, tx pgx.Tx, id int64) (string, error) {
	rows, err := tx.Query(ctx, `SELECT `+leafColumns+` FROM backfill_control.run_leaf l WHERE l.run_id = $1 ORDER BY l.n`, id)
	if err != nil {
		return "", err
	}
	var tree proof.Tree
	for rows.Next() {
		l, err := scanRunLeaf(rows)
		if err != nil {
			rows.Close()
			return "", err
		}
		tree.Add(l.Leaf)
	}
	return tree.Root(), rows.Err()
}

// causes says of each settled difference what probably caused it, by the last entry
// of its key: one pass over the direction's history. Nothing is known yet of keys that
// were just written, which are then taken for few and looked up one by one, each in all
// the others: hours, where a whole table is missing.
func causes(ctx context.Context, tx pgx.Tx, run *backfill.Reconciliation) error {
	if _, err := tx.Exec(ctx, `SET LOCAL enable_nestloop = off`); err != nil {
		return err
	}
	_, err := tx.Exec(ctx, `
		WITH open AS MATERIALIZED (SELECT n, kind, key, here FROM backfill_control.difference WHERE run_id = $1 AND settled AND cause = ''),
		last AS (
		    SELECT DISTINCT ON (o.n) o.n, e.op::text, e.dropped, q.state AS aside
		      FROM open o JOIN backfill_control.entry e ON e.direction = $2 AND e.table_id = $3 AND e.key = o.key
		      LEFT JOIN backfill_control.quarantine q ON q.direction = e.direction AND q.seq = e.seq
		     ORDER BY o.n, e.seq DESC),
		own AS (
		    SELECT DISTINCT o.n FROM open o JOIN backfill_control.direction d ON d.site = $4 AND d.from_side = $5
		      JOIN backfill_control.entry e ON e.direction = d.id AND e.table_id = $3 AND e.key = o.here WHERE o.kind = 'surplus')
		UPDATE backfill_control.difference d SET cause = CASE
		       WHEN own.n IS NOT NULL THEN 'written on ' || $5 || ' itself'
		       WHEN last.n IS NULL AND o.kind = 'surplus' THEN 'born on ' || $5 || ', or deleted on ' || $6 || ' before capture began'
		       WHEN last.n IS NULL THEN 'never captured: older than capture, or changed while it was interrupted'
		       WHEN last.aside IN ('quarantined', 'held') THEN 'its last change is ' || last.aside || ' on ' || $5
		       WHEN last.aside = 'skipped' THEN 'its last change was skipped'
		       WHEN last.dropped AND last.op IN ('d', 't') THEN 'deleted while deletes were not sent'
		       WHEN last.dropped THEN 'its last change was not sent: the table or the operation was off'
		       WHEN o.kind = 'surplus' THEN 'deleted on ' || $6 || ' while capture was interrupted, or written on ' || $5 || ' since'
		       ELSE 'changed on ' || $5 || ' since its last change arrived, or on ' || $6 || ' while capture was interrupted' END
		  FROM open o LEFT JOIN last ON last.n = o.n LEFT JOIN own ON own.n = o.n
		 WHERE d.run_id = $1 AND d.n = o.n`, run.ID, run.Direction.ID, run.TableID, run.Site, run.To, run.From)
	if err != nil {
		return err
	}
	_, err = tx.Exec(ctx, `SET LOCAL enable_nestloop = on`)
	return err
}

// tellParent brings the differences of the run whose leaves were looked at again up
// to date: what was found equal now is repaired, what is new is added.
func tellParent(ctx context.Context, tx pgx.Tx, run *backfill.Reconciliation) error {
	_, err := tx.Exec(ctx, `
		WITH seen AS MATERIALIZED (SELECT n, origin FROM backfill_control.run_leaf WHERE run_id = $1 AND state IN ('equal', 'different')),
		still AS MATERIALIZED (SELECT s.origin AS leaf, d.kind, d.settled, d.key, d.here, d.source, d.receiver, d.cause FROM backfill_control.difference d JOIN seen s ON s.n = d.leaf WHERE d.run_id = $1),
		gone AS (
		    UPDATE backfill_control.difference d SET state = 'repaired', settled = true
		     WHERE d.run_id = $2 AND d.state = 'open' AND d.leaf IN (SELECT origin FROM seen) AND NOT EXISTS (SELECT FROM still s WHERE s.key = d.key))
		INSERT INTO backfill_control.difference (run_id, leaf, kind, settled, key, here, source, receiver, cause)
		SELECT $2, s.leaf, s.kind, s.settled, s.key, s.here, s.source, s.receiver, s.cause FROM still s
		 WHERE NOT EXISTS (SELECT FROM backfill_control.difference d WHERE d.run_id = $2 AND d.key = s.key AND d.state IN ('open', 'waived'))`, run.ID, run.Parent)
	if err != nil {
		return err
	}
	return freeRepair(ctx, tx, run)
}

// freeRepair lets keys that a repair did not mend be sent again.
func freeRepair(ctx context.Context, tx pgx.Tx, run *backfill.Reconciliation) error {
	_, err := tx.Exec(ctx, `UPDATE backfill_control.difference SET repair = NULL WHERE run_id = $2 AND repair = $1 AND state = 'open'`, run.ID, run.Parent)
	return err
}

func (s *Store) closeRun(ctx context.Context, tx pgx.Tx, run *backfill.Reconciliation, state backfill.RunState, verdict proof.Verdict, root, reason string) error {
	if _, err := tx.Exec(ctx, `
		UPDATE backfill_control.reconciliation r SET state = $2, verdict = $3, root = nullif($4, ''), reason = $5, waiting = '', closed_at = clock_timestamp(),
		       receiver_rows = (SELECT sum(coalesce(receiver_count, source_count)) FROM backfill_control.run_leaf WHERE run_id = $1)
		 WHERE id = $1`, run.ID, state, verdict, root, reason); err != nil {
		return err
	}
	if _, err := tx.Exec(ctx, `DELETE FROM backfill_control.leaf_row WHERE run_id = $1`, run.ID); err != nil {
		return err
	}
	if run.Touched {
		if err := soakAgain(ctx, tx, run.Direction.ID, run.TableID); err != nil {
			return err
		}
	}
	if err := auditRun(ctx, tx, run.ID, "backfill", "reconciliation.closed", map[string]any{"state": state, "verdict": verdict, "reason": reason}); err != nil {
		return err
	}
	if err := notify(ctx, tx, "site", run.Site); err != nil {
		return err
	}
	return notifyID(ctx, tx, "reconciliation", run.ID)
}

// EndRun closes an open run before its end as CANCELLED or FAILED. What it has found
// stays; its verdict is never EQUAL. It is a Conflict when the run is closed already.
func (s *Store) EndRun(ctx context.Context, id int64, by string, state backfill.RunState, reason string) (*backfill.Reconciliation, error) {
	err := s.in(ctx, func(tx pgx.Tx) error {
		var now backfill.RunState
		if err := tx.QueryRow(ctx, `SELECT state FROM backfill_control.reconciliation WHERE id = $1 FOR UPDATE`, id).Scan(&now); err != nil {
			return one(err, "reconciliation %d", id)
		}
		if !now.Open() {
			return backfill.Errorf(backfill.Conflict, "reconciliation %d is %s already", id, now)
		}
		return s.endRun(ctx, tx, id, by, state, reason)
	})
	if err != nil {
		return nil, err
	}
	return s.Reconciliation(ctx, id)
}

func (s *Store) endRun(ctx context.Context, tx pgx.Tx, id int64, by string, state backfill.RunState, reason string) error {
	run, err := s.tally(ctx, tx, id)
	if err != nil {
		return err
	}
	if run.Parent != 0 {
		if err := freeRepair(ctx, tx, run); err != nil {
			return err
		}
	}
	if run.Mode == backfill.RunShadow {
		if err := unjudgedReads(ctx, tx, run, reason); err != nil {
			return err
		}
	}
	if err := auditRun(ctx, tx, id, by, "reconciliation.end", map[string]any{"state": state, "reason": reason}); err != nil {
		return err
	}
	return s.closeRun(ctx, tx, run, state, TallyOf(run).Judge(false), "", reason)
}

// endRuns fails the open runs of a site, or of one of its tables.
func (s *Store) endRuns(ctx context.Context, tx pgx.Tx, site string, table int32, reason string) error {
	rows, err := tx.Query(ctx, `
		SELECT r.id`+runFrom+`WHERE d.site = $1 AND ($2 = 0 OR r.table_id = $2) AND r.state IN ('PENDING', 'RUNNING') ORDER BY r.id FOR UPDATE OF r`, site, table)
	if err != nil {
		return err
	}
	ids, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	if err != nil {
		return err
	}
	for _, id := range ids {
		if err := s.endRun(ctx, tx, id, "backfill", backfill.RunFailed, reason); err != nil {
			return err
		}
	}
	return nil
}

// LeafFilter narrows a run's leaves.
type LeafFilter struct {
	State string // "" for all
	After int64
	Limit int
}

// RunLeaves lists a run's leaves in their order.
func (s *Store) RunLeaves(ctx context.Context, id int64, f LeafFilter) ([]RunLeaf, error) {
	rows, err := s.pool.Query(ctx, `
		SELECT `+leafColumns+`, k.keys, k.open, k.unsettled, `+leafShown+` FROM backfill_control.run_leaf l,
		       LATERAL (SELECT count(*) AS keys, count(*) FILTER (WHERE d.settled AND d.state = 'open') AS open, count(*) FILTER (WHERE NOT d.settled) AS unsettled
		                  FROM backfill_control.difference d WHERE d.run_id = l.run_id AND d.leaf = l.n) k
		 WHERE l.run_id = $1 AND l.n > $2 AND ($3 = '' OR $3 = `+leafShown+`) ORDER BY l.n LIMIT $4`, id, f.After, f.State, f.Limit)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(r pgx.CollectableRow) (l RunLeaf, err error) {
		return l, r.Scan(&l.N, &l.Bucket, &l.Buckets, &l.Lower, &l.Upper, &l.Count, &l.Digest,
			&l.State, &l.Attempts, &l.Sampled, &l.WaitSeq, &l.Receiver.Count, &l.Receiver.Digest, &l.JudgedAt, &l.Origin, &l.Keys, &l.OpenKeys, &l.Unsettled, &l.Shown)
	})
}

// MapCell is some leaves that follow each other, by the worst of their states:
// different, unknown, pending, repaired, counted, equal.
type MapCell struct {
	First, Last int64
	Rows        int64
	State       string
}

// LeafMap shows a run's leaves, per of them in a cell.
func (s *Store) LeafMap(ctx context.Context, id, per int64) ([]MapCell, error) {
	rows, err := s.pool.Query(ctx, `
		WITH k AS MATERIALIZED (SELECT leaf, count(*) AS keys, count(*) FILTER (WHERE settled AND state = 'open') AS open FROM backfill_control.difference WHERE run_id = $1 GROUP BY leaf),
		l AS (SELECT l.n, l.source_count, `+leafShown+` AS state FROM backfill_control.run_leaf l LEFT JOIN k ON k.leaf = l.n WHERE l.run_id = $1)
		SELECT min(n), max(n), sum(source_count)::bigint,
		       (ARRAY['different', 'unknown', 'pending', 'repaired', 'counted', 'equal'])[min(array_position(ARRAY['different', 'unknown', 'pending', 'repaired', 'counted', 'equal'], state))]
		  FROM l GROUP BY (n - 1) / $2 ORDER BY 1`, id, per)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByPos[MapCell])
}

// Difference is a key that differs.
type Difference struct {
	N         int64
	Leaf      int64
	Kind      backfill.DifferenceKind
	Settled   bool // false: the key was changed whenever it was looked at
	State     string
	Key       backfill.Key
	Source    []*string // as compared, in the order of the run's columns
	Receiver  []*string
	Cause     string
	DecidedBy string
	DecidedAt *time.Time
	Note      string
}

// DifferenceFilter narrows a run's differing keys.
type DifferenceFilter struct {
	Kind  string
	State string // open, repaired, waived; unknown for keys that never came to rest
	After int64
	Limit int
}

// Differences lists a run's differing keys.
func (s *Store) Differences(ctx context.Context, id int64, f DifferenceFilter) ([]Difference, error) {
	rows, err := s.pool.Query(ctx, `
		SELECT n, leaf, kind, settled, CASE WHEN settled THEN state ELSE 'unknown' END, coalesce(key, here), source, receiver, cause, coalesce(decided_by, ''), decided_at, note
		  FROM backfill_control.difference
		 WHERE run_id = $1 AND n > $2 AND ($3 = '' OR kind = $3) AND ($4 = '' OR CASE WHEN settled THEN state ELSE 'unknown' END = $4) ORDER BY n LIMIT $5`, id, f.After, f.Kind, f.State, f.Limit)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByPos[Difference])
}

// Waive records that somebody lets differences be, and why; keys nil means all that
// are open. It returns how many those are.
func (s *Store) Waive(ctx context.Context, id int64, keys []int64, by, note string) (n int64, err error) {
	err = s.in(ctx, func(tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, `
			UPDATE backfill_control.difference SET state = 'waived', decided_by = $2, decided_at = clock_timestamp(), note = $3
			 WHERE run_id = $1 AND settled AND state = 'open' AND repair IS NULL AND ($4::bigint[] IS NULL OR n = ANY ($4))`, id, by, note, keys)
		if n = tag.RowsAffected(); err != nil || n == 0 {
			return err
		}
		if err := auditRun(ctx, tx, id, by, "reconciliation.waive", map[string]any{"note": note, "keys": keys, "waived": n}); err != nil {
			return err
		}
		return notifyID(ctx, tx, "reconciliation", id)
	})
	return n, err
}

// DifferingKeys returns up to limit keys that a request of mode differences has to
// walk after number after, and the number of the last; none is the end. after -1
// begins behind the rows that are staged already.
func (s *Store) DifferingKeys(ctx context.Context, requestID, after int64, limit int) (keys []backfill.Key, last int64, err error) {
	if after < 0 {
		if err := s.pool.QueryRow(ctx, `
			SELECT coalesce(max(d.n), 0) FROM backfill_control.request r JOIN backfill_control.staged s ON s.request_id = r.id
			  JOIN backfill_control.difference d ON d.run_id = r.run_id AND d.key = s.key WHERE r.id = $1`, requestID).Scan(&after); err != nil {
			return nil, 0, err
		}
	}
	rows, err := s.pool.Query(ctx, `
		SELECT d.n, d.key FROM backfill_control.request r JOIN backfill_control.difference d ON d.run_id = r.run_id
		 WHERE r.id = $1 AND d.n > $2 AND d.settled AND d.state = 'open' AND d.kind IN ('missing', 'different') ORDER BY d.n LIMIT $3`, requestID, after, limit)
	if err != nil {
		return nil, after, err
	}
	return numbered(rows, after)
}

// numbered collects keys and the number of the last.
func numbered(rows pgx.Rows, after int64) (keys []backfill.Key, last int64, err error) {
	last = after
	var key backfill.Key
	_, err = pgx.ForEachRow(rows, []any{&last, &key}, func() error {
		keys = append(keys, key)
		key = nil
		return nil
	})
	return keys, last, err
}

// proofs tells panels of a site what the last reconciliation of each has found.
func (s *Store) proofs(ctx context.Context, site string, panels []backfill.Panel) error {
	rows, err := s.pool.Query(ctx, `
		SELECT r.direction, r.table_id, r.id, r.mode, r.verdict, r.closed_at,
		       (SELECT count(*) FROM (SELECT FROM backfill_control.difference f WHERE f.run_id = r.id AND f.settled AND f.state = 'open' AND f.kind IN ('missing', 'different') LIMIT 10000) x)
		  FROM (SELECT DISTINCT ON (r.direction, r.table_id) r.* FROM backfill_control.reconciliation r JOIN backfill_control.direction d ON d.id = r.direction
		         WHERE d.site = $1 AND r.state = 'FINISHED' AND r.mode IN ('full', 'sampled') ORDER BY r.direction, r.table_id, r.id DESC) r`, site)
	if err != nil {
		return err
	}
	var direction, table int32
	var p backfill.Proof
	_, err = pgx.ForEachRow(rows, []any{&direction, &table, &p.ID, &p.Mode, &p.Verdict, &p.ClosedAt, &p.Unequal}, func() error {
		for i := range panels {
			if panels[i].Direction.ID == direction && panels[i].Table.ID == table {
				found := p
				panels[i].Proof = &found
			}
		}
		return nil
	})
	return err
}

// Decisions are what people did about a run's differences.
type Decisions struct {
	Repairs []RepairRun
	Waivers []Waiver
}

// RepairRun is one run that sent differing keys again.
type RepairRun struct {
	Reconciliation int64  `json:"reconciliation"`
	By             string `json:"by"`
	Note           string `json:"note"`
	State          string `json:"state"`
}

// Waiver is a reason for which differences were let be.
type Waiver struct {
	By   string `json:"by"`
	Note string `json:"note"`
	Keys int64  `json:"keys"`
}

// Decisions lists what people did about a run's differences.
func (s *Store) Decisions(ctx context.Context, id int64) (d Decisions, err error) {
	rows, err := s.pool.Query(ctx, `SELECT id, requested_by, note, state FROM backfill_control.reconciliation WHERE parent = $1 AND mode = 'repair' ORDER BY id`, id)
	if err != nil {
		return d, err
	}
	if d.Repairs, err = pgx.CollectRows(rows, pgx.RowToStructByPos[RepairRun]); err != nil {
		return d, err
	}
	rows, err = s.pool.Query(ctx, `
		SELECT decided_by, note, count(*) FROM backfill_control.difference WHERE run_id = $1 AND state = 'waived' GROUP BY 1, 2 ORDER BY 1, 2`, id)
	if err != nil {
		return d, err
	}
	d.Waivers, err = pgx.CollectRows(rows, pgx.RowToStructByPos[Waiver])
	return d, err
}

func auditRun(ctx context.Context, tx pgx.Tx, id int64, by, action string, detail map[string]any) error {
	var site, subject string
	if err := tx.QueryRow(ctx, `SELECT d.site, 'reconciliation ' || r.id || ' of ' || t.name || ' from ' || d.from_side`+runFrom+`WHERE r.id = $1`, id).Scan(&site, &subject); err != nil {
		return err
	}
	return audit(ctx, tx, by, action, site, subject, detail)
}

func itoa(n int64) string { return strconv.FormatInt(n, 10) }

// array is the text of a bigint[].
func array(list []int64) string {
	parts := make([]string, len(list))
	for i, n := range list {
		parts[i] = itoa(n)
	}
	return "{" + strings.Join(parts, ",") + "}"
}
