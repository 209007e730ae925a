package control

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"backfill/internal/backfill"
)

const requestColumns = `r.id, t.name, d.id, d.site, d.from_side, d.to_side, r.mode, r.key, r.state, r.paused,
	r.requested_by, r.requested_at, r.started_at, r.walked_at, r.reviewed_by, r.reviewed_at, r.closed_at, r.note, r.review_note, r.reason, r.waiting, r.revision,
	r.expected, r.staged, r.released, r.superseded, r.superseded_undelivered, r.skipped, r.n_insert, r.n_overwrite, r.n_identical,
	r.resume_key, r.upper_key, r.holder, r.lease_until, coalesce(r.layout_id, 0), coalesce(r.result_layout, 0), coalesce(r.shape, ''), r.skip_identical, r.released_up_to, r.reviewed_via,
	r.proof_at, r.proven_key, r.proven_rows, r.position, r.rate, r.duty, r.forecast_at, r.left_p50, r.left_p90,
	r.waiting_since, (SELECT coalesce(sum(t.seconds), 0) FROM backfill_control.throttled t WHERE t.request_id = r.id)::float8`

const requestFrom = ` FROM backfill_control.request r
	JOIN backfill_control.direction d ON d.id = r.direction
	JOIN backfill_control.table_config t ON t.id = r.table_id `

func scanRequest(row pgx.CollectableRow) (*backfill.Request, error) {
	var r backfill.Request
	var by *string
	var ins, over, same int64
	var throttled float64
	err := row.Scan(&r.ID, &r.Table, &r.Direction.ID, &r.Site, &r.From, &r.To, &r.Mode, &r.Key, &r.State, &r.Paused,
		&r.RequestedBy, &r.RequestedAt, &r.StartedAt, &r.WalkedAt, &by, &r.ReviewedAt, &r.ClosedAt, &r.Note, &r.ReviewNote, &r.Reason, &r.Waiting, &r.Revision,
		&r.Expected, &r.Staged, &r.Released, &r.Superseded, &r.SupersededUndelivered, &r.Skipped, &ins, &over, &same,
		&r.ResumeKey, &r.UpperKey, &r.LeaseHolder, &r.LeaseUntil, &r.LayoutID, &r.ResultLayoutID, &r.Shape, &r.SkipIdentical, &r.ReleasedUpTo, &r.ReviewedVia,
		&r.ProofAt, &r.ProvenKey, &r.ProvenRows, &r.Position, &r.UnthrottledRate, &r.Duty, &r.ForecastAt, &r.LeftP50, &r.LeftP90,
		&r.WaitingSince, &throttled)
	r.Throttled = time.Duration(throttled * float64(time.Second))
	if by != nil {
		r.ReviewedBy = *by
	}
	r.Effects = map[backfill.Effect]int64{backfill.Insert: ins, backfill.Overwrite: over, backfill.Identical: same,
		backfill.Unknown: r.Staged - ins - over - same}
	return &r, err
}

// NewRequest is what somebody asks for.
type NewRequest struct {
	Direction int32
	TableID   int32
	Key       backfill.Key // nil: the whole table
	Mode      backfill.Mode
	Proof     int64 // of mode differences: the reconciliation whose keys are walked
	By, Note  string
}

// CreateRequest records a request. When one is open already for the same table
// and direction (or the same row) it returns a Conflict that names it; the unique
// index decides any race.
func (s *Store) CreateRequest(ctx context.Context, n NewRequest) (*backfill.Request, error) {
	var id, open int64
	err := s.in(ctx, func(tx pgx.Tx) error {
		var table int32
		if err := tx.QueryRow(ctx, `SELECT id FROM backfill_control.table_config WHERE id = $1 AND removed_at IS NULL FOR KEY SHARE`, n.TableID).Scan(&table); err != nil {
			return one(err, "table %d: it was removed from its site", n.TableID)
		}
		err := tx.QueryRow(ctx, `
			INSERT INTO backfill_control.request (direction, table_id, mode, key, requested_by, note, run_id)
			VALUES ($1, $2, $3, $4, $5, $6, nullif($7::bigint, 0))
			ON CONFLICT (direction, table_id, coalesce(key, '{}')) WHERE state IN ('PENDING', 'IN_PROGRESS', 'AWAITING_REVIEW', 'RELEASING')
			DO NOTHING RETURNING id`, n.Direction, n.TableID, n.Mode, n.Key, n.By, n.Note, n.Proof).Scan(&id)
		if errors.Is(err, pgx.ErrNoRows) {
			return tx.QueryRow(ctx, `
				SELECT id FROM backfill_control.request
				 WHERE direction = $1 AND table_id = $2 AND key IS NOT DISTINCT FROM $3 AND state = ANY ($4)`,
				n.Direction, n.TableID, n.Key, backfill.OpenStates()).Scan(&open)
		}
		if err != nil {
			return err
		}
		if err := auditRequest(ctx, tx, id, n.By, "backfill.request", map[string]any{"note": n.Note, "mode": n.Mode}); err != nil {
			return err
		}
		return notifyID(ctx, tx, "request", id)
	})
	if errors.Is(err, pgx.ErrNoRows) {
		// The one in the way closed between the two statements.
		return nil, backfill.Errorf(backfill.Conflict, "a request for this table and direction has just closed: ask again")
	}
	if err != nil {
		return nil, err
	}
	if open != 0 {
		return nil, &backfill.Error{Code: backfill.Conflict, Open: open,
			Message: fmt.Sprintf("request %d is open for this table and direction: decide or cancel it first", open)}
	}
	return s.Request(ctx, id)
}

