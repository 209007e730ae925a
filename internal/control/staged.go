package control

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"backfill/internal/backfill"
	"backfill/internal/row"
)

// StagedRow is one row a walk has read. Row and Receiver follow the columns of
// the request's layout; nil is SQL NULL.
type StagedRow struct {
	N            int64
	Key          backfill.Key
	Row          []*string
	Effect       backfill.Effect
	Receiver     []*string // what the receiver holds, for an overwrite; with a mapping in the columns that it makes
	Result       []*string // what a mapping makes of the row, in these columns
	Problem      string    // why it cannot
	SupersededBy *int64
	Overtaken    *Overtaking // by what, when SupersededBy is set and it is still in history
}

// Sent is the row as the receiver would hold it.
func (r *StagedRow) Sent() []*string {
	if r.Result != nil {
		return r.Result
	}
	return r.Row
}

// Overtaking is the change that a staged row gave way to.
type Overtaking struct {
	Seq   int64
	Op    string // create, update, delete, truncate
	At    time.Time
	State string // as an Entry's
}

// StagedRows returns up to limit staged rows of a request after position after,
// in key order; effect "" means all.
func (s *Store) StagedRows(ctx context.Context, id int64, effect backfill.Effect, after int64, limit int) ([]StagedRow, error) {
	// Which rows, which have numbers without gaps, then each by its number: a planner that knows nothing of the request
	// would rather read all of it once.
	const show = `
		SELECT s.n, s.key, s.row, coalesce(e.effect, j.uniform), e.receiver, e.result, coalesce(e.problem, ''), s.superseded_by, o.op, o.at, o.state
		  FROM wanted CROSS JOIN LATERAL (SELECT * FROM backfill_control.staged WHERE request_id = $1 AND n = wanted.n OFFSET 0) s
		  LEFT JOIN LATERAL (SELECT effect, receiver, result, problem FROM backfill_control.effect WHERE request_id = $1 AND n = wanted.n OFFSET 0) e ON true
		  LEFT JOIN LATERAL (SELECT uniform FROM backfill_control.judged WHERE request_id = $1 AND upto >= wanted.n ORDER BY upto LIMIT 1) j ON true
		  LEFT JOIN LATERAL (SELECT x.created_at AS at, ` + opOf + ` AS op, ` + stateOf + ` AS state
		      FROM backfill_control.request r JOIN backfill_control.direction o ON o.id = r.direction
		      JOIN backfill_control.direction d ON d.site = o.site -- a two-way table's rows give way to the reverse one too
		      JOIN backfill_control.entry x ON x.direction = d.id AND x.seq = s.superseded_by` + asideOf + `
		     WHERE r.id = $1 AND s.superseded_by IS NOT NULL) o ON true
		 ORDER BY s.n`
	var sql string
	args := []any{id, after, limit}
	switch effect {
	case "":
		sql = `WITH wanted AS MATERIALIZED (SELECT n FROM backfill_control.staged WHERE request_id = $1 AND n > $2 AND n <= $2 + $3 ORDER BY n)`
	case backfill.Superseded:
		sql = `WITH wanted AS MATERIALIZED (
			    SELECT n FROM backfill_control.staged WHERE request_id = $1 AND n > $2 AND superseded_by IS NOT NULL ORDER BY request_id, n LIMIT $3)`
	case backfill.Unknown:
		// Those that were looked at in vain, then those behind the last one looked at.
		sql = `WITH wanted AS MATERIALIZED (
			    (SELECT n FROM backfill_control.effect WHERE request_id = $1 AND effect = '?' AND n > $2 ORDER BY request_id, effect, n LIMIT $3)
			    UNION ALL
			    (SELECT n FROM backfill_control.staged, (SELECT greatest($2, classified) AS after FROM backfill_control.request WHERE id = $1 OFFSET 0) r
			      WHERE request_id = $1 AND n > r.after AND n <= r.after + $3)
			    ORDER BY n LIMIT $3)`
	default:
		// Through the index by effect, so that a rare effect is found without reading the
		// others, and from the first chunks that have no other.
		sql = `WITH chunk AS (SELECT coalesce(lag(upto) OVER (ORDER BY upto), 0) AS start, upto, uniform FROM backfill_control.judged WHERE request_id = $1),
			near AS (SELECT greatest(start, $2) AS start, upto, sum(upto - greatest(start, $2)) OVER (ORDER BY upto) AS hits
			           FROM chunk WHERE uniform = $4::"char" AND upto > $2),
			wanted AS MATERIALIZED (
			    (SELECT n FROM backfill_control.effect WHERE request_id = $1 AND effect = $4::"char" AND n > $2 ORDER BY request_id, effect, n LIMIT $3)
			    UNION ALL
			    (SELECT n FROM near, generate_series(start + 1, least(upto, start + $3)) n WHERE hits - (upto - start) < $3)
			    ORDER BY n LIMIT $3)`
		args = append(args, effectCodes[effect])
	}
	var all []StagedRow
	err := s.inOrder(ctx, func(tx pgx.Tx) error {
		rows, err := tx.Query(ctx, sql+show, args...)
		if err != nil {
			return err
		}
		all, err = pgx.CollectRows(rows, func(r pgx.CollectableRow) (x StagedRow, err error) {
			var code, op, state *string
			var at *time.Time
			err = r.Scan(&x.N, &x.Key, &x.Row, &code, &x.Receiver, &x.Result, &x.Problem, &x.SupersededBy, &op, &at, &state)
			x.Effect = effectOf(code)
			if op != nil {
				x.Overtaken = &Overtaking{*x.SupersededBy, *op, *at, *state}
			}
			return x, err
		})
		return err
	})
	return all, err
}