// Request returns one request, or NotFound.
func (s *Store) Request(ctx context.Context, id int64) (*backfill.Request, error) {
	rows, err := s.pool.Query(ctx, `SELECT `+requestColumns+requestFrom+`WHERE r.id = $1`, id)
	if err != nil {
		return nil, err
	}
	r, err := pgx.CollectExactlyOneRow(rows, scanRequest)
	return r, one(err, "request %d", id)
}

// RequestFilter narrows a list of requests; zero fields do not narrow.
type RequestFilter struct {
	Site, Table, From string   // Table in the spelling it is stored in
	Sites             []string // any of these, nil for all
	States            []string
	Before            int64 // ids below
	Limit             int
}

// Requests lists requests newest first.
func (s *Store) Requests(ctx context.Context, f RequestFilter) ([]*backfill.Request, error) {
	rows, err := s.pool.Query(ctx, `SELECT `+requestColumns+requestFrom+`
		 WHERE ($1 = '' OR d.site = $1) AND ($2 = '' OR t.name = $2) AND ($3 = '' OR d.from_side = $3)
		   AND (cardinality($4::text[]) IS NULL OR r.state = ANY ($4)) AND ($5 = 0 OR r.id < $5) AND ($7::text[] IS NULL OR d.site = ANY ($7))
		 ORDER BY r.id DESC LIMIT $6`, f.Site, f.Table, f.From, f.States, f.Before, f.Limit, f.Sites)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, scanRequest)
}

// Decision is what a person decided about the staged rows of a request.
type Decision struct {
	By            string
	Revision      int64 // of the staged set that was read
	Note          string
	SkipIdentical bool   // approve all but the rows the receiver holds already
	Via           string // by what way it came, "" for the API
}

// Approve lets the staged rows of a request be released. It is a Conflict, and
// changes nothing, unless the request awaits review at just that revision.
func (s *Store) Approve(ctx context.Context, id int64, d Decision) (*backfill.Request, error) {
	return s.decide(ctx, id, d, backfill.Releasing, "backfill.approve")
}

// Reject closes a request and sends nothing; its staged rows stay readable.
func (s *Store) Reject(ctx context.Context, id int64, d Decision) (*backfill.Request, error) {
	if strings.TrimSpace(d.Note) == "" {
		return nil, &backfill.Error{Code: backfill.Invalid, Message: "a rejection needs a note that says why",
			Fields: []backfill.FieldError{{Field: "note", Message: "is empty"}}}
	}
	return s.decide(ctx, id, d, backfill.Rejected, "backfill.reject")
}

func (s *Store) decide(ctx context.Context, id int64, d Decision, to backfill.State, action string) (*backfill.Request, error) {
	if err := backfill.CheckPerson(d.By); err != nil {
		return nil, err
	}
	err := s.in(ctx, func(tx pgx.Tx) error {
		// The conditions are in the statement that changes the row: the first decision wins.
		tag, err := tx.Exec(ctx, `
			UPDATE backfill_control.request r
			   SET state = $2, reviewed_by = $3, reviewed_via = $8, reviewed_at = clock_timestamp(), review_note = $4, skip_identical = $5,
			       paused = false, waiting = '', closed_at = CASE WHEN $2 = 'REJECTED' THEN clock_timestamp() END
			 WHERE id = $1 AND state = ANY ($6) AND revision = $7
			   AND NOT ($2 = 'RELEASING' AND lower(btrim(requested_by)) = lower(btrim($3))
			            AND EXISTS (SELECT FROM backfill_control.direction d JOIN backfill_control.site s ON s.name = d.site WHERE d.id = r.direction AND s.second_person))`,
			id, to, d.By, d.Note, d.SkipIdentical, backfill.Before(to), d.Revision, d.Via)
		if err != nil {
			return err
		}
		if tag.RowsAffected() == 0 {
			return whyUndecided(ctx, tx, id, d.Revision)
		}
		detail := map[string]any{"revision": d.Revision, "note": d.Note, "skip_identical": d.SkipIdentical}
		if d.Via != "" {
			detail["via"] = d.Via
		}
		if err := auditRequest(ctx, tx, id, d.By, action, detail); err != nil {
			return err
		}
		return notifyID(ctx, tx, "request", id)
	})
	if err != nil {
		return nil, err
	}
	return s.Request(ctx, id)
}

func whyUndecided(ctx context.Context, tx pgx.Tx, id, revision int64) error {
	var state backfill.State
	var current int64
	err := tx.QueryRow(ctx, `SELECT state, revision FROM backfill_control.request WHERE id = $1`, id).Scan(&state, &current)
	if err != nil {
		return one(err, "request %d", id)
	}
	if state == backfill.AwaitingReview && current == revision {
		return backfill.SecondPerson(id)
	}
	if state == backfill.AwaitingReview {
		return backfill.Errorf(backfill.Conflict, "request %d stands at revision %d, the decision is for revision %d: read the rows again", id, current, revision)
	}
	return backfill.Errorf(backfill.Conflict, "request %d is %s: only a request that is %s can be decided", id, state, backfill.AwaitingReview)
}

// Close ends an open request as CANCELLED or FAILED, wherever it stands. What was
// released stays released. It is a Conflict when the request is closed already.
func (s *Store) Close(ctx context.Context, id int64, by string, to backfill.State, reason string) (*backfill.Request, error) {
	err := s.in(ctx, func(tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, `
			UPDATE backfill_control.request
			   SET state = $2, reason = $3, closed_at = clock_timestamp(), paused = false, waiting = ''
			 WHERE id = $1 AND state = ANY ($4)`, id, to, reason, backfill.Before(to))
		if err != nil {
			return err
		}
		if tag.RowsAffected() == 0 {
			var state backfill.State
			if err := tx.QueryRow(ctx, `SELECT state FROM backfill_control.request WHERE id = $1`, id).Scan(&state); err != nil {
				return one(err, "request %d", id)
			}
			return backfill.Errorf(backfill.Conflict, "request %d is %s already", id, state)
		}
		if err := auditRequest(ctx, tx, id, by, "backfill."+strings.ToLower(string(to)), map[string]any{"reason": reason}); err != nil {
			return err
		}
		return notifyID(ctx, tx, "request", id)
	})
	if err != nil {
		return nil, err
	}
	return s.Request(ctx, id)
}

// Pause holds a walk or a release at its next page or batch boundary; with
// paused false it goes on.
func (s *Store) Pause(ctx context.Context, id int64, by, note string, paused bool) (*backfill.Request, error) {
	action := map[bool]string{true: "backfill.pause", false: "backfill.resume"}[paused]
	err := s.in(ctx, func(tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, `
			UPDATE backfill_control.request SET paused = $2, waiting = CASE WHEN $2 THEN 'paused by ' || $3 || CASE WHEN $4 = '' THEN '' ELSE ': ' || $4 END ELSE '' END, waiting_since = NULL
			 WHERE id = $1 AND paused <> $2 AND state IN ('PENDING', 'IN_PROGRESS', 'RELEASING')`, id, paused, by, note)
		if err != nil {
			return err
		}
		if tag.RowsAffected() == 0 {
			r := backfill.Request{ID: id}
			if err := tx.QueryRow(ctx, `SELECT state, paused FROM backfill_control.request WHERE id = $1`, id).Scan(&r.State, &r.Paused); err != nil {
				return one(err, "request %d", id)
			}
			if err := r.Pausable(paused); err != nil {
				return err
			}
			return backfill.Errorf(backfill.Conflict, "request %d has just changed: try again", id)
		}
		if err := auditRequest(ctx, tx, id, by, action, map[string]any{"note": note}); err != nil {
			return err
		}
		return notifyID(ctx, tx, "request", id)
	})
	if err != nil {
		return nil, err
	}
	return s.Request(ctx, id)
}

func auditRequest(ctx context.Context, tx pgx.Tx, id int64, by, action string, detail map[string]any) error {
	var site, subject string
	if err := tx.QueryRow(ctx, `SELECT d.site, 'request ' || r.id || ' of ' || t.name || ' from ' || d.from_side`+requestFrom+`WHERE r.id = $1`, id).Scan(&site, &subject); err != nil {
		return err
	}
	return audit(ctx, tx, by, action, site, subject, detail)
}