// effectCodes is how effects are stored. A row that nobody has looked at has none.
var effectCodes = map[backfill.Effect]string{backfill.Insert: "i", backfill.Overwrite: "o", backfill.Identical: "=", backfill.Unknown: "?"}

func effectOf(code *string) backfill.Effect {
	for effect, c := range effectCodes {
		if code != nil && c == *code {
			return effect
		}
	}
	return backfill.Unknown
}

// judgedChunks lists a request's chunks of judged rows with how many rows of an
// effect ($2) each holds, and one more for the rows behind them. hits is before
// plus the chunk's own.
const judgedChunks = `
	WITH chunk AS (
	    SELECT coalesce(lag(upto) OVER (ORDER BY upto), 0) AS start, upto, n_insert, n_overwrite, n_identical, uniform
	      FROM backfill_control.judged WHERE request_id = $1
	    UNION ALL
	    SELECT classified, staged, 0, 0, 0, NULL FROM backfill_control.request WHERE id = $1 AND staged > classified),
	counted AS (
	    SELECT start, upto, uniform, CASE $2::"char" WHEN 'i' THEN n_insert WHEN 'o' THEN n_overwrite WHEN '=' THEN n_identical
	                                        ELSE upto - start - n_insert - n_overwrite - n_identical END AS own FROM chunk),
	summed AS (SELECT start, upto, uniform, own, coalesce(sum(own) OVER (ORDER BY start ROWS UNBOUNDED PRECEDING), 0)::bigint AS hits FROM counted)`

// StagedAt returns the staged position after which the rows of an effect go on
// once skip of them were passed; effect "" means all.
func (s *Store) StagedAt(ctx context.Context, id int64, effect backfill.Effect, skip int64) (after int64, err error) {
	switch effect {
	case "":
		return skip, nil
	case backfill.Superseded:
		err = s.pool.QueryRow(ctx, `
			SELECT coalesce((SELECT n - 1 FROM backfill_control.staged WHERE request_id = $1 AND superseded_by IS NOT NULL ORDER BY n OFFSET $2 LIMIT 1),
			                (SELECT staged FROM backfill_control.request WHERE id = $1), 0)`, id, skip).Scan(&after)
		return after, err
	}
	err = s.pool.QueryRow(ctx, judgedChunks+`,
		found AS (SELECT start, upto, uniform, $3 - (hits - own) AS left_over FROM summed WHERE hits > $3 ORDER BY start LIMIT 1)
		SELECT coalesce(
		    (SELECT CASE WHEN f.start < r.classified AND f.uniform IS NULL
		                 THEN (SELECT e.n - 1 FROM backfill_control.effect e
		                        WHERE e.request_id = $1 AND e.effect = $2::"char" AND e.n > f.start AND e.n <= f.upto ORDER BY e.n OFFSET f.left_over LIMIT 1)
		                 ELSE f.start + f.left_over END
		       FROM found f, backfill_control.request r WHERE r.id = $1),
		    (SELECT staged FROM backfill_control.request WHERE id = $1), 0)`, id, effectCodes[effect], skip).Scan(&after)
	return after, err
}

// StagedRank returns how many staged rows of an effect stand at or before a
// position; effect "" means all.
func (s *Store) StagedRank(ctx context.Context, id int64, effect backfill.Effect, n int64) (rank int64, err error) {
	switch effect {
	case "":
		return n, nil
	case backfill.Superseded:
		err = s.pool.QueryRow(ctx, `SELECT count(*) FROM backfill_control.staged WHERE request_id = $1 AND superseded_by IS NOT NULL AND n <= $2`, id, n).Scan(&rank)
		return rank, err
	}
	err = s.pool.QueryRow(ctx, judgedChunks+`
		SELECT coalesce((SELECT hits FROM summed WHERE upto <= $3 ORDER BY upto DESC LIMIT 1), 0)
		     + coalesce((SELECT CASE WHEN c.start >= r.classified THEN CASE WHEN $2::"char" = '?' THEN $3 - c.start ELSE 0 END
		                             WHEN c.uniform IS NOT NULL THEN CASE WHEN c.uniform = $2::"char" THEN $3 - c.start ELSE 0 END
		                             ELSE (SELECT count(*) FROM backfill_control.effect e
		                                    WHERE e.request_id = $1 AND e.effect = $2::"char" AND e.n > c.start AND e.n <= $3) END
		                   FROM summed c, backfill_control.request r WHERE r.id = $1 AND c.start < $3 AND c.upto > $3), 0)`,
		id, effectCodes[effect], n).Scan(&rank)
	return rank, err
}

// keyIs is the SQL for "the staged row s has this key", in the terms of the index of
// staged keys.
func keyIs(key string) string {
	return "octet_length(s.key[1]) = octet_length((" + key + ")[1]) AND s.key = " + key
}

// StagedKey returns the position of the staged row of a key, and how many rows
// come before where the key stands. When no row has it, exact is false, and the
// place is found by comparing keys with the types they have on the source, some
// twenty of them. Types and collations that this database does not know make that
// Invalid: such keys are found only exactly. Texts are compared by this database's
// collation, so in another's order the place is a near one.
func (s *Store) StagedKey(ctx context.Context, id int64, layout *row.Layout, key backfill.Key) (before int64, exact bool, err error) {
	var staged int64
	var n *int64
	if err := s.pool.QueryRow(ctx, `
		SELECT staged, (SELECT n FROM backfill_control.staged s WHERE request_id = $1 AND `+keyIs("$2::text[]")+`) FROM backfill_control.request WHERE id = $1`,
		id, key).Scan(&staged, &n); err != nil {
		return 0, false, one(err, "request %d", id)
	}
	if n != nil {
		return *n - 1, true, nil
	}
	if ok, err := s.ordersKeys(ctx, layout); err != nil {
		return 0, false, err
	} else if !ok {
		return 0, false, noSuchKey(layout, key, "keys of this type are found only exactly")
	}
	// Rows up to low come before the key, those above high do not.
	err = s.pool.QueryRow(ctx, fmt.Sprintf(`
		WITH RECURSIVE search (low, high) AS (
		    SELECT 0::bigint, $2::bigint
		    UNION ALL
		    SELECT CASE WHEN c.before THEN m.middle ELSE b.low END, CASE WHEN c.before THEN b.high ELSE m.middle - 1 END
		      FROM search b, LATERAL (SELECT (b.low + b.high + 1) / 2 AS middle) m,
		           LATERAL (SELECT ROW(%s) < ROW(%s) AS before FROM backfill_control.staged s WHERE s.request_id = $1 AND s.n = m.middle) c
		     WHERE b.low < b.high)
		SELECT max(low) FROM search`, strings.Join(layout.KeyFrom("s.key"), ", "), strings.Join(layout.KeyFrom("$3::text[]"), ", ")), id, staged, key).Scan(&before)
	if state := sqlState(err); strings.HasPrefix(state, "22") {
		return 0, false, noSuchKey(layout, key, "it is no value of the key's type")
	}
	return before, false, err
}

// ordersKeys reports whether this database knows the types of a key and their order.
func (s *Store) ordersKeys(ctx context.Context, layout *row.Layout) (known bool, err error) {
	var types, collations []string
	for _, c := range layout.KeyColumns() {
		if c.Operators != "" || c.Comparisons != nil {
			return false, nil
		}
		types = append(types, c.Type)
		if c.Collation != "" {
			collations = append(collations, c.Collation)
		}
	}
	err = s.pool.QueryRow(ctx, `
		SELECT (SELECT bool_and(to_regtype(t) IS NOT NULL) FROM unnest($1::text[]) t)
		   AND (SELECT coalesce(bool_and(to_regcollation(c) IS NOT NULL), true) FROM unnest($2::text[]) c)`, types, collations).Scan(&known)
	return known, err
}

// Reads reports whether a text is a value of a type. What this database cannot judge, such
// as a type of the sides' own, is taken for one.
func (s *Store) Reads(ctx context.Context, typ, text string) (bool, error) {
	var known string
	err := s.pool.QueryRow(ctx, `
		SELECT format_type(oid, NULL) FROM pg_type
		 WHERE oid = to_regtype($1) AND typnamespace = 'pg_catalog'::regnamespace AND typtype IN ('b', 'r', 'm')`, typ).Scan(&known)
	if errors.Is(err, pgx.ErrNoRows) {
		return true, nil
	}
	if err != nil {
		return false, err
	}
	var null bool
	err = s.pool.QueryRow(ctx, `SELECT CAST($1::text AS `+known+`) IS NULL`, text).Scan(&null)
	switch state := sqlState(err); {
	case strings.HasPrefix(state, "22"):
		return false, nil
	case strings.HasPrefix(state, "0A"), strings.HasPrefix(state, "42"): // a type without values, or without a cast
		return true, nil
	}
	return err == nil, err
}

func noSuchKey(layout *row.Layout, key backfill.Key, why string) error {
	return &backfill.Error{Code: backfill.Invalid, Message: fmt.Sprintf("no staged row has the key (%s) = (%.100s): %s", strings.Join(layout.Key, ", "), key, why),
		Fields: []backfill.FieldError{{Field: "from_key", Message: why}}}
}
